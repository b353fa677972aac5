"""What the SDK hands out: hits of lookups, and copies on their way.

Both belong to the `Cache` that made them and change only under its lock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from tierkv.device.base import CopyEvent
from tierkv.errors import LoadFailedError
from tierkv.service.answers import Answer
from tierkv.types import BlockKey, LeaseId

if TYPE_CHECKING:
    from tierkv.sdk.cache import Cache


class Hit:
    """Answer to a lookup: blocks that may be loaded until the hit is released.

    Attributes:
        keys: what was asked for, from the first block of the prompt on.
        held: leading blocks that the engine has itself.
    """

    def __init__(self, cache: Cache, keys: Sequence[BlockKey], held: int) -> None:
        self.keys = tuple(keys)
        self.held = held
        self._cache = cache
        # The rest is the cache's; see `Cache._settle`.
        self._ticket = 0
        self._answer: Answer | None = None
        self._lease = LeaseId(0)
        self._generation = 0
        self._offsets: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._sources: tuple[str, ...] = ()
        self._asked_at = self._answer_by = self._grow_from = 0.0
        self._patience_s: float | None = None
        self._loaded: list[str] = []  # sources of the blocks that were copied
        self._promised = 0  # the most blocks that were offered
        self._copies = 0
        self._is_done = False
        self._is_taken = False
        self._is_released = False

    @property
    def blocks(self) -> int:
        """Blocks that can be loaded: `keys[held : held + blocks]`. May grow until `is_done`."""
        return len(self._cache._sources_of(self))

    @property
    def tokens(self) -> int:
        """`blocks` in tokens."""
        return self.blocks * self._cache.block_tokens

    @property
    def sources(self) -> tuple[str, ...]:
        """Where each of `blocks` was when it was asked for: `dram`, or the name of a tier."""
        return self._cache._sources_of(self)

    @property
    def is_done(self) -> bool:
        """Whether nothing more will come. Never waits."""
        return self._cache._is_settled(self)

    def wait(self, wait_s: float | None = None) -> bool:
        """Wait until nothing more will come, at most `wait_s`.

        Args:
            wait_s: None for what the configuration allows.
        Returns:
            Whether nothing more will come.
        """
        return self._cache._wait(lambda: self.is_done, wait_s)

    def release(self) -> None:
        """Give the blocks up. A copy in flight keeps them until it has ended."""
        self._cache.release(self)

    def __enter__(self) -> Hit:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        state = "released" if self._is_released else "done" if self._is_done else "growing"
        return f"<Hit {len(self._offsets)} of {len(self.keys) - self.held} blocks, {state}>"


@dataclass(slots=True, eq=False)
class Part:
    """A part of a copy that the copy engine works on.

    Attributes:
        lease: of a store; 0 of a load.
        event: its end; None if it could not be begun.
    """

    lease: LeaseId
    blocks: int
    event: CopyEvent | None


class Stage(enum.Enum):
    """How far a copy is."""

    RESERVING = "reserving"  # a store waits for slots
    COPYING = "copying"
    DONE = "done"


class Copy:
    """A load or store on its way.

    Attributes:
        blocks: device blocks that must not be touched until it is done: those of a load are
            written, those of a store read.
    """

    def __init__(self, cache: Cache, blocks: Sequence[int], hit: Hit | None) -> None:
        self.blocks = tuple(blocks)
        self._cache = cache
        self._hit = hit  # None: a store
        self._stage = Stage.RESERVING if hit is None else Stage.COPYING
        self._computed: object = None  # what the copy comes after on the device
        self._generation = 0
        self._ticket = 0
        self._asked_at = 0.0
        self._parts: list[Part] = []  # on their way
        self._keys: Sequence[BlockKey] = ()  # of a store
        self._after: BlockKey | None = None
        self._next = 0  # first key that no slot was asked for yet
        self._sources: tuple[str, ...] = ()  # of the blocks of a load
        self._copied = 0  # blocks that are in place
        self._is_ok = True

    @property
    def is_load(self) -> bool:
        """Whether blocks come to the device."""
        return self._hit is not None

    @property
    def is_done(self) -> bool:
        """Whether the device blocks may be used again. Never waits."""
        return self._cache._is_copied(self)

    def wait(self, wait_s: float | None = None) -> bool:
        """Wait until it is done, at most `wait_s`; None: as long as it takes.

        Returns:
            Whether it is done.
        """
        return self._cache._wait(lambda: self.is_done, wait_s)

    def result(self) -> int:
        """Wait, and tell how many blocks were copied.

        Raises:
            LoadFailedError: it was a load, and the bytes of `blocks` are undefined.
            UsageError: this process was forked meanwhile; the copy goes to the memory of the other.
        """
        self._cache._check_process()
        self.wait()
        if self.is_load and not self._is_ok:
            raise LoadFailedError(
                f"{len(self.blocks)} blocks could not be loaded: their lease was recalled, or the "
                "daemon was replaced; compute them"
            )
        return self._copied

    def __repr__(self) -> str:
        kind = "load" if self.is_load else "store"
        return f"<Copy {kind} of {len(self.blocks)} blocks, {self._stage.value}>"
