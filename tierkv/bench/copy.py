"""How fast pages move between a CPU "device" and slots: ``tierkv bench copy``.

The device is one tensor in vLLM's layout (all layers in one storage, layer outermost, blocks in
random order), the slots lie in a real pool file. The reference moves the same page list with
`numpy.copyto` in as many threads as the copy engine uses, in the same run. Pages are prefaulted on
both sides, arms are interleaved, medians compared, and every byte is verified.
"""

from __future__ import annotations

import ctypes
import json
import queue
import random
import statistics
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tierkv.bench.report import AA_SPREAD_MAX, aa_spread, say
from tierkv.connectors.vllm.kv_layout import describe_layers
from tierkv.device.base import Descriptors, Direction
from tierkv.device.cpu import create_cpu_engine
from tierkv.device.layout import KvLayout, Pages
from tierkv.numa import Placement, describe
from tierkv.pool import Pool, create_pool
from tierkv.types import slot_bytes_of

KIB = 1024
PAGE_SIZES = (16 * KIB, 64 * KIB, 256 * KIB, 2048 * KIB)
TARGETS: dict[int, float | None] = {
    16 * KIB: None,
    64 * KIB: 0.7,
    256 * KIB: 0.85,
    2048 * KIB: 0.85,
}
LAYERS = 4
TOTAL_BYTES = 256 << 20
SAMPLES = 25
SEED = 7
NUMA = "interleave"  # the default of node.dram.numa

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True)
class _Stage:
    """Device tensor, pool and page list of one page size."""

    device: torch.Tensor
    pool: Pool
    layout: KvLayout
    pages: Pages


class _CopytoThread:
    """The reference: one thread that moves pages with `numpy.copyto`."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[list[Bytes], list[Bytes], threading.Event] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def run(self, targets: list[Bytes], sources: list[Bytes]) -> None:
        """Move every page and wait for it."""
        done = threading.Event()
        self._jobs.put((targets, sources, done))
        done.wait()

    def close(self) -> None:
        """End the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            targets, sources, done = job
            for target, source in zip(targets, sources, strict=True):
                np.copyto(target, source)
            done.set()


def _make_stage(folder: Path, page_bytes: int) -> _Stage:
    """Allocate and prefault both sides; device blocks in random order."""
    blocks = max(4, TOTAL_BYTES // (page_bytes * LAYERS))
    dice = random.Random(SEED)
    generator = torch.Generator().manual_seed(SEED)
    device = torch.randint(0, 256, (LAYERS, blocks, page_bytes), dtype=torch.uint8,
                           generator=generator)  # fmt: skip
    tensors = {f"layer{at}": device[at].view(blocks, 1, 16, -1) for at in range(LAYERS)}
    layout = KvLayout(describe_layers(tensors, blocks), 1)
    slot_bytes = slot_bytes_of(page_bytes * LAYERS)
    pool = create_pool(folder / "bench.pool", blocks * slot_bytes, 1 << 20, numa=NUMA)
    pool.prefault(threading.Event())
    order = list(range(blocks))
    dice.shuffle(order)
    slots = [at * slot_bytes for at in range(blocks)]
    dice.shuffle(slots)
    pages = Pages(tuple(order), tuple(slots), tuple(0 for _ in order))
    return _Stage(device, pool, layout, pages)


def _page_views(stage: _Stage, copies: Descriptors) -> tuple[list[Bytes], list[Bytes]]:
    """The same pages as numpy views: (device side, pool side)."""
    flat: Bytes = stage.device.view(-1).numpy()
    base = stage.device.data_ptr()
    device, host = [], []
    for at, where, size in zip(
        copies.device.tolist(), copies.host.tolist(), copies.sizes.tolist(), strict=True
    ):
        device.append(flat[at - base : at - base + size])
        start = where - stage.pool.address
        host.append(stage.pool.bytes[start : start + size])
    return device, host


def measure(stage: _Stage, direction: Direction) -> tuple[float, float]:
    """(median of reference time over ours, spread of the reference against itself)."""
    engine, reference = create_cpu_engine(), _CopytoThread()
    names, pool = stage.layout.names, stage.pool
    views = [
        _page_views(stage, stage.layout.descriptors([name], stage.pages, pool.address, 0))
        for name in names
    ]

    def ours() -> float:
        start = time.perf_counter()
        events = [
            engine.submit(direction, stage.layout.descriptors([name], stage.pages, pool.address, 0))
            for name in names
        ]
        for event in events:
            event.wait()
        return time.perf_counter() - start

    def theirs() -> float:
        start = time.perf_counter()
        for device, host in views:
            if direction is Direction.STORE:
                reference.run(host, device)
            else:
                reference.run(device, host)
        return time.perf_counter() - start

    ours()
    theirs()
    rounds = [(theirs(), ours(), theirs()) for _ in range(SAMPLES)]
    engine.close()
    reference.close()
    ratio = statistics.median((a + b) / 2 / mine for a, mine, b in rounds)
    return ratio, aa_spread([a for a, _, _ in rounds], [b for _, _, b in rounds])


def verify(stage: _Stage) -> bool:
    """Store, wipe the device, load: every byte on both sides is the one that was there."""
    engine = create_cpu_engine()
    copies = stage.layout.descriptors(stage.layout.names, stage.pages, stage.pool.address, 0)
    device, host = _page_views(stage, copies)
    original = stage.device.clone()
    for slot in host:
        slot[:] = 0
    engine.submit(Direction.STORE, copies).wait()
    is_stored = all(np.array_equal(a, b) for a, b in zip(device, host, strict=True))
    stage.device.zero_()
    engine.submit(Direction.LOAD, copies).wait()
    engine.close()
    return is_stored and bool(torch.equal(stage.device, original))


def _one_memmove(stage: _Stage) -> float:
    """GiB/s of one large memmove from device to pool: what the memory can do."""
    size = min(stage.device.numel(), stage.pool.capacity)
    times = []
    for _ in range(SAMPLES):
        start = time.perf_counter()
        ctypes.memmove(stage.pool.address, stage.device.data_ptr(), size)
        times.append(time.perf_counter() - start)
    return float(size / statistics.median(times) / (1 << 30))


def _place_of(device: torch.Tensor) -> Placement:
    return describe(device.data_ptr(), device.numel(), "local")


def measure_all(folder: Path) -> dict[str, Any]:
    """All page sizes, both directions."""
    result: dict[str, Any] = {"store_ratio": {}, "load_ratio": {}, "aa_spread": {}}
    is_verified = True
    for page_bytes in PAGE_SIZES:
        say(f"pages of {page_bytes // KIB} KiB ...")
        stage = _make_stage(folder, page_bytes)
        is_verified = verify(stage) and is_verified
        store, spread = measure(stage, Direction.STORE)
        load, other = measure(stage, Direction.LOAD)
        name = str(page_bytes)
        result["store_ratio"][name] = round(store, 3)
        result["load_ratio"][name] = round(load, 3)
        result["aa_spread"][name] = round(max(spread, other), 3)
        result["memmove_gib_s"] = round(_one_memmove(stage), 2)
        result["placement"] = {
            "pool": stage.pool.placement.tree(),
            "device": _place_of(stage.device).tree(),
        }
        stage.pool.unlink()
        stage.pool.close()
    result["verified"] = is_verified
    result["void"] = max(result["aa_spread"].values()) > AA_SPREAD_MAX
    return result


def run(as_json: bool) -> int:
    """Measure, print, and tell by the exit status whether every byte was right."""
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=_memory_directory()) as folder:
        result = measure_all(Path(folder))
        if result["void"]:
            say("void: the reference differs from itself by more than 5 %; once more")
            result = measure_all(Path(folder))
    if as_json:
        print(json.dumps(result))
    else:
        _print(result)
    return 0 if result["verified"] else 1


def _memory_directory() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _print(result: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="bench copy: times of numpy.copyto over ours, median of 25")
    for column in ("page", "store", "load", "target", "A/A spread"):
        table.add_column(column, justify="right")
    for page_bytes in PAGE_SIZES:
        name = str(page_bytes)
        target = TARGETS[page_bytes]
        table.add_row(
            f"{page_bytes // KIB} KiB",
            f"{result['store_ratio'][name]:.2f}",
            f"{result['load_ratio'][name]:.2f}",
            "-" if target is None else f">= {target}",
            f"{result['aa_spread'][name] * 100:.1f} %",
        )
    Console().print(table)
    for side, placement in result["placement"].items():
        print(f"placement of the {side}: {Placement.from_tree(placement).text()}")
    print(f"one big memmove: {result['memmove_gib_s']} GiB/s; verified: {result['verified']}")
    if result["void"]:
        print("void: the reference differs from itself by more than 5 %; run it again")
