"""The frame: a slot's header page, which says whose bytes follow and proves that they are whole.

It lies in front of the payload, so that frame and payload are one aligned, contiguous range for
every kind of I/O. Layout, little-endian: magic (8), version (2), key length (2), zero (4),
namespace (32), key (65, zero-padded), zero (7), payload bytes (8), xxh3-64 of the payload (8),
xxh3-64 of all the bytes before (8). The rest of the page is zero.

The checksum finds damage, not malice: who can write the store can write a valid frame.
"""

from __future__ import annotations

import struct

import xxhash

from tierkv.types import FRAME_BYTES, BlockKey, NamespaceId

MAGIC = b"TIERKVBK"
VERSION = 1
KEY_BYTES_MAX = 65
_HEAD = struct.Struct(f"<8sHHI32s{KEY_BYTES_MAX}s7xQQ")
_SEAL = struct.Struct("<Q")
_REST = bytes(FRAME_BYTES - _HEAD.size - _SEAL.size)


def _frame_of(view: memoryview, namespace: NamespaceId, key: BlockKey) -> bytes:
    assert len(key) <= KEY_BYTES_MAX, "keys have at most KEY_BYTES_MAX bytes"
    payload = view[FRAME_BYTES:]
    head = _HEAD.pack(
        MAGIC, VERSION, len(key), 0, namespace, key, len(payload), xxhash.xxh3_64_intdigest(payload)
    )
    return head + _SEAL.pack(xxhash.xxh3_64_intdigest(head))


def seal(view: memoryview, namespace: NamespaceId, key: BlockKey) -> None:
    """Write the frame of a slot whose payload is complete.

    Args:
        view: the whole slot, shape (slot_bytes,), writable.
    """
    frame = _frame_of(view, namespace, key)
    view[:FRAME_BYTES] = frame + _REST


def verify(view: memoryview, namespace: NamespaceId, key: BlockKey) -> bool:
    """Whether a slot holds exactly the bytes that were sealed under this name."""
    frame = _frame_of(view, namespace, key)
    return bytes(view[: len(frame)]) == frame
