"""The DRAM pool: one shared-memory file that engines and daemon map.

A plain file in a memory file system, opened and mapped by name. Not `multiprocessing`'s shared
memory: its resource tracker unlinks the segment when any attached process exits.

The file outlives the daemon. A new daemon adopts the memory, not the contents: it writes a new
generation into the header and serves misses, and nothing is reallocated, remapped or pinned again.
Every process that maps the pool holds a lock file for life, so that the daemon knows without any
clock when nobody can touch a slot any more.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import itertools
import logging
import mmap
import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierkv.errors import PoolError
from tierkv.numa import Placement, describe, nodes_for, place, read_nodes
from tierkv.types import EngineId
from tierkv.units import approximate_size

logger = logging.getLogger(__name__)

HEADER_BYTES = 65_536  # one page of the largest page size in use (64 KiB on some Arm servers)
VERSION = 1
_MAGIC = b"TIERKVPL"
_HEADER = struct.Struct("<8sIIQQQ")  # magic, version, header bytes, generation, capacity, unit
_GENERATION_AT = 16
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module has no name for it
_MADV_HUGEPAGE = 14
_PREFAULT_CHUNK = 64 << 20
_LOCK_TRIES_MAX = 100
_libc = ctypes.CDLL(None, use_errno=True)
_FLOCK = struct.Struct("@hhlli4x")  # struct flock on 64-bit Linux
_WHOLE_FILE = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
_NUMBER = struct.Struct("<Q")
_numbers = itertools.count()


class Pool:
    """A mapping of the pool file.

    Attributes:
        bytes: the slots' bytes without the header, shape (capacity,), uint8, shared.
        was_adopted: the file was there before this daemon.
        placement: on which NUMA nodes its pages lie; told to its owner only.
    """

    def __init__(self, path: Path, file: int, capacity: int, was_adopted: bool) -> None:
        self.path = path
        self.capacity = capacity
        self.was_adopted = was_adopted
        self.placement = Placement("local")
        self._file = file
        self._map = mmap.mmap(file, HEADER_BYTES + capacity)
        whole: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.bytes = whole[HEADER_BYTES:]

    @property
    def generation(self) -> int:
        """The generation that the header shows now; a new daemon raises it under our eyes."""
        return int(struct.unpack_from("<Q", self._map, _GENERATION_AT)[0])

    @property
    def is_current(self) -> bool:
        """Whether the path still leads to this file."""
        try:
            named, ours = self.path.stat(), os.fstat(self._file)
        except OSError:
            return False
        return (named.st_dev, named.st_ino) == (ours.st_dev, ours.st_ino)

    @property
    def address(self) -> int:
        """Virtual address of byte 0 of `bytes`."""
        return int(self.bytes.ctypes.data)

    def ask_for_huge_pages(self) -> bool:
        """Ask for transparent huge pages; whether the kernel took the advice."""
        try:
            self._map.madvise(_MADV_HUGEPAGE)
        except OSError:
            return False
        return True

    def prefault(self, stop: threading.Event) -> None:
        """Make all pages present in this mapping, piece by piece. Blocks; run it in a thread."""
        size = HEADER_BYTES + self.capacity
        for start in range(0, size, _PREFAULT_CHUNK):
            if stop.is_set():
                return
            length = min(_PREFAULT_CHUNK, size - start)
            # Through ctypes, because the mmap module keeps the interpreter lock meanwhile.
            where = ctypes.c_void_p(self.address - HEADER_BYTES + start)
            if _libc.madvise(where, ctypes.c_size_t(length), _MADV_POPULATE_WRITE):
                logger.info("this kernel cannot prefault shared memory; pages come on first use")
                return

    def unlink(self) -> None:
        """Remove the name; mappings stay valid."""
        if self.is_current:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the owner's lock. The mapping goes with its last view.

        The lock is dropped by name: the mapping keeps a duplicate of the descriptor.
        """
        if self._file >= 0:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = -1


def pool_path(directory: Path, socket: Path) -> Path:
    """Name of the pool file of the daemon behind a socket; two daemons never share one."""
    digest = hashlib.blake2b(str(socket).encode(), digest_size=6).hexdigest()
    return directory / f"tierkv-{os.getuid()}-{digest}.pool"


def _open_regular(path: Path, flags: int, mode: int) -> int:
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    facts = os.fstat(file)
    if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (os.getuid(), 0):
        os.close(file)
        raise PoolError(f"{path}: is no regular file of this user; remove it")
    return file


def create_pool(
    path: Path, capacity: int, extent_unit: int, mode: int = 0o600, numa: str = "local"
) -> Pool:
    """Create the pool file, or adopt the one that a daemon before us left.

    All memory is allocated here, so that a full file system is an error now and not a SIGBUS later.

    Args:
        numa: where a new file's pages lie, as in `tierkv.numa.place`; an adopted one keeps its own.
    Raises:
        PoolError: another daemon owns it, the directory is not writable, or memory is short.
    """
    try:
        file = _open_regular(path, os.O_RDWR | os.O_CREAT, mode)
    except OSError as error:
        raise PoolError(
            f"{path}: cannot be opened: {error.strerror}; make node.dram.directory writable"
        ) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        raise PoolError(
            f"{path}: another daemon owns this pool; stop it or set node.service.socket"
        ) from error
    size = os.fstat(file).st_size
    if size == HEADER_BYTES + capacity:
        found = _HEADER.unpack(os.pread(file, _HEADER.size, 0))
        if found[:3] == (_MAGIC, VERSION, HEADER_BYTES) and found[4] == capacity:
            _write_header(file, found[3] + 1, capacity, extent_unit)
            return _describe(Pool(path, file, capacity, was_adopted=True), numa)
    if size:
        # Processes may still map the old file, so it must not change under them.
        path.unlink()
        os.close(file)
        return create_pool(path, capacity, extent_unit, mode, numa)
    try:
        os.fchmod(file, mode)
        problem = _allocate(file, HEADER_BYTES + capacity, numa)
    except PoolError:
        path.unlink(missing_ok=True)
        os.close(file)
        raise
    except OSError as error:
        path.unlink(missing_ok=True)
        os.close(file)
        remedy = "lower node.dram.capacity or enlarge the file system"
        if error.errno != errno.ENOSPC:
            remedy = "see the system log"
        raise PoolError(
            f"{path}: {approximate_size(capacity)} cannot be allocated: {error.strerror}; {remedy}"
        ) from error
    _write_header(file, 1 + secrets.randbelow(1 << 24), capacity, extent_unit)
    return _describe(Pool(path, file, capacity, was_adopted=False), numa, problem)


def _allocate(file: int, size: int, numa: str) -> str:
    """Give a new file its size, its policy and then its pages, which follow the policy.

    The policy is set through a mapping of its own: what another mapping sees is the file's.

    Returns:
        Why the policy could not be set, if so.
    """
    os.ftruncate(file, size)
    with mmap.mmap(file, size) as mapping:
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        problem = place(int(address), size, numa)
    os.posix_fallocate(file, 0, size)
    return problem


def _describe(pool: Pool, numa: str, problem: str = "") -> Pool:
    """Ask where the pages lie, and say why it is not where they were asked to lie."""
    found = describe(pool.address, pool.capacity, numa, problem)
    nodes = nodes_for(numa, read_nodes(), os.sched_getaffinity(0))
    is_other = found.in_force not in (None, numa) or (
        nodes and found.in_force and found.nodes != tuple(node.number for node in nodes)
    )
    if is_other and not found.problem:
        problem = "an adopted pool keeps the policy that it was made with"
        if not pool.was_adopted:
            problem = f"the file system of {pool.path.parent} sets a policy of its own, or none"
        found = replace(found, problem=problem)
    pool.placement = found
    return pool


def _write_header(file: int, generation: int, capacity: int, unit: int) -> None:
    header = _HEADER.pack(_MAGIC, VERSION, HEADER_BYTES, generation, capacity, unit)
    os.pwrite(file, header, 0)


def attach_pool(path: Path) -> Pool:
    """Map an existing pool. The caller holds a mapper lock first.

    Raises:
        PoolError: no pool is there (yet), or it is not one of ours.
    """
    try:
        file = _open_regular(path, os.O_RDWR, 0)
    except OSError as error:
        raise PoolError(f"{path}: cannot be attached: {error.strerror}") from error
    size = os.fstat(file).st_size
    header = os.pread(file, _HEADER.size, 0)
    is_ours = len(header) == _HEADER.size and header[:8] == _MAGIC
    if not is_ours or _HEADER.unpack(header)[1:3] != (VERSION, HEADER_BYTES):
        os.close(file)
        raise PoolError(f"{path}: is no pool of this version; wait for the daemon or remove it")
    capacity = int(_HEADER.unpack(header)[4])
    if size != HEADER_BYTES + capacity:
        os.close(file)
        raise PoolError(f"{path}: has {size} bytes, its header says {capacity}; remove it")
    try:
        pool = Pool(path, file, capacity, was_adopted=True)
    except (OSError, ValueError) as error:
        os.close(file)
        raise PoolError(f"{path}: cannot be mapped: {error}") from error
    if not pool.is_current:
        pool.close()
        raise PoolError(f"{path}: was replaced while it was attached; try again")
    return pool


# ---- mapper locks ------------------------------------------------------------------------------


class MapperLock:
    """A lock file held for the life of a process (and of children that it forks).

    Its last name part is `session` for the scheduler half, else a number that makes the name
    unique. A process may keep in it how many copies it has in flight, so that a new daemon need
    not wait for an engine that is idle; one that never does counts as busy for life.
    """

    def __init__(self, run_directory: Path, engine: EngineId, is_session: bool = False) -> None:
        folder = make_private(run_directory / "mappers")
        role = "session" if is_session else str(next(_numbers))
        self.path = folder / f"{engine}.{os.getpid()}.{role}"
        self._file = self._lock()
        try:
            os.pwrite(self._file, _NUMBER.pack(1), 0)
            self._copies = mmap.mmap(self._file, _NUMBER.size)
        except OSError:
            self.release()  # or nobody could ever take it again
            raise

    def note_copies(self, copies: int) -> None:
        """Say how many copies are in flight.

        Rule: a copy is counted before the pool's generation is looked at, and a daemon raises the
        generation before it looks at the count. So either it sees the copy, or the copy sees it.
        """
        _NUMBER.pack_into(self._copies, 0, copies)

    def _lock(self) -> int:
        # A scan that finds the file before it is locked removes it; then we try again.
        for _ in range(_LOCK_TRIES_MAX):
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                if os.fstat(file).st_ino == self.path.stat().st_ino:
                    return file
            except FileNotFoundError:
                pass
            os.close(file)
        raise PoolError(f"{self.path}: cannot be locked; is another process removing it?")

    def release(self) -> None:
        """Say that this process no longer maps the pool."""
        if self._file >= 0:
            self.path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1


@dataclass(slots=True)
class Held:
    """Locks of one engine that living processes hold.

    Attributes:
        idle_mappers: those of `mappers` that have no copy in flight.
    """

    has_session: bool = False
    mappers: int = 0
    idle_mappers: int = 0


def held_locks(run_directory: Path) -> dict[EngineId, Held]:
    """Which engines are alive: the locks that cannot be taken. Free ones are removed."""
    found: dict[EngineId, Held] = {}
    for path in _lock_files(run_directory):
        engine, _, role = path.name.split(".", 2)
        if _is_free(path):
            continue
        held = found.setdefault(EngineId(engine), Held())
        if role == "session":
            held.has_session = True
        else:
            held.mappers += 1
            held.idle_mappers += _is_idle(path)
    return found


def _is_idle(path: Path) -> bool:
    """Whether the holder says that it has no copy in flight; in doubt it has."""
    try:
        return path.read_bytes() == _NUMBER.pack(0)
    except OSError:
        return False


def _lock_files(run_directory: Path) -> Iterator[Path]:
    try:
        entries = list((run_directory / "mappers").iterdir())
    except FileNotFoundError:
        return
    yield from (path for path in entries if path.name.count(".") == 2)


def _is_free(path: Path) -> bool:
    """Whether a lock file is held by nobody; a free one is removed. In doubt it is held."""
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(file).st_ino == path.stat().st_ino:  # else its owner made it anew meanwhile
            path.unlink()
            return True
        return False
    except BlockingIOError:
        return False
    except FileNotFoundError:
        return True
    finally:
        os.close(file)


def make_private(folder: Path) -> Path:
    """Create a directory for this user only.

    Raises:
        PoolError: it belongs to somebody else or cannot be made.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise PoolError(
            f"{folder}: cannot be made: {error.strerror}; set node.service.socket"
        ) from error
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise PoolError(f"{folder}: does not belong to this user; set node.service.socket")
    if facts.st_mode & 0o077:
        raise PoolError(
            f"{folder}: is open to other users (mode {facts.st_mode & 0o777:o}); "
            "chmod 700 it or set node.service.socket to a path in a private directory"
        )
    return folder


class DaemonLock:
    """The lock that a daemon holds for life; who gets it is the daemon of this socket.

    An open-file-description lock, because it can be asked about without being taken: a client that
    looks must never make a starting daemon believe that another one lives.
    """

    def __init__(self, socket: Path) -> None:
        self.path = socket.with_suffix(".lock")
        self._file = -1

    def acquire(self) -> bool:
        """Take the lock unless another daemon holds it.

        Raises:
            PoolError: the lock file cannot be made.
        """
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(self.path, flags, 0o600)
        except OSError as error:
            raise PoolError(
                f"{self.path}: cannot be made: {error.strerror}; set node.service.socket"
            ) from error
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _WHOLE_FILE)
        except OSError:
            os.close(file)
            return False
        self._file = file
        os.ftruncate(file, 0)
        return True

    def tell(self, generation: int) -> None:
        """Write down which generation this daemon serves; held by us."""
        os.pwrite(self._file, _NUMBER.pack(generation), 0)

    def is_held(self) -> bool:
        """Whether some daemon lives; never blocks."""
        return self.holder() is not None

    def holder(self) -> int | None:
        """Generation of the living daemon, 0 while it is starting; None if none lives.

        Raises:
            OSError: nobody can tell, for example for want of descriptors.
        """
        try:
            file = os.open(self.path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            answer = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _WHOLE_FILE)
            told = os.pread(file, _NUMBER.size, 0)
        finally:
            os.close(file)
        if _FLOCK.unpack(answer)[0] == fcntl.F_UNLCK:
            return None
        return int(_NUMBER.unpack(told)[0]) if len(told) == _NUMBER.size else 0

    def release(self) -> None:
        """Stop being the daemon."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
