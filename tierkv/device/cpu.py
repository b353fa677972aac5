"""The copy engine of a CPU "device": a thread per direction and events of its own.

The engine's compute is the caller's thread, so an event's wait blocks the caller. torch has no CPU
events, and a copy inside the hook would pass every output test while overlapping nothing.
`memmove` through ctypes gives the interpreter lock up, so copies run beside the forward.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time

from tierkv.device.base import CopyEngine, CopyEvent, Descriptors, Direction

GIVE_WAY_S = 0.0005
_memmove = ctypes.memmove


class CpuCopyEvent:
    """End of a copy on a CPU device."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def finish(self) -> None:
        self._ended.wait()

    @property
    def is_ok(self) -> bool:
        return self._ended.is_set()  # a memmove has no way to fail

    def set_done(self) -> None:
        """Called by the copying thread."""
        self._ended.set()


class _Lane:
    """One direction: a queue and the thread that works it off."""

    def __init__(self, direction: Direction) -> None:
        self._direction = direction
        self._jobs: queue.SimpleQueue[tuple[Descriptors, CpuCopyEvent] | None] = queue.SimpleQueue()
        name = f"tierkv-{direction.value}"
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def put(self, copies: Descriptors, event: CpuCopyEvent) -> None:
        self._jobs.put((copies, event))

    def let_go(self) -> None:
        self._jobs.put(None)

    def close(self) -> None:
        self.let_go()
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            copies, event = job
            copy_now(self._direction, copies)
            event.set_done()


class CpuCopyEngine:
    """Copies in two threads, one per direction, each first in, first out."""

    def __init__(self) -> None:
        self._lanes = {direction: _Lane(direction) for direction in Direction}

    def submit(self, direction: Direction, copies: Descriptors) -> CopyEvent:
        event = CpuCopyEvent()
        self._lanes[direction].put(copies, event)
        return event

    def give_way(self) -> None:
        """Pause shortly: a caller that spins keeps the interpreter lock from the copying threads,
        which then wait the interpreter's switch interval for every single copy.
        """
        time.sleep(GIVE_WAY_S)

    def let_go(self) -> None:
        """End when what is queued is done. Never waits; the garbage collector may call it."""
        for lane in self._lanes.values():
            lane.let_go()

    def close(self) -> None:
        for lane in self._lanes.values():
            lane.close()


def copy_now(direction: Direction, copies: Descriptors) -> None:
    """Copy in this thread."""
    sources, targets = copies.host, copies.device
    if direction is Direction.STORE:
        sources, targets = targets, sources
    for source, target, size in zip(
        sources.tolist(), targets.tolist(), copies.sizes.tolist(), strict=True
    ):
        _memmove(target, source, size)


def create_cpu_engine() -> CopyEngine:
    """The copy engine of CPU devices."""
    return CpuCopyEngine()
