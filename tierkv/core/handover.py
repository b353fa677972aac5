"""Extents change hands between namespaces.

A namespace that must give up blocks while it holds less than its share of the pool asks for an
extent. The share follows the hits of the last minutes, with at least one extent each. The donor is
whoever is above its share; of all pieces that could be given, the one whose warmest unpinned block
is the coldest is drained: no new grants, its blocks dropped, and given away when its last slot is
free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt

from tierkv.core.eviction.base import Rows
from tierkv.core.extents import Extent, ExtentMap
from tierkv.core.namespace import Namespace, State
from tierkv.types import NamespaceId

ASK_PAUSE_S = 1.0
HEAT_MIN = 1.0  # below one byte hit in the last minutes nobody is warm


class Handover:
    """Decides which namespace holds which extents."""

    def __init__(
        self,
        extents: ExtentMap,
        spaces: Mapping[NamespaceId, Namespace],
        evict: Callable[[Namespace, Rows], None],
    ) -> None:
        self._extents = extents
        self._spaces = spaces
        self._evict = evict

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
        if space.units + space.units_per_extent > self._share(space, now):
            return
        if now < space.ask_again_at or any(s.draining() for s in self._spaces.values()):
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
            owner.start_draining(extent)
            self.continue_draining(owner)

    def continue_draining(self, space: Namespace) -> None:
        """Drop what may be dropped from draining extents; free those that are empty."""
        for extent in space.draining():
            inside = np.arange(extent.first_row, extent.first_row + extent.rows, dtype=np.int32)
            idle = (space.state[inside] == State.RESIDENT) & (space.pins[inside] == 0)
            if idle.any():
                self._evict(space, inside[idle])
                lost = space.orphans()
                self._evict(space, lost[space.pins[lost] == 0])
            if space.is_drained(extent):
                space.drop_extent(extent)
                self._extents.give_back(extent)

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
