"""What differs between accelerators: a handful of driver calls on raw addresses.

Everything else about streams and events is torch's device-generic API. Hooks never decide; a call
that the driver refuses raises, and the caller goes one rung down.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from tierkv.device.base import Descriptors, Direction
from tierkv.errors import TierKVError

if TYPE_CHECKING:
    import torch


class DeviceCallError(TierKVError):
    """A driver call failed. The message names the call and the driver's code."""


class DeviceHooks(Protocol):
    """Driver calls of one kind of accelerator, made for the current device of the thread.

    Attributes:
        descriptors_max: most copies in one batch.
        has_batch: whether `copy_batch` exists at all.
        events_tell_failures: whether asking an event raises if a copy before it has failed.
    """

    descriptors_max: int
    has_batch: bool
    events_tell_failures: bool

    def outside_capture(self) -> AbstractContextManager[None]:
        """Inside it this thread's calls neither break nor are refused by another's graph capture.

        An engine captures its graphs while the pool is still being registered in the background.
        """

    def register(self, address: int, size: int) -> None:
        """Make host memory known to the driver, so that copies of it run by themselves.

        Raises:
            DeviceCallError: it will not.
        """

    def unregister(self, address: int) -> None:
        """Take a registration back. No copy may be in flight.

        Raises:
            DeviceCallError: it will not.
        """

    def copy_batch(self, direction: Direction, copies: Descriptors, stream: torch.Stream) -> object:
        """Queue at most `descriptors_max` copies on a stream.

        Returns:
            What must be kept until they have ended: nobody says when a driver reads its lists.
        Raises:
            DeviceCallError: some may have been queued, or none.
        """

    def copy_one(
        self, direction: Direction, device: int, host: int, size: int, stream: torch.Stream
    ) -> None:
        """Queue one copy on a stream. Blocks if the host memory is not registered.

        Raises:
            DeviceCallError: it was not queued.
        """

    def copy_blocking(self, direction: Direction, device: int, host: int, size: int) -> None:
        """Copy now, ordered with nothing; host memory of any kind.

        Raises:
            DeviceCallError: the bytes are undefined.
        """
