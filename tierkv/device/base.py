"""The copy engine: what every device must offer.

A copy is a list of descriptors (device address, host address, bytes). An engine works them off in
the order of submission, one lane per direction, and never makes the caller wait: completion is
asked for. `CopyEvent.wait` orders the device's compute after a copy; on an accelerator that is a
wait of the compute stream, on a CPU device the caller is the compute and waits itself.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

Addresses = npt.NDArray[np.int64]


class Direction(Enum):
    """Which way bytes go."""

    STORE = "store"  # device to host
    LOAD = "load"  # host to device


@dataclass(frozen=True, slots=True)
class Descriptors:
    """A list of copies.

    Attributes:
        device, host: addresses, shape (n,).
        sizes: bytes, shape (n,).
    """

    device: Addresses
    host: Addresses
    sizes: Addresses

    def __len__(self) -> int:
        return len(self.sizes)


class CopyEvent(Protocol):
    """The end of one submitted copy."""

    def is_done(self) -> bool:
        """Whether the copy ended, well or not. Never blocks."""

    def wait(self) -> None:
        """Order the compute of this device after the copy. Does not raise if the copy failed."""

    def finish(self) -> None:
        """Block the caller until the copy ended, well or not."""

    @property
    def is_ok(self) -> bool:
        """Whether all bytes are in place; meaningful once done."""


class CopyEngine(Protocol):
    """Asynchronous copies between device memory and the pool."""

    def submit(self, direction: Direction, copies: Descriptors) -> CopyEvent:
        """Queue copies behind those of the same direction. Memory stays valid until done."""

    def give_way(self) -> None:
        """Called in a step without compute while copies are in flight.

        An engine whose copies need the caller's processor or interpreter lets them go on; others
        do nothing.
        """

    def close(self) -> None:
        """Finish what is queued and end. Blocks."""


@runtime_checkable
class PoolAdopter(Protocol):
    """A copy engine that is faster with memory that it was shown before."""

    def adopt(self, address: int, size: int, stop: threading.Event) -> None:
        """Make a mapping of the pool fast. Blocks; run it in the background.

        Copies of the mapping work before, during and after it, whether or not it succeeds.

        Args:
            stop: asks to end early.
        """

    def abandon(self, address: int, size: int) -> None:
        """Forget a mapping that is about to go. Waits until no copy is in flight."""


@runtime_checkable
class StreamedCopyEngine(Protocol):
    """A copy engine whose device computes by itself, in the order of a stream."""

    def mark(self) -> object:
        """What the calling thread has queued for the device so far."""

    def submit_after(self, mark: object, direction: Direction, copies: Descriptors) -> CopyEvent:
        """`submit`, ordered after what `mark` stands for instead of after everything until now.

        For copies that are submitted later, or by another thread, than the one that computes.
        """


def merge_runs(device: Addresses, host: Addresses, sizes: Addresses) -> Descriptors:
    """Descriptors for pages, neighbours on both sides moved as one.

    Args:
        device, host: page addresses in order, shape (n,).
        sizes: bytes of each page, shape (n,).
    """
    if len(device) == 0:
        return Descriptors(device, host, sizes)
    joins = (np.diff(device) == sizes[:-1]) & (np.diff(host) == sizes[:-1])
    starts = np.concatenate([[0], np.flatnonzero(~joins) + 1])
    return Descriptors(device[starts], host[starts], np.add.reduceat(sizes, starts))
