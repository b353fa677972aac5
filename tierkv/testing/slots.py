"""Slots for tests: aligned memory, names, and payloads that tell whose they are."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import random

from tierkv.tiers.base import BlockName
from tierkv.types import FRAME_BYTES, PAGE_BYTES, BlockKey, NamespaceId


def aligned_views(count: int, slot_bytes: int) -> list[memoryview]:
    """Zeroed slots of one pool, shape (slot_bytes,), at page borders as a tier may expect them."""
    assert slot_bytes % PAGE_BYTES == 0, "slots are padded to pages"
    pool = memoryview(mmap.mmap(-1, count * slot_bytes))
    address = ctypes.addressof(ctypes.c_char.from_buffer(pool))
    assert address % PAGE_BYTES == 0, "the system maps whole pages"
    return [pool[at : at + slot_bytes] for at in range(0, count * slot_bytes, slot_bytes)]


def name_of(number: int, space: int = 0, key_bytes: int = 33) -> BlockName:
    """The name with this number in a namespace; a longer key starts with the shorter one."""
    key = hashlib.blake2b(number.to_bytes(8, "little")).digest() + bytes([number % 251])
    return BlockName(NamespaceId(bytes([space + 1]) * 32), BlockKey(key[:key_bytes]))


def fill_slot(view: memoryview, name: BlockName, version: int = 0) -> None:
    """Write a payload that belongs to one name and version only; the frame is left to be sealed."""
    dice = random.Random(name.namespace + name.key + bytes([version]))
    view[FRAME_BYTES:] = dice.randbytes(len(view) - FRAME_BYTES)
