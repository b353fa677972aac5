"""Reads the layout of the KV tensors that an engine hands over.

Engines give per layer one tensor, or several (K and V apart, latent and rotary part, values and
their scales, convolution and state). Whatever it is, it becomes runs of bytes: per run a base
address, the distance between blocks and the bytes of one block. Bytes come from shapes and strides
of what is there, never from head size times dtype, so scales and padding are moved or left out as
the engine lays them out.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from tierkv.device.layout import LayerLayout, refuse_overlap
from tierkv.errors import LayoutMismatchError

if TYPE_CHECKING:
    import torch

    KvCache: TypeAlias = torch.Tensor | Sequence[torch.Tensor | None]

RUNS_MAX = 64  # of one tensor's block: more would be copies too small to be worth it


@dataclass(frozen=True, slots=True)
class PageSize:
    """What the engine's block manager says of one layer's block, in bytes.

    Attributes:
        payload: without padding behind it.
        padded: with it.
    """

    payload: int
    padded: int


@dataclass(frozen=True, slots=True)
class Described:
    """All that lies on one rank.

    Attributes:
        runs: what is copied.
        by_layer: names of the runs that a layer reads and writes. Layers that share one cache
            share its runs.
    """

    runs: list[LayerLayout]
    by_layer: dict[str, tuple[str, ...]]


def describe(
    caches: Mapping[str, KvCache], blocks: int, pages: Mapping[str, PageSize] | None = None
) -> Described:
    """Read the layout of every layer.

    Args:
        caches: per layer a tensor whose first dimension is the block, or a sequence of such. With
            K and V outermost, `[2, blocks, ...]`, the second one is the block.
        blocks: number of blocks that the engine's block manager hands out. There may be more rows;
            and a kernel may split each block, then the first dimension is a multiple.
        pages: per layer its bytes per block, where the engine tells them.
    Raises:
        LayoutMismatchError: names the layer and what is not supported.
    """
    runs: list[LayerLayout] = []
    by_layer: dict[str, tuple[str, ...]] = {}
    known: dict[tuple[int, int, int], str] = {}
    for name, cache in caches.items():
        found = []
        for run in _describe_layer(name, cache, blocks, (pages or {}).get(name)):
            place = (run.base, run.block_stride, run.page_bytes)
            if place not in known:  # layers may share one cache
                known[place] = run.name
                runs.append(run)
            found.append(known[place])
        by_layer[name] = tuple(found)
    refuse_overlap(runs)
    return Described(runs, by_layer)


def describe_layers(
    caches: Mapping[str, KvCache], blocks: int, pages: Mapping[str, PageSize] | None = None
) -> list[LayerLayout]:
    """The runs of `describe` alone."""
    return describe(caches, blocks, pages).runs


def _describe_layer(
    name: str, cache: KvCache, blocks: int, page: PageSize | None
) -> list[LayerLayout]:
    tensors = _tensors_of(name, cache, blocks)
    counts = sorted({tensor.shape[0] for tensor in tensors.values()})
    if len(counts) > 1:
        raise LayoutMismatchError(
            f"layer {name}: its tensors have {counts[0]} and {counts[-1]} rows; "
            "this KV cache layout is not supported yet"
        )
    rows = counts[0]
    row_bytes = sum(_content_bytes(tensor) for tensor in tensors.values())
    split = _rows_per_block(name, rows, row_bytes, blocks, page)
    if page is not None and row_bytes * split > page.padded:
        raise LayoutMismatchError(
            f"layer {name}: {row_bytes * split} bytes per block, but the engine counts "
            f"{page.padded}; this KV cache layout is not supported yet"
        )
    runs = []
    for part, tensor in tensors.items():
        runs += _describe_tensor(part, tensor, blocks, split)
    return runs


def _tensors_of(name: str, cache: KvCache, blocks: int) -> dict[str, torch.Tensor]:
    """The tensors of a layer by name, block first."""
    if hasattr(cache, "data_ptr"):
        tensor: torch.Tensor = cache
        if tensor.dim() > 2 and tensor.shape[0] == 2 < blocks <= tensor.shape[1]:
            return {f"{name}[{at}]": tensor[at] for at in range(2)}
        return {name: tensor}
    if not isinstance(cache, Sequence) or isinstance(cache, str):
        raise LayoutMismatchError(
            f"layer {name}: {type(cache).__name__} instead of one tensor or several; "
            "this KV cache layout is not supported yet"
        )
    found = {f"{name}[{at}]": tensor for at, tensor in enumerate(cache) if tensor is not None}
    for part, tensor in found.items():
        if not hasattr(tensor, "data_ptr"):
            raise LayoutMismatchError(
                f"layer {part}: {type(tensor).__name__} is no tensor; "
                "this KV cache layout is not supported yet"
            )
    if not found:
        raise LayoutMismatchError(f"layer {name}: an empty sequence; there is nothing to cache")
    return found


def _rows_per_block(
    name: str, rows: int, row_bytes: int, blocks: int, page: PageSize | None
) -> int:
    """How many rows of the tensors make a block of the block manager.

    Where shapes and page size leave two readings, it is neither: the wrong one is another block.
    """
    if blocks > 0 and row_bytes > 0:
        if page is None:
            if rows % blocks == 0 and rows:
                return rows // blocks
        elif page.payload % row_bytes == 0 and rows >= blocks * (page.payload // row_bytes):
            return page.payload // row_bytes
        elif rows == blocks or (rows > blocks and 2 * row_bytes > page.padded):
            return 1  # the page holds something beside these tensors
    told = f"; the engine counts {page.payload} bytes per block" if page is not None else ""
    raise LayoutMismatchError(
        f"layer {name}: {rows} rows of {row_bytes} bytes are no {blocks} blocks{told}; "
        "this KV cache layout is not supported yet"
    )


def _content_bytes(tensor: torch.Tensor) -> int:
    """Bytes of one row."""
    return int(tensor[0].numel() * tensor.element_size()) if tensor.shape[0] else 0


def _describe_tensor(name: str, tensor: torch.Tensor, blocks: int, split: int) -> list[LayerLayout]:
    item = tensor.element_size()
    page, row_stride = tensor[0], tensor.stride(0) * item
    shape, strides = tuple(page.shape), tuple(page.stride())
    run, steps = _inner_run(shape, strides, item)
    count = 1
    for size, _ in steps:
        count *= size
    is_plain = count == 1 and (split == 1 or row_stride == run)
    if any(step < run for _, step in steps) or count > RUNS_MAX or not (is_plain or split == 1):
        raise LayoutMismatchError(
            f"layer {name}: a block of shape {shape} with strides {strides} is not contiguous; "
            "this KV cache layout is not supported yet"
        )
    if row_stride < run and blocks > 1:
        raise LayoutMismatchError(
            f"layer {name}: blocks of {run} bytes lie {row_stride} bytes apart; they overlap"
        )
    form = f"{tensor.dtype} {shape} {strides} x{split}"
    whole = LayerLayout(name, tensor.data_ptr(), row_stride * split, run * split, blocks, form)
    if count == 1:
        return [whole]
    offsets = itertools.product(*(range(0, size * step, step) for size, step in steps))
    return [
        replace(whole, name=f"{name}/{at}", base=whole.base + sum(offset))
        for at, offset in enumerate(offsets)
    ]


def _inner_run(
    shape: tuple[int, ...], strides: tuple[int, ...], item: int
) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the longest run without a gap, and (size, step in bytes) of what lies around it."""
    dims = sorted(
        ((size, step * item) for size, step in zip(shape, strides, strict=True) if size > 1),
        key=lambda dim: dim[1],
    )
    run = item
    while dims and dims[0][1] == run:
        run *= dims.pop(0)[0]
    return run, list(reversed(dims))
