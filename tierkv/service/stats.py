"""The daemon's numbers as a plain tree: what `tierkv stats --json` prints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tierkv.service.server import Server

COUNTERS = (
    "lookups",
    "blocks_asked",
    "blocks_hit",
    "miss_absent",
    "miss_leases_max",
    "miss_pending",
    "blocks_reserved",
    "blocks_stored",
    "skipped_present",
    "skipped_no_room",
    "skipped_orphan",
    "skipped_not_granting",
    "commit_failed",
    "commit_orphaned",
    "evicted",
    "purged",
    "abandoned",
    "unknown_leases",
    "duplicate_messages",
    "protocol_errors",
    "bytes_hit",
    "bytes_stored",
    "blocks_promoting",
    "blocks_promoted",
    "promote_no_room",
    "promote_too_short",
    "promote_missing",
    "promote_corrupt",
    "promote_failed",
    "promote_late",
    "promote_orphaned",
    "blocks_demoting",
    "blocks_demoted",
    "demote_full",
    "demote_failed",
    "writeback_shed",
    "backlog_shed",
    "late_operations",
    "unknown_jobs",
)


@dataclass(frozen=True, slots=True)
class Report:
    """Prompt tokens of requests by source. `tiers`: DRAM, then the secondary tiers in order."""

    requests: int = 0
    device: int = 0
    tiers: tuple[int, ...] = ()
    computed: int = 0

    def __add__(self, other: Report) -> Report:
        pairs = itertools.zip_longest(self.tiers, other.tiers, fillvalue=0)
        return Report(
            self.requests + other.requests,
            self.device + other.device,
            tuple(ours + theirs for ours, theirs in pairs),
            self.computed + other.computed,
        )

    def tree(self, names: Sequence[str]) -> dict[str, object]:
        """Counts and shares as plain values, by the names of the tiers."""
        below = itertools.zip_longest(names, self.tiers[: len(names)], fillvalue=0)
        parts = {"device": self.device}
        parts |= {str(name): int(count) for name, count in below}
        parts["computed"] = self.computed
        tokens = sum(parts.values())
        ratio = {name: round(n / tokens, 4) if tokens else 0.0 for name, n in parts.items()}
        return {"requests": self.requests, "tokens": parts, "ratio": ratio}


def _tier_trees(server: Server, now: float) -> list[dict[str, object]]:
    tiering, counters = server.directory.tiering, server.directory.counters
    return [
        {
            "tier": lane.limits.name,
            "write_policy": lane.limits.write_policy,
            "is_up": lane.is_up,
            "is_indexed": lane.limits.is_indexed,
            "is_scanned": tiering.promoter.known_whole[tier],
            "is_reading": not lane.reads.is_paused(now),
            "is_writing": not lane.writes.is_paused(now),
            "blocks_known": tiering.presence.counts[tier],
            "blocks_promoted": counters[f"promoted.{lane.limits.name}"],
            "blocks_demoted": counters[f"demoted.{lane.limits.name}"],
            "jobs": sum(1 for _ in lane.all()),
            "process": lane.epoch,
            "store": server.stores[tier],
        }
        for tier, lane in enumerate(tiering.lanes)
    ]


def collect(server: Server, now: float) -> dict[str, object]:
    """Everything that the daemon counts. Sizes in bytes."""
    directory = server.directory
    spaces = list(directory.spaces.values())
    used = sum(len(s.index) * s.slot_bytes for s in spaces)
    recent = Report()
    for report in server.outcomes:
        recent = recent + report
    sources = ["dram", *directory.tiering.names]
    return {
        "capacity": directory.limits.pool_bytes,
        "used": used,
        "blocks": sum(len(s.index) for s in spaces),
        "pinned_blocks": sum(s.pinned for s in spaces),
        "dirty_blocks": sum(s.dirty for s in spaces),
        "leases": len(directory.leases),
        "sessions": server.engines_connected,
        "engines": server.engines_known,
        "generation": server.facts.generation,
        "is_granting": directory.may_grant,
        "pool": server.facts.pool,
        "placement": server.facts.placement.tree(),
        "devices": [
            {"engine": engine, **msgspec.structs.asdict(device)}
            for engine, device in server.devices
        ],
        "counters": {name: directory.counters[name] for name in COUNTERS},
        "tokens_recent": recent.tree(sources),
        "tokens_total": server.outcomes_total.tree(sources),
        "tiers": _tier_trees(server, now),
        "namespaces": [
            {
                "namespace": s.id.hex(),
                "label": s.label,
                "is_private": s.private_to is not None,
                "may_demote": s.may_demote,
                "users": len(s.users),
                "slot_bytes": s.slot_bytes,
                "slots": s.slots,
                "blocks": len(s.index),
                "extents": len(s.extents),
                "pinned_blocks": s.pinned,
                "dirty_blocks": s.dirty,
            }
            for s in spaces
        ],
    }
