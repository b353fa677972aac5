"""The copy engine of accelerators: side streams, events, and four ways to move the bytes.

One class for every device that torch knows by its device-generic API; what differs is in the hooks.

Rule 1: a copy waits for the compute stream, in both directions: a store for the kernels that write
its blocks, a load for the kernels that still read what it overwrites.
Rule 2: the compute stream waits for a copy where `CopyEvent.wait` says so, and nowhere else.
Rule 3: on the two fast rungs the host neither waits nor copies. The two slow ones run in a thread.
Rule 4: copies of one direction run in the order of their submission, whatever their rung.

The rungs, best first: `batch`, the driver takes a list of copies of registered memory; `single`,
one call per run of registered memory; `staged`, through a ring of pinned memory and a copy by the
host; `blocking`, one blocking call after the other. Which one serves is tried, not asked.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Iterator

import torch

from tierkv.device.base import CopyEvent, Descriptors, Direction
from tierkv.device.facts import CopyFacts
from tierkv.device.hooks import DeviceCallError, DeviceHooks
from tierkv.device.registration import Registration
from tierkv.device.staging import SlowLane, StagedEvent, StagingRing
from tierkv.device.verdict import Mark, StreamJudge

logger = logging.getLogger(__name__)

STAGING_BYTES = 64 << 20
REFUSALS_MAX = 3  # copies in a row that cannot be queued; then a slower way is taken for good


class StreamEvent:
    """The end of copies that were queued on a stream, and of the lists that describe them.

    Args:
        end: on the stream, behind the last copy.
        mark: of the stream's judge; None where the event itself tells of failures.
        kept: what the driver may still read.
    """

    def __init__(
        self, end: torch.Event, mark: Mark | None, is_queued: bool, kept: list[object]
    ) -> None:
        self._end = end
        self._mark = mark
        self._is_queued = is_queued
        self._kept = kept
        self._is_done = False

    def is_done(self) -> bool:
        if not self._is_done:
            self._is_done = self._mark.is_done if self._mark is not None else self._ask()
            if self._is_done:
                self._kept.clear()
        return self._is_done

    def _ask(self) -> bool:
        try:
            return bool(self._end.query())
        except RuntimeError as error:
            logger.warning("a copy failed on the device: %s", error)
            self._is_queued = False
            return True

    def wait(self) -> None:
        torch.accelerator.current_stream().wait_event(self._end)

    def finish(self) -> None:
        if self._mark is not None:
            self._mark.wait()
            return
        try:
            self._end.synchronize()
        except RuntimeError as error:
            logger.warning("a copy failed on the device: %s", error)
            self._is_queued = False

    @property
    def is_ok(self) -> bool:
        return self.is_done() and self._is_queued and (self._mark is None or self._mark.is_ok)


class AcceleratorCopyEngine:
    """Asynchronous copies between an accelerator's memory and the pool.

    Args:
        device: the accelerator; made by the thread that computes on it.
        hooks: its driver's calls.
        staging_bytes: pinned host memory for the rung `staged`; allocated here, once. 0: none.
    Attributes:
        rungs: copies by the rung that moved them.
    """

    def __init__(
        self,
        device: torch.device,
        hooks: DeviceHooks,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self.device = device
        self.rungs: Counter[str] = Counter()
        self._hooks = hooks
        self._has_batch = hooks.has_batch
        self._threads = threading.local()  # those that have set their device
        self._problem = "" if hooks.has_batch else "the driver has no batched copies"
        self._refusals = 0  # copies refused in a row; REFUSALS_MAX for good
        self._registration = Registration(hooks, self._settle)
        self._streams = {direction: _make_stream(device) for direction in Direction}
        self._judges = {
            direction: StreamJudge(stream, f"tierkv-judge-{direction.value}")
            for direction, stream in self._streams.items()
        }
        self._ring = StagingRing.make(device, staging_bytes)
        self._lanes = {
            direction: SlowLane(direction, judge, hooks, self._ring, self.rungs)
            for direction, judge in self._judges.items()
        }

    # ---- host memory ---------------------------------------------------------------------------

    def adopt(self, address: int, size: int, stop: threading.Event) -> None:
        """Make a mapping of the pool fast. Blocks; run it in the background."""
        with self._on_device(), self._hooks.outside_capture():
            self._registration.register(address, size, stop)
        logger.info("copies of %s: rung=%s", self.device, self.rung)

    def abandon(self, address: int, size: int) -> None:
        """Forget a mapping that is about to go. Waits until no copy of it is running."""
        with self._on_device(), self._hooks.outside_capture():
            self._registration.unregister(address, size)

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        """The engine's device is the thread's current one inside; drivers go by that."""
        before, ours = torch.accelerator.current_device_index(), self.device.index or 0
        if before != ours or not hasattr(self._threads, "has_device"):
            torch.accelerator.set_device_index(ours)
            self._threads.has_device = True
        try:
            yield
        finally:
            if before != ours:
                torch.accelerator.set_device_index(before)

    def _settle(self) -> None:
        """Wait until nothing that was submitted before is running."""
        for direction in Direction:
            self._lanes[direction].drain()
            self._judges[direction].judge()

    @property
    def _is_fast(self) -> bool:
        return self._refusals < REFUSALS_MAX

    @property
    def rung(self) -> str:
        """The best rung that all of the pool can have now."""
        facts = self._registration.facts()
        if self._is_fast and facts.asked and facts.registered == facts.asked:
            return "batch" if self._has_batch else "single"
        has_ring = all(lane.has_ring for lane in self._lanes.values())
        return "staged" if has_ring else "blocking"

    @property
    def facts(self) -> CopyFacts:
        """How the copies are made now."""
        known = self._registration.facts()
        return CopyFacts(
            device=str(self.device),
            rung=self.rung,
            registered=known.registered,
            pool=known.asked,
            staging=self._ring.size if self._ring is not None else 0,
            problem=known.problem or self._problem,
        )

    # ---- copies --------------------------------------------------------------------------------

    def mark(self) -> object:
        """What the calling thread has queued for the device so far."""
        computed = torch.Event(device=self.device)
        computed.record(torch.accelerator.current_stream(self.device))
        return computed

    def submit(self, direction: Direction, copies: Descriptors) -> CopyEvent:
        """Queue copies behind those of the same direction. Never waits."""
        return self.submit_after(self.mark(), direction, copies)

    def submit_after(self, mark: object, direction: Direction, copies: Descriptors) -> CopyEvent:
        """`submit`, ordered after what `mark` stands for instead of after everything until now."""
        assert isinstance(mark, torch.Event), "a mark of this engine"
        lane, judge = self._lanes[direction], self._judges[direction]
        # What is covered when it is asked stays so until the copies are queued.
        with self._on_device(), self._registration.lock:
            if not (lane.is_idle and self._is_fast and self._registration.covers(copies)):
                return lane.put(copies, mark)
            stream = self._streams[direction]
            stream.wait_event(mark)
            verdict = None if self._hooks.events_tell_failures else judge.open()
            kept: list[object] = verdict.kept if verdict is not None else []
            is_queued = self._queue(direction, self._registration.split(copies), stream, kept)
            end = torch.Event(device=self.device)
            end.record(stream)
        if verdict is not None:
            judge.seal(verdict)
        return StreamEvent(end, verdict, is_queued, kept)

    def _queue(
        self, direction: Direction, copies: Descriptors, stream: torch.Stream, kept: list[object]
    ) -> bool:
        """Queue copies of registered memory; whether all of them are queued."""
        if len(copies) == 0:
            return True
        refused = ""
        if self._has_batch:
            refused = self._queue_batch(direction, copies, stream, kept)
        if not self._has_batch or refused:
            # Copying some of them twice does no harm, so all go one by one.
            problem = self._queue_singly(direction, copies, stream)
            if problem:
                self._note_refusal(problem)
                return False
        if refused:
            self._has_batch = False  # the copies are all right, so it is the call
            self._problem = refused
            logger.warning("batched copies do not work here, copying singly: %s", refused)
        self._refusals = 0
        return True

    def _queue_batch(
        self, direction: Direction, copies: Descriptors, stream: torch.Stream, kept: list[object]
    ) -> str:
        """Why not; empty if all are queued."""
        try:
            for part in _parts(copies, self._hooks.descriptors_max):
                kept.append(self._hooks.copy_batch(direction, part, stream))
        except DeviceCallError as error:
            return str(error)
        self.rungs["batch"] += 1
        return ""

    def _queue_singly(self, direction: Direction, copies: Descriptors, stream: torch.Stream) -> str:
        """Why not; empty if all are queued."""
        try:
            for device, host, size in zip(
                copies.device.tolist(), copies.host.tolist(), copies.sizes.tolist(), strict=True
            ):
                self._hooks.copy_one(direction, device, host, size, stream)
        except DeviceCallError as error:
            return str(error)
        self.rungs["single"] += 1
        return ""

    def _note_refusal(self, problem: str) -> None:
        logger.warning("a copy could not be queued: %s", problem)
        self._refusals += 1
        if self._refusals == REFUSALS_MAX:
            self._problem = problem
            logger.warning("asynchronous copies do not work here; copies are slower from now on")

    def give_way(self) -> None:
        """Nothing to do: the device copies by itself."""

    def close(self) -> None:
        """Finish what is queued and end. Blocks."""
        for lane in self._lanes.values():
            lane.close()
        for judge in self._judges.values():
            judge.judge()
            judge.close()


def _make_stream(device: torch.device) -> torch.Stream:
    """A stream of the backend's own class: older ones tell the driver's handle there only."""
    backend = getattr(torch, device.type, None)
    return getattr(backend, "Stream", torch.Stream)(device=device)


def _parts(copies: Descriptors, most: int) -> Iterator[Descriptors]:
    for first in range(0, len(copies), most):
        part = slice(first, first + most)
        yield Descriptors(copies.device[part], copies.host[part], copies.sizes[part])


__all__ = ["AcceleratorCopyEngine", "StagedEvent", "StreamEvent"]
