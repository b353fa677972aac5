"""`Server.turn` driven by encoded messages, hand-made locks and hand-made time; then a simulation.

The simulation keeps a model of the bytes of every slot. Whatever is late, lost, doubled or dead, a
hit must be the right bytes.
"""

from __future__ import annotations

import json
import os
import pickle
import random
from collections import Counter, deque

import pytest

from tests.core_world import SLOT_BYTES, SPACE, keys_of
from tierkv.core.directory import Directory
from tierkv.core.values import Limits
from tierkv.pool import Held
from tierkv.service import wire
from tierkv.service.server import SESSIONS_MAX, Server, ServerFacts
from tierkv.service.stats import collect

QUARANTINE_S = 5.0
GENERATION = 7
NODE = '{"dram": 1}'


class Desk:
    """A server with `slots` slots; time and locks are whatever a test says they are."""

    def __init__(self, slots=4, units=1, pinned_share_max=1.0, old=(), strict=False):
        pool = SLOT_BYTES * slots
        self.directory = Directory(Limits(pool, pool // units, pinned_share_max, GENERATION))
        facts = ServerFacts("/pool", pool, GENERATION, NODE, strict, QUARANTINE_S)
        self.server = Server(self.directory, facts, old)
        self.now = 0.0
        self.held = {}
        self.pushed = {}

    def turn(self, frames=(), look=False):
        """One turn; returns (peer, message) pairs."""
        out = self.server.turn(self.now, list(frames), self.held if look else None)
        return [(peer, wire.decode_reply(frame)) for peer, frame in out]

    def pass_time(self, seconds):
        """Let time pass, looking at the locks before and after."""
        self.turn(look=True)
        self.now += seconds
        self.turn(look=True)

    def peer(self, engine="e", name=None, **hello):
        """A connected peer; an engine has its session lock and the namespace attached."""
        peer = Peer(self, engine, name)
        if engine:
            self.held.setdefault(engine, Held(has_session=True))
        assert isinstance(peer.hello(**hello), wire.Welcome)
        if engine:
            assert isinstance(peer.attach(), wire.Done)
        return peer

    def pinned(self):
        return sum(space.pinned for space in self.directory.spaces.values())

    def count(self, name):
        return self.directory.counters[name]


class Peer:
    """One connection of an engine or, without a name, of an administrator."""

    def __init__(self, desk, engine, name=None):
        self.desk, self.engine, self.seq = desk, engine, 0
        self.name = (name or f"peer-{engine}").encode()
        self.pushes = []

    def frame(self, make, *args):
        self.seq += 1
        return self.name, wire.encode(make(self.seq, *args))

    def raw(self, *frames):
        """Send frames as they are; returns our replies, pushes are kept in `pushes`."""
        replies = []
        for peer, message in self.desk.turn(frames):
            if isinstance(message, wire.ReadyPush | wire.RecallPush):
                self.desk.pushed.setdefault(peer, []).append(message)
            else:
                assert peer == self.name, "a reply goes to the one who asked"
                replies.append(message)
        return replies

    def say(self, make, *args):
        """Send one message; its only reply, or None."""
        replies = self.raw(self.frame(make, *args))
        assert len(replies) <= 1
        return replies[0] if replies else None

    def hello(self, is_return=False, held=(), node="", versions=(2, 2)):
        return self.say(wire.Hello, *versions, self.engine, is_return, list(held), node)

    def attach(self, space=SPACE, slot_bytes=SLOT_BYTES, is_private=False):
        return self.say(wire.Attach, space, slot_bytes, "label", is_private)

    def lookup(self, text):
        return self.say(wire.Lookup, SPACE, 2, b"".join(keys_of(text)))

    def reserve(self, text, after=""):
        runs = [(b"".join(keys_of(after)), len(text))]
        return self.say(wire.Reserve, SPACE, 2, b"".join(keys_of(text)), runs)

    def commit(self, lease, flags):
        return self.say(wire.Commit, lease, bytes(flags))

    def release(self, *leases):
        return self.say(wire.Release, list(leases))

    def ping(self):
        return self.say(wire.Ping)

    def store(self, text, after=""):
        granted = self.reserve(text, after)
        if granted.lease:
            self.commit(granted.lease, [1] * sum(o >= 0 for o in offsets_of(granted)))
        return sum(o >= 0 for o in offsets_of(granted))


def offsets_of(reply):
    return wire.unpack_offsets(reply.offsets).tolist()


@pytest.fixture
def desk():
    desk = Desk()
    yield desk
    desk.directory.check()


# ---- sessions ----------------------------------------------------------------------------------


def test_a_request_before_hello_is_answered_and_does_nothing(desk):
    stranger = Peer(desk, "e")
    answer = stranger.ping()
    assert (answer.to, answer.code) == (1, "closed")
    assert desk.server.engines_known == 0


def test_hello_tells_generation_pool_and_node_configuration(desk):
    desk.held["e"] = Held(has_session=True)
    welcome = Peer(desk, "e").hello()
    assert (welcome.generation, welcome.pool, welcome.node) == (GENERATION, "/pool", NODE)
    assert not welcome.must_quiesce
    assert welcome.pid == os.getpid()


def test_every_request_is_answered_once_errors_included(desk):
    engine = desk.peer()
    other = b"T" * 32
    requests = [
        (wire.Attach, other, SLOT_BYTES, "", False),
        (wire.Attach, SPACE, SLOT_BYTES + 1, "", False),
        (wire.Attach, b"U" * 32, 1 << 40, "", False),
        (wire.Lookup, SPACE, 2, b"a\0b\0"),
        (wire.Lookup, SPACE, 2, b""),
        (wire.Reserve, SPACE, 2, b"a\0", [(b"", 1)]),
        (wire.Reserve, SPACE, 2, b"", []),
        (wire.Ping,),
        (wire.Stats,),
        (wire.Check,),
        (wire.Purge, ""),
        (wire.Purge, "abc"),
    ]
    for make, *args in requests:
        reply = engine.say(make, *args)
        assert reply is not None, make
        assert reply.to == engine.seq


def test_one_way_messages_are_not_answered(desk):
    engine = desk.peer()
    messages = [
        (wire.Commit, 1, b""), (wire.Release, [1]), (wire.Trim, 1, 1), (wire.Abandon, 1),
        (wire.Touch, SPACE, 2, b"a\0"), (wire.Outcome, 1, [2], 3), (wire.Quiesced, 1), (wire.Bye,),
    ]  # fmt: skip
    for make, *args in messages:
        assert engine.say(make, *args) is None


def test_a_refused_layout_says_why_and_leaves_the_session_open(desk):
    engine = desk.peer()
    answer = engine.attach(slot_bytes=SLOT_BYTES * 2)
    assert answer.code == "refused"
    assert str(SLOT_BYTES) in answer.message
    assert engine.ping().to == engine.seq


def test_a_private_layout_is_refused_to_other_engines(desk):
    engine, other = desk.peer("e"), desk.peer("f")
    assert isinstance(engine.attach(b"P" * 32, is_private=True), wire.Done)
    assert "private" in other.attach(b"P" * 32).message


@pytest.mark.parametrize("versions", [(0, 1), (4, 9)])
def test_another_protocol_version_is_refused_with_both_ranges_named(desk, versions):
    answer = Peer(desk, "e").hello(versions=versions)
    assert answer.code == "version"
    assert f"{wire.VERSION_MIN} to {wire.VERSION_MAX}" in answer.message
    assert f"{versions[0]} to {versions[1]}" in answer.message
    assert desk.server.engines_known == 0


def test_a_second_engine_of_the_same_id_is_refused(desk):
    first = desk.peer()
    assert Peer(desk, "e", "impostor").hello().code == "refused"
    assert first.ping().to == first.seq


def test_node_strict_refuses_other_node_configurations_of_engines_only():
    desk = Desk(strict=True)
    desk.held["e"] = Held(has_session=True)
    refusal = Peer(desk, "e").hello(node="{}")
    assert refusal.code == "refused"
    assert "node_strict" in refusal.message
    assert isinstance(Peer(desk, "e").hello(node=NODE), wire.Welcome)
    assert isinstance(Peer(desk, "", "admin").hello(node="{}"), wire.Welcome)


def test_without_node_strict_other_node_configurations_are_served(desk):
    assert isinstance(desk.peer(node="{}").ping(), wire.Done)


def test_too_many_engines_are_refused_with_the_number(desk):
    peers = [Peer(desk, f"engine{i}", f"peer-{i}") for i in range(SESSIONS_MAX)]
    desk.turn([peer.frame(wire.Hello, 2, 2, peer.engine, False, [], "") for peer in peers])
    answer = Peer(desk, "one-more", "one-more").hello()
    assert answer.code == "refused"
    assert str(SESSIONS_MAX) in answer.message


def test_forgotten_administrators_never_keep_an_engine_out(desk):
    frames = [Peer(desk, "", f"admin-{i}").frame(wire.Hello, 2, 2, "", False, [], "")
              for i in range(SESSIONS_MAX)]  # fmt: skip
    desk.turn(frames)
    assert isinstance(Peer(desk, "e", "engine").hello(), wire.Welcome)


# ---- sequence numbers --------------------------------------------------------------------------


def test_a_doubled_request_is_handled_once(desk):
    engine = desk.peer()
    engine.store("a")
    frame = engine.frame(wire.Lookup, SPACE, 2, b"a\0")
    (found,) = engine.raw(frame, frame)
    assert desk.pinned() == 1
    assert set(desk.directory.leases) == {found.lease}
    assert desk.count("duplicate_messages") == 1


def test_an_older_number_is_ignored(desk):
    engine = desk.peer()
    early = engine.frame(wire.Reserve, SPACE, 2, b"a\0", [(b"", 1)])
    assert engine.ping()
    assert engine.raw(early) == []
    assert not desk.directory.leases


def test_a_doubled_release_does_not_count_as_unknown(desk):
    engine = desk.peer()
    engine.store("a")
    lease = engine.lookup("a").lease
    frame = engine.frame(wire.Release, [lease])
    engine.raw(frame, frame)
    assert desk.count("unknown_leases") == 0
    assert desk.pinned() == 0


def test_a_doubled_hello_of_a_returning_engine_ends_no_lease_granted_since(desk):
    desk.peer("w").store("a")
    engine = Peer(desk, "e")
    desk.held["e"] = Held(has_session=True)
    hello = engine.frame(wire.Hello, 2, 2, "e", True, [], "")
    engine.raw(hello)
    engine.attach()
    engine.lookup("a")
    engine.raw(hello)
    assert desk.pinned() == 1, "a copy may be running on this lease"


def test_a_doubled_first_hello_is_not_a_second_engine(desk):
    engine = Peer(desk, "e")
    hello = engine.frame(wire.Hello, 2, 2, "e", False, [], "")
    replies = engine.raw(hello, hello)
    assert not any(isinstance(reply, wire.Failed) for reply in replies)


def test_a_connection_cannot_change_its_engine(desk):
    """Else the first engine would stay open for ever, and with it its leases."""
    engine = desk.peer("e")
    engine.reserve("ab")
    desk.held["f"] = Held(has_session=True)
    engine.engine = "f"
    engine.hello()
    desk.held.clear()
    desk.pass_time(QUARANTINE_S)
    desk.pass_time(QUARANTINE_S)
    assert desk.server.engines_known == 0
    assert not desk.directory.leases


# ---- namespaces end ----------------------------------------------------------------------------


def test_detach_of_a_private_namespace_purges_it(desk):
    engine = desk.peer("e")
    private = b"P" * 32
    engine.say(wire.Attach, private, SLOT_BYTES, "", True)
    keys = b"a\0"
    engine.say(wire.Reserve, private, 2, keys, [(b"", 1)])
    lease = next(iter(desk.directory.leases))
    engine.say(wire.Commit, lease, b"\1")
    assert len(desk.directory.spaces[private].index) == 1
    engine.say(wire.Detach, private)
    assert not desk.directory.spaces[private].index
    assert not desk.directory.spaces[private].users


def test_a_hundred_resets_of_one_engine_starve_nobody(desk):
    """Each reset is a fresh private namespace; the old one must give its extent back."""
    engine = desk.peer("e")
    for at in range(100):
        private = bytes([at]) * 32
        engine.say(wire.Attach, private, SLOT_BYTES, "", True)
        engine.say(wire.Reserve, private, 2, b"a\0", [(b"", 1)])
        (lease,) = desk.directory.leases
        engine.say(wire.Commit, lease, b"\1")
        assert len(desk.directory.spaces[private].index) == 1, at
        engine.say(wire.Detach, private)
        desk.now += 10.0
    desk.directory.check()


# ---- abandon -----------------------------------------------------------------------------------


def test_abandon_takes_a_read_grant_back(desk):
    engine = desk.peer()
    engine.store("ab")
    engine.lookup("ab")
    asked = engine.seq
    engine.say(wire.Abandon, asked)
    assert (desk.pinned(), len(desk.directory.leases)) == (0, 0)
    assert desk.count("abandoned") == 1


def test_abandon_takes_a_write_grant_back_and_frees_its_slots(desk):
    engine = desk.peer()
    engine.reserve("abcd")
    engine.say(wire.Abandon, engine.seq)
    assert not desk.directory.leases
    assert engine.lookup("abcd").lease == 0
    assert engine.store("wxyz") == 4


def test_abandon_of_a_grant_that_ended_changes_nothing(desk):
    engine = desk.peer()
    granted = engine.reserve("a")
    asked = engine.seq
    engine.commit(granted.lease, [1])
    engine.say(wire.Abandon, asked)
    engine.say(wire.Abandon, 99)
    assert len(offsets_of(engine.lookup("a"))) == 1
    assert desk.count("abandoned") == 0


def test_a_thousand_lookups_each_abandoned_leave_no_pins(desk):
    engine = desk.peer()
    engine.store("abc")
    engine.reserve("d", after="c")
    for _ in range(1_000):
        assert engine.lookup("abcd").lease
        engine.say(wire.Abandon, engine.seq)
    assert desk.count("abandoned") == 1_000
    assert len(desk.directory.leases) == 1, "the write lease"
    assert desk.pinned() == 1


def test_a_thousand_lookups_abandoned_in_one_turn_leave_no_pins(desk):
    engine = desk.peer()
    engine.store("abc")
    frames = []
    for _ in range(1_000):
        frames.append(engine.frame(wire.Lookup, SPACE, 2, b"a\0b\0c\0"))
        frames.append(engine.frame(wire.Abandon, engine.seq))
    assert len(engine.raw(*frames)) == 1_000
    assert (desk.pinned(), len(desk.directory.leases)) == (0, 0)


# ---- leases ------------------------------------------------------------------------------------


def test_unknown_foreign_and_repeated_leases_are_counted_and_the_count_comes_back(desk):
    engine, other = desk.peer("e"), desk.peer("f")
    engine.store("a")
    read, write = engine.lookup("a").lease, engine.reserve("b").lease
    assert other.ping().ignored == 0
    other.release(read, 1 << 60)
    other.say(wire.Trim, read, 0)
    other.commit(write, [1])
    assert other.ping().ignored == 4
    engine.release(read)
    engine.release(read)
    assert engine.lookup("b").ignored == 5


def test_a_foreign_lease_stays_what_it_is(desk):
    engine, other = desk.peer("e"), desk.peer("f")
    engine.store("a")
    read, write = engine.lookup("a").lease, engine.reserve("b").lease
    other.release(read)
    other.say(wire.Trim, read, 0)
    other.commit(write, [0])
    assert desk.pinned() == 2
    assert set(desk.directory.leases) == {read, write}


def test_a_growing_lease_is_told_when_its_blocks_are_there(desk):
    writer, reader = desk.peer("w"), desk.peer("r")
    granted = writer.reserve("ab")
    found = reader.lookup("abc")
    assert (offsets_of(found), found.pending) == ([], 2)
    writer.commit(granted.lease, [1, 1])
    (push,) = desk.pushed[reader.name]
    assert (push.lease, push.pending) == (found.lease, 0)
    assert offsets_of(push) == offsets_of(granted)
    assert desk.pinned() == 2


def test_a_growing_lease_is_told_when_its_writer_fails(desk):
    writer, reader = desk.peer("w"), desk.peer("r")
    writer.store("a")
    granted = writer.reserve("bc", after="a")
    assert reader.lookup("abc").pending == 2
    writer.commit(granted.lease, [0, 1])
    (push,) = desk.pushed[reader.name]
    assert (len(offsets_of(push)), push.pending) == (1, 0)


def test_a_growing_lease_ends_growing_at_the_first_block_that_fails(desk):
    writer, other, reader = desk.peer("w"), desk.peer("o"), desk.peer("r")
    granted = writer.reserve("a")
    other.reserve("b", after="a")
    assert reader.lookup("ab").pending == 2
    writer.commit(granted.lease, [0])
    (push,) = desk.pushed[reader.name]
    assert (offsets_of(push), push.pending) == ([], 0), "what is behind can never be reached"


def test_the_closed_session_of_a_writer_ends_the_wait_of_its_readers(desk):
    writer, reader = desk.peer("w"), desk.peer("r")
    writer.reserve("a")
    reader.lookup("a")
    reader.raw((writer.name, wire.encode(wire.Bye(writer.seq + 1))))
    (push,) = desk.pushed[reader.name]
    assert (offsets_of(push), push.pending) == ([], 0)


def test_pushes_go_to_the_session_that_the_engine_has_now(desk):
    writer, reader = desk.peer("w"), desk.peer("r")
    granted = writer.reserve("a")
    lease = reader.lookup("a").lease
    desk.peer("r", "again", is_return=True, held=[lease])
    writer.commit(granted.lease, [1])
    assert set(desk.pushed) == {b"again"}


def test_the_youngest_waiting_lease_is_recalled_when_too_much_is_pinned():
    desk = Desk(pinned_share_max=0.5)
    first, second = desk.peer("e"), desk.peer("f")
    first.store("ab")
    first.store("c")
    first.lookup("ab")
    young = second.lookup("c").lease
    assert desk.pushed == {second.name: [wire.RecallPush(young)]}


def test_a_layout_that_gives_an_extent_up_keeps_no_block_that_cannot_be_reached():
    desk = Desk(slots=8, units=4)
    engine, other = desk.peer("e"), desk.peer("f")
    for text, after in (("ab", ""), ("cd", "b"), ("ef", "d"), ("gh", "f")):
        assert engine.store(text, after) == 2  # an extent each, the head's the coldest
    other.attach(b"T" * 32)
    granted = other.say(wire.Reserve, b"T" * 32, 2, b"x\0y\0", [(b"", 2)])
    assert min(offsets_of(granted)) >= 0
    desk.directory.check()
    assert len(offsets_of(engine.lookup("abcdefgh"))) == engine.say(wire.Check).blocks - 2


# ---- bad input ---------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return (os.mkdir, ("/nowhere/tierkv-bomb",))


GARBAGE = {
    "nothing": b"",
    "a pickle": pickle.dumps(Bomb()),
    "noise": random.Random(1).randbytes(300),
    "an unknown message": b"\x92\xa7Execute\x01",
    "too many fields": b"\x93\xa4Ping\x09\x01",
    "a number below one": b"\x92\xa4Ping\x00",
    "deep nesting": b"\x91" * 100_000,
    "an open end": wire.encode(wire.Ping(99))[:-1],
    "a reply": wire.encode(wire.Done(99, 0, 0)),
    "a short namespace": b"\x95\xa6Lookup\x63\xc4\x01a\x02\xc4\x00",
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_closes_that_session_and_nothing_else(desk, name):
    good, bad = desk.peer("e"), desk.peer("f")
    good.store("a")
    lease = bad.lookup("a").lease
    (answer,) = bad.raw((bad.name, GARBAGE[name]))
    assert answer.code == "protocol"
    assert desk.count("protocol_errors") == 1
    assert bad.ping().code == "closed"
    assert isinstance(good.ping(), wire.Done)
    assert set(desk.directory.leases) == {lease}, "its process may still read"


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_of_a_stranger_disturbs_nobody(desk, name):
    good, stranger = desk.peer("e"), Peer(desk, "x")
    (answer,) = stranger.raw((stranger.name, GARBAGE[name]))
    assert answer.code == "protocol"
    assert isinstance(good.ping(), wire.Done)


MISUSE = {
    "a namespace that is not attached": (wire.Lookup, b"X" * 32, 2, b"a\0"),
    "a reserve elsewhere": (wire.Reserve, b"X" * 32, 2, b"a\0", [(b"", 1)]),
    "a touch elsewhere": (wire.Touch, b"X" * 32, 2, b"a\0"),
    "a key twice": (wire.Lookup, SPACE, 2, b"a\0a\0"),
    "half a key": (wire.Lookup, SPACE, 2, b"a\0b"),
    "runs that do not add up": (wire.Reserve, SPACE, 2, b"a\0b\0", [(b"", 1)]),
    "huge runs": (wire.Reserve, SPACE, 2, b"a\0", [(b"", 1 << 62)]),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_closes_that_session_and_nothing_else(desk, name):
    good, bad = desk.peer("e"), desk.peer("f")
    if name.endswith(("attached", "elsewhere")):
        good.attach(b"X" * 32)  # attached by another engine is not attached
        good.say(wire.Reserve, b"X" * 32, 2, b"a\0", [(b"", 1)])
    make, *args = MISUSE[name]
    assert bad.say(make, *args).code == "protocol"
    assert bad.ping().code == "closed"
    assert isinstance(good.ping(), wire.Done)


def test_an_administrator_cannot_cache(desk):
    admin = desk.peer("", "admin")
    assert admin.attach().code == "protocol"


def test_keys_that_are_no_prefix_do_not_spoil_the_books():
    """A client may send anything; what it sends must not make `check` fail for the others."""
    desk = Desk()
    engine = desk.peer()
    engine.store("ab")
    engine.say(wire.Touch, SPACE, 2, b"b\0")
    desk.directory.check()
    engine.lookup("b")
    engine.store("xyz")
    desk.directory.check()


# ---- death -------------------------------------------------------------------------------------


def test_nothing_is_freed_while_a_mapper_lock_is_held_however_long(desk):
    engine = desk.peer("e")
    engine.reserve("abcd")
    desk.held["e"] = Held(has_session=False, mappers=1)
    for _ in range(5):
        desk.pass_time(1_000_000)
    other = desk.peer("f")
    assert other.store("w") == 0
    assert len(desk.directory.leases) == 1
    assert desk.server.engines_known == 2


def test_nothing_is_freed_while_the_session_lock_is_held(desk):
    engine = desk.peer("e")
    engine.reserve("abcd")
    engine.say(wire.Bye)
    desk.pass_time(1_000_000)
    assert desk.peer("f").store("w") == 0


def test_death_needs_free_locks_for_the_whole_quarantine(desk):
    engine = desk.peer("e")
    engine.reserve("abcd")
    desk.held["e"] = Held(False, 1)
    desk.pass_time(QUARANTINE_S)
    del desk.held["e"]
    desk.pass_time(QUARANTINE_S - 0.1)
    assert desk.server.engines_known == 1
    desk.held["e"] = Held(False, 1)  # a lock that shows up again starts it anew
    desk.pass_time(1)
    del desk.held["e"]
    desk.pass_time(QUARANTINE_S - 0.1)
    assert len(desk.directory.leases) == 1
    desk.now += 0.2
    desk.turn(look=True)
    assert (desk.server.engines_known, len(desk.directory.leases)) == (0, 0)
    assert desk.peer("f").store("wxyz") == 4


def test_a_killed_engine_is_noticed_by_its_session_lock(desk):
    engine = desk.peer("e")
    engine.store("a")
    engine.reserve("b", after="a")
    desk.held.clear()
    desk.turn(look=True)
    assert engine.ping().code == "closed"
    other = desk.peer("f")
    assert len(offsets_of(other.lookup("ab"))) == 1
    assert other.store("b", after="a") == 1, "its key may be reserved elsewhere"


def test_without_a_look_at_the_locks_nobody_dies(desk):
    engine = desk.peer("e")
    desk.held.clear()
    desk.now += 1_000_000
    desk.turn()
    assert isinstance(engine.ping(), wire.Done)


# ---- return ------------------------------------------------------------------------------------


def test_a_returning_engine_keeps_the_leases_it_holds_and_no_others(desk):
    engine = desk.peer("e")
    engine.store("ab")
    kept, lost = engine.lookup("a").lease, engine.lookup("ab").lease
    write, lost_write = engine.reserve("x").lease, engine.reserve("y").lease
    again = desk.peer("e", "again", is_return=True, held=[kept, write, 12345])
    assert set(desk.directory.leases) == {kept, write}
    again.commit(write, [1])
    again.release(kept)
    assert len(offsets_of(again.lookup("x"))) == 1
    assert lost not in desk.directory.leases
    assert lost_write not in desk.directory.leases


def test_messages_of_the_old_connection_are_ignored_after_a_return(desk):
    old = desk.peer("e")
    write = old.reserve("a").lease
    desk.peer("e", "again", is_return=True, held=[write])
    assert old.raw(old.frame(wire.Commit, write, b"\1"))[0].code == "closed"
    assert set(desk.directory.leases) == {write}


def test_what_a_closed_session_was_writing_stays_unreadable_after_its_return(desk):
    engine = desk.peer("e")
    write = engine.reserve("a").lease
    engine.raw((engine.name, b"garbage"))
    again = desk.peer("e", "again", is_return=True, held=[write])
    again.commit(write, [1])
    assert again.lookup("a").lease == 0
    assert not desk.directory.leases
    assert again.store("wxyz") == 4


def test_a_return_within_the_quarantine_is_not_dead_later(desk):
    engine = desk.peer("e")
    engine.store("a")
    lease = engine.lookup("a").lease
    del desk.held["e"]
    desk.pass_time(QUARANTINE_S - 1)
    again = desk.peer("e", "again", is_return=True, held=[lease])
    desk.pass_time(QUARANTINE_S)
    assert desk.pinned() == 1
    assert isinstance(again.ping(), wire.Done)


def test_an_engine_that_heard_no_welcome_can_say_hello_again_as_a_return(desk):
    desk.peer("e", "unheard")
    assert isinstance(desk.peer("e", "again", is_return=True).ping(), wire.Done)
    assert desk.server.engines_connected == 1


# ---- restart on an adopted pool ----------------------------------------------------------------


def test_after_a_restart_nothing_is_granted_until_the_old_mappers_have_quiesced():
    desk = Desk(old=["e", "f"])
    desk.held = {"e": Held(True, 1), "f": Held(True, 1)}
    engine, other = desk.peer("e", is_return=True, held=[1, 2]), desk.peer("f", is_return=True)
    assert engine.store("a") == 0
    for _ in range(3):
        desk.pass_time(1_000_000)
    assert engine.store("a") == 0
    engine.say(wire.Quiesced, GENERATION)
    assert engine.store("a") == 0, "the other may still write"
    other.say(wire.Quiesced, GENERATION)
    assert engine.store("a") == 1


def test_an_idle_old_mapper_that_never_speaks_frees_the_pool_after_the_quarantine():
    """An idle engine makes no steps, so nobody would say Quiesced for it."""
    desk = Desk(old=["idle"])
    desk.held["idle"] = Held(True, 2, 1)
    engine = desk.peer("n")
    desk.pass_time(1_000_000)
    assert engine.store("a") == 0, "one of its workers still copies"
    desk.held["idle"] = Held(True, 2, 2)
    desk.pass_time(QUARANTINE_S - 0.1)
    assert engine.store("a") == 0
    desk.now += 0.2
    desk.turn(look=True)
    assert engine.store("a") == 1


def test_only_old_mappers_are_asked_to_quiesce():
    desk = Desk(old=["e"])
    desk.held = {"e": Held(True, 1), "n": Held(True, 1)}
    assert Peer(desk, "e").hello(is_return=True).must_quiesce
    assert not Peer(desk, "n").hello().must_quiesce


def test_quiescing_to_another_generation_or_by_others_does_not_count():
    desk = Desk(old=["e"])
    desk.held = {"e": Held(True, 1)}
    engine, other, admin = desk.peer("e"), desk.peer("n"), desk.peer("", "admin")
    engine.say(wire.Quiesced, GENERATION - 1)
    engine.say(wire.Quiesced, GENERATION + 1)
    other.say(wire.Quiesced, GENERATION)
    admin.say(wire.Quiesced, GENERATION)
    desk.turn(look=True)
    assert other.store("a") == 0
    assert desk.server.old_mappers == 1


def test_after_a_restart_old_mappers_that_are_gone_free_the_pool_after_the_quarantine():
    desk = Desk(old=["dead"])
    desk.held["dead"] = Held(False, 2)
    engine = desk.peer("n")
    desk.pass_time(1_000_000)
    assert engine.store("a") == 0
    del desk.held["dead"]
    desk.pass_time(QUARANTINE_S - 0.1)
    assert engine.store("a") == 0
    desk.now += 0.2
    desk.turn(look=True)
    assert engine.store("a") == 1


def test_leases_of_an_older_generation_mean_nothing():
    old = Desk()
    lease = old.peer("e").reserve("a").lease
    desk = Desk(old=["e"])
    desk.directory.limits = Limits(4 * SLOT_BYTES, 4 * SLOT_BYTES, 1.0, GENERATION + 1)
    engine = desk.peer("e", is_return=True, held=[lease])
    engine.commit(lease, [1])
    assert engine.ping().ignored == 1
    assert engine.lookup("a").lease == 0


# ---- administration ----------------------------------------------------------------------------


def test_a_purge_by_prefix_drops_one_namespace(desk):
    engine, admin = desk.peer(), desk.peer("", "admin")
    engine.store("ab")
    assert admin.say(wire.Purge, "53535").dropped == {"dram": 2}
    assert engine.lookup("a").lease == 0
    assert admin.say(wire.Purge, SPACE.hex()).dropped == {"dram": 0}


def test_a_purge_of_no_or_of_several_namespaces_is_refused(desk):
    engine, admin = desk.peer(), desk.peer("", "admin")
    engine.attach(b"S" * 31 + b"T")
    engine.store("a")
    assert "2 namespaces begin with 53" in admin.say(wire.Purge, "53").message
    assert "0 namespaces begin with aa" in admin.say(wire.Purge, "aa").message
    assert len(offsets_of(engine.lookup("a"))) == 1


def test_a_purge_of_everything_keeps_leased_bytes_until_their_release(desk):
    engine, admin = desk.peer(), desk.peer("", "admin")
    engine.store("abcd")
    found = engine.lookup("ab")
    assert admin.say(wire.Purge, "").dropped == {"dram": 4}
    granted = engine.reserve("wxyz")
    assert not set(offsets_of(granted)) & set(offsets_of(found))
    engine.release(found.lease)
    assert engine.store("pq") == 2


def test_check_counts_blocks(desk):
    engine = desk.peer()
    engine.store("abc")
    assert engine.say(wire.Check).blocks == 3


def test_stats_count_what_happened(desk):
    engine = desk.peer()
    engine.store("ab")
    engine.lookup("abc")
    engine.say(wire.Outcome, 10, [20], 30)
    body = json.loads(engine.say(wire.Stats).body)
    assert (body["blocks"], body["pinned_blocks"], body["leases"]) == (2, 2, 1)
    assert (body["sessions"], body["engines"], body["generation"]) == (1, 1, GENERATION)
    assert (body["counters"]["blocks_hit"], body["counters"]["miss_absent"]) == (2, 1)
    assert body["tokens_total"]["tokens"] == {"device": 10, "dram": 20, "computed": 30}
    assert body["is_granting"]


# ---- simulation --------------------------------------------------------------------------------

SEED = int(os.environ.get("SIM_SEED", "2026"))
SPACES = {b"A" * 32: SLOT_BYTES, b"B" * 32: SLOT_BYTES * 3 // 2}
PROMPTS = [[bytes([p if i > 2 else 0, i]) for i in range(7)] for p in range(4)]
SIM_QUARANTINE_S = 3.0
SIM_RUNS = 6
SIM_STEPS = 4_000
SIM_MUST_SEE = (
    "hits", "grants", "reads", "grown", "recalls", "abandons", "reconnects", "late frames",
    "deaths", "ghost writes", "restarts",
)  # fmt: skip


class SimEngine:
    """An engine as the design describes it: one session, copies that take time, a death.

    Attributes:
        out, back: frames on their way to the daemon and from it, in order.
        waiting: request number -> what was asked.
        reads: lease -> (space, keys, offsets); writes: lease -> (space, {offset: key}).
        old: copies under way that began under an older generation.
        unread: commits and trims that no reply acknowledged.
        free_at: when its last lock became free; None while it lives or a worker does.
    """

    def __init__(self, name):
        self.name = name
        self.session_lock = self.mapper_lock = True
        self.was_up = False
        self.generation = 0
        self.reads, self.writes, self.old, self.taken = {}, {}, [], set()
        self.unread = deque()
        self.free_at = None
        self.connections = 0
        self.disconnect()

    def disconnect(self):
        self.link = "down"
        self.must_quiesce = False
        self.out, self.back, self.waiting, self.seq = deque(), deque(), {}, 0

    def post(self, make, *args):
        self.seq += 1
        self.out.append((make, wire.encode(make(self.seq, *args))))
        return self.seq

    def offsets_touched(self):
        held = [offsets for _, _, offsets in self.reads.values()]
        held += [list(slots) for _, slots in self.writes.values()]
        held += [list(work[2]) for work in self.old]
        return [offset for offsets in held for offset in offsets]


class Simulation:
    def __init__(self, seed):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.generation = 0
        self.bytes = {}  # offset -> what the slot holds
        self.engines, self.ghosts = [], []
        self.late = []  # frames of connections that are gone
        self.seen = Counter()
        self.serial = 0
        self.restart()
        for _ in range(3):
            self.join()

    # ---- the node ----

    def restart(self):
        self.generation += 1
        self.seen["restarts"] += 1
        self.late.clear()
        unit = SLOT_BYTES * 3
        limits = Limits(unit * 5, unit, self.rng.choice([0.4, 1.0]), self.generation)
        old = [e.name for e in [*self.engines, *self.ghosts] if e.mapper_lock]
        # A dead engine whose locks are free is not waited for by the next daemon.
        self.ghosts = [g for g in self.ghosts if g.mapper_lock]
        facts = ServerFacts("/pool", unit * 5, self.generation, "", False, SIM_QUARANTINE_S)
        self.server = Server(Directory(limits), facts, old)
        for engine in self.engines:
            self.drop_connection(engine)

    def join(self):
        self.serial += 1
        self.engines.append(SimEngine(f"e{self.serial}"))

    def turn(self, inbox, look=False):
        held = None
        if look:
            alive = [e for e in [*self.engines, *self.ghosts] if e.session_lock or e.mapper_lock]
            held = {e.name: Held(e.session_lock, int(e.mapper_lock)) for e in alive}
        for peer, frame in self.server.turn(self.now, inbox, held):
            for engine in self.engines:
                if engine.link != "down" and peer == self.peer_of(engine):
                    engine.back.append(frame)
        self.server.directory.check()

    @staticmethod
    def peer_of(engine):
        return f"{engine.name}/{engine.connections}".encode()

    # ---- what may happen ----

    def step(self):
        actions = {
            self.deliver: 30, self.receive: 30, self.ask: 14, self.finish: 8, self.connect: 10,
            self.give_up: 2, self.touch: 2, self.lose: 1, self.look: 6, self.ghost: 4,
            self.talk_nonsense: 0.4, self.purge: 0.4, self.die: 0.6, self.crash: 0.1,
            self.deliver_late: 1,
        }  # fmt: skip
        (action,) = self.rng.choices(list(actions), list(actions.values()))
        self.pass_time(self.rng.choice([0.0, 0.01, 0.2]))
        action()

    def pass_time(self, seconds):
        self.now += seconds
        self.ghosts = [g for g in self.ghosts
                       if g.free_at is None or self.now < g.free_at + SIM_QUARANTINE_S]  # fmt: skip

    def some(self, wanted):
        found = [engine for engine in self.engines if wanted(engine)]
        return self.rng.choice(found) if found else None

    def connect(self):
        engine = self.some(lambda e: e.link == "down")
        if engine is None:
            return
        engine.disconnect()
        engine.connections += 1
        engine.link = "greeting"
        held = {*engine.reads, *engine.writes, *(args[0] for _, _, args in engine.unread)}
        engine.post(wire.Hello, 2, 2, engine.name, engine.was_up, sorted(held), "")

    def deliver(self):
        engine = self.some(lambda e: e.out)
        if engine is None:
            return
        count = self.rng.randint(1, len(engine.out))
        batch = [engine.out.popleft() for _ in range(count)]
        inbox = []
        for make, frame in batch:
            times = 2 if make is not wire.Hello and self.rng.random() < 0.1 else 1
            inbox += [(self.peer_of(engine), frame)] * times
        engine.was_up = True  # from its first Hello on it is one that returns
        self.turn(inbox, look=self.rng.random() < 0.2)

    def receive(self):
        engine = self.some(lambda e: e.back)
        if engine is not None:
            self.take_in(engine, wire.decode_reply(engine.back.popleft()))

    def ask(self):
        engine = self.some(lambda e: e.link == "up" and len(e.waiting) < 3)
        if engine is None:
            return
        space, prompt = self.rng.choice(list(SPACES)), self.rng.choice(PROMPTS)
        if self.rng.random() < 0.5:
            keys = prompt[: self.rng.randint(1, 7)]
            seq = engine.post(wire.Lookup, space, 2, b"".join(keys))
            engine.waiting[seq] = (space, keys)
        else:
            start = self.rng.choice([0, 0, self.rng.randint(0, 6)])
            keys = prompt[start : start + self.rng.randint(1, 4)]
            before = prompt[start - 1] if start else b""
            runs = [(before, len(keys))]
            seq = engine.post(wire.Reserve, space, 2, b"".join(keys), runs)
            engine.waiting[seq] = (space, keys)

    def give_up(self):
        engine = self.some(lambda e: e.waiting)
        if engine is not None:
            seq = self.rng.choice(list(engine.waiting))
            del engine.waiting[seq]
            engine.post(wire.Abandon, seq)
            self.seen["abandons"] += 1

    def touch(self):
        engine = self.some(lambda e: e.link == "up")
        if engine is not None:
            keys = self.rng.choice(PROMPTS)[: self.rng.randint(1, 7)]
            engine.post(wire.Touch, self.rng.choice(list(SPACES)), 2, b"".join(keys))

    def finish(self):
        """A copy ends, whether or not there is a daemon."""
        engine = self.some(lambda e: e.reads or e.writes or e.old)
        if engine is None:
            return
        if engine.old:
            kind, space, slots = engine.old.pop()
            if kind == "read":
                self.verify(space, slots)
            else:
                self.bytes.update({o: (space, key) for o, key in slots.items()})
            self.maybe_quiesced(engine)
        elif engine.writes and (not engine.reads or self.rng.random() < 0.5):
            lease = self.rng.choice(list(engine.writes))
            space, slots = engine.writes.pop(lease)
            flags = [self.rng.random() < 0.9 for _ in slots]
            for (offset, key), is_ok in zip(slots.items(), flags, strict=True):
                self.bytes[offset] = (space, key) if is_ok else "torn"
            self.keep_posted(engine, wire.Commit, lease, bytes(flags))
        else:
            lease = self.rng.choice(list(engine.reads))
            space, keys, offsets = engine.reads[lease]
            self.verify(space, dict(zip(offsets, keys, strict=False)))
            if lease not in engine.taken and offsets and self.rng.random() < 0.4:
                kept = self.rng.randint(1, len(offsets))
                engine.reads[lease] = (space, keys[:kept], offsets[:kept])
                engine.taken.add(lease)
                self.keep_posted(engine, wire.Trim, lease, kept)
                return
            del engine.reads[lease]
            if engine.link != "down":
                engine.post(wire.Release, [lease])
            self.seen["reads"] += 1

    def lose(self):
        engine = self.some(lambda e: e.link != "down")
        if engine is not None:
            self.drop_connection(engine)
            self.seen["reconnects"] += 1

    def drop_connection(self, engine):
        frames = [(self.peer_of(engine), frame) for make, frame in engine.out
                  if make is not wire.Hello]  # fmt: skip
        self.late += frames[: self.rng.randint(0, len(frames))]
        engine.disconnect()

    def deliver_late(self):
        """Frames of a connection that the engine has given up still arrive, in order."""
        if self.late:
            self.turn([self.late.pop(0)])
            self.seen["late frames"] += 1

    def talk_nonsense(self):
        engine = self.some(lambda e: e.link == "up")
        if engine is not None:
            engine.out.append((wire.Ping, self.rng.randbytes(20)))

    def purge(self):
        engine = self.some(lambda e: e.link == "up")
        if engine is not None:
            engine.post(wire.Purge, self.rng.choice(["", "41", "42"]))

    def look(self):
        self.pass_time(self.rng.choice([0.0, 1.0]))
        self.turn([], look=True)

    def die(self):
        """SIGKILL of the scheduler half; its workers go a little later."""
        engine = self.rng.choice(self.engines)
        self.engines.remove(engine)
        self.drop_connection(engine)
        engine.session_lock = False
        self.ghosts.append(engine)
        self.seen["deaths"] += 1
        self.join()

    def ghost(self):
        """What is left of a dead engine: it reads and writes until its locks are long free."""
        for ghost in self.ghosts:
            for space, keys, offsets in ghost.reads.values():
                self.verify(space, dict(zip(offsets, keys, strict=False)))
            for _, slots in ghost.writes.values():
                for offset in slots:
                    self.bytes[offset] = "torn"
                    self.seen["ghost writes"] += 1
            if ghost.free_at is None and self.rng.random() < 0.2:
                ghost.mapper_lock = False
                ghost.free_at = self.now

    def crash(self):
        self.restart()

    # ---- the engines' side of the protocol ----

    def keep_posted(self, engine, make, *args):
        seq = engine.post(make, *args) if engine.link != "down" else 0
        engine.unread.append((seq, make, args))

    def verify(self, space, slots):
        for offset, key in slots.items():
            assert self.bytes.get(offset) == (space, key), "a hit with other bytes"

    def maybe_quiesced(self, engine):
        if engine.must_quiesce and not engine.old and engine.link == "up":
            engine.must_quiesce = False
            engine.post(wire.Quiesced, engine.generation)

    def take_in(self, engine, reply):
        match reply:
            case wire.Welcome():
                self.welcomed(engine, reply)
            case wire.Failed():
                assert reply.code in ("protocol", "closed"), reply.message
                self.drop_connection(engine)
            case wire.ReadyPush():
                if reply.lease in engine.reads and reply.lease not in engine.taken:
                    space, keys, offsets = engine.reads[reply.lease]
                    assert offsets_of(reply)[: len(offsets)] == offsets, "a lease grows at its end"
                    engine.reads[reply.lease] = (space, keys, offsets_of(reply))
                    self.verify(space, dict(zip(offsets_of(reply), keys, strict=False)))
                    self.seen["grown"] += 1
            case wire.RecallPush():
                if reply.lease in engine.reads and reply.lease not in engine.taken:
                    del engine.reads[reply.lease]
                    engine.post(wire.Release, [reply.lease])
                    self.seen["recalls"] += 1
            case _:
                while engine.unread and engine.unread[0][0] <= reply.to:
                    engine.unread.popleft()
                asked = engine.waiting.pop(reply.to, None)
                if asked is not None:
                    self.granted(engine, reply, *asked)

    def welcomed(self, engine, welcome):
        if welcome.generation != engine.generation:
            engine.old += [("read", space, dict(zip(offsets, keys, strict=False)))
                           for space, keys, offsets in engine.reads.values()]  # fmt: skip
            engine.old += [("write", *work) for work in engine.writes.values()]
            engine.reads, engine.writes = {}, {}
            engine.unread.clear()
        engine.generation = welcome.generation
        engine.link = "up"
        engine.must_quiesce = welcome.must_quiesce
        self.maybe_quiesced(engine)
        for space, slot_bytes in SPACES.items():
            engine.post(wire.Attach, space, slot_bytes, "", False)
        again, engine.unread = engine.unread, deque()
        for _, make, args in again:
            self.keep_posted(engine, make, *args)

    def granted(self, engine, reply, space, keys):
        if not reply.lease:
            return
        offsets = offsets_of(reply)
        if isinstance(reply, wire.FoundReply):
            self.verify(space, dict(zip(offsets, keys, strict=False)))
            engine.reads[reply.lease] = (space, keys, offsets)
            self.seen["hits"] += len(offsets)
            return
        slots = {o: key for o, key in zip(offsets, keys, strict=True) if o >= 0}
        touched = {o: e.name for e in [*self.engines, *self.ghosts] for o in e.offsets_touched()}
        for offset in slots:
            assert offset not in touched, f"granted under the feet of {touched[offset]}"
            self.bytes[offset] = "torn"
        engine.writes[reply.lease] = (space, slots)
        self.seen["grants"] += len(slots)

    # ---- the end ----

    def drain(self):
        """Let everybody finish and go; afterwards nothing is leased or pinned."""
        for engine in self.engines:
            engine.session_lock = engine.mapper_lock = False
        for ghost in self.ghosts:
            ghost.mapper_lock = False
        self.turn([], look=True)
        self.now += SIM_QUARANTINE_S
        self.turn([], look=True)
        assert not self.server.directory.leases
        assert self.server.engines_known == 0
        assert sum(s.pinned for s in self.server.directory.spaces.values()) == 0


def test_a_hit_is_the_right_bytes_whatever_is_lost_late_doubled_or_dead():
    seen = Counter()
    for seed in range(SEED, SEED + SIM_RUNS):
        print(f"SIM_SEED={seed}")
        simulation = Simulation(seed)
        for _ in range(SIM_STEPS):
            simulation.step()
        simulation.drain()
        seen += simulation.seen
    print(dict(seen))
    dull = [name for name in SIM_MUST_SEE if seen[name] == 0]
    assert not dull, "the simulation proves nothing about these"


# ---- devices -----------------------------------------------------------------------------------


def device(rank: int, rung: str = "batch") -> wire.Device:
    return wire.Device(rank, f"npu:{rank}", rung, 64, 128, 0, 0, "")


def test_devices_are_shown_while_their_engine_is_connected(desk):
    engine = desk.peer("e")
    assert engine.say(wire.Devices, [device(0), device(1, "staged")]) is None
    told = collect(desk.server, 0.0)["devices"]
    assert [(d["engine"], d["rank"], d["rung"]) for d in told] == [
        ("e", 0, "batch"),
        ("e", 1, "staged"),
    ]
    engine.say(wire.Devices, [device(0, "single")])
    assert [d["rung"] for d in collect(desk.server, 0.0)["devices"]] == ["single"]
    engine.say(wire.Bye)
    assert collect(desk.server, 0.0)["devices"] == []


def test_too_many_devices_end_the_session(desk):
    engine = desk.peer("e")
    answer = engine.say(wire.Devices, [device(n) for n in range(wire.RANKS_MAX + 1)])
    assert answer.code == "protocol"
    assert collect(desk.server, 0.0)["devices"] == []
