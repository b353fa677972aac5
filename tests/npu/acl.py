"""The calls of the Ascend runtime that torch_npu has no function for, as a program would make them.

All return the runtime's code, 0 if it went well.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import numpy as np

from tests.npu.standin import LIBRARY, Way

PINNED = 0x10000000  # ACL_HOST_REG_PINNED
HOST, DEVICE = 0, 1  # ACL_MEM_LOCATION_TYPE_*
KINDS = {Way.TO_DEVICE: 1, Way.TO_HOST: 2, Way.ON_DEVICE: 3}  # ACL_MEMCPY_*
GLOBAL, RELAXED = 0, 2  # ACL_MODEL_RI_CAPTURE_MODE_*
NO_INDEX = ctypes.c_size_t(-1).value  # SIZE_MAX: the failure is not that of one copy


class Location(ctypes.Structure):
    _fields_ = (("id", ctypes.c_uint32), ("type", ctypes.c_int))


class Attributes(ctypes.Structure):
    _fields_ = (("target", Location), ("source", Location), ("reserved", ctypes.c_uint8 * 16))


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_PROTOTYPES = {
    # targets, their rooms, sources, sizes, copies; attributes, first copy of each, how many;
    # failed index, stream
    "aclrtMemcpyBatchAsync": (
        *(_pointer, _pointer, _pointer, _pointer, _size),
        *(ctypes.POINTER(Attributes), ctypes.POINTER(_size), _size),
        *(ctypes.POINTER(_size), _pointer),
    ),
    # target, its room, source, bytes, kind, stream
    "aclrtMemcpyAsync": (_pointer, _size, _pointer, _size, ctypes.c_int, _pointer),
    "aclrtMemcpy": (_pointer, _size, _pointer, _size, ctypes.c_int),
    "aclrtHostRegisterV2": (_pointer, ctypes.c_uint64, ctypes.c_uint32),
    "aclrtHostUnregister": (_pointer,),
    "aclrtSetDevice": (ctypes.c_int32,),
    "aclmdlRICaptureThreadExchangeMode": (ctypes.POINTER(ctypes.c_int),),
}


@dataclass(frozen=True)
class Batch:
    """The lists of a batch; the runtime reads them, so they are kept. Addresses and bytes."""

    targets: np.ndarray
    sources: np.ndarray
    sizes: np.ndarray


class Acl:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(LIBRARY)
        for name, arguments in _PROTOTYPES.items():
            function = getattr(self.library, name)
            function.argtypes = arguments
            function.restype = ctypes.c_int

    def register(self, address: int, size: int, flags: int = PINNED) -> int:
        return self.library.aclrtHostRegisterV2(address, size, flags)

    def unregister(self, address: int) -> int:
        return self.library.aclrtHostUnregister(address)

    def exchange_capture_mode(self, mode: int) -> int:
        """Set this thread's mode; the one before."""
        value = ctypes.c_int(mode)
        assert self.library.aclmdlRICaptureThreadExchangeMode(ctypes.byref(value)) == 0
        return value.value

    def set_device(self, device: int) -> int:
        return self.library.aclrtSetDevice(device)

    def copy_async(self, way: Way, target: int, source: int, size: int, stream: int) -> int:
        return self.library.aclrtMemcpyAsync(target, size, source, size, KINDS[way], stream)

    def copy(self, way: Way, target: int, source: int, size: int) -> int:
        return self.library.aclrtMemcpy(target, size, source, size, KINDS[way])

    def copy_batch(self, way: Way, batch: Batch, stream: int, device: int = 0) -> tuple[int, int]:
        """The code and the index of the copy that failed."""
        there, here = Location(device, DEVICE), Location(0, HOST)
        to_device = way is Way.TO_DEVICE
        attributes = Attributes(there if to_device else here, here if to_device else there)
        first, failed = _size(0), _size(0)
        code = self.library.aclrtMemcpyBatchAsync(
            *(batch.targets.ctypes.data, batch.sizes.ctypes.data),
            *(batch.sources.ctypes.data, batch.sizes.ctypes.data, len(batch.sizes)),
            *(ctypes.byref(attributes), ctypes.byref(first), 1),
            *(ctypes.byref(failed), stream),
        )
        return code, failed.value
