"""Random calls against the directory, with a model of the bytes in the pool and in the tiers.

The model knows what every slot holds and who may still write to it. A hit must always be the right
bytes, whatever is late, lost, doubled, damaged or dead; and never older than an acknowledged purge.
"""

from __future__ import annotations

import os

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.core.directory import Directory
from tierkv.core.eviction.arc import Arc
from tierkv.core.eviction.lru import Lru
from tierkv.core.eviction.slru import Slru
from tierkv.core.namespace import State
from tierkv.core.values import Limits, Op, Ready, Run, TaskEnded, TierLimits
from tierkv.types import Outcome

SPACES = [b"A" * 32, b"B" * 32]
SLOT = {SPACES[0]: 8192, SPACES[1]: 12288}
PROMPTS = [[bytes([p, i]) for i in range(7)] for p in range(3)]
# Prompts 1 and 2 share their first three blocks with prompt 0.
PROMPTS[1][:3] = PROMPTS[0][:3]
PROMPTS[2][:3] = PROMPTS[0][:3]
ENGINES = ["a", "b"]

prompts = st.sampled_from(PROMPTS)
spaces = st.sampled_from(SPACES)
engines = st.sampled_from(ENGINES)
POLICIES = ["write_back", "write_through", "write_through_selective"]
tier_limits = st.builds(
    TierLimits,
    name=st.sampled_from(["fs", "object"]),
    write_policy=st.sampled_from(POLICIES),
    is_indexed=st.booleans(),
    read_threads=st.integers(1, 3),
    write_threads=st.integers(1, 2),
    backlog_max=st.sampled_from([12288, 1 << 20]),
)
numbers = st.integers(0, 1 << 16)
rarely = st.integers(0, 3)  # what destroys everything acts once in four times
LUCKY = (1 << 70) - 1


class Machine(RuleBasedStateMachine):
    @initialize(
        units=st.integers(1, 7),
        pinned=st.sampled_from([0.3, 1.0]),
        promoted=st.sampled_from([0.3, 1.0]),
        tiers=st.lists(tier_limits, max_size=2),
        make_policy=st.sampled_from([Slru, Lru, Arc]),
    )
    def start(self, units, pinned, promoted, tiers, make_policy):
        limits = Limits(units * 24576, 24576, pinned, 3, promote_share_max=promoted)
        self.directory = Directory(limits, tiers, make_policy)
        self.tiering = self.directory.tiering
        self.now = 0.0
        self.bytes: dict[int, tuple] = {}  # offset -> (space, key, version) or a torn mark
        self.version = dict.fromkeys(SPACES, 0)  # purges asked for
        self.purged = dict.fromkeys(SPACES, 0)  # purges acknowledged
        self.purges: dict[int, tuple] = {}  # task -> (spaces, their versions)
        self.store = [{} for _ in tiers]  # per tier: (space, key) -> content
        self.jobs: list = []  # handed to the processes that serve
        self.zombies: list[tuple] = []  # (tier, epoch, its jobs): killed, not gone
        for tier, limit in enumerate(tiers):
            self.tiering.started(tier, limit.is_indexed)
        self.reads: dict[int, tuple] = {}  # lease -> (engine, space, keys, offsets)
        self.began: dict[int, int] = {}  # lease -> version of its namespace
        self.writes: dict[int, tuple] = {}  # lease -> (engine, space, {offset: key}, order)
        self.sent: list[tuple] = []  # messages on their way
        self.dead_letters: list[tuple] = []  # messages that will come again
        self.names = dict.fromkeys(ENGINES)
        self.taken: set[int] = set()  # leases whose growth the engine no longer listens to
        self.serial = 0
        self.done: dict[int, int] = {}  # job -> keys with an outcome
        for engine in ENGINES:
            self.open(engine)

    def open(self, engine):
        self.serial += 1
        name = f"{engine}{self.serial}"
        self.names[engine] = name
        self.directory.open_engine(name)
        for space in SPACES:
            self.directory.attach(name, space, SLOT[space])

    def usable(self, engine, space):
        name = self.names[engine]
        known = self.directory.engines.get(name)
        return known is not None and not known.is_closed and space in self.directory.spaces

    def ghosts(self):
        """Offsets that some living process may still write."""
        jobs = self.jobs + [job for *_, jobs in self.zombies for job in jobs]
        reads = {offset for job in jobs if job.op is Op.READ for offset in job.offsets}
        return reads | {offset for _, _, slots, _ in self.writes.values() for offset in slots}

    def is_right(self, offset, space, key):
        """Whether a slot holds this block, stored after the last acknowledged purge."""
        content = self.bytes[offset]
        return content[:2] == (space, key) and content[2] >= self.purged[space]

    @rule(engine=engines, space=spaces, keys=prompts, count=st.integers(1, 7))
    def lookup(self, engine, space, keys, count):
        if not self.usable(engine, space):
            return
        found = self.directory.lookup(self.names[engine], space, keys[:count], self.now)
        offsets = found.offsets.tolist()
        for key, offset in zip(keys, offsets, strict=False):
            assert self.is_right(offset, space, key), "a hit with other bytes"
        assert len(offsets) + found.pending <= count
        if found.lease:
            self.reads[found.lease] = (self.names[engine], space, keys[:count], offsets)

    @rule(engine=engines, space=spaces, keys=prompts, start=st.integers(0, 5), n=st.integers(1, 4))
    def reserve(self, engine, space, keys, start, n):
        if not self.usable(engine, space):
            return
        wanted = keys[start : start + n]
        run = Run(keys[start - 1] if start else None, wanted)
        granted = self.directory.reserve(self.names[engine], space, [run], self.now)
        slots = {}
        for key, offset in zip(wanted, granted.offsets.tolist(), strict=True):
            if offset < 0:
                continue
            readers = {o for *_, offsets in self.reads.values() for o in offsets}
            assert offset not in readers, "a slot was granted under a reader"
            assert offset not in self.ghosts(), "a slot was granted under a writer"
            self.bytes[offset] = ("torn",)
            slots[offset] = key
        assert bool(slots) == bool(granted.lease)
        if slots:
            order = list(slots)
            self.writes[granted.lease] = (self.names[engine], space, slots, order)
            self.began[granted.lease] = self.version[space]

    @rule(engine=engines, space=spaces, keys=prompts, start=st.sampled_from([0, 0, 3]))
    def store(self, engine, space, keys, start):
        """A whole store without any mishap, so that there is something to lose."""
        before = set(self.writes)
        self.reserve.__wrapped__(self, engine, space, keys, start, 4)
        for lease in sorted(set(self.writes) - before):
            name, space, slots, order = self.writes.pop(lease)
            for offset in order:
                self.bytes[offset] = (space, slots[offset], self.began[lease])
            self.apply((name, "commit", lease, [True] * len(order)))

    @rule(jobs=st.integers(1, 8))
    def work(self, jobs):
        """The tiers do what they are asked to, without any mishap."""
        self.take_jobs.__wrapped__(self)
        for job in self.jobs[:jobs]:
            self.finish(job, LUCKY, False)

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), lost=st.booleans())
    def finish_write(self, data, lost):
        lease = data.draw(st.sampled_from(sorted(self.writes)))
        engine, space, slots, order = self.writes.pop(lease)
        good = [data.draw(st.integers(0, 5)) > 0 for _ in order]
        for offset, is_good in zip(order, good, strict=True):
            content = (space, slots[offset], self.began[lease])
            self.bytes[offset] = content if is_good else ("torn",)
        self.sent.append((engine, "commit", lease, good))

    @precondition(lambda self: self.reads)
    @rule(data=st.data(), keep=st.integers(0, 7))
    def trim(self, data, keep):
        lease = data.draw(st.sampled_from(sorted(self.reads)))
        engine, space, keys, offsets = self.reads[lease]
        self.reads[lease] = (engine, space, keys, offsets[:keep])
        if keep == 0 or not offsets[:keep]:
            del self.reads[lease]
            keep = 0
        self.taken.add(lease)
        self.sent.append((engine, "trim", lease, keep))

    @precondition(lambda self: self.reads)
    @rule(data=st.data())
    def finish_read(self, data):
        lease = data.draw(st.sampled_from(sorted(self.reads)))
        engine, space, keys, offsets = self.reads.pop(lease)
        for key, offset in zip(keys, offsets, strict=False):
            assert self.bytes[offset][:2] == (space, key), "bytes changed under a reader"
        self.sent.append((engine, "release", lease, None))

    @precondition(lambda self: self.sent)
    @rule(times=st.sampled_from([1, 1, 2]), data=st.data())
    def deliver(self, times, data):
        # Each engine's messages arrive in order; engines overtake each other.
        senders = sorted({m[0] for m in self.sent})
        sender = data.draw(st.sampled_from(senders))
        message = next(m for m in self.sent if m[0] == sender)
        self.sent.remove(message)
        for _ in range(times):
            self.apply(message)
        self.dead_letters = [*self.dead_letters, message][-5:]

    @precondition(lambda self: self.dead_letters)
    @rule(data=st.data())
    def deliver_late(self, data):
        self.apply(data.draw(st.sampled_from(self.dead_letters)))

    def apply(self, message):
        engine, verb, lease, argument = message
        known = self.directory.engines.get(engine)
        if known is None or known.is_closed:
            return  # the server does not know this session any more
        if verb == "commit":
            self.directory.commit(lease, argument)
        elif verb == "trim":
            self.directory.trim(lease, argument)
        else:
            self.directory.release(lease)

    @rule(space=spaces, keys=prompts)
    def touch(self, space, keys):
        if space in self.directory.spaces:
            self.directory.touch(space, keys, self.now)

    @rule(space=st.sampled_from([*SPACES, None]), chance=rarely)
    def purge(self, space, chance):
        if chance:
            return
        if space is None or space in self.directory.spaces:
            dropped = self.directory.purge(space)
            spaces = SPACES if space is None else [space]
            for s in spaces:
                self.version[s] += 1
                if s in self.directory.spaces:
                    assert not self.directory.spaces[s].index
            tiers = range(len(self.store))
            task = self.tiering.purge(space, tiers, None, dropped, self.now)
            self.purges[task] = (spaces, [self.version[s] for s in spaces])

    @rule(space=spaces, keys=prompts, engine=engines)
    def lose_dram(self, space, keys, engine):
        """DRAM alone is emptied; what the tiers got comes back from there."""
        self.work.__wrapped__(self, 8)
        if space in self.directory.spaces:
            self.directory.purge(space)
            self.lookup.__wrapped__(self, engine, space, keys, 7)
            self.take_jobs.__wrapped__(self)

    @rule(age=st.sampled_from([0.0, 1.0]), chance=rarely)
    def purge_old(self, age, chance):
        if not chance:
            self.directory.purge(None, age, self.now)

    # ---- tiers ----

    @rule()
    def take_jobs(self):
        for job in self.tiering.take_jobs(self.now):
            if job.op is Op.READ:
                assert not self.ghosts() & set(job.offsets), "a read into a slot of somebody else"
                for offset in job.offsets:
                    self.bytes[offset] = ("torn",)
            self.jobs.append(job)

    @precondition(lambda self: self.jobs)
    @rule(which=numbers, luck=numbers, part=st.booleans())
    def finish_job(self, which, luck, part):
        self.finish(self.jobs[which % len(self.jobs)], luck, part)

    def finish(self, job, luck, part):
        if job.op in (Op.PURGE, Op.CHECK):
            self.jobs.remove(job)
            self.finish_on_store(job)
            return
        done = self.done.get(job.id, 0)
        end = done + 1 if part else len(job.keys)
        outcomes = [self.do(job, at, (luck >> at) % 4 == 0) for at in range(done, end)]
        self.done[job.id] = end
        if end == len(job.keys):
            self.jobs.remove(job)
        self.tiering.outcomes(job.tier, job.id, outcomes, self.now)

    def do(self, job, at, is_unlucky):
        """One operation, with what the tier says of it. A damaged block is never OK."""
        name, store = (job.namespace, job.keys[at]), self.store[job.tier]
        if is_unlucky:
            return Outcome.FAILED
        if job.op is Op.READ:
            if name not in store:
                return Outcome.MISSING
            self.bytes[job.offsets[at]] = store[name]
        elif job.op is Op.WRITE:
            content = self.bytes[job.offsets[at]]
            assert content[:2] == name, "other bytes were demoted"
            store.setdefault(name, content)
            self.tell(job.tier, name, True)
        elif job.op is Op.PROBE:
            return Outcome.OK if name in store else Outcome.MISSING
        elif job.op is Op.DROP:
            self.lose(job.tier, name)
        return Outcome.OK

    def finish_on_store(self, job):
        gone = [n for n in self.store[job.tier] if job.namespace in (None, n[0])]
        if job.op is Op.PURGE:
            for name in gone:
                self.lose(job.tier, name)
        self.tiering.store_ended(job.tier, job.id, len(gone), [], self.now)

    def tell(self, tier, name, is_added):
        if self.tiering.lanes[tier].limits.is_indexed:
            self.tiering.changed(tier, name[0], [name[1]], is_added)

    def lose(self, tier, name):
        if self.store[tier].pop(name, None) is not None:
            self.tell(tier, name, False)

    @precondition(lambda self: any(self.store))
    @rule(which=numbers, tier=st.integers(0, 1))
    def tier_evicts(self, which, tier):
        if tier < len(self.store) and self.store[tier]:
            self.lose(tier, list(self.store[tier])[which % len(self.store[tier])])

    @precondition(lambda self: any(self.store))
    @rule(which=numbers, tier=st.integers(0, 1))
    def somebody_deletes(self, which, tier):
        """Nobody told the tier, so it does not tell us."""
        if tier < len(self.store) and self.store[tier]:
            names = list(self.store[tier])
            del self.store[tier][names[which % len(names)]]

    @rule(tier=st.integers(0, 1), chance=rarely)
    def kill_process(self, tier, chance):
        if not chance and tier < len(self.store) and self.tiering.lanes[tier].is_up:
            epoch = self.tiering.process_lost(tier, self.now)
            mine = [job for job in self.jobs if job.tier == tier]
            self.jobs = [job for job in self.jobs if job.tier != tier]
            self.zombies.append((tier, epoch, mine))

    @precondition(lambda self: self.zombies)
    @rule(which=numbers)
    def reap_process(self, which):
        tier, epoch, jobs = self.zombies.pop(which % len(self.zombies))
        for job in jobs:
            for offset in job.offsets if job.op is Op.READ else ():
                self.bytes[offset] = ("torn",)  # until now it may have written
        self.tiering.process_gone(tier, epoch, self.now)

    @rule(tier=st.integers(0, 1))
    def start_process(self, tier):
        if tier < len(self.store) and not self.tiering.lanes[tier].is_up:
            is_indexed = self.tiering.lanes[tier].limits.is_indexed
            self.tiering.started(tier, False)
            for space, key in self.store[tier] if is_indexed else ():
                self.tiering.changed(tier, space, [key], True)
            self.tiering.started(tier, is_indexed)

    @rule(dt=st.sampled_from([0.0, 0.5, 2.5]))
    def tick(self, dt):
        self.now += dt
        self.tiering.tick(self.now)
        self.tiering.hung(self.now)

    @rule(engine=engines, chance=rarely)
    def close(self, engine, chance):
        if chance:
            return
        name = self.names[engine]
        known = self.directory.engines.get(name)
        if known is not None and not known.is_closed:
            self.directory.close_engine(name)

    @rule(engine=engines)
    def ghost_write(self, engine):
        """A process whose session is gone still copies into its slots."""
        for owner, _, slots, _ in self.writes.values():
            if owner == self.names[engine]:
                for offset in slots:
                    self.bytes[offset] = ("torn",)

    @rule(engine=engines)
    def die_and_return(self, engine):
        name = self.names[engine]
        self.writes = {k: v for k, v in self.writes.items() if v[0] != name}
        self.reads = {k: v for k, v in self.reads.items() if v[0] != name}
        self.sent = [m for m in self.sent if m[0] != name]
        self.directory.end_engine(name)
        self.open(engine)

    @rule(engine=engines, data=st.data())
    def reconnect(self, engine, data):
        """The engine lost its connection, gave up part of its leases and vouches for the rest."""
        name = self.names[engine]
        known = self.directory.engines.get(name)
        if known is None or known.is_closed:
            return
        mine = sorted(k for k, v in {**self.reads, **self.writes}.items() if v[0] == name)
        held = [k for k in mine if data.draw(st.booleans())]
        self.reads = {k: v for k, v in self.reads.items() if v[0] != name or k in held}
        self.writes = {k: v for k, v in self.writes.items() if v[0] != name or k in held}
        self.sent = [m for m in self.sent if m[0] != name]
        self.directory.keep_leases(name, held)

    @rule(dt=st.sampled_from([0.0, 1.0, 120.0]))
    def wait(self, dt):
        self.now += dt

    @invariant()
    def consistent(self):
        if not hasattr(self, "directory"):
            return
        self.read_events()
        self.directory.check()
        for space in self.directory.spaces.values():
            for row in np.flatnonzero(space.state[: len(space.keys)] == State.RESIDENT):
                offset = int(space.offset[row])
                assert self.is_right(offset, space.id, space.keys[row]), "resident, wrong bytes"

    def read_events(self):
        for event in self.directory.take_events():
            if isinstance(event, TaskEnded) and event.task in self.purges:
                for space, version in zip(*self.purges.pop(event.task), strict=True):
                    self.purged[space] = max(self.purged[space], version)
            if not isinstance(event, Ready) or event.lease in self.taken:
                continue
            if event.lease in self.reads:
                engine, space, keys, known = self.reads[event.lease]
                offsets = event.offsets.tolist()
                assert offsets[: len(known)] == known, "a lease grows at its end"
                for key, offset in zip(keys, offsets, strict=False):
                    assert self.bytes[offset][:2] == (space, key), "a push with other bytes"
                assert len(event.sources) == len(offsets)
                self.reads[event.lease] = (engine, space, keys, offsets)

    def teardown(self):
        """With every message delivered and every engine gone nothing is pinned or leased."""
        if not hasattr(self, "directory"):
            return
        for name in list(self.directory.engines):
            self.directory.end_engine(name)
        self.end_all_jobs()
        self.read_events()
        assert not self.purges, "a purge was never acknowledged"
        self.directory.check()
        assert not self.directory.leases
        for space in self.directory.spaces.values():
            assert space.pinned == 0
            assert not space.waiters
            assert set(space.state.tolist()) <= {State.FREE, State.RESIDENT}

    def end_all_jobs(self):
        while self.zombies:
            self.reap_process.__wrapped__(self, 0)
        for tier in range(len(self.store)):
            self.start_process.__wrapped__(self, tier)
        for _ in range(1_000):
            self.now += 40.0  # past every pause
            self.tiering.tick(self.now)
            self.take_jobs.__wrapped__(self)
            if not self.jobs:
                break
            while self.jobs:
                self.finish(self.jobs[0], LUCKY, False)
        assert not self.jobs, "the tiers never come to rest"
        self.directory.check()
        assert self.tiering.promoter.bytes == 0
        for space in self.directory.spaces.values():
            assert not space.moving.any()


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=int(os.environ.get("MACHINE_EXAMPLES", "400")),
    stateful_step_count=80,
    deadline=None,
    database=None,
    derandomize="MACHINE_EXAMPLES" in os.environ,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.generate] if "MACHINE_EXAMPLES" in os.environ else list(Phase),
    suppress_health_check=list(HealthCheck),
)
