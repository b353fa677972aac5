"""How the pool is cut: sizes of extents, taking, giving back, and the windows of a hand-over."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.core.extents import EXTENT_BYTES_MAX, WASTE_MAX, Extent, ExtentMap

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def take(extents: ExtentMap, units: int) -> Extent:
    extent = extents.take(units, 0, 1)
    assert extent is not None
    return extent


# ---- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("slot_bytes", "units"),
    [
        (MIB, 1),  # nothing is wasted
        (64 * MIB, 1),
        (63 * MIB, 1),  # 1.6 % of a unit are left over
        (128 * MIB, 2),
        (40 * MIB, 5),  # 320 MiB hold exactly eight
        (33 * MIB, 9),  # 17 of them leave 2.6 %
        (65 * MIB, 16),  # nothing up to 1 GiB wastes so little; the largest wastes least
        (GIB, 16),
        (3 * GIB, 48),  # one slot above the largest extent: an extent of its own
    ],
)
def test_an_extent_is_the_smallest_that_wastes_little(slot_bytes, units):
    assert ExtentMap(256 * GIB, 64 * MIB).units_per_extent(slot_bytes) == units


def waste(units: int, unit_bytes: int, slot_bytes: int) -> float:
    size = units * unit_bytes
    return size % slot_bytes / size


def expected_units(extents: ExtentMap, slot_bytes: int) -> int:
    """The rule, spelled out: at least one slot, at most 1 GiB unless one slot needs more."""
    sizes = [
        units
        for units in range(1, extents.units + 1)
        if units * extents.unit_bytes >= slot_bytes
        and (
            units * extents.unit_bytes <= EXTENT_BYTES_MAX
            or (units - 1) * extents.unit_bytes < slot_bytes
        )
    ]
    slots = {u: extents.units // u * (u * extents.unit_bytes // slot_bytes) for u in sizes}
    enough = extents.units * extents.unit_bytes / slot_bytes * (1 - WASTE_MAX)
    thrifty = [u for u in sizes if slots[u] >= enough]
    if thrifty:
        return thrifty[0]
    return max(sizes, key=slots.__getitem__, default=0)


@given(
    units=st.integers(1, 40),
    unit_bytes=st.sampled_from([4 * KIB, 64 * KIB, MIB, 64 * MIB, 512 * MIB, 2 * GIB]),
    slot_pages=st.integers(1, 1 << 20),
)
def test_the_size_of_an_extent_follows_the_rule(units, unit_bytes, slot_pages):
    extents = ExtentMap(units * unit_bytes, unit_bytes)
    slot_bytes = slot_pages * 4 * KIB
    found = extents.units_per_extent(slot_bytes)
    assert found == expected_units(extents, slot_bytes)
    assert (found == 0) == (slot_bytes > units * unit_bytes)


def test_a_slot_above_the_whole_pool_has_no_extent():
    assert ExtentMap(8 * MIB, MIB).units_per_extent(8 * MIB + 1) == 0
    assert ExtentMap(8 * MIB, MIB).units_per_extent(8 * MIB) == 8


def test_a_pool_smaller_than_a_unit_is_one_extent():
    extents = ExtentMap(10 * KIB, 64 * MIB)
    assert (extents.units, extents.unit_bytes, extents.free_units) == (1, 10 * KIB, 1)
    assert extents.units_per_extent(4 * KIB) == 1
    assert extents.units_per_extent(11 * KIB) == 0
    assert take(extents, 1).first_unit == 0
    assert extents.take(1, 0, 1) is None


def test_what_is_left_of_the_last_unit_is_not_used():
    extents = ExtentMap(3 * MIB + MIB // 2, MIB)
    assert extents.units == 3


@pytest.mark.parametrize(("pool_bytes", "unit_bytes"), [(0, MIB), (-1, MIB), (MIB, 0)])
def test_a_pool_or_unit_of_nothing_is_a_bug(pool_bytes, unit_bytes):
    with pytest.raises(AssertionError, match="has bytes"):
        ExtentMap(pool_bytes, unit_bytes)


# ---- take and give back ------------------------------------------------------------------------


def test_units_are_taken_from_the_front_and_lie_side_by_side():
    extents = ExtentMap(6 * MIB, MIB)
    one, two = take(extents, 2), take(extents, 3)
    assert [(e.first_unit, e.units) for e in (one, two)] == [(0, 2), (2, 3)]
    assert extents.free_units == 1
    assert extents.take(2, 0, 1) is None
    assert extents.free_units == 1, "a take that fails takes nothing"


def test_an_extent_keeps_its_rows_and_grants_at_first():
    extent = ExtentMap(MIB, MIB).take(1, 17, 5)
    assert (extent.first_row, extent.rows, extent.is_draining) == (17, 5, False)


def test_a_gap_is_used_only_by_what_fits_it():
    extents = ExtentMap(6 * MIB, MIB)
    one, _two, three = take(extents, 2), take(extents, 1), take(extents, 2)
    extents.give_back(one)
    extents.give_back(three)
    assert extents.free_units == 5
    assert take(extents, 3).first_unit == 3
    assert extents.take(3, 0, 1) is None, "two and nothing do not lie side by side"
    assert take(extents, 2).first_unit == 0


def test_giving_back_twice_is_a_bug():
    extents = ExtentMap(4 * MIB, MIB)
    extent = take(extents, 2)
    extents.give_back(extent)
    with pytest.raises(AssertionError, match="owns its units"):
        extents.give_back(extent)


def test_giving_back_what_somebody_else_took_is_a_bug():
    extents = ExtentMap(4 * MIB, MIB)
    extent = take(extents, 2)
    extents.give_back(extent)
    take(extents, 2)
    with pytest.raises(AssertionError, match="owns its units"):
        extents.give_back(extent)


@given(st.data())
def test_taking_and_giving_back_follow_a_plain_picture_of_the_units(data):
    units = data.draw(st.integers(1, 12), label="units of the pool")
    extents = ExtentMap(units * MIB, MIB)
    picture: list[Extent | None] = [None] * units
    taken: list[Extent] = []
    for _ in range(data.draw(st.integers(1, 20), label="steps")):
        if taken and data.draw(st.booleans(), label="give back"):
            extent = taken.pop(data.draw(st.integers(0, len(taken) - 1), label="which"))
            extents.give_back(extent)
            picture = [None if owner is extent else owner for owner in picture]
        else:
            wanted = data.draw(st.integers(1, units), label="take")
            fits = [
                at
                for at in range(units - wanted + 1)
                if picture[at : at + wanted] == [None] * wanted
            ]
            extent = extents.take(wanted, 0, 1)
            assert (extent is None) == (not fits)
            if extent is not None:
                assert (extent.first_unit, extent.units) == (fits[0], wanted)
                picture[fits[0] : fits[0] + wanted] = [extent] * wanted
                taken.append(extent)
        assert extents.free_units == picture.count(None)
        check_windows(extents, picture, data.draw(st.integers(1, units), label="window"))


# ---- windows -----------------------------------------------------------------------------------


def check_windows(extents: ExtentMap, picture: list[Extent | None], width: int) -> None:
    expected = []
    for start in range(len(picture) - width + 1):
        if start and picture[start] is not None and picture[start] is picture[start - 1]:
            continue  # a run that begins inside an extent frees its first part for nothing
        inside: list[Extent] = []
        for owner in picture[start : start + width]:
            if owner is not None and not any(owner is seen for seen in inside):
                inside.append(owner)
        expected.append(inside)
    found = extents.windows(width)
    assert [list(map(id, w)) for w in found] == [list(map(id, w)) for w in expected]


def test_a_window_tells_every_extent_that_it_overlaps_once():
    extents = ExtentMap(5 * MIB, MIB)
    one, two = take(extents, 2), take(extents, 2)
    assert extents.windows(2) == [[one], [two]]
    assert extents.windows(3) == [[one, two], [two]]
    assert extents.windows(5) == [[one, two]]


def test_a_window_over_free_units_costs_nothing():
    extents = ExtentMap(3 * MIB, MIB)
    assert extents.windows(2) == [[], []]


def test_there_is_no_window_wider_than_the_pool():
    assert ExtentMap(3 * MIB, MIB).windows(4) == []
