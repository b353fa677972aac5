"""Memory that tests copy: host mappings like a pool's, device memory like an engine's on Ascend."""

from __future__ import annotations

import mmap
import os

import numpy as np
import torch

HUGE = 2 << 20


class Mapping:
    """A shared mapping of memory that no driver knows yet.

    Attributes:
        bytes: all of it, shape (size,).
        tensor: the same memory.
        address: of byte 0, at a page.
    """

    def __init__(self, size: int) -> None:
        descriptor = os.memfd_create("pool")
        os.ftruncate(descriptor, size)
        self._map = mmap.mmap(descriptor, size)
        os.close(descriptor)
        self.size = size
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.tensor = torch.from_numpy(self.bytes)
        self.address = self.tensor.data_ptr()


def dice(seed: int, size: int) -> torch.Tensor:
    """Random bytes in pageable memory; prints the seed."""
    print(f"seed={seed}")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=generator)


def aligned_on_device(size: int, device: torch.device) -> torch.Tensor:
    """Bytes on a device at a huge page, as vLLM on Ascend allocates a KV tensor."""
    raw = torch.empty(size + HUGE, dtype=torch.uint8, device=device)
    first = -raw.data_ptr() % HUGE
    return raw[first : first + size]
