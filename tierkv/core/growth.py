"""Leases that grow: blocks that are still being filled or promoted join when they are resident."""

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
        """Let a lease grow over rows on their way, or resident behind one such."""
        space = lease.space
        listed = rows.tolist()
        lease.growing += listed
        for row in listed:
            if space.state[row] == State.RESIDENT:
                lease.joined.add(row)
                space.pin(np.array([row], np.int32))
            else:
                space.waiters.setdefault(row, []).append(lease.id)

    def stop(self, lease: Lease, keep: int = 0) -> None:
        """Cut a lease's growing rows behind the first `keep`."""
        space = lease.space
        lease.unknown = []
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

    def wake(self, space: Namespace, rows: Iterable[int], is_ok: bool, source: int = 0) -> None:
        """Tell the leases that wait for these rows what became of them.

        Args:
            source: 1 + the number of the tier that they came from; 0 if an engine wrote them.
        """
        woken: dict[LeaseId, None] = {}
        for row in rows:
            for lease_id in space.waiters.pop(row, ()):
                lease = self._leases[lease_id]
                woken[lease_id] = None
                if is_ok:
                    space.pin(np.array([row], np.int32))
                    lease.joined.add(row)
                    if source:
                        lease.joined_from[row] = source
                else:
                    place = lease.growing.index(row)
                    lost = len(lease.growing) - place + len(lease.unknown)
                    self._counters["miss_pending"] += lost
                    self.stop(lease, place)
        for lease_id in woken:
            self.advance(self._leases[lease_id])

    def advance(self, lease: Lease) -> None:
        """Move joined rows at the front of the growing ones into the lease, and say so."""
        count = 0
        while count < len(lease.growing) and lease.growing[count] in lease.joined:
            count += 1
        moved = lease.growing[:count]
        lease.joined.difference_update(moved)
        del lease.growing[:count]
        if moved:
            lease.rows = np.concatenate([lease.rows, np.array(moved, np.int32)])
            lease.sources.extend(lease.joined_from.pop(row, 0) for row in moved)
            self._counters["blocks_hit"] += count
            self._counters["bytes_hit"] += count * lease.space.slot_bytes
        self._events.append(Ready(
            lease.engine, lease.id, lease.space.offset[lease.rows], bytes(lease.sources),
            len(lease.growing) + len(lease.unknown), self.is_promoting(lease),
        ))  # fmt: skip

    @staticmethod
    def is_promoting(lease: Lease) -> bool:
        """Whether a lease waits for a tier, and not only for other engines."""
        if lease.unknown:
            return True
        state = lease.space.state
        return any(state[row] == State.PROMOTING for row in lease.growing)
