"""What the parts of the fs tier share: the books under their lock, and the ways a file goes.

Rule 1: the lock guards the books, the counters and `Space`; no call to the store is made under it.
Rule 2: who put a row into LEAVING removes its file, by `remove` or `evict`, and nobody else does.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from tierkv.tiers.base import BlockName
from tierkv.tiers.fs.index import Index
from tierkv.tiers.fs.layout import Layout, file_of, size_of
from tierkv.tiers.fs.space import Space
from tierkv.tiers.fs.transfer import Transfer
from tierkv.types import NamespaceId

# The file is not there. NFS says ESTALE if a peer removed it (faults N6); ENOTDIR: something else
# took the place of its directory.
GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})
_PURGED_AT_ONCE_MAX = 256


@dataclass(slots=True)
class Counts:
    """Counters of a tier's life; see `FsTier.statistics`."""

    evicted: int = 0
    recycled: int = 0
    foreign_files: int = 0
    corrupt: int = 0
    write_errors: int = 0
    read_errors: int = 0


class Store:
    """Books and files together.

    Attributes:
        is_complete: the scan found all files, so that a name unknown to the books has none.
    """

    def __init__(
        self,
        layout: Layout,
        index: Index,
        space: Space,
        transfer: Transfer,
        clock: Callable[[], float],
    ) -> None:
        self.layout = layout
        self.index = index
        self.space = space
        self.transfer = transfer
        self.clock = clock
        self.counts = Counts()
        self.is_complete = False
        self._lock = Lock()

    @contextmanager
    def books(self) -> Iterator[Index]:
        """The books, locked inside the `with`."""
        with self._lock:
            yield self.index

    def remove(self, row: int) -> bool:
        """Remove the file of a LEAVING row. Whether it is gone; else the row is stuck now."""
        try:
            self._unlink(row)
        except OSError:
            with self._lock:
                self.index.stick(row)
            return False
        return True

    def evict(self, row: int) -> bool:
        """Remove a victim's file. Whether it is gone; else the row is stuck now.

        Raises:
            OSError: the whole file system takes no writes; the victim keeps its place.
        """
        try:
            self._unlink(row)
        except OSError as error:
            with self._lock:
                if error.errno == errno.EROFS:
                    self.index.restore(row)
                    raise
                self.index.stick(row)
            return False
        with self._lock:
            self.counts.evicted += 1
        return True

    def find_file(self, name: BlockName) -> None:
        """Look for a file from before, and enter it into the books if there is one."""
        with self._lock:
            row = self.index.begin_look(name)
        if row is None:
            return
        try:
            with self.layout.folder_of(name) as folder:
                facts = os.stat(file_of(name.key), dir_fd=folder, follow_symlinks=False)
        except OSError:
            facts = None
        if self.end_look(row, facts):
            self.remove(row)

    def end_look(self, row: int, facts: os.stat_result | None) -> bool:
        """Enter what was found under a name. True if the caller must remove the file."""
        size = None if facts is None else size_of(facts)
        with self._lock:
            if size == 0:
                # What a failed writer left behind (faults L5).
                self.counts.corrupt += 1
                self.index.dismiss(row)
            return self.index.end_look(row, size, facts.st_mtime if facts else 0.0)

    def stamp(self, name: BlockName, now: float) -> None:
        """Write the time of last use to the file, so that it survives us."""
        try:
            with self.layout.folder_of(name) as folder:
                times = (now, now)
                os.utime(file_of(name.key), times, dir_fd=folder, follow_symlinks=False)
        except OSError:
            pass  # recency is worth no error: the next read meets whatever is wrong

    def purge(self, namespace: NamespaceId | None, used_before: float | None) -> tuple[int, int]:
        """Remove the blocks in the books that were not used since then; (gone, not removable)."""
        with self._lock:
            spaces = self.index.keys(namespace)
        gone = left = 0
        for space, keys in spaces:
            for at in range(0, len(keys), _PURGED_AT_ONCE_MAX):
                names = [BlockName(space, key) for key in keys[at : at + _PURGED_AT_ONCE_MAX]]
                removed, failed = self._purge(names, used_before)
                gone += removed
                left += failed
        return gone, left

    def _purge(self, names: list[BlockName], used_before: float | None) -> tuple[int, int]:
        leaving, doomed = [], 0
        with self._lock:
            for name in names:
                row = self.index.find(name)
                if row is None:
                    continue
                if used_before is not None and self.index.used_at(row) > used_before:
                    continue
                was_readable = self.index.is_readable(row)
                if self.index.dismiss(row):
                    leaving.append(row)
                else:
                    doomed += was_readable
        removed = sum([self.remove(row) for row in leaving])
        return doomed + removed, len(leaving) - removed

    def _unlink(self, row: int) -> None:
        name = self.index.name(row)
        try:
            with self.layout.folder_of(name) as folder:
                os.unlink(file_of(name.key), dir_fd=folder)
        except OSError as error:
            if error.errno not in GONE:
                raise
        with self._lock:
            self.space.give(self.index.size(row))
            self.index.forget(row)
