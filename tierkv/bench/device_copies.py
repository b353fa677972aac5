"""Copies of ``tierkv bench device``: speed by page size, overlap with compute, time of the host."""

from __future__ import annotations

import ctypes
import itertools
import math
import statistics
import time
from collections.abc import Callable

import torch

from tierkv.bench.device_plan import KIB, MIB, Row, compare, void_reason
from tierkv.bench.device_stage import Matmuls, Stage, World
from tierkv.bench.report import SAMPLES_MIN, median_ratio
from tierkv.device.base import CopyEvent, Direction

GIB = 1024 * MIB
COVER = 1.5
"""How much longer copies are meant to last than the loop that they run beside."""
REPEATS_MAX = 32


def measure_copies(world: World) -> list[Row]:
    """Store and load by page size, each beside the peak of the same direction."""
    rows = []
    for page_bytes in world.plan.page_sizes:
        name = _name_of(page_bytes)
        if not world.budget.allows(f"copies of {name} pages"):
            continue
        stage = Stage.make(world, page_bytes, world.plan.layers, world.plan.blocks(page_bytes))
        stage.wipe_pool()
        world.copy(Direction.STORE, stage.copies(stage.pages()))
        stage.check_pool(f"a store of {name} pages left a wrong byte in the pool")
        stage.wipe_device()
        world.copy(Direction.LOAD, stage.copies(stage.pages()))
        stage.check_device(f"a load of {name} pages left a wrong byte on the device")
        rows += [_copy_row(stage, page_bytes, direction) for direction in Direction]
        stage.check_pool(f"a timed store of {name} pages left a wrong byte in the pool")
        stage.check_device(f"a timed load of {name} pages left a wrong byte on the device")
    return rows


def _name_of(page_bytes: int) -> str:
    return f"{page_bytes // KIB}KiB" if page_bytes < MIB else f"{page_bytes // MIB}MiB"


def _copy_row(stage: Stage, page_bytes: int, direction: Direction) -> Row:
    world, size, pages = stage.world, stage.expected.nbytes, stage.pages()
    before = world.copies_by_rung()

    def ours() -> float:
        world.settle()
        start = time.perf_counter()
        world.copy(direction, stage.copies(pages))
        return time.perf_counter() - start

    peak = _peak_of(world, direction, size)
    found = compare(world.plan.samples, world.budget, peak, ours)
    rungs = sorted(world.copies_by_rung() - before) or [world.facts.rung]
    ours_gib_s = size / statistics.median(found.ours) / GIB
    peak_gib_s = size / statistics.median(found.before + found.after) / GIB
    return Row(
        f"{direction.value}_{_name_of(page_bytes)}",
        found.ratio,
        "x",
        world.plan.page_sizes[page_bytes],
        spread=found.aa_spread,
        void=void_reason(found),
        note=f"{ours_gib_s:.1f} / {peak_gib_s:.1f} GiB/s {'+'.join(rungs)}",
        facts={
            "page_bytes": page_bytes,
            "bytes": size,
            "gib_s": round(ours_gib_s, 3),
            "peak_gib_s": round(peak_gib_s, 3),
            "rungs": rungs,
            "samples": len(found.ours),
        },
    )


def _peak_of(world: World, direction: Direction, size: int) -> Callable[[], float]:
    """One large copy of as many bytes, between memory of its own; returns its seconds."""
    host = torch.zeros(size, dtype=torch.uint8)
    if not world.is_cpu:
        host = host.pin_memory()
    device = torch.zeros(size, dtype=torch.uint8, device=world.device)
    is_load = direction is Direction.LOAD
    target, source = (device, host) if is_load else (host, device)

    def on_cpu() -> float:
        start = time.perf_counter()
        ctypes.memmove(target.data_ptr(), source.data_ptr(), size)
        return time.perf_counter() - start

    def on_accelerator() -> float:
        world.settle()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.accelerator.current_stream(world.device).synchronize()
        return time.perf_counter() - start

    return on_cpu if world.is_cpu else on_accelerator


# ---- overlap -----------------------------------------------------------------------------------


def measure_overlap(world: World) -> list[Row]:
    """What copies in both directions cost a loop of matrix products.

    The copies are queued before the loop, because a copy waits for the compute that was queued
    before it. A sample is good only if both directions were still copying when the loop ended.
    """
    if not world.budget.allows("overlap with compute"):
        return []
    overlap = _Overlap(world)
    found = compare(world.plan.samples, world.budget, overlap.alone, overlap.with_copies)
    overlap.check()
    missed = overlap.covered.count(False)
    return [
        Row(
            "overlap_matmul",
            median_ratio(found.ours, found.reference),
            "x",
            world.plan.overlap_most,
            is_most=True,
            spread=found.aa_spread,
            void=f"copies ended before {missed} loops did" if missed else void_reason(found),
            note=f"copies of {overlap.gib_s:.1f} GiB/s",
            facts={
                "loop_ms": round(statistics.median(found.reference) * 1000, 3),
                "matmuls": overlap.times,
                "matmul_size": world.plan.matmul_size,
                "page_bytes": world.plan.overlap_page_bytes,
                "copied_gib_s": round(overlap.gib_s, 3),
                "copied_bytes": overlap.repeats * overlap.stage.expected.nbytes,
                "loops": len(overlap.covered),
                "loops_outlasted": overlap.covered.count(True),
                "samples": len(found.ours),
            },
        )
    ]


class _Overlap:
    """A loop of products, and copies both ways: half of the blocks are stored, half are loaded.

    Attributes:
        times: products in the loop.
        repeats: how often all blocks are copied beside one loop.
        gib_s: of both directions together, without the loop.
        covered: per sample beside copies, whether both directions outlasted the loop.
    """

    def __init__(self, world: World) -> None:
        plan, self._world = world.plan, world
        page_bytes = plan.overlap_page_bytes
        self.stage = Stage.make(world, page_bytes, plan.layers, plan.blocks(page_bytes))
        half = len(self.stage.slots) // 2
        stored, loaded = slice(0, half), slice(half, None)
        self._pages = {
            Direction.STORE: self.stage.pages(stored),
            Direction.LOAD: self.stage.pages(loaded),
        }
        world.copy(Direction.STORE, self.stage.copies(self._pages[Direction.LOAD]))
        self.stage.wipe_pool(stored)
        self.stage.wipe_device(loaded)
        self._matmuls = Matmuls(world, plan.matmul_size)
        self.times = self._matmuls.times_for(plan.loop_s)
        pair_s, submit_s = self._time_pair()
        self.gib_s = self.stage.expected.nbytes / pair_s / GIB
        lasting_s = max(pair_s - submit_s, pair_s / 8)  # what is left when all are submitted
        self.repeats = min(math.ceil(COVER * plan.loop_s / lasting_s), REPEATS_MAX)
        self.covered: list[bool] = []

    def alone(self) -> float:
        """Seconds of the loop."""
        self._world.settle()
        return self._matmuls.seconds(self.times)

    def with_copies(self) -> float:
        """Seconds of the loop beside copies; again with more of them if they ended too early."""
        while True:
            self._world.settle()
            events = [event for _ in range(self.repeats) for event in self._submit_pair()]
            seconds = self._matmuls.seconds(self.times)
            is_covered = not any(event.is_done() for event in events[-2:])
            for event in events:
                self._world.finish(event)
            if is_covered or self.repeats >= REPEATS_MAX:
                self.covered.append(is_covered)
                return seconds
            self.repeats = min(2 * self.repeats, REPEATS_MAX)

    def check(self) -> None:
        """Compare all bytes on both sides."""
        self.stage.check_pool("a store beside compute left a wrong byte in the pool")
        self.stage.check_device("a load beside compute left a wrong byte on the device")

    def _submit_pair(self) -> list[CopyEvent]:
        engine = self._world.engine
        return [
            engine.submit(direction, self.stage.copies(pages))
            for direction, pages in self._pages.items()
        ]

    def _time_pair(self) -> tuple[float, float]:
        """Seconds of a copy of all blocks, and of its submission; the best of a few."""
        totals, submissions = [], []
        for _ in range(4):
            self._world.settle()
            start = time.perf_counter()
            events = self._submit_pair()
            submissions.append(time.perf_counter() - start)
            for event in events:
                self._world.finish(event)
            totals.append(time.perf_counter() - start)
        return min(totals), min(submissions)


# ---- the host ----------------------------------------------------------------------------------


def measure_host(world: World) -> list[Row]:
    """How long the computing thread is kept by the store of a step: submission, and a poll.

    On an accelerator the store is submitted behind queued compute, as at the end of a step.
    """
    plan = world.plan
    rows: list[Row] = []
    matmuls = Matmuls(world, plan.matmul_size)
    queued = matmuls.times_for(plan.queued_s) if plan.queued_s else 0
    for name, blocks in plan.step_blocks.items():
        if not world.budget.allows(f"the host's time in a {name} step"):
            continue
        stage = Stage.make(world, plan.step_page_bytes, plan.step_layers, blocks)
        stage.wipe_pool()
        taken = _time_steps(stage, lambda: matmuls.queue(queued))
        stage.check_pool(f"the store of a {name} step left a wrong byte in the pool")
        rows += [_host_row(stage, f"host_{name}_{part}", times) for part, times in taken.items()]
    return rows


def _time_steps(stage: Stage, queue_compute: Callable[[], None]) -> dict[str, list[float]]:
    """Seconds of the computing thread, by what it did in each step."""
    world, pages = stage.world, stage.pages()
    taken: dict[str, list[float]] = {"descriptors": [], "submit": [], "poll": []}
    world.copy(Direction.STORE, stage.copies(pages))  # what is made once is made now
    for step in range(world.plan.steps):
        if world.budget.is_over and step >= SAMPLES_MIN:
            break
        world.settle()
        queue_compute()
        marks = [time.perf_counter()]
        copies = stage.copies(pages)
        marks.append(time.perf_counter())
        event = world.engine.submit(Direction.STORE, copies)
        marks.append(time.perf_counter())
        event.is_done()
        marks.append(time.perf_counter())
        world.finish(event)
        for times, (begin, end) in zip(taken.values(), itertools.pairwise(marks), strict=True):
            times.append(end - begin)
    return taken


def _host_row(stage: Stage, name: str, times: list[float]) -> Row:
    layers, blocks, _ = stage.expected.shape
    late = times[0]
    if len(times) > 1:
        late = statistics.quantiles(times, n=100, method="inclusive")[98]
    return Row(
        name,
        statistics.median(times) * 1e6,
        "us",
        note=f"p99 {late * 1e6:,.1f} us",
        facts={
            "p99": round(late * 1e6, 2),
            "steps": len(times),
            "pages": layers * blocks,
            "bytes": stage.expected.nbytes,
        },
    )
