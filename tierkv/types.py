"""The words of the design as types. No behaviour lives here."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Block hash followed by one byte of group index; unique inside a namespace."""

NamespaceId = NewType("NamespaceId", bytes)
"""Digest (32 bytes) of everything that makes stored bytes interchangeable."""

EngineId = NewType("EngineId", str)
"""uuid4 hex of one scheduler half and its workers, made at its start."""

LeaseId = NewType("LeaseId", int)
"""Generation in the upper 32 bits, counter in the lower: never reused across daemon restarts."""

FRAME_BYTES = 4096
"""Bytes of a slot's header page. Payload starts there, so direct I/O moves one aligned range."""

PAGE_BYTES = 4096
"""Slots are padded to this many bytes."""


class Outcome(IntEnum):
    """What became of one block in a batch operation."""

    OK = 0
    FAILED = 1


@dataclass(frozen=True, slots=True)
class SlotGeometry:
    """How one block's payload lies in its slot.

    Payload order is rank, layer, engine block: the bytes of rank r start at
    ``FRAME_BYTES + r * rank_bytes``, layer l inside them at ``l * layer_bytes``, and engine block j
    inside that at ``j * page_bytes``.

    Attributes:
        page_bytes: bytes of one engine block of one layer on one rank.
        layers: number of layers of the KV cache group.
        engine_blocks: engine blocks per TierKV block (``block_tokens / engine block size``).
        ranks: number of ranks whose bytes share the slot.
    """

    page_bytes: int
    layers: int
    engine_blocks: int
    ranks: int

    @property
    def layer_bytes(self) -> int:
        return self.page_bytes * self.engine_blocks

    @property
    def rank_bytes(self) -> int:
        return self.layer_bytes * self.layers

    @property
    def payload_bytes(self) -> int:
        return self.rank_bytes * self.ranks


def slot_bytes_of(payload_bytes: int) -> int:
    """Size of a slot in bytes: frame plus payload padded to ``PAGE_BYTES``."""
    return FRAME_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
