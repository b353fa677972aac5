"""How an engine's KV memory lies on its device, as numbers.

One description for every layout: per layer a base address, the distance between blocks and the
bytes of one block. What does not fit it is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class _Columns:
    """Layers as arrays, shape (layers, 1), so that one sum makes the addresses of all pages."""

    base: Addresses
    stride: Addresses
    page: Addresses
    offset: Addresses

    @classmethod
    def make(cls, layers: list[LayerLayout], offsets: dict[str, int]) -> _Columns:
        rows = [(r.base, r.block_stride, r.page_bytes, offsets[r.name]) for r in layers]
        return cls(*np.array(rows, np.int64).reshape(-1, 4).T[:, :, None])


class KvLayout:
    """The layers of one rank and where their pages go in a slot."""

    def __init__(self, layers: list[LayerLayout], engine_blocks: int) -> None:
        self.layers = layers
        self.names = [layer.name for layer in layers]
        self.geometry = RankGeometry(tuple(layer.page_bytes for layer in layers), engine_blocks)
        self._offsets = dict(zip(self.names, self.geometry.layer_offsets, strict=True))
        self._by_name = {layer.name: layer for layer in layers}
        joined = _join(layers) if engine_blocks == 1 else layers
        self._all = _Columns.make(joined, self._offsets)

    def descriptors(
        self, names: list[str], pages: Pages, pool_address: int, rank_offset: int
    ) -> Descriptors:
        """Copies of these pages for these layers, layer by layer.

        Args:
            pool_address: address of byte 0 of the pool.
            rank_offset: where this rank's part of the payload begins.
        """
        if names == self.names:
            layers = self._all
        else:
            layers = _Columns.make([self._by_name[name] for name in names], self._offsets)
        blocks = np.array(pages.device_blocks, np.int64)
        slots = np.array(pages.slots, np.int64) + (pool_address + FRAME_BYTES + rank_offset)
        parts = np.array(pages.parts, np.int64)
        device = layers.base + blocks * layers.stride
        host = slots + layers.offset + parts * layers.page
        sizes = np.broadcast_to(layers.page, device.shape)
        return merge_runs(device.ravel(), host.ravel(), sizes.ravel())


def _join(layers: list[LayerLayout]) -> list[LayerLayout]:
    """Layers whose pages follow each other in every block are one, under the first one's name.

    With one engine block per slot they follow each other there, too, so one copy moves them all.
    """
    found: list[LayerLayout] = []
    for layer in layers:
        last = found[-1] if found else None
        if (
            last is not None
            and layer.base == last.base + last.page_bytes
            and layer.block_stride == last.block_stride
        ):
            found[-1] = replace(last, page_bytes=last.page_bytes + layer.page_bytes)
        else:
            found.append(layer)
    return found
