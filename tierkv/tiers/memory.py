"""The memory tier: copies of blocks in this process. The verified fake of every other tier.

Rule 1: everything but the copy out of a found block happens under one lock.
Rule 2: the second chance (CLOCK): the queue is in order of writing; a block that was used since it
last stood in front goes to the back once, instead of out. A new block is the most recent.
Rule 3: what is untold is at most one change per block that is here or that the taker believes here.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock

from tierkv.errors import ConfigError
from tierkv.tiers.base import BlockName, Change, Outcome, Tier, TierInfo, TierSettings
from tierkv.types import NamespaceId

BATCH_MAX = 64


@dataclass(slots=True)
class _Block:
    stored: bytes
    used_at: float
    is_used: bool = False  # since it was written or last stood in front


class _Books:
    """What the taker of changes was told and what it still must hear."""

    def __init__(self) -> None:
        self._told: dict[BlockName, int] = {}  # -> slot_bytes
        self._untold: OrderedDict[BlockName, Change] = OrderedDict()

    def add(self, name: BlockName, slot_bytes: int) -> None:
        self._untold.pop(name, None)
        self._untold[name] = Change(name, True, slot_bytes)

    def remove(self, name: BlockName) -> None:
        self._untold.pop(name, None)
        if name in self._told:  # else the taker never heard of it, and need not
            self._untold[name] = Change(name, False)

    def take(self, most: int) -> list[Change]:
        taken = [self._untold.popitem(last=False)[1] for _ in range(min(most, len(self._untold)))]
        for change in taken:
            if change.is_added:
                self._told[change.name] = change.slot_bytes
            else:
                self._told.pop(change.name, None)
        return taken

    def believed(self) -> dict[BlockName, int]:
        """Names and sizes that the taker will believe in once it has taken everything."""
        believed = dict(self._told)
        for change in self._untold.values():
            if change.is_added:
                believed[change.name] = change.slot_bytes
            else:
                believed.pop(change.name, None)
        return believed


class MemoryTier(Tier):
    """Keeps blocks in a dictionary, up to `settings.capacity` bytes.

    Args:
        clock: seconds; the age that `purge` compares is taken from it.
    Raises:
        ConfigError: no capacity.
    """

    def __init__(self, settings: TierSettings, clock: Callable[[], float] = time.monotonic) -> None:
        if settings.capacity is None or settings.capacity <= 0:
            raise ConfigError(
                f"node.tiers: capacity ({settings.capacity}) of a tier of type memory; give it a "
                "size such as 1GiB, or the tier grows without end"
            )
        self._capacity = settings.capacity
        self._clock = clock
        self._lock = Lock()
        self._blocks: OrderedDict[BlockName, _Block] = OrderedDict()
        self._bytes = 0
        self._evicted = 0
        self._books = _Books()

    @property
    def info(self) -> TierInfo:
        return TierInfo(
            type="memory",
            is_indexed=True,
            is_shared=False,
            is_durable=False,
            batch_max=BATCH_MAX,
            capacity=self._capacity,
        )

    def probe(self, names: Sequence[BlockName]) -> list[Outcome]:
        with self._lock:
            return [Outcome.OK if name in self._blocks else Outcome.MISSING for name in names]

    def read(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        return [self._read_one(name, view) for name, view in zip(names, views, strict=True)]

    def write(self, names: Sequence[BlockName], views: Sequence[memoryview]) -> list[Outcome]:
        return [self._write_one(name, view) for name, view in zip(names, views, strict=True)]

    def drop(self, names: Sequence[BlockName]) -> list[Outcome]:
        with self._lock:
            for name in names:
                self._remove(name)
        return [Outcome.OK] * len(names)

    def purge(self, namespace: NamespaceId | None, older_than_s: float | None) -> int:
        with self._lock:
            used_before = self._clock() - (older_than_s or 0.0)
            doomed = [
                name
                for name, block in self._blocks.items()
                if namespace in (None, name.namespace)
                and (older_than_s is None or block.used_at <= used_before)
            ]
            for name in doomed:
                self._remove(name)
        return len(doomed)

    def close(self) -> None:
        with self._lock:
            self._blocks.clear()
            self._bytes = 0
            self._books = _Books()

    def touch(self, names: Sequence[BlockName]) -> None:
        with self._lock:
            for name in names:
                self._use(name)

    def take_changes(self, most: int) -> list[Change]:
        with self._lock:
            return self._books.take(most)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"blocks": len(self._blocks), "bytes": self._bytes, "evicted": self._evicted}

    def check(self) -> list[str]:
        with self._lock:
            found = []
            stored = {name: len(block.stored) for name, block in self._blocks.items()}
            if sum(stored.values()) != self._bytes:
                found.append(f"{sum(stored.values())} bytes are stored, {self._bytes} are counted")
            if self._bytes > self._capacity:
                found.append(f"{self._bytes} bytes exceed the capacity ({self._capacity})")
            if self._books.believed() != stored:
                found.append("the changes told and untold do not add up to the blocks stored")
            return found

    def _read_one(self, name: BlockName, view: memoryview) -> Outcome:
        with self._lock:
            block = self._use(name)
        if block is None:
            return Outcome.MISSING
        if len(block.stored) != len(view):
            return Outcome.CORRUPT
        view[:] = block.stored  # immutable, and ours to read even if it is evicted meanwhile
        return Outcome.OK

    def _write_one(self, name: BlockName, view: memoryview) -> Outcome:
        with self._lock:
            there = self._blocks.get(name)
            if there is not None and len(there.stored) == len(view):
                self._use(name)
                return Outcome.OK
            if len(view) > self._capacity:
                return Outcome.FULL
            self._remove(name)
            while self._bytes + len(view) > self._capacity:
                self._evict_one()
            self._blocks[name] = _Block(bytes(view), self._clock())
            self._bytes += len(view)
            self._books.add(name, len(view))
            assert self._bytes <= self._capacity, "a tier is never over its capacity"
        return Outcome.OK

    def _use(self, name: BlockName) -> _Block | None:
        block = self._blocks.get(name)
        if block is not None:
            block.used_at = self._clock()
            block.is_used = True
        return block

    def _evict_one(self) -> None:
        assert self._blocks, "only blocks take room"
        while True:  # ends: each turn clears one mark or evicts
            name, block = next(iter(self._blocks.items()))
            if not block.is_used:
                break
            block.is_used = False
            self._blocks.move_to_end(name)
        self._remove(name)
        self._evicted += 1

    def _remove(self, name: BlockName) -> None:
        block = self._blocks.pop(name, None)
        if block is not None:
            self._bytes -= len(block.stored)
            self._books.remove(name)
