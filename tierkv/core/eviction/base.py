"""The contract of an eviction policy.

A policy orders rows (a block's index in its namespace) and knows nothing else: no pins, no states,
no clock. Row 0 is never a block. One policy object serves one namespace.

Rule 1: a policy only proposes. The books skip what may not go now, and never take a block while a
resident block still needs it as its predecessor, whatever the order says.
Rule 2: the better an order keeps a block behind its successors, the fewer proposals are skipped; a
policy whose order always does says so with `keeps_prefixes`, and the audit holds it to that.
Rule 3: calls cost time of the daemon's only thread; work on arrays, not block by block.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from tierkv.types import BlockKey

Rows = npt.NDArray[np.int32]


class Room(NamedTuple):
    """How much room absent blocks deserve.

    Attributes:
        blocks: how many of them, head first.
        candidates: how many blocks, from the first candidate on, may go for them.
    """

    blocks: int
    candidates: int


class EvictionPolicy(abc.ABC):
    """Order of the resident rows of one namespace. Third parties subclass it.

    Attributes:
        keeps_prefixes: every block is proposed before its predecessor.
    """

    keeps_prefixes: ClassVar[bool] = False

    @abc.abstractmethod
    def grow(self, rows: int) -> None:
        """Make room for row numbers below `rows`; never shrinks."""

    def resize(self, slots: int) -> None:
        """Learn how many blocks the namespace may hold from now on. It may shrink."""
        del slots

    def miss(self, keys: Sequence[BlockKey], after: BlockKey | None) -> Room:
        """Learn which absent blocks of a prefix are wanted, before room is made for them.

        Args:
            keys: consecutive blocks, head first. Some may find no room and never come.
            after: key of their predecessor; None when they start a prefix.
        """
        del after
        return Room(len(keys), len(self))

    @abc.abstractmethod
    def insert(self, rows: Rows, after: int, keys: Sequence[BlockKey]) -> None:
        """Add a run of rows, head of the prefix first.

        Args:
            rows: shape (n,), consecutive blocks of one prefix, none of them present.
            after: row of the predecessor of `rows[0]`, present; 0 when the run starts a prefix.
            keys: the blocks' keys in the order of `rows`; rows are used again, keys are not.
        """

    @abc.abstractmethod
    def touch(self, rows: Rows) -> None:
        """Note one use of a whole prefix, head first, all present; called once per request."""

    @abc.abstractmethod
    def remove(self, rows: Rows) -> None:
        """Forget rows that somebody removed on purpose; all present."""

    def evict(self, rows: Rows) -> None:
        """Forget rows that were given up for room; all present, each before its predecessor."""
        self.remove(rows)

    @abc.abstractmethod
    def candidates(self) -> Iterator[int]:
        """All rows present, in the order in which they should be given up.

        Not valid across changes.
        """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of rows present."""
