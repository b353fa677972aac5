"""Recomputes the directory's books from scratch."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from tierkv.core.namespace import Namespace, State

if TYPE_CHECKING:
    from tierkv.core.directory import Directory


def check_directory(directory: Directory) -> None:
    """Raise AssertionError if the directory contradicts itself. O(blocks)."""
    pins: dict[int, Counter[int]] = {id(s): Counter() for s in directory.spaces.values()}
    filling: dict[int, Counter[int]] = {id(s): Counter() for s in directory.spaces.values()}
    _check_leases(directory, pins, filling)
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
        if lease.is_write:
            filling[id(lease.space)].update(lease.rows.tolist())
        for row in lease.growing:
            waits = lease.id in lease.space.waiters.get(row, ())
            assert waits != (row in lease.joined), "a growing row is awaited or joined"


def _check_space(space: Namespace, pins: Counter[int], filling: Counter[int]) -> None:
    rows = len(space.keys)
    state = space.state[:rows]
    used = [r for e in space.extents for r in range(e.first_row, e.first_row + e.rows)]
    assert len(set(used)) == len(used), "two extents share a row"
    outside = np.ones(rows, bool)
    outside[used] = False
    assert not state[outside].any(), "a block lies outside the extents"
    free = [r for r in used if state[r] == State.FREE]
    drains = [r for e in space.draining() for r in range(e.first_row, e.first_row + e.rows)]
    assert sorted(space.free) == sorted(set(free) - set(drains)), "free list and states disagree"
    offsets = np.sort(space.offset[used])
    assert (np.diff(offsets) >= space.slot_bytes).all(), "slots overlap"
    counted = np.zeros(rows, np.int32)
    for row, count in pins.items():
        counted[row] = count
    assert (space.pins[:rows] == counted).all(), "pin count differs from holders"
    assert space.pinned == int(np.count_nonzero(counted)), "pinned total is wrong"
    assert all(n == 1 for n in filling.values()), "two writers of one slot"
    listed = np.zeros(rows, bool)
    for key, row in space.index.items():
        assert space.keys[row] == key, "index and keys disagree"
        assert state[row] in (State.FILLING, State.RESIDENT), "only live blocks are listed"
        listed[row] = True
    live = (state == State.FILLING) | (state == State.RESIDENT)
    assert (live == listed).all(), "a live block is not listed"
    for row in np.flatnonzero(state == State.FILLING):
        assert filling[int(row)] == 1, "a filling block has one writer"
    for row in filling:
        assert state[row] in (State.FILLING, State.DOOMED), "a write lease holds a readable block"
    for row in np.flatnonzero(state == State.DOOMED):
        assert counted[row] > 0, "a doomed slot nobody holds was not freed"
    order = list(space.policy.candidates())
    assert len(order) == len(space.policy), "policy lost count"
    assert sorted(order) == np.flatnonzero(state == State.RESIDENT).tolist(), (
        "policy and directory disagree"
    )
    position = {row: at for at, row in enumerate(order)}
    for row in order:
        assert space.has_parent(row), "a resident block's predecessor is gone"
        parent = int(space.parent[row])
        assert parent == 0 or position[parent] > position[row], "a predecessor is older"
