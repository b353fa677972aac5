"""The directory: every change of a block's state is decided in this file.

Rule 1: a block is readable only after every byte of it is in its slot (two-phase commit).
Rule 2: a slot is freed only when nobody may touch it: not pinned, and not leased for writing.
Rule 3: a block is resident only while its predecessor is; a block that no lookup can reach is gone.
Rule 4: no clock ends a lease of a living engine. `now` only ages statistics.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from tierkv.core.audit import check_directory
from tierkv.core.eviction.base import Rows
from tierkv.core.eviction.lru import Lru
from tierkv.core.extents import ExtentMap
from tierkv.core.growth import Growth
from tierkv.core.handover import Handover
from tierkv.core.leases import Engine, Lease
from tierkv.core.namespace import Namespace, State
from tierkv.core.values import NO_OFFSETS, Event, Found, Granted, Limits, Recall, Run
from tierkv.types import BlockKey, EngineId, LeaseId, NamespaceId

LEASES_PER_ENGINE_MAX = 8_192
NAMESPACES_MAX = 1_024
SLOTS_MAX = 1 << 24
VICTIMS_SCANNED_MAX = 65_536
_START: Rows = np.zeros(1, np.int32)


class Directory:
    """Index of every cached block of the node, and the leases on them."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.extents = ExtentMap(limits.pool_bytes, limits.extent_unit)
        self.spaces: dict[NamespaceId, Namespace] = {}
        self.engines: dict[EngineId, Engine] = {}
        self.leases: dict[LeaseId, Lease] = {}
        self.counters: Counter[str] = Counter()
        self.may_grant = True
        self._handover = Handover(self.extents, self.spaces, self._evict)
        self._events: list[Event] = []
        self._growth = Growth(self.leases, self._events, self.counters)
        self._lease_count = self._stamp = 0

    # ---- engines and namespaces ----------------------------------------------------------------

    def open_engine(self, engine: EngineId) -> None:
        """Make an engine known; it may hold leases from now on."""
        assert engine not in self.engines, "engine ids are made once"
        self.engines[engine] = Engine(engine)

    def attach(
        self,
        engine: EngineId,
        namespace: NamespaceId,
        slot_bytes: int,
        label: str = "",
        is_private: bool = False,
    ) -> str | None:
        """Make a namespace usable for an engine.

        Returns:
            None, or a sentence that says why it cannot be used and what to do.
        """
        space = self.spaces.get(namespace)
        if space is not None:
            if space.slot_bytes != slot_bytes:
                return (
                    f"slots of this layout have {space.slot_bytes} bytes here, not {slot_bytes}; "
                    "restart the daemon to drop the old layout"
                )
            if space.private_to not in (None, engine):
                return "this layout is private to another engine"
            space.users.add(engine)
            return None
        if len(self.spaces) >= NAMESPACES_MAX and not self._drop_unused_space():
            return f"{NAMESPACES_MAX} layouts are in use; purge those you no longer need"
        if self.limits.pool_bytes // slot_bytes > SLOTS_MAX:
            return f"slots of {slot_bytes} bytes are too many for one index ({SLOTS_MAX})"
        units = self.extents.units_per_extent(slot_bytes)
        if units == 0:
            return (
                f"node.dram.capacity ({self.limits.pool_bytes} bytes) holds 0 slots of "
                f"{slot_bytes} bytes; raise it or lower engine.block_tokens"
            )
        space = Namespace(
            namespace,
            slot_bytes=slot_bytes,
            units_per_extent=units,
            unit_bytes=self.extents.unit_bytes,
            policy=Lru(),
            label=label,
            private_to=engine if is_private else None,
        )
        space.users.add(engine)
        self.spaces[namespace] = space
        return None

    def detach(self, engine: EngineId, namespace: NamespaceId) -> None:
        """An engine stops using a namespace. A private one is purged, for nobody else can."""
        space = self.spaces[namespace]
        space.users.discard(engine)
        if space.private_to == engine:
            self.purge(namespace)

    def close_engine(self, engine: EngineId) -> None:
        """The session ended. What it was writing is absent; its slots stay untouched."""
        known = self.engines[engine]
        known.is_closed = True
        for lease in list(known.leases.values()):
            if lease.is_write:
                self._doom(lease.space, self._filling(lease))

    def end_engine(self, engine: EngineId) -> None:
        """No process of the engine can touch the pool any more: all its leases end."""
        if not self.engines[engine].is_closed:
            self.close_engine(engine)
        known = self.engines.pop(engine)
        for lease in list(known.leases.values()):
            self._end_lease(lease)
        for space in self.spaces.values():
            if engine in space.users:
                self.detach(engine, space.id)

    def keep_leases(self, engine: EngineId, held: Iterable[LeaseId]) -> None:
        """A living engine vouches that it touches no slot but those of the held leases."""
        keep = set(held)
        for lease in list(self.engines[engine].leases.values()):
            if lease.id not in keep:
                self._end_lease(lease)

    # ---- load ----------------------------------------------------------------------------------

    def lookup(
        self, engine: EngineId, namespace: NamespaceId, keys: Sequence[BlockKey], now: float
    ) -> Found:
        """Pin the leading blocks of a prefix that are here, and wait for those on their way.

        Args:
            keys: distinct keys from the first block of the prefix on.
        """
        space = self.spaces[namespace]
        found: list[int | None] = list(map(space.index.get, keys))
        rows = self._chain(space, found)
        count = len(rows)
        resident = space.state[rows] == State.RESIDENT
        ready = count if resident.all() else int(np.argmin(resident))
        self.counters["lookups"] += 1
        self.counters["blocks_asked"] += len(keys)
        if count < len(keys):
            self.counters["miss_absent"] += len(keys) - count
        known = self.engines[engine]
        if count == 0:
            return Found(LeaseId(0), NO_OFFSETS, 0)
        if len(known.leases) >= LEASES_PER_ENGINE_MAX:
            self.counters["miss_leases_max"] += count
            return Found(LeaseId(0), NO_OFFSETS, 0)
        hit, growing = rows[:ready], rows[ready:]
        lease = self._open_lease(known, space, False, hit)
        space.pin(hit)
        self._touch(space, hit, now)
        self.counters["blocks_hit"] += ready
        self.counters["bytes_hit"] += ready * space.slot_bytes
        self._growth.start(lease, growing)
        self._recall_if_crowded()
        return Found(lease.id, space.offset[hit], len(growing))

    def touch(self, namespace: NamespaceId, keys: Sequence[BlockKey], now: float) -> None:
        """Note one use of a prefix that the device already holds."""
        space = self.spaces[namespace]
        rows = self._chain(space, list(map(space.index.get, keys)))
        resident = space.state[rows] == State.RESIDENT
        self._touch(space, rows if resident.all() else rows[: int(np.argmin(resident))], now)

    def trim(self, lease_id: LeaseId, blocks: int) -> None:
        """Keep the first blocks of a read lease and stop its growth: a copy is about to be issued.

        `blocks` = 0 ends the lease.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.is_write:
            self.counters["unknown_leases"] += 1
            return
        self._growth.stop(lease)
        rest = lease.rows[blocks:]
        lease.rows = lease.rows[:blocks]
        lease.is_taken = True
        lease.space.unpin(rest)
        if blocks == 0:
            self._close_lease(lease)
        self._handover.continue_draining(lease.space)

    def release(self, lease_id: LeaseId) -> None:
        """End a read lease. Unknown, foreign and repeated ids are counted and ignored."""
        lease = self.leases.get(lease_id)
        if lease is None or lease.is_write:
            self.counters["unknown_leases"] += 1
            return
        self._end_lease(lease)

    # ---- store ---------------------------------------------------------------------------------

    def reserve(
        self, engine: EngineId, namespace: NamespaceId, runs: Sequence[Run], now: float
    ) -> Granted:
        """Take slots for blocks that are not here yet. One lease for all runs of a step."""
        space = self.spaces[namespace]
        known = self.engines[engine]
        asked = sum(len(run.keys) for run in runs)
        offsets = np.full(asked, -1, np.int64)
        if not self.may_grant or len(known.leases) >= LEASES_PER_ENGINE_MAX:
            self.counters["skipped_not_granting"] += asked
            return Granted(LeaseId(0), offsets)
        space.age(now)
        reachable, need = self._reachable(space, runs)
        if len(space.free) < need:
            self._make_room(space, need, self._protected(space, reachable), now)
        rows: list[int] = []
        places: list[int] = []
        first = 0
        for run in runs:
            self._place_run(space, run, first, rows, places)
            first += len(run.keys)
        if not rows:
            return Granted(LeaseId(0), offsets)
        granted = np.array(rows, np.int32)
        space.state[granted] = State.FILLING
        space.pin(granted)
        offsets[places] = space.offset[granted]
        lease = self._open_lease(known, space, True, granted)
        self.counters["blocks_reserved"] += len(rows)
        return Granted(lease.id, offsets)

    def commit(self, lease_id: LeaseId, is_ok: Sequence[bool]) -> None:
        """End a write lease: blocks whose bytes are all in place become readable.

        Args:
            is_ok: one flag per granted block, in the order of the grant.
        """
        lease = self.leases.get(lease_id)
        if lease is None or not lease.is_write or len(is_ok) != len(lease.rows):
            self.counters["unknown_leases"] += 1
            return
        space, rows = lease.space, lease.rows
        ok = np.asarray(is_ok, bool) & (space.state[rows] == State.FILLING)
        breaks = (np.flatnonzero(space.parent[rows[1:]] != rows[:-1]) + 1).tolist()
        for start, end in zip([0, *breaks], [*breaks, len(rows)], strict=True):
            self._publish(space, rows[start:end], ok[start:end])
        self._end_lease(lease)

    # ---- removal -------------------------------------------------------------------------------

    def purge(self, namespace: NamespaceId | None = None) -> int:
        """Drop all blocks of a namespace, or of all. Leased bytes stay until their last unpin.

        Returns:
            Number of blocks dropped.
        """
        targets = list(self.spaces.values()) if namespace is None else [self.spaces[namespace]]
        dropped = 0
        for space in targets:
            rows = list(space.index.values())
            dropped += len(rows)
            self._doom(space, np.array(rows, np.int32))
            self._handover.continue_draining(space)
        self.counters["purged"] += dropped
        return dropped

    # ---- reports -------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first."""
        events = list(self._events)
        self._events.clear()
        return events

    def check(self) -> None:
        """Recompute every counter from scratch. O(blocks).

        Raises:
            AssertionError: the directory contradicts itself.
        """
        check_directory(self)

    # ---- steps ---------------------------------------------------------------------------------

    def _open_lease(self, known: Engine, space: Namespace, is_write: bool, rows: Rows) -> Lease:
        self._lease_count += 1
        lease_id = LeaseId((self.limits.generation << 32) + self._lease_count)
        lease = Lease(lease_id, known.id, space, is_write, rows)
        self.leases[lease_id] = lease
        known.leases[lease_id] = lease
        return lease

    def _close_lease(self, lease: Lease) -> None:
        del self.leases[lease.id]
        known = self.engines.get(lease.engine)
        if known is not None:
            known.leases.pop(lease.id, None)

    def _end_lease(self, lease: Lease) -> None:
        if lease.is_write:
            self._doom(lease.space, self._filling(lease))
        else:
            self._growth.stop(lease)
        lease.space.unpin(lease.rows)
        self._close_lease(lease)
        self._handover.continue_draining(lease.space)

    @staticmethod
    def _chain(space: Namespace, found: list[int | None]) -> Rows:
        """The leading rows that are here and follow each other from the start of a prefix."""
        count = found.index(None) if None in found else len(found)
        rows: Rows = np.array(found[:count], np.int32)
        follows = space.parent[rows] == np.concatenate([_START, rows[:-1]])[:count]
        return rows if follows.all() else rows[: int(np.argmin(follows))]

    @staticmethod
    def _filling(lease: Lease) -> Rows:
        is_filling = lease.space.state[lease.rows] == State.FILLING
        filling: Rows = lease.rows[is_filling]
        return filling

    def _touch(self, space: Namespace, rows: Rows, now: float) -> None:
        if len(rows) == 0:
            return
        space.age(now)
        space.heat += len(rows) * space.slot_bytes
        self._stamp += 1
        space.stamp[rows] = self._stamp
        space.policy.touch(rows)

    @staticmethod
    def _reachable(space: Namespace, runs: Sequence[Run]) -> tuple[list[Run], int]:
        """Runs whose predecessor is here or comes in an earlier run, and the slots they need."""
        found: list[Run] = []
        fresh: set[BlockKey] = set()
        for run in runs:
            before = run.predecessor
            if before is None or before in space.index or before in fresh:
                found.append(run)
                fresh.update(key for key in run.keys if key not in space.index)
        return found, len(fresh)

    def _place_run(
        self, space: Namespace, run: Run, first: int, rows: list[int], places: list[int]
    ) -> None:
        """Give slots to the missing blocks of a run; stop at the first that finds none."""
        parent = 0
        if run.predecessor is not None:
            found = space.index.get(run.predecessor)
            if found is None:
                self.counters["skipped_orphan"] += len(run.keys)
                return
            parent = found
        for position, key in enumerate(run.keys):
            row = space.index.get(key)
            if row is None:
                if not space.free:
                    self.counters["skipped_no_room"] += len(run.keys) - position
                    return
                row = space.place(key, parent)
                rows.append(row)
                places.append(first + position)
            else:
                self.counters["skipped_present"] += 1
            parent = row

    @staticmethod
    def _protected(space: Namespace, runs: Sequence[Run]) -> set[int]:
        """The deepest present block of each run; evicting it or an ancestor would be pointless."""
        found = set()
        for run in runs:
            present = [k for k in run.keys if k in space.index]
            anchor = present[-1] if present else run.predecessor
            row = space.index.get(anchor) if anchor is not None else None
            if row is not None:
                found.add(row)
        return found

    def _make_room(self, space: Namespace, need: int, protected: set[int], now: float) -> None:
        """Free slots: unused extents first, then the coldest unpinned blocks.

        The order gives up a block before its predecessor, so the ancestors of a protected block
        come up one after the other, and one moving mark per run protects them all.
        """
        self._handover.claim(space, need - len(space.free))
        if len(space.free) < need:
            self._handover.ask(space, now)
            self._handover.claim(space, need - len(space.free))
        short = need - len(space.free)
        if short <= 0:
            return
        victims: list[int] = []
        pins, parent = space.pins.data, space.parent.data
        for scanned, row in enumerate(space.policy.candidates()):
            if len(victims) == short or scanned == VICTIMS_SCANNED_MAX:
                break
            if row in protected:
                protected.discard(row)
                protected.add(parent[row])
            elif pins[row] == 0:
                victims.append(row)
        self._evict(space, np.array(victims, np.int32))
        self.counters["evicted"] += len(victims)

    def _evict(self, space: Namespace, rows: Rows) -> None:
        """Remove resident, unpinned rows."""
        if len(rows) == 0:
            return
        newest_first = rows[::-1]
        space.policy.remove(newest_first)
        listed = rows.tolist()
        space.unlist(listed)
        space.free_rows(listed)

    def _publish(self, space: Namespace, rows: Rows, ok: Rows) -> None:
        """Make the good head of a run resident; the rest stays as it is and goes with its lease."""
        good = len(rows) if ok.all() else int(np.argmin(ok))
        if good and not space.has_parent(int(rows[0])):
            self.counters["commit_orphaned"] += good
            good = 0
        self.counters["commit_failed"] += int(np.count_nonzero(~ok))
        head = rows[:good]
        if good == 0:
            return
        space.state[head] = State.RESIDENT
        space.policy.insert(head, int(space.parent[head[0]]))
        self._stamp += 1
        space.stamp[head] = self._stamp
        self.counters["blocks_stored"] += good
        self.counters["bytes_stored"] += good * space.slot_bytes
        if space.waiters:
            self._growth.wake(space, head.tolist(), True)

    def _doom(self, space: Namespace, rows: Rows) -> None:
        """Take listed rows out of the index; free their slots, pinned ones at the last unpin."""
        if len(rows) == 0:
            return
        listed = rows.tolist()
        resident = rows[space.state[rows] == State.RESIDENT]
        if len(resident):
            space.policy.remove(resident)
        space.unlist(listed)
        if space.waiters:
            self._growth.wake(space, listed, False)
        space.state[rows] = State.DOOMED
        space.free_rows(rows[space.pins[rows] == 0].tolist())

    def _recall_if_crowded(self) -> None:
        """Ask for the youngest waiting leases back while too much of the pool is pinned."""
        room = self.limits.pinned_share_max * self.limits.pool_bytes
        pinned = sum(s.pinned * s.slot_bytes for s in self.spaces.values())
        for lease in reversed(self.leases.values()):
            if pinned <= room:
                return
            if not (lease.is_write or lease.is_taken or lease.is_recalled):
                lease.is_recalled = True
                self._events.append(Recall(lease.engine, lease.id))
                pinned -= len(lease.rows) * lease.space.slot_bytes

    def _drop_unused_space(self) -> bool:
        """Forget a namespace that nobody uses: an empty one if there is one, else the oldest."""
        leased = {id(lease.space) for lease in self.leases.values()}
        unused = [s for s in self.spaces.values() if not s.users and id(s) not in leased]
        if not unused:
            return False
        space = next((s for s in unused if not s.index), unused[0])
        self.purge(space.id)
        for extent in list(space.extents):
            space.start_draining(extent)
        self._handover.continue_draining(space)
        del self.spaces[space.id]
        return True
