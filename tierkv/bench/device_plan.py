"""Sizes and time of ``tierkv bench device``: what is measured on which kind of device, how long."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tierkv.bench.report import AA_SPREAD_MAX, SAMPLES_MIN, aa_spread, median_ratio, say
from tierkv.types import slot_bytes_of

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The small decoder of the model loop, and its requests.

    Attributes:
        dtype: name of a torch dtype, of weights and KV.
        chunk_tokens: prefill goes in chunks of so many tokens; the prefix is a multiple of it.
        tolerance: the most that outputs of the two arms may differ in any element. Outputs have a
            root mean square of 1. Both arms run the same kernels on equal shapes for the tokens
            behind the prefix, so 0 is expected wherever kernels repeat themselves.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    dtype: str
    chunk_tokens: int
    prefix_tokens: int
    suffix_tokens: int
    requests: int
    tolerance: float
    block_tokens: int = 16

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    @property
    def prefix_blocks(self) -> int:
        return self.prefix_tokens // self.block_tokens

    @property
    def page_bytes(self) -> int:
        """One layer of one block: keys and values."""
        item = 4 if self.dtype == "float32" else 2
        return self.block_tokens * 2 * self.kv_heads * self.head_dim * item


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        page_sizes: bytes of a page -> the least ratio to the peak; None: only reported.
        total_bytes: payload of one sample of copies.
        samples: triples per comparison.
        overlap_most: the most that the loop of products may take longer; None: only reported.
        matmul_size: rows and columns of those products.
        loop_s: how long their loop takes alone.
        queued_s: work on the compute stream that a step's store is submitted behind.
        step_blocks: name of a step -> blocks that it stores, of `step_layers` pages each.
    """

    page_sizes: dict[int, float | None]
    total_bytes: int
    samples: int
    overlap_most: float | None
    overlap_page_bytes: int
    matmul_size: int
    loop_s: float
    queued_s: float
    step_layers: int
    step_page_bytes: int
    step_blocks: dict[str, int]
    steps: int
    model: ModelShape
    layers: int = 4

    def blocks(self, page_bytes: int) -> int:
        """Blocks of `layers` pages that make up a sample; at least 2, to go both ways at once."""
        return max(2, self.total_bytes // (page_bytes * self.layers))

    @property
    def pool_bytes(self) -> int:
        """Room for the largest of the parts, which take turns in one pool."""
        model, step = self.model, self.step_layers * self.step_page_bytes
        pages = (*self.page_sizes, self.overlap_page_bytes)
        return max(
            *(self.blocks(page) * slot_bytes_of(page * self.layers) for page in pages),
            *(blocks * slot_bytes_of(step) for blocks in self.step_blocks.values()),
            model.prefix_blocks * slot_bytes_of(model.page_bytes * model.layers),
        )


_ACCELERATOR = Plan(
    page_sizes={16 * KIB: 0.5, 64 * KIB: 0.9, 256 * KIB: 0.9, MIB: 0.9, 4 * MIB: 0.9},
    total_bytes=1024 * MIB,
    samples=15,
    overlap_most=1.03,
    overlap_page_bytes=MIB,
    matmul_size=4096,
    loop_s=0.05,
    queued_s=0.01,
    step_layers=32,
    step_page_bytes=64 * KIB,
    step_blocks={"prefill": 128, "decode": 8},
    steps=200,
    model=ModelShape(
        layers=8, heads=16, kv_heads=8, head_dim=128, mlp=4096, dtype="bfloat16",
        chunk_tokens=2048, prefix_tokens=8192, suffix_tokens=128, requests=4, tolerance=0.01,
    ),
)  # fmt: skip
_CPU = Plan(
    page_sizes=dict.fromkeys(_ACCELERATOR.page_sizes),
    total_bytes=32 * MIB,
    samples=9,
    overlap_most=None,
    overlap_page_bytes=256 * KIB,
    matmul_size=384,
    loop_s=0.02,
    queued_s=0.0,  # the caller is the compute: nothing can be queued ahead
    step_layers=8,
    step_page_bytes=64 * KIB,
    step_blocks={"prefill": 32, "decode": 2},
    steps=100,
    model=ModelShape(
        layers=2, heads=4, kv_heads=2, head_dim=64, mlp=512, dtype="float32",
        chunk_tokens=128, prefix_tokens=512, suffix_tokens=32, requests=2, tolerance=0.0,
    ),
)  # fmt: skip
PLANS = {"cpu": _CPU, "cuda": _ACCELERATOR, "npu": _ACCELERATOR}


@dataclass(slots=True)
class Budget:
    """Time that a run may take, looked at between parts and between samples.

    Attributes:
        cut: what was left out because the time was over.
    """

    seconds_max: float
    cut: list[str] = field(default_factory=list)
    _began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self._began

    @property
    def is_over(self) -> bool:
        return self.seconds >= self.seconds_max

    def allows(self, what: str) -> bool:
        """Whether there is time to begin with this; notes what is cut."""
        if self.is_over:
            self.cut.append(what)
            return False
        say(f"{what} ...")
        return True


@dataclass(slots=True)
class Comparison:
    """Seconds per sample: the reference before ours, ours, the reference after.

    Not that of `bench fs`, which brings the fs tier and all that it needs along.
    """

    before: list[float] = field(default_factory=list)
    ours: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)

    @property
    def reference(self) -> list[float]:
        """Per sample, the mean of both sides."""
        return [(a + b) / 2 for a, b in zip(self.before, self.after, strict=True)]

    @property
    def ratio(self) -> float:
        """Our speed over the reference's, median of the samples."""
        return median_ratio(self.reference, self.ours)

    @property
    def aa_spread(self) -> float:
        """How far the reference differs from itself."""
        return aa_spread(self.before, self.after)


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        aim: the value that it should reach; None: only reported. `is_most`: it should stay below.
        spread: how far the reference differs from itself; None: nothing is compared.
        void: why the figure proves nothing; empty if it does.
        facts: further numbers, for JSON.
    """

    name: str
    value: float
    unit: str
    aim: float | None = None
    is_most: bool = False
    spread: float | None = None
    void: str = ""
    note: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the aim is met, or missed by no more than the spread. None: no aim, or void."""
        if self.aim is None or self.void:
            return None
        spread = self.spread or 0.0
        if self.is_most:
            return self.value <= self.aim * (1 + spread)
        return self.value >= self.aim * (1 - spread)


def compare(
    samples: int, budget: Budget, reference: Callable[[], float], ours: Callable[[], float]
) -> Comparison:
    """Interleaved samples of two arms that return seconds; once more if the first series is void.

    When the time is over a series ends as soon as it can count.
    """
    found = _series(samples, budget, reference, ours)
    if void_reason(found) and not budget.is_over:
        say(f"void: {void_reason(found)}; once more")
        found = _series(samples, budget, reference, ours)
    return found


def void_reason(found: Comparison) -> str:
    """Why a comparison proves nothing; empty if it does."""
    if math.isinf(found.aa_spread):
        return "too few samples"
    if found.aa_spread > AA_SPREAD_MAX:
        return f"the reference differs from itself by more than {AA_SPREAD_MAX:.0%}"
    return ""


def _series(
    samples: int, budget: Budget, reference: Callable[[], float], ours: Callable[[], float]
) -> Comparison:
    found = Comparison()
    reference()  # a warm-up of each arm
    ours()
    for number in range(samples):
        if budget.is_over and number >= SAMPLES_MIN:
            break
        found.before.append(reference())
        found.ours.append(ours())
        found.after.append(reference())
    return found
