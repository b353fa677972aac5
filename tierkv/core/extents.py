"""How the pool is cut into extents, and extents into slots.

An extent is a contiguous piece of the pool that belongs to one namespace. Its size is a multiple of
the extent unit: the smallest one with which at most 3 % of the pool are lost to slots of that size
(behind the last slot of each extent, and behind the last extent), at most 1 GiB. Slots never
straddle extents.
"""

from __future__ import annotations

from dataclasses import dataclass

WASTE_MAX = 0.03
EXTENT_BYTES_MAX = 1 << 30


@dataclass(slots=True, eq=False)
class Extent:
    """A piece of the pool.

    Attributes:
        first_unit, units: where it lies, in extent units.
        first_row, rows: the row numbers of its slots in its namespace.
        is_draining: no new grants; it changes hands when its last slot is free.
    """

    first_unit: int
    units: int
    first_row: int
    rows: int
    is_draining: bool = False
    draining_since: float = 0.0


class ExtentMap:
    """Which unit of the pool belongs to which extent."""

    def __init__(self, pool_bytes: int, unit_bytes: int) -> None:
        assert pool_bytes > 0, "a pool has bytes"
        assert unit_bytes > 0, "an extent unit has bytes"
        self.unit_bytes = min(unit_bytes, pool_bytes)
        self.units = pool_bytes // self.unit_bytes
        self._owners: list[Extent | None] = [None] * self.units

    @property
    def free_units(self) -> int:
        return self._owners.count(None)

    def units_per_extent(self, slot_bytes: int) -> int:
        """Units of one extent for slots of this size; 0 if no slot fits the pool."""
        low = -(-slot_bytes // self.unit_bytes)
        top = min(max(EXTENT_BYTES_MAX // self.unit_bytes, low), self.units)
        ideal = self.units * self.unit_bytes / slot_bytes
        best, most = 0, 0
        for units in range(low, top + 1):
            slots = self.units // units * (units * self.unit_bytes // slot_bytes)
            if slots >= ideal * (1 - WASTE_MAX):
                return units
            if slots > most:
                best, most = units, slots
        return best

    def take(self, units: int, first_row: int, rows: int) -> Extent | None:
        """Allocate a contiguous range of free units, or None."""
        run = 0
        for unit, owner in enumerate(self._owners):
            run = run + 1 if owner is None else 0
            if run == units:
                extent = Extent(unit - units + 1, units, first_row, rows)
                self._owners[extent.first_unit : unit + 1] = [extent] * units
                return extent
        return None

    def give_back(self, extent: Extent) -> None:
        """Free an extent's units."""
        place = slice(extent.first_unit, extent.first_unit + extent.units)
        assert all(owner is extent for owner in self._owners[place]), "extent owns its units"
        self._owners[place] = [None] * extent.units

    def windows(self, units: int) -> list[list[Extent]]:
        """The extents that overlap each run of `units` units.

        Runs begin where an extent or a free unit begins. Free units cost nothing and are not told.
        """
        found = []
        for start in range(self.units - units + 1):
            here = self._owners[start]
            if here is not None and here.first_unit != start:
                continue
            inside = self._owners[start : start + units]
            found.append(list({id(e): e for e in inside if e is not None}.values()))
        return found


def slots_in(pool_bytes: int, unit_bytes: int, slot_bytes: int) -> int:
    """Slots of one size that a pool holds when nobody else needs it; 0 for no pool."""
    if pool_bytes <= 0:
        return 0
    extents = ExtentMap(pool_bytes, unit_bytes)
    units = extents.units_per_extent(slot_bytes)
    if units == 0:
        return 0
    return extents.units // units * (units * extents.unit_bytes // slot_bytes)
