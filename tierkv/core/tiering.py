"""The tiering manager: DRAM is the gateway tier, and this is its traffic with the tiers below.

It decides what is probed, promoted, demoted and dropped, and returns the work as jobs; somebody
else does it and tells the outcomes. It has no clock: `now` is an argument.
Rule 1: a tier that is late, full, damaged or gone costs cache entries and nothing else.
Rule 2: an indexed tier tells what it holds through its changes alone; others are asked, and what
they said is remembered until a read proves it wrong.
Rule 3: a purge is acknowledged when no older job is left that could bring a purged block back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tierkv.core.books import Books
from tierkv.core.demotion import Cleaner
from tierkv.core.lanes import Lanes, Work
from tierkv.core.leases import Lease
from tierkv.core.namespace import Namespace, State
from tierkv.core.presence import Presence
from tierkv.core.promotion import PromotedRun, Promoter
from tierkv.core.values import Job, Op, TaskEnded, TierLimits
from tierkv.core.work import WorkFactory
from tierkv.types import BlockKey, NamespaceId, Outcome

TIERS_MAX = 8  # one bit of a byte each
TASK_WAIT_S = 30.0  # for a tier that is not up
_BLOCK_OPS = (Op.READ, Op.PROBE, Op.WRITE, Op.DROP)


@dataclass(slots=True, eq=False)
class Task:
    """A purge or a check that waits for tiers.

    Attributes:
        waits: jobs that must end first.
        blocks: (tier, namespace) that nothing is promoted from meanwhile.
    """

    id: int
    asked_at: float
    waits: set[int] = field(default_factory=set)
    dropped: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    blocks: list[tuple[int, bytes | None]] = field(default_factory=list)


class TieringManager:
    """Moves blocks between DRAM and the secondary tiers, fastest tier first."""

    def __init__(self, books: Books, tiers: Sequence[TierLimits] = ()) -> None:
        assert len(tiers) <= TIERS_MAX, "debts are bits of a byte"
        self.lanes = [Lanes(limits) for limits in tiers]
        self.presence = Presence(len(tiers))
        factory = WorkFactory()
        self.cleaner = Cleaner(books, self.presence, self.lanes, factory)
        self.promoter = Promoter(books, self.presence, self.lanes, factory)
        self._books = books
        self._factory = factory
        self._tasks: dict[int, Task] = {}
        self._task_count = 0
        books.watcher = self.cleaner
        books.has_tiers = bool(tiers)
        self.promoter.on_dropped = self._read_was_dropped

    @property
    def tasks(self) -> int:
        """Purges and checks that have not ended."""
        return len(self._tasks)

    def advance(self, space: Namespace) -> None:
        """A block of an engine came or went: what was read behind it may be readable now."""
        if self.promoter.runs:
            self.promoter.advance(space)

    @property
    def names(self) -> list[str]:
        return [lane.limits.name for lane in self.lanes]

    # ---- for lookups ---------------------------------------------------------------------------

    def may_have(self, lease_space: NamespaceId, key: BlockKey, now: float) -> bool:
        """Whether a tier has a block, or may have it."""
        if not self.lanes:
            return False
        return self.promoter.may_have(self._books.spaces[lease_space], key, now)

    def extend(self, lease: Lease, before: int, keys: Sequence[BlockKey], now: float) -> None:
        """Let a lease grow over what tiers hold behind the row `before`."""
        self.promoter.extend(lease, before, keys, now)

    # ---- jobs ----------------------------------------------------------------------------------

    def take_jobs(self, now: float) -> list[Job]:
        """Work for the I/O processes that their threads can begin now."""
        jobs: list[Job] = []
        touch = self.cleaner.next_touch()
        if touch is not None:
            self.lanes[touch.job.tier].put(touch, now)
        for tier, lane in enumerate(self.lanes):
            for _ in range(lane.write_room(now)):
                work = self.cleaner.next_work(tier, now)
                if work is None:
                    break
                lane.put(work, now)
            jobs += lane.take(now)
        return jobs

    def outcomes(self, tier: int, job_id: int, outcomes: Sequence[Outcome], now: float) -> None:
        """Operations on the next keys of a job ended, in the order of its keys.

        Answers for unknown jobs, or from a process that no longer serves, are counted and ignored.
        """
        lane = self.lanes[tier]
        work = lane.find(job_id)
        if work is None or work.epoch != lane.epoch:
            self._books.counters["unknown_jobs"] += 1
            return
        if len(outcomes) > len(work.job.keys) - work.done:
            self._books.counters["unknown_jobs"] += 1
            return
        self._ended(work, outcomes, now)

    def _ended(self, work: Work, outcomes: Sequence[Outcome], now: float) -> None:
        tier = work.job.tier
        lane = self.lanes[tier]
        at = work.done
        work.done += len(outcomes)
        is_done = work.done == len(work.job.keys)
        if is_done:
            lane.end(work)
        self._note_health(lane, work, outcomes, now)
        followers: list[Work] = []
        match work.job.op:
            case Op.READ:
                self.promoter.read_ended(work, at, outcomes)
            case Op.PROBE:
                work.said += outcomes
                if is_done:
                    self.promoter.probe_ended(work, work.said, now)
            case Op.DROP if any(outcome is not Outcome.OK for outcome in outcomes):
                self._note_problem(work, "a purged block could not be dropped")
            case Op.WRITE:
                drops = self.cleaner.write_ended(work, at, outcomes)
                if drops and work.space is not None:
                    followers = [self._factory.on_keys(Op.DROP, tier, work.space, drops)]
                    lane.put(followers[0], now)
            case _:
                pass
        self._forward_waits(work, followers, is_done)
        if is_done and work.job.op is Op.WRITE and work.space is not None:
            self._books.handover.continue_draining(work.space, True)

    @staticmethod
    def _note_health(lane: Lanes, work: Work, outcomes: Sequence[Outcome], now: float) -> None:
        if work.job.op not in (Op.READ, Op.PROBE, Op.WRITE) or work.epoch != lane.epoch:
            return
        health = lane.writes if work.job.op is Op.WRITE else lane.reads
        for outcome in outcomes:
            is_ok = outcome not in (Outcome.FAILED, Outcome.FULL)
            if is_ok or not work.is_late:  # a late failure was counted when it was late
                health.note(is_ok, now)

    def store_ended(
        self, tier: int, job_id: int, count: int, problems: Sequence[str], now: float
    ) -> None:
        """A purge or check of one tier ended.

        Args:
            count: blocks removed, or blocks that the tier has by its own books.
        """
        lane = self.lanes[tier]
        work = lane.find(job_id)
        if work is None:
            self._books.counters["unknown_jobs"] += 1
            return
        lane.end(work)
        task = self._tasks.get(work.task)
        if task is None:
            return
        name = lane.limits.name
        if work.job.op is Op.PURGE:
            task.dropped[name] = task.dropped.get(name, 0) + count
        elif self._is_quiet(tier) and count != self.presence.counts[tier]:
            known = self.presence.counts[tier]
            task.problems.append(f"{name}: holds {count} blocks, the daemon knows of {known}")
        task.problems += [f"{name}: {problem}" for problem in problems]
        self._forward_waits(work, [], True)

    def _is_quiet(self, tier: int) -> bool:
        """Whether nothing is changing what an indexed tier holds."""
        busy = any(w.job.op in (Op.WRITE, Op.DROP, Op.PURGE) for w in self.lanes[tier].all())
        return self.promoter.known_whole[tier] and not busy

    def changed(
        self, tier: int, namespace: NamespaceId, keys: Sequence[BlockKey], is_added: bool
    ) -> None:
        """An indexed tier got blocks, or no longer has them.

        What DRAM still has of the latter is not written again: a tier smaller than DRAM would be
        written without end, and write-back would write more than write-through does.
        """
        if is_added:
            self.presence.add(namespace, keys, tier)
        else:
            self.presence.remove(namespace, keys, tier)

    # ---- life of the processes -----------------------------------------------------------------

    def describe(self, tier: int, is_indexed: bool, is_durable: bool, capacity: int | None) -> None:
        """Learn from the opened store itself what it is. Call it before `started`.

        Args:
            capacity: bytes; None if unbounded.
        """
        lane = self.lanes[tier]
        if lane.limits.is_indexed != is_indexed:
            self.presence.clear(tier)  # another kind of store remembers by another rule
        lane.limits = replace(
            lane.limits, is_indexed=is_indexed, is_durable=is_durable, capacity=capacity
        )

    def started(self, tier: int, knows_all: bool) -> None:
        """A process serves a tier. An unindexed tier never knows all; others after their scan."""
        lane = self.lanes[tier]
        lane.is_up = True
        self.promoter.known_whole[tier] = knows_all and lane.limits.is_indexed
        for space in self._books.spaces.values():
            space.changed = max(space.changed, space.slots)  # debts to it can be paid now

    def process_lost(self, tier: int, now: float) -> int:
        """The process ended, or is about to be killed: nobody waits for its jobs any more.

        Returns:
            The number under which `process_gone` later says that it touches no slot.
        """
        lane = self.lanes[tier]
        epoch = lane.epoch
        for work in lane.lose_process():
            if not work.is_late and work.job.op is Op.READ:
                work.is_late = True
                self.promoter.read_is_late(work, True)
            elif work.job.op is Op.PROBE:
                self._give_up(work, now)
        if lane.limits.is_indexed:
            self.presence.clear(tier)  # the next process tells it anew
        self.promoter.known_whole[tier] = False
        self._fail_tasks(lane.drop_tasks(now))
        return epoch

    def process_gone(self, tier: int, epoch: int, now: float) -> None:
        """A lost process exists no more: its jobs end, and their slots are free."""
        for work in self.lanes[tier].of_epoch(epoch):
            if work.job.op in (Op.PURGE, Op.CHECK):
                self.lanes[tier].end(work)
                self._fail_tasks([work])
            else:
                self._give_up(work, now)

    def _give_up(self, work: Work, now: float) -> None:
        left = len(work.job.keys) - work.done
        self._ended(work, [Outcome.FAILED] * left, now)

    def tick(self, now: float) -> None:
        """Deadlines. Call it several times per second."""
        for lane in self.lanes:
            running, waiting = lane.newly_late(now)
            for work in running:
                self._is_late(lane, work, True, now)
            for work in waiting:
                self._is_late(lane, work, False, now)
            if not lane.is_up:
                self._fail_tasks(lane.drop_tasks(now - TASK_WAIT_S))
                self._fail_tasks(lane.waiting_writes(now - TASK_WAIT_S))
        self._books.handover.tick(now)

    def _is_late(self, lane: Lanes, work: Work, has_begun: bool, now: float) -> None:
        self._books.counters["late_operations"] += 1
        if work.job.op is Op.READ:
            self.promoter.read_is_late(work, has_begun)
        elif work.job.op is Op.PROBE:
            self.promoter.probe_ended(work, [], now)
        if has_begun and lane.is_failing(work, now):
            health = lane.reads if work.job.op in (Op.READ, Op.PROBE) else lane.writes
            health.note(False, now)
        if not has_begun:
            self._forward_waits(work, [], True)

    def hung(self, now: float) -> list[int]:
        """Tiers whose process should be killed and replaced."""
        return [tier for tier, lane in enumerate(self.lanes) if lane.is_hung(now)]

    # ---- purge and check -----------------------------------------------------------------------

    def purge(
        self,
        namespace: NamespaceId | None,
        tiers: Sequence[int],
        older_than_s: float | None,
        dropped_in_dram: int | None,
        now: float,
    ) -> int:
        """Drop blocks in tiers; DRAM's part is done already. A `TaskEnded` event follows.

        Args:
            namespace: None for all.
            older_than_s: only blocks not used for this time.
            dropped_in_dram: None if DRAM was left alone.
        """
        task = self._new_task(now)
        if dropped_in_dram is not None:
            task.dropped["dram"] = dropped_in_dram
        for tier in tiers:
            if older_than_s is None:
                self._void(task, tier, namespace)
            work = self._factory.on_store(Op.PURGE, tier, namespace, older_than_s)
            self._start(task, work, now)
        if older_than_s is None:
            self.cleaner.forget_uses(namespace)
        self._end_if_done(task)
        return task.id

    def _void(self, task: Task, tier: int, namespace: NamespaceId | None) -> None:
        """Nothing that older jobs bring about may outlive the purge."""
        task.blocks.append((tier, namespace))
        self.promoter.blocked.append((tier, namespace))
        self.presence.clear(tier, namespace)
        for work in self.lanes[tier].all():
            is_of_it = work.space is not None and namespace in (None, work.space.id)
            if is_of_it and work.job.op in _BLOCK_OPS:
                work.is_void = True
                task.waits.add(work.job.id)

    def check(self, now: float) -> int:
        """Let every tier compare its books with its store. A `TaskEnded` event follows."""
        task = self._new_task(now)
        for tier in range(len(self.lanes)):
            self._start(task, self._factory.on_store(Op.CHECK, tier, None, None), now)
        self._end_if_done(task)
        return task.id

    def _new_task(self, now: float) -> Task:
        self._task_count += 1
        task = Task(self._task_count, now)
        self._tasks[task.id] = task
        return task

    def _start(self, task: Task, work: Work, now: float) -> None:
        work.task = task.id
        task.waits.add(work.job.id)
        self.lanes[work.job.tier].put(work, now)

    def _fail_tasks(self, works: Sequence[Work]) -> None:
        for work in works:
            self._note_problem(work, "does not answer")
            self._forward_waits(work, [], True)

    def _read_was_dropped(self, work: Work) -> None:
        """Nobody waits for a read that was never begun."""
        self._forward_waits(work, [], True)

    def _note_problem(self, work: Work, text: str) -> None:
        """Tell those who wait for a job, once each."""
        problem = f"{self.lanes[work.job.tier].limits.name}: {text}"
        for task in self._tasks.values():
            if work.job.id in task.waits and problem not in task.problems:
                task.problems.append(problem)

    def _forward_waits(self, work: Work, followers: Sequence[Work], is_done: bool) -> None:
        """Whoever waits for a job waits for what follows from it, too."""
        for task in list(self._tasks.values()):
            if work.job.id in task.waits:
                task.waits.update(f.job.id for f in followers)
                if is_done:
                    task.waits.discard(work.job.id)
                    self._end_if_done(task)

    def _end_if_done(self, task: Task) -> None:
        if task.waits:
            return
        del self._tasks[task.id]
        for blocked in task.blocks:
            self.promoter.blocked.remove(blocked)
        self._books.events.append(TaskEnded(task.id, task.dropped, tuple(task.problems)))

    # ---- books ---------------------------------------------------------------------------------

    def is_busy(self, namespace: NamespaceId) -> bool:
        """Whether some job names blocks of a namespace."""
        works = (work for lane in self.lanes for work in lane.all())
        return any(w.space is not None and w.space.id == namespace for w in works)

    def check_pins(self) -> dict[int, list[int]]:
        """Recompute what jobs pin: id of the namespace object -> rows, once per pin.

        Raises:
            AssertionError: the books of promotions and demotions contradict the jobs.
        """
        found: dict[int, list[int]] = {id(s): [] for s in self._books.spaces.values()}
        held = 0
        for run in self.promoter.runs:
            rows = self._rows_of_run(run)
            assert len(rows) == run.held, "a run lost count of its slots"
            found.setdefault(id(run.space), []).extend(rows)
            held += len(rows) * run.space.slot_bytes
        assert held == self.promoter.bytes, "promoted bytes are wrong"
        for lane in self.lanes:
            for work in lane.all():
                if work.job.op is Op.WRITE and work.rows is not None and work.space is not None:
                    left = work.rows[work.done :]
                    found.setdefault(id(work.space), []).extend(left.tolist())
                    moving = work.space.moving[left] & np.uint8(1 << work.job.tier)
                    assert moving.all(), "a written block does not say so"
        return found

    def _rows_of_run(self, run: PromotedRun) -> list[int]:
        """Slots of a run: arrived and not published, or with a read that has not ended."""
        places = {
            at for at in range(run.published, run.end)
            if run.arrived[at] and run.space.state[run.rows[at]] in (State.PROMOTING, State.DOOMED)
        }  # fmt: skip
        for lane in self.lanes:
            for work in lane.all():
                if work.run is run:
                    places |= set(range(work.first + work.done, work.first + len(work.job.keys)))
        return [int(run.rows[at]) for at in sorted(places)]
