"""LoRA adapters by content.

vLLM's block hash covers an adapter's name and path only, so a reloaded adapter of the same name
would hit the old one's blocks. The digest of its files goes into the key.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tierkv.hashing import files_fingerprint

logger = logging.getLogger(__name__)

ADAPTERS_MAX = 1_024
FILES_MAX = 64

_Stamp = tuple[tuple[str, int, int], ...]


def adapter_digest(path: str) -> bytes:
    """Digest of a LoRA adapter's files.

    Raises:
        OSError: the files cannot be read.
    """
    files = sorted(f for f in Path(path).iterdir() if f.is_file())[:FILES_MAX]
    return bytes.fromhex(files_fingerprint(files))


def _stamp_of(path: str) -> _Stamp:
    """Names, sizes and times of the files: whether they changed, cheaply."""
    found = [(f.name, f.stat()) for f in Path(path).iterdir() if f.is_file()]
    return tuple(sorted((name, facts.st_size, facts.st_mtime_ns) for name, facts in found))


class AdapterDigests:
    """Digests of the adapters that one engine has loaded, taken when each is first used."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, str], tuple[_Stamp, bytes]] = {}

    def digest_of(self, lora: Any) -> bytes | None:
        """Digest for a vLLM `LoRARequest`, or None if its requests must not be cached.

        If the files changed since, nobody can tell which ones the engine has loaded, so it is None
        until the adapter is loaded in place or under another name.
        """
        name = (int(lora.lora_int_id), str(lora.lora_path))
        try:
            stamp = _stamp_of(lora.lora_path)
            known = self._known.get(name)
            if known is None or getattr(lora, "load_inplace", False):
                known = (stamp, adapter_digest(lora.lora_path))
                self._known[name] = known
        except OSError as error:
            logger.warning("adapter files not readable, requests are not cached: %s", error)
            return None
        if len(self._known) > ADAPTERS_MAX:
            del self._known[next(iter(self._known))]
        return known[1] if known[0] == stamp else None
