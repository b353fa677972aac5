"""What the core is asked and what it answers, as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.types import BlockKey, EngineId, LeaseId


@dataclass(frozen=True, slots=True)
class Limits:
    """What the core must know of the pool. `generation` makes lease ids unique for ever."""

    pool_bytes: int
    extent_unit: int
    pinned_share_max: float = 0.5
    generation: int = 1


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive blocks of one prefix to be stored.

    Attributes:
        predecessor: key of the block before `keys[0]`; None if it starts the prefix.
    """

    predecessor: BlockKey | None
    keys: Sequence[BlockKey]


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
