"""Leases that grow: blocks that another engine is still filling join when they become resident."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from tierkv.core.eviction.base import Rows
from tierkv.core.leases import Lease
from tierkv.core.namespace import Namespace, State
from tierkv.core.values import Event, Ready
from tierkv.types import LeaseId


class Growth:
    """Who waits for which row, and what becomes of it. Pins each block as it joins."""

    def __init__(
        self, leases: dict[LeaseId, Lease], events: list[Event], counters: Counter[str]
    ) -> None:
        self._leases = leases
        self._events = events
        self._counters = counters

    def start(self, lease: Lease, rows: Rows) -> None:
        """Let a lease grow over rows that are being filled, or are resident behind one such."""
        space = lease.space
        lease.growing = rows.tolist()
        for row in lease.growing:
            if space.state[row] == State.RESIDENT:
                lease.joined.add(row)
                space.pin(np.array([row], np.int32))
            else:
                space.waiters.setdefault(row, []).append(lease.id)

    def stop(self, lease: Lease, keep: int = 0) -> None:
        """Cut a lease's growing rows behind the first `keep`."""
        space = lease.space
        for row in lease.growing[keep:]:
            if row in lease.joined:
                lease.joined.discard(row)
                space.unpin(np.array([row], np.int32))
            elif row in space.waiters:
                waiting = space.waiters[row]
                waiting.remove(lease.id)
                if not waiting:
                    del space.waiters[row]
        del lease.growing[keep:]

    def wake(self, space: Namespace, rows: Iterable[int], is_ok: bool) -> None:
        """Tell the leases that wait for these rows what became of them."""
        woken: dict[LeaseId, None] = {}
        for row in rows:
            for lease_id in space.waiters.pop(row, ()):
                lease = self._leases[lease_id]
                woken[lease_id] = None
                if is_ok:
                    space.pin(np.array([row], np.int32))
                    lease.joined.add(row)
                else:
                    self.stop(lease, lease.growing.index(row))
        for lease_id in woken:
            self._advance(self._leases[lease_id])

    def _advance(self, lease: Lease) -> None:
        """Move joined rows at the front of the growing ones into the lease, and say so."""
        count = 0
        while count < len(lease.growing) and lease.growing[count] in lease.joined:
            count += 1
        moved = lease.growing[:count]
        lease.joined.difference_update(moved)
        del lease.growing[:count]
        if moved:
            lease.rows = np.concatenate([lease.rows, np.array(moved, np.int32)])
            self._counters["blocks_hit"] += count
            self._counters["bytes_hit"] += count * lease.space.slot_bytes
        offsets = lease.space.offset[lease.rows]
        self._events.append(Ready(lease.engine, lease.id, offsets, not lease.growing))
