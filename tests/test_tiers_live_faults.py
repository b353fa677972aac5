"""Tiers whose stores hang, fill, break or lie, below a real daemon that serves on.

Nothing here waits by the clock; where a bound on time is the point, it is generous.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core_world import SPACE, keys_of
from tests.fs_mounts import read_only, run, small_tmpfs, undeletable
from tests.processes import ROOT, SLOT_BYTES, WAIT_MAX_S, wait_for, wait_for_end
from tests.test_tiers_live import (
    IN_TIME_S,
    SLOTS,
    LiveNode,
    closing,
    file_of,
    files_of,
    fs,
    store,
)
from tierkv.config import TierConfig
from tierkv.core.books import Books
from tierkv.core.tiering import TieringManager
from tierkv.core.values import Limits, TierLimits
from tierkv.service.tier_host import RESTART_MAX_S, TierHost
from tierkv.testing import aligned_views
from tierkv.tiers.frame import seal
from tierkv.types import FRAME_BYTES

HANG_DEADLINE_S = 0.8  # long enough to look around between a miss and the end of a process
FULL_BYTES = 1 << 20
STARTS = 100
GONE_S = 1.0  # longer than the first pause before a process is started anew


@pytest.fixture
def node(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path))) as node:
        yield node


@pytest.fixture
def slow_node(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path, deadline=HANG_DEADLINE_S))) as node:
        yield node


def wait_replaced(node: LiveNode, epoch: int) -> None:
    """Wait until the process of the tier is another one, and in use."""
    wait_for(lambda: node.tier()["process"] > epoch, what="the process to be given up")
    node.wait_ready()
    wait_for(lambda: node.tier()["is_reading"] and node.tier()["is_writing"], what="the pause")


# ---- what hangs --------------------------------------------------------------------------------


def test_a_hung_read_is_a_miss_in_time_and_keeps_its_slots_while_its_process_lives(slow_node):
    node = slow_node
    node.start()
    one, two = node.engine("one"), node.engine("two")
    one.store("ab")
    one.store("cd")
    node.wait_written()
    node.forget("dram")
    epoch, pid = node.tier()["process"], node.io_pid()
    node.faults.set("hang-read", "b")
    begin = time.monotonic()
    ticket = one.client.send_lookup(SPACE, keys_of("ab"))
    assert two.load_from("cd") == [1, 1], "others are served meanwhile"
    answer = one.client.take_answer(ticket, WAIT_MAX_S)
    assert answer is not None
    wait_for(lambda: answer.pending == 0, one.client, what="the deadline")
    assert time.monotonic() - begin < IN_TIME_S
    assert len(answer.offsets) == 0
    one.client.release([answer.lease])
    one.ping()
    held, stored = node.held(), two.store("klmnopqr")
    if node.tier()["process"] == epoch:
        assert held == (0, 2), "the read may still write into its slots"
        assert stored == SLOTS - 2
    assert node.faults.calls("hang-read", "b") == 1
    wait_for(lambda: node.tier()["process"] > epoch, what="the end of its process")
    node.faults.end("hang-read")
    wait_for_end(pid)
    wait_replaced(node, epoch)
    wait_for(lambda: node.held() == (0, 0), what="the slots")
    assert two.store("uvwxyz") == 6
    wait_for(lambda: one.load("ab") == 2, what="the block to be read after all")
    assert node.count("promote_late") == 2
    node.wait_written()
    node.check()


def test_a_read_that_is_merely_late_is_a_miss_once_and_a_hit_afterwards(slow_node):
    node = slow_node
    node.start()
    engine = node.engine("e")
    engine.store("ab")
    node.wait_written()
    node.forget("dram")
    node.faults.set("hang-read")
    assert engine.load("ab") == 0
    node.faults.end("hang-read")
    wait_for(lambda: engine.load("ab") == 2, what="the block")
    assert node.tier()["process"] == 0, "nothing was killed"
    assert node.held() == (0, 0)
    node.check()


def test_hung_writes_cost_the_tier_and_nobody_else(slow_node, tmp_path):
    node = slow_node
    daemon = node.start()
    engine = node.engine("e")
    engine.store("ab")
    node.wait_written()
    epoch = node.tier()["process"]
    node.faults.set("hang-write")
    assert engine.store("cd") == 2
    wait_for(lambda: node.faults.calls("hang-write"), what="the write")
    begin = time.monotonic()
    assert engine.store("ef") == 2
    assert engine.load_from("abcdef"[:2]) == [0, 0]
    assert engine.load_from("cd") == [0, 0]
    assert engine.store("ghijklmn") >= SLOTS - 4
    assert time.monotonic() - begin < IN_TIME_S
    wait_for(lambda: node.tier()["process"] > epoch, what="the end of its process")
    node.faults.end("hang-write")
    wait_replaced(node, epoch)
    assert node.count("demote_failed") >= 2
    node.wait_written()
    assert engine.store("qr") == 2
    node.wait_written()
    node.forget("dram")
    assert engine.load_from("qr") == [1, 1]
    assert engine.load_from("ab") == [1, 1]
    assert not files_of(tmp_path / "ssd") & set("cd")
    assert daemon.process.poll() is None
    assert node.held() == (0, 0)
    node.check()


@contextlib.contextmanager
def small_ext4(tmp_path: Path) -> Iterator[Path]:
    """A real file system of some MiB that can be frozen: writers then hang in the kernel."""
    image, path = tmp_path / "image", tmp_path / "disk"
    path.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    complaint = run("mkfs.ext4", "-q", "-F", str(image)) or run(
        "mount", "-o", "loop", str(image), str(path)
    )
    if complaint is not None:
        pytest.skip(f"no ext4 can be mounted here: {complaint}")
    try:
        yield path
    finally:
        run("fsfreeze", "-u", str(path))
        assert run("umount", "-l", str(path)) is None


def test_a_writer_that_hangs_in_the_kernel_keeps_its_blocks_and_the_daemon_serves(tmp_path):
    with small_ext4(tmp_path) as disk:
        tier = TierConfig(type="fs", path=disk / "ssd", capacity=64 * SLOT_BYTES, deadline=0.3)
        with closing(LiveNode(tmp_path, tier)) as node:
            daemon = node.start()
            engine = node.engine("e")
            engine.store("ab")
            node.wait_written()
            pid, epoch = node.io_pid(), node.tier()["process"]
            complaint = run("fsfreeze", "-f", str(disk))
            if complaint is not None:
                pytest.skip(f"no file system can be frozen here: {complaint}")
            assert engine.store("cd") == 2
            wait_for(lambda: node.tier()["process"] > epoch, what="the process to be given up")
            assert Path("/proc", str(pid)).exists(), "nothing ends it"
            assert node.held() == (0, 2), "it may still read the blocks that it writes"
            assert engine.load("ab") == engine.load("cd") == 2
            assert engine.store("efghij") == 6
            assert engine.store("klmnopqr") == SLOTS - 2
            assert daemon.process.poll() is None
            assert run("fsfreeze", "-u", str(disk)) is None
            wait_for_end(pid)
            wait_replaced(node, epoch)
            wait_for(lambda: node.held() == (0, 0), what="the blocks of the writer")
            node.wait_written()
            engine.store("xyz")
            node.wait_written()
            node.forget("dram")
            assert engine.load_from("xyz") == [1] * 3
            assert engine.load_from("ab") == [1] * 2
            node.check()


# ---- what lies where a block should be ---------------------------------------------------------


def _flip(path: Path, at: int) -> None:
    stored = bytearray(path.read_bytes())
    stored[at] ^= 1
    path.write_bytes(stored)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


def _frame_of_another(path: Path) -> None:
    (view,) = aligned_views(1, SLOT_BYTES)
    view[FRAME_BYTES:] = path.read_bytes()[FRAME_BYTES:]
    seal(view, b"T" * 32, bytes.fromhex(path.name))
    path.write_bytes(view)


def _link_to_a_copy(path: Path) -> None:
    copy = path.parents[3] / "copy"
    shutil.move(path, copy)
    path.symlink_to(copy)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a bit of the payload": lambda path: _flip(path, SLOT_BYTES - 1),
    "a bit of the frame": lambda path: _flip(path, 20),
    "truncated": lambda path: os.truncate(path, SLOT_BYTES // 2),
    "empty": lambda path: os.truncate(path, 0),
    "too long": lambda path: os.truncate(path, 2 * SLOT_BYTES),
    "all zero": lambda path: path.write_bytes(bytes(SLOT_BYTES)),
    "of another layout": _frame_of_another,
    "gone": Path.unlink,
    "a FIFO": lambda path: _replace(path, os.mkfifo),
    "a link to a good copy": _link_to_a_copy,
    "a directory": lambda path: _replace(path, Path.mkdir),
}


@pytest.mark.parametrize("io", ["direct", "buffered"])
def test_whatever_lies_in_place_of_a_block_costs_one_read_and_only_that_block(tmp_path, io):
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    pairs = {kind: letters[at * 2 : at * 2 + 2] for at, kind in enumerate(DAMAGES)}
    with closing(LiveNode(tmp_path, fs(tmp_path, io=io, deadline=WAIT_MAX_S))) as node:
        node.start()
        engine = node.engine("e")
        for pair in pairs.values():
            assert engine.store(pair) == 2
            node.wait_written()
        node.forget("dram")
        for kind, (head, bad) in pairs.items():
            DAMAGES[kind](file_of(tmp_path, bad))
            begin = time.monotonic()
            assert engine.load_from(head + bad) == [1], kind
            assert engine.load_from(head + bad) == [0], kind
            assert time.monotonic() - begin < IN_TIME_S, kind
            assert node.faults.calls("read", bad) == 1, kind
            if kind == "a directory":  # nothing of ours removes it
                file_of(tmp_path, bad).rmdir()
            assert engine.store(bad, after=head) == 1, kind
            node.wait_written()
            node.forget("dram")
            assert engine.load_from(head + bad) == [1, 1], kind
            assert node.faults.calls("read", bad) == 2, kind
        assert (tmp_path / "copy").stat().st_size == SLOT_BYTES, "no link was followed"
        assert node.held() == (0, 0)
        node.check()


def test_blocks_that_changed_places_are_both_misses(node, tmp_path):
    node.start()
    engine = node.engine("e")
    engine.store("ab")
    engine.store("cd")
    node.wait_written()
    node.forget("dram")
    b, d, spare = file_of(tmp_path, "b"), file_of(tmp_path, "d"), tmp_path / "spare"
    b.rename(spare)
    d.rename(b)
    spare.rename(d)
    assert [engine.load_from(text) for text in ("ab", "cd")] == [[1], [1]]
    assert node.count("promote_corrupt") == 2
    assert not b.exists()
    assert not d.exists()
    node.check()


def test_a_damaged_object_is_one_miss_and_can_be_stored_again(tmp_path):
    with closing(LiveNode(tmp_path, store(tmp_path))) as node:
        node.start()
        engine = node.engine("e")
        engine.store("abcd")
        node.wait_written()
        node.forget("dram")
        path = tmp_path / "bucket" / SPACE.hex()
        _flip(path / keys_of("b")[0].hex(), SLOT_BYTES - 1)
        assert engine.load_from("abcd") == [1]
        assert engine.load_from("abcd") == [0]
        assert engine.store("bcd", after="a") == 3
        node.wait_written()
        (path / keys_of("d")[0].hex()).unlink()
        node.forget("dram")
        assert engine.load_from("abcd") == [1] * 3
        assert engine.store("d", after="c") == 1
        node.wait_written()
        node.forget("dram")
        assert engine.load_from("abcd") == [1] * 4
        node.check()


# ---- what is full, or takes no writes ----------------------------------------------------------


@contextlib.contextmanager
def no_space(disk: Path) -> Iterator[None]:
    ballast = disk / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    yield
    ballast.unlink()


@contextlib.contextmanager
def no_inodes(disk: Path) -> Iterator[None]:
    ballast = disk / "many"
    with contextlib.suppress(OSError):
        ballast.mkdir()
        for number in range(10_000):
            (ballast / str(number)).touch()
    yield
    shutil.rmtree(ballast)


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        (no_space, f"size={FULL_BYTES}"),
        (no_inodes, f"size={FULL_BYTES},nr_inodes=400"),
        (read_only, f"size={FULL_BYTES}"),
    ],
    ids=["no space", "no inodes", "read-only"],
)
def test_a_disk_that_takes_no_writes_costs_nothing_but_the_tier_until_it_does(
    tmp_path, fault, options
):
    with small_tmpfs(tmp_path / "disk", options) as disk:
        tier = TierConfig(
            type="fs", path=disk / "ssd", capacity=4 * FULL_BYTES, reserve=0.001, deadline=2.0
        )
        with closing(LiveNode(tmp_path, tier)) as node:
            node.start()
            engine = node.engine("e")
            with fault(disk):
                assert engine.store("abc") == 3
                node.wait_written()
                assert node.count("blocks_demoted") == 0
                assert node.count("demote_full") + node.count("demote_failed") == 3
                assert engine.load_from("abc") == [0] * 3
                assert engine.store("def") == 3, "while the tier is left alone"
                assert engine.load_from("def") == [0] * 3
                assert not list(disk.rglob(".tmp*"))
            node.wait_written()
            wait_for(lambda: node.tier()["is_writing"], what="the tier to be tried again")
            assert engine.store("gh") == 2
            node.wait_written()
            node.forget("dram")
            assert engine.load_from("gh") == [1, 1]
            assert engine.load("abc") == 0
            assert node.tier()["process"] == 0, "nothing was killed"
            node.check()


def test_a_full_disk_recycles_the_oldest_blocks_and_goes_on(tmp_path):
    with small_tmpfs(tmp_path / "disk", f"size={FULL_BYTES}") as disk:
        tier = TierConfig(type="fs", path=disk / "ssd", capacity=4 * FULL_BYTES, reserve=0.001)
        with closing(LiveNode(tmp_path, tier)) as node:
            node.start()
            engine = node.engine("e")
            for text in ("ab", "cd"):
                engine.store(text)
                node.wait_written()
            with no_space(disk):
                assert engine.store("ef") == 2
                node.wait_written()
                assert node.count("demote_full") == 0
                assert files_of(disk / "ssd") == set("cdef")
                node.forget("dram")
                assert engine.load_from("ef") == [1, 1]
                assert engine.load("ab") == 0
                node.check()


def test_a_file_that_cannot_be_removed_is_counted_and_stops_nothing(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path, capacity=4 * SLOT_BYTES))) as node:
        node.start()
        engine = node.engine("e")
        engine.store("ab")
        node.wait_written()
        with undeletable(file_of(tmp_path, "a")):
            for text in ("cd", "ef", "gh"):
                assert engine.store(text) == 2
                node.wait_written()
            wait_for(lambda: node.tier()["store"].get("stuck_files") == 1, what="the store's word")
            node.forget("dram")
            assert engine.load_from("gh") == [1, 1]
            assert engine.load("ab") == 0, "it was given up, and cannot come back"
            assert node.count("blocks_demoted") == 8
            node.check()
        assert node.purge().problems == []
        assert files_of(tmp_path / "ssd") == set()
        node.check()


def test_a_directory_removed_while_serving_is_made_again(node, tmp_path):
    node.start()
    engine = node.engine("e")
    engine.store("abcd")
    engine.store("ef")
    node.wait_written()
    # Its lock may be made again meanwhile, and keep the directory itself.
    shutil.rmtree(tmp_path / "ssd", ignore_errors=True)
    assert files_of(tmp_path / "ssd") == set()
    assert engine.load_from("abcd") == [0] * 4
    node.forget("dram")
    assert [engine.load(text) for text in ("abcd", "ef")] == [0, 0]
    assert engine.store("abcd") == 4
    node.wait_written()
    node.forget("dram")
    assert engine.load_from("abcd") == [1] * 4
    assert (tmp_path / "ssd" / ".lock").exists()
    node.check()


# ---- processes that lie ------------------------------------------------------------------------

_TALK = "import os,socket; s=socket.socket(fileno=0); s.recv(1<<18); "
_WIRE = "from tierkv.service.io_wire import *; " + _TALK
IO_PROGRAMS = {
    "sends random bytes": _TALK + "[s.send(os.urandom(n)) for n in (1, 100, 60000)]; s.recv(1)",
    "sends an endless list": _TALK + "s.send(b'\\xdd\\xff\\xff\\xff\\xff' * 30000); s.recv(1)",
    "sends nothing, politely": _TALK + "s.send(b''); s.recv(1)",
    "answers what nobody asked": _WIRE + "[send(s, m) for m in ("
    "Ready(True, True, None, ''), Outcomes(7, bytes(9)), Ended(8, -1, ['x']), Scanned(), "
    "Changed(b'', [b'', b'x' * 65], False), Facts({'bytes': -1}))]; s.send(b'')",
}


def python(program: str) -> tuple[str, ...]:
    """A command that runs a program as I/O process."""
    return ("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", program)


@pytest.mark.parametrize("how", IO_PROGRAMS)
def test_an_io_process_that_goes_wrong_never_takes_the_daemon_along(tmp_path, how):
    command = python(IO_PROGRAMS[how])
    with closing(LiveNode(tmp_path, fs(tmp_path), io_command=command, flush_budget=0.0)) as node:
        daemon = node.start_daemon()
        engine = node.engine("e")
        assert engine.store("abcd") == 4
        wait_for(lambda: starts_of(node) >= 2, what="a new try")
        assert engine.load_from("abcd") == [0] * 4
        assert engine.store("ef") == 2
        assert daemon.process.poll() is None
        assert node.tier()["process"] >= 1
        assert node.held() == (0, 0)
        daemon.process.terminate()
        assert daemon.process.wait(WAIT_MAX_S) == 0
        assert not node.says("Traceback"), node.log.read_text()


def starts_of(node: LiveNode) -> int:
    return node.log.read_text().count("I/O process started")


def test_a_process_that_ends_at_once_is_started_ever_more_seldom(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path), io_command=python(""))) as node:
        daemon = node.start_daemon()
        engine = node.engine("e")
        assert engine.store("ab") == 2
        begin = time.monotonic()
        wait_for(lambda: starts_of(node) >= 4, what="new tries")
        assert time.monotonic() - begin > 2.0, "the last pause alone takes this long"
        assert starts_of(node) == 4
        assert engine.load_from("ab") == [0, 0]
        assert daemon.process.poll() is None


def test_a_process_that_floods_the_daemon_delays_nobody_for_long(tmp_path):
    program = _WIRE + (
        "send(s, Ready(True, True, None, '')); "
        "m = Changed(b'x' * 32, [b'%064d' % n for n in range(1000)], True)\n"
        "while True: send(s, m)"
    )
    with closing(LiveNode(tmp_path, fs(tmp_path), io_command=python(program))) as node:
        daemon = node.start_daemon()
        engine = node.engine("e")
        wait_for(lambda: node.tier()["blocks_known"] == 1000, what="the flood")
        begin = time.monotonic()
        for _ in range(5):
            engine.store("abcd")
            assert engine.load("abcd") == 4
        assert time.monotonic() - begin < IN_TIME_S
        assert daemon.process.poll() is None


def test_a_process_that_never_answers_costs_hits_and_nothing_else(tmp_path):
    """It said that it is ready, and hangs from then on."""
    program = _WIRE + "send(s, Ready(True, True, None, '')); import signal; signal.pause()"
    with closing(LiveNode(tmp_path, fs(tmp_path), io_command=python(program))) as node:
        daemon = node.start_daemon()
        engine = node.engine("e")
        wait_for(lambda: node.tier()["is_up"], what="the process")
        begin = time.monotonic()
        assert engine.load("ab") == 0
        assert engine.store("cd") == 2
        assert engine.load_from("cd") == [0, 0]
        assert time.monotonic() - begin < IN_TIME_S
        wait_for(lambda: node.tier()["process"] >= 1, what="the process to be given up")
        assert engine.load_from("cd") == [0, 0]
        wait_for(lambda: node.held() == (0, 0), what="the write to be given up")
        assert daemon.process.poll() is None


@pytest.mark.parametrize("command", [("/nowhere/python",), ("/bin/false",)])
def test_a_process_that_cannot_even_start_is_tried_again_later(tmp_path, command):
    """Time is ours here, so that many starts take no time. The daemon's loop calls `step`."""
    manager = TieringManager(Books(Limits(SLOT_BYTES, SLOT_BYTES)), [TierLimits("fs")])
    host = TierHost(
        [fs(tmp_path)],
        manager,
        pool=str(tmp_path / "none"),
        generation=1,
        run_directory=str(tmp_path),
        stores=[{}],
        command=command,
    )
    try:
        for turn in range(STARTS):
            host.step(2 * RESTART_MAX_S * turn)
            if ends := host.sockets():
                assert select.select(ends, [], [], WAIT_MAX_S)[0], "it ends at once"
    finally:
        host.close()
    assert not manager.lanes[0].is_up


def test_the_command_of_the_io_process_may_be_gone_while_the_daemon_serves(tmp_path):
    """As after an update that replaced the environment under a running daemon."""
    link = tmp_path / "python"
    link.symlink_to(shutil.which("env") or "/usr/bin/env")
    command = (str(link), f"PYTHONPATH={ROOT}", sys.executable, "-m", "tierkv.service.io_process")
    with closing(LiveNode(tmp_path, fs(tmp_path), io_command=command)) as node:
        daemon = node.start()
        engine = node.engine("e")
        engine.store("ab")
        node.wait_written()
        target = link.readlink()
        link.unlink()
        os.kill(node.io_pid(), signal.SIGKILL)
        end = time.monotonic() + GONE_S
        wait_for(lambda: daemon.process.poll() is not None or time.monotonic() > end, engine.client)
        assert daemon.process.poll() is None, node.log.read_text()[-2000:]
        assert engine.load_from("ab") == [0, 0]
        assert engine.store("cd") == 2
        link.symlink_to(target)
        node.wait_ready()
        node.wait_written()
        node.forget("dram")
        assert engine.load_from("cd") == [1, 1]
        node.check()
