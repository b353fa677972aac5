"""``tierkv bench fs``: what the fs tier makes of a disk, beside plain calls in the same run.

Three comparisons, each with the same bytes, the same blocks and as many threads on both sides:
blocks written at capacity (every write recycles a victim's file) against overwriting one
preallocated file; blocks written into free room against plain new files; verified reads against
plain reads of the same files. Our arm is what an I/O process does with a job, frame, checksum and
books included.

Arms are interleaved, the reference runs before and after ours, and medians count. Disks are noisier
than memory, hence a limit of its own for the spread of the reference against itself. Whatever our
arms wrote is read back and compared outside the measured time.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tierkv.bench.fio import measure_fio
from tierkv.bench.fs_stage import Plan, Stage, open_stage, require_room
from tierkv.bench.report import aa_spread, median_ratio, say
from tierkv.numa import Placement, describe

DISK_AA_SPREAD_MAX = 0.15
TARGETS = {"write_ratio": 0.8, "write_new_ratio": 0.85, "read_ratio": 0.85}
NOTES = {
    "write_ratio": "at capacity / overwriting a preallocated file",
    "write_new_ratio": "new blocks / plain new files",
    "read_ratio": "verified reads / plain reads of the same files",
}
GIB = 1 << 30


@dataclass(slots=True)
class Comparison:
    """Seconds per sample: the reference before ours, ours, the reference after."""

    before: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Our speed over the reference's, median of the pairs."""
        both = [(a + b) / 2 for a, b in zip(self.before, self.after, strict=True)]
        return median_ratio(both, self.ours)

    @property
    def aa_spread(self) -> float:
        """How far the reference differs from itself."""
        return aa_spread(self.before, self.after)


@dataclass(slots=True)
class Measured:
    """One whole run.

    Attributes:
        comparisons: name of the figure -> its samples.
        fio: GiB/s by `write` and `read`; None if fio is not installed.
        placement: of the memory that is written to the disk.
    """

    plan: Plan
    is_direct: bool
    comparisons: dict[str, Comparison]
    problems: tuple[str, ...]
    fio: dict[str, float] | None = None
    placement: Placement = field(default_factory=lambda: Placement("local"))

    @property
    def is_void(self) -> bool:
        """Whether the reference differs too much from itself to prove anything."""
        return max(c.aa_spread for c in self.comparisons.values()) > DISK_AA_SPREAD_MAX

    @property
    def exit_code(self) -> int:
        """1 for a wrong byte, and for a run that proves nothing."""
        return 1 if self.problems or self.is_void else 0

    def speed(self, seconds: list[float]) -> float:
        """GiB/s of the median sample."""
        return self.plan.total_bytes / statistics.median(seconds) / GIB


def run(as_json: bool, plan: Plan) -> int:
    """Measure, once more if the first run is void, and print.

    Returns:
        The exit code: 1 if a byte was wrong or both runs were void, whatever the figures.
    Raises:
        TierKVError: the directory has no room, or cannot be used.
    """
    measured = measure(plan)
    if measured.is_void and not measured.problems:
        say(f"void: {_why_void(measured)}; once more")
        measured = measure(plan)
    if as_json:
        print(json.dumps(_tree(measured)))
    else:
        _print(measured)
    return measured.exit_code


def measure(plan: Plan) -> Measured:
    """Run all three comparisons in a directory of its own, which is gone afterwards.

    Raises:
        TierKVError: the directory has no room, or cannot be used.
    """
    require_room(plan)
    with ExitStack() as stack:
        name = stack.enter_context(
            tempfile.TemporaryDirectory(prefix="tierkv-bench-", dir=plan.path)
        )
        stage = stack.enter_context(open_stage(Path(name), plan))
        comparisons = {
            "write_ratio": _compare_writes(stage),
            "read_ratio": _compare_reads(stage),
            "write_new_ratio": _compare_new(stage),
        }
        fio = measure_fio(Path(name), plan, stage.is_direct)
        words = stage.source.words
        placement = describe(words.ctypes.data, words.nbytes, "local")
        problems = tuple(stage.problems)
        return Measured(plan, stage.is_direct, comparisons, problems, fio, placement)


# ---- comparisons -------------------------------------------------------------------------------


def _compare_writes(stage: Stage) -> Comparison:
    say("filling the tier and the reference's file")
    stage.fill()

    def ours() -> float:
        stage.new_content()
        seconds = stage.write_tier()
        stage.verify()
        return seconds

    return _pairs(stage, "writing at capacity", stage.overwrite_file, ours)


def _compare_reads(stage: Stage) -> Comparison:
    def ours() -> float:
        stage.forget_reads()
        seconds = stage.read_tier()
        stage.verify_reads()
        return seconds

    return _pairs(stage, "reading", stage.read_files, ours)


def _compare_new(stage: Stage) -> Comparison:
    stage.empty()

    def ours() -> float:
        stage.new_content()
        seconds = stage.write_tier()
        stage.verify()
        stage.empty()
        return seconds

    def reference() -> float:
        seconds = stage.write_files()
        stage.remove_files()
        return seconds

    return _pairs(stage, "writing new files", reference, ours)


def _pairs(
    stage: Stage, label: str, reference: Callable[[], float], ours: Callable[[], float]
) -> Comparison:
    """Interleaved samples after one warm-up of each arm."""
    found = Comparison()
    pairs = stage.plan.pairs
    for number in range(pairs + 1):
        say(f"{label}: " + (f"pair {number} of {pairs}" if number else "warm-up"))
        seconds = []
        for arm in (reference, ours, reference):
            stage.settle()
            seconds.append(arm())
        if number:
            for samples, value in zip(
                (found.before, found.ours, found.after), seconds, strict=True
            ):
                samples.append(value)
    return found


# ---- results -----------------------------------------------------------------------------------


def _why_void(measured: Measured) -> str:
    worst = max(c.aa_spread for c in measured.comparisons.values())
    if math.isinf(worst):
        return "too few pairs"
    return f"the reference differs from itself by {worst:.0%}"


def _tree(measured: Measured) -> dict[str, Any]:
    found, plan = measured.comparisons, measured.plan
    ratios = {name: found[name].ratio for name in TARGETS}
    spreads = {name: found[name].aa_spread for name in TARGETS}
    return {
        **{name: round(value, 4) for name, value in ratios.items()},
        "targets": TARGETS,
        "met": {name: ratios[name] >= target for name, target in TARGETS.items()},
        "gib_s": {
            name: {
                "tier": round(measured.speed(found[name].ours), 3),
                "reference": round(measured.speed(found[name].before + found[name].after), 3),
            }
            for name in TARGETS
        },
        "aa_spread": {n: round(v, 4) if v < math.inf else None for n, v in spreads.items()},
        "is_void": measured.is_void,
        "verified": not measured.problems,
        "problems": list(measured.problems),
        "pairs": plan.pairs,
        "blocks": plan.blocks,
        "slot_bytes": plan.slot_bytes,
        "write_threads": plan.write_threads,
        "read_threads": plan.read_threads,
        "is_direct": measured.is_direct,
        "placement": measured.placement.tree(),
        "fio_gib_s": measured.fio,
    }


def _print(measured: Measured) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    tree, plan = _tree(measured), measured.plan
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("figure", "median", "target", "met", "tier", "plain", "A/A"):
        table.add_column(column, justify="left" if column in ("figure", "met") else "right")
    for name, target in TARGETS.items():
        spread, speeds = tree["aa_spread"][name], tree["gib_s"][name]
        table.add_row(
            name,
            f"{tree[name]:.2f}",
            f">= {target}",
            "yes" if tree["met"][name] else "no",
            f"{speeds['tier']:.2f} GiB/s",
            f"{speeds['reference']:.2f} GiB/s",
            "unknown" if spread is None else f"{spread:.1%}",
        )
    Console().print(table)
    for name, note in NOTES.items():
        print(f"{name}: {note}")
    io = "direct" if measured.is_direct else "buffered: this file system takes no direct I/O"
    print(
        f"{plan.pairs} pairs of {plan.blocks} blocks of {plan.slot_bytes:,} bytes; "
        f"{plan.write_threads} write and {plan.read_threads} read threads; {io}"
    )
    print(f"placement: {measured.placement.text()}")
    if measured.fio is not None:
        print("fio: " + ", ".join(f"{n} {v:.2f} GiB/s" for n, v in measured.fio.items()))
    if measured.is_void:
        print(f"void: {_why_void(measured)}; run it again when the disk is quiet")
    wrong = "; ".join(measured.problems)
    print(f"WRONG: {wrong}" if wrong else "verified")
