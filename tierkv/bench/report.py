"""Figures of a bench, for people and as JSON."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass

AA_SPREAD_MAX = 0.05
"""Above this difference between two runs of the same arm a comparison proves nothing."""


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
        return None if self.target is None else self.value <= self.target


def median_ratio(above: Sequence[float], below: Sequence[float]) -> float:
    """Median of the ratios of interleaved pairs."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def aa_spread(first: Sequence[float], second: Sequence[float]) -> float:
    """How far the same arm, measured twice, differs from itself: 0.01 is one percent."""
    ratio = median_ratio(first, second)
    return max(ratio, 1 / ratio) - 1


def say(text: str) -> None:
    """One line of progress on standard error."""
    print(text, file=sys.stderr, flush=True)


def print_figures(title: str, figures: Sequence[Figure], remarks: Sequence[str]) -> None:
    """Print a table of figures against their targets, and remarks below it."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    words = {True: "yes", False: "no", None: "-"}
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
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
