"""The books of the DRAM tier: every change of a block's state happens in this file.

`Directory` decides for engines and `TieringManager` for tiers; both come here to change something.
Rule 1: a block is readable only after every byte of it is in its slot (two-phase commit).
Rule 2: a slot is freed only when nobody may touch it: no lease holds it, and no job of a tier.
Rule 3: a block is resident only while its predecessor is; a block that no lookup can reach is gone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from tierkv.core.eviction.base import Room, Rows
from tierkv.core.extents import ExtentMap
from tierkv.core.growth import Growth
from tierkv.core.handover import Handover
from tierkv.core.leases import Engine, Lease
from tierkv.core.namespace import Namespace, State
from tierkv.core.values import Event, Limits, Recall, Run
from tierkv.types import BlockKey, LeaseId, NamespaceId

VICTIMS_SCANNED_MAX = 65_536
DEMAND_DECAY = 0.9995  # per demand: what was needed once is half forgotten after 1,400 more
CLEAN_SCANNED_MIN = 1_024
CLEAN_SCANNED_PER_VICTIM = 8


class BlockWatcher(Protocol):
    """Who must know what happens to blocks: the tiers below."""

    def became_resident(self, space: Namespace, rows: Rows) -> None:
        """These blocks are readable now."""

    def was_used(self, space: Namespace, rows: Rows) -> None:
        """One use of a prefix."""

    def is_leaving(self, space: Namespace, rows: Rows) -> None:
        """The policy gives these blocks up; they are still listed."""

    def pay(self, space: Namespace, rows: Rows) -> bool:
        """Write these owed blocks soon. False: nobody can, now."""


class _Nobody:
    """No tiers below: nobody needs to know."""

    def became_resident(self, space: Namespace, rows: Rows) -> None:
        return

    def was_used(self, space: Namespace, rows: Rows) -> None:
        return

    def is_leaving(self, space: Namespace, rows: Rows) -> None:
        return

    def pay(self, space: Namespace, rows: Rows) -> bool:
        return False


class Books:
    """Namespaces, leases and extents, and the few ways to change them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.extents = ExtentMap(limits.pool_bytes, limits.extent_unit)
        self.spaces: dict[NamespaceId, Namespace] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.counters: Counter[str] = Counter()
        self.events: list[Event] = []
        self.growth = Growth(self.leases, self.events, self.counters)
        self.handover = Handover(self.extents, self.spaces, self.doom, self._pay, self.counters)
        self.may_grant = True
        self.watcher: BlockWatcher = _Nobody()
        self.has_tiers = False
        self._lease_count = self._stamp = 0

    def _pay(self, space: Namespace, rows: Rows) -> bool:
        return self.watcher.pay(space, rows)

    # ---- leases --------------------------------------------------------------------------------

    def open_lease(self, known: Engine, space: Namespace, is_write: bool, rows: Rows) -> Lease:
        """Give an engine the right to these rows, and pin them."""
        self._lease_count += 1
        lease_id = LeaseId((self.limits.generation << 32) + self._lease_count)
        sources = bytearray() if is_write else bytearray(len(rows))
        lease = Lease(lease_id, known.id, space, is_write, rows, sources)
        self.leases[lease_id] = lease
        known.leases[lease_id] = lease
        space.pin(rows)
        return lease

    def recall_if_crowded(self) -> None:
        """Ask for the youngest waiting leases back while too much of the pool is pinned."""
        room = self.limits.pinned_share_max * self.limits.pool_bytes
        pinned = sum(s.pinned * s.slot_bytes for s in self.spaces.values())
        for lease in reversed(self.leases.values()):
            if pinned <= room:
                return
            if not (lease.is_write or lease.is_taken or lease.is_recalled):
                lease.is_recalled = True
                self.events.append(Recall(lease.engine, lease.id))
                pinned -= len(lease.rows) * lease.space.slot_bytes

    # ---- use -----------------------------------------------------------------------------------

    @staticmethod
    def chain(space: Namespace, found: list[int | None]) -> Rows:
        """The leading rows that are here and follow each other from the start of a prefix."""
        count = found.index(None) if None in found else len(found)
        rows: Rows = np.array(found[:count], np.int32)
        before = np.concatenate([np.zeros(1, np.int32), rows[:-1]])[:count]
        follows = space.parent[rows] == before
        return rows if follows.all() else rows[: int(np.argmin(follows))]

    def touch(self, space: Namespace, rows: Rows, now: float) -> None:
        """Note one use of a prefix of resident rows, head first."""
        if len(rows) == 0:
            return
        space.age(now)
        space.heat += len(rows) * space.slot_bytes
        self._stamp += 1
        space.stamp[rows] = self._stamp
        space.used_at[rows] = now
        space.policy.touch(rows)
        self.watcher.was_used(space, rows)

    def publish(self, space: Namespace, rows: Rows, source: int = 0) -> int:
        """Make a run of consecutive rows readable whose bytes are all in place.

        Args:
            rows: shape (n,), each the successor of the one before.
            source: 0 if an engine wrote them, else 1 + the number of the tier.
        Returns:
            Rows published: all, or none if their predecessor is gone.
        """
        if len(rows) == 0 or not space.has_parent(int(rows[0])):
            return 0
        space.state[rows] = State.RESIDENT
        before = int(space.parent[rows[0]])
        space.heirs[before] += 1
        space.heirs[rows[:-1]] += 1
        keys = space.keys
        listed = rows.tolist()
        space.policy.insert(rows, before, [keys[row] for row in listed])
        self._stamp += 1
        space.stamp[rows] = self._stamp
        space.used_at[rows] = space.heat_at
        space.changed += len(rows)
        if space.waiters:
            self.growth.wake(space, listed, True, source)
        self.watcher.became_resident(space, rows)
        return len(rows)

    # ---- room ----------------------------------------------------------------------------------

    def make_room(
        self,
        space: Namespace,
        runs: Sequence[Run],
        protected: Callable[[], set[int]],
        now: float,
    ) -> None:
        """Free slots for absent blocks, as many as the policy finds worth it.

        Unused extents come first, then cold blocks, clean ones before owed ones.

        Args:
            runs: absent blocks, each run with its predecessor.
            protected: tells rows that must stay, and with them their ancestors.
        """
        asked = sum(len(run.keys) for run in runs)
        if len(space.free) < asked:
            space.demand = max(float(asked), space.demand * DEMAND_DECAY)
            self.handover.claim(space, asked - len(space.free))
        if len(space.free) < asked:
            self.handover.ask(space, now)
            self.handover.claim(space, asked - len(space.free))
        rooms = [space.policy.miss(run.keys, run.predecessor) for run in runs]
        if self.has_tiers and space.may_demote:
            # What goes is not lost, and what finds no room never gets down: nobody is spared.
            rooms = [Room(len(run.keys), len(space.policy)) for run in runs]
        short = sum(room.blocks for room in rooms) - len(space.free)
        if short <= 0:
            return
        may_go, stay = rooms[-1].candidates, protected()
        if space.dirty < len(space.policy):
            clean = self._victims(space, short, stay, may_go, is_clean=space.dirty > 0)
            self.evict(space, clean)
            short, may_go = short - len(clean), may_go - len(clean)
        if short > 0 and space.dirty:
            owed = self._victims(space, short, stay, may_go, is_clean=False)
            self.counters["writeback_shed"] += int(np.count_nonzero(space.owed[owed]))
            self.evict(space, owed)

    @staticmethod
    def _victims(
        space: Namespace, most: int, protected: set[int], may_go: int, is_clean: bool
    ) -> Rows:
        """The first unpinned rows of the order that no resident row needs, counted off as heirs.

        A row that the order proposes before its successors waits for them: it is taken when the
        last of them is. So no order can cut a prefix in two.

        Args:
            may_go: only so many candidates are looked at.
            is_clean: take only rows that owe nothing.
        """
        found: list[int] = []
        waiting: set[int] = set()
        pins, parent, owed = space.pins.data, space.parent.data, space.owed.data
        heirs = space.heirs.data  # a copy would cost time in the number of rows
        state, rows = space.state.data, len(space.state)
        scan = max(0, min(VICTIMS_SCANNED_MAX, may_go))
        if is_clean:
            scan = min(scan, CLEAN_SCANNED_MIN + CLEAN_SCANNED_PER_VICTIM * most)
        for row in itertools.islice(space.policy.candidates(), scan):
            if not 0 < row < rows or state[row] != State.RESIDENT:
                continue  # a policy that knows no better must not reach the books
            if pins[row] or (is_clean and owed[row]) or row in protected:
                continue
            if heirs[row]:
                waiting.add(row)
                continue
            taken = row
            while taken and len(found) < most:
                found.append(taken)
                before = parent[taken]
                heirs[taken] = -1  # it is not taken twice, whatever the order says
                heirs[before] -= 1
                taken = before if before in waiting and not heirs[before] else 0
            if len(found) == most:
                break
        return np.array(found, np.int32)

    def evict(self, space: Namespace, rows: Rows) -> None:
        """Remove what `_victims` chose; nothing may happen in between."""
        if len(rows) == 0:
            return
        self.watcher.is_leaving(space, rows)
        space.heirs[rows] = 0
        space.policy.evict(rows)
        listed = rows.tolist()
        space.unlist(listed)
        space.free_rows(listed)
        space.changed += len(rows)
        self.counters["evicted"] += len(rows)

    def doom(self, space: Namespace, rows: Rows) -> None:
        """Take listed rows out of the index; free their slots, pinned ones at the last unpin."""
        if len(rows) == 0:
            return
        listed = rows.tolist()
        resident = rows[space.state[rows] == State.RESIDENT]
        if len(resident):
            np.subtract.at(space.heirs, space.parent[resident], 1)
            space.policy.remove(resident)
        space.unlist(listed)
        if space.waiters:
            self.growth.wake(space, listed, False)
        space.cancel_debts(rows)
        space.state[rows] = State.DOOMED
        space.free_rows(rows[space.pins[rows] == 0].tolist())

    def place(
        self, space: Namespace, keys: Sequence[BlockKey], parent: int, state: State
    ) -> list[int]:
        """Give free slots to absent blocks of one run, each the predecessor of the next."""
        rows = []
        for key in keys:
            parent = space.place(key, parent)
            rows.append(parent)
        space.state[rows] = state
        return rows
