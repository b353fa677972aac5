"""The pool file, the locks of those who map it, and the lock of the daemon: real files, processes.

Nothing here waits by the clock. A child says over a pipe that it is ready, and a process descriptor
says that it is gone, with its locks: the kernel closes a process's files before it reports its end.
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import stat
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from tierkv.errors import PoolError
from tierkv.mapper import PoolMapper
from tierkv.pool import (
    HEADER_BYTES,
    DaemonLock,
    MapperLock,
    attach_pool,
    create_pool,
    held_locks,
    make_private,
    pool_path,
)
from tierkv.types import EngineId

MIB = 1 << 20
WAIT_MAX_S = 60
ENGINE = EngineId("0123abcd")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.pool"


@pytest.fixture
def start():
    """Start a Python child that runs `text`; it ends with the test."""
    children = []

    def start_child(text: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", text, *map(str, arguments)]
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        return child

    yield start_child
    for child in children:
        child.kill()
        child.communicate()


def finish(child: subprocess.Popen[str]) -> str:
    """Let the child run to its end; its output."""
    out, err = child.communicate(timeout=WAIT_MAX_S)
    assert child.returncode == 0, err
    return out


@contextmanager
def umask(mask: int):
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def kill_and_wait(pid: int) -> None:
    """End a process that need not be our child; returns when its files are closed."""
    end = os.pidfd_open(pid)
    try:
        os.kill(pid, signal.SIGKILL)
        ready, _, _ = select.select([end], [], [], WAIT_MAX_S)
        assert ready, "the process is gone"
    finally:
        os.close(end)


def poke(path: Path, at: int, value: bytes) -> None:
    """Overwrite bytes of a file behind everybody's back."""
    with path.open("r+b") as file:
        file.seek(at)
        file.write(value)


# ---- create ------------------------------------------------------------------------------------


def test_a_new_pool_has_its_size_its_memory_and_zero_bytes(path):
    pool = create_pool(path, 3 * MIB, MIB)
    assert (pool.capacity, pool.bytes.shape, pool.bytes.dtype) == (3 * MIB, (3 * MIB,), np.uint8)
    assert not pool.was_adopted
    assert pool.is_current
    assert path.stat().st_size == HEADER_BYTES + 3 * MIB
    assert path.stat().st_blocks * 512 >= 3 * MIB, "all memory is allocated at once"
    assert not pool.bytes.any()


def test_slots_begin_at_a_page_border(path):
    assert create_pool(path, MIB, MIB).address % mmap.PAGESIZE == 0


def test_two_new_pools_have_different_generations(tmp_path):
    generations = {create_pool(tmp_path / f"{n}", 4096, 4096).generation for n in range(8)}
    assert len(generations) > 1, "a mapping of an earlier file must not pass for a current one"
    assert min(generations) >= 1


@pytest.mark.parametrize("mask", [0, 0o022, 0o077])
def test_only_the_user_may_open_the_pool_whatever_the_umask(path, mask):
    with umask(mask):
        create_pool(path, MIB, MIB)
    assert mode_of(path) == 0o600


def test_a_group_may_open_the_pool_if_asked_for(path):
    with umask(0o077):
        create_pool(path, MIB, MIB, mode=0o660)
    assert mode_of(path) == 0o660


def test_a_missing_directory_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(PoolError, match=r"gone/x: cannot be opened: .*node\.dram\.directory"):
        create_pool(tmp_path / "gone" / "x", MIB, MIB)


def test_the_name_tells_user_and_socket_apart(tmp_path):
    one = pool_path(tmp_path, Path("/run/a.sock"))
    assert one == pool_path(tmp_path, Path("/run/a.sock"))
    assert one != pool_path(tmp_path, Path("/run/b.sock"))
    assert one.parent == tmp_path
    assert str(os.getuid()) in one.name


# ---- adopt -------------------------------------------------------------------------------------


def test_adoption_keeps_the_file_and_its_bytes_and_raises_the_generation(path):
    first = create_pool(path, MIB, MIB)
    first.bytes[:] = np.random.default_rng(7).integers(0, 256, MIB, np.uint8)  # seed 7
    contents, inode, generation = first.bytes.copy(), path.stat().st_ino, first.generation
    first.close()
    second = create_pool(path, MIB, MIB)
    assert second.was_adopted
    assert path.stat().st_ino == inode
    assert second.generation == generation + 1
    assert (second.bytes == contents).all()


def test_a_mapping_of_before_sees_the_new_generation(path):
    create_pool(path, MIB, MIB).close()
    engine = attach_pool(path)
    generation = engine.generation
    daemon = create_pool(path, MIB, MIB)
    assert engine.generation == daemon.generation == generation + 1
    assert engine.is_current


def test_a_pool_of_a_killed_daemon_is_adopted(path, start):
    child = start(
        "import sys; from pathlib import Path; from tierkv.pool import create_pool\n"
        "pool = create_pool(Path(sys.argv[1]), 1 << 20, 1 << 20)\n"
        "pool.bytes[5] = 55\n"
        "print(pool.generation, flush=True); sys.stdin.read()",
        path,
    )
    generation = int(child.stdout.readline())
    with pytest.raises(PoolError, match="another daemon owns this pool"):
        create_pool(path, MIB, MIB)
    kill_and_wait(child.pid)
    pool = create_pool(path, MIB, MIB)
    assert (pool.was_adopted, pool.generation, pool.bytes[5]) == (True, generation + 1, 55)


def test_another_extent_unit_is_adopted_too(path):
    create_pool(path, MIB, MIB).close()
    assert create_pool(path, MIB, 4096).was_adopted


@pytest.mark.parametrize("capacity", [MIB, 3 * MIB])
def test_another_capacity_makes_a_new_file_and_old_mappings_stay_valid(path, capacity):
    old = create_pool(path, 2 * MIB, MIB)
    engine = attach_pool(path)
    engine.bytes[:] = 77
    old.close()
    inode = path.stat().st_ino
    new = create_pool(path, capacity, MIB)
    assert not new.was_adopted
    assert path.stat().st_ino != inode
    assert not new.bytes.any()
    new.bytes[:] = 11
    assert (engine.bytes == 77).all(), "the last byte too: a mapping beyond a file's end is fatal"
    assert not engine.is_current
    assert new.is_current


@pytest.mark.parametrize("at", [0, 8, 12, 24], ids=["magic", "version", "header", "capacity"])
def test_a_file_with_a_damaged_header_is_not_adopted(path, at):
    create_pool(path, MIB, MIB).close()
    poke(path, at, b"\xfe")
    inode = path.stat().st_ino
    with path.open("rb"):  # keeps the inode number from being used again
        assert not create_pool(path, MIB, MIB).was_adopted
        assert path.stat().st_ino != inode
    assert attach_pool(path).capacity == MIB


def test_a_file_that_a_daemon_died_over_before_the_header_is_not_adopted(path):
    path.write_bytes(bytes(HEADER_BYTES + MIB))
    assert not create_pool(path, MIB, MIB).was_adopted
    assert attach_pool(path).capacity == MIB


def test_closing_twice_is_closing_once(path):
    pool = create_pool(path, MIB, MIB)
    pool.close()
    pool.close()
    assert path.exists()


def test_removing_the_name_leaves_the_mapping(path):
    pool = create_pool(path, MIB, MIB)
    pool.bytes[3] = 3
    pool.unlink()
    assert not path.exists()
    assert not pool.is_current
    assert pool.bytes[3] == 3


def test_a_pool_never_removes_the_name_of_its_successor(path):
    old = create_pool(path, MIB, MIB)
    path.unlink()
    create_pool(path, MIB, MIB)
    old.unlink()
    assert path.exists()


def test_prefault_and_huge_pages_change_no_byte(path):
    pool = create_pool(path, MIB, MIB)
    pool.bytes[:] = 9
    assert pool.ask_for_huge_pages() in {True, False}
    pool.prefault(threading.Event())
    stopped = threading.Event()
    stopped.set()
    pool.prefault(stopped)
    assert (pool.bytes == 9).all()


# ---- memory is short ---------------------------------------------------------------------------

TOO_LARGE = """
import os, resource, sys
from pathlib import Path
from tierkv.errors import PoolError
from tierkv.pool import create_pool
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
before = sorted(os.listdir("/proc/self/fd"))
try:
    create_pool(path, 2 << 20, 1 << 20)
except PoolError as error:
    print(error)
print(path.exists(), sorted(os.listdir("/proc/self/fd")) == before)
pool = create_pool(path, 1 << 19, 1 << 19)
pool.bytes[:] = 1
print(pool.was_adopted)
"""


def test_a_pool_above_the_file_size_limit_is_refused_and_leaves_nothing(path, start):
    message, left, small = finish(start(TOO_LARGE, path)).splitlines()
    assert message.startswith(f"{path}: 2.0 MiB cannot be allocated: File too large")
    assert left == "False True"
    assert small == "False"


SMALL_TMPFS = """
import ctypes, os, sys
from pathlib import Path
from tierkv.errors import PoolError
from tierkv.pool import create_pool
CLONE_NEWNS, CLONE_NEWUSER, MS_REC, MS_PRIVATE = 0x20000, 0x10000000, 0x4000, 0x40000
folder = sys.argv[1]
libc = ctypes.CDLL(None, use_errno=True)
user, group = os.getuid(), os.getgid()
is_ours = libc.unshare(CLONE_NEWNS) == 0
if not is_ours and libc.unshare(CLONE_NEWNS | CLONE_NEWUSER) == 0:
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    is_ours = True
is_ours = is_ours and libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None) == 0
is_ours = is_ours and libc.mount(b"tmpfs", folder.encode(), b"tmpfs", 0, b"size=1m") == 0
capacity = 2 << 20
if not is_ours:
    # No right to mount. More than a tmpfs can ever hold is refused at once and takes no memory.
    folder = "/dev/shm"
    room = os.statvfs(folder)
    assert room.f_blocks > 0, "a limited tmpfs"
    capacity = (room.f_blocks + 1) * room.f_frsize
path = Path(folder) / f"test-{os.getpid()}.pool"
before = sorted(os.listdir("/proc/self/fd"))
try:
    create_pool(path, capacity, 1 << 20)
except PoolError as error:
    print(error)
print(path.exists(), sorted(os.listdir("/proc/self/fd")) == before)
pool = create_pool(path, 1 << 19, 1 << 19)
pool.bytes[:] = 1
pool.unlink()
print(pool.was_adopted)
"""


def test_a_pool_above_a_memory_file_system_is_refused_and_leaves_nothing(tmp_path, start):
    message, left, small = finish(start(SMALL_TMPFS, tmp_path)).splitlines()
    assert "cannot be allocated: No space left on device" in message
    assert message.endswith("lower node.dram.capacity or enlarge the file system")
    assert left == "False True", "no name and no open file stay behind"
    assert small == "False", "there is room for a smaller pool"


# ---- one owner ---------------------------------------------------------------------------------


def test_a_second_owner_is_refused_and_disturbs_nothing(path):
    pool = create_pool(path, MIB, MIB)
    pool.bytes[0] = 1
    generation, inode = pool.generation, path.stat().st_ino
    for capacity in (MIB, 2 * MIB):
        with pytest.raises(PoolError, match=r"another daemon owns this pool; stop it or set node"):
            create_pool(path, capacity, MIB)
    assert (pool.generation, path.stat().st_ino, pool.bytes[0]) == (generation, inode, 1)
    pool.close()
    assert create_pool(path, MIB, MIB).was_adopted


def test_attaching_neither_needs_nor_takes_ownership(path):
    owner = create_pool(path, MIB, MIB)
    attach_pool(path)
    owner.close()
    attach_pool(path)
    assert create_pool(path, MIB, MIB).was_adopted


# ---- attach ------------------------------------------------------------------------------------


def test_two_mappings_see_each_others_bytes(path):
    daemon = create_pool(path, MIB, MIB)
    one, two = attach_pool(path), attach_pool(path)
    assert (one.capacity, one.generation) == (MIB, daemon.generation)
    one.bytes[0], two.bytes[MIB - 1] = 1, 2
    assert [int(p.bytes[0]) for p in (daemon, two)] == [1, 1]
    assert [int(p.bytes[-1]) for p in (daemon, one)] == [2, 2]


def test_another_process_sees_our_bytes_and_we_see_its(path, start):
    pool = create_pool(path, MIB, MIB)
    pool.bytes[100] = 42
    child = start(
        "import sys; from pathlib import Path; from tierkv.pool import attach_pool\n"
        "pool = attach_pool(Path(sys.argv[1]))\n"
        "pool.bytes[200] = pool.bytes[100] + 1",
        path,
    )
    finish(child)
    assert pool.bytes[200] == 43
    assert path.exists(), "the end of a process that mapped the pool takes nothing away"


def test_a_pool_that_is_not_there_cannot_be_attached(path):
    with pytest.raises(PoolError, match="cannot be attached: No such file"):
        attach_pool(path)


@pytest.mark.parametrize("at", [0, 8, 12], ids=["magic", "version", "header"])
def test_a_pool_of_another_kind_or_version_cannot_be_attached(path, at):
    create_pool(path, MIB, MIB)
    poke(path, at, b"\xfe")
    with pytest.raises(PoolError, match="is no pool of this version"):
        attach_pool(path)


@pytest.mark.parametrize(
    "size", [0, 10, HEADER_BYTES, HEADER_BYTES + MIB - 1, HEADER_BYTES + 2 * MIB]
)
def test_a_pool_of_another_size_than_its_header_says_cannot_be_attached(path, size):
    create_pool(path, MIB, MIB)
    os.truncate(path, size)
    with pytest.raises(PoolError, match=r"remove it"):
        attach_pool(path)


def test_a_header_with_an_absurd_capacity_cannot_be_attached(path):
    create_pool(path, MIB, MIB)
    poke(path, 24, b"\xff" * 8)
    with pytest.raises(PoolError, match="its header says"):
        attach_pool(path)


def test_a_foreign_file_cannot_be_attached_and_is_left_alone(path):
    path.write_bytes(b"somebody's diary" * 10_000)
    with pytest.raises(PoolError, match="is no pool of this version"):
        attach_pool(path)
    assert path.read_bytes().startswith(b"somebody's diary")


def make_symlink(path: Path) -> None:
    target = path.with_name("target")
    create_pool(target, MIB, MIB).close()
    path.symlink_to(target)


ODD = {
    "symlink": make_symlink,
    "dangling": lambda path: path.symlink_to(path.with_name("gone")),
    "directory": Path.mkdir,
    "fifo": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("kind", sorted(ODD))
def test_what_is_no_regular_file_is_neither_created_over_nor_attached(path, kind):
    ODD[kind](path)
    before = path.lstat()
    with pytest.raises(PoolError, match=r"x\.pool: "):
        create_pool(path, MIB, MIB)
    with pytest.raises(PoolError, match=r"x\.pool: "):
        attach_pool(path)
    assert (path.lstat().st_ino, path.lstat().st_mode) == (before.st_ino, before.st_mode)
    assert not path.with_name("gone").exists()


def test_a_refused_attach_leaves_no_file_open(path):
    path.write_bytes(b"x" * 100)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(20):
        with pytest.raises(PoolError):
            attach_pool(path)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


# ---- mapper locks ------------------------------------------------------------------------------


def test_without_any_lock_nobody_is_alive(tmp_path):
    assert held_locks(tmp_path) == {}
    assert held_locks(tmp_path / "gone") == {}


def test_locks_are_counted_per_engine_until_they_are_released(tmp_path):
    session = MapperLock(tmp_path, ENGINE, is_session=True)
    workers = [MapperLock(tmp_path, ENGINE) for _ in range(2)]
    other = MapperLock(tmp_path, EngineId("other"))
    held = held_locks(tmp_path)
    assert set(held) == {ENGINE, "other"}
    assert (held[ENGINE].has_session, held[ENGINE].mappers) == (True, 2)
    assert (held["other"].has_session, held["other"].mappers) == (False, 1)
    session.release()
    workers[0].release()
    assert (held_locks(tmp_path)[ENGINE].has_session, held_locks(tmp_path)[ENGINE].mappers) == (
        False,
        1,
    )
    workers[1].release()
    other.release()
    assert held_locks(tmp_path) == {}


def test_a_released_lock_leaves_no_file_and_may_be_released_again(tmp_path):
    lock = MapperLock(tmp_path, ENGINE)
    lock.release()
    lock.release()
    assert list((tmp_path / "mappers").iterdir()) == []


def test_a_look_leaves_held_locks_alone(tmp_path):
    lock = MapperLock(tmp_path, ENGINE)
    for _ in range(3):
        assert held_locks(tmp_path)[ENGINE].mappers == 1
    assert lock.path.exists()


def test_files_that_nobody_holds_are_removed(tmp_path):
    MapperLock(tmp_path, ENGINE).release()
    stale = tmp_path / "mappers" / f"{ENGINE}.1.0"
    stale.touch()
    lock = MapperLock(tmp_path, ENGINE)
    assert held_locks(tmp_path)[ENGINE].mappers == 1
    assert list((tmp_path / "mappers").iterdir()) == [lock.path]


def test_files_of_other_shapes_are_ignored(tmp_path):
    MapperLock(tmp_path, ENGINE).release()
    for name in ("readme", "a.b", "a.b.c.d"):
        (tmp_path / "mappers" / name).touch()
    assert held_locks(tmp_path) == {}
    assert len(list((tmp_path / "mappers").iterdir())) == 3


@pytest.mark.parametrize("mask", [0, 0o077])
def test_only_the_user_may_see_the_locks(tmp_path, mask):
    with umask(mask):
        lock = MapperLock(tmp_path / "run", ENGINE)
    assert mode_of(lock.path) == 0o600
    assert mode_of(lock.path.parent) == 0o700


HOLDER = """
import os, sys
from pathlib import Path
from tierkv.pool import MapperLock
lock = MapperLock(Path(sys.argv[1]), "engine", is_session=sys.argv[2] == "session")
if sys.argv[3] == "fork":
    if os.fork():
        os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("role", ["session", "worker"])
@pytest.mark.parametrize("way", ["direct", "fork"])
def test_a_lock_is_held_until_the_last_process_is_killed(tmp_path, start, role, way):
    """With `fork` the process that took the lock is gone and only its child keeps it."""
    child = start(HOLDER, tmp_path, role, way)
    pid = int(child.stdout.readline())
    if way == "fork":
        assert child.wait(WAIT_MAX_S) == 0
        assert pid != child.pid
    held = held_locks(tmp_path)["engine"]
    assert (held.has_session, held.mappers) == ((True, 0) if role == "session" else (False, 1))
    kill_and_wait(pid)
    assert held_locks(tmp_path) == {}
    assert list((tmp_path / "mappers").iterdir()) == []


LOOKER = """
import sys
from pathlib import Path
from tierkv.pool import held_locks
print("ready", flush=True)
while True:
    held_locks(Path(sys.argv[1]))
"""


@pytest.mark.parametrize(("is_session", "times"), [(False, 2_000), (True, 20_000)])
def test_a_look_at_the_wrong_moment_never_removes_a_lock_that_is_held(
    tmp_path, start, is_session, times
):
    """A lost file would make a living engine look dead, and its slots would be given away.

    A session's name comes again, so there the moment may also hit the successor's file.
    """
    MapperLock(tmp_path, ENGINE).release()
    for _ in range(2):
        assert start(LOOKER, tmp_path).stdout.readline() == "ready\n"
    for _ in range(times):
        lock = MapperLock(tmp_path, ENGINE, is_session)
        is_there = all(lock.path.exists() for _ in range(5))
        lock.release()
        assert is_there


# ---- the private directory ---------------------------------------------------------------------


def test_a_private_directory_is_made_with_its_parents(tmp_path):
    with umask(0):
        assert make_private(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    assert mode_of(tmp_path / "a" / "b") == 0o700
    make_private(tmp_path / "a" / "b")


@pytest.mark.parametrize("mode", [0o777, 0o755, 0o720])
def test_a_directory_that_others_may_enter_is_closed_or_refused(tmp_path, mode):
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    try:
        make_private(folder)
    except PoolError as error:
        assert str(folder) in str(error)
    else:
        assert mode_of(folder) == 0o700


@pytest.mark.parametrize("kind", ["symlink", "file", "below a file"])
def test_what_is_no_directory_of_ours_is_refused(tmp_path, kind):
    folder = tmp_path / "run"
    if kind == "symlink":
        (tmp_path / "real").mkdir()
        folder.symlink_to(tmp_path / "real")
    else:
        folder.write_text("")
    with pytest.raises(PoolError, match=r"set node\.service\.socket"):
        make_private(folder / "x" if kind == "below a file" else folder)


# ---- the daemon's lock -------------------------------------------------------------------------


def test_one_daemon_gets_the_lock_until_it_releases_it(tmp_path):
    one, two = DaemonLock(tmp_path / "d.sock"), DaemonLock(tmp_path / "d.sock")
    assert not one.is_held(), "nobody has ever run here"
    assert not one.path.exists(), "to look creates nothing"
    assert one.acquire()
    assert one.is_held()
    assert two.is_held()
    assert not two.acquire()
    assert two.is_held()
    one.release()
    one.release()
    assert not two.is_held()
    assert two.acquire()
    assert mode_of(two.path) == 0o600


def test_the_lock_lies_beside_the_socket(tmp_path):
    assert DaemonLock(tmp_path / "d.sock").path == tmp_path / "d.lock"


def test_a_killed_daemon_holds_nothing(tmp_path, start):
    child = start(
        "import sys; from pathlib import Path; from tierkv.pool import DaemonLock\n"
        "lock = DaemonLock(Path(sys.argv[1])); print(lock.acquire(), flush=True)\n"
        "sys.stdin.read()",
        tmp_path / "d.sock",
    )
    assert child.stdout.readline() == "True\n"
    lock = DaemonLock(tmp_path / "d.sock")
    assert lock.is_held()
    assert not lock.acquire()
    kill_and_wait(child.pid)
    assert not lock.is_held()
    assert lock.acquire()


ASKER = """
import sys
from pathlib import Path
from tierkv.pool import DaemonLock
lock = DaemonLock(Path(sys.argv[1]))
lock.is_held()
print("ready", flush=True)
while True:
    lock.is_held()
"""


def test_to_ask_never_keeps_a_daemon_from_starting(tmp_path, start):
    lock = DaemonLock(tmp_path / "d.sock")
    for _ in range(2):
        assert start(ASKER, tmp_path / "d.sock").stdout.readline() == "ready\n"
    for _ in range(5_000):
        assert lock.acquire()
        assert lock.is_held()
        lock.release()
        assert not lock.is_held()


# ---- mapping in the background -----------------------------------------------------------------


def until(is_so) -> bool:
    """Look again and again; whether it became so within a minute."""
    pause = threading.Event()
    return any(is_so() or pause.wait(0.01) for _ in range(WAIT_MAX_S * 100))


def test_a_mapper_finds_the_pool_when_it_appears_and_holds_a_lock_from_then_on(tmp_path, path):
    run = tmp_path / "run"
    mapper = PoolMapper(path, run, ENGINE)
    assert mapper.get(str(path), 1) is None
    pool = create_pool(path, MIB, MIB)
    pool.bytes[1] = 7
    assert until(lambda: mapper.get(str(path), pool.generation) is not None)
    assert mapper.get(str(path), pool.generation).bytes[1] == 7
    assert mapper.get(str(path), pool.generation + 1) is None
    assert held_locks(run)[ENGINE].mappers == 1
    mapper.close()
    assert held_locks(run) == {}


def test_a_mapper_follows_a_new_generation_and_a_new_file(tmp_path, path):
    pool = create_pool(path, MIB, MIB)
    mapper = PoolMapper(path, tmp_path / "run", ENGINE)
    assert until(lambda: mapper.get(str(path), pool.generation) is not None)
    pool.close()
    pool = create_pool(path, MIB, MIB)
    assert mapper.get(str(path), pool.generation) is not None, "nothing is mapped again"
    pool.close()
    pool = create_pool(path, 2 * MIB, MIB)
    assert until(lambda: mapper.get(str(path), pool.generation) is not None)
    assert mapper.get(str(path), pool.generation).capacity == 2 * MIB
    mapper.close()


def test_a_mapper_that_never_finds_a_pool_can_be_closed(tmp_path, path):
    mapper = PoolMapper(path, tmp_path / "run", ENGINE)
    mapper.close()
    assert held_locks(tmp_path / "run") == {}


def test_a_mapper_tells_whether_it_is_idle_and_counts_as_busy_until_it_does(tmp_path):
    lock = MapperLock(tmp_path, ENGINE)
    assert held_locks(tmp_path)[ENGINE].idle_mappers == 0
    lock.note_copies(0)
    assert held_locks(tmp_path)[ENGINE].idle_mappers == 1
    lock.note_copies(3)
    assert held_locks(tmp_path)[ENGINE].idle_mappers == 0
    lock.release()


def test_the_daemon_lock_tells_the_generation_of_its_holder(tmp_path):
    lock, other = DaemonLock(tmp_path / "d.sock"), DaemonLock(tmp_path / "d.sock")
    assert other.holder() is None
    assert lock.acquire()
    assert other.holder() == 0, "it is starting"
    lock.tell(7)
    assert other.holder() == 7
    lock.release()
    assert other.holder() is None
