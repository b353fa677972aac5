"""The SDK for engines that run in an asyncio loop: the same cache, waiting without blocking."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tierkv.config import TierKVConfig
from tierkv.device.base import CopyEngine
from tierkv.hashing import HashAlgorithm, Tokens
from tierkv.sdk.cache import PAUSE_MAX_S, Cache
from tierkv.sdk.work import Copy, Hit
from tierkv.types import BlockKey

if TYPE_CHECKING:
    from tierkv.sdk.memory import KvTensor


class AsyncCache:
    """A `Cache` whose waiting calls are coroutines.

    A task that is cancelled while it waits for a lookup gives the hit up. One that is cancelled
    while it waits for a copy still waits for the copy, because memory is being read or written.

    Args:
        tensors, model, block_tokens, config, facts, hash_algorithm, copy_engine: see `Cache`.
    """

    def __init__(
        self,
        tensors: Mapping[str, KvTensor],
        *,
        model: str,
        block_tokens: int,
        config: TierKVConfig | Mapping[str, Any] | str | Path | None = None,
        facts: Mapping[str, object] | None = None,
        hash_algorithm: HashAlgorithm = "sha256",
        copy_engine: CopyEngine | None = None,
    ) -> None:
        self.cache = Cache(
            tensors,
            model=model,
            block_tokens=block_tokens,
            config=config,
            facts=facts,
            hash_algorithm=hash_algorithm,
            copy_engine=copy_engine,
        )
        self.block_tokens = block_tokens
        self.namespace = self.cache.namespace

    @property
    def is_ready(self) -> bool:
        """See `Cache.is_ready`."""
        return self.cache.is_ready

    @property
    def refusal(self) -> str | None:
        """See `Cache.refusal`."""
        return self.cache.refusal

    async def wait_ready(self, wait_s: float = 30.0) -> bool:
        """See `Cache.wait_ready`."""
        await _until(lambda: self.is_ready or self.refusal is not None, wait_s)
        return self.is_ready

    def hash_tokens(
        self,
        tokens: Tokens,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
        after: BlockKey | None = None,
    ) -> list[BlockKey]:
        """See `Cache.hash_tokens`."""
        return self.cache.hash_tokens(
            tokens, salt=salt, adapter=adapter, extras=extras, after=after
        )

    async def lookup(
        self, keys: Sequence[BlockKey], *, held: int = 0, wait_s: float | None = None
    ) -> Hit:
        """See `Cache.lookup`."""
        hit = self.cache.start_lookup(keys, held=held, wait_s=wait_s)
        try:
            await _until(lambda: hit.is_done, None)
        except asyncio.CancelledError:
            hit.release()
            raise
        return hit

    async def load(self, hit: Hit, blocks: Sequence[int], *, first: int = 0) -> int:
        """See `Cache.load`."""
        return await self._end_of(self.cache.start_load(hit, blocks, first=first))

    async def store(
        self, keys: Sequence[BlockKey], blocks: Sequence[int], *, after: BlockKey | None = None
    ) -> int:
        """See `Cache.store`."""
        return await self._end_of(self.cache.start_store(keys, blocks, after=after))

    def start_lookup(
        self, keys: Sequence[BlockKey], *, held: int = 0, wait_s: float | None = None
    ) -> Hit:
        """See `Cache.start_lookup`."""
        return self.cache.start_lookup(keys, held=held, wait_s=wait_s)

    def start_load(self, hit: Hit, blocks: Sequence[int], *, first: int = 0) -> Copy:
        """See `Cache.start_load`."""
        return self.cache.start_load(hit, blocks, first=first)

    def start_store(
        self, keys: Sequence[BlockKey], blocks: Sequence[int], *, after: BlockKey | None = None
    ) -> Copy:
        """See `Cache.start_store`."""
        return self.cache.start_store(keys, blocks, after=after)

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """See `Cache.prefetch`."""
        self.cache.prefetch(keys)

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """See `Cache.touch`."""
        self.cache.touch(keys)

    def release(self, hit: Hit) -> None:
        """See `Cache.release`."""
        self.cache.release(hit)

    def report(self, held_tokens: int, hit: Hit | None, computed_tokens: int) -> None:
        """See `Cache.report`."""
        self.cache.report(held_tokens, hit, computed_tokens)

    def poll(self) -> None:
        """See `Cache.poll`."""
        self.cache.poll()

    async def close(self) -> None:
        """See `Cache.close`. A task that is cancelled meanwhile closes it all the same."""
        try:
            await _until(self.cache.is_idle, None)
        finally:
            self.cache.close()

    async def __aenter__(self) -> AsyncCache:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @staticmethod
    async def _end_of(copy: Copy) -> int:
        """Wait for a copy, to its end even if the task is cancelled meanwhile."""
        cancelled: asyncio.CancelledError | None = None
        while not copy.is_done:
            try:
                await asyncio.sleep(PAUSE_MAX_S)
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        return copy.result()


async def _until(is_reached: Callable[[], bool], wait_s: float | None) -> None:
    """Look until a condition holds, at most `wait_s`."""

    async def look() -> None:
        while not is_reached():
            await asyncio.sleep(PAUSE_MAX_S)

    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(look(), wait_s)
