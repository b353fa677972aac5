"""The contract of a secondary tier.

A tier moves whole slots between memory of ours and its store, inside its I/O process. It decides
nothing: what is promoted, demoted and dropped is the core's choice.

Rule 1: a tier is called from several threads at once, but never with one name twice at a time for
writing. Calls may block; the I/O process around the tier has the deadlines.
Rule 2: a call never raises for reasons of the store: every name gets an `Outcome`. A whole call may
raise `TierUnavailableError`, which counts as FAILED for each of its names.
Rule 3: a tier allocates no buffers for blocks. Views are slots of the pool: one contiguous range of
frame and payload, aligned to `PAGE_BYTES`.
Rule 4: the bytes are judged by `read_verified` alone, so no tier can forget it.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.tiers.frame import seal, verify
from tierkv.types import BlockKey, NamespaceId, Outcome

__all__ = [
    "BlockName",
    "Change",
    "Outcome",
    "Tier",
    "TierInfo",
    "TierSettings",
    "read_verified",
    "write_sealed",
]


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block's name in every tier: block key = namespace + block hash + group index."""

    namespace: NamespaceId
    key: BlockKey


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What a tier is, fixed for its life.

    Attributes:
        type: `memory`, `fs`, `object` or `mooncake`; the word used in configuration and statistics.
        is_indexed: it knows its whole content and tells what was added and dropped; an unindexed
            tier is asked with `probe`.
        is_shared: other nodes write it too.
        is_durable: its content survives this process.
        batch_max: most names in one call.
        capacity: most bytes it holds, frames included; None if it has no bound of its own.
    """

    type: str
    is_indexed: bool
    is_shared: bool
    is_durable: bool
    batch_max: int
    capacity: int | None


@dataclass(frozen=True, slots=True)
class TierSettings:
    """One entry of `node.tiers` as plain values; see the configuration reference.

    Attributes:
        capacity: bytes; None lets the tier choose.
        reserve: share of the file system (space and inodes) that is left to others.
        io: `auto`, `direct` or `buffered`.
        options: passed to the store's client, for example `endpoint`.
    """

    type: str
    path: str | None = None
    url: str | None = None
    capacity: int | None = None
    reserve: float = 0.05
    io: str = "auto"
    read_threads: int = 4
    write_threads: int = 2
    deadline_s: float = 2.0
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Change:
    """An indexed tier got a block, or no longer has it."""

    name: BlockName
    is_added: bool
    slot_bytes: int = 0


class Tier(abc.ABC):
    """A store of blocks. Third parties subclass it and run `tierkv.testing`'s contract suite."""

    @property
    @abc.abstractmethod
    def info(self) -> TierInfo:
        """What this tier is."""

    @abc.abstractmethod
    def probe(self, names: Sequence[BlockName]) -> list[Outcome]:
        """Ask whether blocks are there: OK or MISSING, or FAILED if nobody can tell."""

    @abc.abstractmethod
    def read(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        """Copy stored blocks into slots. Call `read_verified` instead.

        Args:
            names: at most `info.batch_max`.
            views: one writable view per name, shape (slot_bytes,), page-aligned; the tier's until
                it returns.
        Returns:
            One outcome per name, same order. OK means that exactly slot_bytes bytes came; a
            stored block of another length is CORRUPT. On anything but OK the bytes are undefined.
        """

    @abc.abstractmethod
    def write(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        """Keep copies of sealed slots. Call `write_sealed` instead.

        All or nothing per name: a reader never sees a part. A name that is there already with the
        same length is OK and not written again. At capacity the tier makes room by its own policy;
        new blocks are the most recent.
        """

    @abc.abstractmethod
    def drop(self, names: Sequence[BlockName]) -> list[Outcome]:
        """Remove blocks; one that is not there is OK. FAILED if it is still there."""

    @abc.abstractmethod
    def purge(self, namespace: NamespaceId | None, older_than_s: float | None) -> int:
        """Remove all blocks of a namespace or of all, or only those not used for some time.

        Returns:
            Number of blocks removed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give everything back. No other call is running."""

    def touch(self, names: Sequence[BlockName]) -> None:
        """Note a use of blocks that needed no read. For the tier's own eviction."""
        del names

    def scan(self) -> bool:
        """Find out a part of what is there from before; for indexed tiers that are durable.

        Called again and again from one thread while the tier serves.

        Returns:
            Whether everything is known now.
        """
        return True

    def take_changes(self, most: int) -> list[Change]:
        """What an indexed tier gained or lost since the last call, oldest first, at most `most`."""
        del most
        return []

    def statistics(self) -> dict[str, int]:
        """Counters and gauges; `bytes` and `blocks` if it knows them."""
        return {}

    def check(self) -> list[str]:
        """Compare books with store; one sentence per difference."""
        return []


def write_sealed(
    tier: Tier, names: Sequence[BlockName], views: Sequence[memoryview]
) -> list[Outcome]:
    """Write the frame of each slot and store it."""
    for name, view in zip(names, views, strict=True):
        seal(view, name.namespace, name.key)
    return tier.write(names, views)


def read_verified(
    tier: Tier, names: Sequence[BlockName], views: Sequence[memoryview]
) -> list[Outcome]:
    """Read blocks and judge every byte; what is damaged is CORRUPT and dropped from the tier."""
    outcomes = tier.read(names, views)
    assert len(outcomes) == len(names), "one outcome per name"
    for at, (name, view) in enumerate(zip(names, views, strict=True)):
        if outcomes[at] is Outcome.OK and not verify(view, name.namespace, name.key):
            outcomes[at] = Outcome.CORRUPT
    damaged = [n for n, o in zip(names, outcomes, strict=True) if o is Outcome.CORRUPT]
    if damaged:
        tier.drop(damaged)
    return outcomes
