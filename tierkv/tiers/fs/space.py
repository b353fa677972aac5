"""What the file system has left, and what must be left of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

LOOK_PERIOD_S = 1.0
_LOOK_TAKES_MAX = 64


class Space:
    """Room below a directory, looked at about once a second.

    Not locked: `Store` calls it under its lock, except for `ask`, which blocks.

    Args:
        reserve: share of space and inodes that is left to others.
        clock: seconds.
    """

    def __init__(self, root: Path, reserve: float, clock: Callable[[], float]) -> None:
        self._root = root
        self._reserve = reserve
        self._clock = clock
        self._facts: os.statvfs_result | None = None
        self._looked_at = 0.0
        # Since the last look. Bytes of writes under way are in both, because nobody can say how
        # many of them the last look saw already.
        self._taken_bytes = self._taken_files = self._takes = 0
        self._moving_bytes = self._moving_files = 0

    @property
    def is_due(self) -> bool:
        """Whether the next decision needs a look."""
        age = self._clock() - self._looked_at
        is_old = not 0 <= age < LOOK_PERIOD_S
        return self._facts is None or is_old or self._takes >= _LOOK_TAKES_MAX

    def ask(self) -> os.statvfs_result | None:
        """Ask the file system; None if it does not say. Blocks."""
        try:
            return os.statvfs(self._root)
        except OSError:
            return None  # the write that follows meets the same error and tells it

    def note(self, facts: os.statvfs_result | None) -> None:
        """Keep an answer."""
        if facts is not None:
            self._facts = facts
            self._looked_at = self._clock()
            self._taken_bytes, self._taken_files = self._moving_bytes, self._moving_files
            self._takes = 0

    def forget(self) -> None:
        """The last answer was wrong: the file system refused what it had room for."""
        self._facts = None

    def has_room(self, size: int, files: int = 1) -> bool:
        """Whether the reserve stays free after so many bytes and files more."""
        facts = self._facts
        if facts is None:
            return True  # the file system itself has the last word
        left = facts.f_bavail * facts.f_frsize - self._taken_bytes - size
        if left < self._reserve * facts.f_blocks * facts.f_frsize:
            return False
        # File systems that make inodes as needed report 0.
        left_files = facts.f_favail - self._taken_files - files
        return facts.f_files == 0 or left_files >= self._reserve * facts.f_files

    def take(self, size: int) -> None:
        """A new file of this size is being written, until `settle`."""
        self._taken_bytes += size
        self._taken_files += 1
        self._takes += 1
        self._moving_bytes += size
        self._moving_files += 1

    def settle(self, size: int) -> None:
        """The new file is written, or given up."""
        self._moving_bytes -= size
        self._moving_files -= 1

    def give(self, size: int) -> None:
        """A file of this size was removed."""
        self._taken_bytes -= size
        self._taken_files -= 1
