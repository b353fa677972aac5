"""The directory: what engines ask for, decided.

Every change of a block's state itself is made by `Books`; what happens below DRAM is decided by
`TieringManager`.
Rule 1: what a lookup hits is pinned before anything else happens.
Rule 2: no clock ends a lease of a living engine. `now` only ages statistics and tiers' deadlines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tierkv.core.audit import check_directory
from tierkv.core.books import Books
from tierkv.core.eviction.base import EvictionPolicy, Rows
from tierkv.core.eviction.slru import Slru
from tierkv.core.leases import Engine, Lease
from tierkv.core.namespace import Namespace, State
from tierkv.core.tiering import TieringManager
from tierkv.core.values import NO_OFFSETS, Event, Found, Granted, Limits, Run, TierLimits
from tierkv.types import BlockKey, EngineId, LeaseId, NamespaceId

LEASES_PER_ENGINE_MAX = 8_192
NAMESPACES_MAX = 1_024
SLOTS_MAX = 1 << 24


class Directory:
    """Index of every cached block of the node, and the leases on them.

    Args:
        make_policy: makes the eviction order of a new namespace.
    """

    def __init__(
        self,
        limits: Limits,
        tiers: Sequence[TierLimits] = (),
        make_policy: Callable[[], EvictionPolicy] = Slru,
    ) -> None:
        self.limits = limits
        self._make_policy = make_policy
        self.books = Books(limits)
        self.tiering = TieringManager(self.books, tiers)
        self.extents = self.books.extents
        self.spaces = self.books.spaces
        self.leases = self.books.leases
        self.counters = self.books.counters
        self.engines: dict[EngineId, Engine] = {}

    @property
    def may_grant(self) -> bool:
        """Whether slots may be handed out; not while others may still touch any of them."""
        return self.books.may_grant

    @may_grant.setter
    def may_grant(self, value: bool) -> None:
        self.books.may_grant = value

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
        *,
        block_tokens: int = 0,
    ) -> str | None:
        """Make a namespace usable for an engine.

        Args:
            is_private: for this engine alone; such blocks never leave DRAM.
            block_tokens: tokens per block; 0 if unknown.

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
            space.block_tokens = space.block_tokens or block_tokens
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
            policy=self._make_policy(),
            label=label,
            private_to=engine if is_private else None,
            block_tokens=block_tokens,
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
                self.books.doom(lease.space, self._filling(lease))
                self.tiering.advance(lease.space)

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
                self.tiering.advance(lease.space)

    # ---- load ----------------------------------------------------------------------------------

    def lookup(
        self, engine: EngineId, namespace: NamespaceId, keys: Sequence[BlockKey], now: float
    ) -> Found:
        """Pin the leading blocks of a prefix that are here, and wait for those on their way.

        Args:
            keys: distinct keys from the first block of the prefix on.
        """
        space = self.spaces[namespace]
        rows = self.books.chain(space, list(map(space.index.get, keys)))
        count = len(rows)
        resident = space.state[rows] == State.RESIDENT
        ready = count if resident.all() else int(np.argmin(resident))
        self.counters["lookups"] += 1
        self.counters["blocks_asked"] += len(keys)
        is_below = count < len(keys) and self.tiering.may_have(namespace, keys[count], now)
        known = self.engines[engine]
        if count == 0 and not is_below:
            self.counters["miss_absent"] += len(keys)
            return Found(LeaseId(0), NO_OFFSETS, 0)
        if len(known.leases) >= LEASES_PER_ENGINE_MAX:
            self.counters["miss_absent"] += len(keys) - count
            self.counters["miss_leases_max"] += count
            return Found(LeaseId(0), NO_OFFSETS, 0)
        lease = self.books.open_lease(known, space, False, rows[:ready])
        self.books.touch(space, rows[:ready], now)
        self.counters["blocks_hit"] += ready
        self.counters["bytes_hit"] += ready * space.slot_bytes
        growth = self.books.growth
        growth.start(lease, rows[ready:])
        if is_below:
            self.tiering.extend(lease, int(rows[-1]) if count else 0, keys[count:], now)
        pending = len(lease.growing) + len(lease.unknown)
        self.counters["miss_absent"] += len(keys) - ready - pending
        if ready + pending == 0:
            self._close_lease(lease)
            return Found(LeaseId(0), NO_OFFSETS, 0)
        self.books.recall_if_crowded()
        return Found(lease.id, space.offset[lease.rows], pending, growth.is_promoting(lease))

    def touch(self, namespace: NamespaceId, keys: Sequence[BlockKey], now: float) -> None:
        """Note one use of a prefix that the device already holds."""
        space = self.spaces[namespace]
        rows = self.books.chain(space, list(map(space.index.get, keys)))
        resident = space.state[rows] == State.RESIDENT
        self.books.touch(space, rows if resident.all() else rows[: int(np.argmin(resident))], now)

    def trim(self, lease_id: LeaseId, blocks: int) -> None:
        """Keep the first blocks of a read lease and stop its growth: a copy is about to be issued.

        `blocks` = 0 ends the lease.
        """
        lease = self.leases.get(lease_id)
        if lease is None or lease.is_write:
            self.counters["unknown_leases"] += 1
            return
        self.books.growth.stop(lease)
        rest = lease.rows[blocks:]
        lease.rows = lease.rows[:blocks]
        del lease.sources[blocks:]
        lease.is_taken = True
        lease.space.unpin(rest)
        if blocks == 0:
            self._close_lease(lease)
        self.books.handover.continue_draining(lease.space)

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
        absent = self._absent(space, runs)
        self.books.make_room(space, absent, lambda: self._protected(space, runs), now)
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
        offsets[places] = space.offset[granted]
        lease = self.books.open_lease(known, space, True, granted)
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
        self.tiering.advance(space)

    # ---- removal -------------------------------------------------------------------------------

    def purge(
        self,
        namespace: NamespaceId | None = None,
        older_than_s: float | None = None,
        now: float = 0.0,
    ) -> int:
        """Drop blocks of a namespace, or of all, in DRAM. Leased bytes stay until their last unpin.

        Args:
            older_than_s: only blocks not used for this time, and what depends on them.
        Returns:
            Number of blocks dropped.
        """
        targets = list(self.spaces.values()) if namespace is None else [self.spaces[namespace]]
        dropped = 0
        for space in targets:
            rows = np.array(list(space.index.values()), np.int32)
            if older_than_s is not None:
                resident = rows[space.state[rows] == State.RESIDENT]
                rows = space.cut_off_by(resident[space.used_at[resident] <= now - older_than_s])
            dropped += len(rows)
            self.books.doom(space, rows)
            self.tiering.advance(space)
            self.books.handover.continue_draining(space)
        self.counters["purged"] += dropped
        return dropped

    # ---- reports -------------------------------------------------------------------------------

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first."""
        events = list(self.books.events)
        self.books.events.clear()
        return events

    def check(self) -> None:
        """Recompute every counter from scratch. O(blocks).

        Raises:
            AssertionError: the directory contradicts itself.
        """
        check_directory(self)

    # ---- steps ---------------------------------------------------------------------------------

    def _close_lease(self, lease: Lease) -> None:
        del self.leases[lease.id]
        known = self.engines.get(lease.engine)
        if known is not None:
            known.leases.pop(lease.id, None)

    def _end_lease(self, lease: Lease) -> None:
        if lease.is_write:
            self.books.doom(lease.space, self._filling(lease))
        else:
            self.books.growth.stop(lease)
        lease.space.unpin(lease.rows)
        self._close_lease(lease)
        self.books.handover.continue_draining(lease.space)

    @staticmethod
    def _filling(lease: Lease) -> Rows:
        is_filling = lease.space.state[lease.rows] == State.FILLING
        filling: Rows = lease.rows[is_filling]
        return filling

    @staticmethod
    def _absent(space: Namespace, runs: Sequence[Run]) -> list[Run]:
        """The absent blocks of runs whose predecessor is here or comes in an earlier run.

        Each piece between blocks that are here is a run with a predecessor of its own.
        """
        found: list[Run] = []
        fresh: set[BlockKey] = set()
        for run in runs:
            before = run.predecessor
            if not (before is None or before in space.index or before in fresh):
                continue
            piece: list[BlockKey] = []
            for key in run.keys:
                if key in space.index or key in fresh:
                    piece = []
                else:
                    if not piece:
                        found.append(Run(before, piece))
                    piece.append(key)
                    fresh.add(key)
                before = key
        return found

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
        """The deepest blocks of each run that are here, down to one that is readable.

        To evict them or an ancestor would be pointless. One that is being filled is no heir of its
        predecessor yet, so the readable one behind it is told as well.
        """
        found = set()
        for run in runs:
            before = [run.predecessor] if run.predecessor is not None else []
            for key in reversed([*before, *run.keys]):
                row = space.index.get(key)
                if row is None:
                    continue
                found.add(row)
                if space.state[row] == State.RESIDENT:
                    break
        return found

    def _publish(self, space: Namespace, rows: Rows, ok: Rows) -> None:
        """Make the good head of a run resident; the rest stays as it is and goes with its lease."""
        good = len(rows) if ok.all() else int(np.argmin(ok))
        self.counters["commit_failed"] += int(np.count_nonzero(~ok))
        stored = self.books.publish(space, rows[:good])
        self.counters["commit_orphaned"] += good - stored
        self.counters["blocks_stored"] += stored
        self.counters["bytes_stored"] += stored * space.slot_bytes

    def _drop_unused_space(self) -> bool:
        """Forget a namespace that nobody uses: an empty one if there is one, else the oldest."""
        leased = {id(lease.space) for lease in self.leases.values()}
        unused = [
            s for s in self.spaces.values()
            if not s.users and id(s) not in leased and not self.tiering.is_busy(s.id)
        ]  # fmt: skip
        if not unused:
            return False
        space = next((s for s in unused if not s.index), unused[0])
        self.purge(space.id)
        for extent in list(space.extents):
            space.start_draining(extent, 0.0)
        self.books.handover.continue_draining(space)
        del self.spaces[space.id]
        self.tiering.cleaner.forget_uses(space.id)
        return True
