"""Chooses the copy engine of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tierkv.device.base import CopyEngine
from tierkv.device.cpu import create_cpu_engine
from tierkv.device.hooks import DeviceCallError, DeviceHooks
from tierkv.errors import LayoutMismatchError

if TYPE_CHECKING:
    import torch

STAGING_BYTES = 64 << 20
KINDS = ("cpu", "cuda", "npu")


def create_copy_engine(device: torch.device, *, staging_bytes: int = STAGING_BYTES) -> CopyEngine:
    """The copy engine of a device. Made by the thread that computes on it.

    Args:
        device: where the KV tensors lie.
        staging_bytes: pinned host memory for copies that the driver cannot make by itself;
            accelerators only, allocated here. 0: none.
    Raises:
        LayoutMismatchError: this kind of device is not supported, or its driver's library is not
            there; says which.
    """
    if device.type == "cpu":
        return create_cpu_engine()
    if device.type not in KINDS:
        raise LayoutMismatchError(
            f"the KV cache lies on {device}; TierKV copies {', '.join(KINDS)} devices"
        )
    from tierkv.device.accelerator import AcceleratorCopyEngine

    try:
        hooks = _hooks_of(device)
    except DeviceCallError as error:
        raise LayoutMismatchError(f"{device} cannot be used: {error}") from error
    return AcceleratorCopyEngine(device, hooks, staging_bytes=staging_bytes)


def _hooks_of(device: torch.device) -> DeviceHooks:
    if device.type == "npu":
        from tierkv.device.npu import NpuHooks

        return NpuHooks(device.index or 0)
    from tierkv.device.cuda import CudaHooks

    return CudaHooks()
