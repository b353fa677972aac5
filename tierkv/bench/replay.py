"""``tierkv bench replay``: what a request trace hits in the real directory, without any bytes.

The directory, its cleaner and its promotions are the product's own; below them stands a tier that
answers at once, with the books of the fs tier, so that its second chance is the real one. A slot
holds the id of its block instead of bytes: a hit on another id fails the run.

Per request: a lookup of all its blocks, which nobody holds on a device; the tier works until
nothing moves; the leading readable blocks are the hit; they are released, and the rest is stored in
one commit, as one long prefill would; the tier works again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.bench.report import say
from tierkv.bench.trace import Request, Trace, ids_of, load_trace
from tierkv.core.directory import Directory
from tierkv.core.values import Job, Limits, Op, Ready, Run, TierLimits
from tierkv.plugins import policy_factory
from tierkv.tiers.base import BlockName
from tierkv.tiers.fs.index import Index
from tierkv.tiers.fs.tier import VICTIMS_SCANNED_MAX
from tierkv.types import BlockKey, EngineId, NamespaceId, Outcome

WRITE_POLICIES = ("write_back", "write_through", "write_through_selective")
SLOT_BYTES = 1 << 17  # no byte of it exists; it decides how many blocks one job has
ROUNDS_MAX = 1 << 20  # of jobs for one request; beyond it the tier never comes to rest
SAY_EVERY = 1_000
_BACKLOG_MAX = 1 << 50
_ENGINE = EngineId("replay")
_SPACE = NamespaceId(b"R" * 32)


@dataclass(frozen=True, slots=True)
class Setup:
    """What is replayed against. Sizes are blocks; `tier_blocks` = 0: DRAM alone.

    Attributes:
        commits: into how many commits a request's new blocks are divided, as by chunked prefill.
    """

    dram_blocks: int
    tier_blocks: int
    write_policy: str = "write_back"
    policy: str = "slru"
    commits: int = 1


@dataclass(frozen=True, slots=True)
class Result:
    """What a replay counted. All numbers are blocks, but `requests` and `seconds`.

    Attributes:
        hits_dram, hits_tier: leading blocks that were readable, by where they were at the lookup.
        hits_max: what a cache without bounds would have hit.
        tier_writes: blocks demoted.
        debts_shed: blocks that DRAM gave up before the tier got them.
        evicted, evicted_tier: chosen by the policies of DRAM and of the tier.
        skipped: offered and not stored for want of a slot.
        problems: what contradicted the model; a replay with problems proves nothing.
    """

    setup: Setup
    requests: int
    asked: int
    hits_dram: int
    hits_tier: int
    hits_max: int
    tier_writes: int
    debts_shed: int
    evicted: int
    evicted_tier: int
    skipped: int
    seconds: float
    problems: tuple[str, ...]

    @property
    def hits(self) -> int:
        return self.hits_dram + self.hits_tier

    @property
    def hit_rate(self) -> float:
        return self.hits / max(1, self.asked)


class SimulatedTier:
    """An indexed tier that is done at once: the books of the fs tier, and ids for bytes."""

    def __init__(self, blocks: int) -> None:
        self.index = Index(blocks, VICTIMS_SCANNED_MAX)
        self.evicted = 0
        self._stored: dict[BlockKey, int] = {}

    def write(self, key: BlockKey, content: int) -> Outcome:
        """Keep a block; at capacity the second chance chooses who goes."""
        name = BlockName(_SPACE, key)
        row = self.index.find_readable(name)
        if row is not None:
            self.index.use(row, 0.0, np.inf)
            return Outcome.OK
        row = self.index.begin_write(name)
        while not self.index.has_room(1):
            victim = self.index.choose_victim()
            assert victim is not None, "nothing is pinned, so something can go"
            del self._stored[self.index.name(victim).key]
            self.index.forget(victim)
            self.evicted += 1
        self.index.resize(row, 1)
        self.index.publish(row, 0.0)
        self._stored[key] = content
        return Outcome.OK

    def read(self, key: BlockKey) -> int | None:
        """What is stored under a key, and a use of it."""
        self.touch(key)
        return self._stored.get(key)

    def touch(self, key: BlockKey) -> None:
        """Note a use."""
        row = self.index.find_readable(BlockName(_SPACE, key))
        if row is not None:
            self.index.use(row, 0.0, np.inf)

    def drop(self, key: BlockKey) -> None:
        """Remove a block."""
        row = self.index.find(BlockName(_SPACE, key))
        if row is not None and self.index.dismiss(row):
            self.index.forget(row)
            del self._stored[key]


class Replay:
    """One directory, one engine and at most one tier.

    Attributes:
        directory: the real one.
        tier: None if DRAM stands alone.
        problems: see `Result`.
    """

    def __init__(self, setup: Setup) -> None:
        assert setup.dram_blocks > 0, "DRAM has a slot"
        assert setup.commits > 0, "what is stored is committed"
        pool = setup.dram_blocks * SLOT_BYTES
        # One extent: the capacity is exact, and nothing is moved between namespaces.
        limits = Limits(pool, pool, pinned_share_max=1.0, promote_share_max=1.0)
        tiers = [
            TierLimits(
                "fs",
                write_policy=setup.write_policy,
                capacity=setup.tier_blocks * SLOT_BYTES,
                backlog_max=_BACKLOG_MAX,
            )
        ]
        self.setup = setup
        self.tier = SimulatedTier(setup.tier_blocks) if setup.tier_blocks else None
        self.directory = Directory(limits, tiers if self.tier else (), policy_factory(setup.policy))
        self.problems: list[str] = []
        self._content: npt.NDArray[np.int64] = np.full(setup.dram_blocks, -1, np.int64)
        self.directory.open_engine(_ENGINE)
        refusal = self.directory.attach(_ENGINE, _SPACE, SLOT_BYTES)
        assert refusal is None, "a pool of whole slots can be used"
        if self.tier is not None:
            self.directory.tiering.started(0, knows_all=True)

    def ask(self, request: Request) -> bytes:
        """Look a request up and store the rest of it.

        Returns:
            One byte per leading block that was readable: 0 if DRAM had it, 1 if the tier had it.
        """
        now = request.at_s
        self.directory.tiering.tick(now)
        sources = self._look_up(request, now)
        hits = len(sources)
        if hits < len(request.keys):
            self._store(request, hits, now)
        self._work(now)
        return sources

    def expect(self, is_right: bool, problem: str) -> None:
        """Note what contradicts the model; it fails the bench."""
        if not is_right and problem not in self.problems:
            self.problems.append(problem)

    def verify(self) -> None:
        """Compare the books of directory and tier with themselves and each other."""
        try:
            self.directory.check()
        except AssertionError as error:
            self.expect(False, f"the directory contradicts itself: {error}")
        self.expect(not self.directory.leases, "leases are left")
        if self.tier is None:
            return
        self.problems += self.tier.index.check()
        known = self.directory.tiering.presence.counts[0]
        self.expect(known == self.tier.index.blocks, "the directory does not know the tier")

    # ---- steps ---------------------------------------------------------------------------------

    def _look_up(self, request: Request, now: float) -> bytes:
        found = self.directory.lookup(_ENGINE, _SPACE, request.keys, now)
        offsets, sources, pending = found.offsets, bytes(len(found.offsets)), found.pending
        for event in self._work(now):
            if isinstance(event, Ready) and event.lease == found.lease:
                offsets, sources, pending = event.offsets, event.sources, event.pending
        self.expect(pending == 0, "a lookup waits for what never comes")
        held = self._content[offsets // SLOT_BYTES]
        is_right = np.array_equal(held, request.ids[: len(offsets)])
        self.expect(is_right, "a hit on another block")
        if found.lease:
            self.directory.release(found.lease)
        return sources

    def _store(self, request: Request, hits: int, now: float) -> None:
        """Reserve and commit the blocks behind the hit, in equal parts."""
        missing = len(request.keys) - hits
        size = -(-missing // self.setup.commits)
        for first in range(hits, len(request.keys), size):
            part = slice(first, first + size)
            run = Run(request.keys[first - 1] if first else None, request.keys[part])
            granted = self.directory.reserve(_ENGINE, _SPACE, [run], now)
            is_granted = granted.offsets >= 0
            places = granted.offsets[is_granted] // SLOT_BYTES
            self._content[places] = request.ids[part][is_granted]
            if granted.lease:
                self.directory.commit(granted.lease, [True] * len(places))

    def _work(self, now: float) -> list[object]:
        """Do the tier's jobs until nothing moves; the events that came."""
        tiering = self.directory.tiering
        events: list[object] = []
        for _ in range(ROUNDS_MAX):
            jobs = tiering.take_jobs(now) if self.tier is not None else []
            for job in jobs:
                outcomes = self._do(job)
                self._tell_changes()
                tiering.outcomes(job.tier, job.id, outcomes, now)
            events += self.directory.take_events()
            if not jobs:
                return events
        self.expect(False, "the tier never comes to rest")
        return events

    def _do(self, job: Job) -> list[Outcome]:
        assert self.tier is not None, "jobs are for a tier"
        verbs: dict[Op, Callable[[SimulatedTier, Job], list[Outcome]]] = {
            Op.READ: self._read,
            Op.WRITE: self._write,
        }
        if job.op in verbs:
            return verbs[job.op](self.tier, job)
        for key in job.keys:
            if job.op is Op.TOUCH:
                self.tier.touch(key)
            else:
                assert job.op is Op.DROP, "an indexed tier is not probed, and nobody purges"
                self.tier.drop(key)
        return [Outcome.OK] * len(job.keys)

    def _read(self, tier: SimulatedTier, job: Job) -> list[Outcome]:
        outcomes = []
        for key, offset in zip(job.keys, job.offsets, strict=True):
            content = tier.read(key)
            self._content[offset // SLOT_BYTES] = -1 if content is None else content
            outcomes.append(Outcome.MISSING if content is None else Outcome.OK)
        return outcomes

    def _write(self, tier: SimulatedTier, job: Job) -> list[Outcome]:
        held = self._content[np.array(job.offsets) // SLOT_BYTES]
        self.expect(np.array_equal(held, ids_of(job.keys)), "another block was demoted")
        return [tier.write(key, int(at)) for key, at in zip(job.keys, held, strict=True)]

    def _tell_changes(self) -> None:
        """Tell what came and went, in its order, before the outcome that it belongs to."""
        assert self.tier is not None, "a tier tells"
        changes = self.tier.index.changes
        while changes:
            is_added, keys = changes[0].is_added, []
            while changes and changes[0].is_added is is_added:
                keys.append(changes.popleft().name.key)
            self.directory.tiering.changed(0, _SPACE, keys, is_added)


def replay(trace: Trace, setup: Setup) -> Result:
    """Ask a directory for every request of a trace, in order, and count."""
    began = time.perf_counter()
    world = Replay(setup)
    hits = [0, 0]
    for number, request in enumerate(trace.requests):
        if number % SAY_EVERY == 0:
            say(f"{setup.write_policy}: {number:,} of {len(trace.requests):,} requests")
        sources = world.ask(request)
        from_dram = sources.count(0)
        hits[0] += from_dram
        hits[1] += len(sources) - from_dram
    world.verify()
    counters = world.directory.counters
    world.expect(sum(hits) <= trace.hits_max, "more hits than references to known blocks")
    return Result(
        setup=setup,
        requests=len(trace.requests),
        asked=trace.asked,
        hits_dram=hits[0],
        hits_tier=hits[1],
        hits_max=trace.hits_max,
        tier_writes=counters["blocks_demoted"],
        debts_shed=counters["writeback_shed"] + counters["backlog_shed"],
        evicted=counters["evicted"],
        evicted_tier=world.tier.evicted if world.tier else 0,
        skipped=counters["skipped_no_room"],
        seconds=time.perf_counter() - began,
        problems=tuple(world.problems),
    )


def run(
    as_json: bool,
    path: Path,
    *,
    dram_share: float,
    tier_share: float,
    write_policies: Sequence[str],
    policy: str = "slru",
    commits: int = 1,
) -> int:
    """Replay a trace under each write policy, print, and return the exit code.

    Args:
        dram_share, tier_share: capacities as shares of the trace's unique blocks; no tier for 0.
        write_policies: one replay each.
    Returns:
        1 if something contradicted the model, whatever the figures.
    Raises:
        TierKVError: the file is no trace.
    """
    trace = load_trace(path)
    results = [
        replay(trace, setup_of(trace, dram_share, tier_share, name, policy=policy, commits=commits))
        for name in write_policies
    ]
    is_right = not any(result.problems for result in results)
    if as_json:
        print(json.dumps({
            "trace": trace.name,
            "requests": len(trace.requests),
            "blocks_asked": trace.asked,
            "blocks_unique": trace.unique,
            "hit_rate_max": round(trace.hits_max / trace.asked, 4),
            "verified": is_right,
            "runs": [_tree(result) for result in results],
        }))  # fmt: skip
    else:
        _print(trace, results)
    return 0 if is_right else 1


def setup_of(
    trace: Trace,
    dram_share: float,
    tier_share: float,
    write_policy: str,
    *,
    policy: str = "slru",
    commits: int = 1,
) -> Setup:
    """Capacities in blocks, from shares of the trace's unique blocks; at least one each."""
    dram = max(1, int(trace.unique * dram_share))
    tier = max(1, int(trace.unique * tier_share)) if tier_share else 0
    return Setup(dram, tier, write_policy, policy, commits)


def _tree(result: Result) -> dict[str, Any]:
    setup = result.setup
    return {
        "policy": setup.policy,
        "commits": setup.commits,
        "write_policy": setup.write_policy if setup.tier_blocks else None,
        "dram_blocks": setup.dram_blocks,
        "tier_blocks": setup.tier_blocks,
        "hit_rate": round(result.hit_rate, 4),
        "hits": result.hits,
        "hits_dram": result.hits_dram,
        "hits_tier": result.hits_tier,
        "tier_writes": result.tier_writes,
        "debts_shed": result.debts_shed,
        "evicted": result.evicted,
        "evicted_tier": result.evicted_tier,
        "skipped_no_room": result.skipped,
        "seconds": round(result.seconds, 1),
        "problems": list(result.problems),
    }


def _print(trace: Trace, results: Sequence[Result]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    first = results[0]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    for result in results:
        setup = result.setup
        table.add_column(setup.write_policy if setup.tier_blocks else "DRAM alone", justify="right")
    rows: tuple[tuple[str, Callable[[Result], str]], ...] = (
        ("hit rate", lambda r: f"{r.hit_rate:.4f}"),
        ("  from DRAM", lambda r: f"{r.hits_dram / r.asked:.4f}"),
        ("  from the tier", lambda r: f"{r.hits_tier / r.asked:.4f}"),
        ("written to the tier", lambda r: f"{r.tier_writes:,}"),
        ("debts shed", lambda r: f"{r.debts_shed:,}"),
        ("evicted from DRAM", lambda r: f"{r.evicted:,}"),
        ("evicted from the tier", lambda r: f"{r.evicted_tier:,}"),
        ("not stored, no slot", lambda r: f"{r.skipped:,}"),
        ("seconds", lambda r: f"{r.seconds:.1f}"),
    )
    for label, text in rows:
        table.add_row(label, *(text(result) for result in results))
    print(
        f"{trace.name}: {len(trace.requests):,} requests, {trace.asked:,} blocks asked, "
        f"{trace.unique:,} different"
    )
    print(
        f"{first.setup.policy}; DRAM {first.setup.dram_blocks:,} blocks, tier "
        f"{first.setup.tier_blocks:,} blocks; a cache without bounds hits "
        f"{trace.hits_max / trace.asked:.4f}"
    )
    Console().print(table)
    wrong = "; ".join(dict.fromkeys(p for result in results for p in result.problems))
    print(f"WRONG: {wrong}" if wrong else "verified")
