"""What a client attaches and tells, and what it is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tierkv.device.facts import CopyFacts
from tierkv.service import wire
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


def device_rows(facts: Mapping[int, CopyFacts]) -> list[wire.Device]:
    """How the ranks copy, as the protocol carries it."""
    return [
        wire.Device(
            rank, told.device, told.rung, told.registered, told.pool, told.staging,
            told.device_bytes, told.problem[: wire.TEXT_MAX],
        )
        for rank, told in sorted(facts.items())[: wire.RANKS_MAX]
    ]  # fmt: skip
