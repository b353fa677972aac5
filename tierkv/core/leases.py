"""Leases: the only right to touch a slot."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tierkv.core.eviction.base import Rows
from tierkv.core.namespace import Namespace
from tierkv.types import EngineId, LeaseId


@dataclass(slots=True, eq=False)
class Lease:
    """A read lease pins resident rows; a write lease owns rows being filled.

    Attributes:
        rows: leased rows, head of the prefix first.
        growing: rows behind them that other engines are filling, in order; they join when they
            become resident and are cut off when one fails.
        joined: how many of `growing` are resident and pinned already, out of order.
        is_taken: a copy may have been issued; the lease is not recalled and does not grow.
    """

    id: LeaseId
    engine: EngineId
    space: Namespace
    is_write: bool
    rows: Rows
    growing: list[int] = field(default_factory=list)
    joined: set[int] = field(default_factory=set)
    is_taken: bool = False
    is_recalled: bool = False


@dataclass(frozen=True, slots=True)
class Found:
    """Answer to a lookup.

    Attributes:
        lease: 0 if nothing was found.
        offsets: byte offsets in the pool of the leading readable blocks, shape (n,).
        pending: blocks right behind them that are on their way.
    """

    lease: LeaseId
    offsets: npt.NDArray[np.int64]
    pending: int


@dataclass(frozen=True, slots=True)
class Granted:
    """Answer to a reserve.

    Attributes:
        lease: 0 if nothing was granted.
        offsets: per asked key its byte offset in the pool, or -1 if it is not to be written.
    """

    lease: LeaseId
    offsets: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ready:
    """A growing lease grew, or ended growing.

    Attributes:
        offsets: byte offsets of all its readable blocks from the first on.
        done: nothing more will come.
    """

    engine: EngineId
    lease: LeaseId
    offsets: npt.NDArray[np.int64]
    done: bool


@dataclass(frozen=True, slots=True)
class Recall:
    """Too much of the pool is pinned: the engine should release this waiting lease."""

    engine: EngineId
    lease: LeaseId


Event = Ready | Recall
NO_OFFSETS: npt.NDArray[np.int64] = np.zeros(0, np.int64)
