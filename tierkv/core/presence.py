"""What the tiers below DRAM hold, as far as is known.

One set of keys per namespace and tier, so that a tier that is lost is forgotten at once. A
namespace stands here whether or not an engine has attached it: an SSD remembers layouts that nobody
uses now.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tierkv.types import BlockKey, NamespaceId

KEYS_PER_TIER_MAX = 1 << 24


class Presence:
    """Which tier holds which key."""

    def __init__(self, tiers: int) -> None:
        self._held: list[dict[NamespaceId, set[BlockKey]]] = [{} for _ in range(tiers)]
        self.counts = [0] * tiers

    def has(self, namespace: NamespaceId, key: BlockKey, tier: int) -> bool:
        """Whether a tier is known to hold a key."""
        held = self._held[tier].get(namespace)
        return held is not None and key in held

    def mask(self, namespace: NamespaceId, key: BlockKey) -> int:
        """Bit mask of the tiers that hold a key."""
        found = 0
        for tier, spaces in enumerate(self._held):
            held = spaces.get(namespace)
            if held is not None and key in held:
                found |= 1 << tier
        return found

    def namespaces(self) -> set[NamespaceId]:
        """Namespaces of which some tier holds a block."""
        return {space for spaces in self._held for space in spaces}

    def add(self, namespace: NamespaceId, keys: Iterable[BlockKey], tier: int) -> None:
        """A tier has these keys."""
        held = self._held[tier].setdefault(namespace, set())
        before = len(held)
        held.update(keys)
        self.counts[tier] += len(held) - before
        excess = min(self.counts[tier] - KEYS_PER_TIER_MAX, len(held))
        if excess > 0:  # forgotten here, not dropped below: a miss, and room for what is new
            self.remove(namespace, list(itertools.islice(held, excess)), tier)
        elif not held:
            del self._held[tier][namespace]

    def remove(self, namespace: NamespaceId, keys: Iterable[BlockKey], tier: int) -> None:
        """A tier no longer has these keys; unknown ones are ignored."""
        held = self._held[tier].get(namespace)
        if held is None:
            return
        before = len(held)
        held.difference_update(keys)
        self.counts[tier] -= before - len(held)
        if not held:
            del self._held[tier][namespace]

    def clear(self, tier: int, namespace: NamespaceId | None = None) -> None:
        """Nothing is known of a tier any more, in one namespace or in all."""
        if namespace is None:
            self._held[tier] = {}
            self.counts[tier] = 0
        else:
            self.counts[tier] -= len(self._held[tier].pop(namespace, ()))
