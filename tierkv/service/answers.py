"""What a client attaches, and what it is answered."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.types import LeaseId, NamespaceId


@dataclass(frozen=True, slots=True)
class Attachment:
    """A namespace that the client attaches anew in every session."""

    namespace: NamespaceId
    slot_bytes: int
    label: str
    is_private: bool
    block_tokens: int = 0


@dataclass(slots=True)
class Answer:
    """What is known of one lookup; grows while blocks are on their way.

    Attributes:
        lease: 0 if nothing was found.
        offsets: byte offsets in the pool of the readable blocks, from the first key on.
        pending: blocks behind them that may still come.
        is_promoting: some of those come from a tier; else other engines are writing them.
        sources: per readable block 0 if DRAM had it, else 1 + the number of its tier.
    """

    lease: LeaseId
    offsets: npt.NDArray[np.int64]
    pending: int
    is_promoting: bool = False
    sources: bytes = b""
