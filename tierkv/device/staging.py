"""The two slow rungs: through a ring of pinned memory, and by blocking calls.

Both need the host's hands, so a thread per direction does it; the thread that computes only waits
where it asks to. The ring is shared by both directions and allocated once.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
import torch

from tierkv.device.base import Descriptors, Direction
from tierkv.device.hooks import DeviceCallError, DeviceHooks
from tierkv.device.verdict import StreamJudge

logger = logging.getLogger(__name__)

REFUSALS_MAX = 3  # staged copies in a row that fail; then blocking calls are made for good
PIECES = 16  # of the ring: as many copies of device and host can overlap
_memmove = ctypes.memmove


class StagingRing:
    """Pinned host memory, cut into pieces that are lent and given back.

    Attributes:
        piece_bytes: the largest copy that goes through in one go.
        size: bytes that it takes, as the allocators of pinned memory round them up.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory
        self.size = 1 << (memory.numel() - 1).bit_length()
        self.piece_bytes = memory.numel() // PIECES
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(PIECES):
            self._free.put(memory.data_ptr() + number * self.piece_bytes)

    @classmethod
    def make(cls, device: torch.device, size: int) -> StagingRing | None:
        """Allocate a ring; None if there is no pinned memory to be had."""
        if size < PIECES:
            return None
        try:
            memory = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning("no pinned memory for staging on %s: %s", device, error)
            return None
        return cls(memory)

    def borrow(self) -> int:
        """Address of a free piece; waits for one."""
        return self._free.get()

    def give_back(self, address: int) -> None:
        """Return a piece; nothing reads or writes it any more."""
        self._free.put(address)


class StagedEvent:
    """The end of copies that a slow lane makes."""

    def __init__(self) -> None:
        self._queued = threading.Event()
        self._ended = threading.Event()
        self._on_device: torch.Event | None = None
        self._is_ok = False

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        """Order the compute after the device's part; the host waits until that is queued."""
        self._queued.wait()
        if self._on_device is not None:
            torch.accelerator.current_stream().wait_event(self._on_device)

    def finish(self) -> None:
        self._ended.wait()

    @property
    def is_ok(self) -> bool:
        return self._ended.is_set() and self._is_ok

    def set_queued(self, on_device: torch.Event | None) -> None:
        """The device's part is queued; None: it has ended. Called by the lane."""
        self._on_device = on_device
        self._queued.set()

    def set_done(self, is_ok: bool) -> None:
        """All bytes are in place, or never will be. Called by the lane."""
        self._is_ok = is_ok
        self._queued.set()
        self._ended.set()


@dataclass(frozen=True, slots=True)
class _Job:
    copies: Descriptors
    computed: torch.Event | None  # what was on the compute stream at submission
    event: StagedEvent


class SlowLane:
    """One direction: a queue and the thread that works it off.

    Args:
        judge: of the stream that the lane's copies run on.
    """

    def __init__(
        self,
        direction: Direction,
        judge: StreamJudge,
        hooks: DeviceHooks,
        ring: StagingRing | None,
        rungs: Counter[str],
    ) -> None:
        self._direction = direction
        self._judge = judge
        self._stream = judge.stream
        self._hooks = hooks
        self._ring = ring
        self._rungs = rungs
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._refusals = 0  # staged copies refused in a row; REFUSALS_MAX for good
        self._unfinished = 0
        self._is_closed = False
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def has_ring(self) -> bool:
        """Whether copies are staged; they block else."""
        return self._ring is not None and self._refusals < REFUSALS_MAX

    @property
    def is_idle(self) -> bool:
        """Whether a copy that is queued on the stream now comes behind all of the lane's."""
        return self._unfinished == 0

    def put(self, copies: Descriptors, computed: torch.Event | None) -> StagedEvent:
        """Queue copies; after `close` they have failed."""
        event = StagedEvent()
        with self._lock:
            if self._is_closed:
                event.set_done(False)
                return event
            self._unfinished += 1
            if self._thread is None:
                name = f"tierkv-slow-{self._direction.value}"
                self._thread = threading.Thread(target=self._work, name=name, daemon=True)
                self._thread.start()
            self._jobs.put(_Job(copies, computed, event))
        return event

    def drain(self) -> None:
        """Wait until all that was put before has ended. Blocks."""
        nothing = np.zeros(0, np.int64)
        if self._thread is not None:
            self.put(Descriptors(nothing, nothing, nothing), None).finish()
            if self._is_closed:
                self._thread.join()

    def close(self) -> None:
        """Finish what is queued and end. Blocks."""
        with self._lock:
            self._is_closed = True
            self._jobs.put(None)
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        torch.accelerator.set_device_index(self._stream.device.index or 0)
        while (job := self._jobs.get()) is not None:
            is_ok = len(job.copies) == 0 or self._copy(job)
            with self._lock:
                self._unfinished -= 1
            job.event.set_done(is_ok)

    def _copy(self, job: _Job) -> bool:
        """Whether all bytes are in place; nothing of it runs any more."""
        mark = self._judge.open()
        try:
            if self._ring is not None and self.has_ring:
                self._copy_staged(job, self._ring)
                self._refusals = 0
            else:
                self._copy_blocking(job)
        except (DeviceCallError, RuntimeError) as error:
            logger.warning("a copy failed: %s", error)
            self._refusals += 1
            mark.fail()
        self._judge.seal(mark)
        mark.wait()
        return mark.is_ok

    def _copy_blocking(self, job: _Job) -> None:
        # Blocking calls are ordered with no stream: neither with the compute nor with the copies
        # that were queued before.
        if job.computed is not None:
            job.computed.synchronize()
        self._judge.judge()
        for device, host, size in _rows(job.copies):
            self._hooks.copy_blocking(self._direction, device, host, size)
        self._rungs["blocking"] += 1

    def _copy_staged(self, job: _Job, ring: StagingRing) -> None:
        if job.computed is not None:
            self._stream.wait_event(job.computed)
        if self._direction is Direction.LOAD:
            self._load_staged(job, ring)
        else:
            self._store_staged(job, ring)
        self._rungs["staged"] += 1

    def _load_staged(self, job: _Job, ring: StagingRing) -> None:
        with _Lent(ring) as lent:
            for device, host, size in _rows(job.copies, ring.piece_bytes):
                if len(lent.pieces) >= PIECES // 2:  # the other direction needs pieces, too
                    lent.take_back()
                piece, copied = lent.borrow(torch.Event(device=self._stream.device))
                _memmove(piece, host, size)
                self._hooks.copy_one(self._direction, device, piece, size, self._stream)
                copied.record(self._stream)
            end = torch.Event(device=self._stream.device)
            end.record(self._stream)
            job.event.set_queued(end)

    def _store_staged(self, job: _Job, ring: StagingRing) -> None:
        with _Lent(ring) as lent:
            for device, host, size in _rows(job.copies, ring.piece_bytes):
                if len(lent.pieces) >= PIECES // 2:
                    lent.take_back()
                piece, copied = lent.borrow(torch.Event(device=self._stream.device), host, size)
                self._hooks.copy_one(self._direction, device, piece, size, self._stream)
                copied.record(self._stream)
            end = torch.Event(device=self._stream.device)
            end.record(self._stream)
            job.event.set_queued(end)


class _Lent:
    """Pieces of the ring that one job has; all of them go back, whatever happens.

    Attributes:
        pieces: address, the event behind its copy, and where its bytes go then: host address and
            size, 0 and 0 for a load.
    """

    def __init__(self, ring: StagingRing) -> None:
        self.pieces: deque[tuple[int, torch.Event, int, int]] = deque()
        self._ring = ring

    def borrow(self, copied: torch.Event, host: int = 0, size: int = 0) -> tuple[int, torch.Event]:
        """One more piece; waits for it."""
        piece = self._ring.borrow()
        self.pieces.append((piece, copied, host, size))
        return piece, copied

    def take_back(self) -> None:
        """Wait for the oldest piece's copy, take its bytes out, and give the piece back.

        Raises:
            RuntimeError: the copy failed; the piece is given back all the same.
        """
        piece, copied, host, size = self.pieces.popleft()
        try:
            copied.synchronize()
            if size:
                _memmove(host, piece, size)
        finally:
            self._ring.give_back(piece)

    def __enter__(self) -> _Lent:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        failure: RuntimeError | None = None
        while self.pieces:
            try:
                self.take_back()
            except RuntimeError as found:
                failure = found
        if failure is not None and error is None:
            raise failure


def _rows(copies: Descriptors, most: int = 0) -> list[tuple[int, int, int]]:
    """Device address, host address and size of each copy, those above `most` in pieces."""
    rows = []
    for device, host, size in zip(
        copies.device.tolist(), copies.host.tolist(), copies.sizes.tolist(), strict=True
    ):
        step = most or size
        for at in range(0, size, step):
            rows.append((device + at, host + at, min(step, size - at)))
    return rows
