"""``tierkv bench device``: what the copy engine of this machine's device does, beside its peak.

Four parts: stores and loads by page size, overlap with compute, the host's time per step, and a
small model whose prefix is computed or loaded. Arms take turns, medians count, every byte that was
copied is compared. A budget of time is looked at between parts; what it cuts is told.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tierkv.bench.device_copies import measure_copies, measure_host, measure_overlap
from tierkv.bench.device_loop import measure_loop
from tierkv.bench.device_plan import PLANS, Budget, Plan, Row
from tierkv.bench.device_stage import open_world
from tierkv.device.facts import CopyFacts
from tierkv.device.select import KINDS
from tierkv.errors import TierKVError
from tierkv.numa import Placement
from tierkv.units import approximate_size

PARTS = (measure_copies, measure_overlap, measure_host, measure_loop)
DRIVER_FILES = {
    "cuda": Path("/proc/driver/nvidia/version"),
    "npu": Path("/usr/local/Ascend/driver/version.info"),
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One whole run.

    Attributes:
        facts: how the engine moved bytes, at the end.
        seconds: what the run took.
        placement: of the pool.
    """

    device: torch.device
    plan: Plan
    budget: Budget
    rows: tuple[Row, ...]
    problems: tuple[str, ...]
    facts: CopyFacts
    seconds: float
    placement: Placement

    @property
    def void(self) -> tuple[Row, ...]:
        """Figures that prove nothing."""
        return tuple(row for row in self.rows if row.void)


def run(as_json: bool, kind: str | None, seconds_max: float, output: Path | None) -> int:
    """Measure, print, and tell by the exit status whether every byte was right.

    Args:
        kind: `cuda`, `npu` or `cpu`; None: the accelerator if there is one.
        output: a file for the JSON, too.
    Raises:
        TierKVError: there is no such device, or no room for the pool.
        OSError: `output` cannot be written.
    """
    device = find_device(kind)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.touch()  # a mistake in the name is told now, not after minutes
    measured = measure(device, PLANS[device.type], Budget(seconds_max))
    tree = _tree(measured)
    if output is not None:
        output.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print(json.dumps(tree))
    else:
        _print(measured, tree)
    return 1 if measured.problems else 0


def find_device(kind: str | None) -> torch.device:
    """The device to measure, with its index.

    Raises:
        TierKVError: torch has no such device here.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    found = "cpu" if accelerator is None or accelerator.type not in KINDS else accelerator.type
    kind = found if kind is None else kind
    if kind == "cpu":
        return torch.device("cpu")
    if kind != found:
        raise TierKVError(
            f"bench device: torch {torch.__version__} has no {kind} device here; install a torch "
            "for it, or measure --device cpu"
        )
    return torch.device(kind, torch.accelerator.current_device_index())


def measure(device: torch.device, plan: Plan, budget: Budget) -> Measured:
    """Run all parts on one device, with a pool of their own.

    Raises:
        PoolError: there is no room for the pool.
        LayoutMismatchError: no copy engine for this device.
    """
    with torch.inference_mode(), open_world(device, plan, budget) as world:
        rows = [row for part in PARTS for row in part(world)]
        problems = tuple(world.problems)
        placement = world.pool.placement
        return Measured(
            device, plan, budget, tuple(rows), problems, world.facts, budget.seconds, placement
        )


# ---- the machine -------------------------------------------------------------------------------


def _machine(device: torch.device) -> dict[str, Any]:
    """What the figures hold for. Nothing here is worth a failed run: unknown is None."""
    return {
        "kind": device.type,
        "name": _device_name(device),
        "torch": torch.__version__,
        "torch_npu": _version_of("torch-npu") if device.type == "npu" else None,
        "cuda": torch.version.cuda if device.type == "cuda" else None,
        "driver": _first_line(DRIVER_FILES.get(device.type)),
        "host": _processor(),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return _processor()
    return str(torch.get_device_module(device).get_device_name(device.index))


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(names) or '?'} processors"


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8", errors="replace").partition("\n")[0].strip()
    except OSError:
        return None


# ---- results -----------------------------------------------------------------------------------


def _tree(measured: Measured) -> dict[str, Any]:
    return {
        "machine": _machine(measured.device),
        "placement": measured.placement.tree(),
        "copies": dataclasses.asdict(measured.facts),
        "figures": {row.name: _figure(row) for row in measured.rows},
        "is_void": bool(measured.void),
        "verified": not measured.problems,
        "problems": list(measured.problems),
        "cut": list(measured.budget.cut),
        "seconds": round(measured.seconds, 1),
        "seconds_max": measured.budget.seconds_max,
        "pool_bytes": measured.plan.pool_bytes,
    }


def _figure(row: Row) -> dict[str, Any]:
    aim = {} if row.aim is None else {"at_most" if row.is_most else "at_least": row.aim}
    tree: dict[str, Any] = {"value": round(row.value, 4), "unit": row.unit, **aim}
    if aim:
        tree["met"] = row.is_met
    if row.spread is not None:
        tree["aa_spread"] = round(row.spread, 4) if math.isfinite(row.spread) else None
        tree["void"] = row.void
    return {**tree, **row.facts}


def _print(measured: Measured, tree: dict[str, Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    words = {True: "yes", False: "no", None: "-"}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("figure", "median", "aim", "met", "A/A", ""):
        side: Any = "right" if column in ("median", "aim", "A/A") else "left"
        table.add_column(column, justify=side, no_wrap=column != "")
    for row in measured.rows:
        sign = "<=" if row.is_most else ">="
        spread = "-" if row.spread is None else f"{row.spread:.1%}"
        table.add_row(
            row.name,
            f"{row.value:,.2f} {row.unit}",
            "-" if row.aim is None else f"{sign} {row.aim:g}",
            "void" if row.void else words[row.is_met],
            spread,
            row.note,
        )
    Console().print(table)
    for line in _closing_lines(measured, tree):
        print(line)


def _closing_lines(measured: Measured, tree: dict[str, Any]) -> list[str]:
    machine = tree["machine"]
    versions = {name: machine[name] for name in ("torch", "torch_npu", "cuda", "driver")}
    known = ", ".join(f"{name} {text}" for name, text in versions.items() if text)
    lines = [f"{machine['name']}; {known}"]
    if measured.device.type == "cpu":
        lines.append("measured on CPU tensors, not on an accelerator: no figure has an aim")
    pool = approximate_size(measured.plan.pool_bytes)
    problem = f" ({measured.facts.problem})" if measured.facts.problem else ""
    lines.append(f"pool of {pool}, rung: {measured.facts.rung}{problem}")
    lines.append(f"placement: {measured.placement.text()}")
    for reason in sorted({row.void for row in measured.void}):
        names = ", ".join(row.name for row in measured.void if row.void == reason)
        lines.append(f"void: {names}: {reason}; run it again")
    over = f"left out, because {measured.budget.seconds_max:g} s were over"
    lines += [f"{over}: {name}" for name in measured.budget.cut]
    lines += [f"wrong: {problem}" for problem in measured.problems]
    took = f"{measured.seconds:.0f} s"
    return [*lines, f"{'not ' if measured.problems else ''}verified; {took}"]
