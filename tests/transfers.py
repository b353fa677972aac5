"""One suite of transfers for every device: what is stored comes back bit-exact, elsewhere.

A subclass says which device, and makes its copy engine. Tensors are only made, filled by copies and
read back: nothing more works on every stand-in.
"""

from __future__ import annotations

import mmap
import threading

import numpy as np
import pytest
import torch

from tests.processes import wait_for
from tierkv.connectors.vllm.kv_layout import describe_layers
from tierkv.device.base import Descriptors, Direction
from tierkv.device.layout import KvLayout, Pages
from tierkv.types import FRAME_BYTES, slot_bytes_of

BLOCKS = 8
SLOTS = 12
SEED = 20261130


class HostPool:
    """Memory as the pool's: mapped, page-aligned, shared."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.size = size


def separate(device, dtype=torch.bfloat16):
    """K and V apart, V with heads of another size."""
    return {
        "l0.k": torch.empty(BLOCKS, 16, 2, 64, dtype=dtype, device=device),
        "l0.v": torch.empty(BLOCKS, 16, 2, 32, dtype=dtype, device=device),
    }


def latent(device):
    """MLA: the compressed part and the rotary part."""
    return {
        "l0.nope": torch.empty(BLOCKS, 16, 1, 512, dtype=torch.bfloat16, device=device),
        "l0.rope": torch.empty(BLOCKS, 16, 1, 64, dtype=torch.bfloat16, device=device),
    }


def key_only(device):
    """A layer that keeps K alone."""
    return {"l0": torch.empty(BLOCKS, 16, 1, 128, dtype=torch.int8, device=device)}


def with_scales(device):
    """Quantised values and their scales, views of one storage, page after page."""
    page = 16 * 2 * 64 + 16 * 2 * 4
    raw = torch.empty(BLOCKS, page, dtype=torch.int8, device=device)
    return {"l0.k": raw[:, : 16 * 2 * 64], "l0.scale": raw[:, 16 * 2 * 64 :]}


def interleaved(device):
    """Two layers whose pages alternate in one storage."""
    raw = torch.empty(BLOCKS, 2, 1024, dtype=torch.int8, device=device)
    return {"l0": raw[:, 0], "l1": raw[:, 1]}


def padded(device):
    """Blocks with unused bytes behind each, and the first one not at the storage's start."""
    raw = torch.empty(BLOCKS * 1536 + 512, dtype=torch.int8, device=device)
    return {"l0": raw[512:].view(BLOCKS, 1536)[:, :1000]}


LAYOUTS = [separate, latent, key_only, with_scales, interleaved, padded]
each_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)


class TransferSuite:
    """Subclass it, name it `Test...`, and give it a device and an engine."""

    device = torch.device("cpu")

    @pytest.fixture
    def engine(self):
        raise NotImplementedError

    # ---- tools ----

    def fill(self, tensors, seed: int) -> dict[str, torch.Tensor]:
        """Give every tensor random bytes; what they are, on the CPU."""
        dice = torch.Generator().manual_seed(seed)
        found = {}
        for name, tensor in tensors.items():
            shape = (*tensor.shape[:-1], tensor.shape[-1] * tensor.element_size())
            raw = torch.randint(-128, 128, shape, dtype=torch.int8, generator=dice)
            found[name] = raw.view(tensor.dtype)
            self.put(tensor, found[name])
        return found

    def put(self, tensor, values) -> None:
        tensor.copy_(values)

    def get(self, tensor) -> torch.Tensor:
        return tensor.cpu()

    def same(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Bit for bit; NaNs of random bytes are equal to themselves here."""
        pair = (one.contiguous().view(torch.int8), other.contiguous().view(torch.int8))
        return torch.equal(*pair)

    def end(self, event) -> None:
        wait_for(event.is_done, what="a copy")
        assert event.is_ok

    def world(self, layout) -> tuple[dict, KvLayout, HostPool, int]:
        tensors = layout(self.device)
        described = KvLayout(describe_layers(tensors, BLOCKS), 1)
        slot = slot_bytes_of(described.geometry.bytes)
        return tensors, described, HostPool(slot * SLOTS), slot

    def pages(self, described, pool, slot, blocks, slots) -> Descriptors:
        places = Pages(tuple(blocks), tuple(s * slot for s in slots), (0,) * len(blocks))
        return described.descriptors(described.names, places, pool.address, 0)

    def adopt(self, engine, pool) -> None:
        if hasattr(engine, "adopt"):
            engine.adopt(pool.address, pool.size, threading.Event())

    # ---- tests ----

    @each_layout
    def test_what_is_stored_comes_back_into_other_blocks(self, engine, layout):
        tensors, described, pool, slot = self.world(layout)
        self.adopt(engine, pool)
        stored = self.fill(tensors, SEED)
        source, slots, target = [1, 2, 3, 6], [4, 5, 9, 0], [7, 0, 5, 4]
        self.end(engine.submit(
            Direction.STORE, self.pages(described, pool, slot, source, slots)
        ))  # fmt: skip
        before = self.fill(tensors, SEED + 1)
        load = engine.submit(Direction.LOAD, self.pages(described, pool, slot, target, slots))
        load.wait()
        self.end(load)
        for name, tensor in tensors.items():
            found = self.get(tensor)
            for block in range(BLOCKS):
                is_target = block in target
                right = (
                    stored[name][source[target.index(block)]] if is_target else before[name][block]
                )
                assert self.same(found[block], right), (name, block)

    @each_layout
    def test_the_bytes_in_the_pool_are_those_of_the_device(self, engine, layout):
        tensors, described, pool, slot = self.world(layout)
        self.adopt(engine, pool)
        stored = self.fill(tensors, SEED)
        self.end(engine.submit(Direction.STORE, self.pages(described, pool, slot, [3], [2])))
        at = 2 * slot + FRAME_BYTES
        for name in described.names:
            page = stored[name][3].contiguous().view(torch.int8).numpy().tobytes()
            assert pool.bytes[at : at + len(page)].tobytes() == page
            at += len(page)
        assert not pool.bytes[: 2 * slot + FRAME_BYTES].any(), "nothing else was written"
        assert not pool.bytes[at:].any(), "nothing else was written"

    def test_a_damaged_byte_in_the_pool_shows(self, engine):
        """The negative control of all above."""
        tensors, described, pool, slot = self.world(key_only)
        self.adopt(engine, pool)
        stored = self.fill(tensors, SEED)
        self.end(engine.submit(Direction.STORE, self.pages(described, pool, slot, [3], [2])))
        pool.bytes[2 * slot + FRAME_BYTES + 100] ^= 1
        load = engine.submit(Direction.LOAD, self.pages(described, pool, slot, [0], [2]))
        load.wait()
        self.end(load)
        assert not self.same(self.get(tensors["l0"])[0], stored["l0"][3])

    def test_copies_of_one_direction_run_in_order(self, engine):
        tensors, described, pool, slot = self.world(key_only)
        self.adopt(engine, pool)
        stored = self.fill(tensors, SEED)
        events = [
            engine.submit(Direction.STORE, self.pages(described, pool, slot, [block], [0]))
            for block in range(BLOCKS)
        ]
        self.end(events[-1])
        assert all(event.is_done() for event in events), "the last one ends last"
        page = stored["l0"][BLOCKS - 1].contiguous().view(torch.int8).numpy().tobytes()
        assert pool.bytes[FRAME_BYTES : FRAME_BYTES + len(page)].tobytes() == page

    def test_many_copies_go_in_one_submission(self, engine):
        tensors = {"l0": torch.empty(BLOCKS, 8192, dtype=torch.int8, device=self.device)}
        stored = self.fill(tensors, SEED)
        pool = HostPool(BLOCKS * 8192)
        self.adopt(engine, pool)
        count = BLOCKS * 8192 // 4
        order = np.random.default_rng(SEED).permutation(count).astype(np.int64)
        device = tensors["l0"].data_ptr() + order * 4
        host = pool.address + np.arange(count, dtype=np.int64) * 4
        copies = Descriptors(device, host, np.full(count, 4, np.int64))
        self.end(engine.submit(Direction.STORE, copies))
        flat = stored["l0"].numpy().reshape(-1).view(np.int32)
        assert np.array_equal(pool.bytes.view(np.int32), flat[order])

    def test_an_empty_submission_ends(self, engine):
        nothing = np.zeros(0, np.int64)
        event = engine.submit(Direction.LOAD, Descriptors(nothing, nothing, nothing))
        event.wait()
        self.end(event)

    def test_closing_ends_what_is_queued(self, engine):
        tensors, described, pool, slot = self.world(separate)
        self.adopt(engine, pool)
        self.fill(tensors, SEED)
        events = [
            engine.submit(Direction.STORE, self.pages(described, pool, slot, [n], [n]))
            for n in range(BLOCKS)
        ]
        engine.close()
        assert all(event.is_done() and event.is_ok for event in events)
