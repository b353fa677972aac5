"""Driver calls of CUDA, through the libraries that torch has loaded.

Source of the rules: CUDA's headers cuda.h and cuda_runtime_api.h, 12.9 and 13.0. The batched copy
is taken from the driver's library: there the name `cuMemcpyBatchAsync` has kept its arguments,
while the runtime's function of that kind changed its own in 13.0.
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

RUNTIMES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
DRIVER = "libcuda.so.1"
DESCRIPTORS_MAX = 4096  # very large batches are known to fail
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_KINDS = {Direction.LOAD: 1, Direction.STORE: 2}  # cudaMemcpyHostToDevice, ...DeviceToHost
_IN_STREAM_ORDER = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
_RELAXED = 2  # cudaStreamCaptureModeRelaxed
_PREFER_OVERLAP = 1  # CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("order", ctypes.c_int),
        ("source", _Location),  # hints for managed memory, ignored for ours
        ("target", _Location),
        ("flags", ctypes.c_uint),
    )


class CudaHooks:
    """Calls of CUDA for the current device. None of them was tried on hardware yet.

    Raises:
        DeviceCallError: the runtime library is not there.
    """

    descriptors_max = DESCRIPTORS_MAX
    events_tell_failures = True  # an error stays with the context and every call returns it

    def __init__(self) -> None:
        self._runtime = _load(RUNTIMES)
        pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._declare("cudaHostRegister", pointer, size, ctypes.c_uint)
        self._declare("cudaHostUnregister", pointer)
        self._declare("cudaMemcpyAsync", pointer, pointer, size, kind, pointer)
        self._declare("cudaMemcpy", pointer, pointer, size, kind)
        self._declare("cudaGetLastError")
        self._declare("cudaThreadExchangeStreamCaptureMode", pointer)
        self._batch = self._find_batch()
        self.has_batch = self._batch is not None

    def _declare(self, name: str, *arguments: Any) -> None:
        function = getattr(self._runtime, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int

    @staticmethod
    def _find_batch() -> Any:
        """The driver's batched copy; None before CUDA 12.8."""
        try:
            function = ctypes.CDLL(DRIVER).cuMemcpyBatchAsync
        except (OSError, AttributeError):
            return None
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        # targets, sources, sizes, copies; attributes, first copy of each, how many; failed, stream
        function.argtypes = (*[pointer] * 3, size, pointer, pointer, size, pointer, pointer)
        function.restype = ctypes.c_int
        return function

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code != 0:
            self._runtime.cudaGetLastError()  # or torch would raise it at its next call
            raise DeviceCallError(f"{name} failed with code {code}")

    @contextlib.contextmanager
    def outside_capture(self) -> Iterator[None]:
        mode = ctypes.c_int(_RELAXED)
        self._call("cudaThreadExchangeStreamCaptureMode", ctypes.addressof(mode))
        try:
            yield
        finally:
            self._call("cudaThreadExchangeStreamCaptureMode", ctypes.addressof(mode))

    def register(self, address: int, size: int) -> None:
        self._call("cudaHostRegister", address, size, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def copy_batch(self, direction: Direction, copies: Descriptors, stream: torch.Stream) -> object:
        if self._batch is None:
            raise DeviceCallError("cuMemcpyBatchAsync is not in this version of the driver")
        host = np.ascontiguousarray(copies.host, np.uint64)
        device = np.ascontiguousarray(copies.device, np.uint64)
        sources, targets = (host, device) if direction is Direction.LOAD else (device, host)
        sizes = np.ascontiguousarray(copies.sizes, np.uint64)
        attributes = _Attributes(_IN_STREAM_ORDER, _Location(), _Location(), _PREFER_OVERLAP)
        first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
        code = self._batch(
            targets.ctypes.data, sources.ctypes.data, sizes.ctypes.data, len(sizes),
            ctypes.addressof(attributes), ctypes.addressof(first), 1,
            ctypes.addressof(failed), _handle(stream),
        )  # fmt: skip
        if code != 0:
            raise DeviceCallError(f"cuMemcpyBatchAsync failed with code {code}")
        return sources, targets, sizes, attributes, first, failed

    def copy_one(
        self, direction: Direction, device: int, host: int, size: int, stream: torch.Stream
    ) -> None:
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        self._call("cudaMemcpyAsync", target, source, size, _KINDS[direction], _handle(stream))

    def copy_blocking(self, direction: Direction, device: int, host: int, size: int) -> None:
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        self._call("cudaMemcpy", target, source, size, _KINDS[direction])


def _handle(stream: torch.Stream) -> int:
    return int(stream.cuda_stream)


def _load(names: tuple[str, ...]) -> ctypes.CDLL:
    problems = []
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise DeviceCallError("the CUDA runtime cannot be loaded: " + "; ".join(problems))
