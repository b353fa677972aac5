"""How the copy engine finds its rung: what is refused, how often, and what takes its place."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from tests.npu.standin import REGISTRATIONS, Way
from tests.npu.test_copies import World
from tests.processes import WAIT_MAX_S, wait_for
from tests.transfers import HostPool
from tierkv.device.accelerator import REFUSALS_MAX, AcceleratorCopyEngine
from tierkv.device.base import Descriptors, Direction
from tierkv.device.npu import NpuHooks

pytestmark = pytest.mark.usefixtures("standin")


@pytest.fixture
def make(standin):
    made = []

    def one(rung: str = "batch", **more) -> World:
        made.append(World(standin, rung, **more))
        return made[-1]

    yield one
    for world in made:
        world.close()


def stored_right(world: World, block: int, slot: int) -> bool:
    at = slot * world.slot + 4096
    page = world.stored["l0"][block].contiguous().view(torch.uint8).numpy().reshape(-1)
    return np.array_equal(world.pool.bytes[at : at + page.size], page)


def fail(world: World, standin, times: int) -> None:
    """So many stores that no asynchronous call takes."""
    standin.fail_submissions(times=1_000_000, way=Way.TO_HOST)
    for _ in range(times):
        event = world.submit(Direction.STORE, [1], [1])
        event.finish()
        assert not event.is_ok
    standin.fail_submissions(times=0, way=Way.TO_HOST)


def test_a_copy_that_is_refused_by_every_call_leaves_the_rung_as_it_is(make, standin):
    """It is the copy, not the call: the next one is batched again."""
    world = make()
    fail(world, standin, REFUSALS_MAX - 1)
    assert (world.engine.rung, world.engine.facts.problem) == ("batch", "")
    world.end(world.submit(Direction.STORE, [2], [2]))
    assert dict(world.engine.rungs) == {"batch": 1}
    fail(world, standin, REFUSALS_MAX - 1)
    assert world.engine.rung == "batch", "the one in between was all right"


def test_without_asynchronous_calls_copies_are_blocking_in_the_end(make, standin):
    world = make()
    fail(world, standin, REFUSALS_MAX)
    assert world.engine.rung == "staged"
    assert "aclrtMemcpyAsync" in world.engine.facts.problem
    fail(world, standin, REFUSALS_MAX)
    assert world.engine.rung == "blocking"
    standin.fail_submissions(times=1_000_000, way=Way.TO_HOST)
    world.end(world.submit(Direction.STORE, [3], [5]))
    assert stored_right(world, 3, 5)
    assert dict(world.engine.rungs) == {"blocking": 1}


def test_a_refused_batch_goes_singly_from_then_on(make, standin):
    world = make("single")
    world.end(world.submit(Direction.STORE, [3], [5]))
    assert stored_right(world, 3, 5)
    assert world.engine.rung == "single"
    assert "aclrtMemcpyBatchAsync" in world.engine.facts.problem


def test_wheels_without_a_call_for_registration_register_all_the_same(standin, monkeypatch):
    def absent():
        raise RuntimeError("torch_npu._C._npurt is unavailable in this build.")

    monkeypatch.setattr(torch.npu, "npurt", absent)
    hooks = NpuHooks(0)
    engine = AcceleratorCopyEngine(torch.device("npu:0"), hooks, staging_bytes=0)
    pool = HostPool(1 << 20)
    before = standin.counts()
    engine.adopt(pool.address, pool.size, threading.Event())
    assert standin.counts().since(before)["registered_bytes"] == pool.size
    assert engine.rung == "batch"
    engine.close()
    engine.abandon(pool.address, pool.size)
    assert standin.counts().registered_bytes == before.registered_bytes


def test_a_blocking_copy_comes_after_the_asynchronous_ones_before_it(make, standin):
    """Loads of one direction are in order, whatever their rung."""
    world = make(staging_bytes=0)
    count, page = 32, 64
    tensor = torch.empty(count * page, dtype=torch.uint8, device="npu:0")
    unknown = HostPool(1 << 20)  # not registered, so its copies are blocking ones
    unknown.bytes[:] = 2
    world.pool.bytes[: count * page] = 1
    places = np.arange(count, dtype=np.int64) * page
    sizes = np.full(count, page, np.int64)
    standin.set(latency_to_device_us=2_000)
    first = world.engine.submit(
        Direction.LOAD, Descriptors(tensor.data_ptr() + places, world.pool.address + places, sizes)
    )
    whole = [np.array([n], np.int64) for n in (tensor.data_ptr(), unknown.address, count * page)]
    last = world.engine.submit(Direction.LOAD, Descriptors(*whole))
    world.end(first)
    world.end(last)
    assert dict(world.engine.rungs) == {"batch": 1, "blocking": 1}
    assert (tensor.cpu() == 2).all()


def test_a_staged_copy_that_fails_gives_all_its_pieces_back(make, standin):
    """Also where events tell of the failure, as on CUDA; the other direction needs the pieces."""
    world = make("staged", staging_bytes=1 << 16)  # pieces of 4 KiB
    tensor = torch.empty(64 << 10, dtype=torch.uint8, device="npu:0")
    whole = Descriptors(
        *(np.array([n], np.int64) for n in (tensor.data_ptr(), world.pool.address, 64 << 10))
    )
    standin.set(errors_show_in_queries=1)
    for _ in range(REFUSALS_MAX - 1):
        standin.fail_copies(times=1, way=Way.TO_DEVICE)
        event = world.engine.submit(Direction.LOAD, whole)
        event.finish()
        assert not event.is_ok
    standin.set(errors_show_in_queries=0)
    world.pool.bytes[: 64 << 10] = 3
    world.end(world.engine.submit(Direction.LOAD, whole))
    world.pool.bytes[: 64 << 10] = 0
    world.end(world.engine.submit(Direction.STORE, whole))
    assert (world.pool.bytes[: 64 << 10] == 3).all()
    assert world.engine.rungs == {"staged": 2}


def test_the_current_device_of_a_thread_stays_what_it_was(standin):
    engine = AcceleratorCopyEngine(torch.device("npu:1"), NpuHooks(1), staging_bytes=0)
    pool = HostPool(1 << 20)
    tensor = torch.empty(4096, dtype=torch.uint8, device="npu:1")
    torch.npu.set_device(0)
    engine.adopt(pool.address, pool.size, threading.Event())
    assert torch.npu.current_device() == 0
    copies = Descriptors(
        *(np.array([n], np.int64) for n in (tensor.data_ptr(), pool.address, 4096))
    )
    events = [engine.submit(Direction.STORE, copies)]
    assert torch.npu.current_device() == 0
    other = threading.Thread(target=lambda: events.append(engine.submit(Direction.STORE, copies)))
    other.start()
    other.join()
    for event in events:
        event.finish()
        assert event.is_ok
    engine.close()
    engine.abandon(pool.address, pool.size)
    assert torch.npu.current_device() == 0


def test_an_engine_can_be_closed_while_its_registration_is_refused(make, standin):
    """The thread that registers waits for the slow copies, whose thread is about to end."""
    engine = AcceleratorCopyEngine(torch.device("npu:0"), NpuHooks(0), staging_bytes=1 << 16)
    pool = HostPool(1 << 20)
    tensor = torch.empty(4096, dtype=torch.uint8, device="npu:0")
    copies = Descriptors(
        *(np.array([n], np.int64) for n in (tensor.data_ptr(), pool.address, 4096))
    )
    standin.fail_registrations(times=1_000)
    adopt = threading.Thread(
        target=engine.adopt, args=(pool.address, pool.size, threading.Event()), daemon=True
    )
    close = threading.Thread(target=engine.close, daemon=True)
    with standin.held(Way.TO_HOST):
        event = engine.submit(Direction.STORE, copies)
        with standin.held(REGISTRATIONS):
            adopt.start()
            wait_for(lambda: standin.counts().waiting_at_gates >= 2, what="the registration")
            close.start()
    event.finish()
    close.join(WAIT_MAX_S)
    adopt.join(WAIT_MAX_S)
    assert not close.is_alive()
    assert not adopt.is_alive()
    late = engine.submit(Direction.STORE, copies)
    late.finish()
    assert not late.is_ok, "a closed engine copies nothing that needs its threads"


def test_what_is_told_is_of_the_newest_mapping(standin):
    """A daemon that was restarted with another capacity makes another pool."""
    engine = AcceleratorCopyEngine(torch.device("npu:0"), NpuHooks(0), staging_bytes=0)
    old, new = HostPool(2 << 20), HostPool(1 << 20)
    standin.fail_registrations(times=1)
    engine.adopt(old.address, old.size, threading.Event())
    assert (engine.rung, engine.facts.pool, engine.facts.registered) == ("blocking", old.size, 0)
    assert engine.facts.problem
    engine.adopt(new.address, new.size, threading.Event())
    facts = engine.facts
    assert (facts.rung, facts.pool, facts.registered) == ("batch", new.size, new.size)
    assert facts.problem == ""
    engine.close()
    for pool in (old, new):
        engine.abandon(pool.address, pool.size)
    assert (engine.facts.pool, engine.facts.registered) == (0, 0)
