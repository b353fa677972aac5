"""Adaptive replacement: blocks used once and blocks used again share the room as misses teach.

Two least-recently-used orders, `recent` (used once) and `frequent`, and behind each the keys of
blocks that it gave up lately. A miss on a key that `recent` gave up makes its share larger, a miss
on one that `frequent` gave up makes it smaller.

Source: N. Megiddo and D. S. Modha, ARC: A Self-Tuning, Low Overhead Replacement Cache, FAST 2003,
applied to the blocks of a request one by one, the last first. The directory tells the hits of a
request before it asks for room, so they wait until the misses of the request are known. The lists
are played through when room is asked for: what they give up is `leaving` until the books evict it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tierkv.core.eviction.base import EvictionPolicy, Room, Rows
from tierkv.types import BlockKey

_NOWHERE, _RECENT, _FREQUENT, _GONE_RECENT, _GONE_FREQUENT = range(5)
_LISTS = 5


class _Lists:
    """Doubly linked lists of nodes, newest first; a node is in one of them or nowhere.

    Nodes 1 to 4 are the lists' anchors: the newer neighbour of an anchor is the oldest node.

    Attributes:
        place: per node its list.
        key, row: per node its block; row 0: the block has no slot.
        parent: per node the key of its predecessor.
        heir: per node the latest node that had it as predecessor; see `heirs`.
        sizes: nodes per list.
    """

    def __init__(self) -> None:
        self.newer = list(range(_LISTS))
        self.older = list(range(_LISTS))
        self.place = list(range(_LISTS))
        self.key: list[BlockKey | None] = [None] * _LISTS
        self.row = [0] * _LISTS
        self.parent: list[BlockKey | None] = [None] * _LISTS
        self.heir = [0] * _LISTS
        self.sizes = [0] * _LISTS
        self._unused: list[int] = []

    def make(self, key: BlockKey) -> int:
        """A node that is nowhere."""
        if not self._unused:
            for column in (self.newer, self.older, self.place, self.row, self.heir):
                column.append(0)
            self.key.append(None)
            self.parent.append(None)
            self._unused.append(len(self.key) - 1)
        node = self._unused.pop()
        self.key[node] = key
        return node

    def free(self, node: int) -> None:
        """Forget a node that is nowhere."""
        assert self.place[node] == _NOWHERE, "a node is taken out before it is freed"
        self.key[node] = self.parent[node] = None
        self.row[node] = self.heir[node] = 0
        self._unused.append(node)

    def move(self, node: int, to: int, behind: int = 0) -> None:
        """Take a node out of its list and put it directly older than `behind`, or newest."""
        newer, older = self.newer, self.older
        if self.place[node]:
            above, below = newer[node], older[node]
            newer[below], older[above] = above, below
            self.sizes[self.place[node]] -= 1
        self.place[node] = to
        if to:
            above = behind or to
            below = older[above]
            newer[node], older[node] = above, below
            older[above] = newer[below] = node
            self.sizes[to] += 1

    def line(self, node: int, told: set[int]) -> list[int]:
        """A node with a slot, and behind it the latest of its successors, as far as they have one.

        Args:
            told: nodes that were told before; those that are told now are added. Ends the line, so
                that all lines together take time in the number of nodes, and so do circles.
        """
        found: list[int] = []
        while node and self.row[node] and node not in told:
            told.add(node)
            found.append(node)
            heir = self.heir[node]
            node = heir if heir and self.parent[heir] == self.key[node] else 0
        return found

    def oldest(self, which: int) -> int:
        """The oldest node of a list that is not empty."""
        node = self.newer[which]
        assert node != which, "the list has a node"
        return node

    def from_oldest(self, which: int) -> Iterator[int]:
        """Nodes of a list, oldest first. Not valid across changes."""
        node = self.newer[which]
        while node != which:
            yield node
            node = self.newer[node]


class Arc(EvictionPolicy):
    """Adaptive replacement over prefixes.

    Remembers as many given-up keys as there are slots, and holds Python objects per block: some
    microseconds and some hundred bytes each. A predecessor may be proposed before its successors;
    the books let it wait.
    """

    def __init__(self) -> None:
        self._slots = 0
        self._target = 0.0  # blocks meant for `recent`
        self._lists = _Lists()
        self._nodes: dict[BlockKey, int] = {}
        self._node_of_row: dict[int, int] = {}
        self._leaving: dict[int, None] = {}  # nodes with a slot that the lists gave up
        self._used: list[BlockKey] = []  # the last used prefix, head first, not played yet
        self._tail: BlockKey | None = None  # the last block that was missed

    def grow(self, rows: int) -> None:
        del rows  # nothing here is an array of rows

    def resize(self, slots: int) -> None:
        self._slots = slots
        self._target = min(self._target, float(slots))
        while self._resident > slots:
            self._replace(False)
        self._forget_oldest()

    def miss(self, keys: Sequence[BlockKey], after: BlockKey | None) -> Room:
        is_next = after is not None and after in (self._tail, *self._used[-1:])
        if not is_next:
            self._play_used()
        # A predecessor whose use is still to be played will be newer than anything.
        before = 0 if after is None or after in self._used[-1:] else self._nodes.get(after, 0)
        for key in reversed(keys):
            self._play(key, before)
        self._link(keys, after)
        self._tail = keys[-1] if keys else after
        self._used = [key for key in reversed(self._used) if not self._is_back(key)][::-1]
        nodes, place = self._nodes, self._lists.place
        kept = sum(place[nodes.get(key, 0)] in (_RECENT, _FREQUENT) for key in keys)
        return Room(kept, len(self))

    def insert(self, rows: Rows, after: int, keys: Sequence[BlockKey]) -> None:
        lists = self._lists
        del after  # `miss` has placed them
        for row, key in zip(rows.tolist(), keys, strict=True):
            node = self._nodes.get(key, 0)
            if not node:
                node = self._nodes[key] = lists.make(key)
            lists.row[node] = row
            self._node_of_row[row] = node
            if lists.place[node] not in (_RECENT, _FREQUENT):
                self._leaving[node] = None  # came although the lists had no place for it

    def touch(self, rows: Rows) -> None:
        self._play_used()
        lists, node_of_row = self._lists, self._node_of_row
        keys = [lists.key[node_of_row[row]] for row in rows.tolist()]
        self._used = [key for key in keys if key is not None]

    def remove(self, rows: Rows) -> None:
        for row in rows.tolist():
            node = self._node_of_row.pop(row)
            self._leaving.pop(node, None)
            self._lists.move(node, _NOWHERE)
            self._drop(node)

    def evict(self, rows: Rows) -> None:
        lists = self._lists
        for row in rows.tolist():
            node = self._node_of_row.pop(row)
            lists.row[node] = 0
            self._leaving.pop(node, None)
            place = lists.place[node]
            if place in (_RECENT, _FREQUENT):
                lists.move(node, _GONE_RECENT if place == _RECENT else _GONE_FREQUENT)
            elif place == _NOWHERE:
                self._drop(node)
        while self._leaving and self._resident < self._slots:
            self._take_back()
        self._forget_oldest()

    def _take_back(self) -> None:
        """A block that should have left must stay, and another went instead: it is the oldest."""
        lists = self._lists
        node, _ = self._leaving.popitem()
        to = _FREQUENT if lists.place[node] == _GONE_FREQUENT else _RECENT
        lists.move(node, to, lists.newer[to] if lists.sizes[to] else 0)

    def candidates(self) -> Iterator[int]:
        lists = self._lists
        told: set[int] = set()
        for leaving in self._leaving:
            # Without it nobody reaches its successors, so they go first.
            yield from [lists.row[node] for node in reversed(lists.line(leaving, told))]
        frequent = lists.from_oldest(_FREQUENT)
        left = lists.sizes[_RECENT]
        for node in lists.from_oldest(_RECENT):
            if left <= self._target:
                yield from self._rows(frequent, told)
            if lists.row[node] and node not in told:
                yield lists.row[node]
            left -= 1
        yield from self._rows(frequent, told)

    def _rows(self, nodes: Iterator[int], told: set[int]) -> Iterator[int]:
        row = self._lists.row
        return (row[node] for node in nodes if row[node] and node not in told)

    def __len__(self) -> int:
        return len(self._node_of_row)

    # ---- the algorithm -------------------------------------------------------------------------

    @property
    def _resident(self) -> int:
        return self._lists.sizes[_RECENT] + self._lists.sizes[_FREQUENT]

    def _is_back(self, key: BlockKey) -> bool:
        """Whether a hit was displaced by the misses of its own request, and came in again."""
        node = self._nodes.get(key, 0)
        if not node or not self._lists.row[node] or self._lists.place[node] in (_RECENT, _FREQUENT):
            return False
        self._play(key)
        return True

    def _play_used(self) -> None:
        """Note the uses that waited for the misses of their request."""
        used, self._used = self._used, []
        for key in reversed(used):
            node = self._nodes.get(key, 0)
            if not node or not self._lists.row[node]:
                continue  # gone meanwhile
            if not self._is_back(key):
                self._lists.move(node, _FREQUENT)

    def _play(self, key: BlockKey, before: int = 0) -> None:
        """Let a block in that is in neither order; one that is, but has no slot yet, stays.

        Args:
            before: node of its predecessor, to be behind it; 0 for the newest place.
        """
        lists = self._lists
        node = self._nodes.get(key, 0)
        if not node:
            node = self._nodes[key] = lists.make(key)
        place, sizes = lists.place[node], lists.sizes
        if place in (_RECENT, _FREQUENT):
            lists.move(node, place)
            return
        if place == _GONE_RECENT:
            step = max(1.0, sizes[_GONE_FREQUENT] / sizes[_GONE_RECENT])
            self._target = min(float(self._slots), self._target + step)
        elif place == _GONE_FREQUENT:
            step = max(1.0, sizes[_GONE_RECENT] / sizes[_GONE_FREQUENT])
            self._target = max(0.0, self._target - step)
        if self._resident >= self._slots:
            self._replace(place == _GONE_FREQUENT)
        self._leaving.pop(node, None)
        target = _RECENT if place == _NOWHERE else _FREQUENT
        lists.move(node, target, before if lists.place[before] == target else 0)
        self._forget_oldest()

    def _link(self, keys: Sequence[BlockKey], after: BlockKey | None) -> None:
        """Note who follows whom."""
        nodes, lists = self._nodes, self._lists
        before = nodes.get(after, 0) if after is not None else 0
        for key in keys:
            node = nodes.get(key, 0)
            if before and node:
                lists.heir[before] = node
                lists.parent[node] = lists.key[before]
            before = node

    def _replace(self, was_frequent: bool) -> None:
        """Give up the oldest block of one of the two orders."""
        lists = self._lists
        recent = lists.sizes[_RECENT]
        is_recent = recent > self._target or (was_frequent and recent == self._target)
        if recent and (is_recent or not lists.sizes[_FREQUENT]):
            node = lists.oldest(_RECENT)
            lists.move(node, _GONE_RECENT)
        elif lists.sizes[_FREQUENT]:
            node = lists.oldest(_FREQUENT)
            lists.move(node, _GONE_FREQUENT)
        else:
            return
        if lists.row[node]:
            self._leaving[node] = None

    def _forget_oldest(self) -> None:
        """Keep no more given-up keys than the algorithm needs."""
        sizes = self._lists.sizes
        while sizes[_GONE_RECENT] and sizes[_RECENT] + sizes[_GONE_RECENT] > self._slots:
            self._forget(self._lists.oldest(_GONE_RECENT))
        while sizes[_GONE_FREQUENT] and sum(sizes) > 2 * self._slots:
            self._forget(self._lists.oldest(_GONE_FREQUENT))

    def _forget(self, node: int) -> None:
        """Forget that a block was given up; it keeps its node while it has a slot."""
        self._lists.move(node, _NOWHERE)
        if not self._lists.row[node]:
            self._drop(node)

    def _drop(self, node: int) -> None:
        key = self._lists.key[node]
        assert key is not None, "a node in use has a key"
        del self._nodes[key]
        self._lists.free(node)
