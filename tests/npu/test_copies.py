"""The copy engine of accelerators on the real torch_npu: the transfer suite, and its four rungs."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.npu.standin import Way
from tests.processes import wait_for
from tests.transfers import HostPool, TransferSuite, key_only
from tierkv.device.accelerator import AcceleratorCopyEngine
from tierkv.device.base import Descriptors, Direction
from tierkv.device.npu import NpuHooks

pytestmark = pytest.mark.usefixtures("standin")
RUNGS = ["batch", "single", "staged", "blocking"]


def prepare(standin, rung: str) -> dict[str, int]:
    """Make the stand-in such that this is the best rung; arguments of the engine."""
    if rung == "single":
        standin.set(batch_is_supported=0)
    if rung in ("staged", "blocking"):
        standin.set(register_is_supported=0)
    return {"staging_bytes": 0} if rung == "blocking" else {"staging_bytes": 1 << 20}


class TestNpu(TransferSuite):
    """Every test of the suite on every rung."""

    device = "npu:0"  # torch knows the name only once torch_npu is there

    @pytest.fixture(params=RUNGS)
    def engine(self, request, standin):
        engine = AcceleratorCopyEngine(
            torch.device(self.device), NpuHooks(0), **prepare(standin, request.param)
        )
        self.adopted = []
        yield engine
        engine.close()
        for pool in self.adopted:
            engine.abandon(pool.address, pool.size)
        used = {name for name, count in engine.rungs.items() if count}
        assert used <= {request.param}, "another rung served"

    def adopt(self, engine, pool) -> None:
        super().adopt(engine, pool)
        self.adopted.append(pool)


class World:
    """An engine, one layer of 8 blocks, and an adopted pool."""

    def __init__(self, standin, rung: str = "batch", **more) -> None:
        self.suite = TestNpu()
        self.engine = AcceleratorCopyEngine(
            torch.device(TestNpu.device), NpuHooks(0), **{**prepare(standin, rung), **more}
        )
        self.tensors, self.layout, self.pool, self.slot = self.suite.world(key_only)
        self.engine.adopt(self.pool.address, self.pool.size, threading.Event())
        self.stored = self.suite.fill(self.tensors, 1)

    def submit(self, direction: Direction, blocks, slots):
        pages = self.suite.pages(self.layout, self.pool, self.slot, blocks, slots)
        return self.engine.submit(direction, pages)

    def end(self, event) -> None:
        self.suite.end(event)

    def close(self) -> None:
        self.engine.close()
        self.engine.abandon(self.pool.address, self.pool.size)


@pytest.fixture
def make(standin):
    made = []

    def one(rung: str = "batch", **more) -> World:
        made.append(World(standin, rung, **more))
        return made[-1]

    yield one
    for world in made:
        world.close()


@pytest.mark.parametrize("rung", ["batch", "single"])
def test_the_thread_that_computes_never_waits_on_the_fast_rungs(make, standin, rung):
    world = make(rung)
    world.end(world.submit(Direction.STORE, [0], [0]))  # what is made once is made now
    before = standin.counts()
    with standin.held(Way.TO_HOST), standin.held(Way.TO_DEVICE):
        store = world.submit(Direction.STORE, [1, 3], [1, 3])
        load = world.submit(Direction.LOAD, [5], [5])
        load.wait()
        assert not store.is_done()
        assert not load.is_done()
    world.end(store)
    world.end(load)
    assert standin.counts().main_thread_waits == before.main_thread_waits
    assert world.engine.rungs == {rung: 3}


def waits(standin, before) -> bool:
    """Whether a stream stands before an event, or a host thread since then."""
    counts = standin.counts()
    return bool(counts.waiting_for_events) or (
        counts.event_synchronizations > before.event_synchronizations
    )


@pytest.mark.parametrize("rung", RUNGS)
def test_a_store_waits_for_what_is_computing_its_blocks(make, standin, rung):
    world = make(rung)
    fresh = torch.full_like(world.stored["l0"], 7).pin_memory()
    with standin.held(Way.TO_DEVICE):
        world.tensors["l0"].copy_(fresh, non_blocking=True)  # stands for a kernel
        before = standin.counts()
        store = world.submit(Direction.STORE, [2], [2])
        wait_for(lambda: waits(standin, before) or store.is_done(), what="the store to wait")
        assert not store.is_done()
    world.end(store)
    at = 2 * world.slot + 4096
    assert (world.pool.bytes[at : at + 16 * 128] == 7).all()


@pytest.mark.parametrize("rung", RUNGS)
def test_a_load_waits_for_what_still_reads_its_target(make, standin, rung):
    world = make(rung)
    world.end(world.submit(Direction.STORE, [0], [0]))
    out = torch.empty_like(world.stored["l0"], device="cpu").pin_memory()
    with standin.held(Way.TO_HOST):
        out.copy_(world.tensors["l0"], non_blocking=True)  # stands for a kernel that reads
        before = standin.counts()
        load = world.submit(Direction.LOAD, [4], [0])
        wait_for(lambda: waits(standin, before) or load.is_done(), what="the load to wait")
        assert not load.is_done()
    world.end(load)
    torch.accelerator.synchronize()
    assert torch.equal(out, world.stored["l0"]), "the reader saw what was there before"


@pytest.mark.parametrize("rung", RUNGS)
def test_compute_that_waits_for_a_load_sees_its_bytes(make, standin, rung):
    world = make(rung)
    world.end(world.submit(Direction.STORE, [0], [0]))
    out = torch.zeros_like(world.stored["l0"], device="cpu").pin_memory()
    compute = torch.accelerator.current_stream()
    with standin.held(Way.TO_DEVICE):
        load = world.submit(Direction.LOAD, [4], [0])
        load.wait()
        out.copy_(world.tensors["l0"], non_blocking=True)
        wait_for(lambda: standin.counts().waiting_for_events or compute.query(), what="compute")
    world.end(load)
    torch.accelerator.synchronize()
    assert torch.equal(out[4], world.stored["l0"][0])


def test_a_batch_that_the_driver_refuses_goes_singly_and_stays_so(make, standin):
    world = make("single")
    assert world.engine.rung == "batch", "nobody knows before the first copy"
    world.end(world.submit(Direction.STORE, [0], [0]))
    assert world.engine.rung == "single"


def test_batches_have_no_more_descriptors_than_the_driver_takes(make, standin):
    standin.set(batch_descriptors_max=2048)
    world = make("batch")
    count = 10_000
    host = world.pool.address + np.arange(count, dtype=np.int64)
    device = world.tensors["l0"].data_ptr() + np.arange(count, dtype=np.int64)
    before = standin.counts()
    world.end(world.engine.submit(
        Direction.STORE, Descriptors(device, host, np.ones(count, np.int64))
    ))  # fmt: skip
    changes = standin.counts().since(before)
    assert (changes["batch_copies"], changes["descriptors"]) == (5, count)
    flat = world.stored["l0"].numpy().reshape(-1)[:count].view(np.uint8)
    assert np.array_equal(world.pool.bytes[:count], flat)


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("rung", RUNGS)
def test_a_copy_that_the_driver_refuses_has_failed(make, standin, rung, direction):
    world = make(rung)
    world.end(world.submit(Direction.STORE, [0], [0]))
    way = Way.TO_HOST if direction is Direction.STORE else Way.TO_DEVICE
    if rung == "blocking":  # the call that submits is the one that copies
        standin.fail_copies(times=1, way=way)
    else:
        standin.fail_submissions(times=2, way=way)  # of a batch, and of its second try
    event = world.submit(direction, [1], [1])
    wait_for(event.is_done, what="the failed copy")
    assert not event.is_ok
    standin.fail_submissions(times=0, way=way)
    world.end(world.submit(direction, [1], [0]))


@pytest.mark.parametrize("direction", list(Direction))
@pytest.mark.parametrize("rung", RUNGS)
def test_a_copy_that_fails_while_it_runs_has_failed(make, standin, rung, direction):
    """The runtime tells it once, at a synchronisation; events say that all is well."""
    world = make(rung)
    world.end(world.submit(Direction.STORE, [0], [0]))
    way = Way.TO_HOST if direction is Direction.STORE else Way.TO_DEVICE
    standin.fail_copies(times=1, way=way)
    event = world.submit(direction, [1], [1])
    wait_for(event.is_done, what="the failed copy")
    assert not event.is_ok
    event = world.submit(direction, [2], [0])
    event.finish()
    assert event.is_done()
    assert event.is_ok


@pytest.mark.parametrize("rung", ["batch", "single"])
def test_a_failure_is_told_of_every_copy_that_it_may_have_hit(make, standin, rung):
    world = make(rung)
    world.end(world.submit(Direction.STORE, [0], [0]))
    standin.fail_copies(times=1, after=1, way=Way.TO_HOST)
    with standin.held(Way.TO_HOST):
        events = [world.submit(Direction.STORE, [n], [n]) for n in range(3)]
    for event in events:
        event.finish()
    assert not events[1].is_ok


@pytest.mark.parametrize("direction", list(Direction))
def test_lists_of_a_batch_are_kept_until_it_has_run(make, standin, direction):
    """Nobody says when a driver reads them; here it does so at the last moment."""
    standin.set(batch_reads_late=1)
    world = make("batch")
    world.end(world.submit(Direction.STORE, [6, 7], [0, 1]))
    way = Way.TO_HOST if direction is Direction.STORE else Way.TO_DEVICE
    with standin.held(way):
        event = world.submit(direction, [1, 3], [1, 0])
        assert not event.is_done()
        used_again = [np.full(2, number, np.uint64) for number in range(20_000)]
    world.end(event)
    assert len(used_again) == 20_000
    page, stored = 16 * 128, world.stored["l0"]
    if direction is Direction.STORE:
        in_pool = world.pool.bytes[4096 : 4096 + page].tobytes()
        assert in_pool == stored[3].contiguous().numpy().tobytes()
    else:
        assert world.suite.same(world.suite.get(world.tensors["l0"])[3], stored[6])


@pytest.mark.parametrize("direction", list(Direction))
def test_a_piece_of_the_ring_is_used_again_only_when_its_bytes_are_gone(make, standin, direction):
    """A copy of twice as many pieces as the ring has, on a slow device."""
    world = make("staged", staging_bytes=16 * 256)
    blocks, slots = [0, 2, 4, 6], [0, 1, 2, 3]
    standin.set(latency_to_host_us=200)
    world.end(world.submit(Direction.STORE, blocks, slots))
    page = 16 * 128
    for block, slot in zip(blocks, slots, strict=True):
        at = slot * world.slot + 4096
        found = world.pool.bytes[at : at + page].tobytes()
        assert found == world.stored["l0"][block].contiguous().numpy().tobytes()
    standin.set(latency_to_host_us=0, latency_to_device_us=200)
    if direction is Direction.LOAD:
        world.end(world.submit(Direction.LOAD, [1, 3, 5, 7], slots))
        found = world.suite.get(world.tensors["l0"])
        for block in blocks:
            assert world.suite.same(found[block + 1], world.stored["l0"][block])


def test_a_fast_copy_stays_behind_a_slow_one_of_its_direction(standin):
    """Both store into one slot; in between the pool is registered."""
    suite = TestNpu()
    engine = AcceleratorCopyEngine(torch.device(TestNpu.device), NpuHooks(0), staging_bytes=1 << 20)
    tensors, layout, pool, slot = suite.world(key_only)
    stored = suite.fill(tensors, 1)
    with standin.held(Way.TO_HOST):
        first = engine.submit(Direction.STORE, suite.pages(layout, pool, slot, [3], [2]))
        wait_for(lambda: standin.counts().waiting_at_gates, what="the slow copy")
        engine.adopt(pool.address, pool.size, threading.Event())
        assert engine.rung == "batch"
        last = engine.submit(Direction.STORE, suite.pages(layout, pool, slot, [5], [2]))
    suite.end(first)
    suite.end(last)
    at = 2 * slot + 4096
    in_pool = pool.bytes[at : at + 16 * 128].tobytes()
    assert in_pool == stored["l0"][5].contiguous().numpy().tobytes()
    engine.close()
    engine.abandon(pool.address, pool.size)


def test_a_blocking_copy_stays_behind_a_fast_one_of_its_direction(standin):
    """Both load into one block, the fast one as the last of four; only one pool is registered."""
    suite = TestNpu()
    engine = AcceleratorCopyEngine(torch.device(TestNpu.device), NpuHooks(0), staging_bytes=0)
    tensors, layout, pool, slot = suite.world(key_only)
    other = HostPool(pool.size)
    pool.bytes[:], other.bytes[:] = 1, 2
    engine.adopt(pool.address, pool.size, threading.Event())
    suite.fill(tensors, 1)
    standin.set(latency_to_device_us=10_000)
    first = engine.submit(
        Direction.LOAD, suite.pages(layout, pool, slot, [0, 2, 6, 4], [0, 2, 4, 6])
    )
    last = engine.submit(Direction.LOAD, suite.pages(layout, other, slot, [4], [6]))
    suite.end(first)
    suite.end(last)
    assert suite.get(tensors["l0"])[[0, 4]].flatten(1).unique(dim=1).tolist() == [[1], [2]]
    assert dict(engine.rungs) == {"batch": 1, "blocking": 1}
    engine.close()
    engine.abandon(pool.address, pool.size)


def test_a_mapping_is_abandoned_when_its_copies_have_ended(standin):
    """What the stand-in calls a violation else: unregistering memory under a copy."""
    suite = TestNpu()
    engine = AcceleratorCopyEngine(torch.device(TestNpu.device), NpuHooks(0), staging_bytes=0)
    tensors, layout, pool, slot = suite.world(key_only)
    engine.adopt(pool.address, pool.size, threading.Event())
    suite.fill(tensors, 1)
    before = standin.counts()
    with standin.held(Way.TO_HOST):
        event = engine.submit(Direction.STORE, suite.pages(layout, pool, slot, [3], [2]))
        leaving = threading.Thread(target=engine.abandon, args=(pool.address, pool.size))
        leaving.start()
        wait_for(
            lambda: (
                standin.counts().waiting_for_streams
                or standin.counts().registered_bytes < before.registered_bytes
            ),
            what="the end of the copy to be waited for",
        )
        assert standin.counts().registered_bytes == before.registered_bytes
    leaving.join()
    suite.end(event)
    assert standin.counts().registered_bytes == before.registered_bytes - pool.size
    again = engine.submit(Direction.STORE, suite.pages(layout, pool, slot, [4], [2]))
    suite.end(again)
    assert dict(engine.rungs) == {"batch": 1, "blocking": 1}
    engine.close()


def test_the_pool_is_registered_and_given_up_beside_a_graph_capture(standin):
    """An engine captures its graphs while the pool is still being registered."""
    engine = AcceleratorCopyEngine(torch.device(TestNpu.device), NpuHooks(0), staging_bytes=0)
    pool, before = HostPool(1 << 20), standin.counts()
    standin.set(graph_is_captured=1)
    engine.adopt(pool.address, pool.size, threading.Event())
    assert engine.rung == "batch"
    engine.abandon(pool.address, pool.size)
    changes = standin.counts().since(before)
    assert (changes["registrations"], changes["unregistrations"]) == (1, 1)
    engine.close()


def test_until_registration_has_ended_copies_go_through_the_ring(standin):
    from tests.npu.standin import REGISTRATIONS

    suite = TestNpu()
    engine = AcceleratorCopyEngine(torch.device(TestNpu.device), NpuHooks(0), staging_bytes=1 << 20)
    tensors, layout, pool, slot = suite.world(key_only)
    stored = suite.fill(tensors, 1)
    stop = threading.Event()
    adopting = threading.Thread(target=engine.adopt, args=(pool.address, pool.size, stop))
    with standin.held(REGISTRATIONS):
        adopting.start()
        wait_for(lambda: standin.counts().waiting_at_gates, what="the registration")
        suite.end(engine.submit(Direction.STORE, suite.pages(layout, pool, slot, [3], [2])))
        assert (engine.rung, dict(engine.rungs)) == ("staged", {"staged": 1})
    adopting.join()
    suite.end(engine.submit(Direction.LOAD, suite.pages(layout, pool, slot, [0], [2])))
    assert dict(engine.rungs) == {"staged": 1, "batch": 1}
    assert suite.same(suite.get(tensors["l0"])[0], stored["l0"][3])
    engine.close()
    engine.abandon(pool.address, pool.size)


def test_a_mapping_is_registered_in_pieces_and_taken_back_whole(standin):
    engine = AcceleratorCopyEngine(torch.device(TestNpu.device), NpuHooks(0), staging_bytes=0)
    standin.set(register_call_max=100 << 20)
    pool = HostPool(320 << 20)
    before = standin.counts()
    engine.adopt(pool.address, pool.size, threading.Event())
    changes = standin.counts().since(before)
    assert changes["registered_bytes"] == pool.size
    assert changes["registered_ranges"] > 3
    assert (engine.facts.registered, engine.facts.problem) == (pool.size, "")
    engine.abandon(pool.address, pool.size)
    assert standin.counts().registered_bytes == before.registered_bytes
    engine.close()


def test_with_too_little_lockable_memory_nothing_stays_registered(standin):
    engine = AcceleratorCopyEngine(torch.device(TestNpu.device), NpuHooks(0), staging_bytes=1 << 20)
    before = standin.counts().registered_bytes
    standin.set(register_total_max=before + (128 << 20))
    pool = HostPool(256 << 20)
    engine.adopt(pool.address, pool.size, threading.Event())
    assert standin.counts().registered_bytes == before
    assert (engine.facts.registered, engine.facts.pool) == (0, pool.size)
    assert "aclrtHostRegisterV2" in engine.facts.problem
    assert engine.rung == "staged"
    tensor = torch.empty(8, 4096, dtype=torch.int8, device=TestNpu.device)
    values = torch.arange(8 * 4096, dtype=torch.int32).to(torch.int8).view(8, 4096)
    tensor.copy_(values)
    suite = TestNpu()
    for host in (pool.address, pool.address + pool.size - 4096):
        copies = Descriptors(*(np.array([n], np.int64) for n in (tensor.data_ptr(), host, 4096)))
        suite.end(engine.submit(Direction.STORE, copies))
    assert dict(engine.rungs) == {"staged": 2}
    assert np.array_equal(pool.bytes[:4096], values.numpy().reshape(-1)[:4096].view(np.uint8))
    assert np.array_equal(pool.bytes[:4096], pool.bytes[-4096:])
    engine.close()
    engine.abandon(pool.address, pool.size)
