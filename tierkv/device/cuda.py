"""Driver calls of CUDA, through the runtime library that torch has loaded."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from tierkv.device.base import Descriptors, Direction
from tierkv.device.hooks import DeviceCallError

if TYPE_CHECKING:
    import torch

LIBRARIES = ("libcudart.so.13", "libcudart.so.12", "libcudart.so")
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process
_KINDS = {Direction.LOAD: 1, Direction.STORE: 2}  # cudaMemcpyHostToDevice, ...DeviceToHost


class CudaHooks:
    """Calls of the CUDA runtime for the current device.

    Copies go one by one: the batched call changed its arguments between driver versions and could
    not be tried on hardware yet.

    Raises:
        DeviceCallError: the runtime library is not there.
    """

    descriptors_max = 1
    has_batch = False
    events_tell_failures = True  # an error stays with the context and every call returns it

    def __init__(self) -> None:
        self._library = _load()
        pointer, size, kind = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self._declare("cudaHostRegister", pointer, size, ctypes.c_uint)
        self._declare("cudaHostUnregister", pointer)
        self._declare("cudaMemcpyAsync", pointer, pointer, size, kind, pointer)
        self._declare("cudaMemcpy", pointer, pointer, size, kind)
        self._declare("cudaGetLastError")

    def _declare(self, name: str, *arguments: Any) -> None:
        function = getattr(self._library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            self._library.cudaGetLastError()  # or torch would raise it at its next call
            raise DeviceCallError(f"{name} failed with code {code}")

    def register(self, address: int, size: int) -> None:
        self._call("cudaHostRegister", address, size, _PORTABLE)

    def unregister(self, address: int) -> None:
        self._call("cudaHostUnregister", address)

    def copy_batch(self, direction: Direction, copies: Descriptors, stream: torch.Stream) -> object:
        raise DeviceCallError("batched copies are not used on CUDA")

    def copy_one(
        self, direction: Direction, device: int, host: int, size: int, stream: torch.Stream
    ) -> None:
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        handle = stream.cuda_stream if hasattr(stream, "cuda_stream") else stream.native_handle
        self._call("cudaMemcpyAsync", target, source, size, _KINDS[direction], handle)

    def copy_blocking(self, direction: Direction, device: int, host: int, size: int) -> None:
        target, source = (device, host) if direction is Direction.LOAD else (host, device)
        self._call("cudaMemcpy", target, source, size, _KINDS[direction])


def _load() -> ctypes.CDLL:
    problems = []
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            problems.append(str(error))
    raise DeviceCallError("the CUDA runtime cannot be loaded: " + "; ".join(problems))
