"""The stand-in under direct calls of the runtime: batches, registration, and what goes wrong.

What a call does where it fails follows the runtime's public source: a batch is a loop.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from tests.npu.acl import GLOBAL, NO_INDEX, PINNED, RELAXED, Acl, Batch
from tests.npu.memory import Mapping, aligned_on_device, dice
from tests.npu.standin import REGISTRATIONS, Code, Way
from tests.processes import wait_for

PAGE = 16 << 10
PAGES = 8
SIZE = PAGES * PAGE


@pytest.fixture
def device(npu) -> torch.device:
    return torch.device("npu:0")


@pytest.fixture
def stream(standin, device) -> torch.Stream:
    return torch.Stream(device=device)


@pytest.fixture
def kv(device) -> torch.Tensor:
    """Memory of the device, of `PAGES` pages that hold 100, 101 ..."""
    tensor = aligned_on_device(SIZE, device)
    values = torch.arange(100, 100 + PAGES, dtype=torch.uint8)
    tensor.copy_(values.repeat_interleave(PAGE))
    return tensor


@dataclass(frozen=True)
class Scene:
    """A device's memory, a registered pool, and a stream between them."""

    kv: torch.Tensor
    pool: Mapping
    stream: torch.Stream
    acl: Acl

    def batch(self, way: Way, blocks: list[int], slots: list[int]) -> Batch:
        return batch(way, self.kv, blocks, self.pool, slots)

    def submit(self, way: Way, copies: Batch) -> tuple[int, int]:
        return self.acl.copy_batch(way, copies, self.stream.native_handle)

    def store(self, blocks: list[int], slots: list[int]) -> tuple[int, int]:
        return self.submit(Way.TO_HOST, self.batch(Way.TO_HOST, blocks, slots))

    def load(self, blocks: list[int], slots: list[int]) -> tuple[int, int]:
        return self.submit(Way.TO_DEVICE, self.batch(Way.TO_DEVICE, blocks, slots))

    def end(self) -> torch.Event:
        event = torch.Event(device=self.stream.device)
        event.record(self.stream)
        return event

    def pages_of_pool(self) -> list[int]:
        return pages_of(self.pool.tensor)


@pytest.fixture
def scene(kv, stream, standin, acl):
    """The pages of the pool hold 0, 1, 2 ..."""
    mapping = Mapping(SIZE)
    mapping.bytes[:] = np.repeat(np.arange(PAGES, dtype=np.uint8), PAGE)
    assert acl.register(mapping.address, SIZE) == Code.OK
    yield Scene(kv, mapping, stream, acl)
    standin.reset()
    acl.unregister(mapping.address)


def batch(way: Way, kv: torch.Tensor, blocks: list[int], pool: Mapping, slots: list[int]) -> Batch:
    on_device = np.array([kv.data_ptr() + block * PAGE for block in blocks], np.uint64)
    on_host = np.array([pool.address + slot * PAGE for slot in slots], np.uint64)
    targets, sources = (on_device, on_host) if way is Way.TO_DEVICE else (on_host, on_device)
    return Batch(targets, sources, np.full(len(blocks), PAGE, np.uint64))


def pages_of(memory: torch.Tensor) -> list[int]:
    """The value of each page; fails if one holds several."""
    pages = memory.cpu().view(PAGES, PAGE)
    assert (pages == pages[:, :1]).all()
    return pages[:, 0].tolist()


# ---- batches -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_batch_moves_scattered_pages_both_ways(seed, device, stream, standin, acl):
    """Keys and values apart, as on Ascend; out to slots, and back into other blocks."""
    data = [dice(seed + i, SIZE) for i in range(2)]
    layers = [aligned_on_device(SIZE, device) for _ in data]
    for layer, page in zip(layers, data, strict=True):
        layer.copy_(page)
    mapping = Mapping(2 * SIZE)
    assert acl.register(mapping.address, 2 * SIZE) == Code.OK
    here = list(itertools.product(range(2), (1, 3, 6)))  # layer, block
    slots = np.array([mapping.address + i * 2 * PAGE for i in range(len(here))], np.uint64)
    sizes = np.full(len(here), PAGE, np.uint64)

    def addresses(shift: int) -> np.ndarray:
        return np.array([layers[i].data_ptr() + (b + shift) * PAGE for i, b in here], np.uint64)

    stores = Batch(slots, addresses(0), sizes)
    loads = Batch(addresses(1), slots, sizes)
    before = standin.counts()
    assert acl.copy_batch(Way.TO_HOST, stores, stream.native_handle) == (Code.OK, NO_INDEX)
    assert acl.copy_batch(Way.TO_DEVICE, loads, stream.native_handle) == (Code.OK, NO_INDEX)
    stream.synchronize()
    for (layer, block), slot in zip(here, range(0, 2 * len(here), 2), strict=True):
        expected = data[layer][block * PAGE : (block + 1) * PAGE]
        assert torch.equal(mapping.tensor[slot * PAGE : (slot + 1) * PAGE], expected)
        restored = layers[layer][(block + 1) * PAGE : (block + 2) * PAGE].cpu()
        assert torch.equal(restored, expected)
    changes = standin.counts().since(before)
    assert (changes["batch_copies"], changes["descriptors"]) == (2, 2 * len(here))
    assert acl.unregister(mapping.address) == Code.OK


def test_a_batch_of_registered_memory_is_not_over_when_the_call_returns(scene, standin):
    with standin.held(Way.TO_HOST):
        before = standin.counts()
        assert scene.store([0, 1, 2], [5, 6, 7])[0] == Code.OK
        end = scene.end()
        standin.let_pass(Way.TO_HOST)
        wait_for(lambda: standin.counts().copies_to_host > before.copies_to_host, what="a copy")
        wait_for(lambda: standin.counts().waiting_at_gates == 1, what="the next copy")
        assert scene.pages_of_pool() == [0, 1, 2, 3, 4, 100, 6, 7]
        assert not end.query()
        assert standin.counts().host_waits == before.host_waits
    end.synchronize()
    assert scene.pages_of_pool() == [0, 1, 2, 3, 4, 100, 101, 102]


def test_a_batch_of_pageable_memory_is_over_when_the_call_returns(scene, standin):
    mapping = Mapping(SIZE)  # not registered
    stores = batch(Way.TO_HOST, scene.kv, [0, 1], mapping, [0, 1])
    before = standin.counts()
    assert scene.submit(Way.TO_HOST, stores)[0] == Code.OK
    assert pages_of(mapping.tensor)[:2] == [100, 101]
    assert standin.counts().since(before)["blocking_copies"] == 2


@pytest.mark.parametrize("is_late", [False, True])
def test_lists_of_a_batch_are_read_in_the_call_unless_a_test_wants_it_late(is_late, scene, standin):
    standin.set(batch_reads_late=int(is_late))
    stores = scene.batch(Way.TO_HOST, [0, 1], [0, 1])
    with standin.held(Way.TO_HOST):
        assert scene.submit(Way.TO_HOST, stores)[0] == Code.OK
        stores.sources[:] = stores.sources[::-1].copy()  # the lists are used again too early
    scene.end().synchronize()
    assert scene.pages_of_pool()[:2] == ([101, 100] if is_late else [100, 101])


def test_a_batch_that_is_not_supported_says_so_and_copies_nothing(scene, standin):
    standin.set(batch_is_supported=0)
    before = standin.counts()
    assert scene.store([0], [0])[0] == Code.NOT_SUPPORTED
    assert standin.counts() == before


def test_a_batch_may_be_limited_to_so_many_copies(scene, standin):
    standin.set(batch_descriptors_max=2)
    assert scene.store([0, 1], [0, 1])[0] == Code.OK
    assert scene.store([0, 1, 2], [2, 3, 4])[0] == Code.INVALID
    scene.end().synchronize()
    assert scene.pages_of_pool() == [100, 101, 2, 3, 4, 5, 6, 7]


def wrong_way(stores: Batch) -> None:
    stores.sources[1], stores.targets[1] = stores.targets[1], stores.sources[1]


def past_the_end(stores: Batch) -> None:
    stores.targets[1] += np.uint64(SIZE - PAGE - 1)


def empty(stores: Batch) -> None:
    stores.sizes[1] = 0


@pytest.mark.parametrize("spoil", [wrong_way, past_the_end, empty])
def test_a_batch_stops_at_a_bad_copy_and_those_before_it_are_made(spoil, scene, standin):
    stores = scene.batch(Way.TO_HOST, [0, 1, 2], [0, 1, 2])
    spoil(stores)
    code, index = scene.submit(Way.TO_HOST, stores)
    assert (code, index) == (Code.INVALID, 1)
    scene.end().synchronize()
    assert scene.pages_of_pool() == [100, 1, 2, 3, 4, 5, 6, 7]


def test_a_batch_for_another_device_is_refused(scene, standin, acl):
    stores = scene.batch(Way.TO_HOST, [0], [0])
    code, index = acl.copy_batch(Way.TO_HOST, stores, scene.stream.native_handle, device=1)
    assert (code, index) == (Code.INVALID, 0)


def test_a_copy_across_two_registrations_is_refused(scene, standin, acl):
    mapping = Mapping(SIZE)
    halves = (mapping.address, mapping.address + SIZE // 2)
    assert [acl.register(half, SIZE // 2) for half in halves] == [Code.OK, Code.OK]
    across = mapping.address + SIZE // 2 - PAGE // 2
    code = acl.copy_async(
        Way.TO_HOST, across, scene.kv.data_ptr(), PAGE, scene.stream.native_handle
    )
    assert code == Code.INVALID
    assert [acl.unregister(half) for half in halves] == [Code.OK, Code.OK]


@pytest.mark.parametrize("way", [Way.TO_DEVICE, Way.ON_DEVICE])
def test_a_single_copy_in_the_wrong_direction_is_refused(way, scene, standin, acl):
    for code in (
        acl.copy_async(
            way, scene.pool.address, scene.kv.data_ptr(), PAGE, scene.stream.native_handle
        ),
        acl.copy(way, scene.pool.address, scene.kv.data_ptr(), PAGE),
    ):
        assert code == Code.INVALID
    assert scene.pages_of_pool()[0] == 0


def test_a_thread_without_a_device_cannot_call(scene, standin, acl):
    mapping, handle, codes = Mapping(SIZE), scene.stream.native_handle, []

    def call() -> None:
        codes.append(acl.register(mapping.address, SIZE))
        codes.append(acl.copy(Way.TO_HOST, scene.pool.address, scene.kv.data_ptr(), PAGE))
        codes.append(
            acl.copy_async(Way.TO_HOST, scene.pool.address, scene.kv.data_ptr(), PAGE, handle)
        )
        acl.set_device(0)
        codes.append(acl.register(mapping.address, SIZE))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert codes == [Code.NO_CONTEXT] * 3 + [Code.OK]
    assert acl.unregister(mapping.address) == Code.OK


# ---- failures ----------------------------------------------------------------------------------


def test_a_refused_copy_of_a_batch_leaves_those_before_it_on_their_way(scene, standin):
    standin.fail_submissions(after=2, way=Way.TO_HOST)
    assert scene.store([0, 1, 2, 3], [0, 1, 2, 3]) == (Code.DRIVER_FAILED, NO_INDEX)
    scene.end().synchronize()
    assert scene.pages_of_pool()[:4] == [100, 101, 2, 3]
    assert scene.store([2, 3], [2, 3]) == (Code.OK, NO_INDEX)
    scene.stream.synchronize()
    assert scene.pages_of_pool()[:4] == [100, 101, 102, 103]


def test_an_event_behind_a_failed_copy_tells_nothing_and_the_stream_tells_once(scene, standin):
    standin.fail_copies(after=1)
    assert scene.store([0, 1, 2], [0, 1, 2])[0] == Code.OK
    end = scene.end()
    end.synchronize()
    assert end.query()
    assert scene.stream.query()
    assert scene.pages_of_pool()[:3] == [100, 1, 102]
    assert standin.counts().failed_copies == 1
    with pytest.raises(RuntimeError, match=str(Code.DMA_FAILED.value)):
        scene.stream.synchronize()
    scene.stream.synchronize()


def test_failed_copies_may_be_made_to_show_in_queries(scene, standin):
    standin.set(errors_show_in_queries=1)
    standin.fail_copies()
    assert scene.store([0], [0])[0] == Code.OK
    end = scene.end()
    for ask in (end.synchronize, end.query, scene.stream.query):
        with pytest.raises(RuntimeError, match=str(Code.DMA_FAILED.value)):
            ask()


def test_a_blocking_copy_that_fails_says_so_itself(scene, standin, acl):
    standin.fail_copies()
    addresses = scene.pool.address, scene.kv.data_ptr()
    assert acl.copy(Way.TO_HOST, *addresses, PAGE) == Code.DMA_FAILED
    assert scene.pages_of_pool()[0] == 0
    assert acl.copy(Way.TO_HOST, *addresses, PAGE) == Code.OK
    assert scene.pages_of_pool()[0] == 100
    scene.stream.synchronize()  # it is no stream's failure


def test_only_copies_of_the_ordered_way_fail(scene, standin):
    standin.fail_copies(way=Way.TO_DEVICE)
    assert scene.store([0], [0])[0] == Code.OK
    scene.stream.synchronize()
    assert scene.load([1], [0])[0] == Code.OK
    with pytest.raises(RuntimeError):
        scene.stream.synchronize()
    assert pages_of(scene.kv)[:2] == [100, 101]


# ---- registration ------------------------------------------------------------------------------


def test_registration_wants_pages_a_size_and_a_known_flag(standin, acl):
    mapping = Mapping(SIZE)
    for address, size, flags in (
        (0, SIZE, PINNED),
        (mapping.address, 0, PINNED),
        (mapping.address + 512, SIZE - 4096, PINNED),
        (mapping.address, SIZE, 0),
        (mapping.address, SIZE, 0x40),
        (1 << 46, SIZE, PINNED),  # nothing is mapped there
    ):
        assert acl.register(address, size, flags) == Code.INVALID
    assert standin.counts().refused_registrations == 6
    assert standin.counts().registered_bytes == 0


def test_registrations_do_not_overlap(scene, standin, acl):
    for address, size in (
        (scene.pool.address, SIZE),
        (scene.pool.address + 4096, 4096),
        (scene.pool.address + SIZE - 4096, 4096),
    ):
        assert acl.register(address, size) == Code.ALREADY_REGISTERED


def test_what_is_not_registered_cannot_be_unregistered(scene, standin, acl):
    assert acl.unregister(scene.pool.address + 4096) == Code.NOT_REGISTERED
    assert acl.unregister(scene.pool.address) == Code.OK
    assert acl.unregister(scene.pool.address) == Code.NOT_REGISTERED
    assert standin.counts().unregistrations == 1


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"register_is_supported": 0}, [Code.NOT_SUPPORTED] * 4),
        ({"register_call_max": PAGE}, [Code.OK, Code.OK, Code.NO_MEMORY, Code.OK]),
        ({"register_total_max": 2 * PAGE}, [Code.OK, Code.OK, Code.NO_MEMORY, Code.NO_MEMORY]),
    ],
)
def test_registration_may_be_limited_like_on_a_real_host(settings, expected, standin, acl):
    """A kernel that is too old, a region that is too large, memlock that is too small."""
    standin.set(**settings)
    mapping = Mapping(SIZE)
    pieces = [(0, PAGE), (PAGE, PAGE), (2 * PAGE, 2 * PAGE), (4 * PAGE, PAGE)]
    codes = [acl.register(mapping.address + first, size) for first, size in pieces]
    assert codes == expected
    for (first, _), code in zip(pieces, codes, strict=True):
        if code == Code.OK:
            assert acl.unregister(mapping.address + first) == Code.OK


def test_one_of_several_registrations_may_fail(standin, acl):
    standin.fail_registrations(after=1)
    mapping = Mapping(SIZE)
    codes = [acl.register(mapping.address + i * PAGE, PAGE) for i in range(3)]
    assert codes == [Code.OK, Code.DRIVER_FAILED, Code.OK]
    assert standin.counts().registrations == 2
    for i in (0, 2):
        assert acl.unregister(mapping.address + i * PAGE) == Code.OK


def test_a_registration_may_be_held(standin, acl):
    mapping, codes = Mapping(SIZE), []

    def register() -> None:
        acl.set_device(0)
        codes.append(acl.register(mapping.address, SIZE))

    thread = threading.Thread(target=register)
    with standin.held(REGISTRATIONS):
        thread.start()
        wait_for(lambda: standin.counts().waiting_at_gates == 1, what="a registration")
        assert not mapping.tensor.is_pinned()
        assert codes == []
    thread.join()
    assert codes == [Code.OK]
    assert mapping.tensor.is_pinned()
    assert acl.unregister(mapping.address) == Code.OK


def test_a_registration_may_take_its_time(standin, acl):
    standin.set(register_delay_us=20_000)
    mapping = Mapping(SIZE)
    before = time.monotonic()
    assert acl.register(mapping.address, SIZE) == Code.OK
    assert time.monotonic() - before >= 0.02
    assert acl.unregister(mapping.address) == Code.OK


@pytest.mark.parametrize("is_late", [False, True])
def test_unregistering_under_a_copy_is_a_violation(is_late, scene, standin, acl):
    standin.set(batch_reads_late=int(is_late))
    stores = scene.batch(Way.TO_HOST, [0], [0])
    with standin.held(Way.TO_HOST):
        assert scene.submit(Way.TO_HOST, stores)[0] == Code.OK
        assert acl.unregister(scene.pool.address) == Code.OK
    assert standin.counts().violations == 1
    assert "unregistered under a copy" in standin.last_violation
    standin.reset()  # expected here


def test_freeing_device_memory_under_a_copy_is_a_violation(scene, standin, acl):
    address = ctypes.c_void_p()
    assert acl.library.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(PAGE), 0) == Code.OK
    handle = scene.stream.native_handle
    with standin.held(Way.TO_HOST):
        code = acl.copy_async(Way.TO_HOST, scene.pool.address, address.value, PAGE, handle)
        assert code == Code.OK
        assert acl.library.aclrtFree(address) == Code.OK
    assert standin.counts().violations == 1
    standin.reset()  # expected here


def test_unregistering_after_the_copies_is_none(scene, standin, acl):
    assert scene.store([0], [0])[0] == Code.OK
    scene.end().synchronize()
    assert acl.unregister(scene.pool.address) == Code.OK
    assert standin.counts().violations == 0


# ---- graph capture -----------------------------------------------------------------------------


def test_during_a_capture_some_calls_are_refused_and_spoil_it(scene, standin, acl):
    mapping = Mapping(SIZE)
    standin.set(graph_is_captured=1)
    codes = [
        acl.register(mapping.address, SIZE),
        acl.unregister(scene.pool.address),
        acl.copy(Way.TO_HOST, scene.pool.address, scene.kv.data_ptr(), PAGE),
    ]
    assert codes == [Code.CAPTURING] * 3
    assert standin.counts().violations == 3
    standin.reset()  # expected here


def test_a_thread_may_stay_outside_of_a_capture(scene, standin, acl):
    mapping = Mapping(SIZE)
    standin.set(graph_is_captured=1)
    assert acl.exchange_capture_mode(RELAXED) == GLOBAL
    assert acl.register(mapping.address, SIZE) == Code.OK
    assert acl.unregister(mapping.address) == Code.OK
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(acl.exchange_capture_mode(RELAXED)))
    thread.start()
    thread.join()
    assert seen == [GLOBAL], "each thread has a mode of its own"
    assert acl.exchange_capture_mode(GLOBAL) == RELAXED


# ---- the controls themselves -------------------------------------------------------------------


def test_a_setting_or_counter_that_does_not_exist_is_a_mistake(standin):
    with pytest.raises(AssertionError, match="no setting"):
        standin.set(batch_is_suported=0)
    assert standin.library.standin_count(b"batchcopies") == -1


def test_versions_are_those_that_a_test_sets(standin):
    def version(package: bytes) -> str:
        found = ctypes.create_string_buffer(256)
        assert standin.library.aclsysGetVersionStr(package, found) == Code.OK
        return found.value.decode()

    before = version(b"driver"), version(b"runtime")
    assert before == ("25.5.0", "9.1.0")
    standin.set_driver_version("25.2.0")
    standin.set_runtime_version("8.5.0")
    assert (version(b"driver"), version(b"runtime")) == ("25.2.0", "8.5.0")
    standin.set_driver_version(before[0])
    standin.set_runtime_version(before[1])


def test_a_reset_ends_what_is_held_and_forgets_orders(scene, standin, acl):
    standin.set(batch_is_supported=1, register_is_supported=0, device_bytes=1)
    standin.fail_copies(times=9, after=1)
    standin.close_gate(Way.TO_HOST)
    assert scene.store([0, 1], [0, 1])[0] == Code.OK
    standin.reset()
    assert scene.stream.query()
    assert standin.counts().batch_copies == 0
    assert standin.counts().registered_bytes == SIZE
    scene.stream.synchronize()  # no error is left
    mapping = Mapping(SIZE)
    assert acl.register(mapping.address, SIZE) == Code.OK
    assert acl.unregister(mapping.address) == Code.OK
