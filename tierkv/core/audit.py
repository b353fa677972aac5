"""Recomputes the directory's books from scratch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierkv.core.namespace import Namespace, State

if TYPE_CHECKING:
    from tierkv.core.directory import Directory

States = npt.NDArray[np.int8]


def check_directory(directory: Directory) -> None:
    """Raise AssertionError if the directory contradicts itself. O(blocks)."""
    pins: dict[int, Counter[int]] = {id(s): Counter() for s in directory.spaces.values()}
    filling: dict[int, Counter[int]] = {id(s): Counter() for s in directory.spaces.values()}
    _check_leases(directory, pins, filling)
    for owner, rows in directory.tiering.check_pins().items():
        if owner in pins:
            pins[owner].update(rows)
    placed = np.zeros(directory.extents.units, np.int8)
    for space in directory.spaces.values():
        for extent in space.extents:
            units = slice(extent.first_unit, extent.first_unit + extent.units)
            assert not placed[units].any(), "two extents share a unit"
            placed[units] = 1
        _check_space(space, pins[id(space)], filling[id(space)])
    free = int(np.count_nonzero(placed == 0))
    assert free == directory.extents.free_units, "a unit leaked"


def _check_leases(
    directory: Directory, pins: dict[int, Counter[int]], filling: dict[int, Counter[int]]
) -> None:
    by_engine = {i for e in directory.engines.values() for i in e.leases}
    assert by_engine == set(directory.leases), "leases and engines disagree"
    for lease in directory.leases.values():
        held = pins[id(lease.space)]
        held.update(lease.rows.tolist())
        held.update(lease.joined)
        assert lease.joined <= set(lease.growing), "only growing rows join"
        assert set(lease.joined_from) <= lease.joined, "a source of a row that has not joined"
        if not lease.is_write:
            assert len(lease.sources) == len(lease.rows), "every leased row has a source"
        if lease.is_write:
            filling[id(lease.space)].update(lease.rows.tolist())
        for row in lease.growing:
            waits = lease.id in lease.space.waiters.get(row, ())
            assert waits != (row in lease.joined), "a growing row is awaited or joined"


def _check_space(space: Namespace, pins: Counter[int], filling: Counter[int]) -> None:
    rows = len(space.keys)
    state = space.state[:rows]
    _check_slots(space, state)
    counted = np.zeros(rows, np.int32)
    counted[list(pins)] = list(pins.values())
    assert (space.pins[:rows] == counted).all(), "pin count differs from holders"
    assert space.pinned == int(np.count_nonzero(counted)), "pinned total is wrong"
    assert all(n == 1 for n in filling.values()), "two writers of one slot"
    written = np.zeros(rows, bool)
    written[list(filling)] = True
    is_filling, is_resident = state == State.FILLING, state == State.RESIDENT
    assert (written[is_filling]).all(), "a filling block has no writer"
    assert not (written & is_resident).any(), "a write lease holds a readable block"
    assert (counted[state == State.DOOMED] > 0).all(), "a doomed slot nobody holds was not freed"
    is_promoting = state == State.PROMOTING
    assert (counted[is_promoting] > 0).all(), "a promoting slot without a read"
    _check_debts(space, is_resident)
    _check_index(space, is_filling | is_resident | is_promoting)
    _check_order(space, is_resident)


def _check_slots(space: Namespace, state: States) -> None:
    used = np.zeros(len(state), np.int32)
    drains = np.zeros(len(state), bool)
    for extent in space.extents:
        inside = slice(extent.first_row, extent.first_row + extent.rows)
        used[inside] += 1
        drains[inside] = extent.is_draining
    assert (used <= 1).all(), "two extents share a row"
    assert not state[used == 0].any(), "a block lies outside the extents"
    is_free = (state == State.FREE) & (used == 1) & ~drains
    assert sorted(space.free) == np.flatnonzero(is_free).tolist(), "free list and states disagree"
    offsets = np.sort(space.offset[: len(state)][used == 1])
    assert (np.diff(offsets) >= space.slot_bytes).all(), "slots overlap"


def _check_debts(space: Namespace, is_resident: npt.NDArray[np.bool_]) -> None:
    rows = len(is_resident)
    owed, queued = space.owed[:rows], space.queued[:rows]
    assert space.dirty == int(np.count_nonzero(owed)), "count of owed blocks is wrong"
    assert not owed[~is_resident].any(), "only readable blocks are owed"
    assert not (queued & ~owed).any(), "a block waits for a tier that it is not owed to"
    assert space.may_demote or space.dirty == 0, "a block that may not leave DRAM is owed"


def _check_index(space: Namespace, live: npt.NDArray[np.bool_]) -> None:
    listed = np.zeros(len(live), bool)
    keys = space.keys
    for key, row in space.index.items():
        assert keys[row] == key, "index and keys disagree"
        listed[row] = True
    assert (live == listed).all(), "index and states disagree on what is here"


def _check_order(space: Namespace, is_resident: npt.NDArray[np.bool_]) -> None:
    order = np.fromiter(space.policy.candidates(), np.int32)
    assert len(order) == len(space.policy), "policy lost count"
    assert np.sort(order).tolist() == np.flatnonzero(is_resident).tolist(), (
        "policy and directory disagree"
    )
    assert len(space.orphans()) == 0, "a resident block's predecessor is gone"
    heirs = np.zeros(len(is_resident), np.int32)
    np.add.at(heirs, space.parent[: len(is_resident)][is_resident], 1)
    assert (space.heirs[: len(is_resident)] == heirs).all(), "count of successors is wrong"
    if not space.policy.keeps_prefixes:
        return
    position = np.zeros(len(is_resident), np.int64)
    position[order] = np.arange(1, len(order) + 1)
    parent = space.parent[order]
    newer = (parent == 0) | (position[parent] > position[order])
    assert newer.all(), "a predecessor is older"
