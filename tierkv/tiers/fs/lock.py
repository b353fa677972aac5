"""One tier per directory: two would each keep a budget and recycle files of the other."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import threading

from tierkv.errors import ConfigError
from tierkv.tiers.fs.layout import GUARDS, LOCK_FILE, Layout

logger = logging.getLogger(__name__)

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ESTALE, errno.ENODEV, errno.ELOOP})

_OWNER_BYTES_MAX = 4096
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS})


class DirectoryLock:
    """The lock file of a root. Its text names who has it: one line the owner, one the process.

    A process that hangs in the kernel keeps its lock although it was killed. Whoever shares its
    owner's name may go on without the lock, and takes it as soon as it is free.

    Args:
        owner: a token that all I/O processes of one daemon share; empty if there is none.
    """

    def __init__(self, layout: Layout, owner: str) -> None:
        self._layout = layout
        self._owner = owner
        self._file = -1
        self._guard = threading.Lock()

    def take(self) -> None:
        """Take the lock, or go on without it if our predecessor has it.

        Raises:
            ConfigError: somebody else has it.
            OSError: the lock file cannot be opened or written.
        """
        with self._guard:
            holder = self._try()
        if holder is not None:
            raise ConfigError(
                f"{self._layout.root}: {holder} keeps its blocks there; stop it, or give this tier "
                "a directory of its own"
            )

    def renew(self) -> bool:
        """Look after the lock: its file may have been removed, or have become free.

        Returns:
            Whether we may go on; False if somebody else took the directory.
        """
        with self._guard:
            if self._file >= 0 and self._is_in_place():
                return True
            self._close()
            try:
                return self._try() is None
            except OSError:
                return True  # no directory, no rival in it; a write says what is wrong

    def release(self) -> None:
        """Let others have the directory."""
        with self._guard:
            self._close()

    def _try(self) -> str | None:
        """Take the lock if it is free; who keeps us out, if anybody does."""
        folder = self._layout.open_folder()
        try:
            file = os.open(LOCK_FILE, os.O_RDWR | os.O_CREAT | GUARDS, 0o600, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(errno.EINVAL, f"{LOCK_FILE} is no regular file; remove it")
            if not self._lock(file):
                return self._holder(file)
            os.ftruncate(file, 0)
            os.pwrite(file, f"{self._owner}\n{os.getpid()}\n".encode(), 0)
            self._file, file = file, -1
        finally:
            if file >= 0:
                os.close(file)
        return None

    def _lock(self, file: int) -> bool:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            logger.warning(
                "tier=fs path=%s: this file system has no locks; make sure that only one daemon "
                "uses the directory",
                self._layout.root,
            )
        return True

    def _holder(self, file: int) -> str | None:
        text = os.pread(file, _OWNER_BYTES_MAX, 0).decode(errors="replace")
        owner, _, rest = text.partition("\n")
        if self._owner and owner == self._owner:
            return None
        process = rest.strip() or "unknown"
        return f"process {process} (owner {owner})" if owner else f"process {process}"

    def _is_in_place(self) -> bool:
        """Whether the lock that we hold is still the one of the directory.

        Only if the file or the directory is gone is it not; a shortage of our own says nothing.
        """
        try:
            folder = self._layout.open_folder()
        except OSError as error:
            return error.errno not in _GONE
        try:
            named = os.stat(LOCK_FILE, dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            return error.errno not in _GONE
        finally:
            os.close(folder)
        return os.path.samestat(named, os.fstat(self._file))

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
