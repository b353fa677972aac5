"""Demotion: which blocks are owed to which tier, and when they are written.

Write-through writes a block when it is stored, write-back when it is about to be given up, and
`write_through_selective` when it was used `hits_min` times. A debt never makes DRAM refuse a store:
the cleaner keeps the coldest part of DRAM free of debt, and what it cannot write in time is shed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence

import numpy as np

from tierkv.core.books import Books
from tierkv.core.eviction.base import Rows
from tierkv.core.lanes import Lanes, Work
from tierkv.core.namespace import Namespace, State
from tierkv.core.presence import Presence
from tierkv.core.values import Op
from tierkv.core.work import WorkFactory
from tierkv.types import BlockKey, NamespaceId, Outcome

SCANNED_MAX = 65_536
CHANGED_SHARE = 64  # the cleaner looks again after 1/64 of the slots came or went
BATCHES = 16  # above dirty_max at least 1/16 of the slots are picked at a time
USES_MAX = 1 << 20
TOUCHES_MAX = 1_024

Due = tuple[Namespace, int, int]  # (namespace, row, its serial)


class Cleaner:
    """Pays the debts of DRAM to the tiers below."""

    def __init__(
        self, books: Books, presence: Presence, lanes: Sequence[Lanes], factory: WorkFactory
    ) -> None:
        self._books = books
        self._presence = presence
        self._lanes = lanes
        self._factory = factory
        self._due: list[deque[Due]] = [deque() for _ in lanes]
        self._due_bytes = [0 for _ in lanes]
        self._uses: dict[NamespaceId, dict[BlockKey, int]] = {}
        self._writing: set[tuple[int, NamespaceId, BlockKey | None]] = set()
        self._touched: dict[tuple[int, NamespaceId], list[BlockKey]] = {}
        self._is_flushing = False

    # ---- what happens to blocks ----------------------------------------------------------------

    def became_resident(self, space: Namespace, rows: Rows) -> None:
        """Note the debts of blocks that are readable now."""
        if not self._lanes or not space.may_demote:
            return
        for tier, lane in enumerate(self._lanes):
            missing = [row for row in rows.tolist() if not self._has(space, row, tier)]
            if lane.limits.write_policy == "write_through_selective":
                continue  # its debts begin with a use
            picked = np.array(missing, np.int32)
            space.owe(picked, 1 << tier)
            if lane.limits.write_policy == "write_through":
                self._queue(tier, space, picked)
            elif self._is_flushing and lane.limits.is_durable:
                self._enqueue(tier, space, picked)
        self._count_uses(space, rows)

    def was_used(self, space: Namespace, rows: Rows) -> None:
        """Note one use of resident blocks."""
        space.changed += len(rows)  # other blocks are the coldest now
        if self._lanes and space.may_demote:
            self._count_uses(space, rows)

    def is_leaving(self, space: Namespace, rows: Rows) -> None:
        """A block that DRAM gives up was used until now; the tier that has it should know."""
        if not self._lanes or not space.may_demote:
            return
        for tier, lane in enumerate(self._lanes):
            if lane.limits.is_indexed:  # others have no order of ours
                keys = [space.keys[r] for r in rows.tolist() if self._has(space, r, tier)]
                touched = self._touched.setdefault((tier, space.id), [])
                touched += [key for key in keys if key is not None]
                del touched[:-TOUCHES_MAX]

    def _has(self, space: Namespace, row: int, tier: int) -> bool:
        key = space.keys[row]
        return key is not None and self._presence.has(space.id, key, tier)

    def pay(self, space: Namespace, rows: Rows) -> bool:
        """Write these blocks next, because their extent changes hands."""
        is_paying = False
        for tier, lane in enumerate(self._lanes):
            bit = np.uint8(1 << tier)
            owing = rows[(space.owed[rows] & ~space.moving[rows] & bit) != 0]
            if not len(owing):
                continue
            if lane.is_up:
                is_paying = True
                fresh = owing[(space.queued[owing] & bit) == 0]
                self._queue(tier, space, fresh, is_urgent=True)
        return is_paying

    def _count_uses(self, space: Namespace, rows: Rows) -> None:
        """The selective policy: a store and every later use of a prefix count one each.

        Counted for every block of a request, hit or stored, because counting in lookups alone
        would miss the blocks behind the first miss. Counts outlive the blocks, oldest first out.
        """
        for tier, lane in enumerate(self._lanes):
            if lane.limits.write_policy != "write_through_selective":
                continue
            uses = self._uses.setdefault(space.id, {})
            bit = 1 << tier
            ready = []
            for row in rows.tolist():
                key = space.keys[row] or BlockKey(b"")
                count = min(uses.pop(key, 0) + 1, 255)
                uses[key] = count
                busy = (int(space.owed[row]) | int(space.moving[row])) & bit
                if count >= lane.limits.hits_min and not busy and not self._has(space, row, tier):
                    ready.append(row)
            capacity, most = lane.limits.capacity, USES_MAX
            if capacity is not None:
                most = min(USES_MAX, max(1, capacity // space.slot_bytes))
            for key in list(itertools.islice(uses, max(0, len(uses) - most))):
                del uses[key]
            picked = np.array(ready, np.int32)
            space.owe(picked, bit)
            self._queue(tier, space, picked)

    def forget_uses(self, namespace: NamespaceId | None) -> None:
        """Purged blocks were never used."""
        for space in list(self._uses) if namespace is None else [namespace]:
            self._uses.pop(space, None)

    # ---- the queue of a tier -------------------------------------------------------------------

    def _queue(self, tier: int, space: Namespace, rows: Rows, is_urgent: bool = False) -> None:
        """Let owed blocks wait for a write thread; beyond `backlog_max` their debt is shed.

        Args:
            is_urgent: in front of all others, and without a bound.
        """
        bit = 1 << tier
        room = self._lanes[tier].limits.backlog_max - self._due_bytes[tier]
        most = len(rows) if is_urgent else max(0, room // space.slot_bytes)
        shed = rows[most:]
        self._enqueue(tier, space, rows[:most], is_urgent)
        if len(shed):
            space.settle(shed, bit)
            self._books.counters["backlog_shed"] += len(shed)

    def _enqueue(self, tier: int, space: Namespace, rows: Rows, is_urgent: bool = False) -> None:
        space.queued[rows] |= np.uint8(1 << tier)
        serials = space.serial[rows].tolist()
        due = list(zip(itertools.repeat(space), rows.tolist(), serials, strict=False))
        if is_urgent:
            self._due[tier].extendleft(reversed(due))
        else:
            self._due[tier].extend(due)
        self._due_bytes[tier] += len(rows) * space.slot_bytes

    def next_work(self, tier: int, now: float) -> Work | None:
        """The next blocks to write to a tier, or None."""
        if not self._due[tier] and self._lanes[tier].limits.write_policy == "write_back":
            self._scan()
        due, bit = self._due[tier], np.uint8(1 << tier)
        space: Namespace | None = None
        rows: list[int] = []
        later: list[Due] = []
        while due:
            owner, row, serial = due[0]
            if space is not None and (
                owner is not space or len(rows) >= self._factory.keys_per_job(space.slot_bytes)
            ):
                break
            due.popleft()
            self._due_bytes[tier] -= owner.slot_bytes
            is_same = owner.serial[row] == serial and bool(owner.queued[row] & bit)
            is_owed = is_same and owner.state[row] == State.RESIDENT and owner.owed[row] & bit
            if is_owed and (tier, owner.id, owner.keys[row]) in self._writing:
                later.append((owner, row, serial))  # an older block of this name is being written
                continue
            if is_owed and self._has(owner, row, tier):
                owner.settle(np.array([row], np.int32), int(bit))  # another row brought it there
            elif is_owed:
                space = owner
                rows.append(row)
            if is_same:
                owner.queued[row] &= np.uint8(0xFF ^ int(bit))
        due.extend(later)
        self._due_bytes[tier] += sum(owner.slot_bytes for owner, _, _ in later)
        if space is None:
            return None
        picked = np.array(rows, np.int32)
        space.pin(picked)
        space.moving[picked] |= bit
        self._books.counters["blocks_demoting"] += len(rows)
        work = self._factory.on_rows(Op.WRITE, tier, space, picked)
        self._writing.update((tier, space.id, key) for key in work.job.keys)
        return work

    def next_touch(self) -> Work | None:
        """Blocks that DRAM gave up lately, for a tier's own recency."""
        while self._touched:
            tier, namespace = next(iter(self._touched))
            keys = self._touched.pop((tier, namespace))
            space = self._books.spaces.get(namespace)
            lane = self._lanes[tier]
            if space is not None and keys and lane.is_up and not lane.has_waiting(Op.TOUCH):
                return self._factory.on_keys(Op.TOUCH, tier, space, keys)
        return None

    def _scan(self) -> None:
        """Find cold owed blocks: in the clean tail, or anywhere above `dirty_max`."""
        limits = self._books.limits
        for space in self._books.spaces.values():
            if not space.dirty or not space.may_demote:
                continue
            if space.changed < max(1, space.slots // CHANGED_SHARE):
                continue
            space.changed = 0
            is_full = space.dirty > limits.dirty_max * space.slots
            has_room = self._books.extents.free_units >= space.units_per_extent
            # The tail must take the largest demand at once, or debts are shed while others rest.
            share = max(limits.clean_tail * space.slots, min(space.demand, space.slots))
            tail = int(np.ceil(share)) - len(space.free)
            if tail > 0 and not has_room:
                self._pick(space, min(tail, SCANNED_MAX), SCANNED_MAX)
            if is_full:
                excess = space.dirty - int(limits.dirty_max * space.slots)
                batch = max(self._factory.keys_per_job(space.slot_bytes), space.slots // BATCHES)
                self._pick(space, SCANNED_MAX, max(batch, excess))

    def _pick(self, space: Namespace, scan: int, most: int) -> None:
        """Queue the coldest owed blocks among the first `scan` of the order."""
        cold: list[int] = []
        owed, queued, moving = space.owed.data, space.queued.data, space.moving.data
        up = sum(1 << tier for tier, lane in enumerate(self._lanes) if lane.is_up)
        for row in itertools.islice(space.policy.candidates(), scan):
            if owed[row] & up & ~(queued[row] | moving[row]):
                cold.append(row)
                if len(cold) == most:
                    break
        self._queue_owed(space, np.array(cold, np.int32))

    def _queue_owed(self, space: Namespace, rows: Rows, is_flush: bool = False) -> None:
        """Queue debts that stand already: what finds no place in the queue stays owed."""
        for tier, lane in enumerate(self._lanes):
            bit = np.uint8(1 << tier)
            free = ~(space.queued[rows] | space.moving[rows])
            if not lane.is_up or (is_flush and not lane.limits.is_durable):
                continue
            due = rows[(space.owed[rows] & free & bit) != 0]
            room = max(0, lane.limits.backlog_max - self._due_bytes[tier])
            most = len(due) if is_flush else max(room // space.slot_bytes, int(not self._due[tier]))
            if len(due) > most:
                space.changed = max(space.changed, space.slots)  # look again for the others
            self._enqueue(tier, space, due[:most])

    # ---- ends ----------------------------------------------------------------------------------

    def write_ended(self, work: Work, at: int, outcomes: Sequence[Outcome]) -> list[BlockKey]:
        """Writes of some keys of a job ended.

        Returns:
            Keys that were purged meanwhile and may be in the tier now: drop them there.
        """
        space, rows, tier = work.space, work.rows, work.job.tier
        assert space is not None, "a write has a namespace"
        assert rows is not None, "a write has slots"
        ended = rows[at : at + len(outcomes)]
        keys = work.job.keys[at : at + len(outcomes)]
        space.moving[ended] &= np.uint8(0xFF ^ (1 << tier))
        space.settle(ended, 1 << tier)
        space.unpin(ended)
        self._writing.difference_update((tier, space.id, key) for key in keys)
        good = [key for key, o in zip(keys, outcomes, strict=True) if o is Outcome.OK]
        counters, name = self._books.counters, self._lanes[tier].limits.name
        counters["blocks_demoted"] += len(good)
        counters[f"demoted.{name}"] += len(good)
        for outcome in outcomes:
            if outcome is not Outcome.OK:
                counters["demote_full" if outcome is Outcome.FULL else "demote_failed"] += 1
        if work.is_void:  # a failed write may have got there all the same
            self._presence.remove(space.id, keys, tier)
            return list(keys)
        if not self._lanes[tier].limits.is_indexed:
            self._presence.add(space.id, good, tier)
        return []

    # ---- flush ---------------------------------------------------------------------------------

    def flush(self) -> None:
        """Queue every debt to a durable tier, the most recently used blocks first."""
        self._is_flushing = True  # what is stored from now on follows
        for space in self._books.spaces.values():
            if space.dirty:
                rows = np.fromiter(space.policy.candidates(), np.int32)[::-1]
                self._queue_owed(space, rows, is_flush=True)

    def unflushed(self, only_up: bool = False) -> int:
        """Blocks that a durable tier has not got yet.

        Args:
            only_up: do not count debts to tiers that are down, for which there is little hope.
        """
        mask = sum(
            1 << tier
            for tier, lane in enumerate(self._lanes)
            if lane.limits.is_durable and (lane.is_up or not only_up)
        )
        return sum(
            int(np.count_nonzero((s.owed | s.moving) & np.uint8(mask)))
            for s in self._books.spaces.values()
        )
