"""Names and directories of the fs tier: `<root>/<namespace>/<first byte of key>/<key>`, all in hex.

Rule 1: no link is followed below the root's parents: every directory is opened from the one above
it, by descriptor.
Rule 2: nothing is kept open between calls, so a root that was removed and made again under us is
simply the one that the path leads to. Three opens cost some microseconds.
Rule 3: the root stays on the file system that it was on. Otherwise an unmounted disk would let us
fill the file system below its mount point.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from tierkv.tiers.base import BlockName
from tierkv.tiers.frame import KEY_BYTES_MAX
from tierkv.types import BlockKey, NamespaceId

LOCK_FILE = ".lock"
# No waiting on FIFOs, no following of links, nothing left open in children.
GUARDS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | GUARDS
_TEMPORARY = ".tmp."  # no block's name starts with a dot
_NAMESPACE_BYTES = 32
_KEY_BYTES_MIN = 2  # a hash and the group
_FOLDERS = tuple(f"{byte:02x}" for byte in range(256))


class Layout:
    """Where blocks lie, and the way there.

    Attributes:
        root: the directory of the tier. It exists when this is made.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._device: int | None = None
        folder = self.open_folder()
        self._device = os.fstat(folder).st_dev
        os.close(folder)
        # Names of two tiers on one directory, or of one in two lives, never meet.
        self._token = secrets.token_hex(8)
        self._numbers = itertools.count()

    def open_folder(self, *parts: str) -> int:
        """Open the root or a directory below it. The caller closes the descriptor.

        Raises:
            OSError: one of them is not there, is a link or no directory; ENODEV: the root moved to
                another file system.
        """
        folder = os.open(self.root, _FOLDER_FLAGS)
        try:
            if self._device is not None and os.fstat(folder).st_dev != self._device:
                raise OSError(errno.ENODEV, f"{self.root}: is on another file system than before")
            for part in parts:
                below = os.open(part, _FOLDER_FLAGS, dir_fd=folder)
                os.close(folder)
                folder = below
        except OSError:
            os.close(folder)
            raise
        return folder

    @contextlib.contextmanager
    def folder_of(self, name: BlockName) -> Iterator[int]:
        """The directory of a block, open inside the `with`. Raises OSError as `open_folder`."""
        folder = self.open_folder(*self.parts_of(name))
        try:
            yield folder
        finally:
            os.close(folder)

    def parts_of(self, name: BlockName) -> tuple[str, str]:
        """Directories from the root to a block."""
        assert len(name.namespace) == _NAMESPACE_BYTES, "a namespace has 32 bytes"
        assert _KEY_BYTES_MIN <= len(name.key) <= KEY_BYTES_MAX, (
            "a key has 2 to KEY_BYTES_MAX bytes"
        )
        return name.namespace.hex(), _FOLDERS[name.key[0]]

    def make_folders(self, name: BlockName, is_whole: bool) -> None:
        """Make the directories to a block, and all of its namespace if `is_whole`.

        Hashed directories, because a directory of millions of files meets limits of the file
        system with most of its space and inodes free (faults M1).

        Raises:
            OSError: the block's own directory cannot be made.
        """
        space, own = self.parts_of(name)
        with contextlib.suppress(FileExistsError):
            self.root.mkdir(0o700)
        with contextlib.suppress(FileExistsError):
            self._make_folder(space)
        with contextlib.suppress(FileExistsError):
            self._make_folder(space, own)
        if is_whole:
            folder = self.open_folder(space)
            try:
                for part in _FOLDERS:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o700, dir_fd=folder)
            finally:
                os.close(folder)

    def remove_folders(self, namespace: NamespaceId) -> None:
        """Remove the directories of a namespace that are empty; a writer makes them again."""
        space = namespace.hex()
        with contextlib.suppress(OSError):
            folder = self.open_folder(space)
            try:
                for part in _FOLDERS:
                    with contextlib.suppress(OSError):
                        os.rmdir(part, dir_fd=folder)
            finally:
                os.close(folder)
            root = self.open_folder()
            try:
                os.rmdir(space, dir_fd=root)
            finally:
                os.close(root)

    def new_temporary(self) -> str:
        """A file name that nobody else uses, and that is no block's."""
        return f"{_TEMPORARY}{self._token}.{next(self._numbers)}"

    def is_temporary(self, text: str) -> bool:
        """Whether a file name is one that writers use before the rename."""
        return text.startswith(_TEMPORARY)

    def is_own_temporary(self, text: str) -> bool:
        """Whether this very tier made the name."""
        return text.startswith(f"{_TEMPORARY}{self._token}.")

    def list_folder(self, *parts: str, most: int) -> Iterator[list[os.DirEntry[str]]]:
        """Entries of a directory, at most `most` at a time; entries can be asked until the next.

        Raises:
            OSError: as `open_folder`; or it cannot be read any further.
        """
        folder = self.open_folder(*parts)
        try:
            with os.scandir(folder) as entries:
                while piece := list(itertools.islice(entries, most)):
                    yield piece
        finally:
            os.close(folder)

    def _make_folder(self, *parts: str) -> None:
        folder = self.open_folder(*parts[:-1])
        try:
            os.mkdir(parts[-1], 0o700, dir_fd=folder)
        finally:
            os.close(folder)


def file_of(key: BlockKey) -> str:
    """File name of a block."""
    return key.hex()


def namespace_of(text: str) -> NamespaceId | None:
    """The namespace that a directory below the root belongs to; None if it is none of ours."""
    found = _bytes_of(text, _NAMESPACE_BYTES)
    return NamespaceId(found) if found is not None and len(found) == _NAMESPACE_BYTES else None


def key_of(folder: str, text: str) -> BlockKey | None:
    """The key that a file belongs to; None if it is none of ours."""
    found = _bytes_of(text, KEY_BYTES_MAX)
    is_key = found is not None and len(found) >= _KEY_BYTES_MIN and text[:2] == folder
    return BlockKey(found) if is_key and found is not None else None


def is_folder(text: str) -> bool:
    """Whether a directory of a namespace is one of the 256."""
    return len(text) == 2 and _bytes_of(text, 1) is not None


def size_of(facts: os.stat_result) -> int | None:
    """Bytes of a regular file; None for anything else."""
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def _bytes_of(text: str, most: int) -> bytes | None:
    try:
        found = bytes.fromhex(text)
    except ValueError:
        return None
    # The way back must be the same: no upper case, no spaces.
    return found if 0 < len(found) <= most and found.hex() == text else None
