"""Leases and copies of the SDK: who keeps which blocks until when, and what ends early."""

from __future__ import annotations

import contextlib
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.processes import WAIT_MAX_S, wait_for
from tests.sdk_node import SdkNode, users_of
from tests.sdk_world import KINDS, SEAT_BLOCKS, Memory, Seat, SteppedEngine
from tierkv.device.base import Direction
from tierkv.errors import LoadFailedError

SLOTS = 1_024
SLOTS_FEW = 8


@pytest.fixture(scope="module")
def external(tmp_path_factory):
    node = SdkNode(tmp_path_factory.mktemp("sdk"), slots=SLOTS, extent_slots=16)
    yield node
    node.close()


@pytest.fixture
def node(external):
    with users_of(external):
        yield external


@pytest.fixture
def model(request) -> str:
    return request.node.name


@pytest.fixture(params=KINDS)
def kind(request) -> str:
    return request.param


# ---- copies ------------------------------------------------------------------------------------


def test_a_thread_that_waits_lets_others_in(node, kind, model):
    engine, memory = SteppedEngine(), Memory(kind, 4 * SEAT_BLOCKS)
    cache = node.cache(memory, model, copy_engine=engine)
    one, two = Seat(cache, memory, "one", 0), Seat(cache, memory, "two", 1)
    assert one.store("abc") == 3
    assert two.store("ab") == 2
    keys = one.keys("abc")
    hit = cache.lookup(keys)
    targets = one.wiped(3)
    engine.is_stepped = True
    with ThreadPoolExecutor(1) as thread:
        loading = thread.submit(cache.load, hit, targets)
        wait_for(lambda: engine.waiting[Direction.LOAD], what="the copy")
        with cache.lookup(two.keys("abc")) as other:
            assert other.blocks == 2
        storing = cache.start_store(two.keys("c"), two.fill(two.keys("c")))
        wait_for(lambda: engine.waiting[Direction.STORE], cache, what="the other copy")
        assert engine.half(Direction.STORE) == engine.rest(Direction.STORE) > 0
        assert storing.result() == 1
        assert not loading.done()
        assert all(memory.is_wiped(block) for block in targets)
        engine.go_on()
        assert loading.result(WAIT_MAX_S) == 3
    one.see(targets, keys)
    hit.release()


def test_a_copy_keeps_its_blocks_after_the_release(node, kind, model):
    engine = SteppedEngine()
    seat = node.seat(model, kind, copy_engine=engine)
    assert seat.store("abc") == 3
    keys, targets = seat.keys("abc"), seat.wiped(3)
    engine.is_stepped = True
    hit = seat.cache.lookup(keys)
    copy = seat.cache.start_load(hit, targets)
    hit.release()
    assert not copy.is_done
    assert sorted(copy.blocks) == sorted(targets)
    assert not copy.wait(0.0)
    wait_for(lambda: node.stats()["pinned_blocks"] == 3, seat.cache, what="the daemon")
    engine.half(Direction.LOAD)
    assert not copy.is_done
    seat.cache.poll()
    assert node.stats()["pinned_blocks"] == 3
    engine.go_on()
    assert copy.result() == 3
    seat.see(targets, keys)
    wait_for(lambda: node.held() == (0, 0), seat.cache, what="the end of the lease")


@pytest.mark.parametrize("way", ["close", "with"])
def test_closing_waits_for_copies_in_flight(node, kind, model, way):
    engine = SteppedEngine()
    seat, reader = node.seat(model, kind, copy_engine=engine), node.seat(model, kind)
    assert seat.store("ab") == 2
    keys = seat.keys("ab")
    more = seat.keys("abcd")
    hit = seat.cache.lookup(keys)
    targets = seat.wiped(2)
    engine.is_stepped = True
    load = seat.cache.start_load(hit, targets)
    seat.fill(more)
    store = seat.cache.start_store(more[2:], seat.origins[2:4], after=keys[1])
    wait_for(lambda: engine.waiting[Direction.STORE], seat.cache, what="the store")

    def close() -> None:
        with seat.cache if way == "with" else contextlib.closing(seat.cache):
            pass

    with ThreadPoolExecutor(1) as thread:
        closing = thread.submit(close)
        engine.half(Direction.LOAD)
        assert not closing.done()
        engine.go_on()
        closing.result(WAIT_MAX_S)
    assert load.is_done
    assert store.is_done
    seat.see(targets, keys)
    assert reader.resident("abcd") in (2, 4), "what was committed has the right bytes"
    seat.cache.close()
    hit.release()


def test_closing_with_copies_of_the_usual_engine_in_flight(node, kind, model):
    seat, reader = node.seat(model, kind), node.seat(model, kind)
    assert seat.store("abcd") == 4
    keys, targets = seat.keys("abcd"), seat.wiped(4)
    with seat.cache:
        hit = seat.cache.lookup(keys)
        copy = seat.cache.start_load(hit, targets)
    assert copy.is_done
    seat.see(targets, keys)
    reader.hit("abcd", 4)


def test_blocks_with_a_failed_copy_are_not_served(node, kind, model):
    engine = SteppedEngine()
    seat = node.seat(model, kind, copy_engine=engine)
    assert seat.store("ab") == 2
    keys = seat.keys("abcd")
    engine.is_stepped = True
    copy = seat.cache.start_store(keys[2:], seat.fill(keys)[2:], after=keys[1])
    wait_for(lambda: engine.waiting[Direction.STORE], seat.cache, what="the store")
    engine.half(Direction.STORE)
    engine.rest(Direction.STORE, is_ok=False)
    assert copy.result() == 0
    hit = seat.cache.lookup(keys)
    assert hit.blocks == 2
    copy = seat.cache.start_load(hit, seat.wiped(2))
    engine.rest(Direction.LOAD, is_ok=False)
    with pytest.raises(LoadFailedError):
        copy.result()
    hit.release()
    engine.go_on()
    assert seat.store("cd", behind="ab") == 2
    seat.hit("abcd", 4)


# ---- leases ------------------------------------------------------------------------------------


def test_a_hit_that_is_forgotten_is_released(node, model):
    seat = node.seat(model)
    assert seat.store("ab") == 2
    hits = [seat.cache.lookup(seat.keys("ab")), seat.cache.start_lookup(seat.keys("ab"))]
    assert all(hit.wait() and hit.blocks == 2 for hit in hits)
    assert node.held() == (2, 2)
    del hits
    gc.collect()
    wait_for(lambda: node.held() == (0, 0), seat.cache, what="the end of their leases")
    seat.hit("ab", 2)


def test_a_forgotten_hit_keeps_its_blocks_until_its_copy_has_ended(node, model):
    engine = SteppedEngine()
    seat = node.seat(model, copy_engine=engine)
    assert seat.store("ab") == 2
    engine.is_stepped = True
    copy = seat.cache.start_load(seat.cache.lookup(seat.keys("ab")), seat.wiped(2))
    gc.collect()
    seat.cache.poll()
    assert node.held() == (1, 2)
    engine.go_on()
    assert copy.result() == 2
    seat.see(seat.targets[:2], seat.keys("ab"))
    del copy
    gc.collect()
    wait_for(lambda: node.held() == (0, 0), seat.cache, what="the end of the lease")


def test_a_daemon_that_takes_a_lease_back_makes_the_load_fail(tmp_path):
    """Half of DRAM may be pinned: it is by a hit, then all by a store, then comes a lookup."""
    node = SdkNode(tmp_path, slots=SLOTS_FEW, pinned_share_max=0.5)
    with contextlib.closing(node):
        engine = SteppedEngine()
        seat, third = node.seat("m"), node.seat("m")
        writer = node.seat("m", label="writer", copy_engine=engine)
        assert seat.share("abcd") == 4
        hit = seat.cache.lookup(seat.keys("abcd"))
        assert hit.blocks == 4
        engine.is_stepped = True
        keys = writer.keys("wxyz")
        store = writer.cache.start_store(keys, writer.fill(keys))
        wait_for(lambda: engine.waiting[Direction.STORE], writer.cache, what="the store")
        third.cache.lookup(third.keys("a")).release()
        wait_for(lambda: node.held() == (1, 4), seat.cache, third.cache, what="the recall")
        with pytest.raises(LoadFailedError):
            seat.cache.load(hit, seat.wiped(4))
        assert all(map(seat.memory.is_wiped, seat.targets))
        hit.release()
        engine.go_on()
        assert store.result() == 4
        wait_for(lambda: node.held() == (0, 0), what="the commit")
        seat.hit("abcd", 4)
        writer.hit("wxyz", 4)


def test_a_lease_is_not_taken_back_under_a_copy(tmp_path):
    node = SdkNode(tmp_path, slots=SLOTS_FEW, pinned_share_max=0.5)
    with contextlib.closing(node):
        engine = SteppedEngine()
        seat, other = node.seat("m"), node.seat("m", label="other", copy_engine=engine)
        assert seat.share("abcd") == 4
        assert other.share("wxyz") == 4
        engine.is_stepped = True
        hit = other.cache.lookup(other.keys("wxyz"))
        targets = other.wiped(4)
        copy = other.cache.start_load(hit, targets)
        engine.half(Direction.LOAD)
        waiting = seat.cache.lookup(seat.keys("abcd"))
        wait_for(lambda: node.held() == (1, 4), seat.cache, other.cache, what="a lease taken back")
        assert seat.store("mnopqrst") == SLOTS_FEW - 4, "all but what is being copied"
        engine.rest(Direction.LOAD)
        assert copy.result() == 4
        other.see(targets, other.keys("wxyz"))
        waiting.release()
        hit.release()


def test_closing_gives_up_what_was_not_released(tmp_path):
    """At once, not when the death of the engine is certain, which takes an hour here."""
    node = SdkNode(tmp_path, is_started=False)
    service = node.config.service.model_copy(update={"quarantine_min": 3_600.0})
    node.config = node.config.model_copy(update={"service": service})
    node.start_daemon()
    try:
        seat = node.seat("m")
        assert seat.share("abc") == 3
        hit = seat.cache.lookup(seat.keys("abc"))
        assert hit.blocks == 3
        assert node.held() == (1, 3)
        seat.cache.close()
        wait_for(lambda: node.held() == (0, 0), what="the end of the pins")
    finally:
        node.close()


def test_a_cache_can_be_closed_while_lookups_wait(tmp_path):
    """They end with what is there; the blocks that they wait for are never stored."""
    node = SdkNode(tmp_path, slots=SLOTS_FEW)
    with contextlib.closing(node):
        engine = SteppedEngine()
        writer = node.seat("m", copy_engine=engine)
        reader = node.seat("m", engine={"fill_wait_max": 2 * WAIT_MAX_S})
        assert writer.share("a") == 1
        engine.is_stepped = True
        keys = writer.keys("ab")
        writer.cache.start_store(keys[1:], writer.fill(keys)[1:], after=keys[0])
        wait_for(lambda: engine.waiting[Direction.STORE], writer.cache, what="the store")
        growing = reader.cache.start_lookup(keys)
        wait_for(lambda: growing.blocks == 1, what="what is there already")
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(reader.cache.lookup, keys)
            wait_for(lambda: node.stats()["leases"] == 3, reader.cache, what="the lookup")
            reader.cache.close()
            assert waiting.result(WAIT_MAX_S).is_done
        assert growing.is_done


def test_caches_that_are_forgotten_hold_nothing_up(node):
    """Whoever forgets `close` loses no more than a warning; the collector must not wait."""
    [child] = node.children_with_caches("forgotten", 1, is_stepped=False)
    assert child.call("share", "ab") == 2
    assert child.call("forget", 3) == [2, 2, 2]
    assert child.call("resident", "ab") == 2
    child.call("close")
    child.process.stdin.close()
    assert child.process.wait(WAIT_MAX_S) == 0
