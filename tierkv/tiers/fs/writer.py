"""Writing of the fs tier: room is made, bytes go to a temporary name, a rename shows them.

Rule 1: bytes are reserved before the I/O, so writers together never exceed the capacity.
Rule 2: at capacity a victim's file is renamed to the temporary name and overwritten in place: its
blocks are allocated already, which is nearly twice as fast as a new file.
Rule 3: nothing is synced. A file that a power loss tore, or that holds the victim's bytes under its
new name, fails the check of its frame and is a miss; a sync per block costs milliseconds.
Rule 4: a write that fails leaves neither file nor entry.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from dataclasses import dataclass

from tierkv.tiers.base import BlockName, Outcome
from tierkv.tiers.fs.layout import GUARDS, file_of
from tierkv.tiers.fs.lock import DirectoryLock
from tierkv.tiers.fs.store import GONE, Store

VICTIMS_MAX = 64  # per write; more only where many small blocks make room for a large one
CHANGES_MAX = 1 << 18  # untold; beyond it nothing new is taken in until they are told
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_TRIES_MAX = 2
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | GUARDS
_FOLDERS_PER_NAMESPACE = 257


@dataclass(slots=True)
class _Job:
    """One write under way.

    Attributes:
        taken: bytes of a new file that `Space` was told of.
        is_made: the temporary file is there.
        is_left: it could not be removed.
    """

    name: BlockName
    view: memoryview
    row: int
    temporary: str
    taken: int | None = None
    is_made: bool = False
    is_left: bool = False


class Writer:
    """Stores blocks. Called from several threads at once."""

    def __init__(self, store: Store, lock: DirectoryLock) -> None:
        self._store = store
        self._lock = lock

    def write(self, name: BlockName, view: memoryview) -> Outcome:
        """Store one block; see `Tier.write`."""
        assert len(view) > 0, "a slot has bytes"
        self._look_at_space()
        outcome, row = self._begin(name, len(view))
        if row is None:
            return outcome
        job = _Job(name, view, row, self._store.layout.new_temporary())
        outcome = Outcome.FAILED
        try:
            outcome = self._try_twice(job)
        finally:  # whatever is raised, the name and its bytes must not stay taken
            self._end(job, outcome)
        return outcome

    def _try_twice(self, job: _Job) -> Outcome:
        """Once more if another file's room can be had, or the directory went away under us."""
        is_full = False
        outcome = Outcome.FAILED
        for _ in range(_TRIES_MAX):
            try:
                return self._try(job, is_full)
            except OSError as error:
                is_full = error.errno in _NO_ROOM
                outcome = Outcome.FULL if is_full else Outcome.FAILED
                if job.is_left or not (is_full or error.errno in GONE):
                    break
        return outcome

    def _look_at_space(self) -> None:
        space = self._store.space
        if space.is_due:
            facts = space.ask()
            with self._store.books():
                space.note(facts)

    def _begin(self, name: BlockName, size: int) -> tuple[Outcome, int | None]:
        """Take the name: a row, or the outcome."""
        for _ in range(_TRIES_MAX):
            with self._store.books() as index:
                row = index.find(name)
                if row is not None and index.is_readable(row) and index.size(row) == size:
                    index.use(row, self._store.clock(), math.inf)
                    return Outcome.OK, None
                if len(index.changes) >= CHANGES_MAX or not index.may_ever_fit(size):
                    return Outcome.FULL, None
                if row is None:
                    return Outcome.OK, index.begin_write(name)
                # A block of another length, or a place where something could not be removed.
                if not index.leave(row):
                    return Outcome.FULL, None
            if not self._store.remove(row):
                return self._failed(), None
        return Outcome.FULL, None

    def _failed(self) -> Outcome:
        with self._store.books():
            self._store.counts.write_errors += 1
        return Outcome.FAILED

    def _try(self, job: _Job, is_full: bool) -> Outcome:
        folder = self._open_folder(job.name)
        is_stored = False
        try:
            file = self._get_file(job, folder, is_full)
            if file is None:
                return Outcome.FULL
            self._fill(file, job.view)
            target = file_of(job.name.key)
            os.rename(job.temporary, target, src_dir_fd=folder, dst_dir_fd=folder)
            is_stored = True
        finally:
            if not is_stored:  # whatever was raised
                self._undo(job, folder)
            os.close(folder)
        return Outcome.OK

    def _open_folder(self, name: BlockName) -> int:
        layout = self._store.layout
        parts = layout.parts_of(name)
        try:
            return layout.open_folder(*parts)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
        try:
            self._make_folders(name)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            # A directory needs an inode, or a block, that a victim can give (faults M7).
            self._evict_one()
            self._make_folders(name)
        # The root may have been removed with our lock file in it.
        self._lock.renew()
        return layout.open_folder(*parts)

    def _make_folders(self, name: BlockName) -> None:
        with self._store.books():
            is_whole = self._store.space.has_room(0, _FOLDERS_PER_NAMESPACE)
        self._store.layout.make_folders(name, is_whole)

    def _evict_one(self) -> None:
        with self._store.books() as index:
            victim = index.choose_victim()
        if victim is not None:
            self._store.evict(victim)

    def _get_file(self, job: _Job, folder: int, is_full: bool) -> int | None:
        """An open file at the temporary name, its bytes reserved; None if there is no room.

        Args:
            is_full: a new file was refused for want of room, whatever the numbers say.
        """
        size = len(job.view)
        for _ in range(VICTIMS_MAX):
            victim = None
            with self._store.books() as index:
                has_room = index.has_room(size) and self._store.space.has_room(size)
                if is_full or not has_room:
                    victim = index.choose_victim()
                    if victim is None:
                        return None
                    # Recycling leaves the bytes as they are, so that must be allowed.
                    may_recycle = index.size(victim) == size and index.bytes <= index.capacity
                else:
                    index.resize(job.row, size)
                    self._store.space.take(size)
                    job.taken = size
            if victim is None:
                file = os.open(job.temporary, _NEW, 0o600, dir_fd=folder)
                job.is_made = True
                return file
            recycled = self._take_over(job, victim, folder) if may_recycle else None
            if recycled is not None:
                job.is_made = True
                return recycled
            is_full = not self._store.evict(victim) and is_full
        return None

    def _take_over(self, job: _Job, victim: int, folder: int) -> int | None:
        """A victim's file, open and at the temporary name; None if it is unfit for that.

        Raises:
            OSError: the whole file system takes no writes; the victim keeps its place.
        """
        size = len(job.view)
        try:
            file = self._rename_victim(job, self._store.index.name(victim), folder)
        except OSError as error:
            if error.errno == errno.EROFS:
                with self._store.books() as index:
                    index.restore(victim)
                raise
            return None
        if file is None:
            return None
        with self._store.books() as index:
            index.forget(victim)
            index.resize(job.row, size)
            self._store.counts.evicted += 1
            self._store.counts.recycled += 1
        return file

    def _rename_victim(self, job: _Job, name: BlockName, folder: int) -> int | None:
        text = file_of(name.key)
        with self._store.layout.folder_of(name) as source:
            file = os.open(text, os.O_WRONLY | GUARDS, dir_fd=source)
            try:
                facts = os.fstat(file)
                # A second name would show other bytes to whoever made it.
                is_plain = stat.S_ISREG(facts.st_mode) and facts.st_nlink == 1
                if is_plain and facts.st_size == len(job.view):
                    os.rename(text, job.temporary, src_dir_fd=source, dst_dir_fd=folder)
                    kept, file = file, -1
                    return kept
            finally:
                if file >= 0:
                    os.close(file)
        return None

    def _fill(self, file: int, view: memoryview) -> None:
        """Write all bytes and the time of use. Closes the file.

        Raises:
            OSError: not all bytes are written. Network file systems say so at closing.
        """
        try:
            moved = self._store.transfer.write(file, view)
            now = self._store.clock()
            os.utime(file, (now, now))
        finally:
            os.close(file)
        if moved != len(view):
            raise OSError(errno.EIO, f"{moved} of {len(view)} bytes were written")

    def _undo(self, job: _Job, folder: int) -> None:
        """Remove the temporary file and give back its bytes."""
        if job.is_made:
            job.is_made = False
            try:
                os.unlink(job.temporary, dir_fd=folder)
            except OSError as error:
                job.is_left = error.errno not in GONE
        with self._store.books() as index:
            self._settle(job)
            self._store.space.forget()
            if not job.is_left:
                index.resize(job.row, 0)

    def _settle(self, job: _Job) -> None:
        if job.taken is not None:
            self._store.space.settle(job.taken)
            job.taken = None

    def _end(self, job: _Job, outcome: Outcome) -> None:
        """Enter the outcome into the books."""
        is_dropped = False
        with self._store.books() as index:
            self._settle(job)
            self._store.counts.write_errors += outcome is Outcome.FAILED
            if outcome is Outcome.OK:
                # Dropped while it was written: then it must not come to life (faults K11).
                is_dropped = not index.publish(job.row, self._store.clock())
            elif job.is_left:
                index.stick(job.row)
            else:
                index.forget(job.row)
        if is_dropped:
            self._store.remove(job.row)
