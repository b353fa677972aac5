"""Leases: the only right to touch a slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.core.eviction.base import Rows
from tierkv.core.namespace import Namespace
from tierkv.types import BlockKey, EngineId, LeaseId


@dataclass(slots=True, eq=False)
class Lease:
    """A read lease pins resident rows; a write lease owns rows being filled.

    Attributes:
        rows: leased rows, head of the prefix first.
        sources: per leased row 0 if DRAM had it, else 1 + the number of the tier it came from.
        growing: rows behind them that other engines are filling or tiers are reading, in order;
            they join when they become resident and are cut off when one fails.
        unknown: keys behind them that a tier is being asked about; more rows may follow.
        joined: those of `growing` that are resident and pinned already, out of order.
        joined_from: the source of those of `joined` that came from a tier.
        is_taken: a copy may have been issued; the lease is not recalled and does not grow.
    """

    id: LeaseId
    engine: EngineId
    space: Namespace
    is_write: bool
    rows: Rows
    sources: bytearray = field(default_factory=bytearray)
    growing: list[int] = field(default_factory=list)
    unknown: list[BlockKey] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    joined_from: dict[int, int] = field(default_factory=dict)
    is_taken: bool = False
    is_recalled: bool = False


@dataclass(slots=True)
class Engine:
    """A known engine and the leases it holds."""

    id: EngineId
    leases: dict[LeaseId, Lease] = field(default_factory=dict)
    is_closed: bool = False
