"""The fs tier on real files: direct and buffered, at capacity, damaged, restarted, taken away."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import mmap
import os
import random
import resource
import shutil
import stat
import threading
import tracemalloc
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest

from tests import fs_mounts
from tierkv.errors import ConfigError, TierUnavailableError
from tierkv.tiers.base import (
    BlockName,
    Change,
    Outcome,
    TierSettings,
    read_verified,
    write_sealed,
)
from tierkv.tiers.fs.buffered import BufferedTransfer
from tierkv.tiers.fs.direct import DirectTransfer
from tierkv.tiers.fs.index import Index
from tierkv.tiers.fs.layout import Layout
from tierkv.tiers.fs.scan import measure
from tierkv.tiers.fs.tier import FsTier
from tierkv.tiers.fs.transfer import Transfer, move_all
from tierkv.types import PAGE_BYTES, BlockKey, NamespaceId

SLOT = 2 * PAGE_BYTES
LONG_SLOT = 3 * PAGE_BYTES
SPACE = NamespaceId(hashlib.sha256(b"space").digest())
OTHER_SPACE = NamespaceId(hashlib.sha256(b"other space").digest())
WAIT_MAX_S = 60
OK, MISSING, CORRUPT, FULL, FAILED = Outcome


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


class FaultyTransfer(Transfer):
    """Does what the next fault says: an error number is raised, None is no fault, else bytes moved.

    Faults are used up one per call; after them everything works.
    """

    def __init__(self) -> None:
        self._inner = BufferedTransfer()
        self.read_faults: list[int | None] = []
        self.write_faults: list[int | None] = []
        self.short_by = 0
        self.reads = 0
        self.on_write = lambda: None

    @property
    def is_direct(self) -> bool:
        return False

    def read(self, file: int, view: memoryview) -> int:
        self.reads += 1
        self._raise_next(self.read_faults)
        return self._inner.read(file, view) - self.short_by

    def write(self, file: int, view: memoryview) -> int:
        self.on_write()
        self._raise_next(self.write_faults)
        return self._inner.write(file, view) - self.short_by

    def close(self) -> None:
        self._inner.close()

    def _raise_next(self, faults: list[int | None]) -> None:
        fault = faults.pop(0) if faults else None
        if fault is not None:
            raise OSError(fault, os.strerror(fault))


class GatedTransfer(FaultyTransfer):
    """Stops in every call while the gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Semaphore(0)
        self.gate = threading.Event()
        self.gate.set()

    def read(self, file: int, view: memoryview) -> int:
        self._pass()
        return super().read(file, view)

    def write(self, file: int, view: memoryview) -> int:
        self._pass()
        return super().write(file, view)

    def _pass(self) -> None:
        is_open = self.gate.is_set()
        self.entered.release()
        if not is_open:
            assert self.gate.wait(WAIT_MAX_S)


def name_of(number: int, space: NamespaceId = SPACE) -> BlockName:
    return BlockName(space, BlockKey(hashlib.sha256(b"%d" % number).digest() + b"\0"))


def new_view(size: int = SLOT) -> memoryview:
    """Page-aligned memory, as slots have."""
    return memoryview(mmap.mmap(-1, size))


def slot_of(number: int, size: int = SLOT) -> memoryview:
    view = new_view(size)
    view[:] = random.Random(number).randbytes(size)
    return view


def put(tier: FsTier, number: int, size: int = SLOT, space: NamespaceId = SPACE) -> Outcome:
    return write_sealed(tier, [name_of(number, space)], [slot_of(number, size)])[0]


def get(tier: FsTier, number: int, size: int = SLOT, space: NamespaceId = SPACE) -> Outcome:
    """Read and verify a block; a hit is compared byte by byte."""
    view = new_view(size)
    outcome = read_verified(tier, [name_of(number, space)], [view])[0]
    if outcome is OK:
        assert view[PAGE_BYTES:] == slot_of(number, size)[PAGE_BYTES:]
    return outcome


def put_all(tier: FsTier, numbers, clock: Clock | None = None, size: int = SLOT) -> None:
    for number in numbers:
        if clock is not None:
            clock.now += 1
        assert put(tier, number, size) is OK


def has(tier: FsTier, numbers) -> list[int]:
    """Which of them a probe finds."""
    return [number for number in numbers if tier.probe([name_of(number)]) == [OK]]


def drop(tier: FsTier, number: int) -> Outcome:
    return tier.drop([name_of(number)])[0]


def path_of(root: Path, number: int, space: NamespaceId = SPACE) -> Path:
    text = name_of(number, space).key.hex()
    return root / space.hex() / text[:2] / text


def files_of(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != ".lock"]


def finish_scan(tier: FsTier) -> int:
    """Scan to the end; the number of calls."""
    calls = 1
    while not tier.scan():
        calls += 1
    return calls


def changes_of(tier: FsTier) -> list[tuple[BlockName, bool]]:
    return [(change.name, change.is_added) for change in tier.take_changes(10_000)]


class InThread:
    """A call in another thread."""

    def __init__(self, call, *arguments) -> None:
        self.outcome = None
        self._thread = threading.Thread(target=self._run, args=(call, *arguments))
        self._thread.start()

    def _run(self, call, *arguments) -> None:
        self.outcome = call(*arguments)

    def join(self):
        self._thread.join(WAIT_MAX_S)
        assert not self._thread.is_alive()
        return self.outcome


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "tier"


@pytest.fixture
def new_tier(root, clock):
    """Open a tier at `root`, its scan done unless `is_scanned=False`. It is closed at the end."""
    tiers = []

    def open_one(blocks: float = 1000, is_scanned: bool = True, **more) -> FsTier:
        own = {
            k: more.pop(k) for k in ("transfer", "touch_period_s", "scan_entries_max") if k in more
        }
        values = {"path": str(root), "capacity": int(blocks * SLOT), "reserve": 0.0}
        tier = FsTier(TierSettings("fs", **(values | more)), clock=clock, **own)
        tiers.append(tier)
        if is_scanned:
            finish_scan(tier)
        return tier

    yield open_one
    for tier in tiers:
        tier.close()


# ---- full cycles -------------------------------------------------------------------------------


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
def test_a_block_comes_back_as_it_was_written(new_tier, root, io):
    tier = new_tier(io=io)
    names = [name_of(number) for number in range(8)]
    views = [slot_of(number) for number in range(8)]
    assert write_sealed(tier, names, views) == [OK] * 8
    assert tier.probe(names) == [OK] * 8
    for number in range(8):
        assert get(tier, number) is OK
        assert path_of(root, number).read_bytes() == bytes(views[number])
    assert get(tier, 99) is MISSING
    assert tier.statistics()["bytes"] == 8 * SLOT
    assert tier.statistics()["is_direct"] == (io != "buffered")
    assert tier.check() == []


def test_what_the_tier_says_of_itself(new_tier):
    info = new_tier(blocks=5).info
    assert (info.type, info.capacity, info.batch_max) == ("fs", 5 * SLOT, 64)
    assert (info.is_indexed, info.is_shared, info.is_durable) == (True, False, True)


def test_files_and_directories_are_private(new_tier, root):
    put(new_tier(), 1)
    for path in [root, *root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_namespace_begins_with_all_its_directories(new_tier, root):
    put(new_tier(), 1)
    folders = sorted(path.name for path in (root / SPACE.hex()).iterdir())
    assert folders == [f"{byte:02x}" for byte in range(256)]


def test_no_directory_gets_more_than_its_share(new_tier, root):
    """Faults M1: a flat directory of millions of files is full with most of the disk free."""
    tier = new_tier(blocks=3000, io="buffered")
    view = slot_of(0, 16)
    for number in range(2000):
        assert tier.write([name_of(number)], [view]) == [OK]
    per_folder = Counter(path.parent for path in files_of(root))
    assert max(per_folder.values()) < 40
    assert tier.check() == []


def test_keys_need_not_be_uniform(new_tier):
    tier = new_tier()
    names = [BlockName(SPACE, BlockKey(b"\0\0" + b"%d" % number)) for number in range(50)]
    for number, name in enumerate(names):
        assert write_sealed(tier, [name], [slot_of(number)]) == [OK]
    assert tier.probe(names) == [OK] * 50
    tier.close()
    again = new_tier()
    assert again.probe(names) == [OK] * 50
    assert again.check() == []


@pytest.mark.parametrize("size", [1, 4095, 4097, 512 * 3, 3_098_112])
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_any_length_can_be_kept(new_tier, io, size):
    """Faults N1: what direct I/O cannot move goes through the page cache, block by block."""
    tier = new_tier(io=io)
    name, view, back = name_of(1), slot_of(1, size), new_view(size)
    assert tier.write([name], [view]) == [OK]
    assert tier.read([name], [back]) == [OK]
    assert back == view


def test_memory_that_is_not_aligned_goes_through_the_page_cache(new_tier):
    """Faults N2: what `torch.empty` returns is aligned to 64 bytes."""
    tier = new_tier(io="auto")
    source, target = new_view(SLOT + 64)[64:], new_view(SLOT + 64)[64:]
    source[:] = random.Random(1).randbytes(SLOT)
    assert tier.write([name_of(1)], [source]) == [OK]
    assert tier.read([name_of(1)], [target]) == [OK]
    assert source == target


def test_the_same_key_in_two_namespaces_is_two_blocks(new_tier):
    tier = new_tier()
    assert put(tier, 1) is OK
    assert get(tier, 1, space=OTHER_SPACE) is MISSING
    assert put(tier, 1, space=OTHER_SPACE) is OK
    assert drop(tier, 1) is OK
    assert get(tier, 1, space=OTHER_SPACE) is OK


def test_a_block_that_is_there_is_not_written_again(new_tier, root):
    """Faults K4: it would be counted twice."""
    tier = new_tier(blocks=2)
    put_all(tier, [1, 1, 1, 2])
    inode = path_of(root, 1).stat().st_ino
    assert put(tier, 1) is OK
    assert path_of(root, 1).stat().st_ino == inode
    assert has(tier, [1, 2]) == [1, 2]
    assert tier.statistics()["bytes"] == 2 * SLOT


def test_a_block_of_another_length_is_replaced(new_tier):
    tier = new_tier()
    assert put(tier, 1) is OK
    assert put(tier, 1, LONG_SLOT) is OK
    assert get(tier, 1, LONG_SLOT) is OK
    assert tier.statistics()["bytes"] == LONG_SLOT
    assert changes_of(tier) == [(name_of(1), True), (name_of(1), False), (name_of(1), True)]
    assert tier.check() == []


def test_changes_tell_name_and_size_in_order(new_tier):
    tier = new_tier()
    put_all(tier, [1, 2])
    drop(tier, 1)
    assert tier.take_changes(1) == [Change(name_of(1), True, SLOT)]
    assert [(c.name, c.is_added) for c in tier.take_changes(10)] == [
        (name_of(2), True),
        (name_of(1), False),
    ]
    assert tier.take_changes(10) == []


def test_a_drop_removes_the_file_and_an_absent_block_is_no_error(new_tier, root):
    """Faults K6."""
    tier = new_tier()
    put_all(tier, [1, 2])
    path_of(root, 2).unlink()
    assert tier.drop([name_of(1), name_of(2), name_of(3)]) == [OK] * 3
    assert files_of(root) == []
    assert tier.statistics()["bytes"] == 0
    assert tier.check() == []


# ---- transfers ---------------------------------------------------------------------------------


def interrupted(call, bytes_max):
    """A call that moves little, and is interrupted each third time."""
    calls = iter(range(1 << 30))

    def move(file, views, at):
        if next(calls) % 3 == 2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return call(file, [views[0][:bytes_max]], at)

    return move


def test_buffered_transfers_go_on_after_short_and_interrupted_calls(new_tier):
    """Faults L7."""
    calls = interrupted(os.preadv, 7), interrupted(os.pwritev, 7)
    tier = new_tier(transfer=BufferedTransfer(*calls))
    view, back = slot_of(1, 1000), new_view(1000)
    assert tier.write([name_of(1)], [view]) == [OK]
    assert tier.read([name_of(1)], [back]) == [OK]
    assert view == back


def test_direct_transfers_stay_aligned_whatever_comes_back(new_tier):
    """Faults L7 and N3: address, length and offset of every call on a direct descriptor."""
    seen = []

    def watched(call):
        def move(file, views, at):
            address = np.frombuffer(views[0], np.uint8).ctypes.data
            seen.append((address % PAGE_BYTES, len(views[0]) % PAGE_BYTES, at % PAGE_BYTES))
            moved = call(file, [views[0][: 2 * PAGE_BYTES]], at)
            return moved if moved == len(views[0]) else moved - 7

        return interrupted(move, 1 << 30)

    calls = watched(os.preadv), watched(os.pwritev)
    tier = new_tier(transfer=DirectTransfer(BufferedTransfer(), *calls))
    assert put(tier, 1, 8 * PAGE_BYTES) is OK
    assert get(tier, 1, 8 * PAGE_BYTES) is OK
    assert set(seen) == {(0, 0, 0)}
    assert len(seen) == 2 * 7  # one page each, and the last two at once


def test_one_call_never_asks_for_more_than_the_system_moves():
    lengths = []

    def move(file, views, at):
        lengths.append(len(views[0]))
        return len(views[0])

    assert move_all(move, -1, memoryview(bytes(10)), 1, 4) == 10
    assert lengths == [4, 4, 2]


def test_a_transfer_that_moves_nothing_ends():
    assert move_all(lambda *_: 0, -1, new_view(SLOT)) == 0
    assert move_all(lambda *_: 7, -1, new_view(SLOT), PAGE_BYTES) == 0


def test_an_endless_interruption_is_an_error():
    def move(file, views, at):
        raise InterruptedError(errno.EINTR, "interrupted")

    with pytest.raises(InterruptedError):
        move_all(move, -1, new_view(SLOT))


def test_a_file_that_refuses_direct_transfers_is_moved_through_the_page_cache(new_tier):
    """Faults N2: some file systems take the flag and fail the transfer."""

    def refuse(file, views, at):
        raise OSError(errno.EINVAL, "invalid")

    tier = new_tier(transfer=DirectTransfer(BufferedTransfer(), refuse, refuse))
    assert put(tier, 1) is OK
    assert get(tier, 1) is OK


def refuse_direct(monkeypatch) -> None:
    """Make the system refuse direct I/O, as some file systems do."""
    import fcntl

    control = fcntl.fcntl

    def refuse(file, command, argument=0):
        if command == fcntl.F_SETFL and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return control(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)


def test_auto_falls_back_with_one_warning(new_tier, root, monkeypatch, caplog):
    refuse_direct(monkeypatch)
    with caplog.at_level(logging.WARNING):
        tier = new_tier(io="auto")
        put_all(tier, range(5))
    assert len(caplog.records) == 1
    assert str(root) in caplog.text
    assert tier.statistics()["is_direct"] == 0
    assert get(tier, 1) is OK


def test_direct_is_refused_where_it_does_not_work(new_tier, root, monkeypatch):
    refuse_direct(monkeypatch)
    with pytest.raises(ConfigError, match="use io: auto"):
        new_tier(io="direct")
    assert files_of(root) == []
    new_tier(io="buffered")  # and the directory is free


@pytest.mark.parametrize("io", ["auto", "direct", "buffered"])
def test_opening_leaves_nothing_but_the_lock(new_tier, root, io):
    new_tier(io=io)
    assert [path.name for path in root.iterdir()] == [".lock"]


# ---- capacity, order, recycling ----------------------------------------------------------------


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_at_capacity_the_victims_file_is_recycled(new_tier, root, clock, io):
    tier = new_tier(blocks=3, io=io)
    put_all(tier, [1, 2, 3], clock)
    changes_of(tier)
    inode = path_of(root, 1).stat().st_ino
    put_all(tier, [4], clock)
    assert path_of(root, 4).stat().st_ino == inode
    assert stat.S_IMODE(path_of(root, 4).stat().st_mode) == 0o600
    assert [get(tier, number) for number in (1, 2, 3, 4)] == [MISSING, OK, OK, OK]
    assert changes_of(tier) == [(name_of(1), False), (name_of(4), True)]
    counts = tier.statistics()
    assert (counts["recycled"], counts["evicted"], counts["blocks"]) == (1, 1, 3)
    assert tier.check() == []


def test_blocks_of_other_lengths_make_room_by_leaving(new_tier, root, clock):
    tier = new_tier(blocks=4)
    put_all(tier, [1, 2, 3, 4], clock)
    put_all(tier, [5], clock, size=LONG_SLOT)
    assert has(tier, range(1, 6)) == [3, 4, 5]
    assert tier.statistics()["recycled"] == 0
    assert tier.statistics()["evicted"] == 2
    put_all(tier, [6], clock)
    assert tier.statistics()["bytes"] <= 4 * SLOT
    assert tier.check() == []


def test_a_block_larger_than_the_tier_is_full(new_tier):
    tier = new_tier(blocks=1)
    assert put(tier, 1, LONG_SLOT) is FULL
    assert tier.statistics()["bytes"] == 0
    assert put(tier, 2) is OK
    assert put(tier, 1, LONG_SLOT) is FULL
    assert put(tier, 2, LONG_SLOT) is FULL
    assert has(tier, [2]) == [2]  # nothing was evicted in vain
    assert tier.check() == []


def test_new_blocks_are_the_most_recent(new_tier, clock):
    """Faults K3."""
    tier = new_tier(blocks=10)
    put_all(tier, range(11), clock)
    assert has(tier, range(11)) == list(range(1, 11))


@pytest.mark.parametrize("use", ["read", "touch"])
def test_a_used_block_goes_round_once(new_tier, clock, use):
    tier = new_tier(blocks=3)
    put_all(tier, [1, 2, 3], clock)
    if use == "read":
        assert get(tier, 1) is OK
    else:
        tier.touch([name_of(1), name_of(77)])
    put_all(tier, [4], clock)
    assert has(tier, range(1, 5)) == [1, 3, 4]
    put_all(tier, [5], clock)
    assert has(tier, range(1, 6)) == [1, 4, 5]
    put_all(tier, [6], clock)
    assert has(tier, range(1, 7)) == [4, 5, 6]  # once


def test_a_tier_full_of_used_blocks_takes_new_ones(new_tier):
    tier = new_tier(blocks=300, io="buffered")
    put_all(tier, range(300), size=SLOT)
    tier.touch([name_of(number) for number in range(300)])
    put_all(tier, range(300, 310))
    assert has(tier, range(300, 310)) == list(range(300, 310))
    assert tier.statistics()["bytes"] == 300 * SLOT
    assert tier.check() == []


class ClockModel:
    """The order of eviction in a few lines, to compare with."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict[int, bool] = OrderedDict()

    def use(self, number: int) -> None:
        if number in self.order:
            self.order[number] = True

    def add(self, number: int) -> int | None:
        """Add a block; which one goes."""
        victim = None
        if len(self.order) == self.capacity:
            while victim is None:
                number_of, is_used = self.order.popitem(last=False)
                if is_used:
                    self.order[number_of] = False
                else:
                    victim = number_of
        self.order[number] = False
        return victim


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_eviction_is_that_of_clock(seed):
    dice = random.Random(seed)
    index, model = Index(20, scanned_max=1000), ClockModel(20)
    for number in range(2000):
        for used in dice.choices(range(max(0, number - 40), number + 1), k=2):
            row = index.find_readable(name_of(used))
            assert (row is not None) == (used in model.order), f"seed {seed}"
            if row is not None:
                index.use(row, 0.0, 60.0)
                model.use(used)
        expected = model.add(number)
        if expected is not None:
            victim = index.choose_victim()
            assert index.name(victim) == name_of(expected), f"seed {seed}"
            index.forget(victim)
        row = index.begin_write(name_of(number))
        index.resize(row, 1)
        index.publish(row, 0.0)
    assert index.check() == []


def test_the_search_for_a_victim_is_bounded():
    index = Index(1000, scanned_max=10)
    for number in range(100):
        row = index.begin_write(name_of(number))
        index.publish(row, 0.0)
        index.pin(row)
    assert index.choose_victim() is None
    for number in range(50):
        index.unpin(index.find(name_of(number)))
    found = [index.choose_victim() for _ in range(20)]
    assert [row for row in found if row is not None]


def test_a_block_in_the_books_costs_less_than_300_bytes():
    count = 40_000
    names = [BlockName(SPACE, BlockKey(b"%040d" % number)) for number in range(10)]
    index = Index(1 << 60, scanned_max=10)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number in range(count):
            name = BlockName(NamespaceId(bytes(bytearray(SPACE))), BlockKey(b"%033d" % number))
            index.publish(index.begin_write(name), 0.0)
            index.changes.clear()
        per_block = (tracemalloc.get_traced_memory()[0] - before) / count
    finally:
        tracemalloc.stop()
    print(f"{per_block:.0f} bytes per block")
    assert per_block < 300
    assert all(index.find(name) is None for name in names)


def disk_bytes(root: Path) -> int:
    """Bytes in files, each once, however it is renamed meanwhile."""
    sizes = {}
    for folder, _, files in os.walk(root):
        for text in files:
            try:
                facts = Path(folder, text).stat()
            except FileNotFoundError:
                continue
            sizes[facts.st_ino] = facts.st_size
    return sum(sizes.values())


@pytest.mark.parametrize("is_mixed", [False, True])
def test_many_writers_never_exceed_the_capacity(new_tier, root, is_mixed):
    capacity = 20 * SLOT
    transfer = FaultyTransfer()
    tier = new_tier(blocks=20, transfer=transfer)
    seen = []
    samples = iter(range(1 << 30))

    def look() -> None:
        seen.append(tier.statistics()["bytes"])
        # Files of other lengths are made anew, and a walk would meet the old and the new one.
        if not is_mixed and next(samples) % 8 == 0:
            seen.append(disk_bytes(root / SPACE.hex()))

    transfer.on_write = look

    def work(seed: int) -> list[Outcome]:
        dice = random.Random(seed)
        outcomes = []
        for turn in range(60):
            number = 1000 * seed + turn
            size = dice.choice([SLOT, LONG_SLOT]) if is_mixed else SLOT
            outcomes.append(put(tier, number, size))
            back = dice.randrange(number - 5, number + 1)
            get(tier, back, size)
            if is_mixed and dice.random() < 0.1:
                drop(tier, back)
        return outcomes

    threads = [InThread(work, seed) for seed in range(1, 5)]
    outcomes = Counter(outcome for thread in threads for outcome in thread.join())
    print(outcomes)
    assert set(outcomes) <= {OK, FULL}
    assert outcomes[OK] > 200
    assert max(seen) <= capacity
    assert disk_bytes(root / SPACE.hex()) == tier.statistics()["bytes"] <= capacity
    assert tier.check() == []
    held = set()
    for name, is_added in changes_of(tier):
        (held.add if is_added else held.remove)(name)
    assert len(held) == tier.statistics()["blocks"]
    assert tier.probe(list(held)[:64]) == [OK] * min(64, len(held))


def test_without_a_capacity_half_of_what_is_free_is_taken(new_tier, root):
    """Faults M2 and M6: a bound is there even if nobody set one."""
    tier = new_tier(capacity=None)
    facts = os.statvfs(root)
    free = facts.f_bavail * facts.f_frsize
    assert 0.4 * free < tier.info.capacity < 0.6 * free
    assert tier.statistics()["capacity"] == tier.info.capacity


def test_what_is_ours_already_counts_as_free_at_a_restart(tmp_path, root, new_tier):
    with fs_mounts.small_tmpfs(tmp_path / "disk", "size=4m") as disk:
        tier = new_tier(capacity=None, path=str(disk / "t"))
        capacity = tier.info.capacity
        put_all(tier, range(capacity // SLOT - 5), None)
        tier.close()
        again = new_tier(capacity=None, path=str(disk / "t"))
        assert abs(again.info.capacity - capacity) < 0.1 * capacity


def test_the_reserve_of_the_file_system_is_left_free(tmp_path, new_tier, clock):
    """Faults M3: two tiers share a disk that is smaller than the sum of their budgets."""
    with fs_mounts.small_tmpfs(tmp_path / "disk", "size=1m") as disk:
        tiers = [new_tier(path=str(disk / text), capacity=900 << 10, reserve=0.25) for text in "ab"]
        for number in range(150):
            clock.now += 2
            outcomes = [put(tier, number) for tier in tiers]
            assert set(outcomes) <= {OK, FULL}
        facts = os.statvfs(disk)
        assert facts.f_bavail >= 0.25 * facts.f_blocks
        assert all(tier.statistics()["recycled"] > 0 for tier in tiers)
        for tier in tiers:
            assert has(tier, range(149, 150)) == [149]
            assert tier.check() == []


def test_a_full_disk_is_recycled_then_full(tmp_path, new_tier):
    with fs_mounts.small_tmpfs(tmp_path / "disk", "size=512k") as disk:
        tier = new_tier(path=str(disk / "t"))
        put_all(tier, range(20))
        with (disk / "others").open("wb", buffering=0) as others, pytest.raises(OSError):
            while True:
                others.write(bytes(4096))
        inodes = {path.stat().st_ino for path in files_of(disk / "t")}
        put_all(tier, range(100, 110))
        assert {path.stat().st_ino for path in files_of(disk / "t")} == inodes
        assert tier.statistics()["blocks"] == 20
        assert tier.purge(None, None) == 20
        with (disk / "more").open("wb", buffering=0) as more, pytest.raises(OSError):
            while True:
                more.write(bytes(4096))
        assert put(tier, 500) is FULL
        assert files_of(disk / "t") == []
        assert tier.check() == []


@pytest.mark.parametrize("inodes", [64, 600])
def test_inodes_are_part_of_the_budget(tmp_path, new_tier, clock, inodes):
    """Faults M7: inodes run out far below the byte budget."""
    with fs_mounts.small_tmpfs(tmp_path / "disk", f"size=16m,nr_inodes={inodes}") as disk:
        tier = new_tier(path=str(disk / "t"), capacity=10 << 20, reserve=0.1)
        outcomes = Counter()
        for number in range(200):
            clock.now += 2
            outcomes[put(tier, number)] += 1
        assert set(outcomes) <= {OK, FULL}
        assert outcomes[OK] >= (200 if inodes > 500 else 20)
        facts = os.statvfs(disk)
        assert facts.f_ffree >= (0.1 * facts.f_files if inodes > 500 else 0)
        assert tier.check() == []
        assert tier.statistics()["write_errors"] == 0


# ---- readers and writers at once ---------------------------------------------------------------


def test_a_file_that_is_read_is_never_recycled(new_tier, root, clock):
    transfer = GatedTransfer()
    tier = new_tier(blocks=2, transfer=transfer)
    put_all(tier, [1, 2], clock)
    transfer.gate.clear()
    inode = path_of(root, 1).stat().st_ino
    while transfer.entered.acquire(blocking=False):
        pass
    reader = InThread(get, tier, 1)
    assert transfer.entered.acquire(timeout=WAIT_MAX_S)
    writer = InThread(put, tier, 3)
    assert transfer.entered.acquire(timeout=WAIT_MAX_S)
    assert has(tier, [1, 2]) == [1]  # 2 is the victim, although 1 is older
    assert put(tier, 4) is FULL  # 1 is being read, 3 is being written
    transfer.gate.set()
    assert (reader.join(), writer.join()) == (OK, OK)
    assert path_of(root, 1).stat().st_ino == inode
    assert tier.check() == []


@pytest.mark.parametrize("how", ["drop", "purge"])
def test_what_is_dropped_while_it_is_read_goes_when_it_is_free(new_tier, root, how):
    transfer = GatedTransfer()
    tier = new_tier(transfer=transfer)
    put_all(tier, [1])
    changes_of(tier)
    transfer.gate.clear()
    while transfer.entered.acquire(blocking=False):
        pass
    readers = [InThread(get, tier, 1) for _ in range(2)]
    for _ in readers:
        assert transfer.entered.acquire(timeout=WAIT_MAX_S)
    if how == "drop":
        assert drop(tier, 1) is OK
    else:
        assert tier.purge(SPACE, None) == 1
    assert path_of(root, 1).exists()
    assert (has(tier, [1]), get(tier, 1)) == ([], MISSING)
    assert put(tier, 1) is FULL
    assert changes_of(tier) == [(name_of(1), False)]
    transfer.gate.set()
    assert [reader.join() for reader in readers] == [OK, OK]
    assert files_of(root) == []
    assert tier.statistics()["bytes"] == 0
    assert put(tier, 1) is OK
    assert tier.check() == []


@pytest.mark.parametrize("how", ["drop", "purge"])
def test_what_is_dropped_while_it_is_written_never_appears(new_tier, root, how):
    """Faults K11."""
    transfer = GatedTransfer()
    tier = new_tier(transfer=transfer)
    transfer.gate.clear()
    writer = InThread(put, tier, 1)
    assert transfer.entered.acquire(timeout=WAIT_MAX_S)
    assert (has(tier, [1]), get(tier, 1)) == ([], MISSING)
    if how == "drop":
        assert drop(tier, 1) is OK
    else:
        tier.purge(None, None)
    transfer.gate.set()
    assert writer.join() is OK
    assert (files_of(root), changes_of(tier)) == ([], [])
    assert tier.check() == []


def test_a_block_is_not_visible_before_it_is_whole(new_tier, root):
    """Faults B6."""
    transfer = GatedTransfer()
    tier = new_tier(transfer=transfer)
    transfer.gate.clear()
    writer = InThread(put, tier, 1)
    assert transfer.entered.acquire(timeout=WAIT_MAX_S)
    assert not path_of(root, 1).exists()
    assert [path.name.startswith(".tmp.") for path in files_of(root)] == [True]
    assert tier.statistics()["bytes"] == SLOT  # reserved before it is written
    transfer.gate.set()
    assert writer.join() is OK
    assert get(tier, 1) is OK


# ---- damage ------------------------------------------------------------------------------------


def test_a_flipped_byte_is_corrupt_and_dropped(new_tier, root):
    tier = new_tier()
    put_all(tier, [1])
    stored = bytearray(path_of(root, 1).read_bytes())
    stored[5000] ^= 1
    path_of(root, 1).write_bytes(stored)
    assert get(tier, 1) is CORRUPT
    assert get(tier, 1) is MISSING
    assert files_of(root) == []


def test_a_valid_frame_with_other_bytes_is_read_as_it_is(new_tier, root):
    """The negative control used elsewhere: the checksum finds damage, not malice."""
    tier = new_tier()
    put_all(tier, [1])
    other = new_tier(path=str(root) + "-2")
    write_sealed(other, [name_of(1)], [slot_of(2)])
    path_of(root, 1).write_bytes(path_of(Path(str(root) + "-2"), 1).read_bytes())
    back = new_view()
    assert read_verified(tier, [name_of(1)], [back]) == [OK]
    assert back[PAGE_BYTES:] == slot_of(2)[PAGE_BYTES:]


def test_a_file_of_zeros_is_a_miss(new_tier, root):
    """Faults L2: what a power loss may leave of a file that was never synced."""
    tier = new_tier()
    put_all(tier, [1])
    path_of(root, 1).write_bytes(bytes(SLOT))
    assert get(tier, 1) is CORRUPT
    assert get(tier, 1) is MISSING


def cut(path: Path) -> None:
    os.truncate(path, SLOT - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def be_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def be_link(path: Path) -> None:
    path.rename(path.with_name("target"))
    path.symlink_to("target")


def be_dangling(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def be_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def be_gone(path: Path) -> None:
    path.unlink()


def lose_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


def link_folder(path: Path) -> None:
    path.parent.rename(path.parent.with_name("elsewhere"))
    path.parent.symlink_to("elsewhere")


DAMAGES = {
    cut: CORRUPT,
    empty: CORRUPT,
    be_fifo: CORRUPT,
    be_link: CORRUPT,
    be_dangling: CORRUPT,
    be_folder: CORRUPT,
    be_gone: MISSING,
    lose_folder: MISSING,
    link_folder: MISSING,
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_what_is_no_block_file_is_answered_at_once_and_forgotten(new_tier, root, io, damage):
    tier = new_tier(io=io)
    put_all(tier, [1])
    damage(path_of(root, 1))
    changes_of(tier)
    assert get(tier, 1) is DAMAGES[damage]
    assert get(tier, 1) is MISSING
    assert changes_of(tier) == [(name_of(1), False)]
    stuck = int(damage is be_folder)
    assert tier.statistics()["stuck_files"] == stuck
    assert tier.statistics()["bytes"] == stuck * SLOT
    assert not path_of(root, 1).is_file() or damage is link_folder
    if damage is be_folder:
        assert put(tier, 1) is FAILED
        path_of(root, 1).rmdir()
    if damage is link_folder:
        assert put(tier, 1) is FAILED  # nothing is written through a link
        path_of(root, 1).parent.unlink()
        shutil.rmtree(path_of(root, 1).parent.with_name("elsewhere"))
    assert put(tier, 1) is OK
    assert get(tier, 1) is OK
    assert tier.check() == []


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_victim_makes_room_all_the_same(new_tier, root, clock, damage):
    """Faults K6 and M5: neither gone nor strange files stop the eviction."""
    tier = new_tier(blocks=3)
    put_all(tier, [1, 2, 3], clock)
    damage(path_of(root, 1))
    put_all(tier, [4, 5], clock)
    assert has(tier, [1, 4, 5]) == [4, 5]
    assert tier.statistics()["bytes"] <= 3 * SLOT
    if damage is not link_folder:
        path = path_of(root, 1)
        if path.is_dir():
            path.rmdir()
            assert drop(tier, 1) is OK
        (path.parent / "target").unlink(missing_ok=True)
        assert tier.check() == []


def test_a_file_with_a_second_name_is_not_overwritten(new_tier, root, tmp_path, clock):
    tier = new_tier(blocks=1)
    put_all(tier, [1], clock)
    kept = path_of(root, 1).read_bytes()
    os.link(path_of(root, 1), tmp_path / "second")
    put_all(tier, [2], clock)
    assert (tmp_path / "second").read_bytes() == kept
    assert get(tier, 2) is OK


def test_a_stored_block_of_another_length_is_corrupt(new_tier):
    tier = new_tier()
    put_all(tier, [1])
    assert tier.read([name_of(1)], [new_view(LONG_SLOT)]) == [CORRUPT]
    assert get(tier, 1) is MISSING
    assert tier.statistics()["corrupt"] == 1


READ_FAULTS = {
    errno.EIO: FAILED,
    errno.ESTALE: MISSING,
    errno.ENOENT: MISSING,
    errno.EACCES: FAILED,
}


@pytest.mark.parametrize("fault", READ_FAULTS, ids=errno.errorcode.get)
def test_a_bad_block_costs_one_read(new_tier, root, fault):
    """Faults N6: a block that a peer removed is a miss, not an error."""
    transfer = FaultyTransfer()
    tier = new_tier(transfer=transfer)
    put_all(tier, [1, 2])
    transfer.read_faults = [fault]
    assert [get(tier, 1), get(tier, 1), get(tier, 2)] == [READ_FAULTS[fault], MISSING, OK]
    assert transfer.reads == 2
    assert not path_of(root, 1).exists()
    assert tier.statistics()["read_errors"] == int(READ_FAULTS[fault] is FAILED)
    assert tier.check() == []


def test_a_shortage_of_our_own_costs_no_block(new_tier):
    transfer = FaultyTransfer()
    tier = new_tier(transfer=transfer)
    put_all(tier, [1])
    transfer.read_faults = [errno.EMFILE, errno.ENOMEM]
    assert [get(tier, 1), get(tier, 1), get(tier, 1)] == [FAILED, FAILED, OK]


def test_short_transfers_are_failures(new_tier, root):
    """Faults L8: a failed write never counts as success."""
    transfer = FaultyTransfer()
    tier = new_tier(transfer=transfer)
    put_all(tier, [1])
    transfer.short_by = 1
    assert get(tier, 1) is FAILED
    assert put(tier, 2) is FAILED
    transfer.short_by = 0
    assert [get(tier, 1), get(tier, 2)] == [MISSING, MISSING]
    assert files_of(root) == []
    assert tier.check() == []


@pytest.mark.parametrize("fault", [errno.EIO, errno.EROFS, errno.EACCES, errno.EPERM, errno.EINVAL])
@pytest.mark.parametrize("is_recycling", [False, True])
def test_a_failed_write_leaves_neither_file_nor_entry(new_tier, root, clock, fault, is_recycling):
    """Faults L5."""
    transfer = FaultyTransfer()
    tier = new_tier(blocks=2, transfer=transfer)
    put_all(tier, [1, 2] if is_recycling else [2], clock)
    changes_of(tier)
    transfer.write_faults = [fault]
    assert put(tier, 3) is FAILED
    assert files_of(root) == [path_of(root, 2)]
    assert changes_of(tier) == ([(name_of(1), False)] if is_recycling else [])
    assert tier.statistics()["bytes"] == SLOT
    assert tier.statistics()["write_errors"] == 1
    assert tier.check() == []
    assert put(tier, 3) is OK


@pytest.mark.parametrize("fault", [errno.ENOSPC, errno.EDQUOT])
def test_no_room_recycles_one_and_tries_once_more(new_tier, root, clock, fault):
    transfer = FaultyTransfer()
    tier = new_tier(transfer=transfer)
    put_all(tier, [1, 2], clock)
    inode = path_of(root, 1).stat().st_ino
    transfer.write_faults = [fault]
    assert put(tier, 3) is OK
    assert path_of(root, 3).stat().st_ino == inode
    assert has(tier, [1, 2, 3]) == [2, 3]
    transfer.write_faults = [fault, fault]
    assert put(tier, 4) is FULL
    assert has(tier, [1, 2, 3, 4]) == [3]
    assert tier.statistics()["write_errors"] == 0
    assert tier.check() == []


def test_an_undeletable_file_is_skipped_and_counted(new_tier, root, clock):
    """Faults M5: it must not stand in front of the queue for ever."""
    tier = new_tier(blocks=5)
    put_all(tier, range(5), clock)
    with fs_mounts.undeletable(path_of(root, 0)):
        put_all(tier, range(10, 60), clock)
        counts = tier.statistics()
        assert (counts["stuck_files"], counts["stuck_bytes"]) == (1, SLOT)
        assert (counts["blocks"], counts["bytes"]) == (4, 5 * SLOT)
        assert get(tier, 0) is MISSING
        assert drop(tier, 0) is FAILED
        assert put(tier, 0) is FAILED
        assert tier.check() == []
    assert drop(tier, 0) is OK
    assert tier.statistics()["stuck_files"] == 0
    assert put(tier, 0) is OK
    assert tier.check() == []


@pytest.mark.parametrize("blocks", [3, 100])
def test_a_read_only_file_system_still_serves(root, new_tier, clock, blocks):
    tier = new_tier(blocks=blocks)
    put_all(tier, [1, 2, 3], clock)
    changes_of(tier)
    with fs_mounts.read_only(root):
        assert [put(tier, number) for number in range(10, 20)] == [FAILED] * 10
        assert put(tier, 10, LONG_SLOT) is FAILED
        assert [get(tier, number) for number in (1, 2, 3)] == [OK] * 3
        assert changes_of(tier) == []
        assert drop(tier, 1) is FAILED
        assert [get(tier, number) for number in (1, 2)] == [MISSING, OK]
        assert tier.statistics()["stuck_files"] == 1
        assert tier.statistics()["write_errors"] == 11
        assert tier.check() == []
    assert put(tier, 1) is OK
    assert tier.statistics()["stuck_files"] == 0
    assert tier.check() == []


def test_a_tier_does_not_start_on_a_read_only_file_system(root, new_tier):
    root.mkdir()
    with fs_mounts.read_only(root), pytest.raises(ConfigError, match="Read-only"):
        new_tier()


def test_a_temporary_file_that_cannot_be_removed_goes_on_counting(new_tier, root):
    """The capacity holds for what is on the disk, whatever became of it."""
    transfer = FaultyTransfer()
    tier = new_tier(transfer=transfer)
    with contextlib.ExitStack() as stack:

        def freeze() -> None:
            (path,) = files_of(root)
            stack.enter_context(fs_mounts.undeletable(path))

        put_all(tier, [2])
        drop(tier, 2)
        transfer.on_write = freeze
        transfer.write_faults = [errno.EIO]
        assert put(tier, 1) is FAILED
        transfer.on_write = lambda: None
        counts = tier.statistics()
        assert (counts["stuck_files"], counts["bytes"], counts["blocks"]) == (1, SLOT, 0)
    assert get(tier, 1) is MISSING
    assert put(tier, 1) is OK
    assert get(tier, 1) is OK


def test_a_read_only_file_system_ends_the_eviction_of_an_excess(root, new_tier, clock):
    tier = new_tier()
    put_all(tier, range(5), clock)
    tier.close()
    again = new_tier(blocks=2, is_scanned=False)
    with fs_mounts.read_only(root):
        finish_scan(again)
        assert has(again, range(5)) == list(range(5))


def test_a_root_that_is_removed_is_made_again(new_tier, root):
    """Faults L6."""
    tier = new_tier()
    put_all(tier, range(10))
    shutil.rmtree(root)
    assert [get(tier, number) for number in range(5)] == [MISSING] * 5
    put_all(tier, range(20, 25))
    assert [get(tier, number) for number in range(20, 25)] == [OK] * 5
    assert [get(tier, number) for number in range(5, 10)] == [MISSING] * 5
    assert tier.statistics()["blocks"] == 5
    assert tier.check() == []
    with pytest.raises(ConfigError):
        new_tier()  # the lock was taken again


def test_a_root_replaced_by_an_empty_one_is_used(new_tier, root):
    tier = new_tier()
    put_all(tier, [1])
    shutil.rmtree(root)
    root.mkdir()
    os.chown(root, 65534, 65534) if os.geteuid() == 0 else None
    assert get(tier, 1) is MISSING
    assert put(tier, 2) is OK
    assert get(tier, 2) is OK


def test_a_directory_that_a_rival_took_is_left_to_it(new_tier, root):
    tier = new_tier()
    shutil.rmtree(root)
    rival = new_tier(options={"owner": "rival"})
    tier.scan()
    with pytest.raises(TierUnavailableError, match="another daemon"):
        put(tier, 1)
    assert put(rival, 1) is OK
    rival.close()
    tier.scan()
    assert put(tier, 2) is OK


def test_a_disk_that_was_unmounted_is_not_replaced_by_the_one_below(tmp_path, new_tier):
    with fs_mounts.small_tmpfs(tmp_path / "disk", "size=4m") as disk:
        tier = new_tier(path=str(disk))
        put_all(tier, [1])
        fs_mounts.unmount(disk)
        with pytest.raises(TierUnavailableError, match="mount"):
            put(tier, 2)
        with pytest.raises(TierUnavailableError):
            get(tier, 1)
        assert list(disk.iterdir()) == []
        assert has(tier, [1]) == [1]


# ---- restart -----------------------------------------------------------------------------------


def test_a_restart_finds_blocks_and_usage(new_tier, root):
    """Faults L1."""
    tier = new_tier()
    put_all(tier, range(30))
    assert put(tier, 1, space=OTHER_SPACE) is OK
    tier.close()
    again = new_tier(is_scanned=False, scan_entries_max=50)
    assert again.statistics()["scan_complete"] == 0
    assert finish_scan(again) > 5  # in pieces
    assert again.statistics()["scan_complete"] == 1
    assert again.statistics()["bytes"] == 31 * SLOT
    expected = {(name_of(number), True) for number in range(30)} | {(name_of(1, OTHER_SPACE), True)}
    assert set(changes_of(again)) == expected
    assert [get(again, number) for number in range(30)] == [OK] * 30
    assert again.check() == []


def test_recency_survives_a_restart(new_tier, clock):
    tier = new_tier(touch_period_s=5)
    put_all(tier, range(6), clock)
    clock.now += 10
    assert get(tier, 0) is OK
    clock.now += 1
    tier.touch([name_of(1)])
    tier.close()
    again = new_tier(blocks=6)
    put_all(again, range(10, 14), clock)
    assert has(again, range(6)) == [0, 1]
    put_all(again, [14], clock)
    assert has(again, range(6)) == [1]


def test_a_use_is_written_to_the_file_at_most_once_per_period(new_tier, root, clock):
    tier = new_tier(touch_period_s=60)
    put_all(tier, [1])
    written_at = clock.now
    assert path_of(root, 1).stat().st_mtime == written_at
    clock.now += 59
    assert get(tier, 1) is OK
    tier.touch([name_of(1)])
    assert path_of(root, 1).stat().st_mtime == written_at
    clock.now += 1
    assert get(tier, 1) is OK
    assert path_of(root, 1).stat().st_mtime == clock.now
    clock.now += 60
    tier.touch([name_of(1)])
    assert path_of(root, 1).stat().st_mtime == clock.now


def test_blocks_from_before_go_before_blocks_written_during_the_scan(new_tier, clock):
    tier = new_tier()
    put_all(tier, range(5), clock)
    tier.close()
    clock.now -= 100  # even if the clock says that the new ones are older
    again = new_tier(blocks=10, is_scanned=False)
    put_all(again, range(10, 15), clock)
    finish_scan(again)
    assert again.statistics()["blocks"] == 10
    put_all(again, range(20, 25), clock)
    assert has(again, range(25)) == [10, 11, 12, 13, 14, 20, 21, 22, 23, 24]


def test_a_smaller_capacity_after_a_restart_evicts_the_oldest(new_tier, root, clock):
    tier = new_tier()
    put_all(tier, range(20), clock)
    tier.close()
    again = new_tier(blocks=8, is_scanned=False, scan_entries_max=5)
    finish_scan(again)
    assert has(again, range(20)) == list(range(12, 20))
    assert len(files_of(root)) == 8
    assert again.statistics()["evicted"] == 12
    told = Counter(changes_of(again))
    assert sum(told.values()) == 32
    assert again.check() == []


def test_the_capacity_holds_while_the_scan_runs(new_tier, root, clock):
    """Files not found yet count too, or the quota would be doubled for a while."""
    tier = new_tier(blocks=10)
    put_all(tier, range(10), clock)
    tier.close()
    again = new_tier(blocks=10, is_scanned=False, scan_entries_max=1)
    for number in range(100, 140):
        again.scan()
        assert put(again, number) in (OK, FULL)
        assert disk_bytes(root / SPACE.hex()) <= 10 * SLOT
    finish_scan(again)
    put_all(again, range(200, 210), clock)
    assert has(again, range(200, 210)) == list(range(200, 210))
    assert again.check() == []


def test_while_the_scan_runs_unknown_means_try(new_tier, root):
    tier = new_tier()
    put_all(tier, range(4))
    tier.close()
    again = new_tier(is_scanned=False)
    empty(path_of(root, 3))
    assert again.probe([name_of(number) for number in (0, 3, 99)]) == [OK, MISSING, MISSING]
    assert [get(again, number) for number in (0, 3, 99)] == [OK, MISSING, MISSING]
    assert changes_of(again) == [(name_of(0), True)]
    assert drop(again, 1) is OK
    assert put(again, 1) is OK
    finish_scan(again)
    assert has(again, range(5)) == [0, 1, 2]
    assert again.statistics()["bytes"] == 3 * SLOT
    assert again.check() == []


def test_the_scan_does_not_disturb_what_the_running_tier_does(new_tier, root):
    tier = new_tier()
    put_all(tier, range(40))
    tier.close()
    again = new_tier(is_scanned=False, scan_entries_max=20)
    dice = random.Random(5)
    expected = set(range(40))
    while not again.scan():
        number = dice.randrange(60)
        if dice.random() < 0.5:
            assert drop(again, number) is OK
            expected.discard(number)
        else:
            assert put(again, number) is OK
            expected.add(number)
    assert set(has(again, range(60))) == expected
    held = set()
    for name, is_added in changes_of(again):
        (held.add if is_added else held.remove)(name)
    assert held == {name_of(number) for number in expected}
    assert again.check() == []


@pytest.mark.parametrize("seed", range(2))
def test_everything_at_once_while_the_scan_runs(new_tier, root, seed):
    tier = new_tier()
    put_all(tier, range(60))
    tier.close()
    again = new_tier(blocks=50, io="buffered", is_scanned=False, scan_entries_max=10)
    known = {name_of(number) for number in range(200)}
    seen = []

    def work(own: int) -> None:
        dice = random.Random(10 * seed + own)
        for _ in range(80):
            # Writers never share a name; everything else does.
            number = 4 * dice.randrange(50) + own
            outcome = put(again, number)
            assert outcome in (OK, FULL)
            other = dice.randrange(200)
            assert get(again, other) in (OK, MISSING)
            again.probe([name_of(other)])
            again.touch([name_of(dice.randrange(200))])
            if dice.random() < 0.2:
                assert drop(again, dice.randrange(200)) is OK
            if dice.random() < 0.02:
                again.purge(SPACE, 0.5)
            seen.append(again.statistics()["bytes"])

    threads = [InThread(work, own) for own in range(4)]
    finish_scan(again)
    for thread in threads:
        thread.join()
    finish_scan(again)
    assert again.statistics()["bytes"] <= 50 * SLOT
    held = set()
    for name, is_added in changes_of(again):
        (held.add if is_added else held.remove)(name)
    assert held <= known
    assert len(held) == again.statistics()["blocks"]
    assert again.check() == []


def test_bytes_of_many_files_are_estimated_from_a_part(new_tier, root):
    tier = new_tier(io="buffered")
    view = slot_of(0, 1000)
    for number in range(600):
        tier.write([name_of(number)], [view])
    layout = Layout(root)
    assert measure(layout) == 600_000
    assert 300_000 < measure(layout, entries_max=100) < 900_000


def test_temporary_files_of_dead_writers_are_swept(new_tier, root):
    """Faults L3; but never those of a living peer."""
    tier = new_tier()
    put_all(tier, [1])
    folder = path_of(root, 1).parent
    tier.close()
    (folder / ".tmp.0123.7").write_bytes(b"torn")
    (root / ".tmp.0123.8").write_bytes(b"torn")
    again = new_tier(is_scanned=False)
    assert again.read([BlockName(SPACE, BlockKey(b".tmp"))], [new_view()]) == [MISSING]
    later = folder / ".tmp.4567.9"
    later.write_bytes(b"of a peer that lives")
    os.utime(later)
    # Its time must be after our start even where the file system's clock is coarse.
    while later.stat().st_ctime <= root.stat().st_mtime:
        os.utime(later)
    finish_scan(again)
    assert files_of(root) == [later, path_of(root, 1)]
    assert again.statistics()["foreign_files"] == 1


def test_foreign_names_are_left_alone_and_reported(new_tier, root):
    tier = new_tier()
    put_all(tier, [1])
    tier.close()
    folder = path_of(root, 1).parent
    text = path_of(root, 1).name
    foreign = [
        root / "README",
        root / "lost+found",
        root / SPACE.hex() / "notes",
        folder / "zz",
        folder / text.upper(),
        folder / ("00" * 66),
        root / SPACE.hex() / f"{int(text[:2], 16) ^ 1:02x}" / text,  # in the wrong directory
    ]
    for path in foreign:
        path.write_bytes(bytes(SLOT))
    (folder / (text[:2] + "01")).symlink_to(folder / "zz")
    (root / OTHER_SPACE.hex()).symlink_to(root / SPACE.hex())
    os.mkfifo(folder / (text[:2] + "02"))
    again = new_tier()
    assert again.statistics()["foreign_files"] == len(foreign) + 3
    assert again.statistics()["blocks"] == 1
    assert again.purge(None, None) == 1
    assert all(path.exists() for path in foreign)
    assert again.check() == []


def test_empty_files_of_failed_writers_are_removed(new_tier, root):
    """Faults L5."""
    tier = new_tier()
    put_all(tier, [1, 2])
    tier.close()
    empty(path_of(root, 1))
    again = new_tier()
    assert files_of(root) == [path_of(root, 2)]
    assert again.statistics()["corrupt"] == 1
    assert again.check() == []


# ---- the lock ----------------------------------------------------------------------------------


@pytest.mark.parametrize("owner", ["", "another"])
def test_a_second_tier_on_one_directory_is_refused(new_tier, owner):
    """Faults M8."""
    tier = new_tier(options={"owner": "daemon 7"})
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} \(owner daemon 7\)"):
        new_tier(options={"owner": owner} if owner else {})
    tier.close()
    new_tier()


def test_tiers_without_owner_never_take_over(new_tier):
    new_tier()
    with pytest.raises(ConfigError, match=f"process {os.getpid()}"):
        new_tier()


def test_an_io_process_takes_over_from_one_that_hangs(new_tier):
    ours = {"owner": "daemon 7"}
    hanging = new_tier(options=ours)
    put_all(hanging, [1])
    successor = new_tier(options=ours)
    assert get(successor, 1) is OK
    assert put(successor, 2) is OK
    hanging.close()  # it is gone at last
    assert successor.scan()
    with pytest.raises(ConfigError):
        new_tier(options={"owner": "daemon 8"})
    successor.close()
    new_tier(options={"owner": "daemon 8"})


def test_the_lock_is_taken_by_writing_too(new_tier):
    ours = {"owner": "daemon 7"}
    hanging = new_tier(options=ours)
    successor = new_tier(options=ours)
    hanging.close()
    put_all(successor, range(64))
    with pytest.raises(ConfigError):
        new_tier(options={"owner": "daemon 8"})


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_a_lock_file_must_be_a_file(new_tier, root, kind):
    root.mkdir()
    if kind == "fifo":
        os.mkfifo(root / ".lock")
    else:
        (root / ".lock").symlink_to(root / "elsewhere")
    with pytest.raises(ConfigError):
        new_tier()
    assert not (root / "elsewhere").exists()


def test_a_root_that_cannot_be_used_is_refused(new_tier, root, tmp_path):
    (tmp_path / "real").mkdir()
    root.symlink_to(tmp_path / "real")
    (tmp_path / "file").write_bytes(b"")
    for path in (root, tmp_path / "file", None):
        with pytest.raises(ConfigError):
            new_tier(path=path and str(path))
    with pytest.raises(ConfigError, match="io 'fast'"):
        new_tier(path=str(tmp_path / "real"), io="fast")


# ---- purge, probe, audit -----------------------------------------------------------------------


def test_purge_removes_a_namespace_and_its_directories(new_tier, root):
    tier = new_tier()
    put_all(tier, range(5))
    assert put(tier, 1, space=OTHER_SPACE) is OK
    assert tier.purge(SPACE, None) == 5
    assert files_of(root) == [path_of(root, 1, OTHER_SPACE)]
    assert not (root / SPACE.hex()).exists()
    assert put(tier, 1) is OK
    assert tier.purge(None, None) == 2
    assert tier.purge(None, None) == 0
    assert tier.check() == []


def test_purge_goes_by_last_use(new_tier, clock):
    tier = new_tier()
    put_all(tier, range(4))
    clock.now += 100
    assert get(tier, 0) is OK
    tier.touch([name_of(1)])
    put_all(tier, [9])
    clock.now += 50
    assert tier.purge(SPACE, 100) == 2
    assert has(tier, range(10)) == [0, 1, 9]


def test_purge_finds_blocks_that_the_scan_has_not(new_tier, root, clock):
    tier = new_tier()
    put_all(tier, range(10), clock)
    assert put(tier, 1, space=OTHER_SPACE) is OK
    tier.close()
    clock.now += 100
    again = new_tier(is_scanned=False)
    assert again.purge(SPACE, 105) == 5
    assert again.purge(SPACE, None) == 5
    finish_scan(again)
    assert again.statistics()["blocks"] == 1
    assert files_of(root) == [path_of(root, 1, OTHER_SPACE)]
    assert again.check() == []


def count_calls(monkeypatch) -> Counter:
    """Count calls of the operating system that look for files."""
    calls = Counter()

    def counted(text, call):
        def count(*arguments, **more):
            calls[text] += 1
            return call(*arguments, **more)

        return count

    for text in ("open", "stat", "scandir", "listdir"):
        monkeypatch.setattr(os, text, counted(text, getattr(os, text)))
    return calls


def test_a_probe_costs_no_call_after_the_scan_and_few_before(new_tier, monkeypatch):
    """Faults M1: a lookup must not read directories."""
    tier = new_tier(blocks=3000, io="buffered")
    view = slot_of(0, 16)
    for number in range(500):
        tier.write([name_of(number)], [view])
    names = [name_of(number) for number in range(480, 544)]
    with monkeypatch.context() as patch:
        calls = count_calls(patch)
        assert tier.probe(names).count(OK) == 20
        assert calls.total() == 0
    tier.close()
    again = new_tier(is_scanned=False)
    with monkeypatch.context() as patch:
        calls = count_calls(patch)
        assert again.probe(names).count(OK) == 20
        assert calls["stat"] == len(names)
        assert calls["open"] <= 3 * len(names)
        assert calls.keys() <= {"stat", "open"}


def test_the_audit_finds_every_kind_of_difference(new_tier, root):
    tier = new_tier()
    put_all(tier, range(5))
    assert tier.check() == []
    path_of(root, 0).unlink()
    cut(path_of(root, 1))
    be_fifo(path_of(root, 2))
    shutil.copy(path_of(root, 3), path_of(root, 3).with_name(path_of(root, 3).name[:-2] + "aa"))
    found = "\n".join(tier.check())
    assert f"{path_of(root, 0).name}: is in the books and has no file" in found
    assert f"{path_of(root, 1).name}: has {SLOT - 1} bytes" in found
    assert f"{path_of(root, 2).name}: has None bytes" in found
    assert "is a file that the books do not know" in found
    assert "files have" in found


def test_the_audit_says_at_most_100_things(new_tier, root):
    tier = new_tier(io="buffered")
    view = slot_of(0, 16)
    for number in range(150):
        tier.write([name_of(number)], [view])
    shutil.rmtree(root / SPACE.hex())
    assert len(tier.check()) == 100


def test_closing_leaves_the_blocks(new_tier, root):
    tier = new_tier()
    put_all(tier, [1])
    tier.close()
    assert path_of(root, 1).exists()


# ---- shortages of our own process --------------------------------------------------------------


class RaisingTransfer(FaultyTransfer):
    """Raises what no file system raises, as an interpreter without threads does."""

    is_raising = False

    def read(self, file: int, view: memoryview) -> int:
        if self.is_raising:
            raise RuntimeError("can't start new thread")
        return super().read(file, view)

    def write(self, file: int, view: memoryview) -> int:
        if self.is_raising:
            raise RuntimeError("can't start new thread")
        return super().write(file, view)


def test_whatever_is_raised_no_block_stays_pinned_and_no_byte_stays_taken(new_tier, root, clock):
    transfer = RaisingTransfer()
    tier = new_tier(blocks=2, transfer=transfer)
    put_all(tier, [1, 2], clock)
    transfer.is_raising = True
    for call in (get, put):
        with pytest.raises(RuntimeError):
            call(tier, 1 if call is get else 3)
    transfer.is_raising = False
    assert tier.check() == []
    put_all(tier, [4, 5], clock)
    assert has(tier, [4, 5]) == [4, 5]
    assert tier.statistics()["blocks"] == 2


def test_a_scan_that_ran_out_of_descriptors_begins_again(new_tier, root, clock):
    """Blocks that it did not find would not count against the capacity."""
    first = new_tier(blocks=8)
    put_all(first, range(8), clock)
    first.close()
    second = new_tier(blocks=8, is_scanned=False)
    held, most = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, most[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        assert not second.scan()
    finally:
        for file in held:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    finish_scan(second)
    assert has(second, range(8)) == list(range(8))
    put_all(second, range(8, 16), clock)
    assert len(list(root.glob("*/*/*"))) == 8
    assert second.check() == []


def test_files_with_hex_names_of_somebody_else_are_left_alone(new_tier, root):
    root.mkdir()
    other = root / "2024" / "01" / "0102"
    other.parent.mkdir(parents=True)
    other.write_text("a report")
    tier = new_tier()
    tier.purge(None, None)
    assert other.read_text() == "a report"
    assert tier.check() == []
