"""Promotion: blocks come up from a tier into slots of DRAM.

A run of consecutive blocks is promoted in order: a block becomes readable when its bytes are there
and its predecessor is readable. A failure cuts the run at its place; leases that wait are shortened
and the knowledge that the tier holds the block is gone.
Rule 1: a slot belongs to its read until the read has ended, whatever a deadline says.
Rule 2: what is hit is pinned before any slot is taken for a promotion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.core.books import Books
from tierkv.core.eviction.base import Rows
from tierkv.core.lanes import Lanes, Work
from tierkv.core.leases import Lease
from tierkv.core.namespace import Namespace, State
from tierkv.core.presence import Presence
from tierkv.core.values import Op, Run
from tierkv.core.work import WorkFactory
from tierkv.types import BlockKey, Outcome

PROBE_KEYS_MAX = 64


@dataclass(slots=True, eq=False)
class PromotedRun:
    """Consecutive blocks on their way up for one lookup.

    Attributes:
        rows: shape (n,), their slots.
        tiers: per row the tier that is read.
        arrived: per row whether its bytes are there.
        published: leading rows that are readable.
        end: rows from here on have failed.
        held: rows that the run still pins.
    """

    space: Namespace
    rows: Rows
    tiers: list[int]
    arrived: npt.NDArray[np.bool_]
    published: int
    end: int
    held: int


class Promoter:
    """Which runs are on their way, and what becomes of them."""

    def __init__(
        self, books: Books, presence: Presence, lanes: Sequence[Lanes], factory: WorkFactory
    ) -> None:
        self.bytes = 0  # of slots that reads hold
        self.blocked: list[tuple[int, bytes | None]] = []  # (tier, namespace) being purged
        self.known_whole = [False for _ in lanes]
        self.runs: list[PromotedRun] = []
        self.on_dropped: Callable[[Work], None] = lambda work: None  # a read was not begun
        self._books = books
        self._presence = presence
        self._lanes = lanes
        self._factory = factory

    # ---- start ---------------------------------------------------------------------------------

    def _usable(self, space: Namespace, now: float) -> tuple[int, int]:
        """Bit masks of the tiers that may be read now, and of those among them to be asked."""
        usable = asked = 0
        if not self._books.may_grant or not space.may_demote:
            return 0, 0
        for tier, lane in enumerate(self._lanes):
            is_blocked = any(t == tier and n in (None, space.id) for t, n in self.blocked)
            if lane.is_up and not lane.reads.is_paused(now) and not is_blocked:
                usable |= 1 << tier
                asked |= 0 if self.known_whole[tier] else 1 << tier
        return usable, asked

    def may_have(self, space: Namespace, key: BlockKey, now: float) -> bool:
        """Whether some tier has a block, or may have it."""
        usable, asked = self._usable(space, now)
        return bool(asked or self._presence.mask(space.id, key) & usable)

    def extend(
        self,
        lease: Lease,
        before: int,
        keys: Sequence[BlockKey],
        now: float,
        first_tier: int = 0,
    ) -> None:
        """Let a lease grow over blocks that tiers hold, and ask about those that they may hold.

        Args:
            before: row of the predecessor of `keys[0]`; 0 if there is none.
            first_tier: those above were asked about the first unknown key already.
        """
        space = lease.space
        keys = list(keys)
        joined = self._join_present(lease, before, keys)
        before = joined or before
        usable, asked = self._usable(space, now)
        tiers = self._leading(space, keys, usable)
        behind = keys[len(tiers) :] if asked else []
        if behind and behind[0] in space.index:
            behind = []  # it is here, behind another predecessor than ours
        if not self._is_worth_it(space, tiers):
            if behind:  # what follows may make it worth it
                lease.unknown = keys
                self._ask(lease, len(tiers), first_tier, now)
            else:
                self._books.counters["promote_too_short"] += len(tiers)
            return
        if tiers and self._start(lease, before, keys, tiers, now) < len(tiers):
            return  # no room for more
        if behind:
            lease.unknown = behind
            self._ask(lease, 0, first_tier, now)

    def _join_present(self, lease: Lease, before: int, keys: list[BlockKey]) -> int:
        """Take the leading keys that are in DRAM or on their way by now; the last one's row."""
        space, rows = lease.space, []
        while keys and (row := space.index.get(keys[0])) is not None:
            if space.parent[row] != before:
                break
            rows.append(row)
            before = row
            keys.pop(0)
        if rows:
            self._books.growth.start(lease, np.array(rows, np.int32))
        return rows[-1] if rows else 0

    def _leading(self, space: Namespace, keys: Sequence[BlockKey], usable: int) -> list[int]:
        """Per leading key that is known to be below: the fastest tier that has it.

        A key that is listed in DRAM behind another predecessor ends the run: it has its row.
        """
        found = []
        for key in keys:
            mask = self._presence.mask(space.id, key) & usable
            if not mask or key in space.index:
                break
            found.append((mask & -mask).bit_length() - 1)
        return found

    def _is_worth_it(self, space: Namespace, tiers: list[int]) -> bool:
        least = max((self._lanes[t].limits.promote_min_tokens for t in set(tiers)), default=0)
        return not space.block_tokens or len(tiers) * space.block_tokens >= least

    def _start(
        self, lease: Lease, before: int, keys: Sequence[BlockKey], tiers: list[int], now: float
    ) -> int:
        """Promote the longest head that fits; returns its length."""
        space, books = lease.space, self._books
        room = int(books.limits.promote_share_max * books.limits.pool_bytes) - self.bytes
        count = max(0, min(len(tiers), room // space.slot_bytes))
        if count > 0:
            after = space.keys[before] if before else None
            # The lease pins what lies before.
            books.make_room(space, [Run(after, keys[:count])], set, now)
        count = min(count, len(space.free))
        books.counters["promote_no_room"] += len(tiers) - count
        if count == 0:
            return 0
        rows = np.array(books.place(space, keys[:count], before, State.PROMOTING), np.int32)
        space.pin(rows)
        self.bytes += count * space.slot_bytes
        run = PromotedRun(space, rows, tiers[:count], np.zeros(count, bool), 0, count, count)
        self.runs.append(run)
        books.growth.start(lease, rows)
        books.counters["blocks_promoting"] += count
        for first, end in self._factory.pieces(space, tiers[:count]):
            work = self._factory.on_rows(Op.READ, tiers[first], space, rows[first:end])
            work.run, work.first = run, first
            self._lanes[tiers[first]].put(work, now)
        return count

    # ---- probes --------------------------------------------------------------------------------

    def _ask(self, lease: Lease, first: int, first_tier: int, now: float) -> None:
        """Ask the next tier that may hold what a lease does not know; none left: it is a miss.

        Args:
            first: place in `lease.unknown` of the first key that is asked about.
        """
        _, asked = self._usable(lease.space, now)
        for tier in range(first_tier, len(self._lanes)):
            if asked & (1 << tier):
                keys = lease.unknown[first : first + PROBE_KEYS_MAX]
                work = self._factory.on_keys(Op.PROBE, tier, lease.space, keys)
                work.lease, work.first = lease.id, first
                self._lanes[tier].put(work, now)
                return
        self._books.counters["miss_absent"] += len(lease.unknown)
        lease.unknown = []

    def probe_ended(self, work: Work, outcomes: Sequence[Outcome], now: float) -> None:
        """A tier said which blocks it has; silence counts as none."""
        keys, space = work.job.keys, work.space
        assert space is not None, "a probe is about a namespace"
        present = [k for k, o in zip(keys, outcomes, strict=False) if o is Outcome.OK]
        if not work.is_void:
            self._presence.add(space.id, present, work.job.tier)
        lease = self._books.leases.get(work.lease)
        first = work.first
        if work.is_late and outcomes:
            return  # it was taken for a no when its deadline passed
        if lease is None or lease.unknown[first : first + len(keys)] != list(keys):
            return
        if present and present[0] == keys[0]:
            rest, lease.unknown = lease.unknown, []
            last = lease.growing[-1] if lease.growing else 0
            if not last and len(lease.rows):
                last = int(lease.rows[-1])
            is_cut = len(present) < len(keys)
            self.extend(lease, last, rest, now, work.job.tier + 1 if is_cut else 0)
        else:
            self._ask(lease, first, work.job.tier + 1, now)
        self._books.growth.advance(lease)

    # ---- ends ----------------------------------------------------------------------------------

    def read_ended(self, work: Work, at: int, outcomes: Sequence[Outcome]) -> None:
        """Reads of some keys of a job ended; `at` is the place of the first of them in the job."""
        run, space = work.run, work.space
        assert isinstance(run, PromotedRun), "a read belongs to a run"
        assert space is not None, "a read has a namespace"
        for place, outcome in enumerate(outcomes, at):
            index, key = work.first + place, work.job.keys[place]
            row = int(run.rows[index])
            is_wanted = index < run.end and space.state[row] == State.PROMOTING
            if outcome is Outcome.OK and is_wanted:
                run.arrived[index] = True
                continue
            if outcome is not Outcome.OK:
                self._books.counters[f"promote_{outcome.name.lower()}"] += 1
                self._note_absence(work, key, outcome)
            if outcome in (Outcome.OK, Outcome.FAILED) and work.is_late:
                self._note_late_sign(work, key, outcome)
            self._fail(run, index)
            self._let_go(run, row)
        self.advance(space)

    def _note_absence(self, work: Work, key: BlockKey, outcome: Outcome) -> None:
        """Nobody should read a bad block again.

        A read that merely failed says nothing about an indexed tier: if the block is gone, the tier
        tells it. A process that is gone says nothing about what its successor holds.
        """
        lane = self._lanes[work.job.tier]
        is_told = outcome is Outcome.FAILED and lane.limits.is_indexed
        if work.space is not None and work.epoch == lane.epoch and not is_told:
            self._presence.remove(work.space.id, [key], work.job.tier)

    def _note_late_sign(self, work: Work, key: BlockKey, outcome: Outcome) -> None:
        """A block whose knowledge went with the deadline is there after all, or may be."""
        lane = self._lanes[work.job.tier]
        is_there = outcome is Outcome.OK or lane.limits.is_indexed
        if is_there and not work.is_void and work.epoch == lane.epoch and work.space is not None:
            self._presence.add(work.space.id, [key], work.job.tier)

    def read_is_late(self, work: Work, has_begun: bool) -> None:
        """The deadline of a read passed: a miss at once. Its slots stay until it has ended."""
        run, space = work.run, work.space
        assert isinstance(run, PromotedRun), "a read belongs to a run"
        assert space is not None, "a read has a namespace"
        self._books.counters["promote_late"] += len(work.job.keys) - work.done
        if has_begun:
            self._presence.remove(space.id, work.job.keys[work.done :], work.job.tier)
        self._fail(run, work.first + work.done)
        if not has_begun:
            for place in range(work.done, len(work.job.keys)):
                self._let_go(run, int(run.rows[work.first + place]))
        self.advance(space)

    def _fail(self, run: PromotedRun, index: int) -> None:
        """Cut a run: what lies from `index` on will not become readable through it."""
        if index >= run.end:
            return
        rest = run.rows[index : run.end]
        is_here = run.space.state[rest] == State.PROMOTING
        arrived = rest[run.arrived[index : run.end]]
        run.end = index
        self._books.doom(run.space, rest[is_here])
        for row in arrived.tolist():
            self._let_go(run, row)
        for tier in set(run.tiers):
            for work in self._lanes[tier].drop_reads(run, index):
                for place in range(len(work.job.keys)):
                    self._let_go(run, int(run.rows[work.first + place]))
                self.on_dropped(work)

    def _let_go(self, run: PromotedRun, row: int) -> None:
        """No read touches this slot any more."""
        run.space.unpin(np.array([row], np.int32))
        self.bytes -= run.space.slot_bytes
        run.held -= 1
        if run.held == 0:
            self.runs.remove(run)

    def advance(self, space: Namespace) -> None:
        """Publish what may be published, in all runs of a namespace, until nothing moves."""
        has_moved = True
        while has_moved:
            has_moved = False
            for run in [r for r in self.runs if r.space is space]:
                while run.published < run.end and run.arrived[run.published]:
                    if not self._publish_next(run):
                        break
                    has_moved = True

    def _publish_next(self, run: PromotedRun) -> bool:
        """Publish the next arrived rows of one tier; False: their predecessor is not there yet."""
        space, first = run.space, run.published
        parent = int(space.parent[run.rows[first]])
        is_same = space.serial[parent] == space.parent_serial[run.rows[first]]
        if is_same and space.state[parent] in (State.PROMOTING, State.FILLING):
            return False
        end = first + 1
        while end < run.end and run.arrived[end] and run.tiers[end] == run.tiers[first]:
            end += 1
        head = run.rows[first:end]
        is_here = space.state[head] == State.PROMOTING
        if not is_here.all():
            end = first + int(np.argmin(is_here))
            head = run.rows[first:end]
        tier = run.tiers[first]
        published = self._books.publish(space, head, tier + 1)
        if not published:
            self._books.counters["promote_orphaned"] += run.end - first
            self._fail(run, first)
            return True
        run.published = end
        self._books.counters["blocks_promoted"] += published
        self._books.counters[f"promoted.{self._lanes[tier].limits.name}"] += published
        for row in head.tolist():
            self._let_go(run, row)
        return True
