"""Work for the I/O process of one tier: what waits, what runs, and what is late.

Rule 1: the daemon keeps the backlog; a process gets only what its threads can begin at once, so the
age of a job that was handed out is the age of an operation.
Rule 2: reads and writes have lanes of their own, and a read thread that hangs is not counted, so a
load always finds a thread.
Rule 3: a job ends exactly once: by its outcomes, or when the process that ran it is gone. Until
then nobody may reuse its slots, whatever the deadline says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from tierkv.core.eviction.base import Rows
from tierkv.core.namespace import Namespace
from tierkv.core.values import Job, Op, TierLimits
from tierkv.types import LeaseId, Outcome

HUNG_DEADLINES = 3
FAILURES_MAX = 3
PAUSE_MIN_S = 1.0
PAUSE_MAX_S = 30.0
HUNG_READS_MAX = 32
TASK_SECONDS_MAX = 3_600.0
_UNBOUNDED = (Op.PURGE, Op.CHECK)  # walks of a whole store have no deadline


@dataclass(slots=True, eq=False)
class Work:
    """A job and what the core must know when it ends.

    Attributes:
        rows: the slots of its keys, in order.
        run, first: for a READ the promotion that it belongs to, and the place of its keys in it.
        lease, first: for a PROBE whose question it is, and the place of its keys in it.
        said: for a PROBE what was answered so far.
        task: for a PURGE or CHECK whose work it is.
        done: keys with an outcome.
        epoch: the process that it was handed to.
        is_late: its deadline passed; nobody waits for it any more.
        is_void: a purge came after it; what it wrote is dropped.
    """

    job: Job
    space: Namespace | None
    rows: Rows | None = None
    run: object = None
    first: int = 0
    lease: LeaseId = field(default=LeaseId(0))
    said: list[Outcome] = field(default_factory=list)
    task: int = 0
    done: int = 0
    epoch: int = 0
    asked_at: float = 0.0
    began_at: float = 0.0
    is_late: bool = False
    is_void: bool = False


class Health:
    """Whether operations of one kind are worth a try. Doubling pauses after failures in a row."""

    def __init__(self) -> None:
        self._failures = 0
        self._pause_s = PAUSE_MIN_S
        self._until = 0.0

    def note(self, is_ok: bool, now: float) -> None:
        """Count one outcome."""
        if is_ok:
            self._failures, self._pause_s, self._until = 0, PAUSE_MIN_S, 0.0
            return
        self._failures += 1
        if self._failures >= FAILURES_MAX and now >= self._until:
            self._until = now + self._pause_s
            self._pause_s = min(PAUSE_MAX_S, self._pause_s * 2)

    def is_paused(self, now: float) -> bool:
        """Whether to leave it alone for now."""
        return now < self._until


class Lanes:
    """Jobs of one tier."""

    def __init__(self, limits: TierLimits) -> None:
        self.limits = limits
        self.reads = Health()
        self.writes = Health()
        self.epoch = 0
        self.is_up = False
        self._waiting: dict[bool, deque[Work]] = {True: deque(), False: deque()}
        self._tasks: deque[Work] = deque()
        self._running: dict[int, Work] = {}

    @staticmethod
    def _is_read(work: Work) -> bool:
        return work.job.op in (Op.READ, Op.PROBE)

    def put(self, work: Work, now: float) -> None:
        """Let a job wait for a thread."""
        work.asked_at = now
        if work.job.op in _UNBOUNDED:
            self._tasks.append(work)
        else:
            self._waiting[self._is_read(work)].append(work)

    def _hangs(self, work: Work, now: float) -> bool:
        """Whether an operation takes longer than it may; waiting for a thread does not count."""
        return now - work.began_at >= self.limits.deadline_s

    def _busy(self, is_read: bool, now: float) -> int:
        return sum(
            self._is_read(w) is is_read and not (is_read and self._hangs(w, now))
            for w in self.running_here()
            if w.job.op not in _UNBOUNDED
        )

    def write_room(self, now: float) -> int:
        """Write jobs that could begin now."""
        if not self.is_up or self.writes.is_paused(now):
            return 0
        return self.limits.write_threads - self._busy(False, now) - len(self._waiting[False])

    def take(self, now: float) -> list[Job]:
        """Jobs to hand to the process now."""
        if not self.is_up:
            return []
        begun: list[Work] = []
        for is_read, threads in ((True, self.limits.read_threads),
                                 (False, self.limits.write_threads)):  # fmt: skip
            room = threads - self._busy(is_read, now)
            queue = self._waiting[is_read]
            while queue and room > 0:
                begun.append(queue.popleft())
                room -= 1
        is_task_running = any(w.job.op in _UNBOUNDED for w in self.running_here())
        if self._tasks and not is_task_running:
            begun.append(self._tasks.popleft())
        for work in begun:
            work.began_at, work.epoch = now, self.epoch
            self._running[work.job.id] = work
        return [work.job for work in begun]

    def find(self, job_id: int) -> Work | None:
        """A job that was handed out and has not ended."""
        return self._running.get(job_id)

    def end(self, work: Work) -> None:
        """Forget a job that was handed out."""
        del self._running[work.job.id]

    def running_here(self) -> list[Work]:
        """Jobs of the process that serves now."""
        return [w for w in self._running.values() if w.epoch == self.epoch]

    def all(self) -> Iterator[Work]:
        """Every job that has not ended."""
        yield from self._running.values()
        for queue in (*self._waiting.values(), self._tasks):
            yield from queue

    def newly_late(self, now: float) -> tuple[list[Work], list[Work]]:
        """Jobs whose deadline passed: (still running, never begun; those are forgotten).

        A load is late when its asker has waited for the deadline, a write when it has run for it.
        Only what has run for the deadline speaks against the tier; see `is_failing`.
        """
        deadline = self.limits.deadline_s
        running = []
        for work in self._running.values():
            since = work.asked_at if self._is_read(work) else work.began_at
            is_bounded = work.job.op not in _UNBOUNDED
            if is_bounded and not work.is_late and now - since >= deadline:
                work.is_late = True
                running.append(work)
        queue = self._waiting[True]
        waiting = []
        while queue and now - queue[0].asked_at >= deadline:
            waiting.append(queue.popleft())
        return running, waiting

    def is_failing(self, work: Work, now: float) -> bool:
        """Whether a late job is late because of the tier and not for want of a thread."""
        return work.began_at > 0 and self._hangs(work, now)

    def is_hung(self, now: float) -> bool:
        """Whether the process should be killed and replaced."""
        limit = HUNG_DEADLINES * self.limits.deadline_s
        here = self.running_here()
        bounded = [w for w in here if w.job.op not in _UNBOUNDED]
        return (
            any(now - w.began_at >= limit for w in bounded)
            or any(now - w.began_at >= TASK_SECONDS_MAX for w in here)
            or sum(self._hangs(w, now) and self._is_read(w) for w in bounded)
            >= max(HUNG_READS_MAX, 2 * self.limits.read_threads)
        )

    def has_waiting(self, op: Op) -> bool:
        """Whether a job of this kind waits for a thread."""
        return any(w.job.op is op for w in self._waiting[op in (Op.READ, Op.PROBE)])

    def drop_reads(self, run: object, first: int) -> list[Work]:
        """Forget reads that have not begun, of a run that is cut at `first`."""
        kept: deque[Work] = deque()
        dropped: list[Work] = []
        for work in self._waiting[True]:
            is_of_it = work.run is run and work.first >= first
            (dropped if is_of_it else kept).append(work)
        self._waiting[True] = kept
        return dropped

    def lose_process(self) -> list[Work]:
        """The process ends or is being killed: its jobs, which still own their slots."""
        lost = self.running_here()
        self.epoch += 1
        self.is_up = False
        return lost

    def of_epoch(self, epoch: int) -> list[Work]:
        """Jobs that were handed to a process that is gone now."""
        return [w for w in self._running.values() if w.epoch == epoch]

    def drop_tasks(self, asked_before: float) -> list[Work]:
        """Forget purges and checks that wait since then or longer."""
        dropped = [w for w in self._tasks if w.asked_at <= asked_before]
        self._tasks = deque(w for w in self._tasks if w.asked_at > asked_before)
        return dropped

    def waiting_writes(self, asked_before: float) -> list[Work]:
        """Writes and drops that wait since then or longer."""
        return [w for w in self._waiting[False] if w.asked_at <= asked_before]
