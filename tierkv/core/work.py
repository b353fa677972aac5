"""Makes jobs: numbers them, and cuts them so that threads are busy and deadlines mean something."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from tierkv.core.eviction.base import Rows
from tierkv.core.lanes import Work
from tierkv.core.namespace import Namespace
from tierkv.core.values import Job, Op
from tierkv.types import BlockKey, NamespaceId

JOB_BYTES_MAX = 8 << 20
JOB_KEYS_MAX = 64


class WorkFactory:
    """Source of jobs; their numbers are never used again."""

    def __init__(self) -> None:
        self._numbers = itertools.count(1)

    @staticmethod
    def keys_per_job(slot_bytes: int) -> int:
        """Blocks that one job moves."""
        return max(1, min(JOB_KEYS_MAX, JOB_BYTES_MAX // slot_bytes))

    def pieces(self, space: Namespace, tiers: Sequence[int]) -> list[tuple[int, int]]:
        """Cut a run into jobs: (first, end) of consecutive blocks of one tier."""
        most = self.keys_per_job(space.slot_bytes)
        found, first = [], 0
        for at in range(1, len(tiers) + 1):
            if at == len(tiers) or tiers[at] != tiers[first] or at - first == most:
                found.append((first, at))
                first = at
        return found

    def on_rows(self, op: Op, tier: int, space: Namespace, rows: Rows) -> Work:
        """A job that moves the bytes of slots."""
        keys = tuple(key for row in rows.tolist() if (key := space.keys[row]) is not None)
        assert len(keys) == len(rows), "every moved slot has a key"
        offsets = tuple(space.offset[rows].tolist())
        job = Job(next(self._numbers), tier, op, space.id, space.slot_bytes, keys, offsets)
        return Work(job, space, rows)

    def on_keys(self, op: Op, tier: int, space: Namespace, keys: Sequence[BlockKey]) -> Work:
        """A job that names blocks and moves nothing."""
        job = Job(next(self._numbers), tier, op, space.id, space.slot_bytes, tuple(keys))
        return Work(job, space)

    def on_store(
        self, op: Op, tier: int, namespace: NamespaceId | None, older_than_s: float | None
    ) -> Work:
        """A job on a whole store."""
        job = Job(next(self._numbers), tier, op, namespace, older_than_s=older_than_s)
        return Work(job, None)
