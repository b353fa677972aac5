"""Eviction policies once more, block by block and as plainly as possible, to compare with.

They know neither rows nor predecessors: a request uses its blocks one by one, the last first.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict

PROTECTED_SHARE = 0.2


def push(order: OrderedDict, key) -> None:
    """Make a key the newest of an order; the first key of an order is its oldest."""
    order[key] = None


def pop(order: OrderedDict):
    """Take the oldest key of an order out."""
    return order.popitem(last=False)[0]


class Plain:
    """What `prefix_hits` asks of a policy."""

    def begin(self, hits) -> None:
        """A request hit these keys, and will use all its blocks now."""

    def __contains__(self, key) -> bool:
        raise NotImplementedError

    def touch(self, key) -> None:
        """Use a key that is here."""

    def insert(self, key) -> None:
        """Let a key in."""

    def given_up(self) -> list:
        """Keys that are here, in the order in which they will go."""
        raise NotImplementedError


class LruOracle(Plain):
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.order: OrderedDict = OrderedDict()

    def __contains__(self, key) -> bool:
        return key in self.order

    def touch(self, key) -> None:
        self.order.move_to_end(key)

    def insert(self, key) -> None:
        if len(self.order) >= self.capacity:
            pop(self.order)
        push(self.order, key)

    def given_up(self) -> list:
        return list(self.order)


class SlruOracle(Plain):
    """Two orders; a use protects, and the protected part hands its oldest block back."""

    def __init__(self, capacity: int, share: float = PROTECTED_SHARE) -> None:
        self.capacity = capacity
        self.protected_max = int(capacity * share)
        self.probation: OrderedDict = OrderedDict()
        self.protected: OrderedDict = OrderedDict()

    def __contains__(self, key) -> bool:
        return key in self.probation or key in self.protected

    def touch(self, key) -> None:
        if key in self.protected:
            self.protected.move_to_end(key)
            return
        del self.probation[key]
        push(self.protected, key)
        if len(self.protected) > self.protected_max:
            push(self.probation, pop(self.protected))

    def insert(self, key) -> None:
        if len(self.probation) + len(self.protected) >= self.capacity:
            pop(self.probation or self.protected)
        push(self.probation, key)

    def given_up(self) -> list:
        return [*self.probation, *self.protected]


class SparingSlruOracle(SlruOracle):
    """No block of a request displaces one that the request hit, as a lease would have it."""

    def begin(self, hits) -> None:
        self.hits = set(hits)

    def insert(self, key) -> None:
        if len(self.probation) + len(self.protected) >= self.capacity:
            going = itertools.chain(self.probation, self.protected)
            victim = next((other for other in going if other not in self.hits), None)
            if victim is None:
                return
            self.probation.pop(victim, None)
            self.protected.pop(victim, None)
        push(self.probation, key)


class ArcOracle(Plain):
    """Adaptive replacement, figure 4 of the paper."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.target = 0.0
        self.recent: OrderedDict = OrderedDict()
        self.frequent: OrderedDict = OrderedDict()
        self.gone_recent: OrderedDict = OrderedDict()
        self.gone_frequent: OrderedDict = OrderedDict()

    def __contains__(self, key) -> bool:
        return key in self.recent or key in self.frequent

    def touch(self, key) -> None:
        self.recent.pop(key, None)
        self.frequent.pop(key, None)
        push(self.frequent, key)

    def insert(self, key) -> None:
        if key in self.gone_recent:
            step = max(1.0, len(self.gone_frequent) / len(self.gone_recent))
            self.target = min(float(self.capacity), self.target + step)
            self._replace_if_full(False)
            del self.gone_recent[key]
            push(self.frequent, key)
        elif key in self.gone_frequent:
            step = max(1.0, len(self.gone_recent) / len(self.gone_frequent))
            self.target = max(0.0, self.target - step)
            self._replace_if_full(True)
            del self.gone_frequent[key]
            push(self.frequent, key)
        else:
            self._make_room_for_new()
            push(self.recent, key)

    def given_up(self) -> list:
        """The order if nothing but room is asked for: no key comes back, the target stays."""
        excess = max(0, math.ceil(len(self.recent) - self.target))
        recent = list(self.recent)
        return [*recent[:excess], *self.frequent, *recent[excess:]]

    def _make_room_for_new(self) -> None:
        seen_once = len(self.recent) + len(self.gone_recent)
        seen = seen_once + len(self.frequent) + len(self.gone_frequent)
        if seen_once >= self.capacity:
            if len(self.recent) >= self.capacity:
                pop(self.recent)  # no trace of it is kept
                return
            pop(self.gone_recent)
        elif seen >= 2 * self.capacity:
            pop(self.gone_frequent)
        self._replace_if_full(False)

    def _replace_if_full(self, was_frequent: bool) -> None:
        if len(self.recent) + len(self.frequent) < self.capacity:
            return
        length = len(self.recent)
        is_recent = length > self.target or (was_frequent and length == self.target)
        if length and (is_recent or not self.frequent):
            push(self.gone_recent, pop(self.recent))
        else:
            push(self.gone_frequent, pop(self.frequent))


def prefix_hits(requests, cache: Plain) -> int:
    """Hits of a trace, in blocks.

    A request hits the longest head of it whose blocks are all here. Then it uses every block, the
    last first; so it may displace what it just hit, and let it in again.
    """
    hits = 0
    for keys in requests:
        length = next((at for at, key in enumerate(keys) if key not in cache), len(keys))
        hits += length
        cache.begin(keys[:length])
        for key in reversed(keys):
            if key in cache:
                cache.touch(key)
            else:
                cache.insert(key)
    return hits
