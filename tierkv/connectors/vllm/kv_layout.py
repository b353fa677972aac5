"""Reads the layout of vLLM's KV tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tierkv.device.layout import LayerLayout, refuse_overlap
from tierkv.errors import LayoutMismatchError

if TYPE_CHECKING:
    import torch


def describe_layers(tensors: Mapping[str, torch.Tensor], blocks: int) -> list[LayerLayout]:
    """Read the layout of every layer.

    Args:
        tensors: per layer a tensor whose first dimension is the block.
        blocks: number of blocks that the engine's block manager hands out. A kernel may split
            each of them; then the first dimension is a multiple.
    Raises:
        LayoutMismatchError: names the layer and what is not supported.
    """
    layers = [_describe(name, tensor, blocks) for name, tensor in tensors.items()]
    refuse_overlap(layers)
    return layers


def _describe(name: str, tensor: torch.Tensor, blocks: int) -> LayerLayout:
    if not hasattr(tensor, "data_ptr"):
        raise LayoutMismatchError(
            f"layer {name}: {type(tensor).__name__} instead of one tensor; "
            "this KV cache layout is not supported yet"
        )
    rows = tensor.shape[0]
    if blocks <= 0 or rows % blocks:
        raise LayoutMismatchError(
            f"layer {name}: first dimension {rows} is no multiple of {blocks} blocks; "
            "this KV cache layout is not supported yet"
        )
    split = rows // blocks
    page = tensor[0]
    item = tensor.element_size()
    row_bytes, row_stride = page.numel() * item, tensor.stride(0) * item
    if not page.is_contiguous() or (split > 1 and row_stride != row_bytes):
        raise LayoutMismatchError(
            f"layer {name}: a block of shape {tuple(page.shape)} with strides {page.stride()} is "
            "not contiguous; this KV cache layout is not supported yet"
        )
    form = f"{tensor.dtype} {tuple(page.shape)} {page.stride()} x{split}"
    return LayerLayout(name, tensor.data_ptr(), row_stride * split, row_bytes * split, blocks, form)
