"""The scheduler half: the engine's only session with the daemon.

It translates between vLLM's calls and the daemon's verbs and holds no policy but the threshold.
Rule 1: a lease is released, trimmed or committed exactly once; state of copies is kept per lease,
because their reports come after the request has finished or was preempted.
Rule 2: no call here waits for the daemon longer than `request_deadline`, and none raises because of
it. Unknown requests and leases are ignored.
Rule 3: a device block is fenced only when it is used again: a step that allocates it, or preempts
its request, names the stores that still read it.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

from tierkv.config import EngineConfig
from tierkv.connectors.vllm.adapters import AdapterDigests
from tierkv.connectors.vllm.meta import (
    NO_GENERATION,
    LoadPlan,
    StepPlan,
    StorePlan,
    WorkerReport,
)
from tierkv.connectors.vllm.requests import CopyState, RequestState, Roles, Sizes
from tierkv.core.values import NO_OFFSETS, Granted
from tierkv.device.layout import Pages
from tierkv.hashing import block_key
from tierkv.service.client import Answer, Attachment, Client
from tierkv.types import BlockKey, LeaseId

logger = logging.getLogger(__name__)

RESERVE_KEYS_MAX = 4_096  # more would miss the daemon's deadline each time
NO_LEASE = LeaseId(0)


class SchedulerHalf:
    """One engine's view of the cache."""

    def __init__(self, client: Client, config: EngineConfig, sizes: Sizes, roles: Roles) -> None:
        self.client = client
        self._config = config
        self._sizes = sizes
        self._roles = roles
        self._is_async = config.load_mode == "async"
        self._attachment: Attachment | None = None
        self._rank_offsets: tuple[int, ...] = ()
        self._requests: dict[str, RequestState] = {}
        self._owner: dict[LeaseId, str] = {}  # undecided or unissued read leases
        self._loads: dict[LeaseId, CopyState] = {}
        self._stores: dict[LeaseId, CopyState] = {}
        self._readers: dict[int, set[LeaseId]] = {}  # device block -> stores that read it
        self._planned: list[LoadPlan] = []
        self._allocated: set[int] = set()
        self._generation = 0
        # After a reset that vLLM's own cache refused, its hits may be of before the reset.
        self._stores_device_hits = True
        self._failures_seen: dict[int, int] = {}
        self._must_quiesce = False
        self._adapters = AdapterDigests()

    # ---- life of the engine --------------------------------------------------------------------

    def attach(self, attachment: Attachment, rank_offsets: tuple[int, ...], wait_s: float) -> bool:
        """Start caching in this namespace; called again with another one after a reset.

        Returns:
            Whether it is usable already; if not, the engine serves without cache meanwhile.
        """
        if self._attachment is not None:
            self._forget_all()
            self._stores_device_hits = False
            self.client.detach(self._attachment.namespace)
        self._attachment = attachment
        self._rank_offsets = rank_offsets
        self.client.attach(attachment)
        return self.client.wait_attached(attachment.namespace, wait_s)

    @property
    def pool_bytes(self) -> int:
        """Size of the node's pool; 0 until a daemon told it."""
        welcome = self.client.welcome
        return welcome.capacity if welcome is not None else 0

    @property
    def is_ready(self) -> bool:
        """Whether lookups and stores have a chance now."""
        return self._attachment is not None and self.client.is_attached(self._attachment.namespace)

    @property
    def has_copies(self) -> bool:
        """Whether stores are not committed yet, so that the engine must go on stepping."""
        return bool(self._stores)

    def close(self) -> None:
        self.client.close()

    def _forget_all(self) -> None:
        """Drop every undecided lookup: the namespace changed."""
        for state in self._requests.values():
            self._give_up(state)
            # What it computed so far may be of before the reset; a preemption starts it anew.
            state.may_store = not (state.is_admitted or state.block_ids)
            state.blocks_stored = 0

    # ---- lookup --------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """A request arrived: ask for its prompt without waiting."""
        self._poll()
        state = RequestState(request)
        lora = getattr(request, "lora_request", None)
        if lora is not None:
            state.adapter = self._adapters.digest_of(lora)
            if state.adapter is None:
                return  # an unknown request is computed and not cached
        self._requests[request.request_id] = state
        self._ask(state)

    def _ask(self, state: RequestState) -> None:
        if not self._roles.may_load or self._attachment is None:
            return
        count = state.request.num_tokens // self._sizes.block
        keys = list(self._keys(state, count))
        if not keys:
            return
        namespace = self._attachment.namespace
        if len(keys) * self._sizes.block < self._config.swap_in_threshold:
            self.client.touch(namespace, keys)  # too short to pay, yet a use of the prefix
            return
        state.ticket = self.client.send_lookup(namespace, keys)

    def _keys(self, state: RequestState, count: int) -> list[BlockKey]:
        """Keys of the leading blocks, as far as the engine knows their hashes."""
        hashes = state.request.block_hashes
        step = self._sizes.engine_blocks
        keys = state.keys
        for at in range(len(keys), min(count, len(hashes) // step)):
            keys.append(block_key(bytes(hashes[(at + 1) * step - 1]), 0, state.adapter))
        return keys[:count]

    def matched_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded beyond the device hit; None to be asked again.

        Called in every step while the request waits for admission; only the first call of an
        admission may wait, and asking again costs no message.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            return 0, False
        self._note_preemption(state)
        if state.is_decided and local_tokens == state.local_tokens:
            return state.promised_tokens, self._is_async and state.promised_tokens > 0
        if state.is_decided and state.answer is None and local_tokens < state.local_tokens:
            self._ask(state)  # the device lost blocks that made a load not worth it
        self._take_answer(state)
        found, soon = self._usable(state, local_tokens)
        threshold = max(1, self._config.swap_in_threshold)
        if soon >= threshold and soon > found and self._may_wait(state):
            return None, False
        if found < threshold:
            self._give_up(state)
            found = 0
        elif self._is_async and len(self._loads) >= self._config.parked_loads_max:
            return None, False
        state.is_decided = True
        state.local_tokens = local_tokens
        state.promised_tokens = found
        return found, self._is_async and found > 0

    def _take_answer(self, state: RequestState) -> None:
        if not state.ticket:
            return
        state.answer = self.client.take_answer(state.ticket)
        state.ticket = 0
        if state.answer is not None:
            state.blocks_stored = max(state.blocks_stored, len(state.answer.offsets))
            if state.answer.lease:
                self._owner[state.answer.lease] = state.request.request_id

    def _usable(self, state: RequestState, local_tokens: int) -> tuple[int, int]:
        """Loadable tokens beyond the device hit: (now, with what is on its way)."""
        answer = state.answer
        if answer is None:
            return 0, 0
        block, page = self._sizes.block, self._sizes.engine_block
        total = state.request.num_tokens
        # A synchronous load must leave a token to compute, or vLLM's scheduler asserts.
        limit = total if self._is_async else (total - 1) // page * page
        now = min(len(answer.offsets) * block, limit) - local_tokens
        later = min((len(answer.offsets) + answer.pending) * block, limit) - local_tokens
        return max(0, now), max(0, later)

    def _may_wait(self, state: RequestState) -> bool:
        now = time.monotonic()
        if state.asked_at is None:
            state.asked_at = now
        state.asks += 1
        if state.answer is not None and state.answer.is_promoting:
            return now - state.asked_at < self._config.promote_wait_max
        if self._config.fill_wait_max == "step":
            return state.asks <= 1
        return now - state.asked_at < float(self._config.fill_wait_max)

    def _give_up(self, state: RequestState) -> None:
        """Release what a lookup holds; nothing was issued under it."""
        if state.ticket:
            self.client.forget_lookup(state.ticket)
            state.ticket = 0
        if state.answer is not None and state.answer.lease:
            self._owner.pop(state.answer.lease, None)
            self.client.release([state.answer.lease])
        state.answer = None
        state.take_back_promise()

    # ---- admission -----------------------------------------------------------------------------

    def allocated(self, request: Any, block_ids: list[int], external_tokens: int) -> None:
        """vLLM took `external_tokens` of what it was told, into these blocks.

        A second call with 0 after an asynchronous load is ignored.
        """
        state = self._requests.get(request.request_id)
        if state is None:
            self._allocated.update(block for block in block_ids if block)
            return
        state.is_admitted = True
        page = self._sizes.engine_block
        first = state.local_tokens // page if state.is_decided else 0
        self._allocated.update(block for block in block_ids[first:] if block)
        if state.outcome is None:
            loaded = state.loaded_by_source(external_tokens, self._sizes.block)
            state.outcome = (state.local_tokens, loaded)
        if not self._stores_device_hits:
            state.blocks_stored = max(
                state.blocks_stored, -(-state.local_tokens // self._sizes.block)
            )
        if external_tokens == 0:
            if state.loading is None:
                self._give_up(state)
            return
        self._plan_load(state, block_ids, external_tokens)

    def _plan_load(self, state: RequestState, block_ids: list[int], tokens: int) -> None:
        per, page = self._sizes.engine_blocks, self._sizes.engine_block
        first = state.local_tokens // page
        places = range(first, first + tokens // page)
        answer = state.answer or Answer(NO_LEASE, NO_OFFSETS, 0)
        is_held = len(answer.offsets) * per >= places.stop
        pages = Pages(
            tuple(block_ids[at] for at in places),
            tuple(int(answer.offsets[at // per]) if is_held else 0 for at in places),
            tuple(at % per for at in places),
        )
        state.answer = None
        state.take_back_promise()
        if not is_held:  # what was promised is gone: the workers report a failed load
            logger.error("no answer behind a promised load; it is computed")
            self._planned.append(LoadPlan(NO_LEASE, NO_GENERATION, state.request.request_id, pages,
                                          self._is_async))  # fmt: skip
            return
        lease = answer.lease
        self._owner.pop(lease, None)
        state.blocks_stored = max(state.blocks_stored, len(answer.offsets))
        self.client.trim(lease, (places[-1]) // per + 1)
        state.loading = lease
        request = state.request.request_id
        self._loads[lease] = CopyState(self._generation, request, pages.device_blocks)
        self._planned.append(LoadPlan(lease, self._generation, request, pages, self._is_async))

    # ---- one step ------------------------------------------------------------------------------

    def plan_step(self, output: Any) -> StepPlan:
        """Everything that the workers do in this step."""
        self._poll()
        for request in output.preempted_req_ids or ():
            state = self._requests.get(request)
            if state is not None:
                self._note_preemption(state)
        # A request may be preempted and resumed in one step, so its blocks are followed last.
        computed = self._follow_blocks(output)
        fenced = self._fenced_by_reuse()
        welcome = self.client.welcome
        plan = StepPlan(
            pool=welcome.pool if welcome is not None else "",
            generation=self._generation,
            rank_offsets=self._rank_offsets,
            loads=self._planned,
            store=self._plan_store(output, computed),
            fences=tuple(sorted(fenced)),
            failures_seen=dict(self._failures_seen),
        )
        self._planned = []
        self._allocated = set()
        return plan

    def _follow_blocks(self, output: Any) -> dict[str, int]:
        """Keep block lists as vLLM reports them; returns computed tokens before this step."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            computed[new.req_id] = new.num_computed_tokens
            self._replace_blocks(new.req_id, new.block_ids[0])
        cached = output.scheduled_cached_reqs
        for at, request in enumerate(cached.req_ids):
            computed[request] = cached.num_computed_tokens[at]
            new_ids = cached.new_block_ids[at]
            if request in cached.resumed_req_ids:
                self._replace_blocks(request, new_ids[0] if new_ids else [])
            elif new_ids:
                self._allocated.update(new_ids[0])
                state = self._requests.get(request)
                if state is not None:
                    state.block_ids.extend(new_ids[0])
        return computed

    def _replace_blocks(self, request: str, block_ids: list[int]) -> None:
        state = self._requests.get(request)
        if state is None:
            self._allocated.update(block_ids)
            return
        state.block_ids = list(block_ids)
        shared = state.local_tokens // self._sizes.engine_block
        self._allocated.update(block for block in block_ids[shared:] if block)

    def _note_preemption(self, state: RequestState) -> None:
        """Start a request anew if it was preempted since the last look.

        vLLM has no callback for it, and preempts outside of a step too (pause, reset).
        """
        if state.request.num_preemptions == state.preemptions:
            return
        state.preemptions = state.request.num_preemptions
        self._allocated.update(state.block_ids)  # from now on others may write there
        self._give_up(state)
        state.forget_admission()
        self._ask(state)

    def _fenced_by_reuse(self) -> set[LeaseId]:
        found: set[LeaseId] = set()
        if self._readers:
            for block in self._allocated:
                found |= self._readers.get(block, set())
        return found

    # ---- store ---------------------------------------------------------------------------------

    def _plan_store(self, output: Any, computed: dict[str, int]) -> StorePlan | None:
        """Reserve the blocks that this step completes. No round trip if it completes none."""
        if not self._roles.may_store or self._attachment is None:
            return None
        if not self.client.is_attached(self._attachment.namespace):
            return None
        runs: list[tuple[BlockKey | None, list[BlockKey]]] = []
        places: list[tuple[RequestState, int]] = []  # per key: request and index of its block
        seen: set[BlockKey] = set()
        for request, tokens in output.num_scheduled_tokens.items():
            state = self._requests.get(request)
            if state is None or not state.may_store:
                continue
            first, end = state.blocks_stored, self._storable(state, computed[request] + tokens)
            keys = self._keys(state, end)
            while first < end and keys[first] in seen:
                first += 1  # another prompt of this batch stores it
            end = min(end, first + RESERVE_KEYS_MAX - len(places))  # the rest in later steps
            fresh = list(itertools.takewhile(lambda key: key not in seen, keys[first:end]))
            if not fresh:
                continue
            seen.update(fresh)
            runs.append((keys[first - 1] if first else None, fresh))
            places += [(state, first + at) for at in range(len(fresh))]
            state.blocks_stored = first + len(fresh)
        if not runs:
            return None
        grant = self.client.reserve(self._attachment.namespace, runs)
        if grant is None:  # nobody answered: a later step of these requests tries again
            for state, index in reversed(places):
                state.blocks_stored = min(state.blocks_stored, index)
            return None
        return self._store_of(grant, places) if grant.lease else None

    def _storable(self, state: RequestState, confirmed_tokens: int) -> int:
        """Full blocks: confirmed tokens, allocated blocks and known hashes, the least of them."""
        sizes = self._sizes
        if self._config.offload_prompt_only:
            confirmed_tokens = min(confirmed_tokens, state.request.num_prompt_tokens)
        pages = min(
            confirmed_tokens // sizes.engine_block,
            len(state.block_ids),
            len(state.request.block_hashes),
        )
        return pages // sizes.engine_blocks

    def _store_of(self, grant: Granted, places: list[tuple[RequestState, int]]) -> StorePlan | None:
        per = self._sizes.engine_blocks
        device: list[int] = []
        slots: list[int] = []
        blocks = 0
        for (state, index), offset in zip(places, grant.offsets.tolist(), strict=True):
            if offset >= 0:
                device += state.block_ids[index * per : (index + 1) * per]
                slots += [offset] * per
                blocks += 1
        pages = Pages(tuple(device), tuple(slots), tuple(range(per)) * blocks)
        self._stores[grant.lease] = CopyState(self._generation, "", pages.device_blocks)
        for block in device:
            self._readers.setdefault(block, set()).add(grant.lease)
        return StorePlan(grant.lease, self._generation, blocks, per, pages)

    # ---- reports -------------------------------------------------------------------------------

    def take_report(self, report: WorkerReport) -> None:
        """Copies ended on some ranks."""
        for rank, count in report.load_failures.items():
            seen = self._failures_seen.get(rank, 0)
            self._failures_seen[rank] = max(seen, count)
        for lease, (ranks, flags) in sorted(report.stored.items()):  # predecessors first
            self._stored(LeaseId(lease), ranks, flags)
        for lease, (ranks, is_ok) in report.loaded.items():
            self._loaded(LeaseId(lease), ranks, is_ok)
        self._poll()

    def _stored(self, lease: LeaseId, ranks: int, flags: list[bool]) -> None:
        copy = self._stores.get(lease)
        if copy is None:
            return
        copy.ranks += ranks
        before = copy.flags if copy.flags is not None else [True] * len(flags)
        copy.flags = [a and b for a, b in zip(before, flags, strict=True)]
        if copy.ranks < self._sizes.ranks:
            return
        del self._stores[lease]
        for block in copy.device_blocks:
            readers = self._readers[block]
            readers.discard(lease)
            if not readers:
                del self._readers[block]
        self.client.commit(lease, copy.flags)

    def _loaded(self, lease: LeaseId, ranks: int, is_ok: bool) -> None:
        copy = self._loads.get(lease)
        if copy is None:
            return
        copy.ranks += ranks
        copy.is_ok = copy.is_ok and is_ok
        state = self._requests.get(copy.request)
        if state is not None and not is_ok and state.outcome is not None:
            state.outcome = (state.outcome[0], ())  # it is computed; nothing is looked up again
        if copy.ranks < self._sizes.ranks:
            return
        del self._loads[lease]
        if state is not None and state.loading == lease:
            state.loading = None
        self.client.release([lease])

    def request_finished(self, request: Any) -> None:
        """The request ended; copies under its leases go on and end with their reports."""
        state = self._requests.pop(request.request_id, None)
        if state is None:
            return
        self._give_up(state)
        if state.outcome is not None:
            device, loaded = state.outcome
            computed = max(0, request.num_prompt_tokens - device - sum(loaded))
            self.client.say_outcome(device, loaded, computed)

    # ---- connection ----------------------------------------------------------------------------

    def _poll(self) -> None:
        self.client.poll()
        if self.client.generation != self._generation:
            self._new_generation()
        recalled, self.client.recalled = self.client.recalled, []
        for lease in recalled:
            state = self._requests.get(self._owner.get(lease, ""))
            if state is not None:
                self._give_up(state)
        if self._must_quiesce and not self._has_old_copies():
            self._must_quiesce = False
            self.client.say_quiesced()

    def _new_generation(self) -> None:
        """Another daemon: no lease means anything any more, and what is stored is unknown."""
        self._generation = self.client.generation
        welcome = self.client.welcome
        self._must_quiesce = welcome is not None and welcome.must_quiesce
        self._owner.clear()
        for state in self._requests.values():
            state.answer = None
            state.ticket = 0
            state.blocks_stored = 0
            state.take_back_promise()

    def _has_old_copies(self) -> bool:
        copies = [*self._loads.values(), *self._stores.values()]
        return any(copy.generation != self._generation for copy in copies)
