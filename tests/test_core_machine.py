"""Random calls against the directory, with a model of the bytes in the pool.

The model knows what every slot holds and who may still write to it. A hit must always be the right
bytes, whatever is late, lost, doubled or dead.
"""

from __future__ import annotations

import os

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.core.directory import Directory
from tierkv.core.namespace import State
from tierkv.core.values import Limits, Ready, Run

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


class Machine(RuleBasedStateMachine):
    @initialize(units=st.integers(1, 7), pinned=st.sampled_from([0.3, 1.0]))
    def start(self, units, pinned):
        self.directory = Directory(Limits(units * 24576, 24576, pinned, generation=3))
        self.now = 0.0
        self.bytes: dict[int, tuple] = {}  # offset -> (space, key) or a torn mark
        self.reads: dict[int, tuple] = {}  # lease -> (engine, space, keys, offsets)
        self.writes: dict[int, tuple] = {}  # lease -> (engine, space, {offset: key}, order)
        self.sent: list[tuple] = []  # messages on their way
        self.dead_letters: list[tuple] = []  # messages that will come again
        self.names = dict.fromkeys(ENGINES)
        self.taken: set[int] = set()  # leases whose growth the engine no longer listens to
        self.serial = 0
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
        return {offset for _, _, slots, _ in self.writes.values() for offset in slots}

    @rule(engine=engines, space=spaces, keys=prompts, count=st.integers(1, 7))
    def lookup(self, engine, space, keys, count):
        if not self.usable(engine, space):
            return
        found = self.directory.lookup(self.names[engine], space, keys[:count], self.now)
        offsets = found.offsets.tolist()
        for key, offset in zip(keys, offsets, strict=False):
            assert self.bytes[offset] == (space, key), "a hit with other bytes"
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
            self.writes[granted.lease] = (self.names[engine], space, slots, list(slots))

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), lost=st.booleans())
    def finish_write(self, data, lost):
        lease = data.draw(st.sampled_from(sorted(self.writes)))
        engine, space, slots, order = self.writes.pop(lease)
        good = [data.draw(st.integers(0, 5)) > 0 for _ in order]
        for offset, is_good in zip(order, good, strict=True):
            self.bytes[offset] = (space, slots[offset]) if is_good else ("torn",)
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
            assert self.bytes[offset] == (space, key), "bytes changed under a reader"
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

    @rule(space=st.sampled_from([*SPACES, None]))
    def purge(self, space):
        if space is None or space in self.directory.spaces:
            self.directory.purge(space)
            for s in SPACES if space is None else [space]:
                if s in self.directory.spaces:
                    assert not self.directory.spaces[s].index

    @rule(engine=engines)
    def close(self, engine):
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
        for event in self.directory.take_events():
            if not isinstance(event, Ready) or event.lease in self.taken:
                continue
            if event.lease in self.reads:
                engine, space, keys, known = self.reads[event.lease]
                offsets = event.offsets.tolist()
                assert offsets[: len(known)] == known, "a lease grows at its end"
                for key, offset in zip(keys, offsets, strict=False):
                    assert self.bytes[offset] == (space, key), "a push with other bytes"
                self.reads[event.lease] = (engine, space, keys, offsets)
        self.directory.check()
        for space in self.directory.spaces.values():
            for row in np.flatnonzero(space.state[: len(space.keys)] == State.RESIDENT):
                offset = int(space.offset[row])
                assert self.bytes[offset] == (space.id, space.keys[row]), "resident, wrong bytes"

    def teardown(self):
        """With every message delivered and every engine gone nothing is pinned or leased."""
        if not hasattr(self, "directory"):
            return
        for name in list(self.directory.engines):
            self.directory.end_engine(name)
        self.directory.check()
        assert not self.directory.leases
        for space in self.directory.spaces.values():
            assert space.pinned == 0
            assert not space.waiters
            assert set(space.state.tolist()) <= {State.FREE, State.RESIDENT}


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=int(os.environ.get("MACHINE_EXAMPLES", "250")),
    stateful_step_count=50,
    deadline=None,
    database=None,
    derandomize="MACHINE_EXAMPLES" in os.environ,
    print_blob=True,
    report_multiple_bugs=False,
    phases=[Phase.generate] if "MACHINE_EXAMPLES" in os.environ else list(Phase),
    suppress_health_check=list(HealthCheck),
)
