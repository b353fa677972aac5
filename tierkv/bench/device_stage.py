"""What the parts of ``tierkv bench device`` stand on: a device with its copy engine, a pool, pages.

A pool's mapping is shown to the engine before anything is measured, as a worker does it in the
background after its start.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from tierkv.bench.device_plan import Budget, Plan
from tierkv.bench.report import say
from tierkv.connectors.vllm.kv_layout import describe_layers
from tierkv.device.base import (
    Addresses,
    CopyEngine,
    CopyEvent,
    Descriptors,
    Direction,
    PoolAdopter,
)
from tierkv.device.facts import CopyFacts, facts_of
from tierkv.device.layout import KvLayout, Pages
from tierkv.device.select import create_copy_engine
from tierkv.pool import Pool, create_pool
from tierkv.types import FRAME_BYTES, slot_bytes_of

SHARED_MEMORY = Path("/dev/shm")
SEED = 7
NUMA = "interleave"  # the default of node.dram.numa
ALL = slice(None)

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class World:
    """A device, its copy engine and a pool, and what is measured there, how long.

    Attributes:
        problems: wrong results, each once.
    """

    device: torch.device
    engine: CopyEngine
    pool: Pool
    plan: Plan
    budget: Budget
    problems: list[str] = field(default_factory=list)

    @property
    def is_cpu(self) -> bool:
        return bool(self.device.type == "cpu")

    @property
    def facts(self) -> CopyFacts:
        """How the engine moves bytes now."""
        return facts_of(self.engine)

    def copies_by_rung(self) -> Counter[str]:
        """How many copies each rung has moved so far; empty where there is only one."""
        return Counter(getattr(self.engine, "rungs", {}))

    def expect(self, is_right: bool, problem: str) -> None:
        """Note a wrong result."""
        if not is_right and problem not in self.problems:
            say(f"wrong: {problem}")
            self.problems.append(problem)

    def settle(self) -> None:
        """Wait until the device is idle."""
        if not self.is_cpu:
            torch.accelerator.synchronize(self.device)

    def finish(self, event: CopyEvent) -> None:
        """Wait until every byte of a copy is in place."""
        event.finish()
        self.expect(event.is_ok, "the engine reported a failed copy")

    def copy(self, direction: Direction, copies: Descriptors) -> None:
        """Copy and wait."""
        self.finish(self.engine.submit(direction, copies))


@contextlib.contextmanager
def open_world(device: torch.device, plan: Plan, budget: Budget) -> Iterator[World]:
    """Make pool and engine, and show one to the other. Everything is gone afterwards.

    Raises:
        PoolError: there is no room for the pool.
        LayoutMismatchError: no copy engine for this device.
    """
    home, capacity = SHARED_MEMORY, plan.pool_bytes
    if not home.is_dir() or shutil.disk_usage(home).free < capacity + (1 << 20):
        home = Path(tempfile.gettempdir())
        say(f"{SHARED_MEMORY} has no room for {capacity >> 20} MiB: the pool lies in {home}")
    never = threading.Event()
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=home) as folder:
        pool = create_pool(Path(folder) / "bench.pool", capacity, 1 << 20, numa=NUMA)
        try:
            pool.prefault(never)
            pool.bytes[:] = 0  # where the kernel cannot prefault
            engine = create_copy_engine(device)
            try:
                if isinstance(engine, PoolAdopter):
                    engine.adopt(pool.address, pool.capacity, never)
                yield World(device, engine, pool, plan, budget)
            finally:
                engine.close()
                if isinstance(engine, PoolAdopter):
                    engine.abandon(pool.address, pool.capacity)
        finally:
            pool.unlink()
            pool.close()


@dataclass(slots=True)
class Stage:
    """Device tensor and slots of one page size, blocks and slots in random order.

    Attributes:
        kv: shape (layers, blocks, page_bytes), uint8, on the device.
        expected: what it was filled with, likewise, on the host.
        blocks, slots: which block belongs to which slot, by number; in order of the copies.
    """

    world: World
    kv: torch.Tensor
    expected: Bytes
    layout: KvLayout
    blocks: Addresses
    slots: Addresses
    slot_bytes: int

    @classmethod
    def make(cls, world: World, page_bytes: int, layers: int, blocks: int) -> Stage:
        """Allocate and fill the device side. The pool is large enough."""
        dice = np.random.default_rng(SEED)
        words = dice.integers(0, 1 << 64, layers * blocks * page_bytes // 8, np.uint64)
        expected = words.view(np.uint8).reshape(layers, blocks, page_bytes)
        # A copy on the CPU, too: what is expected must not change with the device's bytes.
        kv = torch.empty(expected.shape, dtype=torch.uint8, device=world.device)
        kv.copy_(torch.from_numpy(expected))
        tensors = {f"layer{at}": kv[at] for at in range(layers)}
        layout = KvLayout(describe_layers(tensors, blocks), 1)
        slot_bytes = slot_bytes_of(layout.geometry.bytes)
        assert blocks * slot_bytes <= world.pool.capacity, "the plan counts every part's slots"
        order, slots = dice.permutation(blocks), dice.permutation(blocks)
        return cls(world, kv, expected, layout, order, slots, slot_bytes)

    def pages(self, part: slice = ALL) -> Pages:
        """Some of the blocks, as an engine's step names them."""
        slots = self.slots[part] * self.slot_bytes
        return Pages(tuple(self.blocks[part].tolist()), tuple(slots.tolist()), (0,) * len(slots))

    def copies(self, pages: Pages) -> Descriptors:
        """Descriptors of all layers of these blocks, made anew as an engine's step does."""
        return self.layout.descriptors(self.layout.names, pages, self.world.pool.address, 0)

    def wipe_pool(self, part: slice = ALL) -> None:
        """Make the payload of slots wrong."""
        payload = self._payload()
        for slot in self.slots[part].tolist():
            payload[slot] = 0

    def wipe_device(self, part: slice = ALL) -> None:
        """Make blocks of the device wrong."""
        if part == ALL:
            self.kv.zero_()
        else:
            for block in self.blocks[part].tolist():
                self.kv[:, block].zero_()
        self.world.settle()

    def check_pool(self, problem: str) -> None:
        """Every slot holds its block's bytes. Reads no descriptor."""
        layers, _, page_bytes = self.expected.shape
        payload = self._payload()
        is_right = all(
            np.array_equal(payload[slot].reshape(layers, page_bytes), self.expected[:, block])
            for block, slot in zip(self.blocks.tolist(), self.slots.tolist(), strict=True)
        )
        self.world.expect(is_right, problem)

    def check_device(self, problem: str) -> None:
        """Every block on the device holds its bytes, whether it was copied or not."""
        self.world.settle()
        self.world.expect(np.array_equal(self.kv.cpu().numpy(), self.expected), problem)

    def _payload(self) -> Bytes:
        """Slots without frame and padding, shape (blocks, payload bytes); a view of the pool."""
        count, size = len(self.slots), self.layout.geometry.bytes
        whole = self.world.pool.bytes[: count * self.slot_bytes].reshape(count, self.slot_bytes)
        return whole[:, FRAME_BYTES : FRAME_BYTES + size]


class Matmuls:
    """A loop of matrix products on the compute stream; on a CPU in the caller's thread.

    Args:
        size: rows and columns.
    """

    def __init__(self, world: World, size: int) -> None:
        self._world = world
        dice = torch.Generator().manual_seed(SEED)
        dtype = torch.float32 if world.is_cpu else torch.bfloat16
        self._factor = torch.randn(size, size, generator=dice).to(world.device, dtype)
        self._product = torch.empty_like(self._factor)

    def queue(self, times: int) -> None:
        """Queue products; on a CPU, compute them."""
        for _ in range(times):
            torch.matmul(self._factor, self._factor, out=self._product)

    def seconds(self, times: int) -> float:
        """Compute and wait; the time that the stream needed for it."""
        if self._world.is_cpu:
            start = time.perf_counter()
            self.queue(times)
            return time.perf_counter() - start
        device = self._world.device
        begin, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
        begin.record()
        self.queue(times)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    def times_for(self, seconds: float) -> int:
        """How many products take about so long."""
        self.seconds(8)
        return max(1, round(seconds / (self.seconds(16) / 16)))
