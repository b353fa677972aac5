"""The fs tier: blocks as files of an SSD or a network file system, one file per block.

Rule 1: only regular files of the expected length are blocks. Anything else at a block's name is
answered at once, without waiting, and leaves the books.
Rule 2: a file is not touched while it is read; whoever wants it gone dooms it, and the last reader
removes it.
Rule 3: after any failed read the entry is gone, so a bad block costs one read.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tierkv.errors import ConfigError, TierUnavailableError
from tierkv.tiers.base import BlockName, Change, Outcome, Tier, TierInfo, TierSettings
from tierkv.tiers.fs.buffered import BufferedTransfer
from tierkv.tiers.fs.direct import DirectTransfer, probe_direct
from tierkv.tiers.fs.index import Index, State
from tierkv.tiers.fs.layout import GUARDS, Layout, file_of, size_of
from tierkv.tiers.fs.lock import DirectoryLock
from tierkv.tiers.fs.scan import Scan, audit, measure
from tierkv.tiers.fs.space import Space
from tierkv.tiers.fs.store import GONE, Store
from tierkv.tiers.fs.transfer import Transfer
from tierkv.tiers.fs.writer import Writer
from tierkv.types import NamespaceId

logger = logging.getLogger(__name__)

BATCH_MAX = 64
DEFAULT_SHARE = 0.5  # of free space and what is ours already, if no capacity is configured
VICTIMS_SCANNED_MAX = 256
_WRITES_PER_LOCK_LOOK = 64
# What stands there is no file: a link, a socket or an idle device, a directory.
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.EISDIR})
# Short of something in this process, which says nothing about the block.
_OUR_OWN = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
_UNUSABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENOTDIR})
_UNUSABLE |= {errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.EEXIST}


class FsTier(Tier):
    """Keeps blocks below `settings.path`, which belongs to this tier alone.

    `settings.options["owner"]`: a token that all I/O processes of one daemon share; one of them may
    take over from another that hangs in the kernel and keeps the lock of the directory.

    Args:
        clock: seconds since the epoch; file times are set from it.
        transfer: what moves bytes, instead of what `settings.io` says.
        touch_period_s: a file's time of last use is written at most this often.
        scan_entries_max: entries looked at per `scan`.
    Raises:
        ConfigError: the directory cannot be used, or another tier uses it.
        TierUnavailableError: the file system does not answer now.
    """

    def __init__(
        self,
        settings: TierSettings,
        clock: Callable[[], float] = time.time,
        transfer: Transfer | None = None,
        touch_period_s: float = 60.0,
        scan_entries_max: int = 1000,
    ) -> None:
        if not settings.path:
            raise ConfigError("node.tiers: a tier of type fs needs a path; name a directory")
        root = Path(settings.path).absolute()
        try:
            root.mkdir(0o700, parents=True, exist_ok=True)
            layout = Layout(root)
            self._lock = DirectoryLock(layout, settings.options.get("owner", ""))
            self._lock.take()
            try:
                self._open(settings, layout, clock, transfer, scan_entries_max)
            except (OSError, ConfigError):
                self._lock.release()
                raise
        except OSError as error:
            if error.errno in _UNUSABLE:
                raise ConfigError(
                    f"node.tiers: {root} cannot be used: {error.strerror}; name a directory, not a "
                    "link, that this user may write"
                ) from error
            raise TierUnavailableError(f"{root}: {error.strerror}; try again") from error
        self._touch_period_s = touch_period_s
        self._is_ours = True
        self._writes_to_look = _WRITES_PER_LOCK_LOOK

    def _open(
        self,
        settings: TierSettings,
        layout: Layout,
        clock: Callable[[], float],
        transfer: Transfer | None,
        scan_entries_max: int,
    ) -> None:
        # Compared with times of files, so it must come from their clock, not from ours.
        folder = layout.open_folder()
        try:
            os.utime(folder)
            started_at = os.fstat(folder).st_mtime
        finally:
            os.close(folder)
        space = Space(layout.root, settings.reserve, clock)
        facts = space.ask()
        space.note(facts)
        stored = measure(layout)
        capacity = settings.capacity
        if capacity is None:
            free = facts.f_bavail * facts.f_frsize if facts else 0
            capacity = int(DEFAULT_SHARE * (free + stored))
        index = Index(capacity, VICTIMS_SCANNED_MAX)
        index.unknown_bytes = stored
        transfer = transfer or _choose_transfer(settings.io, layout)
        self._store = Store(layout, index, space, transfer, clock)
        self._writer = Writer(self._store, self._lock)
        self._scan = Scan(self._store, started_at, scan_entries_max)
        self._capacity = capacity

    @property
    def info(self) -> TierInfo:
        return TierInfo(
            type="fs",
            is_indexed=True,
            is_shared=False,
            is_durable=True,
            batch_max=BATCH_MAX,
            capacity=self._capacity,
        )

    def probe(self, names: Sequence[BlockName]) -> list[Outcome]:
        assert len(names) <= BATCH_MAX, "at most info.batch_max names"
        with self._store.books() as index:
            rows = [index.find(name) for name in names]
            is_there = [row is not None and index.is_readable(row) for row in rows]
            is_known = [row is not None and index.state(row) != State.FINDING for row in rows]
        outcomes = [Outcome.OK if there else Outcome.MISSING for there in is_there]
        if not self._store.is_complete:
            for at, name in enumerate(names):
                if not is_known[at]:
                    outcomes[at] = self._look(name)
        return outcomes

    def read(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        assert len(names) <= BATCH_MAX, "at most info.batch_max names"
        self._require_root()
        return [self._read_one(name, view) for name, view in zip(names, views, strict=True)]

    def write(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        assert len(names) <= BATCH_MAX, "at most info.batch_max names"
        self._require_root()
        self._writes_to_look -= 1  # a race of two threads delays or doubles a look, no more
        if self._writes_to_look <= 0:
            self._writes_to_look = _WRITES_PER_LOCK_LOOK
            self._is_ours = self._lock.renew()
        if not self._is_ours:
            raise TierUnavailableError(
                f"{self._store.layout.root}: another daemon took this directory after it was "
                "removed; give each its own"
            )
        return [self._writer.write(name, view) for name, view in zip(names, views, strict=True)]

    def drop(self, names: Sequence[BlockName]) -> list[Outcome]:
        return [self._drop_one(name) for name in names]

    def purge(self, namespace: NamespaceId | None, older_than_s: float | None) -> int:
        if not self._store.is_complete:
            self._scan.find_all(namespace)
        used_before = None if older_than_s is None else self._store.clock() - older_than_s
        gone, left = self._store.purge(namespace, used_before)
        if left:
            raise TierUnavailableError(
                f"{self._store.layout.root}: {left} files cannot be removed, {gone} blocks were; "
                "make them removable and purge again, or they are back after the next start"
            )
        if namespace is not None and older_than_s is None:
            self._store.layout.remove_folders(namespace)
        return gone

    def close(self) -> None:
        try:
            self._scan.close()
            self._store.transfer.close()
        finally:
            self._lock.release()

    def touch(self, names: Sequence[BlockName]) -> None:
        now = self._store.clock()
        with self._store.books() as index:
            rows = [(name, index.find_readable(name)) for name in names]
            due = [
                name
                for name, row in rows
                if row is not None and index.use(row, now, self._touch_period_s)
            ]
        for name in due:
            self._store.stamp(name, now)

    def scan(self) -> bool:
        self._is_ours = self._lock.renew()
        return self._scan.step()

    def take_changes(self, most: int) -> list[Change]:
        with self._store.books() as index:
            count = max(0, min(most, len(index.changes)))
            return [index.changes.popleft() for _ in range(count)]

    def statistics(self) -> dict[str, int]:
        with self._store.books() as index:
            counts = self._store.counts
            return {
                "bytes": index.bytes,
                "blocks": index.blocks,
                "capacity": self._capacity,
                "evicted": counts.evicted,  # by this tier's own policy, the recycled included
                "recycled": counts.recycled,
                "stuck_files": index.stuck_files,
                "stuck_bytes": index.stuck_bytes,
                "foreign_files": counts.foreign_files,
                "corrupt": counts.corrupt,
                "write_errors": counts.write_errors,
                "read_errors": counts.read_errors,
                "scan_complete": int(self._store.is_complete),
                "is_direct": int(self._store.transfer.is_direct),
            }

    def check(self) -> list[str]:
        return audit(self._store)

    def _require_root(self) -> None:
        try:
            os.close(self._store.layout.open_folder())
        except OSError as error:
            # One that was removed is made again by the next write.
            if error.errno == errno.ENODEV:
                raise TierUnavailableError(
                    f"{error.strerror}; mount its disk again and restart the daemon"
                ) from error

    def _look(self, name: BlockName) -> Outcome:
        """Ask the file system for a block that the scan may still find."""
        try:
            with self._store.layout.folder_of(name) as folder:
                facts = os.stat(file_of(name.key), dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            return Outcome.MISSING if error.errno in GONE else Outcome.FAILED
        return Outcome.OK if size_of(facts) else Outcome.MISSING

    def _read_one(self, name: BlockName, view: memoryview) -> Outcome:
        store = self._store
        now = store.clock()
        for may_look in (not store.is_complete, False):
            with store.books() as index:
                row = index.find_readable(name)
                if row is not None:
                    index.pin(row)
            if row is not None or not may_look:
                break
            store.find_file(name)
        if row is None:
            return Outcome.MISSING
        outcome, is_bad = Outcome.FAILED, False
        try:
            outcome, is_bad = self._fetch(name, view)
        finally:  # whatever is raised, the block must not stay pinned
            with store.books() as index:
                is_due = outcome is Outcome.OK and index.use(row, now, self._touch_period_s)
                if is_bad:
                    index.dismiss(row)
                is_last = index.unpin(row)
                store.counts.corrupt += outcome is Outcome.CORRUPT
                store.counts.read_errors += outcome is Outcome.FAILED
        if is_last:
            store.remove(row)
        elif is_due:
            store.stamp(name, now)
        return outcome

    def _fetch(self, name: BlockName, view: memoryview) -> tuple[Outcome, bool]:
        """Read a file. Its outcome, and whether the file is to blame."""
        try:
            with self._store.layout.folder_of(name) as folder:
                file = os.open(file_of(name.key), os.O_RDONLY | GUARDS, dir_fd=folder)
            try:
                if size_of(os.fstat(file)) != len(view):
                    return Outcome.CORRUPT, True
                is_whole = self._store.transfer.read(file, view) == len(view)
            finally:
                os.close(file)
        except OSError as error:
            if error.errno in GONE:
                return Outcome.MISSING, True
            if error.errno in _NO_FILE:
                return Outcome.CORRUPT, True
            return Outcome.FAILED, error.errno not in _OUR_OWN
        return (Outcome.OK, False) if is_whole else (Outcome.FAILED, True)

    def _drop_one(self, name: BlockName) -> Outcome:
        if not self._store.is_complete:
            self._store.find_file(name)
        with self._store.books() as index:
            row = index.find(name)
            if row is None or not index.dismiss(row):
                return Outcome.OK  # not there, or not any more once its last user is done
        return Outcome.OK if self._store.remove(row) else Outcome.FAILED


def _choose_transfer(io: str, layout: Layout) -> Transfer:
    buffered = BufferedTransfer()
    if io == "buffered":
        return buffered
    if io not in ("auto", "direct"):
        raise ConfigError(f"node.tiers: io '{io}' is unknown; use auto, direct or buffered")
    reason = probe_direct(layout)
    if reason is None:
        return DirectTransfer(buffered)
    if io == "direct":
        raise ConfigError(
            f"node.tiers: {layout.root} does not take direct I/O ({reason}); use io: auto"
        )
    logger.warning(
        "tier=fs path=%s io=buffered: direct I/O does not work there (%s); name a local disk, or "
        "set io: buffered",
        layout.root,
        reason,
    )
    return buffered
