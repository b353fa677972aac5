"""The stage of ``tierkv bench fs``: memory, a real tier, plain files, and the arms that move them.

Rule 1: an arm returns the seconds of its calls; what surrounds them (new content, emptying,
comparing) is never in them.
Rule 2: both arms of a comparison move the same slots with the same crew.
Rule 3: the content of a block changes with every sample, page by page, so that an old file, a
shifted or a half-written one differs.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierkv.errors import TierKVError
from tierkv.hashing import block_key
from tierkv.service.io_process import PIECE_BYTES_MAX
from tierkv.service.io_wire import CHANGES_MAX
from tierkv.tiers.base import BlockName, Outcome, TierSettings, read_verified, write_sealed
from tierkv.tiers.fs.layout import file_of
from tierkv.tiers.fs.tier import BATCH_MAX, FsTier
from tierkv.types import FRAME_BYTES, PAGE_BYTES, NamespaceId, slot_bytes_of
from tierkv.units import approximate_size

ROOM_SHARE = 3  # tier, the reference's file or files, and fio's or what was not yet given back
SEED = 11
_SPACE = NamespaceId(b"F" * 32)
_WORDS_PER_PAGE = PAGE_BYTES // 8
_DEFAULTS = TierSettings("fs")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured.

    Attributes:
        path: directory on the disk that is measured.
        block_bytes: payload of a block; a slot has the frame besides.
        sample_bytes: payload that one sample moves, cut to whole blocks.
        io: as in the tier's settings; the reference follows what the tier chose.
    """

    path: Path
    block_bytes: int = 2 << 20
    sample_bytes: int = 1 << 30
    pairs: int = 9
    write_threads: int = _DEFAULTS.write_threads
    read_threads: int = _DEFAULTS.read_threads
    io: str = _DEFAULTS.io

    @property
    def slot_bytes(self) -> int:
        return slot_bytes_of(self.block_bytes)

    @property
    def blocks(self) -> int:
        return max(1, self.sample_bytes // self.block_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes that one sample moves, frames included."""
        return self.blocks * self.slot_bytes


def require_room(plan: Plan) -> None:
    """Raise TierKVError if the disk cannot take what a run writes."""
    needed = ROOM_SHARE * plan.total_bytes
    try:
        free = shutil.disk_usage(plan.path).free
    except OSError as error:
        raise TierKVError(
            f"{plan.path}: cannot be used: {error.strerror}; name a directory"
        ) from error
    if free < needed:
        raise TierKVError(
            f"{plan.path} has {approximate_size(free)} free and bench fs needs "
            f"{approximate_size(needed)}, {ROOM_SHARE} times --bytes; lower --bytes or name "
            "another --path"
        )


class Crew:
    """Threads that share pieces of work, as those of an I/O process do."""

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, "bench")
        self._left: Iterator[int] = iter(())

    def run(self, pieces: int, act: Callable[[int], None]) -> float:
        """Let the threads act on the pieces 0, 1, ...; seconds until the last is done."""
        self._left = iter(range(pieces))  # taking the next one is atomic
        start = time.perf_counter()
        try:
            list(self._pool.map(self._work, itertools.repeat(act, self._threads)))
        finally:
            self._left = iter(())  # after Ctrl-C, or an error in one thread, all stop
        return time.perf_counter() - start

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()

    def _work(self, act: Callable[[int], None]) -> None:
        for_me = next(self._left, None)
        while for_me is not None:
            act(for_me)
            for_me = next(self._left, None)


class Arena:
    """Slots in memory, aligned for direct I/O, every page touched.

    Attributes:
        words: shape (blocks, slot_bytes / 8).
        views: one per slot.
    """

    def __init__(self, plan: Plan) -> None:
        self._map = mmap.mmap(-1, plan.total_bytes)
        self.words: npt.NDArray[np.uint64] = np.frombuffer(self._map, np.uint64).reshape(
            plan.blocks, plan.slot_bytes // 8
        )
        self.words[:] = 0
        whole, size = memoryview(self._map), plan.slot_bytes
        self.views = [whole[at * size : (at + 1) * size] for at in range(plan.blocks)]


class Stage:
    """Everything that a run needs, and its arms.

    Attributes:
        is_direct: both arms go past the page cache.
        problems: what was read and had not been written so.
    """

    def __init__(self, folder: Path, plan: Plan, tier: FsTier) -> None:
        self.plan = plan
        self.is_direct = bool(tier.statistics()["is_direct"])
        self.problems: list[str] = []
        self.writers, self.readers = Crew(plan.write_threads), Crew(plan.read_threads)
        self._tier = tier
        self._folder = folder
        self.source, self._target = Arena(plan), Arena(plan)
        body = np.random.default_rng(SEED).integers(0, 1 << 63, plan.slot_bytes // 8, np.uint64)
        self.source.words[:] = body
        self._names: list[BlockName] = []
        self._sample = 0
        self._flags = os.O_DIRECT if self.is_direct else 0
        self._batch = max(1, min(BATCH_MAX, PIECE_BYTES_MAX // plan.slot_bytes))
        self._pieces = -(-plan.blocks // self._batch)
        self._file = os.open(folder / "file", os.O_RDWR | os.O_CREAT | self._flags, 0o600)
        self._files: list[Path] = []
        for byte in range(256):
            (folder / "files" / f"{byte:02x}").mkdir(parents=True)

    def close(self) -> None:
        """End the threads and close what is open. Files are the caller's."""
        self.writers.close()
        self.readers.close()
        os.close(self._file)

    # ---- around the arms -----------------------------------------------------------------------

    def new_content(self) -> None:
        """Give every block a new name and new bytes."""
        self._sample += 1
        marks = (self._sample << 32) + np.arange(self.plan.blocks, dtype=np.uint64)
        self.source.words[:, FRAME_BYTES // 8 :: _WORDS_PER_PAGE] = marks[:, None]
        names = []
        for at in range(self.plan.blocks):
            text = f"{self._sample}:{at}"
            digest = hashlib.blake2b(text.encode(), digest_size=32).digest()
            names.append(BlockName(_SPACE, block_key(digest)))
        self._names = names

    def settle(self) -> None:
        """Let the file system finish what earlier arms left to it."""
        os.fsync(self._file)
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def fill(self) -> None:
        """Bring the tier to its capacity, and the reference's file to its size."""
        self.new_content()
        self.write_tier()
        self.overwrite_file()

    def empty(self) -> None:
        """Remove all blocks from the tier."""
        self._tier.purge(None, None)
        self._tell_changes()

    def verify(self) -> None:
        """Read everything back from the tier and compare."""
        self.forget_reads()
        self.read_tier()
        self.verify_reads()

    def forget_reads(self) -> None:
        """Nothing that an earlier read brought may pass for what the next one brings."""
        self._target.words[:] = 0

    def verify_reads(self) -> None:
        """Compare what was read with what was written, every byte of it."""
        pairs = zip(self.source.words, self._target.words, strict=True)
        wrong = sum(not np.array_equal(source, target) for source, target in pairs)
        self.expect(wrong == 0, f"{wrong} blocks are not what was written")

    def expect(self, is_right: bool, problem: str) -> None:
        """Note a wrong result; it fails the bench."""
        if not is_right and problem not in self.problems:
            self.problems.append(problem)

    # ---- our arms ------------------------------------------------------------------------------

    def write_tier(self) -> float:
        """Seconds to write all blocks under their new names."""
        before = self._tier.statistics()
        is_full = before["bytes"] + self.plan.total_bytes > before["capacity"]
        seconds = self.writers.run(self._pieces, self._write_piece)
        recycled = self._tier.statistics()["recycled"] - before["recycled"]
        expected = self.plan.blocks if is_full else 0
        self.expect(recycled == expected, f"{recycled} files were recycled, not {expected}")
        return seconds

    def read_tier(self) -> float:
        """Seconds to read and verify all blocks."""
        return self.readers.run(self._pieces, self._read_piece)

    def _write_piece(self, piece: int) -> None:
        part = self._part(piece)
        outcomes = write_sealed(self._tier, self._names[part], self.source.views[part])
        self._tell_changes()
        self.expect(outcomes == [Outcome.OK] * len(outcomes), "the tier refused a write")

    def _read_piece(self, piece: int) -> None:
        part = self._part(piece)
        outcomes = read_verified(self._tier, self._names[part], self._target.views[part])
        self._tell_changes()
        self.expect(outcomes == [Outcome.OK] * len(outcomes), "the tier did not read a block")

    def _tell_changes(self) -> None:
        while self._tier.take_changes(CHANGES_MAX):
            pass

    def _part(self, piece: int) -> slice:
        return slice(piece * self._batch, (piece + 1) * self._batch)

    # ---- the reference -------------------------------------------------------------------------

    def overwrite_file(self) -> float:
        """Seconds to write all slots to one file; it is preallocated after the first time."""
        return self.writers.run(self._pieces, self._overwrite_piece)

    def write_files(self) -> float:
        """Seconds to write every slot to a new file, shown by a rename."""
        root = self._folder / "files"
        self._files = [root / f"{n.key[0]:02x}" / file_of(n.key) for n in self._names]
        return self.writers.run(self._pieces, self._write_files_piece)

    def remove_files(self) -> None:
        """Remove what `write_files` wrote."""
        for file in self._files:
            file.unlink()

    def read_files(self) -> float:
        """Seconds to read the tier's own files."""
        root = self._folder / "tier" / _SPACE.hex()
        self._files = [root / f"{n.key[0]:02x}" / file_of(n.key) for n in self._names]
        return self.readers.run(self._pieces, self._read_files_piece)

    def _overwrite_piece(self, piece: int) -> None:
        for at in self._numbers(piece):
            moved = os.pwritev(self._file, [self.source.views[at]], at * self.plan.slot_bytes)
            self.expect(moved == self.plan.slot_bytes, "a plain write was short")

    def _write_files_piece(self, piece: int) -> None:
        for at in self._numbers(piece):
            final = self._files[at]
            temporary = final.parent / f".tmp.{at}"
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flags
            file = os.open(temporary, flags, 0o600)
            try:
                moved = os.pwritev(file, [self.source.views[at]], 0)
            finally:
                os.close(file)
            temporary.rename(final)
            self.expect(moved == self.plan.slot_bytes, "a plain write was short")

    def _read_files_piece(self, piece: int) -> None:
        for at in self._numbers(piece):
            file = os.open(self._files[at], os.O_RDONLY | self._flags)
            try:
                moved = os.preadv(file, [self._target.views[at]], 0)
            finally:
                os.close(file)
            self.expect(moved == self.plan.slot_bytes, "a plain read was short")

    def _numbers(self, piece: int) -> range:
        return range(self.plan.blocks)[self._part(piece)]


@contextlib.contextmanager
def open_stage(folder: Path, plan: Plan) -> Iterator[Stage]:
    """A stage in an empty directory, closed at the end.

    Raises:
        ConfigError: the tier cannot use the directory.
    """
    settings = TierSettings(
        "fs", str(folder / "tier"), capacity=plan.total_bytes, reserve=0.0, io=plan.io,
        read_threads=plan.read_threads, write_threads=plan.write_threads,
    )  # fmt: skip
    tier = FsTier(settings)
    try:
        while not tier.scan():
            pass
        stage = Stage(folder, plan, tier)
        try:
            yield stage
        finally:
            stage.close()
    finally:
        tier.close()
