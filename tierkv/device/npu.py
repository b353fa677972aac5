"""Driver calls of the Ascend NPU, through its runtime library.

torch_npu has no Python call for batched copies, and its wheels differ in whether they offer host
registration, so the library that it has loaded is called directly.

Source of the rules: CANN's header acl_rt.h. Registration needs a kernel above 5.10 and addresses
aligned to 4 KiB; copies of memory that is not page-locked return when they have ended.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.device.base import Descriptors, Direction
from tierkv.device.hooks import DeviceCallError

if TYPE_CHECKING:
    import torch

LIBRARY = "libascendcl.so"
DESCRIPTORS_MAX = 2048  # the least that a supported device takes in one call
_PINNED = 0x10000000  # ACL_HOST_REG_PINNED
_RELAXED = 2  # ACL_MODEL_RI_CAPTURE_MODE_RELAXED
_KINDS = {Direction.LOAD: 1, Direction.STORE: 2}  # ACL_MEMCPY_HOST_TO_DEVICE, ..._DEVICE_TO_HOST
_HOST, _DEVICE = 0, 1  # ACL_MEM_LOCATION_TYPE_*


class _Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("target", _Location), ("source", _Location), ("reserved", ctypes.c_uint8 * 16))


class NpuHooks:
    """Calls of the Ascend runtime for one device.

    Args:
        device: index of the NPU.
    Raises:
        DeviceCallError: the runtime library is not there.
    """

    descriptors_max = DESCRIPTORS_MAX
    events_tell_failures = False

    def __init__(self, device: int) -> None:
        self._device = device
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DeviceCallError(f"{LIBRARY} cannot be loaded: {error}") from error
        self.has_batch = hasattr(self._library, "aclrtMemcpyBatchAsync")
        self._torch = _registrar()
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._declare("aclrtHostRegisterV2", pointer, ctypes.c_uint64, ctypes.c_uint32)
        self._declare("aclrtHostUnregister", pointer)
        self._declare("aclmdlRICaptureThreadExchangeMode", pointer)
        self._declare("aclrtMemcpyAsync", pointer, size, pointer, size, ctypes.c_int, pointer)
        self._declare("aclrtMemcpy", pointer, size, pointer, size, ctypes.c_int)
        self._declare(
            "aclrtMemcpyBatchAsync",
            *[pointer] * 4, size, pointer, pointer, size, pointer, pointer,
        )  # fmt: skip

    def _declare(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is not None:
            function.argtypes = arguments
            function.restype = ctypes.c_int

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name, None)
        if function is None:
            raise DeviceCallError(f"{name} is not in this version of the driver")
        code = function(*arguments)
        if code != 0:
            raise DeviceCallError(f"{name} failed with code {code}")

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        has_graphs = hasattr(self._library, "aclmdlRICaptureThreadExchangeMode")
        if has_graphs:
            self._call("aclmdlRICaptureThreadExchangeMode", ctypes.addressof(mode))
        try:
            yield
        finally:
            if has_graphs:
                self._call("aclmdlRICaptureThreadExchangeMode", ctypes.addressof(mode))

    def register(self, address: int, size: int) -> None:
        if self._torch is None:
            self._call("aclrtHostRegisterV2", address, size, _PINNED)
            return
        code = self._torch.npuHostRegister(address, size, _PINNED)
        if code != 0:
            raise DeviceCallError(f"npuHostRegister (aclrtHostRegisterV2) failed with code {code}")

    def unregister(self, address: int) -> None:
        if self._torch is None:
            self._call("aclrtHostUnregister", address)
            return
        code = self._torch.npuHostUnregister(address)
        if code != 0:
            raise DeviceCallError(f"npuHostUnregister failed with code {code}")

    def copy_batch(self, direction: Direction, copies: Descriptors, stream: torch.Stream) -> object:
        sources, targets = _sides(direction, copies)
        sizes = np.ascontiguousarray(copies.sizes, np.uint64)
        host, device = _Location(0, _HOST), _Location(self._device, _DEVICE)
        is_load = direction is Direction.LOAD
        attributes = _Attributes(device if is_load else host, host if is_load else device)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        self._call(
            "aclrtMemcpyBatchAsync",
            targets.ctypes.data, sizes.ctypes.data, sources.ctypes.data, sizes.ctypes.data,
            len(sizes), ctypes.addressof(attributes), ctypes.addressof(first), 1,
            ctypes.addressof(failed), _handle(stream),
        )  # fmt: skip
        return sources, targets, sizes, attributes, first, failed

    def copy_one(
        self, direction: Direction, device: int, host: int, size: int, stream: torch.Stream
    ) -> None:
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        kind = _KINDS[direction]
        self._call("aclrtMemcpyAsync", target, size, source, size, kind, _handle(stream))

    def copy_blocking(self, direction: Direction, device: int, host: int, size: int) -> None:
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        self._call("aclrtMemcpy", target, size, source, size, _KINDS[direction])


def _registrar() -> Any:
    """torch_npu's own calls for registration; None in the wheels that lack them."""
    import torch

    npu: Any = getattr(torch, "npu", None)
    try:
        runtime = npu.npurt() if hasattr(npu, "npurt") else None
    except RuntimeError:
        return None
    return runtime if hasattr(runtime, "npuHostRegister") else None


def _sides(direction: Direction, copies: Descriptors) -> tuple[Any, Any]:
    """Source and target addresses, as the driver reads them."""
    host = np.ascontiguousarray(copies.host, np.uint64)
    device = np.ascontiguousarray(copies.device, np.uint64)
    return (host, device) if direction is Direction.LOAD else (device, host)


def _handle(stream: torch.Stream) -> int:
    """The driver's stream. Asking for it hands over what torch_npu still holds back."""
    return int(stream.npu_stream)
