"""The contract of an eviction policy.

A policy orders rows (a block's index in its namespace) and knows nothing else: no pins, no states,
no clock. Row 0 is never a block. Rule for every policy: a block is given up before its predecessor,
because without its predecessor no lookup can reach it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.int32]


class EvictionPolicy(Protocol):
    """Order of the resident rows of one namespace."""

    def grow(self, rows: int) -> None:
        """Make room for row numbers below `rows`."""

    def insert(self, rows: Rows, after: int) -> None:
        """Add a run of rows, head of the prefix first.

        Args:
            rows: shape (n,), consecutive blocks of one prefix, none of them present.
            after: row of the predecessor of `rows[0]`, present; 0 when the run starts a prefix.
        """

    def touch(self, rows: Rows) -> None:
        """Note one use of a whole prefix, head first, all present; call once per request."""

    def remove(self, rows: Rows) -> None:
        """Forget rows, all present."""

    def candidates(self) -> Iterator[int]:
        """Rows in the order in which they should be given up. Not valid across changes."""

    def __len__(self) -> int:
        """Number of rows present."""
