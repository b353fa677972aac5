"""Direct I/O: the device reads and writes the slot itself, past the page cache."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os

import numpy as np

from tierkv.tiers.fs.layout import GUARDS, Layout
from tierkv.tiers.fs.transfer import CALL_BYTES_MAX, Move, Transfer, move_all
from tierkv.types import PAGE_BYTES

_REFUSALS = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS})
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})
_PROBE_BYTES = 2 * PAGE_BYTES


class DirectTransfer(Transfer):
    """Moves aligned slots directly, and leaves all others to `other`.

    Args:
        other: for blocks whose address or length is not aligned, and files that refuse.
        read, write: what moves the bytes of one call.
    """

    def __init__(
        self,
        other: Transfer,
        read: Move = os.preadv,
        write: Move = os.pwritev,
        call_bytes_max: int = CALL_BYTES_MAX,
    ) -> None:
        self._other = other
        self._read = read
        self._write = write
        self._call_bytes_max = call_bytes_max

    @property
    def is_direct(self) -> bool:
        return True

    def read(self, file: int, view: memoryview) -> int:
        moved = self._move(self._read, file, view)
        return self._other.read(file, view) if moved is None else moved

    def write(self, file: int, view: memoryview) -> int:
        moved = self._move(self._write, file, view)
        return self._other.write(file, view) if moved is None else moved

    def close(self) -> None:
        self._other.close()

    def _move(self, move: Move, file: int, view: memoryview) -> int | None:
        """Bytes moved, or None if this block cannot go directly."""
        if not _is_aligned(view):
            return None
        try:
            set_direct(file, True)
            return move_all(move, file, view, PAGE_BYTES, self._call_bytes_max)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        # A file that never took the flag needs no second word about it.
        with contextlib.suppress(OSError):
            set_direct(file, False)
        return None


def set_direct(file: int, is_direct: bool) -> None:
    """Switch an open file between direct and buffered I/O. Raises OSError if it refuses.

    On the open file rather than at its opening, so that one descriptor, checked once, serves both.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    wanted = flags | os.O_DIRECT if is_direct else flags & ~os.O_DIRECT
    fcntl.fcntl(file, fcntl.F_SETFL, wanted)


def probe_direct(layout: Layout) -> str | None:
    """Move real aligned bytes below the root. None if that works, else why not.

    A full disk is no answer: the transfer falls back per file, so direct I/O is worth trying there.
    """
    folder = layout.open_folder()
    temporary = layout.new_temporary()
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | GUARDS
        file = os.open(temporary, flags, 0o600, dir_fd=folder)
        try:
            return _probe_file(file)
        finally:
            os.close(file)
            os.unlink(temporary, dir_fd=folder)
    except OSError as error:
        return None if error.errno in _NO_ROOM else f"{error.strerror}"
    finally:
        os.close(folder)


def _probe_file(file: int) -> str | None:
    # Anonymous mappings are page-aligned, as slots are.
    with mmap.mmap(-1, _PROBE_BYTES) as written, mmap.mmap(-1, _PROBE_BYTES) as read:
        written[:] = bytes(range(256)) * (_PROBE_BYTES // 256)
        with memoryview(written) as source, memoryview(read) as target:
            set_direct(file, True)
            moved = [
                move_all(os.pwritev, file, source, PAGE_BYTES, PAGE_BYTES),
                move_all(os.preadv, file, target, PAGE_BYTES, PAGE_BYTES),
            ]
            if moved != [_PROBE_BYTES] * 2 or source != target:
                return "bytes read back are not those written"
    return None


def _is_aligned(view: memoryview) -> bool:
    if len(view) % PAGE_BYTES or not len(view):
        return False
    return int(np.frombuffer(view, np.uint8).ctypes.data) % PAGE_BYTES == 0
