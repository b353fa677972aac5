"""Finding out what lies in the directory: at the start, piece by piece, and for the audit.

Rule 1: no link is followed, and nothing that is not ours is touched.
Rule 2: the running tier goes first: a name that the books know is skipped.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Generator, Iterator
from dataclasses import dataclass

from tierkv.tiers.base import BlockName
from tierkv.tiers.fs.index import State
from tierkv.tiers.fs.layout import (
    LOCK_FILE,
    Layout,
    is_folder,
    key_of,
    namespace_of,
    size_of,
)
from tierkv.tiers.fs.store import GONE, Store
from tierkv.tiers.fs.writer import CHANGES_MAX
from tierkv.types import NamespaceId

logger = logging.getLogger(__name__)

# A directory that is gone or closed to us holds no blocks for us; any other error is a shortage of
# our own, and to pass over a directory then would leave its files uncounted.
_NOT_OURS = GONE | {errno.EACCES, errno.EPERM, errno.ELOOP}

_ENTRIES_AT_ONCE_MAX = 100  # names that are held while their files are looked at
_DIFFERENCES_MAX = 100
MEASURED_MAX = 20_000  # entries; beyond it the rest is estimated


@dataclass(frozen=True, slots=True)
class _Seen:
    """Something in the directory: a block's name, or none if it is not ours."""

    entry: os.DirEntry[str]
    name: BlockName | None
    parts: tuple[str, ...]  # directories from the root to it

    @property
    def facts(self) -> os.stat_result | None:
        """What it is, no link followed; None if it is gone."""
        try:
            return self.entry.stat(follow_symlinks=False)
        except OSError:
            return None


class Scan:
    """The scan at the start.

    Args:
        started_at: of the file system's clock; temporary files from before are of dead writers.
        entries_max: entries looked at per step.
    """

    def __init__(self, store: Store, started_at: float, entries_max: int) -> None:
        self._store = store
        self._started_at = started_at
        self._entries_max = entries_max
        self._walk = self._walk_all()
        self._is_trimmed = False

    def step(self) -> bool:
        """Find some more. Whether everything is known and fits the capacity."""
        if self._is_trimmed:
            return True
        if len(self._store.index.changes) >= CHANGES_MAX:
            return False
        seen = 0
        is_whole = False
        try:
            for looked_at in self._walk:
                seen += looked_at
                if seen >= self._entries_max:
                    return False
            is_whole = True
        except OSError as error:
            # What was not found would not count against the capacity: begin again.
            logger.warning("tier=fs: the scan begins again: %s", error)
            return False
        finally:
            if not is_whole and seen < self._entries_max:
                self._begin_again()
        if not self._store.is_complete:
            with self._store.books() as index:
                index.order_found()
                self._store.is_complete = True
        self._is_trimmed = self._trim()
        return self._is_trimmed

    def _begin_again(self) -> None:
        self._walk.close()
        self._walk = self._walk_all()
        with self._store.books():
            self._store.counts.foreign_files = 0

    def find_all(self, namespace: NamespaceId | None) -> None:
        """Enter all files of a namespace, or of all, into the books now."""
        for batch in _tour(self._store.layout, namespace):
            self._admit(batch)

    def close(self) -> None:
        """Give up the directory that is open."""
        self._walk.close()

    def _walk_all(self) -> Generator[int, None, None]:
        layout = self._store.layout
        for batch in _tour(layout, None):
            self._admit(batch)
            foreign = sum([self._is_foreign(seen) for seen in batch])
            with self._store.books():
                self._store.counts.foreign_files += foreign
            yield len(batch) + 1  # an empty directory costs something too

    def _admit(self, batch: list[_Seen]) -> None:
        looks = []
        with self._store.books() as index:
            for seen in batch:
                if seen.name is not None and index.find(seen.name) is None:
                    looks.append((index.begin_look(seen.name), seen))
        for row, seen in looks:
            assert row is not None, "a name without a row can be looked for"
            if self._store.end_look(row, seen.facts):
                self._store.remove(row)

    def _is_foreign(self, seen: _Seen) -> bool:
        """Whether it is somebody else's. Removes the temporary files of dead writers."""
        facts = seen.facts
        if facts is None:
            return False
        if seen.name is not None:
            return size_of(facts) is None
        layout = self._store.layout
        if not layout.is_temporary(seen.entry.name):
            return True
        if layout.is_own_temporary(seen.entry.name):
            return False
        if facts.st_ctime > self._started_at:
            return True
        try:
            folder = layout.open_folder(*seen.parts)
            try:
                os.unlink(seen.entry.name, dir_fd=folder)
            finally:
                os.close(folder)
        except OSError:
            return True
        return False

    def _trim(self) -> bool:
        """Evict some of what is over the capacity, after a restart with a smaller one."""
        for _ in range(self._entries_max):
            with self._store.books() as index:
                if index.bytes <= index.capacity or not index.blocks:
                    return True
                victim = index.choose_victim()
            if victim is None:
                return False
            try:
                self._store.evict(victim)
            except OSError:
                return True  # read-only: nothing can be evicted, and nothing can be added
        return False


def measure(layout: Layout, entries_max: int = MEASURED_MAX) -> int:
    """Bytes of the blocks in a directory, estimated from a part if they are many. Blocks."""
    folders = []
    for space in _names(layout):
        if namespace_of(space) is not None:
            folders += [(part, space) for part in _names(layout, space) if is_folder(part)]
    folders.sort()  # all namespaces side by side, so that a part of the list stands for all
    found = entries = visited = 0
    for part, space in folders:
        if entries >= entries_max:
            break
        visited += 1
        for batch in _list(layout, space, part):
            entries += len(batch)
            for entry in batch:
                facts = _Seen(entry, None, ()).facts if key_of(part, entry.name) else None
                found += (size_of(facts) or 0) if facts else 0
    return found * len(folders) // max(1, visited)


def audit(store: Store) -> list[str]:
    """Compare books with files; a sentence per difference.

    The tier serves meanwhile, so what only one of two looks shows was work under way.
    """
    first = _compare(store)
    again = set(_compare(store)) if first else set()
    return [sentence for sentence in first if sentence in again]


def _compare(store: Store) -> list[str]:
    with store.books() as index:
        found = index.check()
    on_disk: set[int] = set()
    total = 0
    for batch in _tour(store.layout, None):
        for seen in batch:
            text = seen.entry.name
            if seen.name is None:
                if store.layout.is_own_temporary(text):
                    found.append(f"{text}: is a temporary file that nobody writes")
                continue
            size = size_of(seen.facts) if seen.facts else None
            row = index.find(seen.name)
            if row is None:
                if size is not None and store.is_complete:
                    found.append(f"{text}: is a file that the books do not know")
                continue
            on_disk.add(row)
            total += index.size(row) if size is None else size
            if index.is_readable(row) and size != index.size(row):
                found.append(f"{text}: has {size} bytes, the books say {index.size(row)}")
    with store.books():
        known = index.keys(None)
    for namespace, keys in known:
        for key in keys:
            row = index.find(BlockName(namespace, key))
            if row is None or row in on_disk:
                continue
            if index.state(row) == State.STUCK:
                total += index.size(row)
            elif index.is_readable(row):
                found.append(f"{key.hex()}: is in the books and has no file")
    moving = (State.WRITING, State.LEAVING, State.FINDING)
    with store.books():
        is_quiet = index.rows_in(moving) == 0
    if is_quiet and total != index.bytes:
        found.append(f"files have {total} bytes, the books say {index.bytes}")
    return found[:_DIFFERENCES_MAX]


def _tour(layout: Layout, namespace: NamespaceId | None) -> Iterator[list[_Seen]]:
    """Everything below the root, some entries at a time, and an empty list per directory."""
    spaces = []
    if namespace is not None:
        spaces.append(namespace.hex())
    else:
        for batch in _list(layout):
            spaces += [entry.name for entry in batch if _is_space(entry)]
            others = [e for e in batch if not _is_space(e) and e.name != LOCK_FILE]
            yield [_Seen(entry, None, ()) for entry in others]
    for text in spaces:
        parts = []
        for batch in _list(layout, text):
            parts += [entry.name for entry in batch if _is_part(entry)]
            yield [_Seen(entry, None, (text,)) for entry in batch if not _is_part(entry)]
        space = namespace_of(text)
        assert space is not None, "only directories of namespaces are entered"
        for part in parts:
            yield []
            for batch in _list(layout, text, part):
                keys = [key_of(part, entry.name) for entry in batch]
                names = [None if key is None else BlockName(space, key) for key in keys]
                yield [
                    _Seen(entry, name, (text, part))
                    for entry, name in zip(batch, names, strict=True)
                ]


def _is_space(entry: os.DirEntry[str]) -> bool:
    return namespace_of(entry.name) is not None and _is_real_folder(entry)


def _is_part(entry: os.DirEntry[str]) -> bool:
    return is_folder(entry.name) and _is_real_folder(entry)


def _is_real_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _names(layout: Layout, *parts: str) -> list[str]:
    return [entry.name for batch in _list(layout, *parts) for entry in batch]


def _list(layout: Layout, *parts: str) -> Iterator[list[os.DirEntry[str]]]:
    try:
        yield from layout.list_folder(*parts, most=_ENTRIES_AT_ONCE_MAX)
    except OSError as error:
        if error.errno in _NOT_OURS:
            return  # removed under us, or unreadable: then its blocks are misses
        raise
