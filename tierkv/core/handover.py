"""Extents change hands between namespaces.

A namespace that must give up blocks while it holds less than its share of the pool asks for an
extent. The share follows the hits of the last minutes, with at least one extent each. The donor is
whoever is above its share; of all pieces that could be given, the one whose warmest unpinned block
is the coldest is drained: no new grants, its blocks dropped, and given away when its last slot is
free. Blocks that a tier must still get are written first, for at most `DRAIN_WAIT_S`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tierkv.core.eviction.base import Rows
from tierkv.core.extents import Extent, ExtentMap
from tierkv.core.namespace import Namespace, State
from tierkv.types import NamespaceId

ASK_PAUSE_S = 1.0
DRAIN_WAIT_S = 10.0
HEAT_MIN = 1.0  # below one byte hit in the last minutes nobody is warm


class Handover:
    """Decides which namespace holds which extents."""

    def __init__(
        self,
        extents: ExtentMap,
        spaces: Mapping[NamespaceId, Namespace],
        doom: Callable[[Namespace, Rows], None],
        pay: Callable[[Namespace, Rows], bool],
        counters: Counter[str],
    ) -> None:
        self._extents = extents
        self._spaces = spaces
        self._doom = doom
        self._pay = pay
        self._counters = counters
        self._now = 0.0

    def claim(self, space: Namespace, slots: int) -> None:
        """Take free extents until `slots` more slots are there or no extent is free."""
        while slots > 0 and self._extents.free_units >= space.units_per_extent:
            first = space.next_first_row()
            extent = self._extents.take(space.units_per_extent, first, space.rows_per_extent)
            if extent is None:
                return
            space.add_extent(extent)
            slots -= extent.rows

    def ask(self, space: Namespace, now: float) -> None:
        """Start a hand-over if the namespace is short of its share and none is under way."""
        self._now = now
        if space.units + space.units_per_extent > self._share(space, now):
            return
        if now < space.ask_again_at or self._is_draining(now):
            return
        space.ask_again_at = now + ASK_PAUSE_S
        owners = {id(e): s for s in self._spaces.values() for e in s.extents}
        warmth_of = {id(s): s.warmth() for s in self._spaces.values() if s is not space}
        best: tuple[int, list[Extent]] | None = None
        for inside in self._extents.windows(space.units_per_extent):
            donors = [owners[id(extent)] for extent in inside]
            if all(self._may_give(d, space, donors.count(d), now) for d in donors):
                pairs = zip(donors, inside, strict=True)
                warmth = max((self._warmest(warmth_of[id(d)], d, e) for d, e in pairs), default=0)
                if best is None or warmth < best[0]:
                    best = (warmth, inside)
        for extent in best[1] if best is not None else []:
            owner = owners[id(extent)]
            owner.start_draining(extent, now)
            self.continue_draining(owner, True)

    def _is_draining(self, now: float) -> bool:
        """Whether an extent is changing hands; one that is stuck, by a pin, does not count."""
        return any(
            now < extent.draining_since + DRAIN_WAIT_S
            for space in self._spaces.values()
            for extent in space.draining()
        )

    def tick(self, now: float) -> None:
        """Go on with extents that waited for their blocks to be written."""
        self._now = now
        for space in list(self._spaces.values()):
            self.continue_draining(space, True)

    def continue_draining(self, space: Namespace, may_drop: bool = False) -> None:
        """Drop what may be dropped from draining extents; free those that are empty.

        Blocks that are being read or written lose their names at once and their slots later. With
        a block go those that no lookup could reach without it, wherever they lie.

        Args:
            may_drop: look for blocks to drop, which costs time in the number of blocks; otherwise
                only see whether an extent is empty by now.
        """
        for extent in space.draining():
            inside = np.arange(extent.first_row, extent.first_row + extent.rows, dtype=np.int32)
            here = inside[space.state[inside] == State.RESIDENT]
            if len(here) and may_drop:
                self._drop(space, here, self._now >= extent.draining_since + DRAIN_WAIT_S)
            if space.is_drained(extent):
                space.drop_extent(extent)
                self._extents.give_back(extent)

    def _drop(self, space: Namespace, rows: Rows, is_overdue: bool) -> None:
        """Drop rows and their successors, once nothing among them is owed."""
        gone = space.cut_off_by(rows)
        unpaid = space.unpaid(gone)
        if len(unpaid):
            if not is_overdue and self._pay(space, unpaid):
                return
            self._counters["writeback_shed"] += len(unpaid)
        self._doom(space, gone)

    def _share(self, space: Namespace, now: float) -> float:
        """Units that a namespace may hold: by recent hits, at least one extent."""
        active = [s for s in self._spaces.values() if s is space or (s.extents and s.users)]
        total = sum(s.heat_now(now) for s in active)
        part = space.heat_now(now) / total if total > HEAT_MIN else 1 / len(active)
        return max(float(space.units_per_extent), part * self._extents.units)

    def _may_give(self, donor: Namespace, asker: Namespace, extents: int, now: float) -> bool:
        if donor is asker:
            return False
        if not donor.index:
            return True
        left = donor.units - extents * donor.units_per_extent
        if left < (donor.units_per_extent if donor.users else 0):
            return False
        return not asker.extents or not donor.users or left >= self._share(donor, now)

    @staticmethod
    def _warmest(warmth: npt.NDArray[np.int64], space: Namespace, extent: Extent) -> int:
        """Warmth of the warmest unpinned block of an extent; 0 if there is none."""
        inside = slice(extent.first_row, extent.first_row + extent.rows)
        idle = (space.state[inside] == State.RESIDENT) & (space.pins[inside] == 0)
        return int(np.where(idle, warmth[inside], 0).max(initial=0))
