"""The SDK's engine: one session, one mapping of the pool, and what is on its way.

Rule 1: nothing here waits. `poll` brings everything forward by what has happened meanwhile.
Rule 2: everything runs under the lock of the `Cache` that owns it.
Rule 3: a copy is counted in the mapper lock before the pool's generation is looked at, so that a
new daemon never gives a slot away under a running copy.
"""

from __future__ import annotations

import json
import logging
import time
import weakref
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tierkv.config import TierKVConfig
from tierkv.device.base import CopyEngine, Direction, PoolAdopter, StreamedCopyEngine
from tierkv.device.cpu import CpuCopyEngine
from tierkv.device.facts import CopyFacts, facts_of
from tierkv.device.layout import KvLayout, Pages
from tierkv.mapper import PoolMapper
from tierkv.pool import Pool, pool_path
from tierkv.sdk.work import Copy, Hit, Part, Stage
from tierkv.service import wire
from tierkv.service.answers import Answer, Attachment
from tierkv.service.client import Client
from tierkv.service.daemon import node_text
from tierkv.service.launcher import start_daemon
from tierkv.types import BlockKey, EngineId, LeaseId

logger = logging.getLogger(__name__)

PREFETCHES_MAX = 64
STORE_KEYS_MAX = 2048  # in one request: more could not be granted within a deadline
_NOTHING = np.zeros(0, np.int64)


class Engine:
    """Everything of a `Cache` that changes.

    Args:
        attachment: the namespace; attached in every session.
        copies: moves the bytes; ours to close.
    """

    def __init__(
        self,
        name: EngineId,
        config: TierKVConfig,
        attachment: Attachment,
        layout: KvLayout,
        copies: CopyEngine,
    ) -> None:
        node, socket = config.node, config.node.service.socket_path
        self.config = config.engine
        self.attachment = attachment
        self.layout = layout
        self.client = Client(
            socket,
            name,
            node=node_text(node),
            deadline_s=config.engine.request_deadline,
            start=(lambda: start_daemon(node)) if node.service.mode == "auto" else None,
            start_wait_s=node.service.start_wait_max,
        )
        self.client.attach(attachment)
        self.busy: Counter[int] = Counter()  # device blocks that copies read or write
        self.written: set[int] = set()  # those that they write
        path = pool_path(node.dram.directory, socket)
        adopter = copies if isinstance(copies, PoolAdopter) else None
        self._mapper = PoolMapper(path, socket.parent, name, adopter)
        self._copies = copies
        # Weak, so that a hit that the caller forgets is released; see `_forgotten`.
        self._hits: weakref.WeakValueDictionary[LeaseId, Hit] = weakref.WeakValueDictionary()
        self._forgotten: deque[LeaseId] = deque()
        self._asked: list[Hit] = []  # lookups that are not done
        self._on_way: list[Copy] = []
        self._prefetches: list[Hit] = []
        self._generation = 0
        self._must_quiesce = self._has_warned = False
        self._names: tuple[str, ...] = ("dram",)
        self._told: CopyFacts | None = None

    # ---- state ---------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        """Whether lookups have a chance now."""
        return self.client.is_attached(self.attachment.namespace) and self._pool() is not None

    @property
    def is_idle(self) -> bool:
        """Whether no copy is on its way."""
        return not self._on_way

    def poll(self) -> None:
        """Get on with everything. Never waits."""
        self.client.poll()
        now = time.monotonic()
        if self.client.generation != self._generation:
            self._new_generation()
        for hit in list(self._asked):
            self._settle(hit, now)
        recalled, self.client.recalled = self.client.recalled, []
        for lease in recalled:
            hit_of_it = self._hits.get(lease)
            if hit_of_it is not None and not hit_of_it._is_taken:
                self._void(hit_of_it)
        for copy in list(self._on_way):
            self._advance(copy, now)
        while self._forgotten:
            lease = self._forgotten.popleft()
            if lease in self.client.leases:
                if not self._has_warned:
                    logger.warning("a hit was dropped unreleased; use hits in `with` blocks")
                self._has_warned = True
                self.client.release([lease])
        for hit in [hit for hit in self._prefetches if hit._is_done]:
            self._prefetches.remove(hit)
            self.release(hit)
        if (facts := facts_of(self._copies)) != self._told:
            self._told = facts
            self.client.say_devices({0: facts})
        if self._must_quiesce and all(c._generation == self._generation for c in self._on_way):
            self._must_quiesce = False
            self.client.say_quiesced()

    def forget(self) -> None:
        """Nobody can use the cache any more, and nobody closed it. Nothing is on its way.

        Called by the garbage collector, so it must not wait; left alone, the connection's own end
        would.
        """
        logger.warning("a cache was dropped without close()")
        if isinstance(self._copies, CpuCopyEngine):
            self._copies.let_go()  # others have more than threads to end, and wait for it
        self.client.close()
        self._mapper.close()

    def close(self) -> None:
        """Give everything back; no copy is on its way. Blocks for a copy engine of others."""
        for hit in [*self._asked, *self._prefetches, *self._hits.values()]:
            self.release(hit)  # or its blocks stay pinned until our death is certain
        self._prefetches.clear()
        self._copies.close()
        self.client.close()
        self._mapper.close()

    def _new_generation(self) -> None:
        """Another daemon: no lease means anything any more."""
        self._generation = self.client.generation
        welcome = self.client.welcome
        assert welcome is not None, "a generation comes with a welcome"
        self._must_quiesce = welcome.must_quiesce
        self._names = ("dram", *_tier_names(welcome.node))
        for hit in [*self._asked, *self._hits.values()]:
            if hit._lease:
                self._void(hit)

    def _pool(self) -> Pool | None:
        """The mapping of the present daemon's pool, if it is there already."""
        welcome = self.client.welcome
        if welcome is None:
            return None
        return self._mapper.get(welcome.pool, welcome.generation)

    def _count_copies(self, about_to_start: int = 0) -> None:
        running = sum(len(copy._parts) for copy in self._on_way)
        self._mapper.note_copies(running + about_to_start)

    # ---- lookups -------------------------------------------------------------------------------

    def ask(self, hit: Hit, wait_s: float | None = None) -> None:
        """Send a lookup, and expect its answer and growth for `wait_s` or as configured."""
        now = time.monotonic()
        wanted = (len(hit.keys) - hit.held) * self.attachment.block_tokens
        is_worth_it = wanted >= max(1, self.config.swap_in_threshold)
        if not is_worth_it or not self.is_ready:
            hit._is_done = True
            self.client.touch(self.attachment.namespace, hit.keys[: hit.held])
            return
        hit._ticket = self.client.send_lookup(self.attachment.namespace, hit.keys[: wire.KEYS_MAX])
        hit._is_done = hit._ticket == 0
        hit._patience_s = wait_s
        hit._asked_at = now
        hit._answer_by = now + (self.config.request_deadline if wait_s is None else wait_s)
        hit._grow_from = now
        if not hit._is_done:
            self._asked.append(hit)

    def prefetch(self, hit: Hit) -> None:
        """Send a lookup that is given up as soon as it is done."""
        if len(self._prefetches) < PREFETCHES_MAX:
            self.ask(hit)
            self._prefetches.append(hit)

    def _settle(self, hit: Hit, now: float) -> None:
        """Take in what is known of a lookup by now."""
        if hit._ticket and not self._take_answer(hit, now):
            return
        answer = hit._answer
        if answer is not None:
            hit._offsets = answer.offsets[hit.held :]
            sources = answer.sources[hit.held :]
            hit._sources = tuple(self._name(number) for number in sources)
            hit._promised = max(hit._promised, len(hit._offsets))
            if answer.pending and now < hit._grow_from + self._grow_s(hit, answer):
                return
        self.finish(hit)

    def _grow_s(self, hit: Hit, answer: Answer) -> float:
        """How long a hit may grow."""
        if hit._patience_s is not None:
            return hit._patience_s
        if answer.is_promoting:
            return self.config.promote_wait_max
        fill_wait = self.config.fill_wait_max
        return 0.0 if fill_wait == "step" else float(fill_wait)

    def _take_answer(self, hit: Hit, now: float) -> bool:
        """Read the answer to a lookup; False if it may still come."""
        is_here = self.client.has_answer(hit._ticket)
        if not is_here and now < hit._answer_by:
            return False
        if not is_here:
            self._note_silence(hit._asked_at, now)
        hit._answer = self.client.take_answer(hit._ticket, 0.0)
        hit._ticket = 0
        if hit._patience_s is None:
            hit._grow_from = now
        if hit._answer is not None:
            hit._lease = hit._answer.lease
            hit._generation = self._generation
            if hit._lease:
                self._hits[hit._lease] = hit
                weakref.finalize(hit, self._forgotten.append, hit._lease).atexit = False
        return True

    def _note_silence(self, asked_at: float, now: float) -> None:
        """No answer. Somebody who waits for less than the deadline has learned nothing by that."""
        if now >= asked_at + self.config.request_deadline:
            self.client.breaker.note(False, now)

    def finish(self, hit: Hit) -> None:
        """Nothing more is waited for; what is not worth a load is given up."""
        if hit._is_done:
            return
        if hit._ticket:
            self.client.forget_lookup(hit._ticket)
            hit._ticket = 0
        hit._is_done = True
        if hit in self._asked:
            self._asked.remove(hit)
        blocks = len(hit._offsets)
        is_prefetch = hit in self._prefetches
        least = 0 if is_prefetch else self.config.swap_in_threshold
        if blocks == 0 or blocks * self.attachment.block_tokens < least:
            self._void(hit)
        elif hit._answer is not None and hit._answer.pending:
            self._take(hit)  # or it would go on growing

    def release(self, hit: Hit) -> None:
        """Give a hit up; blocks that are being copied stay until then."""
        hit._is_released = True
        self.finish(hit)
        if hit._copies == 0:
            self._void(hit)

    def _void(self, hit: Hit) -> None:
        """A hit of nothing from now on."""
        lease, hit._lease = hit._lease, LeaseId(0)
        hit._answer, hit._offsets, hit._sources = None, _NOTHING, ()
        if not hit._ticket:
            hit._is_done = True
            if hit in self._asked:
                self._asked.remove(hit)
        if lease:
            self._hits.pop(lease, None)
            if hit._generation == self._generation:
                self.client.release([lease])

    def _take(self, hit: Hit) -> None:
        """From now on the daemon may not ask for these blocks back."""
        if not hit._is_taken and hit._lease:
            hit._is_taken = True
            self.client.trim(hit._lease, hit.held + len(hit._offsets))

    def _name(self, source: int) -> str:
        return self._names[source] if source < len(self._names) else f"tier {source}"

    # ---- copies --------------------------------------------------------------------------------

    def load(self, copy: Copy, hit: Hit, first: int) -> None:
        """Start a load, or fail it at once; one of nothing is done."""
        if not copy.blocks:
            copy._stage = Stage.DONE
            return
        self.finish(hit)
        end = first + len(copy.blocks)
        self._count_copies(about_to_start=1)
        pool = self._pool()
        if pool is None or not hit._lease or len(hit._offsets) < end:
            copy._is_ok, copy._stage = False, Stage.DONE
            self._count_copies()
            return
        self._take(hit)
        copy._computed = self._mark()
        hit._copies += 1
        copy._generation = self._generation
        copy._sources = hit._sources[first:end]
        self._begin(copy)
        self.written.update(copy.blocks)
        self._submit(copy, pool, LeaseId(0), copy.blocks, hit._offsets[first:end])

    def store(self, copy: Copy, keys: Sequence[BlockKey], after: BlockKey | None) -> None:
        """Ask for slots; the copies follow when they are there."""
        copy._generation = self._generation
        copy._keys, copy._after = keys, after
        copy._computed = self._mark()
        if self.is_ready and self._ask_for_slots(copy):
            self._begin(copy)
        else:
            copy._stage = Stage.DONE

    def _ask_for_slots(self, copy: Copy) -> bool:
        """Ask for the next part's slots; False if there is no next part, or nobody to ask."""
        first = copy._next
        keys = copy._keys[first : first + STORE_KEYS_MAX]
        if not keys or copy._generation != self._generation:
            return False
        after = copy._keys[first - 1] if first else copy._after
        copy._ticket = self.client.send_reserve(self.attachment.namespace, [(after, keys)])
        copy._next = first + len(keys)
        copy._asked_at = time.monotonic()
        return copy._ticket != 0

    def _begin(self, copy: Copy) -> None:
        """The device blocks belong to the copy now."""
        self.busy.update(copy.blocks)
        self._on_way.append(copy)

    def _submit(
        self,
        copy: Copy,
        pool: Pool | None,
        lease: LeaseId,
        blocks: Sequence[int],
        offsets: npt.NDArray[np.int64],
    ) -> None:
        """Hand a part to the copy engine; without a pool, or if that raises, it has failed."""
        part = Part(lease, len(blocks), None)
        copy._parts.append(part)
        copy._stage = Stage.COPYING
        if pool is None:
            return
        direction = Direction.STORE if copy._hit is None else Direction.LOAD
        pages = Pages(tuple(blocks), tuple(offsets.tolist()), (0,) * len(blocks))
        copies = self.layout.descriptors(self.layout.names, pages, pool.address, 0)
        if isinstance(self._copies, StreamedCopyEngine):
            part.event = self._copies.submit_after(copy._computed, direction, copies)
        else:
            part.event = self._copies.submit(direction, copies)

    def _mark(self) -> object:
        """What the caller's thread has queued for its device; a part may be copied by another."""
        return self._copies.mark() if isinstance(self._copies, StreamedCopyEngine) else None

    def _advance(self, copy: Copy, now: float) -> None:
        if copy._ticket:
            self._take_grant(copy, now)
        for part in list(copy._parts):
            event, part.event = part.event, None  # a failed part, should the next line raise
            is_done = True
            try:
                is_done = event is None or event.is_done()
                part.event = event
            finally:
                if is_done:
                    copy._parts.remove(part)
                    self._end(copy, part)
        if not copy._ticket and not copy._parts:
            self._leave(copy)

    def _take_grant(self, copy: Copy, now: float) -> None:
        is_here = self.client.has_answer(copy._ticket)
        if not is_here and now < copy._asked_at + self.config.request_deadline:
            return
        if not is_here:
            self._note_silence(copy._asked_at, now)
        grant = self.client.take_grant(copy._ticket, 0.0)
        first, copy._ticket = copy._next, 0
        if grant is None or copy._generation != self._generation:
            return
        first -= len(grant.offsets)
        if grant.lease:
            granted = np.flatnonzero(grant.offsets >= 0)
            self._count_copies(about_to_start=1)
            blocks = [copy.blocks[first + at] for at in granted.tolist()]
            self._submit(copy, self._pool(), grant.lease, blocks, grant.offsets[granted])
        self._ask_for_slots(copy)

    def _end(self, copy: Copy, part: Part) -> None:
        """The bytes of a part are there, or will never be."""
        is_ok = part.event is not None and part.event.is_ok
        if copy._hit is None:
            is_current = copy._generation == self._generation
            if is_current:
                self.client.commit(part.lease, [is_ok] * part.blocks)
            is_ok = is_ok and is_current
        copy._copied += part.blocks if is_ok else 0
        copy._is_ok = copy._is_ok and is_ok

    def _leave(self, copy: Copy) -> None:
        """The device blocks are free again."""
        copy._stage = Stage.DONE
        self._on_way.remove(copy)
        self.busy.subtract(copy.blocks)
        self.busy += Counter()  # forget those at zero
        hit = copy._hit
        if hit is not None:
            self.written.difference_update(copy.blocks)
            hit._copies -= 1
            hit._loaded += copy._sources if copy._is_ok else ()
            if hit._is_released and hit._copies == 0:
                self._void(hit)
        self._count_copies()

    # ---- reports -------------------------------------------------------------------------------

    def report(self, held_tokens: int, sources: Sequence[str], computed_tokens: int) -> None:
        """Tell where a prompt's tokens came from."""
        found = Counter(sources)
        by_tier = [found[name] * self.attachment.block_tokens for name in self._names]
        self.client.say_outcome(held_tokens, by_tier, computed_tokens)


def _tier_names(node: str) -> list[str]:
    """Names of the daemon's tiers, from its configuration as told in the welcome."""
    try:
        tiers = json.loads(node)["tiers"]
        return [str(tier["type"]) for tier in tiers]
    except (ValueError, KeyError, TypeError):
        return []
