"""`Cache`: what an engine of one's own talks to.

Rule 1: nothing below costs a request. A cache that cannot help is a hit of no blocks and a store of
no blocks; only a load that fails between lookup and copy raises, because memory was touched.
Rule 2: one lock, never held while anything is waited for.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from tierkv.config import TierKVConfig, load_config, parse_config
from tierkv.device.base import CopyEngine
from tierkv.device.layout import KvLayout
from tierkv.errors import ConfigError, UsageError
from tierkv.hashing import HashAlgorithm, Tokens, block_hashes, digest_of
from tierkv.sdk.engine import Engine
from tierkv.sdk.memory import create_engine_for, describe_tensors
from tierkv.sdk.work import Copy, Hit, Stage
from tierkv.service import wire
from tierkv.service.answers import Attachment
from tierkv.types import BlockKey, EngineId, NamespaceId, slot_bytes_of

if TYPE_CHECKING:
    from tierkv.sdk.memory import KvTensor

LABEL_MAX = 200
KEY_LENGTHS = frozenset(range(2, wire.KEY_BYTES_MAX + 1))
FORMAT = 1  # of what the namespace is made of
PAUSE_MIN_S = 0.00005
PAUSE_MAX_S = 0.001


class Cache:
    """TierKV for one engine: look blocks up, load them, store them.

    May be used from several threads; belongs to one process. The constructor does not wait for the
    daemon: until `is_ready`, every lookup is a miss and every store stores nothing.

    Args:
        tensors: the engine's KV memory by name, torch tensors or numpy arrays on the CPU. The first
            dimension counts device blocks and is the same in all; behind it a block is contiguous.
        model: identity of the weights, for example name and version. Another one never hits.
        block_tokens: tokens that one device block holds.
        config: a configuration, its tree, or the path of its YAML file. None: the defaults.
        facts: plain JSON values of whatever else makes KV bytes differ, for example rope scaling;
            of an engine of several ranks also the rank and their number, with a `Cache` for each.
        hash_algorithm: see `tierkv.hashing.block_hashes`.
        copy_engine: moves bytes of a device that this version does not know; closed with the cache.
    Raises:
        LayoutMismatchError: the tensors cannot be cached; names the tensor.
        ConfigError: the configuration cannot be used.
        UsageError: `model`, `block_tokens` or `facts` is no value that can be used.
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
        self.block_tokens = block_tokens
        self.config = _read_config(config, block_tokens)
        self._hash_algorithm = hash_algorithm
        self._tensors = dict(tensors)  # kept alive: copies know raw addresses
        layout = KvLayout(describe_tensors(tensors), 1)
        self.device_blocks = layout.layers[0].blocks
        self.namespace = self._namespace_of(layout, model, dict(facts or {}))
        attachment = Attachment(
            self.namespace,
            slot_bytes_of(layout.geometry.bytes),
            model[:LABEL_MAX],
            False,
            block_tokens,
        )
        name = EngineId(uuid.uuid4().hex)
        copies = copy_engine if copy_engine is not None else create_engine_for(tensors)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_closing = self._is_closed = False
        self._engine = Engine(name, self.config, attachment, layout, copies)
        self._finalizer = _finalizer_of(self, self._engine)
        self._engine.poll()

    def _namespace_of(
        self, layout: KvLayout, model: str, facts: Mapping[str, object]
    ) -> NamespaceId:
        if not model or not model.isprintable():
            raise UsageError("model: is no readable text; name the weights and their version")
        try:
            block_hashes([], self.block_tokens, algorithm=self._hash_algorithm)
            return digest_of({
                "sdk_format": FORMAT,
                "model": model,
                "model_version": self.config.engine.model_version or "",
                "facts": facts,
                "block_tokens": self.block_tokens,
                "hash_algorithm": self._hash_algorithm,
                "tensors": [[t.name, t.page_bytes, t.form] for t in layout.layers],
            })  # fmt: skip
        except TypeError as error:
            raise UsageError(f"facts: must be plain JSON values: {error}") from error
        except ValueError as error:
            raise UsageError(str(error)) from error

    # ---- state ---------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether lookups have a chance now; never after `close`. Never waits."""
        with self._look() as is_open:
            return is_open and not self._is_closing and self._engine.is_ready

    @property
    def refusal(self) -> str | None:
        """Why the daemon does not serve this cache; None if it does, or has not answered yet."""
        with self._look():
            return self._engine.client.refusal

    def wait_ready(self, wait_s: float = 30.0) -> bool:
        """Wait until `is_ready`, at most `wait_s`; False at once if the daemon refuses.

        Returns:
            Whether it is ready.
        """
        self._wait(lambda: self.is_ready or self.refusal is not None, wait_s)
        return self.is_ready

    def poll(self) -> None:
        """Get on with everything that is on its way. Never waits; every other call does it too."""
        with self._use():
            self._engine.poll()

    def close(self) -> None:
        """Wait for copies, then end the session and release everything. Safe twice."""
        if self._is_foreign:
            return
        with self._lock:
            self._is_closing = True  # nothing new begins
        self._wait(self.is_idle, None)
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._finalizer.detach()
                self._engine.close()

    def is_idle(self) -> bool:
        """Whether no copy is on its way. Never waits."""
        with self._look() as is_open:
            return not is_open or self._engine.is_idle

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # ---- names ---------------------------------------------------------------------------------

    def hash_tokens(
        self,
        tokens: Tokens,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        extras: Mapping[int, bytes] | None = None,
        after: BlockKey | None = None,
    ) -> list[BlockKey]:
        """Keys of the full blocks of a prompt; see `tierkv.hashing.block_hashes`.

        Raises:
            UsageError: a token id is out of range, or `after` is no key of this cache.
        """
        try:
            return block_hashes(
                tokens,
                self.block_tokens,
                salt=salt,
                adapter=adapter,
                extras=extras,
                after=after,
                algorithm=self._hash_algorithm,
            )
        except ValueError as error:
            raise UsageError(str(error)) from error

    # ---- load ----------------------------------------------------------------------------------

    def start_lookup(
        self, keys: Sequence[BlockKey], *, held: int = 0, wait_s: float | None = None
    ) -> Hit:
        """Ask for the blocks of a prompt without waiting; poll the hit.

        Args:
            keys: of all full blocks of the prompt, from the first on.
            held: leading blocks that the device has already. They count as used.
            wait_s: after this time nothing more is expected, and the hit is done. None: the answer
                is expected for at most `engine.request_deadline`, blocks that come from tiers for
                at most `engine.promote_wait_max` more, and blocks that another engine is writing
                for at most `engine.fill_wait_max` more.
        Raises:
            UsageError: `held` is no number of leading keys, or the keys are not those of a prompt.
        """
        if not 0 <= held <= len(keys):
            raise UsageError(f"held: {held} is not between 0 and the {len(keys)} keys")
        hit = Hit(self, _checked(keys), held)
        with self._use():
            self._engine.poll()
            self._engine.ask(hit, wait_s)
        return hit

    def lookup(
        self, keys: Sequence[BlockKey], *, held: int = 0, wait_s: float | None = None
    ) -> Hit:
        """Ask for the blocks of a prompt and wait for them.

        Args:
            keys, held, wait_s: see `start_lookup`.
        Returns:
            What is there by then; release it.
        """
        hit = self.start_lookup(keys, held=held, wait_s=wait_s)
        hit.wait()
        return hit

    def start_load(self, hit: Hit, blocks: Sequence[int], *, first: int = 0) -> Copy:
        """Copy blocks of a hit to the device without waiting; poll the copy.

        Args:
            blocks: device blocks, at most `hit.blocks - first`: block `blocks[i]` gets the KV of
                `hit.keys[hit.held + first + i]`. Nobody may use them until the copy is done.
            first: blocks of the hit that are passed over.
        Raises:
            UsageError: the hit is not this cache's or released; more blocks than the hit has; a
                block is no block, is given twice, or another copy is using it.
        """
        targets, first = self._numbers(blocks), operator.index(first)
        with self._use():
            if hit._cache is not self:
                raise UsageError("the hit belongs to another cache")
            if hit._is_released:
                raise UsageError("the hit is released; look the blocks up again")
            if first < 0 or first + len(targets) > hit._promised:
                raise UsageError(
                    f"{len(targets)} device blocks from block {first} on, for a hit of "
                    f"{hit._promised} blocks"
                )
            if len(set(targets)) != len(targets):
                raise UsageError("a device block is given twice; each needs a place of its own")
            self._engine.poll()
            self._refuse_busy(targets, self._engine.busy)
            copy = Copy(self, targets, hit)
            self._engine.load(copy, hit, first)
        return copy

    def load(self, hit: Hit, blocks: Sequence[int], *, first: int = 0) -> int:
        """Copy blocks of a hit to the device and wait.

        Args:
            hit, blocks, first: see `start_load`.
        Returns:
            Number of blocks, all of `blocks`.
        Raises:
            UsageError: see `start_load`.
            LoadFailedError: the bytes of `blocks` are undefined; compute them.
        """
        return self.start_load(hit, blocks, first=first).result()

    def release(self, hit: Hit) -> None:
        """Give a hit up; safe twice. A copy in flight keeps its blocks until it has ended."""
        if hit._cache is not self:
            raise UsageError("the hit belongs to another cache")
        if self._is_foreign:
            return
        with self._lock:
            if not self._is_closed:
                self._engine.release(hit)

    def prefetch(self, keys: Sequence[BlockKey]) -> None:
        """Have blocks brought up from tiers to DRAM for a prompt that will come. Never waits.

        Of many prefetches at a time, those above `PREFETCHES_MAX` are left out.
        """
        with self._use():
            self._engine.poll()
            self._engine.prefetch(Hit(self, _checked(keys), 0))

    def touch(self, keys: Sequence[BlockKey]) -> None:
        """Note that a prompt was served from the device alone, so its blocks stay warm."""
        with self._use():
            self._engine.poll()
            self._engine.client.touch(self.namespace, _checked(keys)[: wire.KEYS_MAX])

    def report(self, held_tokens: int, hit: Hit | None, computed_tokens: int) -> None:
        """Tell where a prompt's tokens came from, for `tierkv stats`; once per prompt.

        Args:
            held_tokens: those that the device had.
            hit: whose loaded blocks count, released or not; None for nothing.
            computed_tokens: those that were computed.
        """
        held, computed = operator.index(held_tokens), operator.index(computed_tokens)
        if held < 0 or computed < 0:
            raise UsageError(f"{min(held, computed)} is no number of tokens")
        with self._use():
            loaded = hit._loaded if hit is not None else []
            self._engine.report(held, loaded, computed)

    # ---- store ---------------------------------------------------------------------------------

    def start_store(
        self, keys: Sequence[BlockKey], blocks: Sequence[int], *, after: BlockKey | None = None
    ) -> Copy:
        """Copy computed blocks from the device without waiting; poll the copy.

        Args:
            keys: of consecutive blocks of one prompt; those that are there already are skipped.
            blocks: device blocks, one per key, complete. They must not change until it is done.
            after: key of the block before `keys[0]`; None if that begins the prompt.
        Raises:
            UsageError: the lengths differ, a block is no block, or a load is writing it.
        """
        sources = self._numbers(blocks)
        if len(keys) != len(sources):
            raise UsageError(f"{len(keys)} keys for {len(sources)} device blocks")
        listed = _checked([*keys] if after is None else [after, *keys])[after is not None :]
        with self._use():
            self._engine.poll()
            self._refuse_busy(sources, self._engine.written)
            copy = Copy(self, sources, None)
            self._engine.store(copy, listed, after)
        return copy

    def store(
        self, keys: Sequence[BlockKey], blocks: Sequence[int], *, after: BlockKey | None = None
    ) -> int:
        """Copy computed blocks from the device and wait.

        Args:
            keys, blocks, after: see `start_store`.
        Returns:
            Number of blocks stored that were not there before; 0 if the cache cannot help now.
        Raises:
            UsageError: see `start_store`.
        """
        return self.start_store(keys, blocks, after=after).result()

    # ---- steps ---------------------------------------------------------------------------------

    @property
    def _is_foreign(self) -> bool:
        return self._process != os.getpid()

    @contextlib.contextmanager
    def _use(self) -> Iterator[None]:
        """The lock, for a cache that can be used; a forked child must not even wait for it."""
        self._check_process()
        with self._lock:
            if self._is_closing:
                raise UsageError("the cache is closed; make a new one")
            yield

    def _check_process(self) -> None:
        """Raise `UsageError` in a process that was forked from that of the cache."""
        if self._is_foreign:
            raise UsageError("the cache belongs to the process that forked this one; make another")

    def _numbers(self, blocks: Sequence[int]) -> list[int]:
        numbers = np.asarray(blocks).ravel()
        if len(numbers) and numbers.dtype.kind not in "iu":
            raise UsageError("blocks: must be numbers of device blocks")
        listed: list[int] = numbers.tolist()
        for number in listed:
            if not 0 <= number < self.device_blocks:
                raise UsageError(
                    f"device block {number} does not exist; there are {self.device_blocks}"
                )
        return listed

    @staticmethod
    def _refuse_busy(blocks: Sequence[int], busy: Container[int]) -> None:
        for number in blocks:
            if number in busy:
                raise UsageError(
                    f"another copy is using device block {number}; wait until it is done"
                )

    def _wait(self, is_reached: Callable[[], bool], wait_s: float | None) -> bool:
        """Look until a condition holds, at most `wait_s`; the lock is free between looks."""
        end = None if wait_s is None else time.monotonic() + wait_s
        pause_s = PAUSE_MIN_S
        while not is_reached():
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, PAUSE_MAX_S)
        return True

    # ---- for hits and copies -------------------------------------------------------------------

    @contextlib.contextmanager
    def _look(self) -> Iterator[bool]:
        """The lock, after a look at what came. Tells whether anything may still come."""
        if self._is_foreign:
            yield False
            return
        with self._lock:
            if not self._is_closed:
                self._engine.poll()
            yield not self._is_closed

    def _is_settled(self, hit: Hit) -> bool:
        with self._look() as is_open:
            return hit._is_done or not is_open

    def _sources_of(self, hit: Hit) -> tuple[str, ...]:
        with self._look():
            return hit._sources

    def _is_copied(self, copy: Copy) -> bool:
        with self._look() as is_open:
            return copy._stage is Stage.DONE or not is_open


def _finalizer_of(cache: Cache, engine: Engine) -> weakref.finalize[[], Cache]:
    """What happens to a cache that nobody closes; the end of a process gives everything back."""
    finalizer = weakref.finalize(cache, engine.forget)
    finalizer.atexit = False
    return finalizer


def _checked(keys: Sequence[BlockKey]) -> list[BlockKey]:
    """The keys, if the daemon would take them; it ends the session of whoever sends others."""
    listed = list(keys)
    lengths = {len(key) if isinstance(key, bytes) else 0 for key in listed}
    if len(lengths) > 1 or not lengths <= KEY_LENGTHS:
        raise UsageError("keys: must be bytes of one length, as `hash_tokens` gives them")
    if len(set(listed)) != len(listed):
        raise UsageError("keys: one is given twice; the keys of a prompt differ")
    return listed


def _read_config(
    config: TierKVConfig | Mapping[str, Any] | str | Path | None, block_tokens: int
) -> TierKVConfig:
    """The configuration in whatever form it came."""
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, TierKVConfig):
        config = parse_config(config or {})
    configured = config.engine.block_tokens
    if configured not in (None, block_tokens):
        raise ConfigError(
            f"engine.block_tokens: {configured} is not the block_tokens of the cache, "
            f"{block_tokens}; leave the key out"
        )
    return config
