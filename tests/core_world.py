"""A small directory with one engine, and verbs that read well in examples."""

from __future__ import annotations

from collections.abc import Callable

from tierkv.core.directory import Directory
from tierkv.core.eviction.base import EvictionPolicy
from tierkv.core.eviction.slru import Slru
from tierkv.core.values import Limits, Run

SLOT_BYTES = 8192
SPACE = b"S" * 32


def keys_of(text: str) -> list[bytes]:
    """One key per letter."""
    return [letter.encode() + b"\0" for letter in text]


class World:
    """`slots` slots of one namespace, an engine `e` attached, time standing still."""

    def __init__(
        self,
        slots: int = 4,
        units: int = 1,
        pinned_share_max: float = 1.0,
        make_policy: Callable[[], EvictionPolicy] = Slru,
    ) -> None:
        unit = SLOT_BYTES * (slots // units)
        limits = Limits(unit * units, unit, pinned_share_max)
        self.directory = Directory(limits, (), make_policy)
        self.join("e")

    def join(self, engine: str, space: bytes = SPACE, slot_bytes: int = SLOT_BYTES) -> None:
        if engine not in self.directory.engines:
            self.directory.open_engine(engine)
        assert self.directory.attach(engine, space, slot_bytes) is None

    def lookup(self, text: str, engine: str = "e", space: bytes = SPACE):
        return self.directory.lookup(engine, space, keys_of(text), 0.0)

    def reserve(self, text: str, after: str | None = None, engine: str = "e", space: bytes = SPACE):
        run = Run(keys_of(after)[0] if after else None, keys_of(text))
        return self.directory.reserve(engine, space, [run], 0.0)

    def store(self, text: str, after: str | None = None, engine: str = "e", space: bytes = SPACE):
        """Reserve and commit; returns the number of blocks that were granted."""
        granted = self.reserve(text, after, engine, space)
        count = int((granted.offsets >= 0).sum())
        if granted.lease:
            self.directory.commit(granted.lease, [True] * count)
        return count

    def resident(self, text: str, space: bytes = SPACE) -> int:
        """Leading blocks that are readable; leaves nothing pinned."""
        found = self.lookup(text, space=space)
        if found.lease:
            self.directory.release(found.lease)
        return len(found.offsets)

    def pinned(self) -> int:
        return sum(space.pinned for space in self.directory.spaces.values())

    def count(self, name: str) -> int:
        return self.directory.counters[name]
