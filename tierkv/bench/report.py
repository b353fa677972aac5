"""Figures of a bench, for people and as JSON."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

AA_SPREAD_MAX = 0.05
"""Above this spread between two runs of the same arm a comparison proves nothing."""

SAMPLES_MIN = 9
"""With fewer samples a median proves nothing either."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. `target`: the most it should be; None if it is only reported."""

    name: str
    value: float
    unit: str
    target: float | None = None
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether the target is met; None without a target."""
        return None if self.target is None else self.value <= self.target


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of interleaved pairs."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def aa_spread(first: Sequence[float], second: Sequence[float]) -> float:
    """How well this run tells equal arms to be equal: 0.01 is one percent.

    The larger of two numbers: how far the same arm, measured twice, differs from itself, and the
    half width of the 95 % interval of that median (1.57 quartile ranges by the root of the number
    of samples, after McGill, Tukey and Larsen). Infinite below `SAMPLES_MIN` samples.
    """
    if len(first) < SAMPLES_MIN:
        return math.inf
    ratios = [a / b for a, b in zip(first, second, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    doubt = 1.57 * (high - low) / math.sqrt(len(ratios))
    return max(middle - 1, 1 / middle - 1, doubt)


def say(text: str) -> None:
    """One line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_figures(title: str, figures: Sequence[Figure], remarks: Sequence[str]) -> None:
    """Print a table of figures against their targets, and remarks below it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    words = {True: "yes", False: "no", None: "-"}
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0)
    )
    for number, column in enumerate(("figure", "median", "target", "met", "")):
        table.add_column(
            column, justify="right" if number in (1, 2) else "left", no_wrap=number == 0
        )
    for figure in figures:
        target = "-" if figure.target is None else f"<= {figure.target:g} {figure.unit}"
        value = f"{figure.value:.3f} {figure.unit}"
        table.add_row(figure.name, value, target, words[figure.is_met], figure.note)
    console = Console()
    console.print(table)
    for remark in remarks:
        console.print(remark, markup=False, highlight=False)
