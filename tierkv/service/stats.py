"""The daemon's numbers as a plain tree: what `tierkv stats --json` prints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.service.server import Server

COUNTERS = (
    "lookups",
    "blocks_asked",
    "blocks_hit",
    "miss_absent",
    "miss_leases_max",
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
)


@dataclass(frozen=True, slots=True)
class Report:
    """Prompt tokens of requests by source."""

    requests: int = 0
    device: int = 0
    dram: int = 0
    computed: int = 0

    def __add__(self, other: Report) -> Report:
        return Report(
            self.requests + other.requests,
            self.device + other.device,
            self.dram + other.dram,
            self.computed + other.computed,
        )

    def tree(self) -> dict[str, object]:
        """Counts and shares as plain values."""
        tokens = self.device + self.dram + self.computed
        parts = {"device": self.device, "dram": self.dram, "computed": self.computed}
        ratio = {name: round(n / tokens, 4) if tokens else 0.0 for name, n in parts.items()}
        return {"requests": self.requests, "tokens": parts, "ratio": ratio}


def collect(server: Server, now: float) -> dict[str, object]:
    """Everything that the daemon counts. Sizes in bytes."""
    directory = server.directory
    spaces = list(directory.spaces.values())
    used = sum(len(s.index) * s.slot_bytes for s in spaces)
    recent = Report()
    for report in server.outcomes:
        recent = recent + report
    return {
        "capacity": directory.limits.pool_bytes,
        "used": used,
        "blocks": sum(len(s.index) for s in spaces),
        "pinned_blocks": sum(s.pinned for s in spaces),
        "leases": len(directory.leases),
        "sessions": server.engines_connected,
        "engines": server.engines_known,
        "generation": server.facts.generation,
        "is_granting": directory.may_grant,
        "pool": server.facts.pool,
        "counters": {name: directory.counters[name] for name in COUNTERS},
        "tokens_recent": recent.tree(),
        "tokens_total": server.outcomes_total.tree(),
        "namespaces": [
            {
                "namespace": s.id.hex(),
                "label": s.label,
                "is_private": s.private_to is not None,
                "users": len(s.users),
                "slot_bytes": s.slot_bytes,
                "slots": s.slots,
                "blocks": len(s.index),
                "extents": len(s.extents),
                "pinned_blocks": s.pinned,
            }
            for s in spaces
        ],
    }
