"""Digests used as identities. Cryptographic by default: a collision would serve wrong bytes."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from tierkv.types import BlockKey, NamespaceId

SAMPLE_BYTES = 65_536
SAMPLES_PER_FILE = 16
TENSOR_SAMPLE_BYTES = 512
SAMPLES_PER_TENSOR = 8
TENSOR_SAMPLES_MAX = 4_096  # per file; a cold network file system reads each from elsewhere
HEADER_BYTES_MAX = 64 << 20


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


HashAlgorithm = Literal["sha256", "xxh3"]
Tokens = Sequence[int] | npt.NDArray[np.integer]
BLOCK_TOKENS_MAX = 1 << 20
_ROOT = struct.Struct("<7sII")  # name of the formula, block_tokens, length of the salt


def block_hashes(
    tokens: Tokens,
    block_tokens: int,
    *,
    salt: bytes = b"",
    adapter: bytes = b"",
    extras: Mapping[int, bytes] | None = None,
    after: BlockKey | None = None,
    algorithm: HashAlgorithm = "sha256",
) -> list[BlockKey]:
    """Keys of the full blocks of a prompt, each standing for all tokens up to its end.

    With H the algorithm, `u32` four bytes and all numbers little-endian::

        h(-1) = H("TKVHSH1" | u32 block_tokens | u32 length of salt | salt | adapter)
        h(i)  = H(h(i-1) | block_tokens times u32 token | extras[i])
        key   = h(i) | one byte 0

    Args:
        tokens: token ids from 0 to 2**32 - 1, in order from the first of the prompt, or from the
            first behind the block `after`.
        salt: keeps prompts apart that must not share, for example those of two tenants.
        adapter: digest of what changes the model for this prompt, for example of a LoRA's files.
        extras: by index of a block, counted in `tokens`, what else its KV depends on, for example
            the digest of an image.
        after: key of the block before `tokens`, to go on where an earlier call ended. It stands for
            salt and adapter, too, which are then ignored.
        algorithm: `sha256` (32 bytes), or `xxh3` (128 bits, 16 bytes): faster, but whoever chooses
            prompts can construct two with one hash and so read another prompt's KV. Use it only
            where every prompt is trusted.
    Raises:
        ValueError: a token id, block size or algorithm is out of range.
    """
    if type(block_tokens) is not int or not 0 < block_tokens <= BLOCK_TOKENS_MAX:
        raise ValueError(
            f"block_tokens: {block_tokens!r} is no number of tokens from 1 to {BLOCK_TOKENS_MAX}"
        )
    numbers = np.asarray(tokens)
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise ValueError("tokens: must be a list of token ids")
    if len(numbers) and (int(numbers.min()) < 0 or int(numbers.max()) >= 1 << 32):
        raise ValueError("tokens: an id is below 0 or above 2**32 - 1")
    digest = _digest_of(algorithm)
    blocks = len(numbers) // block_tokens
    text = numbers[: blocks * block_tokens].astype("<u4").tobytes()
    size = block_tokens * 4
    extras = extras or {}
    for index in extras:
        if not 0 <= index <= blocks:  # the last one is the part that fills no block
            raise ValueError(f"extras: block {index} is not among the {blocks} of these tokens")
    last = digest(_ROOT.pack(b"TKVHSH1", block_tokens, len(salt)) + salt + adapter)
    if after is not None:
        if len(after) != len(last) + 1:
            raise ValueError(f"after: a key of {len(after)} bytes is none of this algorithm")
        last = after[:-1]
    keys = []
    for index in range(blocks):
        part = text[index * size : (index + 1) * size]
        last = digest(last + part + extras.get(index, b""))
        keys.append(block_key(last))
    return keys


def _digest_of(algorithm: str) -> Callable[[bytes], bytes]:
    if algorithm == "sha256":
        return lambda text: hashlib.sha256(text).digest()
    if algorithm == "xxh3":
        return xxhash.xxh3_128_digest
    raise ValueError(f"hash_algorithm: {algorithm!r} is unknown; use sha256 or xxh3")


def _sample_file(path: Path, hasher: hashlib.blake2b) -> None:
    size = path.stat().st_size
    hasher.update(f"{path.name}:{size};".encode())
    with path.open("rb") as file:
        header = _safetensors_header(file, size) if path.suffix == ".safetensors" else b""
        hasher.update(header)
        places = _tensor_places(header)
        step = max(SAMPLE_BYTES, size // SAMPLES_PER_FILE)
        places += [(offset, SAMPLE_BYTES) for offset in range(0, size, step)]
        for offset, length in places:
            file.seek(offset)
            hasher.update(file.read(length))


def _safetensors_header(file: BinaryIO, size: int) -> bytes:
    length = int.from_bytes(file.read(8), "little")
    return file.read(length) if 0 < length <= min(HEADER_BYTES_MAX, size) else b""


def _tensor_places(header: bytes) -> list[tuple[int, int]]:
    """Where to sample inside every tensor: an edit of one matrix must not go unseen."""
    places = []
    try:
        tensors = json.loads(header) if header else {}
        for name, tensor in tensors.items():
            if name != "__metadata__":
                begin, end = tensor["data_offsets"]
                step = max(TENSOR_SAMPLE_BYTES, (end - begin) // SAMPLES_PER_TENSOR)
                for at in range(begin, end, step):
                    size = min(TENSOR_SAMPLE_BYTES, end - at)
                    places.append((8 + len(header) + at, size))
    except (ValueError, TypeError, KeyError, AttributeError):
        return []  # damaged; the samples of the whole file remain
    return places[:: 1 + len(places) // TENSOR_SAMPLES_MAX]


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Fingerprint files by content, so that copies on other nodes agree.

    Names, sizes, safetensors headers and evenly spaced samples are hashed, of each file and of each
    tensor in it; times and directories are not.

    Raises:
        OSError: a file cannot be read.
    """
    hasher = hashlib.blake2b(digest_size=32)
    for path in sorted(paths, key=lambda p: p.name):
        _sample_file(path, hasher)
    return hasher.hexdigest()
