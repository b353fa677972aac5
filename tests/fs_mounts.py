"""Small file systems for tests of the fs tier: mounted below a test's directory, always unmounted.

They need root. Where that or a feature is missing, the test is skipped and says why.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_GET_FLAGS, _SET_FLAGS = 0x80086601, 0x40086602  # FS_IOC_GETFLAGS, FS_IOC_SETFLAGS, 64-bit Linux
_IMMUTABLE = 0x10


def run(*command: str) -> str | None:
    """Run a command; None if it worked, else its complaint."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.strip() or str(done.returncode)


@contextlib.contextmanager
def small_tmpfs(path: Path, options: str) -> Iterator[Path]:
    """A tmpfs at `path`, gone again at the end even if a test unmounted it itself."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    path.mkdir()
    complaint = run("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path))
    if complaint is not None:
        pytest.skip(f"no tmpfs can be mounted here: {complaint}")
    try:
        yield path
    finally:
        if os.path.ismount(path):
            # Lazily, so that a file left open by a failing test does not keep it for ever.
            assert run("umount", "-l", str(path)) is None


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """Make a directory read-only for a while, as a file system becomes that met an error.

    By a second mount over it, because a plain remount refuses while a lock file is open.
    """
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    complaint = run("mount", "--bind", str(path), str(path))
    if complaint is not None:
        pytest.skip(f"no directory can be mounted here: {complaint}")
    try:
        complaint = run("mount", "-o", "remount,bind,ro", str(path))
        if complaint is not None:
            pytest.skip(f"no mount can be made read-only here: {complaint}")
        yield
    finally:
        unmount(path)


def unmount(path: Path) -> None:
    """Take a file system away, although the tier's lock file is open on it."""
    assert run("umount", "-l", str(path)) is None


@contextlib.contextmanager
def undeletable(path: Path) -> Iterator[None]:
    """Make a file immutable for a while."""
    try:
        _set_immutable(path, True)
    except OSError as error:
        pytest.skip(f"no immutable files here: {error.strerror}")
    try:
        yield
    finally:
        _set_immutable(path, False)


def _set_immutable(path: Path, is_immutable: bool) -> None:
    """What `chattr` does, which is not installed everywhere."""
    file = os.open(path, os.O_RDONLY)
    try:
        flags = array.array("l", [0])
        fcntl.ioctl(file, _GET_FLAGS, flags)
        flags[0] = flags[0] | _IMMUTABLE if is_immutable else flags[0] & ~_IMMUTABLE
        fcntl.ioctl(file, _SET_FLAGS, flags)
    finally:
        os.close(file)
