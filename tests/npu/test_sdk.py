"""The SDK over NPU memory: a real daemon and pool, tensors of the real torch_npu."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

import tierkv
from tests.npu.standin import Way
from tests.processes import wait_for
from tests.sdk_node import SdkNode
from tierkv.errors import LayoutMismatchError
from tierkv.pool import attach_pool, pool_path
from tierkv.types import FRAME_BYTES

TOKENS, BLOCKS = 4, 8
DEVICE = "npu:0"


@pytest.fixture
def node(standin, tmp_path):
    node = SdkNode(tmp_path, slots=64)
    yield node
    node.close()


class Memory:
    """K and V of one layer on the device, as an engine on Ascend lays them out."""

    def __init__(self) -> None:
        self.tensors = {
            "k": torch.empty(BLOCKS, TOKENS, 2, 64, dtype=torch.float16, device=DEVICE),
            "v": torch.empty(BLOCKS, TOKENS, 2, 32, dtype=torch.float16, device=DEVICE),
        }

    def fill(self, seed: int) -> dict[str, torch.Tensor]:
        dice = torch.Generator().manual_seed(seed)
        found = {}
        for name, tensor in self.tensors.items():
            found[name] = torch.randn(tensor.shape, generator=dice).to(tensor.dtype)
            tensor.copy_(found[name])
        return found

    def read(self) -> dict[str, torch.Tensor]:
        return {name: tensor.cpu() for name, tensor in self.tensors.items()}


def open_cache(node: SdkNode, memory: Memory) -> tierkv.Cache:
    cache = node.cache(memory, "m")
    wait_for(
        lambda: [d["rung"] for d in node.stats()["devices"]] == ["batch"],
        cache,
        what="the registration",
    )
    return cache


def test_blocks_come_back_bit_exact_from_the_rung_that_is_told(node):
    memory = Memory()
    stored = memory.fill(1)
    with open_cache(node, memory) as cache:
        (told,) = node.stats()["devices"]
        assert (told["device"], told["problem"]) == (DEVICE, "")
        assert told["registered"] == told["pool"] > 0
        keys = cache.hash_tokens(range(3 * TOKENS))
        assert cache.store(keys, [0, 1, 2]) == 3
        memory.fill(2)
        with cache.lookup(keys) as hit:
            assert hit.blocks == 3
            assert cache.load(hit, [7, 5, 3]) == 3
        found = memory.read()
        for name, values in stored.items():
            assert torch.equal(found[name][[7, 5, 3]], values[[0, 1, 2]])


def test_a_damaged_byte_in_the_pool_shows(node):
    """The negative control."""
    memory = Memory()
    stored = memory.fill(1)
    with open_cache(node, memory) as cache:
        keys = cache.hash_tokens(range(TOKENS))
        assert cache.store(keys, [0]) == 1
        pool = attach_pool(pool_path(node.config.dram.directory, node.socket))
        first = stored["k"][0].view(torch.uint8).numpy().reshape(-1)
        (at,) = [
            offset + FRAME_BYTES
            for offset in range(0, pool.capacity, 4096)
            if np.array_equal(pool.bytes[offset + FRAME_BYTES :][: first.size], first)
        ]
        pool.bytes[at + 5] ^= 1
        with cache.lookup(keys) as hit:
            assert cache.load(hit, [4]) == 1
        assert not torch.equal(memory.read()["k"][4], stored["k"][0])
        pool.close()


def test_a_store_comes_after_the_stream_of_its_caller_whoever_gets_it_on(node, standin):
    """Its slots are granted later, to a thread whose own stream knows nothing of the blocks."""
    memory = Memory()
    memory.fill(1)
    fresh = torch.full((BLOCKS, TOKENS, 2, 64), 7.0, dtype=torch.float16).pin_memory()
    with open_cache(node, memory) as cache:
        keys = cache.hash_tokens(range(2 * TOKENS))
        side = torch.Stream(device=DEVICE)
        with standin.held(Way.TO_DEVICE):
            with side:
                memory.tensors["k"].copy_(fresh, non_blocking=True)  # stands for a kernel
                copy = cache.start_store(keys, [0, 1])
            other = threading.Thread(target=lambda: get_on(cache, node))
            other.start()
            other.join()
            assert not copy.is_done
        assert copy.result() == 2
        memory.fill(2)
        with cache.lookup(keys) as hit:
            assert cache.load(hit, [5, 6]) == 2
        assert (memory.read()["k"][[5, 6]] == 7.0).all()


def get_on(cache: tierkv.Cache, node: SdkNode) -> None:
    """Poll until the slots of a store are granted; its copies are submitted by then."""
    torch.accelerator.set_device_index(0)
    wait_for(lambda: node.held()[0] == 1, cache, what="the slots")
    for _ in range(3):
        cache.poll()


def test_a_copy_that_fails_on_the_device_is_an_error_of_that_load(node, standin):
    memory = Memory()
    stored = memory.fill(1)
    with open_cache(node, memory) as cache:
        keys = cache.hash_tokens(range(2 * TOKENS))
        assert cache.store(keys, [0, 1]) == 2
        with cache.lookup(keys) as hit:
            standin.fail_copies(times=1, way=Way.TO_DEVICE)
            with pytest.raises(tierkv.LoadFailedError):
                cache.load(hit, [4, 5])
            assert cache.load(hit, [6, 7]) == 2
        assert torch.equal(memory.read()["k"][[6, 7]], stored["k"][[0, 1]])


def test_a_store_that_fails_on_the_device_is_never_seen(node, standin):
    memory = Memory()
    memory.fill(1)
    with open_cache(node, memory) as cache:
        keys = cache.hash_tokens(range(TOKENS))
        standin.fail_copies(times=1, way=Way.TO_HOST)
        assert cache.store(keys, [0]) == 0
        with cache.lookup(keys) as hit:
            assert hit.blocks == 0
        assert node.stats()["counters"]["commit_failed"] == 1


def test_tensors_of_two_devices_are_refused(node):
    memory = Memory()
    memory.tensors["w"] = torch.empty(BLOCKS, 16)
    with pytest.raises(LayoutMismatchError, match=r"cpu, npu:0; a cache serves one device"):
        node.cache(memory, "m")
