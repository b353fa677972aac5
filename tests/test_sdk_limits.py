"""What a caller can do wrong or too much of, and what the cache makes of it."""

from __future__ import annotations

import gc
import os
import signal
import threading

import numpy as np
import pytest

import tierkv
from tests.processes import wait_for
from tests.sdk_node import SdkNode
from tests.sdk_world import BLOCK_TOKENS, Memory
from tierkv.device.cpu import CpuCopyEngine
from tierkv.hashing import block_hashes

MANY = 5_000  # more than one request asks slots for


@pytest.fixture
def node(tmp_path):
    node = SdkNode(tmp_path, slots=16)
    yield node
    node.close()


def test_a_store_of_more_blocks_than_one_request_takes_goes_in_parts(tmp_path):
    node = SdkNode(tmp_path, slots=MANY)
    try:
        array = np.arange(MANY * 8, dtype=np.int32).reshape(MANY, 8)
        with tierkv.Cache(
            {"kv": array}, model="many", block_tokens=BLOCK_TOKENS, config=node.settings()
        ) as cache:
            assert cache.wait_ready()
            keys = cache.hash_tokens(range(MANY * BLOCK_TOKENS))
            assert cache.store(keys, range(MANY)) == MANY
            stored = array.copy()
            array[:] = -1
            with cache.lookup(keys) as hit:
                assert hit.blocks == MANY
                assert cache.load(hit, range(MANY)) == MANY
            assert np.array_equal(array, stored)
    finally:
        node.close()


def test_lookups_that_will_not_wait_say_nothing_against_the_daemon(node):
    seat = node.seat("impatient")
    seat.share("ab")
    daemon = node.admin.welcome.pid
    os.kill(daemon, signal.SIGSTOP)
    try:
        for _ in range(20):
            with seat.cache.lookup(seat.keys("ab"), wait_s=0) as hit:
                assert hit.blocks == 0
        assert seat.cache.is_ready, "the breaker did not open"
    finally:
        os.kill(daemon, signal.SIGCONT)
    seat.hit("ab", 2)


class BrokenEngine(CpuCopyEngine):
    """Raises once, in `submit` or when it is asked whether a copy has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.breaks = ""

    def go_on(self) -> None:
        """It has no gates."""

    def submit(self, direction, copies):
        if self.breaks == "submit":
            self.breaks = ""
            raise OSError("the device is gone")
        event = super().submit(direction, copies)
        return BrokenEvent(self, event)


class BrokenEvent:
    def __init__(self, engine: BrokenEngine, event) -> None:
        self._engine = engine
        self._event = event

    def is_done(self) -> bool:
        if self._engine.breaks == "is_done":
            self._engine.breaks = ""
            raise OSError("the device is gone")
        return self._event.is_done()

    def wait(self) -> None:
        self._event.wait()

    @property
    def is_ok(self) -> bool:
        return self._event.is_ok


@pytest.mark.parametrize("place", ["submit", "is_done"])
@pytest.mark.parametrize("verb", ["load", "store"])
def test_a_copy_engine_that_raises_costs_one_copy(node, verb, place):
    engine = BrokenEngine()
    seat = node.seat(f"{verb} {place}", copy_engine=engine)
    seat.share("ab")
    keys = seat.keys("abcd")
    with seat.cache.lookup(keys[:2]) as hit:
        assert hit.blocks == 2
        engine.breaks = place
        with pytest.raises(OSError, match="the device is gone"):
            if verb == "load":
                seat.cache.load(hit, seat.targets[:2])
            else:
                seat.cache.store(keys[2:], seat.fill(keys)[2:], after=keys[1])
        wait_for(seat.cache.is_idle, what="the end of the failed copy")
    seat.hit("abcd", 2)
    assert seat.store("cd", behind="ab") == 2


def test_a_hit_that_is_dropped_unreleased_is_released_for_its_owner(node, caplog):
    seat = node.seat("forgetful")
    seat.share("ab")
    for _ in range(3):
        assert seat.cache.lookup(seat.keys("ab")).blocks == 2
    gc.collect()
    seat.cache.poll()
    wait_for(lambda: node.held() == (0, 0), what="the end of their leases")
    assert caplog.text.count("dropped unreleased") == 1


def test_a_cache_that_is_dropped_leaves_no_threads(node):
    def ours() -> int:
        return sum(thread.name.startswith("tierkv") for thread in threading.enumerate())

    before = ours()
    cache = tierkv.Cache(
        Memory("numpy", 2).tensors, model="dropped", block_tokens=4, config=node.settings()
    )
    assert ours() > before
    del cache
    gc.collect()
    wait_for(lambda: ours() == before, what="the end of its threads")


@pytest.mark.parametrize("dtype", [[("x", "<i2")], "V2", "int16"])
def test_arrays_of_other_types_share_nothing(node, dtype):
    arrays = [np.zeros((4, 8), kind) for kind in ([("x", "<f2")], dtype)]
    spaces = []
    for array in arrays:
        memory = Memory("numpy", 2)
        memory.tensors = {"kv": array}
        spaces.append(node.cache(memory, "types", is_ready=False).namespace)
    assert len(set(spaces)) == 2


def test_numbers_of_extras_count_in_the_tokens_that_are_given():
    head = block_hashes(range(16), 4)
    behind = [
        block_hashes(range(16, 32), 4, after=head[-1], extras={1: picture})
        for picture in (b"a cat", b"a dog")
    ]
    assert behind[0][0] == behind[1][0]
    assert behind[0][1] != behind[1][1]
    with pytest.raises(ValueError, match="block 5 is not among the 4"):
        block_hashes(range(16, 32), 4, after=head[-1], extras={5: b"a cat"})


def test_hashes_go_on_where_an_earlier_call_ended():
    whole = block_hashes(range(40), 4, salt=b"s", adapter=b"a")
    head = block_hashes(range(16), 4, salt=b"s", adapter=b"a")
    assert head + block_hashes(range(16, 40), 4, after=head[-1]) == whole
    with pytest.raises(ValueError, match="none of this algorithm"):
        block_hashes(range(4), 4, after=head[-1], algorithm="xxh3")


WRONG_KEYS = {
    "given twice": lambda keys: [keys[0], keys[1], keys[0]],
    "bytes of one length": lambda keys: [keys[0], keys[1] + b"x"],
    "as `hash_tokens` gives them": lambda keys: [b"k"],
    "must be bytes": lambda keys: ["text"],
}


@pytest.mark.parametrize("problem", WRONG_KEYS)
def test_keys_that_the_daemon_would_not_take_never_reach_it(node, problem):
    seat = node.seat("keys")
    keys = WRONG_KEYS[problem](seat.keys("ab"))
    calls = (
        lambda: seat.cache.lookup(keys),
        lambda: seat.cache.touch(keys),
        lambda: seat.cache.prefetch(keys),
        lambda: seat.cache.store(keys, range(len(keys))),
    )
    for call in calls:
        with pytest.raises(tierkv.UsageError, match=problem):
            call()
    assert seat.share("ab") == 2
    assert node.stats()["counters"].get("protocol_errors", 0) == 0


def test_a_load_may_begin_anywhere_in_its_hit(node):
    seat = node.seat("from the middle")
    seat.share("abcd")
    keys, targets = seat.keys("abcd"), seat.targets[:2]
    seat.memory.wipe(*targets)
    with seat.cache.lookup(keys) as hit:
        assert seat.cache.load(hit, targets, first=2) == 2
        assert seat.cache.load(hit, []) == 0
        with pytest.raises(tierkv.UsageError, match="from block 3 on"):
            seat.cache.load(hit, targets, first=3)
    assert all(seat.memory.is_right(b, k) for b, k in zip(targets, keys[2:], strict=True))
