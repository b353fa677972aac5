"""Eviction policies: their contract, their orders against plain ones, and the books' rule for them.

The figures of the plain ones (`eviction_oracles.py`) on a public trace are those of an independent
simulator, itself checked against libCacheSim.
"""

from __future__ import annotations

import functools
import random
import weakref
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core_world import SPACE, World
from tests.eviction_oracles import ArcOracle, LruOracle, SlruOracle, prefix_hits
from tests.tier_world import TierWorld
from tierkv.bench.trace import load_trace
from tierkv.core.eviction.arc import Arc
from tierkv.core.eviction.base import EvictionPolicy
from tierkv.core.eviction.lru import Lru
from tierkv.core.eviction.slru import PROTECTED_SHARE, Slru
from tierkv.core.values import TierLimits

AGENTS = Path(__file__).parent / "traces" / "claude_code_80s_512.jsonl.gz"
SHARES = (0.005, 0.01, 0.025, 0.05, 0.10, 0.25)
GOLDEN = {
    LruOracle: (0.083, 0.173, 0.414, 0.708, 0.916, 0.948),
    SlruOracle: (0.085, 0.181, 0.432, 0.721, 0.916, 0.948),
    ArcOracle: (0.111, 0.216, 0.465, 0.706, 0.908, 0.946),
}
ORACLES = {Lru: LruOracle, Slru: SlruOracle, Arc: ArcOracle}
SEED = 20_260_731
every_policy = pytest.mark.parametrize("kind", [Lru, Slru, Arc])


def long_lists(elements, most: int):
    """Lists of any length up to `most`; plain ones are nearly always short."""
    return st.integers(0, most).flatmap(lambda n: st.lists(elements, min_size=n, max_size=n))


def rows_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


# ---- the plain ones themselves -----------------------------------------------------------------


@pytest.fixture(scope="module")
def agents():
    return load_trace(AGENTS)


@pytest.mark.parametrize("oracle", GOLDEN)
def test_the_plain_policies_hit_as_often_as_the_reference_simulator(agents, oracle):
    requests = [request.keys for request in agents.requests]
    for share, golden in zip(SHARES, GOLDEN[oracle], strict=True):
        hits = prefix_hits(requests, oracle(int(agents.unique * share)))
        assert hits / agents.asked == pytest.approx(golden, abs=0.0006), f"at {share:.1%}"


# ---- the contract ------------------------------------------------------------------------------


class Shelf:
    """The smallest books: slots, and a policy that is asked as the directory asks it.

    A block is the text of its whole prefix, so `ab` is the predecessor of `abc`.

    Attributes:
        name: makes the key that the policy is told out of a block.
    """

    def __init__(self, policy: EvictionPolicy, slots: int, name=str.encode) -> None:
        self.policy, self.name = policy, name
        self.slots = 0
        self.here: dict[str, int] = {}
        self.filling: list[dict[str, int]] = []
        self.free: list[int] = []
        self.resize(slots)

    def order(self) -> list[str]:
        """Keys in the order in which they will be given up."""
        key_of = {row: key for key, row in self.here.items()}
        return [key_of[row] for row in self.policy.candidates()]

    def check(self) -> None:
        order = list(self.policy.candidates())
        assert len(self.policy) == len(self.here)
        assert sorted(order) == sorted(self.here.values()), "each is proposed exactly once"
        if self.policy.keeps_prefixes:
            place = {row: at for at, row in enumerate(order)}
            for key, row in self.here.items():
                before = self.here.get(key[:-1])
                assert before is None or place[row] < place[before], f"{key} after its predecessor"

    def look_up(self, text: str) -> int:
        """Use the leading blocks that are here; returns their number."""
        hits = 0
        while hits < len(text) and text[: hits + 1] in self.here:
            hits += 1
        if hits:
            self.policy.touch(rows_of(*(self.here[text[:n]] for n in range(1, hits + 1))))
        return hits

    def reserve(self, text: str, length: int) -> None:
        """Take slots for the last `length` blocks of a text, as far as they are absent."""
        keys = [text[:n] for n in range(len(text) - length + 1, len(text) + 1)]
        busy = {key for writing in self.filling for key in writing}
        missing = [key for key in keys if key not in self.here and key not in busy]
        if not missing:
            return
        before = missing[0][:-1]
        if before and before not in self.here and before not in busy:
            return
        room = self.policy.miss([*map(self.name, missing)], self.name(before) if before else None)
        assert 0 <= room.blocks <= len(missing)
        assert room.candidates >= 0
        self.evict(room.blocks - len(self.free), room.candidates, before)
        granted = {key: self.free.pop() for key in missing[: len(self.free)]}
        if granted:
            self.filling.append(granted)

    def evict(self, short: int, most: int, stays: str) -> None:
        """Give up to `short` blocks up: each time the first that no other block needs."""
        order = self.order()[:most]
        victims: list[str] = []
        while len(victims) < short:
            needed = {key[:-1] for key in self.here if key not in victims} | {stays}
            left = [key for key in order if key not in needed and key not in victims]
            if not left:
                break
            victims.append(left[0])
        if victims:
            rows = [self.here.pop(key) for key in victims]
            self.policy.evict(rows_of(*rows))
            self.free += rows

    def commit(self, which: int, good: int) -> None:
        """The first `good` blocks of a grant are readable now, the others never will be."""
        granted = self.filling.pop(which)
        before = next(iter(granted))[:-1]
        keys = list(granted)[:good] if not before or before in self.here else []
        if keys:
            rows = rows_of(*(granted[key] for key in keys))
            self.policy.insert(rows, self.here.get(before, 0), [*map(self.name, keys)])
        for key, row in granted.items():
            if key in keys:
                self.here[key] = row
            else:
                self.free.append(row)

    def request(self, text: str, parts: int = 1) -> int:
        """Look up and store the rest in so many commits; returns the hits."""
        hits = self.look_up(text)
        size = max(1, -(-(len(text) - hits) // parts))
        for first in range(hits, len(text), size):
            part = text[: first + size]
            before = len(self.filling)
            self.reserve(part, len(part) - first)
            if len(self.filling) > before:
                self.commit(-1, len(part))
        return hits

    def remove(self, gone: set[str]) -> None:
        """Somebody drops blocks, and with them what nobody could reach any more."""
        gone = {k for k in self.here if any(k[:n] in gone for n in range(1, len(k) + 1))}
        if gone:
            rows = [self.here.pop(key) for key in sorted(gone)]
            self.policy.remove(rows_of(*rows))
            self.free += rows

    def resize(self, slots: int, is_told_first: bool = False) -> None:
        """Slots come, or the last ones go with what is in them."""
        if slots > self.slots:
            self.policy.grow(slots + 1)
            self.free += range(slots, self.slots, -1)
        elif is_told_first:
            self.policy.resize(slots)
        self.filling = [w for w in self.filling if not self._drop_beyond(slots, w)]
        self.remove({key for key, row in self.here.items() if row > slots})
        self.free = [row for row in self.free if row <= slots]
        self.slots = slots
        self.policy.resize(slots)

    def _drop_beyond(self, slots: int, writing: dict[str, int]) -> bool:
        is_beyond = max(writing.values()) > slots
        if is_beyond:
            self.free += writing.values()
        return is_beyond


texts = st.text("ab", min_size=1, max_size=7)
calls = st.one_of(
    st.tuples(st.just("request"), texts, st.integers(1, 3)),
    st.tuples(st.just("request"), texts, st.integers(1, 3)),
    st.tuples(st.just("look_up"), texts),
    st.tuples(st.just("reserve"), texts, st.integers(1, 4)),
    st.tuples(st.just("commit"), st.integers(0, 7), st.integers(0, 4)),
    st.tuples(st.just("remove"), st.sets(texts, max_size=2)),
    st.tuples(st.just("resize"), st.integers(1, 12), st.booleans()),
)


def call(shelf: Shelf, verb: str, arguments: list) -> None:
    match verb:
        case "reserve":
            text, length = arguments
            shelf.reserve(text, min(length, len(text)))
        case "commit":
            which, good = arguments
            if shelf.filling:
                shelf.commit(which % len(shelf.filling), good)
        case _:
            getattr(shelf, verb)(*arguments)


@every_policy
@settings(max_examples=200, deadline=None)
@given(slots=st.integers(1, 12), steps=long_lists(calls, 50))
def test_what_is_present_is_proposed_exactly_once_and_behind_its_successors(kind, slots, steps):
    """Whatever comes, fails, goes and comes again, in a namespace that grows and shrinks."""
    shelf = Shelf(kind(), slots)
    for verb, *arguments in steps:
        call(shelf, verb, arguments)
        shelf.check()


@every_policy
def test_rows_are_used_again_for_other_blocks(kind):
    """Removed or given up: what comes under the same number has no past."""
    shelf = Shelf(kind(), 10)
    shelf.request("aaa")
    rows = set(shelf.here.values())
    shelf.look_up("aaa")
    shelf.remove({"a"})
    assert (len(shelf.policy), list(shelf.policy.candidates())) == (0, [])
    shelf.request("bbb")
    assert set(shelf.here.values()) == rows
    shelf.request("cc")
    assert shelf.order() == ["bbb", "bb", "b", "cc", "c"]
    shelf.look_up("bbb")
    shelf.check()


@every_policy
def test_a_shrunken_namespace_may_grow_again(kind):
    shelf = Shelf(kind(), 12)
    for text in ("aaaa", "bbbb", "aaaa", "cccc"):
        shelf.request(text)
    shelf.resize(2)
    shelf.check()
    shelf.request("dd")
    shelf.resize(12)
    for text in ("aaaa", "bbbb", "aaaa", "cccc"):
        shelf.request(text)
    shelf.check()
    assert len(shelf.policy) == 12


@pytest.mark.parametrize(("kind", "is_kept"), [(Lru, True), (Slru, True), (Arc, False)])
def test_a_policy_says_whether_its_order_keeps_prefixes(kind, is_kept):
    """The audit holds those that say so to it."""
    assert kind.keeps_prefixes is is_kept


# ---- block by block against the plain ones -----------------------------------------------------


class OneByOne:
    """A policy and its plain form, both told the same uses of single blocks."""

    def __init__(self, policy: EvictionPolicy, oracle, slots: int) -> None:
        self.policy, self.oracle = policy, oracle
        self.row_of: dict[bytes, int] = {}
        self.free = list(range(slots, 0, -1))
        policy.grow(slots + 1)
        policy.resize(slots)

    def use(self, number: int) -> None:
        key = b"%d" % number
        if key in self.oracle:
            self.oracle.touch(key)
            self.policy.touch(rows_of(self.row_of[key]))
        else:
            self.oracle.insert(key)
            room = self.policy.miss([key], None)
            assert room.blocks == 1
            if not self.free:
                assert room.candidates > 0
                self.give_up(next(iter(self.policy.candidates())))
            self.row_of[key] = self.free.pop()
            self.policy.insert(rows_of(self.row_of[key]), 0, [key])
        # A request that misses nothing: what the one before used is noted by now.
        self.policy.miss([], None)

    def give_up(self, row: int) -> None:
        self.policy.evict(rows_of(row))
        del self.row_of[next(key for key, here in self.row_of.items() if here == row)]
        self.free.append(row)

    def compare(self) -> None:
        key_of = {row: key for key, row in self.row_of.items()}
        assert [key_of[row] for row in self.policy.candidates()] == self.oracle.given_up()


@every_policy
@settings(max_examples=200, deadline=None)
@given(slots=st.integers(1, 9), uses=long_lists(st.integers(0, 19), 120))
def test_block_by_block_the_order_is_that_of_the_plain_policy(kind, slots, uses):
    """Of ARC the order tells both lists, and the target wherever it decides who goes."""
    pair = OneByOne(kind(), ORACLES[kind](slots), slots)
    for number in uses:
        pair.use(number)
        pair.compare()


@every_policy
def test_block_by_block_the_order_stays_the_same_for_long(kind):
    """Loops, scans and a hot set in turn, so that the target of ARC goes up and down."""
    dice = random.Random(SEED)
    pair = OneByOne(kind(), ORACLES[kind](40), 40)
    targets = set()
    for phase in range(60):
        base = dice.choice([0, 0, 50, 1_000 * phase])
        width = dice.choice([20, 45, 60, 120])
        for _ in range(200):
            pair.use(base + dice.randrange(width))
            targets.add(getattr(pair.oracle, "target", 0.0))
        pair.compare()
    assert kind is not Arc or {0.0, 40.0} < targets, f"seed {SEED} moves the target"


@pytest.mark.parametrize("protected", [0, 1, 3, 8])
@settings(max_examples=100, deadline=None)
@given(uses=long_lists(st.integers(0, 15), 100))
def test_segments_of_any_size_are_those_of_the_plain_policy(protected, uses):
    share = protected / 9
    pair = OneByOne(Slru(share), SlruOracle(9, share), 9)
    assert int(9 * share) == protected
    for number in uses:
        pair.use(number)
        pair.compare()


@pytest.mark.parametrize(
    ("policy", "oracle"),
    [
        (Lru, LruOracle),
        (Arc, ArcOracle),
        *[
            (functools.partial(Slru, n / 256), functools.partial(SlruOracle, share=n / 256))
            for n in (0, 1, 4, 16)
        ],
    ],
    ids=["lru", "arc", *(f"slru with {n} protected" for n in (0, 1, 4, 16))],
)
@settings(max_examples=100, deadline=None)
@given(requests=long_lists(st.tuples(texts, st.integers(1, 4)), 30))
def test_a_whole_request_leaves_the_order_that_its_blocks_one_by_one_leave(
    policy, oracle, requests
):
    """The last first, although its hits are used before its misses are stored, in parts.

    While there is room, so that nothing of a request can be displaced by the rest of it.
    """
    shelf, plain = Shelf(policy(), 256), oracle(256)
    for text, parts in requests:
        shelf.request(text, parts)
        for key in (text[:n] for n in range(len(text), 0, -1)):
            plain.touch(key) if key in plain else plain.insert(key)
        shelf.policy.miss([], None)
        assert shelf.order() == plain.given_up()


# ---- segments, in words ------------------------------------------------------------------------


def test_what_was_used_twice_is_given_up_after_what_was_not():
    shelf = Shelf(Slru(), 10)
    for text in ("aa", "aa", "bbb", "ccc", "d", "e"):
        shelf.request(text)
    assert shelf.order() == ["bbb", "bb", "b", "ccc", "cc", "c", "d", "e", "aa", "a"]


def test_the_protected_part_hands_its_oldest_back_and_what_is_stored_goes_before_them():
    shelf = Shelf(Slru(), 10)
    for text in ("aa", "aa", "bb", "bbc"):
        shelf.request(text)
    assert shelf.order() == ["bbc", "aa", "a", "bb", "b"], "aa was used twice, bbc once"
    shelf.request("d")
    assert shelf.order() == ["bbc", "aa", "a", "d", "bb", "b"], "aa is not protected any more"


def test_a_request_larger_than_the_rest_keeps_its_head_and_displaces_nothing_protected():
    shelf = Shelf(Slru(), 10)
    for text in ("aa", "aa", "bbbbb", "c" * 10):
        shelf.request(text)
    assert set(shelf.here) == {"a", "aa", *("c" * n for n in range(1, 9))}


# ---- what adaptive replacement remembers -------------------------------------------------------


def shelf_of_four(*requests: str) -> Shelf:
    """Four slots; `a` was used twice."""
    shelf = Shelf(Arc(), 4)
    for text in ("a", "a", *requests):
        shelf.request(text)
    return shelf


def test_a_block_given_up_too_early_comes_back_as_used_twice_and_makes_room_for_such():
    shelf = shelf_of_four("b", "c", "d", "e")
    assert shelf.order() == ["c", "d", "e", "a"], "b was used once, so it went"
    shelf.request("b")
    assert shelf.order() == ["d", "a", "b", "e"], "one block may be here that was used once"


def test_a_block_used_twice_that_is_missed_takes_the_room_back():
    shelf = shelf_of_four("b", "c", "d", "e", "b", "f", "g", "d")
    assert shelf.order() == ["b", "d", "f", "g"], "a went although it was used twice"
    shelf.request("a")
    assert shelf.order() == ["b", "d", "a", "g"]
    shelf.request("h")
    assert shelf.order() == ["g", "d", "a", "h"], "one of those used once is too many again"


def test_a_removed_block_is_not_remembered():
    """Nobody gave it up for room, so it teaches nothing when it comes again."""
    shelf = shelf_of_four("b", "c", "d")
    shelf.remove({"b"})
    shelf.request("b")
    assert shelf.order() == ["c", "d", "b", "a"]


def test_a_block_that_was_asked_for_and_never_came_was_not_used():
    shelf = shelf_of_four()
    shelf.reserve("b", 1)
    shelf.commit(0, good=0)
    shelf.request("b")
    shelf.request("c")
    assert shelf.order() == ["b", "c", "a"]


def test_a_block_that_had_to_stay_is_the_next_to_go_and_the_other_one_is_remembered():
    """A reader held the block that the order proposed first."""
    shelf = shelf_of_four("b", "c", "d")
    shelf.policy.miss([b"e"], None)
    assert shelf.order() == ["b", "c", "d", "a"]
    row = shelf.here.pop("c")
    shelf.policy.evict(rows_of(row))
    shelf.policy.insert(rows_of(row), 0, [b"e"])
    shelf.here["e"] = row
    assert shelf.order() == ["b", "d", "e", "a"]
    shelf.request("b")
    shelf.policy.miss([], None)
    assert shelf.order() == ["d", "e", "a", "b"], "b is used twice, as if nothing had been"
    shelf.request("c")
    assert shelf.order() == ["a", "b", "c", "e"], "c came back: more room for what is used once"


class WatchedKey:
    """A key that can be counted while somebody holds it."""


def test_given_up_blocks_are_forgotten_in_the_end():
    """However many came and went, the keys of a few per slot are held, predecessors included."""
    held: weakref.WeakValueDictionary[str, WatchedKey] = weakref.WeakValueDictionary()
    made = 0

    def name(text: str) -> WatchedKey:
        nonlocal made
        if (key := held.get(text)) is None:
            key = held[text] = WatchedKey()
            made += 1
        return key

    dice, slots = random.Random(SEED), 25
    shelf = Shelf(Arc(), slots, name)
    for turn in range(2_000):
        # Chats of up to nine blocks; a dozen of them live at a time.
        shelf.request(chr(1_000 + turn // 4 + dice.randrange(12)) * dice.randint(1, 9), 2)
    assert made > 40 * slots, f"seed {SEED}"
    assert slots < len(held) <= 4 * slots


# ---- what the directory tells a policy ---------------------------------------------------------


def test_a_request_gets_no_more_room_than_the_policy_gives_it():
    world = World(10)
    world.store("ab")
    assert world.resident("ab") == 2
    assert world.store("cdefghijkl") == 8
    assert world.resident("ab") == 2
    world.directory.check()


class Told(Lru):
    """Notes how many slots there are."""

    def __init__(self) -> None:
        super().__init__()
        self.slots: list[int] = []

    def resize(self, slots):
        self.slots.append(slots)


def test_a_policy_knows_how_many_slots_its_namespace_has():
    """An extent comes, another one, and one goes to a namespace that had none."""
    world = World(4, units=2, make_policy=Told)
    other = b"O" * 32
    world.join("e", other)
    world.store("abcd")
    world.store("x", space=other)
    told = [world.directory.spaces[space].policy.slots for space in (SPACE, other)]
    assert told == [[2, 4, 2], [2]]


# ---- the rule of the books ---------------------------------------------------------------------


class HeadFirst(EvictionPolicy):
    """A bad order: what came first goes first, so every prefix loses its head first."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def grow(self, rows):
        del rows

    def insert(self, rows, after, keys):
        del after, keys
        self.rows += rows.tolist()

    def touch(self, rows):
        self.remove(rows)
        self.rows += rows.tolist()

    def remove(self, rows):
        gone = set(rows.tolist())
        self.rows = [row for row in self.rows if row not in gone]

    def candidates(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


class NewestFirst(HeadFirst):
    """A bad order: what was used last goes first."""

    def candidates(self):
        return reversed(self.rows)


class AtRandom(HeadFirst):
    """A bad order: another one for every set of rows, but the same as long as nothing changes."""

    def candidates(self):
        rows = sorted(self.rows)
        random.Random(SEED + sum(1 << row for row in rows)).shuffle(rows)
        return iter(rows)


every_bad_policy = pytest.mark.parametrize("kind", [HeadFirst, NewestFirst, AtRandom])


def test_a_block_proposed_before_its_successors_waits_for_them():
    world = World(4, make_policy=HeadFirst)
    world.store("abcd")
    assert world.store("xy") == 2
    assert world.resident("abcd") == 2
    world.directory.check()


def test_a_stem_waits_for_the_last_of_its_branches():
    world = World(4, make_policy=HeadFirst)
    world.store("abc")
    world.store("abd")
    assert world.store("xy") == 2
    assert (world.resident("abc"), world.resident("abd")) == (2, 2)
    world.directory.check()


def test_a_block_is_taken_as_soon_as_its_last_successor_is():
    """It was proposed before them, so it is not one of those that the books saw later."""
    world = World(4, make_policy=HeadFirst)
    world.store("ab")
    world.store("cd")
    assert world.store("wxy") == 3
    assert (world.resident("ab"), world.resident("cd")) == (0, 1)
    world.directory.check()


def test_a_successor_that_has_to_stay_keeps_its_predecessors():
    """Of two branches one is read: the stem stays, and the other branch goes."""
    world = World(5, make_policy=HeadFirst)
    world.store("abc")
    world.store("abd")
    lease = world.lookup("abc").lease
    assert world.store("vwxyz") == 2, "one was free, and d can go"
    world.directory.check()
    world.directory.release(lease)
    assert world.resident("abc") == 3


PROMPTS = ("abcdefg", "abchij", "abkl", "mnopq", "mnrst")
prompts = st.sampled_from(PROMPTS)
requests = st.one_of(
    st.tuples(st.just("store"), prompts, st.integers(1, 7)),
    st.tuples(st.just("store"), prompts, st.integers(1, 7)),
    st.tuples(st.just("hold"), prompts),
    st.tuples(st.just("let_go"), st.integers(0, 3)),
    st.tuples(st.just("begin"), prompts, st.integers(0, 4), st.integers(1, 4)),
    st.tuples(st.just("end"), st.integers(0, 3), st.lists(st.booleans(), min_size=4, max_size=4)),
    st.tuples(st.just("work")),
    st.tuples(st.just("work_a_little")),
    st.tuples(st.just("purge"), st.sampled_from([None, 0.0, 1.5])),
    st.tuples(st.just("tick")),
)
tiers = st.sampled_from(
    [
        (),
        (TierLimits("fs"),),
        (TierLimits("fs", write_policy="write_through"), TierLimits("object", is_indexed=False)),
    ]
)


class Traffic:
    """Calls against a directory with tiers; leases and grants stay open across them."""

    def __init__(self, world: TierWorld) -> None:
        self.world = world
        self.leases: list[int] = []
        self.grants: list[tuple[int, int]] = []  # (lease, blocks)

    def store(self, prompt: str, length: int) -> None:
        self.world.store(prompt[:length])

    def hold(self, prompt: str) -> None:
        """What is hit stays pinned."""
        found = self.world.lookup(prompt)
        if found.lease:
            self.leases.append(found.lease)

    def let_go(self, which: int) -> None:
        if which < len(self.leases):
            self.world.directory.release(self.leases.pop(which))

    def begin(self, prompt: str, first: int, length: int) -> None:
        wanted = prompt[first : first + length]
        if wanted:
            granted = self.world.reserve(wanted, prompt[first - 1] if first else None)
            if granted.lease:
                self.grants.append((granted.lease, int((granted.offsets >= 0).sum())))

    def end(self, which: int, flags: list[bool]) -> None:
        if which < len(self.grants):
            lease, blocks = self.grants.pop(which)
            self.world.directory.commit(lease, flags[:blocks])

    def work(self) -> None:
        """The tiers end what they began, and all that comes of it."""
        while self.world.jobs:
            self.world.answer()
        self.world.work()

    def work_a_little(self) -> None:
        """One job ends, others go on."""
        self.world.take()
        if self.world.jobs:
            self.world.answer()

    def purge(self, age: float | None) -> None:
        self.world.directory.purge(SPACE, age, self.world.now)

    def tick(self) -> None:
        self.world.tick(1.0)


@pytest.mark.parametrize("kind", [HeadFirst, NewestFirst, AtRandom, Lru, Slru, Arc])
@settings(max_examples=100, deadline=None)
@given(slots=st.integers(2, 9), below=tiers, steps=long_lists(requests, 40))
def test_no_order_leaves_a_block_that_no_lookup_can_reach(kind, slots, below, steps):
    """With readers, writers, debts and promotions under way; and there is always room in the end.

    The audit after each step finds what is resident without its predecessor.
    """
    world = TierWorld(slots, *below, make_policy=kind)
    traffic = Traffic(world)
    for verb, *arguments in steps:
        getattr(traffic, verb)(*arguments)
        world.directory.check()
    while traffic.grants:
        traffic.end(0, [True] * 4)
    while world.directory.leases:
        world.directory.release(next(iter(world.directory.leases)))
    traffic.work()
    world.directory.check()
    # Some orders spare blocks that were used twice; then the rest of a request finds no room.
    least = {Slru: slots - int(slots * PROTECTED_SHARE), Arc: 1}.get(kind, slots)
    assert world.store("ABCDEFGHI"[:slots]) >= least, "nothing is pinned, so others go for it"
    world.directory.check()


def first_leaves(world: World, count: int, stays: set[int]) -> list[int]:
    """Rows that should go: each time the first of the order that no resident block needs."""
    space = world.directory.spaces[SPACE]
    order = list(space.policy.candidates())
    here, gone = set(order), []
    while len(gone) < count:
        needed = {int(space.parent[row]) for row in here} | stays
        free = (row for row in order if row in here - needed and not space.pins[row])
        victim = next(free, None)
        if victim is None:
            break
        gone.append(victim)
        here.remove(victim)
    return gone


@every_bad_policy
@settings(max_examples=150, deadline=None)
@given(stored=st.lists(prompts, min_size=2, max_size=6), held=prompts, wanted=st.integers(1, 9))
def test_who_goes_is_the_first_that_can_each_time_anew(kind, stored, held, wanted):
    """One walk along the order takes what a walk from its beginning for each victim would take."""
    world = World(12, make_policy=kind)
    for prompt in stored:
        world.store(prompt)
    world.lookup(held[:3])
    space = world.directory.spaces[SPACE]
    names = dict(enumerate(space.keys))
    gone = {names[row] for row in first_leaves(world, wanted - len(space.free), set())}
    before = set(space.index)
    assert world.store("ABCDEFGHI"[:wanted]) == len(gone) + min(wanted, 12 - len(before))
    assert before - set(space.index) == gone
