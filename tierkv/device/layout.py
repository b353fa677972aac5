"""How an engine's KV memory lies on its device, as numbers.

One description for every layout: per layer a base address, the distance between blocks and the
bytes of one block. What does not fit it is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tierkv.device.base import Addresses, Descriptors, merge_runs
from tierkv.errors import LayoutMismatchError
from tierkv.types import FRAME_BYTES, RankGeometry


@dataclass(frozen=True, slots=True)
class LayerLayout:
    """One layer's blocks on one rank; addresses and sizes in bytes.

    Attributes:
        form: dtype, shape and strides inside a block: part of the namespace.
    """

    name: str
    base: int
    block_stride: int
    page_bytes: int
    blocks: int
    form: str


@dataclass(frozen=True, slots=True)
class Pages:
    """Engine blocks to be copied, in order; all sequences of one length.

    Attributes:
        device_blocks: block ids on the device.
        slots: byte offset in the pool of the slot each belongs to.
        parts: which engine block inside its slot.
    """

    device_blocks: tuple[int, ...]
    slots: tuple[int, ...]
    parts: tuple[int, ...]


def refuse_overlap(layers: list[LayerLayout]) -> None:
    """Raise `LayoutMismatchError` if two layers share memory; interleaved ones may lie so."""
    for at, one in enumerate(layers):
        for other in layers[at + 1 :]:
            if _overlap(one, other):
                raise LayoutMismatchError(
                    f"layers {one.name} and {other.name} share memory; models whose layers "
                    "overlay each other are not supported yet"
                )


def _overlap(one: LayerLayout, other: LayerLayout) -> bool:
    low, high = (one, other) if one.base <= other.base else (other, one)
    if low.base + (low.blocks - 1) * low.block_stride + low.page_bytes <= high.base:
        return False
    if low.block_stride != high.block_stride:
        return True
    shift = (high.base - low.base) % low.block_stride
    return shift < low.page_bytes or shift + high.page_bytes > low.block_stride


class KvLayout:
    """The layers of one rank and where their pages go in a slot."""

    def __init__(self, layers: list[LayerLayout], engine_blocks: int) -> None:
        self.layers = layers
        self.names = [layer.name for layer in layers]
        self.geometry = RankGeometry(tuple(layer.page_bytes for layer in layers), engine_blocks)
        self._offsets = dict(zip(self.names, self.geometry.layer_offsets, strict=True))
        self._by_name = {layer.name: layer for layer in layers}

    def descriptors(
        self, names: list[str], pages: Pages, pool_address: int, rank_offset: int
    ) -> Descriptors:
        """Copies of these pages for these layers, layer by layer.

        Args:
            pool_address: address of byte 0 of the pool.
            rank_offset: where this rank's part of the payload begins.
        """
        blocks = np.array(pages.device_blocks, np.int64)
        slots = np.array(pages.slots, np.int64) + (pool_address + FRAME_BYTES + rank_offset)
        parts = np.array(pages.parts, np.int64)
        found = [self._of_layer(name, blocks, slots, parts) for name in names]
        if len(found) == 1:
            return found[0]
        return Descriptors(
            np.concatenate([d.device for d in found]),
            np.concatenate([d.host for d in found]),
            np.concatenate([d.sizes for d in found]),
        )

    def _of_layer(
        self, name: str, blocks: Addresses, slots: Addresses, parts: Addresses
    ) -> Descriptors:
        layer = self._by_name[name]
        device = layer.base + blocks * layer.block_stride
        host = slots + self._offsets[name] + parts * layer.page_bytes
        return merge_runs(device, host, layer.page_bytes)
