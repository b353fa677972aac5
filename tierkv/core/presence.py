"""What the tiers below DRAM hold, as far as is known.

One dict per namespace from key to a bit mask of tiers; masks below 256 are shared integers, so an
entry costs the key and its place in the dict. Namespaces stand here whether or not an engine has
attached them: an SSD remembers layouts that nobody uses now.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from tierkv.types import BlockKey, NamespaceId

KEYS_PER_TIER_MAX = 1 << 24
_NOTHING: dict[BlockKey, int] = {}


class Presence:
    """Which tier holds which key."""

    def __init__(self, tiers: int) -> None:
        self._spaces: dict[NamespaceId, dict[BlockKey, int]] = {}
        self.counts = [0] * tiers

    def of(self, namespace: NamespaceId) -> dict[BlockKey, int]:
        """Key to bit mask of tiers; do not change it."""
        return self._spaces.get(namespace, _NOTHING)

    def namespaces(self) -> list[NamespaceId]:
        """Namespaces of which some tier holds a block."""
        return list(self._spaces)

    def add(self, namespace: NamespaceId, keys: Iterable[BlockKey], tier: int) -> None:
        """A tier has these keys."""
        held = self._spaces.setdefault(namespace, {})
        bit = 1 << tier
        for key in keys:
            mask = held.get(key, 0)
            if not mask & bit:
                held[key] = mask | bit
                self.counts[tier] += 1
        excess = min(self.counts[tier] - KEYS_PER_TIER_MAX, len(held))
        if excess > 0:  # forgotten here, not dropped below: a miss, and room for what is new
            self.remove(namespace, list(itertools.islice(held, excess)), tier)

    def remove(self, namespace: NamespaceId, keys: Iterable[BlockKey], tier: int) -> None:
        """A tier no longer has these keys; unknown ones are ignored."""
        held = self._spaces.get(namespace)
        if held is None:
            return
        bit = 1 << tier
        for key in keys:
            mask = held.get(key, 0)
            if mask & bit:
                self.counts[tier] -= 1
                if mask == bit:
                    del held[key]
                else:
                    held[key] = mask ^ bit
        if not held:
            del self._spaces[namespace]

    def clear(self, tier: int, namespace: NamespaceId | None = None) -> None:
        """Nothing is known of a tier any more, in one namespace or in all."""
        for space in list(self._spaces) if namespace is None else [namespace]:
            self.remove(space, list(self.of(space)), tier)
