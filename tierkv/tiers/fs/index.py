"""The books of the fs tier: which blocks there are, how large, who uses them, who goes first.

Rule 1: pure. No file, clock or lock lives here; `Store` calls it under its lock.
Rule 2: every change of a row's state happens in this file.
Rule 3: bytes count from their reservation until the file is known to be gone. A file that cannot
be removed goes on counting.
Rule 4: the second chance (CLOCK). A use sets a bit; a victim is taken from the oldest end, and one
whose bit is set goes round once instead. A new block is the most recent, with the bit clear.
Rule 5: what was found from before is older than everything written since, and sorted once, by last
use, when all of it is known.

There is no Python object per block but its key, its row number and one dict entry: the rest lies in
flat arrays, as in the core's directory.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections import deque

import numpy as np

from tierkv.tiers.base import BlockName, Change
from tierkv.types import BlockKey, NamespaceId

_KEPT, _FOUND = 0, 1  # rows that anchor the two orders; see `_join`
_ANCHORS = 2
_IS_USED, _IS_DOOMED, _IS_FOUND, _IS_TOLD = 1, 2, 4, 8


class State(enum.IntEnum):
    """What a row says about a block's file."""

    FREE = 0  # no block
    WRITING = 1  # a writer has the name; nothing is readable
    FINDING = 2  # a file from before may be there; its pins are those who look
    READY = 3  # readable, unless doomed
    LEAVING = 4  # one thread removes or recycles the file
    STUCK = 5  # nothing is readable, and something cannot be removed


class Index:
    """Entries, order of eviction, pins and bytes.

    Attributes:
        bytes: reserved or held by files, those that cannot be removed included.
        blocks: readable ones.
        unknown_bytes: what files not found yet are believed to hold.
        changes: what the taker of changes has not heard yet.
        pins: uses that keep a file as it is.
    """

    def __init__(self, capacity: int, scanned_max: int) -> None:
        self.capacity = capacity
        self.bytes = 0
        self.blocks = 0
        self.stuck_files = 0
        self.stuck_bytes = 0
        self.unknown_bytes = 0
        self.changes: deque[Change] = deque()
        self._scanned_max = scanned_max
        self._rows: dict[NamespaceId, dict[BlockKey, int]] = {}
        self._interned: dict[NamespaceId, NamespaceId] = {}
        self._keys: list[BlockKey] = [BlockKey(b"")] * _ANCHORS
        self._namespaces: list[NamespaceId] = [NamespaceId(b"")] * _ANCHORS
        self._states = array("B", [State.FREE] * _ANCHORS)
        self._flags = array("B", [0] * _ANCHORS)
        self._pins = array("H", [0] * _ANCHORS)
        self._sizes = array("q", [0] * _ANCHORS)
        self._used = array("d", [0.0] * _ANCHORS)
        self._stamped = array("d", [0.0] * _ANCHORS)
        self._newer = array("i", range(_ANCHORS))
        self._older = array("i", range(_ANCHORS))
        self._free: list[int] = []

    # ---- questions -----------------------------------------------------------------------------

    def find(self, name: BlockName) -> int | None:
        """The row of a name, in whatever state."""
        rows = self._rows.get(name.namespace)
        return None if rows is None else rows.get(name.key)

    def find_readable(self, name: BlockName) -> int | None:
        """The row of a block that may be read."""
        row = self.find(name)
        return row if row is not None and self.is_readable(row) else None

    def is_readable(self, row: int) -> bool:
        """Whether the block is there and nobody wants it gone."""
        return self._states[row] == State.READY and not self._flags[row] & _IS_DOOMED

    def state(self, row: int) -> State:
        """What the row says about the file."""
        return State(self._states[row])

    def size(self, row: int) -> int:
        """Bytes that are counted for the row."""
        return self._sizes[row]

    def used_at(self, row: int) -> float:
        """Time of last use."""
        return self._used[row]

    def name(self, row: int) -> BlockName:
        """Whose row it is."""
        return BlockName(self._namespaces[row], self._keys[row])

    def has_room(self, size: int) -> bool:
        """Whether so many bytes more stay within the capacity."""
        return self.bytes + self.unknown_bytes + size <= self.capacity

    def may_ever_fit(self, size: int) -> bool:
        """Whether evicting could make room, so that nothing is evicted in vain."""
        return self.stuck_bytes + size <= self.capacity

    def keys(self, namespace: NamespaceId | None) -> list[tuple[NamespaceId, list[BlockKey]]]:
        """A copy of the keys of one namespace or of all."""
        wanted = list(self._rows) if namespace is None else [namespace]
        return [(space, list(self._rows.get(space, ()))) for space in wanted]

    # ---- a row's life --------------------------------------------------------------------------

    def begin_write(self, name: BlockName) -> int:
        """Give a free name to a writer."""
        return self._begin(name, State.WRITING)

    def begin_look(self, name: BlockName) -> int | None:
        """Pin a name that a file from before may have; None if more is known about it."""
        row = self.find(name)
        if row is None:
            row = self._begin(name, State.FINDING)
        elif self._states[row] != State.FINDING:
            return None
        self._pins[row] += 1
        return row

    def resize(self, row: int, size: int) -> None:
        """Count so many bytes for the row from now on."""
        self.bytes += size - self._sizes[row]
        self._sizes[row] = size

    def publish(self, row: int, now: float) -> bool:
        """A writer's file is in its place. False if the caller must remove it: it was dropped."""
        assert self._states[row] == State.WRITING, "only a writer publishes"
        if self._flags[row] & _IS_DOOMED:
            self._states[row] = State.LEAVING
            return False
        self._used[row] = self._stamped[row] = now
        self._enter(row, _KEPT)
        return True

    def pin(self, row: int) -> None:
        """Keep the file as it is until `unpin`."""
        assert self._states[row] == State.READY, "only a block that is there can be read"
        self._pins[row] += 1

    def unpin(self, row: int) -> bool:
        """End a use. True if the caller must remove the file: it was dropped meanwhile."""
        return self.end_look(row, None, 0.0)

    def end_look(self, row: int, size: int | None, used_at: float) -> bool:
        """End a look with what was found, None for nothing.

        Returns:
            True if the caller must remove the file: it was dropped meanwhile.
        """
        assert self._pins[row] > 0, "a pin is given back once"
        if size is not None and self._states[row] == State.FINDING:
            self.unknown_bytes = max(0, self.unknown_bytes - size)
            self.resize(row, size)
            self._used[row] = self._stamped[row] = used_at
            if not self._flags[row] & _IS_DOOMED:
                self._flags[row] |= _IS_FOUND
                self._enter(row, _FOUND)
        self._pins[row] -= 1
        if self._pins[row]:
            return False
        if self._flags[row] & _IS_DOOMED:
            self._states[row] = State.LEAVING
            return True
        if self._states[row] == State.FINDING:
            self.forget(row)
        return False

    def use(self, row: int, now: float, stamp_period_s: float) -> bool:
        """Note a use. True if the file should be told, at most once per period."""
        self._flags[row] |= _IS_USED
        self._used[row] = now
        if now - self._stamped[row] < stamp_period_s:
            return False
        self._stamped[row] = now
        return True

    def leave(self, row: int) -> bool:
        """Give the file to the caller for removal; False if somebody uses it."""
        state = self._states[row]
        if state == State.READY and not self._pins[row]:
            self._exit(row)
        elif state == State.STUCK:
            self.stuck_files -= 1
            self.stuck_bytes -= self._sizes[row]
        else:
            return False
        self._states[row] = State.LEAVING
        return True

    def dismiss(self, row: int) -> bool:
        """Make a block unreadable now. True if the caller removes the file, else its last user."""
        if self.leave(row):
            return True
        if self.is_readable(row):
            self._exit(row)
            self._untell(row)
        self._flags[row] |= _IS_DOOMED
        return False

    def restore(self, row: int) -> None:
        """Take back `choose_victim`: the whole store refuses, which is not this block's fault."""
        if self._flags[row] & _IS_DOOMED:
            self.stick(row)
            return
        self._states[row] = State.READY
        self._flags[row] &= ~_IS_FOUND
        self.blocks += 1
        first = self._newer[_KEPT]
        self._join(_KEPT, row)
        self._join(row, first)

    def stick(self, row: int) -> None:
        """The file cannot be removed: it goes on counting and is out of the order."""
        self._untell(row)
        self._states[row] = State.STUCK
        self._flags[row] = 0
        self.stuck_files += 1
        self.stuck_bytes += self._sizes[row]

    def forget(self, row: int) -> None:
        """The file is gone."""
        self._untell(row)
        self.resize(row, 0)
        namespace = self._namespaces[row]
        rows = self._rows[namespace]
        del rows[self._keys[row]]
        if not rows:
            del self._rows[namespace]
            del self._interned[namespace]
        self._keys[row] = BlockKey(b"")
        self._namespaces[row] = NamespaceId(b"")
        self._states[row] = State.FREE
        self._free.append(row)

    # ---- order ---------------------------------------------------------------------------------

    def choose_victim(self) -> int | None:
        """Take the block that goes next out of the order; the caller removes or recycles its file.

        If every block that may be looked at in one call was used, the first of them goes: a tier
        full of hot blocks must still take new ones. None if all of those are being read.
        """
        spare = None
        for _ in range(min(self._scanned_max, 2 * self.blocks)):
            row = self._newer[_FOUND]
            if row == _FOUND:
                row = self._newer[_KEPT]
            if row == _KEPT:
                return None
            if not self._pins[row]:
                if not self._flags[row] & _IS_USED:
                    return self._take(row)
                spare = row if spare is None else spare
            self._flags[row] &= ~(_IS_USED | _IS_FOUND)
            self._cut(row)
            self._append(row, _KEPT)
        return None if spare is None else self._take(spare)

    def order_found(self) -> None:
        """Put the blocks from before into their order, behind all others."""
        states = np.frombuffer(self._states, np.uint8)
        flags = np.frombuffer(self._flags, np.uint8)
        is_found = (flags & (_IS_FOUND | _IS_DOOMED)) == _IS_FOUND
        rows = np.flatnonzero(is_found & (states == State.READY)).astype(np.int32)
        flags &= 0xFF ^ _IS_FOUND
        self.unknown_bytes = 0
        if not len(rows):
            return
        rows = rows[np.argsort(np.frombuffer(self._used, np.float64)[rows], kind="stable")]
        newer = np.frombuffer(self._newer, np.int32)
        older = np.frombuffer(self._older, np.int32)
        newer[rows[:-1]] = rows[1:]
        older[rows[1:]] = rows[:-1]
        first = self._newer[_KEPT]
        self._join(_KEPT, int(rows[0]))
        self._join(int(rows[-1]), first)
        self._join(_FOUND, _FOUND)

    def rows_in(self, states: tuple[State, ...]) -> int:
        """How many rows are in one of these states."""
        found = np.isin(np.frombuffer(self._states, np.uint8), [int(s) for s in states])
        return int(np.count_nonzero(found))

    # ---- audit ---------------------------------------------------------------------------------

    def check(self) -> list[str]:
        """Recompute every total; one sentence per difference."""
        rows = [row for keys in self._rows.values() for row in keys.values()]
        ordered = self._ordered(_FOUND) + self._ordered(_KEPT)
        readable = [row for row in rows if self.is_readable(row)]
        stuck = [row for row in rows if self._states[row] == State.STUCK]
        pairs = (
            ("bytes", self.bytes, sum(self._sizes[row] for row in rows)),
            ("blocks", self.blocks, len(readable)),
            ("blocks in order", len(ordered), len(set(ordered) & set(readable))),
            ("readable blocks", len(readable), len(ordered)),
            ("stuck files", self.stuck_files, len(stuck)),
            ("stuck bytes", self.stuck_bytes, sum(self._sizes[row] for row in stuck)),
        )
        return [
            f"the books count {counted} {what}, there are {there}"
            for what, counted, there in pairs
            if counted != there
        ]

    # ---- inside --------------------------------------------------------------------------------

    def _begin(self, name: BlockName, state: State) -> int:
        assert self.find(name) is None, "a name has one row"
        row = self._free.pop() if self._free else self._grow()
        # One object per namespace, whatever copies of it the names bring along.
        namespace = self._interned.setdefault(name.namespace, name.namespace)
        self._rows.setdefault(namespace, {})[name.key] = row
        self._keys[row] = name.key
        self._namespaces[row] = namespace
        self._states[row] = state
        self._flags[row] = 0
        self._used[row] = math.inf  # in use now, however old other blocks must be to be purged
        return row

    def _grow(self) -> int:
        self._keys.append(BlockKey(b""))
        self._namespaces.append(NamespaceId(b""))
        for numbers in (self._states, self._flags, self._pins, self._sizes):
            numbers.append(0)
        for times in (self._used, self._stamped):
            times.append(0.0)
        for links in (self._newer, self._older):
            links.append(0)
        return len(self._keys) - 1

    def _enter(self, row: int, anchor: int) -> None:
        self._states[row] = State.READY
        self._append(row, anchor)
        self.blocks += 1
        self._flags[row] |= _IS_TOLD
        self.changes.append(Change(self.name(row), True, self._sizes[row]))

    def _exit(self, row: int) -> None:
        self._cut(row)
        self.blocks -= 1

    def _untell(self, row: int) -> None:
        if self._flags[row] & _IS_TOLD:
            self._flags[row] &= ~_IS_TOLD
            self.changes.append(Change(self.name(row), False, self._sizes[row]))

    def _take(self, row: int) -> int:
        self._exit(row)
        self._states[row] = State.LEAVING
        return row

    def _join(self, older: int, newer: int) -> None:
        """Make two rows neighbours. An anchor is older than the oldest, newer than the newest."""
        self._newer[older] = newer
        self._older[newer] = older

    def _append(self, row: int, anchor: int) -> None:
        self._join(self._older[anchor], row)
        self._join(row, anchor)

    def _cut(self, row: int) -> None:
        self._join(self._older[row], self._newer[row])

    def _ordered(self, anchor: int) -> list[int]:
        rows: list[int] = []
        row = self._newer[anchor]
        while row != anchor and len(rows) < len(self._keys):  # a loop in the links ends too
            rows.append(row)
            row = self._newer[row]
        return rows
