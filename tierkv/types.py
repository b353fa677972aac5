"""The words of the design as types. No behaviour lives here."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NewType

BlockKey = NewType("BlockKey", bytes)
"""Block hash followed by one byte of group index; unique inside a namespace."""

NamespaceId = NewType("NamespaceId", bytes)
"""Digest (32 bytes) of everything that makes stored bytes interchangeable."""

EngineId = NewType("EngineId", str)
"""uuid4 hex of one scheduler half and its workers, made at its start."""

LeaseId = NewType("LeaseId", int)
"""Generation in the upper 32 bits, counter in the lower: never reused across daemon restarts."""


class Outcome(enum.IntEnum):
    """What became of one block in one operation of a tier."""

    OK = 0
    MISSING = 1  # the tier does not have it
    CORRUPT = 2  # it has something else under this name, or damaged bytes
    FULL = 3  # no room, or none that may be freed now
    FAILED = 4  # the store refused or did not answer


FRAME_BYTES = 4096
"""Bytes of a slot's header page. Payload starts there, so direct I/O moves one aligned range."""

PAGE_BYTES = 4096
"""Slots are padded to this many bytes."""


@dataclass(frozen=True, slots=True)
class RankGeometry:
    """What one rank contributes to a block.

    Payload order is rank, layer, engine block: layer l of a rank starts at ``layer_offsets[l]``
    inside the rank's part, and engine block j inside that at ``j * page_bytes[l]``.

    Attributes:
        page_bytes: per layer, bytes of one engine block.
        engine_blocks: engine blocks per TierKV block (``block_tokens / engine block size``).
    """

    page_bytes: tuple[int, ...]
    engine_blocks: int

    @property
    def bytes(self) -> int:
        return sum(self.page_bytes) * self.engine_blocks

    @property
    def layer_offsets(self) -> tuple[int, ...]:
        offsets, at = [], 0
        for page in self.page_bytes:
            offsets.append(at)
            at += page * self.engine_blocks
        return tuple(offsets)


def slot_bytes_of(payload_bytes: int) -> int:
    """Size of a slot in bytes: frame plus payload padded to ``PAGE_BYTES``."""
    return FRAME_BYTES + -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
