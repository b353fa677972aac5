"""What the scheduler half knows: its sizes and roles, and the state of each request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tierkv.service.client import Answer
from tierkv.types import BlockKey, LeaseId


@dataclass(frozen=True, slots=True)
class Sizes:
    """Token counts of one engine. `ranks` report each copy."""

    engine_block: int
    block: int
    ranks: int

    @property
    def engine_blocks(self) -> int:
        """Engine blocks per TierKV block."""
        return self.block // self.engine_block


@dataclass(frozen=True, slots=True)
class Roles:
    """What `kv_role` allows."""

    may_load: bool
    may_store: bool


@dataclass(slots=True)
class CopyState:
    """A lease whose copy was handed to the workers and is not reported by all ranks."""

    generation: int
    request: str
    device_blocks: tuple[int, ...]
    ranks: int = 0
    is_ok: bool = True
    flags: list[bool] | None = None


@dataclass(slots=True, eq=False)
class RequestState:
    """One request from its arrival to its end.

    Attributes:
        ticket: an asked lookup whose answer was not taken; 0 if none.
        answer: what the lookup found, held under a lease until it is decided.
        asked_at: when the scheduler first asked about this lookup.
        asks: how often it was told to ask again.
        is_decided: the scheduler got its answer for this admission.
        local_tokens: device hit that the answer was computed for.
        promised_tokens: tokens that the scheduler was told it may load.
        loading: the lease of a load that was issued and not yet reported.
        block_ids: device blocks, first token first.
        blocks_stored: leading TierKV blocks that need no more storing.
        may_store: False after a reset, as long as it holds what it computed before.
        is_admitted: it was given blocks, whether or not they were reported yet.
        preemptions: of the engine's count, those that were noted.
        outcome: (device tokens, loaded tokens by source) of the first admission, for statistics.
    """

    request: Any
    adapter: bytes | None = None
    ticket: int = 0
    answer: Answer | None = None
    asked_at: float | None = None
    asks: int = 0
    is_decided: bool = False
    local_tokens: int = 0
    promised_tokens: int = 0
    loading: LeaseId | None = None
    block_ids: list[int] = field(default_factory=list)
    blocks_stored: int = 0
    may_store: bool = True
    is_admitted: bool = False
    preemptions: int = 0
    outcome: tuple[int, tuple[int, ...]] | None = None
    keys: list[BlockKey] = field(default_factory=list)

    def loaded_by_source(self, tokens: int, block: int) -> tuple[int, ...]:
        """Tokens of a load that begins behind the device hit, by source: DRAM, tier 0, tier 1..."""
        sources = self.answer.sources if self.answer is not None else b""
        counts: list[int] = []
        at, end = self.local_tokens, self.local_tokens + tokens
        while at < end:
            step = min(end, (at // block + 1) * block) - at
            source = sources[at // block] if at // block < len(sources) else 0
            counts += [0] * (source + 1 - len(counts))
            counts[source] += step
            at += step
        return tuple(counts)

    def take_back_promise(self) -> None:
        """What was found is gone; the next question of the scheduler is answered anew."""
        self.is_decided = False
        self.promised_tokens = 0

    def forget_admission(self) -> None:
        """The request was preempted: it will be looked up and admitted anew."""
        self.take_back_promise()
        self.may_store = True
        self.is_admitted = False
        self.asked_at = None
        self.asks = 0
        self.local_tokens = 0
        self.block_ids = []
        self.blocks_stored = 0
