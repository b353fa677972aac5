"""Digests used as identities. Cryptographic on purpose: a collision would serve wrong bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tierkv.types import BlockKey, NamespaceId

SAMPLE_BYTES = 65_536
SAMPLES_PER_FILE = 16


def digest_of(facts: Mapping[str, object]) -> NamespaceId:
    """Digest a mapping of plain values, independent of the order of its keys.

    Returns:
        32 bytes (BLAKE2b-256 of canonical JSON).
    Raises:
        TypeError: a value is not plain JSON; identities must not depend on ``repr``.
    """
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return NamespaceId(hashlib.blake2b(text.encode(), digest_size=32).digest())


def block_key(block_hash: bytes, group: int = 0, adapter: bytes | None = None) -> BlockKey:
    """Key of a block inside its namespace.

    Args:
        block_hash: the engine's chained hash of the block.
        group: index of the KV cache group, 0 to 255.
        adapter: digest of a LoRA adapter's files. Engines hash an adapter's name only, so a
            reloaded adapter of the same name would otherwise hit the old one's blocks.
    """
    if adapter is not None:
        block_hash = hashlib.blake2b(block_hash, digest_size=32, key=adapter[:64]).digest()
    return BlockKey(block_hash + group.to_bytes(1, "little"))


def _sample_file(path: Path, hasher: hashlib.blake2b) -> None:
    size = path.stat().st_size
    hasher.update(f"{path.name}:{size};".encode())
    step = max(SAMPLE_BYTES, size // SAMPLES_PER_FILE)
    with path.open("rb") as file:
        if path.suffix == ".safetensors":
            header_bytes = int.from_bytes(file.read(8), "little")
            hasher.update(file.read(min(header_bytes, 64 << 20)))
        for offset in range(0, size, step):
            file.seek(offset)
            hasher.update(file.read(SAMPLE_BYTES))


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Fingerprint files by content, so that copies on other nodes agree.

    Names, sizes, safetensors headers and evenly spaced samples are hashed; times and directories
    are not. Sampling reads at most ``SAMPLES_PER_FILE + 1`` pieces of ``SAMPLE_BYTES`` per file.

    Raises:
        OSError: a file cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=32)
    for path in sorted(paths, key=lambda p: p.name):
        _sample_file(path, hasher)
    return hasher.hexdigest()
