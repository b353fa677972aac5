"""One namespace: its index, its rows and its part of the pool.

No Python object per block: a dict from key to row, and flat arrays. At ten million blocks this is
about 200 bytes per block and no garbage-collector pause. Row numbers start at 1; row 0 is the
anchor of the eviction order and never a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from tierkv.core.eviction.base import EvictionPolicy, Rows
from tierkv.core.extents import Extent
from tierkv.types import BlockKey, EngineId, LeaseId, NamespaceId

HEAT_HALF_LIFE_S = 60.0


class State(IntEnum):
    """State of a row. Absent blocks have no row."""

    FREE = 0
    FILLING = 1  # a write lease holds it
    RESIDENT = 2  # readable
    DOOMED = 3  # out of the index; its slot is freed at the last unpin
    PROMOTING = 4  # a tier read holds it


class Namespace:
    """Blocks whose bytes are interchangeable, with slots of one size.

    Attributes:
        private_to: the engine that alone may use it, or None.
        users: engines that attached it and live.
        may_demote: its blocks may leave DRAM; those of private namespaces never do.
        block_tokens: tokens per block; 0 if nobody told.
        heat: recent hits, halved every minute; decides a namespace's share of the pool.
        waiters: row being filled or promoted -> read leases that wait for it.
        dirty: rows with a debt in `owed`.
        owed: per row the tiers that must still get the block, one bit per tier.
        queued: those of `owed` that wait for a write thread.
        moving: tiers that are writing the block now.
        heirs: per row how many resident rows have it as their predecessor; row 0: prefixes.
        used_at: time of the last use, in the daemon's clock.
        changed: blocks that came or went since the cleaner looked.
        demand: slots that one request lately needed at once; see `Books.make_room`.
    """

    def __init__(
        self,
        namespace_id: NamespaceId,
        *,
        slot_bytes: int,
        units_per_extent: int,
        unit_bytes: int,
        policy: EvictionPolicy,
        label: str,
        private_to: EngineId | None,
        block_tokens: int = 0,
    ) -> None:
        self.id = namespace_id
        self.slot_bytes = slot_bytes
        self.units_per_extent = units_per_extent
        self.unit_bytes = unit_bytes
        self.rows_per_extent = units_per_extent * unit_bytes // slot_bytes
        self.policy = policy
        self.label = label
        self.private_to = private_to
        self.may_demote = private_to is None
        self.block_tokens = block_tokens
        self.dirty = 0
        self.changed = 0
        self.demand = 0.0
        self.extents: list[Extent] = []
        self.free: list[int] = []
        self.waiters: dict[int, list[LeaseId]] = {}
        self.pinned = 0
        self.heat = 0.0
        self.heat_at = 0.0
        self.ask_again_at = 0.0
        self.users: set[EngineId] = set()
        self.index: dict[BlockKey, int] = {}
        self.keys: list[BlockKey | None] = [None]
        self._free_ranges: list[int] = []
        self._set_arrays(1)

    def _set_arrays(self, rows: int) -> None:
        self.state: npt.NDArray[np.int8] = np.zeros(rows, np.int8)
        self.pins: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.parent: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.serial: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.parent_serial: npt.NDArray[np.int32] = np.zeros(rows, np.int32)
        self.offset: npt.NDArray[np.int64] = np.full(rows, -1, np.int64)
        self.stamp: npt.NDArray[np.int64] = np.zeros(rows, np.int64)
        self.used_at: npt.NDArray[np.float64] = np.zeros(rows, np.float64)
        self.owed: npt.NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.queued: npt.NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.moving: npt.NDArray[np.uint8] = np.zeros(rows, np.uint8)
        self.heirs: npt.NDArray[np.int32] = np.zeros(rows, np.int32)

    def _arrays(self) -> list[npt.NDArray[np.int64]]:
        columns = (self.state, self.pins, self.parent, self.serial, self.parent_serial)
        more = (self.offset, self.stamp, self.used_at, self.owed, self.queued, self.moving)
        return [*columns, *more, self.heirs]  # type: ignore[list-item]  # dtypes differ

    def _grow(self, rows: int) -> None:
        have = len(self.state)
        if rows > have:
            old = self._arrays()
            size = max(rows, have * 2)
            self._set_arrays(size)
            for source, target in zip(old, self._arrays(), strict=True):
                target[:have] = source
            self.policy.grow(size)
        self.keys.extend([None] * (rows - len(self.keys)))

    def heat_now(self, now: float) -> float:
        """Bytes hit lately, halved every minute, whether or not anybody asks."""
        return float(self.heat * 0.5 ** (max(0.0, now - self.heat_at) / HEAT_HALF_LIFE_S))

    def age(self, now: float) -> None:
        """Bring `heat` up to date."""
        self.heat = self.heat_now(now)
        self.heat_at = now

    # ---- slots ---------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return len(self.extents) * self.rows_per_extent

    @property
    def units(self) -> int:
        return len(self.extents) * self.units_per_extent

    def next_first_row(self) -> int:
        """The first row number that a new extent will use."""
        return self._free_ranges[-1] if self._free_ranges else len(self.keys)

    def add_extent(self, extent: Extent) -> None:
        """Take an extent into use; it was made with `next_first_row`."""
        first, end = extent.first_row, extent.first_row + extent.rows
        if self._free_ranges and self._free_ranges[-1] == first:
            self._free_ranges.pop()
        self._grow(end)
        base = extent.first_unit * self.unit_bytes
        self.offset[first:end] = base + np.arange(extent.rows, dtype=np.int64) * self.slot_bytes
        self.extents.append(extent)
        self.free.extend(range(end - 1, first - 1, -1))
        self.policy.resize(self.slots)

    def start_draining(self, extent: Extent, now: float) -> None:
        """No new grants from this extent."""
        extent.is_draining = True
        extent.draining_since = now
        inside = range(extent.first_row, extent.first_row + extent.rows)
        self.free = [row for row in self.free if row not in inside]

    def is_drained(self, extent: Extent) -> bool:
        """Whether no slot of an extent is in use."""
        inside = slice(extent.first_row, extent.first_row + extent.rows)
        return not self.state[inside].any()

    def drop_extent(self, extent: Extent) -> None:
        """Forget a drained extent; its row numbers are used again."""
        assert self.is_drained(extent), "an extent changes hands only when it is empty"
        self.extents.remove(extent)
        self.offset[extent.first_row : extent.first_row + extent.rows] = -1
        self._free_ranges.append(extent.first_row)
        self.policy.resize(self.slots)

    def draining(self) -> list[Extent]:
        """Extents that are about to change hands."""
        return [extent for extent in self.extents if extent.is_draining]

    def free_rows(self, rows: Sequence[int]) -> None:
        """Return slots; their blocks are gone from index and policy."""
        if len(rows) == 0:
            return
        picked = np.asarray(rows, np.int32)
        assert not self.pins[picked].any(), "a pinned slot is never freed"
        self.cancel_debts(picked)
        self.state[picked] = State.FREE
        self.serial[picked] += 1
        keys = self.keys
        for row in rows:
            keys[row] = None
        drains = self.draining()
        if not drains:
            self.free.extend(rows)
            return
        for row in rows:
            if not any(e.first_row <= row < e.first_row + e.rows for e in drains):
                self.free.append(row)

    # ---- blocks --------------------------------------------------------------------------------

    def place(self, key: BlockKey, parent: int) -> int:
        """Give a free slot to a key; the caller sets its state and pins it."""
        assert key not in self.index, "a key has one row"
        row = self.free.pop()
        self.index[key] = row
        self.keys[row] = key
        self.parent[row] = parent
        self.parent_serial[row] = self.serial[parent]
        return row

    def unlist(self, rows: Sequence[int]) -> None:
        """Take keys out of the index."""
        index, keys = self.index, self.keys
        for row in rows:
            key = keys[row]
            assert key is not None, "a listed row has a key"
            del index[key]

    def pin(self, rows: Rows) -> None:
        """Add one pin per row."""
        pins = self.pins[rows]
        self.pinned += int(np.count_nonzero(pins == 0))
        self.pins[rows] = pins + 1

    def unpin(self, rows: Rows) -> None:
        """Drop one pin per row; slots of doomed blocks are freed at the last one."""
        pins = self.pins[rows] - 1
        assert not (pins < 0).any(), "a pin is dropped once"
        self.pins[rows] = pins
        gone = pins == 0
        self.pinned -= int(np.count_nonzero(gone))
        doomed = rows[gone & (self.state[rows] == State.DOOMED)]
        if len(doomed):
            self.free_rows(doomed.tolist())

    def has_parent(self, row: int) -> bool:
        """Whether a row's predecessor is readable, or none is needed."""
        parent = self.parent[row]
        return bool(
            parent == 0
            or (
                self.state[parent] == State.RESIDENT
                and self.serial[parent] == self.parent_serial[row]
            )
        )

    def cut_off_by(self, rows: Rows) -> Rows:
        """Resident rows that no lookup could reach if `rows` were gone; those of `rows` included.

        Pointer doubling: after step i every row has looked 2**i predecessors up.
        """
        parent = self.parent
        resident = self.state == State.RESIDENT
        lost = resident & (parent != 0)
        lost &= (self.state[parent] != State.RESIDENT) | (self.serial[parent] != self.parent_serial)
        lost[rows] = True
        lost &= resident
        up = np.where(resident & ~lost, parent, 0)
        while up.any():
            lost |= lost[up]
            up = up[up]
        return np.flatnonzero(lost & resident).astype(np.int32)

    def orphans(self) -> Rows:
        """Resident rows that no lookup can reach, because an ancestor is gone."""
        return self.cut_off_by(np.zeros(0, np.int32))

    # ---- debts ---------------------------------------------------------------------------------

    def owe(self, rows: Rows, bit: int) -> None:
        """Note that a tier must still get these blocks."""
        self.dirty += int(np.count_nonzero(self.owed[rows] == 0))
        self.owed[rows] |= np.uint8(bit)

    def settle(self, rows: Rows, bit: int) -> None:
        """Note that a tier got these blocks, or will not get them any more."""
        before = self.owed[rows]
        after = before & np.uint8(0xFF ^ bit)
        self.dirty -= int(np.count_nonzero((before != 0) & (after == 0)))
        self.owed[rows] = after
        self.queued[rows] &= after

    def cancel_debts(self, rows: Rows) -> None:
        """Forget all debts of these rows; writes that are running go on."""
        self.settle(rows, 0xFF)

    def unpaid(self, rows: Rows) -> Rows:
        """Those of `rows` that owe something to a tier that is not writing it now."""
        picked: Rows = rows[(self.owed[rows] & ~self.moving[rows]) != 0]
        return picked

    def warmth(self) -> npt.NDArray[np.int64]:
        """Per row the latest use of a block or of any block that depends on it.

        Pointer doubling: after step i every row has heard from 2**i generations of successors.
        """
        resident = self.state == State.RESIDENT
        latest: npt.NDArray[np.int64] = np.where(resident, self.stamp, 0)
        up = np.where(resident, self.parent, 0)
        while up.any():
            np.maximum.at(latest, up, latest.copy())
            up = up[up]
        return latest
