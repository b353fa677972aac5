"""The model loop of ``tierkv bench device``: a shared prefix computed, or loaded from the pool.

Several requests begin with the same tokens. Both arms end with the same blocks on the device, and
compute the rest of every request from them; they differ in where the prefix comes from. Prefill
goes in chunks that end where the prefix ends, so both arms compute the rest with equal shapes.
"""

from __future__ import annotations

import math
import statistics
import time

import numpy as np
import torch

from tierkv.bench.device_model import PagedModel
from tierkv.bench.device_plan import ModelShape, Row, compare, void_reason
from tierkv.bench.device_stage import World
from tierkv.connectors.vllm.kv_layout import describe_layers
from tierkv.device.base import Descriptors, Direction
from tierkv.device.layout import KvLayout, Pages
from tierkv.types import FRAME_BYTES, slot_bytes_of

SEED = 13
DAMAGE = 8.0
"""A number that keys and values, which are about 1, do not have."""
CONTROL_MIN = 0.1
"""A damaged block must change an output by at least so much, whatever the tolerance."""


def measure_loop(world: World) -> list[Row]:
    """Time of computing a prefix over the time of loading it, the rest of all requests included."""
    if not world.budget.allows("the model loop"):
        return []
    shape = world.plan.model
    loop = _Loop(world, shape)
    loop.store()
    found = compare(world.plan.samples, world.budget, loop.prefill, loop.load)
    differences = dict(loop.differences)
    world.expect(
        differences["load"] <= shape.tolerance,
        f"outputs after a load differ by {differences['load']:g}, more than {shape.tolerance:g}",
    )
    control = loop.damage_and_load()
    world.expect(
        control > max(CONTROL_MIN, 10 * shape.tolerance),
        f"a damaged block changed the outputs by {control:g} only: the comparison proves nothing",
    )
    prefill_ms = statistics.median(found.before + found.after) * 1000
    load_ms = statistics.median(found.ours) * 1000
    return [
        Row(
            "loop_prefill_over_load",
            found.ratio,
            "x",
            spread=found.aa_spread,
            void=void_reason(found),
            note=f"{prefill_ms:.1f} / {load_ms:.1f} ms",
            facts={
                "prefill_ms": round(prefill_ms, 3),
                "load_ms": round(load_ms, 3),
                "tolerance": shape.tolerance,
                "difference_load": _finite(differences["load"]),
                "difference_prefill": _finite(differences["prefill"]),
                "difference_damaged": _finite(control),
                "loaded_bytes": loop.loaded_bytes,
                "layers": shape.layers,
                "hidden": shape.hidden,
                "dtype": shape.dtype,
                "requests": shape.requests,
                "prefix_tokens": shape.prefix_tokens,
                "suffix_tokens": shape.suffix_tokens,
                "samples": len(found.ours),
            },
        )
    ]


class _Loop:
    """Model, requests and the slots of their prefix.

    Attributes:
        differences: arm -> the largest difference of an output from those of the first prefill.
    """

    def __init__(self, world: World, shape: ModelShape) -> None:
        assert shape.prefix_tokens % shape.chunk_tokens == 0, "chunks end where the prefix ends"
        assert shape.chunk_tokens % shape.block_tokens == 0, "chunks end where blocks end"
        self._world, self._shape = world, shape
        rest = -(-shape.suffix_tokens // shape.block_tokens)
        blocks = shape.prefix_blocks + rest * shape.requests
        self._model = PagedModel(world.device, shape, blocks)
        self._layout = KvLayout(describe_layers(self._model.kv, blocks), 1)
        self._slot_bytes = slot_bytes_of(self._layout.geometry.bytes)
        dice = np.random.default_rng(SEED)
        order = dice.permutation(blocks)
        self._prefix_blocks = order[: shape.prefix_blocks].tolist()
        self._slots = (dice.permutation(shape.prefix_blocks) * self._slot_bytes).tolist()
        self._prefix = torch.tensor(self._prefix_blocks, device=world.device)
        self._tables = [
            torch.tensor([*self._prefix_blocks, *own.tolist()], device=world.device)
            for own in np.split(order[shape.prefix_blocks :], shape.requests)
        ]
        self._inputs = self._model.make_inputs(shape.prefix_tokens, 0)
        self._suffixes = [
            self._model.make_inputs(shape.suffix_tokens, shape.prefix_tokens) for _ in self._tables
        ]
        self.differences = {"prefill": 0.0, "load": 0.0}
        self._outputs: list[torch.Tensor] = []
        self._kv: list[torch.Tensor] = []

    @property
    def loaded_bytes(self) -> int:
        """Bytes of one load."""
        return self._layout.geometry.bytes * len(self._slots)

    def store(self) -> None:
        """Compute the prefix once, remember what came out, and store its blocks."""
        self._compute_prefix()
        self._outputs = self._compute_rest()
        self._kv = [kv[self._prefix] for kv in self._model.kv.values()]
        self._world.copy(Direction.STORE, self._copies())

    def prefill(self) -> float:
        """Compute everything; its seconds."""
        self._forget()
        start = time.perf_counter()
        self._compute_prefix()
        outputs = self._compute_rest()
        self._world.settle()
        seconds = time.perf_counter() - start
        self._note("prefill", outputs)
        return seconds

    def load(self) -> float:
        """Load the prefix and compute the rest; the seconds. Loaded bytes are compared."""
        seconds, outputs = self._load()
        pairs = zip(self._model.kv.values(), self._kv, strict=True)
        is_equal = all(torch.equal(_raw(kv[self._prefix]), _raw(was)) for kv, was in pairs)
        self._world.expect(is_equal, "a loaded prefix has a wrong byte")
        self._note("load", outputs)
        return seconds

    def damage_and_load(self) -> float:
        """The negative control: how far outputs differ if one block in the pool is wrong."""
        first = self._slots[len(self._slots) // 2] + FRAME_BYTES
        wrong = torch.full((1,), DAMAGE, dtype=next(iter(self._model.kv.values())).dtype)
        pattern = _raw(wrong).numpy()
        payload = self._world.pool.bytes[first : first + self._layout.geometry.bytes]
        payload.reshape(-1, len(pattern))[:] = pattern
        _, outputs = self._load()
        return self._difference(outputs)

    def _load(self) -> tuple[float, list[torch.Tensor]]:
        self._forget()
        start = time.perf_counter()
        event = self._world.engine.submit(Direction.LOAD, self._copies())
        event.wait()
        outputs = self._compute_rest()
        self._world.settle()
        seconds = time.perf_counter() - start
        self._world.finish(event)
        return seconds, outputs

    def _compute_prefix(self) -> None:
        step = self._shape.chunk_tokens
        for start in range(0, self._shape.prefix_tokens, step):
            self._model.forward(self._inputs[start : start + step], self._prefix, start)

    def _compute_rest(self) -> list[torch.Tensor]:
        return [
            self._model.forward(suffix, table, self._shape.prefix_tokens)
            for suffix, table in zip(self._suffixes, self._tables, strict=True)
        ]

    def _forget(self) -> None:
        """Wipe the KV cache, so that nothing is there that this arm did not bring."""
        for kv in self._model.kv.values():
            kv.zero_()
        self._world.settle()

    def _copies(self) -> Descriptors:
        parts = (0,) * len(self._slots)
        pages = Pages(tuple(self._prefix_blocks), tuple(self._slots), parts)
        return self._layout.descriptors(self._layout.names, pages, self._world.pool.address, 0)

    def _note(self, arm: str, outputs: list[torch.Tensor]) -> None:
        self.differences[arm] = max(self.differences[arm], self._difference(outputs))

    def _difference(self, outputs: list[torch.Tensor]) -> float:
        """The largest of all elements; infinite if there is one that is no number."""
        pairs = zip(outputs, self._outputs, strict=True)
        found = max(float((a.float() - b.float()).abs().max()) for a, b in pairs)
        return found if math.isfinite(found) else math.inf


def _finite(number: float) -> float | None:
    """JSON has no word for infinity."""
    return number if math.isfinite(number) else None


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as bytes: equal NaNs are equal."""
    return tensor.contiguous().view(torch.uint8)
