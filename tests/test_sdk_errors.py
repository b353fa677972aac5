"""What the SDK refuses, and with which error. Nothing of what is refused changes any memory."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import tierkv
from tests.processes import wait_for
from tests.sdk_node import SdkNode, users_of
from tests.sdk_world import BLOCK_TOKENS, KINDS, Memory, Seat, SteppedEngine
from tierkv.device.base import Direction
from tierkv.errors import LayoutMismatchError, LoadFailedError, TierKVError, UsageError

BLOCKS = 16


@pytest.fixture(scope="module")
def external(tmp_path_factory):
    node = SdkNode(tmp_path_factory.mktemp("sdk"), slots=512, extent_slots=8)
    yield node
    node.close()


@pytest.fixture
def node(external):
    with users_of(external):
        yield external


@pytest.fixture(params=KINDS)
def seat(request, node) -> Seat:
    seat = node.seat(request.node.name, request.param)
    assert seat.store("abcd") == 4
    return seat


def test_all_errors_of_the_sdk_are_below_one_class():
    for error in (LayoutMismatchError, LoadFailedError, UsageError, tierkv.ConfigError):
        assert issubclass(error, TierKVError)


# ---- tensors -----------------------------------------------------------------------------------


def overlapping_numpy() -> dict[str, object]:
    whole = np.zeros((BLOCKS, 2, 8), "float16")
    return {"k": whole[:, 0], "v": whole[:, :1].reshape(BLOCKS, 8)[:, :4]}


def shifted(module) -> dict[str, object]:
    flat = module.zeros(BLOCKS * 8 + 4, dtype=module.float16)
    return {"k": flat[: BLOCKS * 8].reshape(BLOCKS, 8), "v": flat[4:].reshape(BLOCKS, 8)}


BAD_TENSORS = {
    "no tensors": lambda: {},
    "a block with gaps, numpy": lambda: {"k": np.zeros((BLOCKS, 8, 4), "float16")[:, :, ::2]},
    "a block with gaps, torch": lambda: {"k": torch.zeros(BLOCKS, 8, 4)[:, :, ::2]},
    "a transposed block, numpy": lambda: {"k": np.zeros((BLOCKS, 8, 4)).transpose(0, 2, 1)},
    "a transposed block, torch": lambda: {"k": torch.zeros(BLOCKS, 8, 4).transpose(1, 2)},
    "blocks in the last dimension": lambda: {"k": np.zeros((8, BLOCKS)).T},
    "other numbers of blocks": lambda: {"k": np.zeros((BLOCKS, 8)), "v": np.zeros((BLOCKS + 1, 8))},
    "other numbers of blocks, mixed": lambda: {
        "k": torch.zeros(BLOCKS, 8),
        "v": np.zeros((BLOCKS - 1, 8), "float32"),
    },
    "the same tensor twice": lambda: dict.fromkeys("kv", np.zeros((BLOCKS, 8))),
    "overlapping tensors, numpy": lambda: shifted(np),
    "overlapping tensors, torch": lambda: shifted(torch),
    "overlapping parts of each block": overlapping_numpy,
    "blocks that overlap each other": lambda: {
        "k": np.lib.stride_tricks.as_strided(np.zeros(BLOCKS + 8), (BLOCKS, 8), (8, 8))
    },
    "one block in all places": lambda: {"k": torch.zeros(1, 8).expand(BLOCKS, 8)},
    "a tensor without memory": lambda: {"k": torch.zeros(BLOCKS, 8, device="meta")},
    "no dimension, numpy": lambda: {"k": np.zeros(())},
    "no dimension, torch": lambda: {"k": torch.zeros(())},
    "no blocks": lambda: {"k": np.zeros((0, 8))},
    "blocks without bytes": lambda: {"k": np.zeros((BLOCKS, 0))},
    "objects": lambda: {"k": np.zeros((BLOCKS, 8), object)},
    "a list": lambda: {"k": [[0.0] * 8] * BLOCKS},
    "a sparse tensor": lambda: {"k": torch.zeros(BLOCKS, 8).to_sparse()},
}


@pytest.mark.parametrize("bad", BAD_TENSORS)
def test_tensors_that_cannot_be_cached_are_refused(node, bad):
    with pytest.raises(LayoutMismatchError) as error:
        tierkv.Cache(
            BAD_TENSORS[bad](), model="m", block_tokens=BLOCK_TOKENS, config=node.settings()
        ).close()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) > 20, "it says what is wrong"


def test_a_read_only_array_is_refused(node):
    """A load could not write it."""
    memory = Memory("numpy", BLOCKS)
    for tensor in memory.tensors.values():
        tensor.flags.writeable = False
    with pytest.raises(LayoutMismatchError, match="read-only"):
        node.cache(memory, "read only", is_ready=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_tokens": 0},
        {"block_tokens": -1},
        {"hash_algorithm": "md5"},
        {"hash_algorithm": ""},
        {"model": ""},
        {"facts": {"a": object()}},
        {"facts": {"a": float("nan")}},
        {"facts": {"a": b"bytes"}},
    ],
    ids=str,
)
def test_arguments_that_make_no_sense_are_refused(node, wrong):
    arguments = {"model": "m", "block_tokens": BLOCK_TOKENS, "config": node.settings()} | wrong
    with pytest.raises(UsageError):
        tierkv.Cache(Memory("numpy", BLOCKS).tensors, **arguments).close()


# ---- tokens ------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [-1, 2**32, 2**70], ids=str)
def test_tokens_out_of_range_are_refused(seat, wrong):
    """Else two prompts would have one key."""
    tokens = [1, 2, 3, wrong]
    for form in (list, tuple, np.array):
        with pytest.raises(UsageError):
            seat.cache.hash_tokens(form(tokens))


@pytest.mark.parametrize("wrong", [1.5, "7", None], ids=str)
def test_tokens_that_are_no_integers_are_refused(seat, wrong):
    with pytest.raises(UsageError):
        seat.cache.hash_tokens([1, 2, 3, wrong])
    with pytest.raises(UsageError):
        seat.cache.hash_tokens(np.array([[1, 2, 3, 4]] * 4))


# ---- blocks ------------------------------------------------------------------------------------

BAD_BLOCKS = {
    "behind the last": [BLOCKS, 0],
    "negative": [0, -1],
    "twice": [3, 3],
    "more than the hit": [8, 9, 10, 11, 12],
    "a fraction": [0.5, 1],
}


@pytest.mark.parametrize("way", ["load", "start_load"])
@pytest.mark.parametrize("bad", BAD_BLOCKS)
def test_blocks_that_cannot_be_loaded_are_refused(seat, bad, way):
    keys = seat.keys("abcd")
    with seat.cache.lookup(keys) as hit:
        assert hit.blocks == 4
        seat.memory.wipe(*range(BLOCKS))
        with pytest.raises(UsageError):
            getattr(seat.cache, way)(hit, BAD_BLOCKS[bad])
        assert all(map(seat.memory.is_wiped, range(BLOCKS)))
        assert seat.load(hit, keys) == 4, "the hit is as good as before"


@pytest.mark.parametrize("way", ["store", "start_store"])
@pytest.mark.parametrize("blocks", [[BLOCKS, 0], [0, -1], [0], [0, 1, 2], [0.5, 1]], ids=str)
def test_blocks_that_cannot_be_stored_are_refused(seat, blocks, way):
    keys = seat.keys("xy")
    seat.fill(keys)
    with pytest.raises(UsageError):
        getattr(seat.cache, way)(keys, blocks)
    seat.miss("xy")
    assert seat.store("xy") == 2
    seat.hit("xy", 2)


def test_one_device_block_may_be_stored_under_two_keys(seat):
    """Not refused: nothing is written to it."""
    keys = seat.keys("xy")
    seat.memory.fill(0, keys[0])
    assert seat.cache.store(keys, [0, 0]) == 2
    with seat.cache.lookup(keys) as hit:
        assert hit.blocks == 2
        assert seat.cache.load(hit, seat.wiped(2)) == 2
    seat.see(seat.targets[:2], [keys[0], keys[0]])


@pytest.mark.parametrize("blocks", [(9, 8, 11, 10), np.array([9, 8, 11, 10]), range(8, 12)])
def test_blocks_come_in_any_sequence(seat, blocks):
    keys = seat.keys("abcd")
    with seat.cache.lookup(keys) as hit:
        seat.wiped(4)
        assert seat.cache.load(hit, blocks) == 4
    seat.see([int(block) for block in blocks], keys)


def test_device_blocks_that_a_copy_is_using_are_refused(node):
    engine = SteppedEngine()
    seat = node.seat("busy", copy_engine=engine)
    assert seat.store("ab") == 2
    keys, more = seat.keys("ab"), seat.keys("xy")
    one, two = seat.wiped(2)
    with seat.cache.lookup(keys) as hit:
        engine.is_stepped = True
        load = seat.cache.start_load(hit, [one])
        store = seat.cache.start_store(more, seat.fill(more))
        wait_for(lambda: engine.waiting[Direction.STORE], seat.cache, what="the store")
        for blocks in ([one, two], [two, one], [two, seat.origins[1]]):
            with pytest.raises(UsageError):
                seat.cache.start_load(hit, blocks)
        with pytest.raises(UsageError):
            seat.cache.start_store(more, [one, two])
        assert not load.is_done
        assert not store.is_done
        engine.go_on()
        assert (load.result(), store.result()) == (1, 2)
        seat.see([one], keys)
        assert seat.cache.load(hit, [two, one]) == 2
    seat.see([two, one], keys)
    seat.hit("xy", 2)


# ---- hits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["load", "start_load"])
def test_a_released_hit_cannot_be_loaded(seat, way):
    with seat.cache.lookup(seat.keys("ab")) as hit:
        assert hit.blocks == 2
    seat.wiped(2)
    with pytest.raises(UsageError):
        getattr(seat.cache, way)(hit, seat.targets[:2])
    assert all(map(seat.memory.is_wiped, seat.targets))


@pytest.mark.parametrize("way", ["load", "start_load"])
def test_a_hit_of_another_cache_cannot_be_loaded(node, seat, way):
    other = node.seat(f"foreign {way}", label="x")
    with seat.cache.lookup(seat.keys("ab")) as hit:
        assert hit.blocks == 2
        other.wiped(2)
        with pytest.raises(UsageError):
            getattr(other.cache, way)(hit, other.targets[:2])
        with pytest.raises(UsageError):
            other.cache.release(hit)
        assert all(map(other.memory.is_wiped, other.targets))
        assert seat.load(hit, seat.keys("ab")) == 2


@pytest.mark.parametrize("held", [-1, 3])
def test_more_blocks_held_than_keys_or_less_than_none_are_refused(seat, held):
    with pytest.raises(UsageError):
        seat.cache.lookup(seat.keys("ab"), held=held)


BAD_KEYS = {
    "empty": lambda key: [b""],
    "short": lambda key: [b"x"],
    "long": lambda key: [b"x" * 500],
    "no bytes": lambda key: ["text"],
    "of several lengths": lambda key: [key, key[:-2], key + b"xx"],
    "one of them empty": lambda key: [key, b""],
}


@pytest.mark.parametrize("bad", BAD_KEYS)
def test_keys_that_are_none_cost_nothing_but_an_error(seat, bad):
    """The session and all that it holds go on."""
    keys = BAD_KEYS[bad](seat.keys("x")[0])
    hit = seat.cache.lookup(seat.keys("ab"))
    for call in (
        lambda: seat.cache.lookup(keys),
        lambda: seat.cache.store(keys, list(range(len(keys)))),
        lambda: seat.cache.store(seat.keys("y"), [0], after=keys[-1]),
        lambda: seat.cache.touch(keys),
        lambda: seat.cache.prefetch(keys),
    ):
        with pytest.raises(UsageError):
            call()
    assert seat.load(hit, seat.keys("ab")) == 2
    hit.release()
    seat.hit("abcd", 4)


def test_a_key_given_twice_is_refused_and_costs_nothing(seat):
    """No prompt has one; the daemon would end the session."""
    keys = seat.keys("ab")
    hit = seat.cache.lookup(keys)
    twice = [keys[0], keys[1], keys[0]]
    for call in (
        lambda: seat.cache.lookup(twice),
        lambda: seat.cache.start_lookup(twice),
        lambda: seat.cache.touch(twice),
        lambda: seat.cache.prefetch(twice),
        lambda: seat.cache.store(twice, [0, 1, 0]),
        lambda: seat.cache.start_store(keys, [0, 1], after=keys[0]),
    ):
        with pytest.raises(UsageError):
            call()
    assert seat.load(hit, seat.keys("ab")) == 2
    hit.release()
    seat.hit("abcd", 4)


# ---- closed ------------------------------------------------------------------------------------

CALLS = {
    "lookup": lambda s, hit: s.cache.lookup(s.keys("ab")),
    "start_lookup": lambda s, hit: s.cache.start_lookup(s.keys("ab")),
    "load": lambda s, hit: s.cache.load(hit, s.targets[:2]),
    "start_load": lambda s, hit: s.cache.start_load(hit, s.targets[:2]),
    "store": lambda s, hit: s.cache.store(s.keys("xy"), s.origins[:2]),
    "start_store": lambda s, hit: s.cache.start_store(s.keys("xy"), s.origins[:2]),
    "prefetch": lambda s, hit: s.cache.prefetch(s.keys("ab")),
    "touch": lambda s, hit: s.cache.touch(s.keys("ab")),
    "poll": lambda s, hit: s.cache.poll(),
}


def test_a_closed_cache_refuses_every_call(seat):
    hit = seat.cache.lookup(seat.keys("ab"))
    assert hit.blocks == 2
    seat.wiped(2)
    seat.cache.close()
    for call in CALLS.values():
        with pytest.raises(UsageError):
            call(seat, hit)
    assert all(map(seat.memory.is_wiped, seat.targets))


def test_what_is_harmless_is_allowed_after_the_end(seat):
    hit = seat.cache.lookup(seat.keys("ab"))
    copy = seat.cache.start_load(hit, seat.wiped(2))
    seat.cache.close()
    seat.cache.close()
    hit.release()
    assert not seat.cache.is_ready
    assert copy.is_done
    assert copy.result() == 2


def test_a_cache_can_be_closed_while_other_threads_wait(node):
    engine = SteppedEngine()
    seat = node.seat("closing", copy_engine=engine)
    assert seat.store("ab") == 2
    hit = seat.cache.lookup(seat.keys("ab"))
    engine.is_stepped = True
    copy = seat.cache.start_load(hit, seat.wiped(2))
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(copy.result)
        closing = threads.submit(seat.cache.close)
        engine.half(Direction.LOAD)
        assert not closing.done()
        engine.go_on()
        closing.result(30)
        assert waiting.result(30) == 2
    seat.see(seat.targets[:2], seat.keys("ab"))


def test_a_cache_cannot_be_used_after_a_fork(node):
    [child] = node.children_with_caches("forked", 1, is_stepped=False)
    assert child.call("share", "ab") == 2
    answers = child.call("fork")
    assert answers == ["UsageError"] * len(answers)
    assert len(answers) == len(CALLS)
    assert child.call("resident", "ab") == 2
    child.call("close")
