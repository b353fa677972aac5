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

from tests.layouts import BLOCKS, ROWS, padded_blocks
from tests.processes import wait_for
from tierkv.connectors.vllm.kv_layout import describe_layers
from tierkv.device.base import Descriptors, Direction
from tierkv.device.layout import KvLayout, Pages
from tierkv.types import FRAME_BYTES, slot_bytes_of

SLOTS = 12
SEED = 20261130


class HostPool:
    """Memory as the pool's: mapped, page-aligned, shared."""

    def __init__(self, size: int) -> None:
        self._map = mmap.mmap(-1, size)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        self.size = size


def key_only(device):
    """A layer that keeps K alone."""
    return {"l0": torch.empty(BLOCKS, 16, 1, 128, dtype=torch.int8, device=device)}


each_row = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.__name__)


class Scene:
    """A row of the layout table with its description and a pool."""

    def __init__(self, device, row) -> None:
        self.layout = row(device)
        described = describe_layers(self.layout.tensors, self.layout.blocks, self.layout.pages)
        self.described = KvLayout(described, 1)
        self.slot = slot_bytes_of(self.described.geometry.bytes)
        self.pool = HostPool(self.slot * SLOTS)

    def fill(self, seed: int) -> list[np.ndarray]:
        """Give all memory random bytes, also those that no view covers; what they are."""
        print(f"seed={seed}")
        dice = np.random.default_rng(seed)
        found = [dice.integers(0, 256, len(raw), np.uint8) for raw in self.layout.memory.all]
        for raw, values in zip(self.layout.memory.all, found, strict=True):
            raw.copy_(torch.from_numpy(values))
        return found

    def content(self) -> list[np.ndarray]:
        return [raw.cpu().numpy() for raw in self.layout.memory.all]

    def pages(self, blocks, slots) -> Descriptors:
        places = Pages(tuple(blocks), tuple(s * self.slot for s in slots), (0,) * len(blocks))
        return self.described.descriptors(self.described.names, places, self.pool.address, 0)

    def block_of(self, content: list[np.ndarray], block: int) -> np.ndarray:
        """The bytes of a block, part by part."""
        places = self.layout.places(block)
        return np.concatenate([content[number][at] for number, at in places])

    def after_load(self, stored, before, pairs) -> list[np.ndarray]:
        """What must lie in memory once (source, target) blocks were stored and loaded."""
        expected = [content.copy() for content in before]
        for source, target in pairs:
            both = zip(self.layout.places(source), self.layout.places(target), strict=True)
            for (number, at), (_, to) in both:
                expected[number][to] = stored[number][at]
        return expected

    @staticmethod
    def differences(one: list[np.ndarray], other: list[np.ndarray]) -> list[tuple[int, int]]:
        """Per memory that differs its number, and where its first differing byte lies."""
        unequal = [np.flatnonzero(a != b) for a, b in zip(one, other, strict=True)]
        return [(number, int(at[0])) for number, at in enumerate(unequal) if len(at)]


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

    @each_row
    def test_what_is_stored_comes_back_into_other_blocks(self, engine, row):
        """And nothing else changes: neither other blocks nor what no view covers."""
        scene = Scene(self.device, row)
        self.adopt(engine, scene.pool)
        stored = scene.fill(SEED)
        source, slots, target = [1, 2, 3, 6], [4, 5, 9, 0], [7, 0, 5, 4]
        self.end(engine.submit(Direction.STORE, scene.pages(source, slots)))
        assert scene.differences(scene.content(), stored) == [], "a store reads only"
        before = scene.fill(SEED + 1)
        load = engine.submit(Direction.LOAD, scene.pages(target, slots))
        load.wait()
        self.end(load)
        expected = scene.after_load(stored, before, zip(source, target, strict=True))
        found = scene.content()
        assert scene.differences(found, before), "something was loaded"
        assert scene.differences(found, expected) == []

    @each_row
    def test_the_bytes_in_the_pool_are_those_of_the_device(self, engine, row):
        scene = Scene(self.device, row)
        self.adopt(engine, scene.pool)
        stored = scene.fill(SEED)
        self.end(engine.submit(Direction.STORE, scene.pages([3], [2])))
        expected = scene.block_of(stored, 3)
        at = 2 * scene.slot + FRAME_BYTES
        end = at + len(expected)
        assert np.array_equal(scene.pool.bytes[at:end], expected)
        assert not np.array_equal(expected, scene.block_of(stored, 2)), "the control"
        assert not scene.pool.bytes[:at].any(), "nothing else was written"
        assert not scene.pool.bytes[end:].any(), "nothing else was written"

    def test_a_byte_between_the_blocks_that_a_load_writes_shows(self, engine):
        """The negative control of what must not change: every copy is a byte too long."""
        scene = Scene(self.device, padded_blocks)
        self.adopt(engine, scene.pool)
        stored = scene.fill(SEED)
        self.end(engine.submit(Direction.STORE, scene.pages([3], [2])))
        (number, at), *_ = scene.layout.places(0)
        behind = int(at[-1]) + 1
        end = 2 * scene.slot + FRAME_BYTES + len(at)
        scene.pool.bytes[end] = stored[number][behind] ^ 0xFF
        pages = scene.pages([0], [2])
        load = engine.submit(Direction.LOAD, Descriptors(pages.device, pages.host, pages.sizes + 1))
        load.wait()
        self.end(load)
        expected = scene.after_load(stored, stored, [(3, 0)])
        assert scene.differences(scene.content(), expected) == [(number, behind)]

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
        tensors, described, pool, slot = self.world(key_only)
        self.adopt(engine, pool)
        self.fill(tensors, SEED)
        events = [
            engine.submit(Direction.STORE, self.pages(described, pool, slot, [n], [n]))
            for n in range(BLOCKS)
        ]
        engine.close()
        assert all(event.is_done() and event.is_ok for event in events)
