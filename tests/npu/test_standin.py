"""The stand-in under the real torch_npu: streams, events, memory and copies behave as documented.

Whatever the tests of the Ascend device claim rests on this. No test sleeps: gates hold copies.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading

import pytest
import torch

from tests.npu.memory import HUGE, Mapping, aligned_on_device, dice
from tests.npu.standin import Way
from tests.processes import wait_for

SIZE = 64 << 10


@pytest.fixture
def device(npu) -> torch.device:
    return torch.device("npu:0")


@pytest.fixture
def stream(standin, device) -> torch.Stream:
    return torch.Stream(device=device)


def filled(value: int, device: torch.device) -> torch.Tensor:
    """Bytes on the device that hold one value already."""
    return torch.full((SIZE,), value, dtype=torch.uint8).to(device)


def pinned(value: int) -> torch.Tensor:
    return torch.full((SIZE,), value, dtype=torch.uint8).pin_memory()


def in_thread(work) -> threading.Thread:
    """A thread that does this on device 0."""

    def with_device() -> None:
        torch.npu.set_device(0)
        work()

    thread = threading.Thread(target=with_device, daemon=True)
    thread.start()
    return thread


def event_on(stream: torch.Stream) -> torch.Event:
    event = torch.Event(device=stream.device)
    event.record(stream)
    return event


def wait_queued(standin, how_many: int) -> None:
    """torch_npu queues in a thread of its own; wait until a stream has come to its copy."""
    wait_for(
        lambda: standin.counts().waiting_at_gates == how_many, what=f"{how_many} copies at gates"
    )


# ---- devices and memory ------------------------------------------------------------------------


def test_there_are_two_devices_with_memory_of_their_own(npu, standin):
    assert torch.accelerator.current_accelerator() == torch.device("npu")
    assert torch.accelerator.device_count() == 2
    before = standin.counts()
    one, other = (torch.empty(32 << 20, device=f"npu:{i}", dtype=torch.uint8) for i in range(2))
    assert (one.device.index, other.device.index) == (0, 1)
    assert standin.counts().device_allocations >= before.device_allocations + 2
    assert standin.counts().device_bytes_in_use >= before.device_bytes_in_use + (64 << 20)


def test_device_memory_begins_at_a_huge_page(device, standin):
    assert torch.empty(64 << 20, device=device, dtype=torch.uint8).data_ptr() % HUGE == 0
    assert aligned_on_device(SIZE, device).data_ptr() % HUGE == 0


def test_the_host_cannot_touch_device_memory(device, standin):
    tensor = filled(1, device)
    reader, writer = os.pipe()
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        # The kernel reads the byte for us and says what the processor would have said.
        written = libc.write(writer, ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(1))
        assert (written, ctypes.get_errno()) == (-1, errno.EFAULT)
    finally:
        os.close(reader)
        os.close(writer)


def test_a_device_has_only_so_much_memory(device, standin):
    standin.set(device_bytes=standin.counts().device_bytes_in_use)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, device=device, dtype=torch.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_bytes_come_back_as_they_were(seed, device, standin):
    data = dice(seed, SIZE)
    assert torch.equal(data.to(device).cpu(), data)


def test_zeros_and_copies_on_the_device_compute(device, standin):
    assert torch.zeros(7, 5, device=device).cpu().tolist() == [[0.0] * 5] * 7
    matrix = torch.arange(12.0).view(3, 4)
    assert torch.equal(matrix.to(device).t().contiguous().cpu(), matrix.t())


# ---- streams and events ------------------------------------------------------------------------


def test_a_copy_of_pinned_memory_is_not_over_when_the_call_returns(device, stream, standin):
    source, target = pinned(2), filled(1, device)
    before = standin.counts()
    with standin.held(Way.TO_DEVICE):
        with stream:
            target.copy_(source, non_blocking=True)
        end = event_on(stream)
        wait_queued(standin, 1)
        assert not end.query()
        assert not stream.query()
        assert target.cpu().unique().tolist() == [1]  # on the other stream, which nothing holds
    end.synchronize()
    assert end.query()
    assert target.cpu().unique().tolist() == [2]
    changes = standin.counts().since(before)
    assert (changes["async_copies"], changes["bytes_to_device"]) == (1, SIZE)


def test_a_copy_to_pageable_memory_is_over_when_the_call_returns(device, stream, standin):
    source, target = filled(3, device), torch.zeros(SIZE, dtype=torch.uint8)
    before = standin.counts()
    with stream:
        target.copy_(source, non_blocking=True)
    assert target.unique().tolist() == [3]
    changes = standin.counts().since(before)
    assert changes["blocking_copies"] == 1
    assert "async_copies" not in changes


def test_a_store_that_waits_reads_what_was_written_before_it(device, stream, standin):
    kv, new, slot = filled(1, device), pinned(2), pinned(0)
    with standin.held(Way.TO_DEVICE):
        kv.copy_(new, non_blocking=True)  # the compute stream writes
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            slot.copy_(kv, non_blocking=True)
        end = event_on(stream)
        # The store lies behind the wait, so it cannot have begun.
        wait_for(lambda: standin.counts().waiting_for_events == 1, what="a stream that waits")
        assert not end.query()
        assert slot.unique().tolist() == [0]
    end.synchronize()
    assert slot.unique().tolist() == [2]


def test_a_store_that_does_not_wait_reads_what_was_there_before(device, stream, standin):
    """The control of the test above: the stand-in shows a missing wait."""
    kv, new, slot = filled(1, device), pinned(2), pinned(0)
    with standin.held(Way.TO_DEVICE):
        kv.copy_(new, non_blocking=True)
        wait_queued(standin, 1)
        with stream:
            slot.copy_(kv, non_blocking=True)
        event_on(stream).synchronize()
    assert slot.unique().tolist() == [1]


def test_who_waits_for_an_event_waits_for_its_recording_of_that_moment(device, stream, standin):
    source, target, other = pinned(5), filled(0, device), torch.Stream(device=device)
    end = torch.Event(device=device)
    standin.close_gate(Way.TO_DEVICE)
    with stream:
        target.copy_(source, non_blocking=True)
        end.record(stream)
        other.wait_event(end)
        target.copy_(source, non_blocking=True)
        end.record(stream)  # the event is another one from now on
    after_first = event_on(other)
    wait_queued(standin, 1)
    standin.let_pass(Way.TO_DEVICE)
    after_first.synchronize()
    assert not end.query()
    standin.open_gate(Way.TO_DEVICE)
    end.synchronize()
    assert standin.counts().copies_to_device >= 2


def test_one_stream_can_be_held_alone(device, stream, standin):
    other = torch.Stream(device=device)
    source, targets = pinned(7), [filled(0, device) for _ in range(2)]
    with standin.held_stream(stream.native_handle):
        ends = []
        for one, target in zip((stream, other), targets, strict=True):
            with one:
                target.copy_(source, non_blocking=True)
            ends.append(event_on(one))
        ends[1].synchronize()
        assert not ends[0].query()
    ends[0].synchronize()


def test_elapsed_time_tells_the_latency_of_a_copy(device, stream, standin):
    standin.set(latency_to_device_us=20_000)
    source, target = pinned(1), filled(0, device)
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    start.record(stream)
    with stream:
        target.copy_(source, non_blocking=True)
    end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) >= 20


@pytest.mark.parametrize(
    ("way", "settings"),
    [
        (Way.TO_HOST, {"latency_to_host_us": 20_000}),
        (Way.TO_HOST, {"bytes_per_us_to_host": SIZE // 20_000}),
        (Way.ON_DEVICE, {"latency_on_device_us": 20_000}),
    ],
)
def test_each_way_may_be_slow_by_itself(way, settings, device, stream, standin):
    standin.set(**settings)
    source = filled(3, device)  # not slow
    target = pinned(0) if way is Way.TO_HOST else filled(0, device)
    start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
    start.record(stream)
    with stream:
        target.copy_(source, non_blocking=True)
    end.record(stream)
    end.synchronize()
    assert start.elapsed_time(end) >= 20


def test_every_wait_of_the_host_is_counted(device, stream, standin):
    before = standin.counts()
    stream.synchronize()
    event_on(stream).synchronize()
    torch.accelerator.synchronize()
    changes = standin.counts().since(before)
    assert changes == {
        "stream_synchronizations": 1,
        "event_synchronizations": 1,
        "device_synchronizations": 1,
        "main_thread_waits": 3,
    }


def test_a_blocking_copy_is_a_wait_of_the_host(device, standin):
    target, source = filled(0, device), torch.ones(SIZE, dtype=torch.uint8)
    before = standin.counts()
    target.copy_(source, non_blocking=True)
    torch.accelerator.synchronize()
    assert standin.counts().host_waits > before.host_waits + 1


def test_waits_of_other_threads_are_not_those_of_the_main_thread(device, stream, standin):
    def wait() -> None:
        stream.synchronize()
        event_on(stream).synchronize()
        torch.accelerator.synchronize()
        filled(1, device)  # pageable memory: the call copies itself

    before = standin.counts()
    in_thread(wait).join()
    changes = standin.counts().since(before)
    assert changes["stream_synchronizations"] >= 1
    assert changes["event_synchronizations"] == changes["device_synchronizations"] == 1
    assert "main_thread_waits" not in changes
    wait()
    again = standin.counts().since(before)
    assert again["main_thread_waits"] >= 3, "the control: the same calls, made here"


def test_a_stream_that_is_waited_for_may_go_on_with_what_comes_later(device, stream, standin):
    """Waiting for a stream is waiting for what it had been given by then, not for idleness."""
    sources, target = [pinned(1), pinned(2)], filled(0, device)

    def give(source: torch.Tensor) -> torch.Event:
        with stream:
            target.copy_(source, non_blocking=True)
        return event_on(stream)

    standin.close_gate(Way.TO_DEVICE)
    give(sources[0])
    waiting = in_thread(stream.synchronize)
    wait_for(lambda: standin.counts().waiting_for_streams == 1, what="a thread that waits")
    last = give(sources[1])
    standin.let_pass(Way.TO_DEVICE)
    wait_for(lambda: not waiting.is_alive(), what="the end of the wait")
    wait_queued(standin, 1)
    assert not last.query()
    assert target.cpu().unique().tolist() == [1]
    standin.open_gate(Way.TO_DEVICE)
    last.synchronize()
    assert target.cpu().unique().tolist() == [2]


def test_what_orders_streams_makes_the_host_wait_for_nothing(device, stream, standin):
    before = standin.counts()
    other = torch.Stream(device=device)
    other.wait_event(event_on(stream))
    other.wait_stream(stream)
    filled_event = event_on(other)
    wait_for(filled_event.query, what="two streams without work")
    assert standin.counts().host_waits == before.host_waits


def test_each_thread_has_a_current_stream_of_its_own(device, stream, standin):
    seen = []

    def look() -> None:
        torch.npu.set_device(0)
        seen.append(torch.accelerator.current_stream() == stream)
        with stream:
            seen.append(torch.accelerator.current_stream() == stream)

    with stream:
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [False, True]


def test_streams_are_taken_in_turn_from_a_pool_of_32(device, standin):
    """An engine that makes streams per copy would share them with itself."""
    handles = [torch.Stream(device=device).native_handle for _ in range(64)]
    assert len(set(handles)) == 32
    assert handles[:32] == handles[32:]


# ---- host memory -------------------------------------------------------------------------------


def test_pinned_memory_is_known_as_pinned(standin):
    assert torch.empty(SIZE, pin_memory=True).is_pinned()
    assert not torch.empty(SIZE).is_pinned()


def test_registered_memory_is_copied_asynchronously_like_pinned_memory(
    device, stream, standin, acl
):
    mapping, target = Mapping(SIZE), filled(0, device)
    mapping.bytes[:] = 9
    assert not mapping.tensor.is_pinned()
    assert acl.register(mapping.address, SIZE) == 0
    assert mapping.tensor.is_pinned()
    assert mapping.tensor[4096:].is_pinned()
    before = standin.counts()
    with standin.held(Way.TO_DEVICE):
        with stream:
            target.copy_(mapping.tensor, non_blocking=True)
        end = event_on(stream)
        wait_queued(standin, 1)
        assert not end.query()
    end.synchronize()
    assert target.cpu().unique().tolist() == [9]
    assert standin.counts().since(before)["async_copies"] == 1
    assert acl.unregister(mapping.address) == 0
    assert not mapping.tensor.is_pinned()


def test_torch_npu_registers_with_the_same_call(standin):
    mapping = Mapping(SIZE)
    runtime = torch.npu.npurt()
    assert runtime.npuHostRegister(mapping.address, SIZE, 0x10000000) == 0
    assert standin.counts().registered_ranges == 1
    assert runtime.npuHostUnregister(mapping.address) == 0
    assert standin.counts().registered_ranges == 0


# ---- torch_npu's queue -------------------------------------------------------------------------


def test_a_handle_asked_for_too_early_overtakes_what_torch_npu_holds_back(
    device, stream, standin, acl
):
    """torch_npu has one queue for all its streams; asking for a handle lets it run empty first.

    A pageable copy blocks that queue here. A wait behind it has not come to its stream when a raw
    call with an old handle does.
    """
    other = torch.Stream(device=device)
    early = other.native_handle
    slot, kv, target = pinned(0), filled(4, device), filled(0, device)
    source = torch.zeros(SIZE, dtype=torch.uint8)

    def block_the_queue() -> None:
        torch.npu.set_device(0)
        with stream:
            source.copy_(target, non_blocking=True)

    with standin.held_stream(stream.native_handle):
        with stream:
            target.copy_(pinned(1), non_blocking=True)
        held = event_on(stream)
        wait_queued(standin, 1)
        before = standin.counts()
        thread = threading.Thread(target=block_the_queue)
        thread.start()
        wait_for(lambda: standin.counts().blocking_copies > before.blocking_copies, what="a block")
        other.wait_event(held)
        assert acl.copy_async(Way.TO_HOST, slot.data_ptr(), kv.data_ptr(), SIZE, early) == 0
        wait_for(lambda: standin.counts().copies_to_host > before.copies_to_host, what="a copy")
        assert not held.query()
    thread.join()
    assert slot.unique().tolist() == [4]
