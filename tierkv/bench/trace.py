"""Request traces: which blocks each request asks for, as ids of prefix chains.

One JSON object per line, plain or gzip; `hash_ids` are the blocks of a request from the first on,
`timestamp` is in milliseconds and may be missing. An id names a block together with all before it,
so it always follows the same predecessor; a file where that is not so is refused, because its
replay would count hits on other blocks.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tierkv.errors import TierKVError
from tierkv.hashing import block_key
from tierkv.types import BlockKey

REQUESTS_MAX = 1 << 22
LINE_BYTES_MAX = 64 << 20
ID_BYTES = 8
_ID_MAX = (1 << 63) - 1

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        ids: shape (n,), distinct.
        keys: the same as block keys.
    """

    at_s: float
    ids: Ids
    keys: tuple[BlockKey, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in their order.

    Attributes:
        asked: references to blocks.
        unique: different blocks.
    """

    name: str
    requests: tuple[Request, ...]
    asked: int
    unique: int

    @property
    def hits_max(self) -> int:
        """Hits of a cache without bounds: every reference but a block's first."""
        return self.asked - self.unique


def key_of(block: int) -> BlockKey:
    """The key of a block id, in group 0."""
    return block_key(block.to_bytes(ID_BYTES, "big"))


def ids_of(keys: Sequence[BlockKey]) -> Ids:
    """The ids that keys were made of."""
    return np.array([int.from_bytes(key[:ID_BYTES], "big") for key in keys], np.int64)


def load_trace(path: Path, requests_max: int = REQUESTS_MAX) -> Trace:
    """Read the first `requests_max` requests of a trace.

    Raises:
        TierKVError: the file cannot be read, or is no trace; says where.
    """
    requests: list[Request] = []
    before: dict[int, int] = {}  # id -> its predecessor, -1 for none
    interned: dict[int, BlockKey] = {}
    asked = 0
    for number, line in enumerate(_lines(path), 1):
        if len(requests) == requests_max:
            break
        place = f"{path}, line {number}"
        at_s, ids = _parse(line, float(number), place)
        last = -1
        for block in ids:
            if before.setdefault(block, last) != last:
                raise TierKVError(
                    f"{place}: block {block} follows another block than before; hash_ids must name "
                    "prefixes, so that an id always has the same predecessor"
                )
            last = block
        keys = tuple(interned.setdefault(block, key_of(block)) for block in ids)
        requests.append(Request(at_s, np.array(ids, np.int64), keys))
        asked += len(ids)
    if not asked:
        raise TierKVError(f"{path}: has no request with hash_ids; is it a trace?")
    return Trace(path.name, tuple(requests), asked, len(before))


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with _open(path) as file:
            while line := file.readline(LINE_BYTES_MAX):
                yield line
    except (OSError, EOFError, zlib.error) as error:
        raise TierKVError(f"{path}: cannot be read: {error}") from error


def _open(path: Path) -> gzip.GzipFile | io.BufferedReader:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _parse(line: bytes, default_s: float, place: str) -> tuple[float, list[int]]:
    try:
        tree = json.loads(line)
    except ValueError as error:
        raise TierKVError(f"{place}: is no JSON: {error}") from error
    ids = tree.get("hash_ids") if isinstance(tree, dict) else None
    is_list = isinstance(ids, list) and all(type(n) is int and 0 <= n <= _ID_MAX for n in ids)
    if ids is None or not is_list:
        raise TierKVError(f"{place}: has no hash_ids, a list of numbers from 0 on")
    if len(set(ids)) != len(ids):
        raise TierKVError(f"{place}: names a block twice; hash_ids must name prefixes")
    at = tree.get("timestamp")
    return (at / 1000 if isinstance(at, int | float) else default_s), ids
