"""The SDK where room is short and where blocks come from elsewhere: evictions, fills, tiers."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import tierkv
from tests.fault_io import faulty_io
from tests.processes import SLOT_BYTES, WAIT_MAX_S, wait_for
from tests.sdk_node import SdkNode, users_of
from tests.sdk_world import SEAT_BLOCKS, Memory, Seat, SteppedEngine
from tierkv.config import TierConfig
from tierkv.device.base import Direction
from tierkv.service import wire

SLOTS = 8
SEED = 20270114
PATIENT = {"fill_wait_max": WAIT_MAX_S}


@pytest.fixture
def small(tmp_path):
    node = SdkNode(tmp_path, slots=SLOTS)
    yield node
    node.close()


# ---- more blocks than slots --------------------------------------------------------------------


def test_the_head_of_a_prefix_is_the_last_to_go(small):
    seat = small.seat("m")
    assert seat.store("abcdef") == 6
    assert seat.store("wxyz") == 4
    seat.hit("wxyz", 4)
    assert small.stats()["counters"]["evicted"] == 2
    seat.hit("abcdef", 4)
    assert seat.store("mnop", behind="wxyz") == 4
    assert seat.resident("abcdef") + seat.resident("wxyzmnop") == SLOTS


def test_what_does_not_fit_is_not_stored_and_the_rest_is_a_hit(small):
    memory = Memory("numpy", 4 * SEAT_BLOCKS)
    cache = small.cache(memory, "m")
    seat = Seat(cache, memory, "")
    keys = seat.keys("abcdefghijkl")
    blocks = list(range(len(keys)))
    for block, key in zip(blocks, keys, strict=True):
        memory.fill(block, key)
    stored = cache.store(keys, blocks)
    assert stored == SLOTS
    with cache.lookup(keys) as hit:
        assert 0 < hit.blocks <= stored
        targets = list(range(20, 20 + hit.blocks))
        assert cache.load(hit, targets) == hit.blocks
        assert all(map(memory.is_right, targets, keys))


def test_a_hit_keeps_its_blocks_however_much_is_stored(small):
    seat, other = small.seat("m"), small.seat("m", label="other")
    assert seat.store("abcd") == 4
    hit = seat.cache.lookup(seat.keys("abcd"))
    assert hit.blocks == 4
    assert other.store("qrstuvwx") == SLOTS - 4
    assert seat.load(hit, seat.keys("abcd")) == 4
    hit.release()
    wait_for(lambda: small.held() == (0, 0), seat.cache, what="the release")
    assert other.store("ijklmnop") == SLOTS
    seat.miss("abcd")


USES = {
    "touched": lambda cache, keys: cache.touch(keys),
    "looked up": lambda cache, keys: cache.lookup(keys).release(),
    "held in part": lambda cache, keys: cache.lookup(keys, held=2).release(),
    "held": lambda cache, keys: cache.lookup(keys, held=4).release(),
}


@pytest.mark.parametrize("use", [None, *USES])
def test_used_blocks_stay_when_others_have_to_go(small, use):
    seat = small.seat("m")
    assert seat.store("abcd") == 4
    assert seat.store("wxyz") == 4
    if use:
        USES[use](seat.cache, seat.keys("abcd"))
    assert seat.store("mnop") == 4
    assert seat.resident("abcd") == (4 if use else 0)
    assert seat.resident("wxyz") == (0 if use else 4)


@pytest.mark.parametrize("policy", ["slru", "arc"])
def test_every_hit_is_right_while_two_caches_fight_for_room(tmp_path, policy):
    print(f"seed: {SEED}")
    small = SdkNode(tmp_path, slots=SLOTS, eviction=policy)
    seats = [small.seat("m") for _ in range(2)]

    def use(seat: Seat, number: int) -> tuple[int, int]:
        dice = random.Random(SEED + number)
        hits = stored = 0
        for _ in range(100):
            text = dice.choice("abc") + "".join(dice.choice("xyz") for _ in range(3))
            found = seat.resident(text)
            hits += found
            if found < len(text):
                stored += seat.store(text[found:], behind=text[:found])
        return hits, stored

    with ThreadPoolExecutor(2) as threads:
        results = [threads.submit(use, seat, n) for n, seat in enumerate(seats)]
        counts = [result.result(2 * WAIT_MAX_S) for result in results]
    print(counts)
    assert all(hits > 0 and stored > SLOTS for hits, stored in counts)
    assert small.stats()["counters"]["evicted"] > 0
    small.close()


# ---- blocks that another cache is storing ------------------------------------------------------


def start_filling(writer: Seat, engine: SteppedEngine) -> tierkv.Copy:
    """Store "a", and begin to store "bc" behind it."""
    assert writer.store("a") == 1
    engine.is_stepped = True
    keys = writer.keys("abc")
    copy = writer.cache.start_store(keys[1:], writer.fill(keys)[1:], after=keys[0])
    wait_for(lambda: engine.waiting[Direction.STORE], writer.cache, what="the copy")
    engine.half(Direction.STORE)
    return copy


@pytest.mark.parametrize("is_ok", [True, False])
def test_a_hit_grows_over_blocks_that_another_cache_is_storing(small, is_ok):
    engine = SteppedEngine()
    writer, reader = small.seat("m", copy_engine=engine), small.seat("m", engine=PATIENT)
    copy = start_filling(writer, engine)
    hit = reader.cache.start_lookup(reader.keys("abcd"))
    wait_for(lambda: hit.blocks == 1, what="what is there already")
    assert not hit.is_done
    engine.rest(Direction.STORE, is_ok)
    assert copy.result() == (2 if is_ok else 0)
    wait_for(lambda: hit.is_done, what="the rest")
    assert hit.blocks == (3 if is_ok else 1)
    assert reader.load(hit, reader.keys("abcd")) == hit.blocks
    hit.release()


def test_a_half_stored_block_is_never_loaded(small):
    engine = SteppedEngine()
    writer, reader = small.seat("m", copy_engine=engine), small.seat("m")
    copy = start_filling(writer, engine)
    keys = reader.keys("abc")
    held = reader.cache.lookup(keys)
    assert held.blocks == 1
    assert reader.load(held, keys) == 1
    assert reader.store("bc", behind="a") == 0, "somebody else is storing them"
    engine.rest(Direction.STORE)
    assert copy.result() == 2
    writer.settle()
    assert held.blocks == 1
    assert small.stats()["pinned_blocks"] == 1, "what is done grows no more"
    held.release()
    reader.hit("abc", 3)


def test_a_hit_may_be_released_or_its_cache_closed_while_it_grows(small):
    engine = SteppedEngine()
    writer, reader, other = (
        small.seat("m", copy_engine=engine),
        small.seat("m", engine=PATIENT),
        small.seat("m", engine=PATIENT),
    )
    copy = start_filling(writer, engine)
    one = reader.cache.start_lookup(reader.keys("abc"))
    two = other.cache.start_lookup(other.keys("abc"))
    wait_for(lambda: one.blocks == two.blocks == 1, what="what is there already")
    one.release()
    other.cache.close()
    engine.rest(Direction.STORE)
    assert copy.result() == 2
    reader.hit("abc", 3)


# ---- tiers -------------------------------------------------------------------------------------


class TierNode(SdkNode):
    """A node with an fs tier that has everything, and fails on command."""

    def __init__(self, tmp_path: Path, slots: int = SLOTS) -> None:
        self.control = tmp_path / "control"
        tier = TierConfig(
            type="fs", path=tmp_path / "ssd", capacity=64 * SLOT_BYTES, deadline=WAIT_MAX_S
        )
        super().__init__(
            tmp_path,
            slots=slots,
            extent_slots=SLOTS,
            tiers=(tier,),
            write_policy="write_through",
            io_command=faulty_io(self.control),
        )
        self.wait_scanned()

    def wait_scanned(self) -> None:
        wait_for(
            lambda: all(t["is_up"] and t["is_scanned"] for t in self.stats()["tiers"]),
            what="the tier to be known",
        )

    def is_written(self) -> bool:
        stats = self.stats()
        return not stats["dirty_blocks"] and not any(t["jobs"] for t in stats["tiers"])

    def forget_dram(self) -> None:
        """Everything is in the tier, and nothing in DRAM."""
        wait_for(self.is_written, what="the tier to have everything")
        reply = self.admin.ask(lambda seq: wire.Purge(seq, "", ["dram"], 0.0), WAIT_MAX_S)
        assert reply.problems == []

    @property
    def promoted(self) -> int:
        return self.stats()["counters"]["blocks_promoted"]

    def hung(self) -> int:
        """Reads that began to hang so far."""
        log = self.control / "fs" / "log"
        return log.read_text().count('"hang-read"') if log.exists() else 0

    @contextlib.contextmanager
    def hanging_reads(self) -> Iterator[Callable[[], bool]]:
        """Reads of the tier hang inside this block; gives whether one does."""
        fault, before = self.control / "fs" / "hang-read", self.hung()
        fault.touch()
        try:
            yield lambda: self.hung() > before
        finally:
            fault.unlink(missing_ok=True)


@pytest.fixture
def tiered(tmp_path):
    """DRAM has room for one prompt only."""
    node = TierNode(tmp_path)
    yield node
    node.close()


@pytest.fixture(scope="module")
def roomy(tmp_path_factory):
    """DRAM has room for a prompt of each test."""
    node = TierNode(tmp_path_factory.mktemp("sdk"), 32 * SLOTS)
    yield node
    node.close()


@pytest.fixture
def shared(roomy):
    with users_of(roomy):
        yield roomy


@pytest.fixture
def model(request) -> str:
    return request.node.name


def test_blocks_that_dram_gave_up_come_from_the_tier(tiered):
    seat = tiered.seat("m")
    assert seat.share("abcd") == 4
    wait_for(tiered.is_written, what="the tier to have everything")
    assert seat.share("qrstuvwx") == SLOTS, "all others have to go"
    wait_for(tiered.is_written, what="the tier to have everything, so that room can be made")
    assert seat.hit("abcd", 4) == ("fs",) * 4
    assert seat.hit("abcd", 4) == ("dram",) * 4


def test_sources_are_told_block_by_block(shared, model):
    seat = shared.seat(model)
    assert seat.share("abcd") == 4
    shared.forget_dram()
    assert seat.hit("ab", 2) == ("fs",) * 2
    assert seat.hit("abcde", 4) == ("dram", "dram", "fs", "fs")
    shared.forget_dram()
    assert seat.hit("abcd", 3, held=1)[1:] == ("fs",) * 2


def test_after_prefetch_a_lookup_finds_everything_in_dram(shared, model):
    seat = shared.seat(model)
    assert seat.share("abcd") == 4
    shared.forget_dram()
    before = shared.promoted
    seat.cache.prefetch(seat.keys("abcd"))
    wait_for(lambda: shared.promoted == before + 4, seat.cache, what="the prefetch")
    wait_for(lambda: shared.held() == (0, 0), seat.cache, what="the end of its lease")
    assert seat.hit("abcd", 4) == ("dram",) * 4


def test_prefetched_blocks_hold_no_lease_although_nobody_polls_for_long(shared, model):
    seat = shared.seat(model)
    assert seat.share("abcd") == 4
    shared.forget_dram()
    with shared.hanging_reads() as is_hanging:
        seat.cache.prefetch(seat.keys("abcd"))
        wait_for(is_hanging, seat.cache, what="the read")
    wait_for(lambda: shared.held() == (0, 0), seat.cache, what="the end of its lease")
    assert seat.hit("abcd", 4) == ("dram",) * 4


def test_a_prefetch_takes_longer_than_a_lookup_may_wait(shared, model):
    """Nobody waits for it, so the wait of a lookup is no bound."""
    seat = shared.seat(model, engine={"promote_wait_max": 0.0})
    assert seat.share("abcd") == 4
    shared.forget_dram()
    before = shared.promoted
    with shared.hanging_reads() as is_hanging:
        seat.cache.prefetch(seat.keys("abcd"))
        wait_for(is_hanging, seat.cache, what="the read")
    wait_for(lambda: shared.promoted == before + 4, seat.cache, what="the prefetch")
    wait_for(lambda: shared.held() == (0, 0), seat.cache, what="the end of its lease")
    assert seat.hit("abcd", 4) == ("dram",) * 4


def test_a_lookup_waits_for_a_tier_only_as_long_as_it_may(shared, model):
    seat, hasty = shared.seat(model), shared.seat(model, engine={"promote_wait_max": 0.0})
    assert seat.share("abcd") == 4
    shared.forget_dram()
    assert seat.share("a") == 1
    with shared.hanging_reads() as is_hanging:
        hit = seat.cache.start_lookup(seat.keys("abcd"))
        wait_for(is_hanging, seat.cache, what="the read")
        wait_for(lambda: hit.blocks == 1, what="what is there already")
        assert not hit.is_done
        assert not hit.wait(0.0)
        with hasty.cache.lookup(hasty.keys("abcd")) as short:
            assert short.blocks == 1
            assert hasty.load(short, hasty.keys("abcd")) == 1
    assert hit.wait(WAIT_MAX_S)
    assert (hit.blocks, hit.sources) == (4, ("dram", "fs", "fs", "fs"))
    assert seat.load(hit, seat.keys("abcd")) == 4
    hit.release()


def test_part_of_a_growing_hit_can_be_loaded_before_the_rest_has_come(shared, model):
    seat = shared.seat(model)
    assert seat.share("abcd") == 4
    shared.forget_dram()
    assert seat.share("ab") == 2
    keys = seat.keys("abcd")
    with shared.hanging_reads() as is_hanging:
        hit = seat.cache.start_lookup(keys)
        wait_for(is_hanging, seat.cache, what="the read")
        wait_for(lambda: hit.blocks == 2, what="what is there already")
        targets = seat.wiped(2)
        assert seat.cache.load(hit, targets) == 2
        seat.see(targets, keys)
    wait_for(lambda: hit.is_done, what="the rest")
    assert hit.blocks in (2, 4), "a load may end the growth"
    assert seat.load(hit, keys) == hit.blocks
    hit.release()


def test_a_damaged_block_of_a_tier_is_a_shorter_hit(shared, model):
    seat = shared.seat(model)
    assert seat.share("abcd") == 4
    shared.forget_dram()
    fault = shared.control / "fs" / "corrupt-read"
    fresh = fault.with_name("fresh")
    fresh.write_text(seat.keys("abc")[2].hex())
    fresh.rename(fault)
    seat.hit("abcd", 2)
    fault.unlink()


def test_a_restarted_daemon_finds_the_blocks_in_its_tier(tiered):
    seat = tiered.seat("m")
    assert seat.share("abcd") == 4
    wait_for(tiered.is_written, what="the tier to have everything")
    tiered.kill_daemon()
    tiered.start_daemon()
    tiered.wait_back(seat)
    tiered.wait_scanned()
    assert seat.hit("abcd", 4) == ("fs",) * 4
    assert seat.share("ef", behind="abcd") == 2
    seat.hit("abcdef", 6)
