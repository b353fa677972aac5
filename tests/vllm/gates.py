"""A connector whose copies pass a gate, so that a test decides when they happen or fail.

The copy engine behind the gate is the real one. In-process engines only: `CURRENT` is the engine's.
"""

from __future__ import annotations

import threading
from collections import Counter

from tierkv.connectors.vllm import TierKVConnector
from tierkv.device.base import Descriptors, Direction

CURRENT: dict[str, object] = {}
WAIT_S = 15


class GatedEvent:
    """End of a copy that may not have been let through yet."""

    def __init__(self, gate: GatedEngine, direction: Direction) -> None:
        self._gate = gate
        self._direction = direction
        self._inner = None
        self._let_through = threading.Event()
        self.is_failed = False

    def let_through(self, inner) -> None:
        self._inner = inner
        self._let_through.set()

    def is_done(self) -> bool:
        return self.is_failed or (self._inner is not None and self._inner.is_done())

    def wait(self) -> None:
        if self.is_failed:
            return
        self._gate.somebody_waits(self._direction, self)
        assert self._let_through.wait(WAIT_S), "a gate stayed closed"
        self._inner.wait()

    def finish(self) -> None:
        self.wait()

    @property
    def is_ok(self) -> bool:
        return not self.is_failed and self._inner.is_ok


class GatedEngine:
    """Copies queue at a closed gate; opened, they go to the real engine in order."""

    def __init__(self, inner) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self._closed: set[Direction] = set()
        self._held: list[tuple[Direction, Descriptors, GatedEvent]] = []
        self._failing: Counter[Direction] = Counter()
        self.is_on_demand = False
        self.waits: Counter[Direction] = Counter()
        self.waiting = threading.Event()
        self.submitted: Counter[Direction] = Counter()

    def close_gate(self, direction: Direction, on_demand: bool = False) -> None:
        """Hold copies back; on demand, each goes through when somebody waits for it."""
        self._closed.add(direction)
        self.is_on_demand = on_demand
        self.waiting.clear()

    def open_gate(self, direction: Direction) -> None:
        with self._lock:
            self._closed.discard(direction)
            passing = [job for job in self._held if job[0] is direction]
            self._held = [job for job in self._held if job[0] is not direction]
        for job in passing:
            self._pass(job)

    def held(self, direction: Direction) -> int:
        return sum(1 for job in self._held if job[0] is direction)

    def fail_next(self, direction: Direction, copies: int) -> None:
        """The next copies of this direction are not made, and say so."""
        self._failing[direction] = copies

    def submit(self, direction: Direction, copies: Descriptors):
        self.submitted[direction] += 1
        event = GatedEvent(self, direction)
        if self._failing[direction]:
            self._failing[direction] -= 1
            event.is_failed = True
            return event
        with self._lock:
            is_held = direction in self._closed
            if is_held:
                self._held.append((direction, copies, event))
        if not is_held:
            self._pass((direction, copies, event))
        return event

    def somebody_waits(self, direction: Direction, event: GatedEvent) -> None:
        self.waits[direction] += 1
        if not self.is_on_demand:
            if direction in self._closed:
                self.waiting.set()
            return
        with self._lock:
            wanted = [job for job in self._held if job[2] is event]
            self._held = [job for job in self._held if job[2] is not event]
        for job in wanted:
            self._pass(job)

    def give_way(self) -> None:
        self._inner.give_way()

    def _pass(self, job) -> None:
        direction, copies, event = job
        event.let_through(self._inner.submit(direction, copies))

    def close(self) -> None:
        for direction in Direction:
            self.open_gate(direction)
        self._inner.close()


class GatedConnector(TierKVConnector):
    """TierKV with a gate in front of its copy engine and a log of the layers."""

    def make_copy_engine(self, device):
        gate = GatedEngine(super().make_copy_engine(device))
        CURRENT["gate"] = gate
        CURRENT["log"] = []
        return gate

    def wait_for_layer_load(self, layer_name: str) -> None:
        super().wait_for_layer_load(layer_name)
        held = CURRENT["gate"].held(Direction.LOAD)
        CURRENT["log"].append(("loaded", layer_name, held))

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs) -> None:
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        CURRENT["log"].append(("computed", layer_name, CURRENT["gate"].held(Direction.LOAD)))
