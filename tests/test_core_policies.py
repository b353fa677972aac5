"""What the directory asks of a policy, and what no policy can do to it."""

from __future__ import annotations

import random

from tests.core_world import SLOT_BYTES, SPACE, keys_of
from tierkv.core.directory import Directory
from tierkv.core.eviction.arc import Arc
from tierkv.core.eviction.lru import Lru
from tierkv.core.eviction.slru import Slru
from tierkv.core.values import Limits, Run, TierLimits


def test_a_run_with_a_gap_is_made_room_for_in_pieces_with_true_predecessors():
    """Another engine is filling a block in the middle; every policy must see a chain."""
    told = []

    class Spy(Lru):
        def miss(self, keys, after):
            told.append((after, list(keys)))
            return super().miss(keys, after)

    directory = Directory(Limits(3 * SLOT_BYTES, 3 * SLOT_BYTES), make_policy=Spy)
    for engine in "ab":
        directory.open_engine(engine)
        directory.attach(engine, SPACE, SLOT_BYTES)
    first, second, third, other, another = keys_of("klmno")
    for key in (first, other):
        directory.commit(directory.reserve("a", SPACE, [Run(None, [key])], 0.0).lease, [True])
    directory.reserve("a", SPACE, [Run(first, [second])], 0.0)
    directory.reserve("b", SPACE, [Run(None, [another])], 0.0)
    assert first not in directory.spaces[SPACE].index, "the coldest block went"
    told.clear()
    directory.reserve("b", SPACE, [Run(None, [first, second, third])], 0.0)
    assert told == [(None, [first]), (second, [third])]
    directory.check()


def test_arc_goes_on_when_two_engines_store_the_same_prefix_in_a_full_pool():
    """Its record of who follows whom must never become a circle."""
    directory = Directory(Limits(3 * SLOT_BYTES, 3 * SLOT_BYTES), make_policy=Arc)
    for engine in "ab":
        directory.open_engine(engine)
        directory.attach(engine, SPACE, SLOT_BYTES)
    dice = random.Random(7)
    for _ in range(300):
        text = "".join(dice.sample("abcdefgh", dice.randint(1, 4)))
        leases = [
            directory.reserve(engine, SPACE, [Run(None, keys_of(text))], 0.0) for engine in "ab"
        ]
        for granted in leases:
            count = int((granted.offsets >= 0).sum())
            directory.commit(granted.lease, [dice.random() < 0.8 for _ in range(count)])
        directory.check()


def test_a_policy_that_proposes_nonsense_changes_nothing():
    class Mad(Lru):
        def candidates(self):
            for row in super().candidates():
                yield from (-1, 0, row, row, 10_000)

    directory = Directory(Limits(4 * SLOT_BYTES, 4 * SLOT_BYTES), make_policy=Mad)
    directory.open_engine("a")
    directory.attach("a", SPACE, SLOT_BYTES)
    for text in ("abcd", "efg", "h"):
        granted = directory.reserve("a", SPACE, [Run(None, keys_of(text))], 0.0)
        directory.commit(granted.lease, [True] * len(text))
        space = directory.spaces[SPACE]
        assert sorted({*space.free, *space.index.values()}) == [1, 2, 3, 4]
    assert set(space.index) >= set(keys_of("h"))


def test_over_a_tier_no_policy_spares_blocks_from_what_is_to_get_down():
    """DRAM is the only way to the tier: a block that finds no slot is in neither."""
    resident = {}
    for tiers in ((), (TierLimits("fs"),)):
        directory = Directory(Limits(5 * SLOT_BYTES, 5 * SLOT_BYTES), tiers, Slru)
        if tiers:
            directory.tiering.started(0, True)
        directory.open_engine("a")
        directory.attach("a", SPACE, SLOT_BYTES)
        for text in ("k", "lmnop"):
            granted = directory.reserve("a", SPACE, [Run(None, keys_of(text))], 0.0)
            stored = int((granted.offsets >= 0).sum())
            directory.commit(granted.lease, [True] * stored)
            if text == "k":
                found = directory.lookup("a", SPACE, keys_of("k"), 0.0)  # protects it
                directory.release(found.lease)
        resident[bool(tiers)] = set(directory.spaces[SPACE].index)
        directory.check()
    assert resident[False] == set(keys_of("klmno"))
    assert resident[True] == set(keys_of("lmnop"))
