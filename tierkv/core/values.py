"""What the core is asked and what it answers, as values."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.types import BlockKey, EngineId, LeaseId, NamespaceId


@dataclass(frozen=True, slots=True)
class Limits:
    """What the core must know of the pool. `generation` makes lease ids unique for ever.

    Attributes:
        clean_tail: share of a namespace's slots, coldest first, that the cleaner keeps clean.
        dirty_max: share of a namespace's slots above which it writes whole batches.
        promote_share_max: share of the pool that may be filled from tiers at a time.
    """

    pool_bytes: int
    extent_unit: int
    pinned_share_max: float = 0.5
    generation: int = 1
    clean_tail: float = 0.15
    dirty_max: float = 0.5
    promote_share_max: float = 0.25


@dataclass(frozen=True, slots=True)
class TierLimits:
    """What the core must know of a secondary tier.

    Attributes:
        name: the word of configuration and statistics.
        write_policy: `write_back`, `write_through` or `write_through_selective`.
        hits_min: uses after which the selective policy writes a block.
        is_indexed: it tells what it holds; otherwise it is asked.
        is_durable: it outlives the daemon, so a stop flushes to it.
        capacity: bytes; None if unbounded.
        backlog_max: bytes of blocks that may wait to be written.
        promote_min_tokens: shortest run that is worth a read.
        deadline_s: an operation that takes longer has failed.
    """

    name: str
    write_policy: str = "write_back"
    hits_min: int = 2
    is_indexed: bool = True
    is_durable: bool = True
    capacity: int | None = None
    read_threads: int = 4
    write_threads: int = 2
    backlog_max: int = 1 << 30
    promote_min_tokens: int = 0
    deadline_s: float = 2.0


class Op(enum.IntEnum):
    """What an I/O process is asked to do."""

    READ = 0
    PROBE = 1
    WRITE = 2
    DROP = 3
    TOUCH = 4
    PURGE = 5
    CHECK = 6


@dataclass(frozen=True, slots=True)
class Job:
    """Work for the I/O process of one tier.

    Attributes:
        namespace: None for all (`PURGE`) or none (`CHECK`).
        offsets: per key its slot's byte offset in the pool; empty for jobs without bytes.
        older_than_s: `PURGE`: only blocks not used for this time.
    """

    id: int
    tier: int
    op: Op
    namespace: NamespaceId | None = None
    slot_bytes: int = 0
    keys: tuple[BlockKey, ...] = ()
    offsets: tuple[int, ...] = ()
    older_than_s: float | None = None


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
        pending: blocks right behind them that are on their way, or may turn out to be there.
        is_promoting: some of them come from a tier; otherwise another engine is writing them.
    """

    lease: LeaseId
    offsets: npt.NDArray[np.int64]
    pending: int
    is_promoting: bool = False


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
        sources: per block 0 if DRAM had it, else 1 + the number of the tier that it came from.
        pending: blocks behind them that are still on their way; 0: nothing more will come.
    """

    engine: EngineId
    lease: LeaseId
    offsets: npt.NDArray[np.int64]
    sources: bytes
    pending: int
    is_promoting: bool = False


@dataclass(frozen=True, slots=True)
class Recall:
    """Too much of the pool is pinned: the engine should release this waiting lease."""

    engine: EngineId
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class TaskEnded:
    """A purge or check has ended everywhere.

    Attributes:
        dropped: blocks removed, by tier; DRAM is `dram`.
        problems: what a check found, and tiers that did not answer.
    """

    task: int
    dropped: dict[str, int]
    problems: tuple[str, ...]


Event = Ready | Recall | TaskEnded
NO_OFFSETS: npt.NDArray[np.int64] = np.zeros(0, np.int64)
