"""Reads how the arrays of an engine lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from tierkv.device.base import CopyEngine
from tierkv.device.cpu import create_cpu_engine
from tierkv.device.layout import LayerLayout, refuse_overlap
from tierkv.device.select import create_copy_engine
from tierkv.errors import LayoutMismatchError

if TYPE_CHECKING:
    import numpy.typing as npt
    import torch

    KvTensor: TypeAlias = torch.Tensor | npt.NDArray[Any]


def describe_tensors(tensors: Mapping[str, KvTensor]) -> list[LayerLayout]:
    """Read the layout of every tensor; the first dimension counts device blocks.

    Args:
        tensors: torch tensors or numpy arrays, by name; names are part of the layout.
    Raises:
        LayoutMismatchError: names the tensor and what is not supported.
    """
    if not tensors:
        raise LayoutMismatchError("tensors: the mapping is empty; give at least one KV tensor")
    layers = [_describe(name, tensor) for name, tensor in tensors.items()]
    first = layers[0]
    for layer in layers:
        if layer.blocks != first.blocks:
            raise LayoutMismatchError(
                f"tensor {layer.name} has {layer.blocks} blocks, tensor {first.name} has "
                f"{first.blocks}; the first dimension counts blocks and must be the same in all"
            )
    refuse_overlap(layers)
    return layers


def _describe(name: str, tensor: KvTensor) -> LayerLayout:
    if hasattr(tensor, "data_ptr"):
        return _describe_torch(name, tensor)
    if isinstance(tensor, np.ndarray):
        return _describe_numpy(name, tensor)
    raise LayoutMismatchError(
        f"tensor {name}: {type(tensor).__name__} is neither a torch tensor nor a numpy array"
    )


def create_engine_for(tensors: Mapping[str, KvTensor]) -> CopyEngine:
    """The copy engine of the device that the tensors lie on.

    Raises:
        LayoutMismatchError: they lie on several devices, or on one that nothing can copy.
    """
    devices = {str(getattr(tensor, "device", "cpu")) for tensor in tensors.values()}
    if len(devices) > 1:
        raise LayoutMismatchError(
            f"the tensors lie on {', '.join(sorted(devices))}; a cache serves one device"
        )
    device = devices.pop()
    if device == "cpu":
        return create_cpu_engine()  # numpy arrays need no torch
    import torch

    return create_copy_engine(torch.device(device))


def _describe_torch(name: str, tensor: Any) -> LayerLayout:
    if not str(tensor.layout).endswith("strided") or tensor.is_quantized:
        raise LayoutMismatchError(f"tensor {name}: {tensor.layout} is no plain memory")
    item = tensor.element_size()
    strides = tuple(step * item for step in tensor.stride())
    array = _Array(tuple(tensor.shape), strides, item, str(tensor.dtype))
    return _layout(name, tensor.data_ptr(), array)


def _describe_numpy(name: str, array: npt.NDArray[Any]) -> LayerLayout:
    if not array.flags.writeable:
        raise LayoutMismatchError(f"tensor {name} is read-only; loads could not write it")
    if array.dtype.hasobject:
        raise LayoutMismatchError(f"tensor {name} holds Python objects, not numbers")
    place = int(array.__array_interface__["data"][0])
    dtype = f"numpy.{array.dtype.str} {array.dtype}"  # `str` alone is the same for several
    return _layout(name, place, _Array(array.shape, array.strides, array.itemsize, dtype))


@dataclass(frozen=True, slots=True)
class _Array:
    """Shape, strides in bytes, bytes of an item, and its type."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item: int
    dtype: str


def _layout(name: str, base: int, array: _Array) -> LayerLayout:
    shape, strides = array.shape, array.strides
    if len(shape) < 2 or 0 in shape:
        raise LayoutMismatchError(
            f"tensor {name} has shape {shape}; it needs a first dimension of blocks, behind it at "
            "least one of contents, and none of size 0"
        )
    page = array.item
    for size, step in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if size > 1 and step != page:
            raise LayoutMismatchError(
                f"tensor {name}: a block of shape {shape[1:]} with strides {strides[1:]} is not "
                "contiguous; only the first dimension may have a stride of its own"
            )
        page *= size
    stride = strides[0] if shape[0] > 1 else page
    if stride < page:
        raise LayoutMismatchError(
            f"tensor {name}: blocks of {page} bytes lie {stride} bytes apart; they overlap"
        )
    return LayerLayout(name, base, stride, page, shape[0], f"{array.dtype} {shape[1:]}")
