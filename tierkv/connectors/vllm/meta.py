"""What scheduler half and worker half tell each other. Carried by vLLM, inside the engine only."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tierkv.device.facts import CopyFacts
from tierkv.device.layout import Pages

NO_GENERATION = -1  # of a plan that must fail: no pool has it


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Engine blocks of one request to be loaded under one read lease."""

    lease: int
    generation: int
    request: str
    pages: Pages
    is_async: bool


@dataclass(frozen=True, slots=True)
class StorePlan:
    """TierKV blocks of one step to be stored under one write lease.

    `pages` holds `engine_blocks` pages per block, block after block.
    """

    lease: int
    generation: int
    blocks: int
    engine_blocks: int
    pages: Pages


@dataclass
class StepPlan(KVConnectorMetadata):
    """The work of one engine step.

    Attributes:
        pool, generation: which pool the offsets belong to.
        rank_offsets: per rank in (pp, tp) order where its part of a payload begins.
        fences: stores whose device blocks this step may overwrite.
        failures_seen: per rank, load failures that the scheduler has dealt with.
    """

    pool: str = ""
    generation: int = 0
    rank_offsets: tuple[int, ...] = ()
    loads: list[LoadPlan] = field(default_factory=list)
    store: StorePlan | None = None
    fences: tuple[int, ...] = ()
    failures_seen: dict[int, int] = field(default_factory=dict)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """What ended on the workers since the last report.

    Attributes:
        stored: write lease -> (ranks that reported, per block whether all of them stored it).
        loaded: read lease -> (ranks that reported, whether all of them loaded everything).
        load_failures: per rank, load failures so far.
        devices: per rank how its copies are made, if that changed.
    """

    stored: dict[int, tuple[int, list[bool]]] = field(default_factory=dict)
    loaded: dict[int, tuple[int, bool]] = field(default_factory=dict)
    load_failures: dict[int, int] = field(default_factory=dict)
    devices: dict[int, CopyFacts] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport), "reports of one connector"
        for lease, (ranks, flags) in other.stored.items():
            have = self.stored.get(lease, (0, [True] * len(flags)))
            both = [a and b for a, b in zip(have[1], flags, strict=True)]
            self.stored[lease] = (have[0] + ranks, both)
        for lease, (ranks, is_ok) in other.loaded.items():
            count, was_ok = self.loaded.get(lease, (0, True))
            self.loaded[lease] = (count + ranks, was_ok and is_ok)
        self.load_failures.update(other.load_failures)
        self.devices.update(other.devices)
        return self


@dataclass
class WorkerGeometry(KVConnectorHandshakeMetadata):
    """What one rank's tensors look like: an ingredient of the namespace."""

    names: tuple[str, ...]
    page_bytes: tuple[int, ...]
    forms: tuple[str, ...]
