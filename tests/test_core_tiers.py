"""One example per cell of the state table that a tier has a part in, and the rules around it."""

from __future__ import annotations

import pytest

from tests.core_world import SPACE, keys_of
from tests.tier_world import TierWorld
from tierkv.core.directory import Directory
from tierkv.core.lanes import FAILURES_MAX, HUNG_DEADLINES
from tierkv.core.namespace import State
from tierkv.core.values import Limits, Op, Ready, Run, TaskEnded, TierLimits
from tierkv.types import NamespaceId, Outcome

BACK = TierLimits("fs")
THROUGH = TierLimits("fs", write_policy="write_through")
SELECTIVE = TierLimits("fs", write_policy="write_through_selective", hits_min=2)
ASKED = TierLimits("object", write_policy="write_through", is_indexed=False)
OK, MISSING, CORRUPT, FULL, FAILED = Outcome


@pytest.fixture
def make():
    """Makes worlds; at the end of a test the books of each must be right."""
    worlds: list[TierWorld] = []

    def build(*arguments, **named):
        worlds.append(TierWorld(*arguments, **named))
        return worlds[-1]

    yield build
    for world in worlds:
        world.directory.check()


# ---- lookup ------------------------------------------------------------------------------------


def test_lookup_of_an_absent_block_that_a_tier_holds_starts_its_promotion(make):
    world = make(4, BACK)
    world.holds("abc")
    found = world.lookup("abcd")
    assert (len(found.offsets), found.pending, found.is_promoting) == (0, 3, True)
    assert world.take() == ["READ abc"]


def test_lookup_of_a_block_that_nobody_holds_is_a_miss(make):
    world = make(4, BACK)
    assert world.lookup("a").lease == 0
    assert world.take() == []


def test_a_promotion_continues_what_is_resident(make):
    world = make(4, BACK)
    world.store("ab")
    world.holds("cd")
    found = world.lookup("abcd")
    assert (len(found.offsets), found.pending) == (2, 2)
    assert "READ cd" in world.take()


def test_a_promotion_ends_at_the_first_block_that_no_tier_holds(make):
    world = make(4, BACK)
    world.holds("abd")
    assert world.lookup("abcd").pending == 2


def test_lookup_of_a_promoting_block_joins_without_a_second_read(make):
    world = make(4, BACK)
    world.holds("ab")
    world.lookup("ab")
    world.join("f")
    assert world.lookup("ab", "f").pending == 2
    assert world.work() == ["READ ab"]
    assert [len(e.offsets) for e in world.events()] == [2, 2]
    assert world.pinned() == 2


def test_a_promotion_takes_the_longest_head_that_fits(make):
    world = make(4, BACK)
    world.store("x")
    pinned = world.lookup("x")
    world.holds("abcdef")
    assert world.lookup("abcdef").pending == 3
    assert world.count("promote_no_room") == 3
    world.directory.release(pinned.lease)


def test_what_is_hit_is_pinned_before_room_is_made_for_the_rest(make):
    """The hit blocks are the only ones that could be evicted, and must not be."""
    world = make(2, BACK)
    world.store("ab")
    world.work()
    world.holds("cd")
    found = world.lookup("abcd")
    assert (len(found.offsets), found.pending) == (2, 0)
    assert world.resident("ab") == 2


def test_a_promotion_stays_within_its_share_of_the_pool(make):
    world = make(8, BACK, promote_share_max=0.25)
    world.holds("abcdef")
    assert world.lookup("abcdef").pending == 2


def test_a_run_that_is_too_short_for_its_tier_is_not_read(make):
    world = make(4, TierLimits("fs", promote_min_tokens=256))
    world.directory.spaces[SPACE].block_tokens = 128
    world.holds("ab")
    assert world.lookup("a").pending == 0
    assert world.count("promote_too_short") == 1
    assert world.lookup("ab").pending == 2


def test_nothing_is_promoted_while_slots_may_not_be_granted(make):
    world = make(4, BACK)
    world.holds("a")
    world.directory.may_grant = False
    assert world.lookup("a").pending == 0


def test_the_fastest_tier_that_has_a_block_is_read(make):
    world = make(4, BACK, ASKED)
    world.holds("ab", 0)
    world.tiering.presence.add(SPACE, keys_of("abc"), 1)
    world.lookup("abc")
    world.take()
    assert [(job.tier, len(job.keys)) for job in world.jobs] == [(0, 2), (1, 1)]


# ---- probes ------------------------------------------------------------------------------------


def test_an_unindexed_tier_is_asked_and_the_answer_starts_the_promotion(make):
    world = make(4, ASKED)
    world.holds("ab")
    found = world.lookup("abc")
    assert (found.pending, found.is_promoting) == (3, True)
    assert world.work() == ["PROBE abc", "READ ab"], "what was denied is not asked again"
    assert world.events()[-1].pending == 0
    assert world.pinned() == 2


def test_a_probe_that_finds_nothing_is_a_miss_for_the_lease(make):
    world = make(4, ASKED)
    found = world.lookup("ab")
    world.work()
    (event,) = world.events()
    assert event == Ready("e", found.lease, event.offsets, b"", 0)


def test_a_late_probe_is_a_miss(make):
    world = make(4, ASKED)
    world.lookup("ab")
    world.take()
    world.tick(ASKED.deadline_s)
    (event,) = world.events()
    assert event.pending == 0


def test_an_indexed_tier_is_asked_until_it_is_known_whole(make):
    world = make(4, BACK)
    world.tiering.started(0, False)
    world.stores[0] |= set(keys_of("a"))
    world.lookup("a")
    assert world.work() == ["PROBE a", "READ a"]
    world.tiering.started(0, True)
    assert world.lookup("z").lease == 0


def test_every_tier_that_may_hold_a_block_is_asked_in_turn(make):
    world = make(4, TierLimits("fs", is_indexed=False), ASKED)
    world.holds("a", 1)
    world.lookup("a")
    assert world.work()[:3] == ["PROBE a", "PROBE a", "READ a"]


def test_a_probe_that_is_answered_in_pieces_counts_as_one(make):
    world = make(8, ASKED)
    world.holds("abcde")
    world.lookup("abcdefgh")
    world.take()
    (probe,) = world.jobs
    world.tiering.outcomes(0, probe.id, [OK] * 4, world.now)
    world.tiering.outcomes(0, probe.id, [OK] + [MISSING] * 3, world.now)
    world.jobs.clear()
    assert world.take() == ["READ abcde"]


def test_a_short_run_is_read_when_the_probe_finds_more_behind_it(make):
    world = make(4, TierLimits("object", is_indexed=False, promote_min_tokens=256))
    world.directory.spaces[SPACE].block_tokens = 128
    world.holds("abc")
    world.tiering.presence.add(SPACE, keys_of("a"), 0)
    world.lookup("abcd")
    assert world.work() == ["PROBE bcd", "READ abc"]
    world.directory.purge()
    world.tiering.presence.clear(0)
    world.stores[0] = set(keys_of("a"))
    world.lookup("ab")
    assert world.work() == ["PROBE ab"], "one block of 128 tokens is not worth a read"
    assert world.events()[-1].pending == 0


# ---- reserve, commit ---------------------------------------------------------------------------


def test_reserve_of_a_promoting_block_is_skipped(make):
    world = make(4, BACK)
    world.holds("a")
    world.lookup("a")
    assert world.reserve("a").lease == 0
    assert world.count("skipped_present") == 1


def test_write_through_writes_a_block_as_soon_as_it_is_stored(make):
    world = make(4, THROUGH)
    world.store("ab")
    assert world.dirty() == 2
    assert world.work() == ["WRITE ab"]
    assert (world.dirty(), world.below("ab")) == (0, "ab")


def test_write_back_owes_a_block_and_writes_it_when_it_is_cold(make):
    world = make(4, BACK, clean_tail=0.25, dirty_max=1.0)
    for before, letter in [(None, "a"), ("a", "b"), ("b", "c")]:
        world.store(letter, after=before)
    assert world.dirty() == 3
    assert world.take() == [], "one slot of four is free: the clean tail is there"
    world.store("d", after="c")
    assert world.work() == ["WRITE d"], "the coldest block first"


def test_the_clean_tail_grows_with_what_is_needed_at_once(make):
    """Else a large request would shed debts while clean blocks are few."""
    world = make(8, BACK, clean_tail=0.01, dirty_max=1.0)
    world.store("abcde")
    world.work()
    world.store("vwxyz")
    assert world.count("writeback_shed") == 0
    assert world.below("abcde") != ""


def test_above_dirty_max_write_back_works_without_regard_to_age(make):
    world = make(8, BACK, dirty_max=0.25)
    world.store("ab")
    assert world.take() == []
    world.store("c", after="b")
    assert world.take() == ["WRITE cba"]


def test_the_selective_policy_writes_a_block_at_its_second_use(make):
    world = make(4, SELECTIVE)
    world.store("ab")
    assert world.take() == []
    assert world.resident("ab") == 2
    assert world.work() == ["WRITE ab"]
    assert world.dirty() == 0


def test_the_selective_policy_counts_uses_of_blocks_that_were_evicted(make):
    world = make(2, SELECTIVE)
    world.store("ab")
    world.store("xy")
    world.store("ab")
    assert world.work() == ["WRITE ab"]


def test_the_selective_policy_remembers_large_blocks_of_a_tier_without_bounds():
    slot, space = 2 << 20, NamespaceId(b"L" * 32)
    tier = TierLimits("object", write_policy="write_through_selective", is_indexed=False)
    directory = Directory(Limits(8 * slot, 8 * slot, pinned_share_max=1.0), [tier])
    directory.tiering.started(0, True)
    directory.open_engine("e")
    directory.attach("e", space, slot)
    keys = keys_of("abcdefgh")
    granted = directory.reserve("e", space, [Run(None, keys)], 0.0)
    directory.commit(granted.lease, [True] * len(keys))
    directory.release(directory.lookup("e", space, keys, 0.0).lease)
    jobs = directory.tiering.take_jobs(0.0)
    assert sum(len(job.keys) for job in jobs if job.op is Op.WRITE) == len(keys)


def test_a_block_that_the_tier_has_is_not_owed_again(make):
    world = make(4, THROUGH)
    world.holds("ab")
    world.store("abc")
    assert world.work() == ["WRITE c"]


def test_blocks_of_a_private_namespace_never_leave_dram(make):
    world = make(4, THROUGH)
    space = b"P" * 32
    world.directory.attach("e", space, 8192, "", True)
    granted = world.reserve("a", space=space)
    world.directory.commit(granted.lease, [True])
    assert world.work() == []


def test_beyond_the_backlog_a_store_is_not_written_and_that_is_counted(make):
    world = make(8, TierLimits("fs", write_policy="write_through", backlog_max=2 * 8192))
    world.store("abcd")
    assert world.count("backlog_shed") == 2
    assert world.work() == ["WRITE ab"]


# ---- promote ok, promote failed ----------------------------------------------------------------


def test_a_promoted_block_is_resident_clean_and_pinned_once_per_waiting_lease(make):
    world = make(4, BACK)
    world.holds("a")
    first = world.lookup("a")
    world.join("f")
    second = world.lookup("a", "f")
    world.work()
    space = world.directory.spaces[SPACE]
    row = space.index[keys_of("a")[0]]
    assert (space.state[row], space.pins[row], space.owed[row]) == (State.RESIDENT, 2, 0)
    assert [e.sources for e in world.events()] == [b"\1", b"\1"]
    world.directory.release(first.lease)
    world.directory.release(second.lease)
    assert world.pinned() == 0


def test_a_failed_promotion_frees_its_slot_and_shortens_the_leases(make):
    world = make(4, BACK)
    world.holds("abc")
    world.lookup("abc")
    world.take()
    world.answer(OK, CORRUPT, OK)
    (event,) = [e for e in world.events() if e.pending == 0]
    assert len(event.offsets) == 1
    assert len(world.directory.spaces[SPACE].free) == 3
    assert world.count("promote_corrupt") == 1


@pytest.mark.parametrize("outcome", [MISSING, CORRUPT])
def test_after_a_failed_promotion_nobody_believes_that_the_tier_has_the_block(make, outcome):
    world = make(4, BACK)
    world.holds("ab")
    world.lookup("ab")
    world.take()
    world.answer(outcome, OK)
    assert world.below("ab") == "b"
    assert world.lookup("ab").lease == 0
    assert world.take() == [], "at most one read of a bad block"


def test_blocks_that_arrive_out_of_order_become_readable_in_order(make):
    world = make(200, TierLimits("fs", read_threads=4))
    keys = "".join(chr(n) for n in range(33, 123))
    world.holds(keys)
    world.lookup(keys)
    assert len(world.take()) == 2
    world.jobs.rotate(1)
    world.answer()
    assert world.events() == [], "the head is not there yet"
    world.answer()
    assert len(world.events()[-1].offsets) == len(keys)


def test_a_promotion_whose_predecessor_was_evicted_meanwhile_is_given_up(make):
    world = make(4, BACK)
    world.store("a")
    world.work()
    world.holds("b")
    found = world.lookup("ab")
    world.take()
    world.directory.release(found.lease)
    world.directory.purge()
    world.answer(OK)
    assert len(world.directory.spaces[SPACE].free) == 4


def test_a_block_from_a_lower_tier_is_owed_to_the_tiers_above(make):
    world = make(4, THROUGH, ASKED)
    world.holds("a", 1)
    found = world.lookup("a")
    world.work()
    assert world.below("a", 0) == "a"
    assert found.pending == 1


def test_a_read_that_merely_failed_leaves_it_to_an_indexed_tier_to_tell(make):
    """The block is still there if the tier says nothing; it would never tell it a second time."""
    world = make(4, BACK)
    world.holds("a")
    world.lookup("a")
    world.take()
    world.answer(FAILED)
    assert world.below("a") == "a"
    world.tell(0, keys_of("a"), False)
    assert world.below("a") == ""


def test_after_a_failed_read_an_unindexed_tier_is_asked_again(make):
    world = make(4, ASKED)
    world.tiering.presence.add(SPACE, keys_of("a"), 0)
    world.lookup("a")
    world.take()
    world.answer(FAILED)
    assert world.below("a") == ""


def test_a_block_that_is_listed_behind_a_lost_predecessor_gets_no_second_row(make):
    """The predecessor was given up while an engine writes the block; the tier has both."""
    world = make(3, BACK, dirty_max=1.0)
    world.holds("ab")
    world.store("a")
    filling = world.reserve("b", after="a")
    world.store("xy")
    assert world.resident("a") == 0, "the test needs the predecessor gone"
    world.lookup("ab")
    world.directory.check()
    world.work()
    world.directory.commit(filling.lease, [True])
    world.directory.check()
    world.store("pqr")


def test_a_promotion_behind_a_block_that_an_engine_is_writing_waits_for_it(make):
    world = make(4, BACK)
    world.join("w")
    granted = world.reserve("a", engine="w")
    world.holds("b")
    assert world.lookup("ab").pending == 2
    assert world.work() == ["READ b"]
    world.directory.commit(granted.lease, [True])
    assert len(world.events()[-1].offsets) == 2
    assert world.count("promote_orphaned") == 0


def test_a_promotion_behind_a_block_whose_writer_fails_is_given_up(make):
    world = make(4, BACK)
    world.join("w")
    granted = world.reserve("a", engine="w")
    world.holds("b")
    world.lookup("ab")
    world.work()
    world.directory.commit(granted.lease, [False])
    assert world.events()[-1].pending == 0
    assert len(world.directory.spaces[SPACE].free) == 4


def test_a_promotion_behind_a_lost_write_lease_is_given_up_at_once(make):
    """The engine reconnected and does not vouch for the lease."""
    world = make(4, BACK)
    world.join("f")
    world.reserve("a", engine="f")
    world.holds("b")
    world.lookup("ab")
    world.work()
    world.directory.keep_leases("f", [])
    assert world.events()[-1].pending == 0
    assert world.tiering.promoter.bytes == 0


def test_hits_make_the_cleaner_look_again(make):
    """They move clean blocks to the warm end; the cold end is owed then."""
    world = make(8, BACK, clean_tail=0.25, dirty_max=1.0)
    world.store("ab")
    world.work()
    world.holds("xy")
    found = world.lookup("xy")
    world.take()
    world.answer()
    world.directory.release(found.lease)
    world.store("cdef", after="b")
    world.work()
    for _ in range(3):
        assert world.resident("xy") == 2
    world.work()
    world.store("pq")
    assert world.resident("xy") == 2, "just used"


def test_reads_of_a_run_that_failed_are_not_begun(make):
    world = make(200, TierLimits("fs", read_threads=1))
    keys = "".join(chr(n) for n in range(33, 123))
    world.holds(keys)
    world.lookup(keys)
    world.take()
    world.answer(*[MISSING] * 64)
    assert world.take() == []
    assert len(world.directory.spaces[SPACE].free) == 200


# ---- demote ok, demote failed ------------------------------------------------------------------


def test_a_block_that_is_being_written_stays_until_that_ended(make):
    world = make(2, THROUGH)
    world.store("ab")
    world.take()
    assert world.reserve("xy").lease == 0
    world.answer()
    assert world.store("xy") == 2


@pytest.mark.parametrize(("outcome", "counter"), [(FULL, "demote_full"), (FAILED, "demote_failed")])
def test_a_failed_demotion_ends_the_debt_and_is_counted(make, outcome, counter):
    world = make(4, THROUGH)
    world.store("a")
    world.take()
    world.answer(outcome)
    assert (world.count(counter), world.dirty(), world.pinned()) == (1, 0, 0)
    assert world.resident("a") == 1


def test_after_failures_in_a_row_writes_pause_and_resume_by_themselves(make):
    world = make(16, TierLimits("fs", write_policy="write_through", write_threads=1))
    for letter in "abc"[:FAILURES_MAX]:
        world.store(letter)
        world.take()
        world.answer(FULL)
    world.store("x")
    assert world.take() == []
    world.tick(1.0)
    assert world.work() == ["WRITE x"]
    world.store("y")
    assert world.work() == ["WRITE y"]


def test_a_block_that_the_tier_gave_up_is_not_written_again(make):
    world = make(4, BACK)
    world.holds("a")
    world.store("a")
    world.tell(0, keys_of("a"), False)
    assert (world.dirty(), world.below("a")) == (0, "")


def test_a_tier_that_is_too_small_is_not_written_for_ever(make):
    """An idle cache must come to rest."""
    world = make(24, BACK, dirty_max=0.1)
    keys = "abcdefghijklmnopqrst"
    world.store(keys)
    writes = 0
    for _ in range(50):
        writes += sum(line.startswith("WRITE") for line in world.take())
        while world.jobs:
            world.answer()
            for key in sorted(world.stores[0])[:-8]:
                world.stores[0].discard(key)
                world.tell(0, [key], False)
    assert writes <= 2


def test_above_dirty_max_every_write_thread_has_work(make):
    world = make(400, TierLimits("fs", write_threads=4), dirty_max=0.1)
    keys = [bytes([n, 1]) for n in range(250)]
    granted = world.directory.reserve("e", SPACE, [Run(None, keys)], 0.0)
    world.directory.commit(granted.lease, [True] * 250)
    assert len(world.take()) == 4


def test_a_tier_that_is_down_does_not_keep_others_from_being_written(make):
    world = make(8, BACK, TierLimits("object"), dirty_max=0.1)
    world.tiering.process_lost(0, 0.0)
    world.store("abcd")
    world.work()
    assert world.below("abcd", 1) == "abcd"
    world.tiering.started(0, True)
    world.store("e", after="d")
    world.work()
    assert world.below("abcde", 0) == "abcde"


def test_a_name_is_never_written_twice_at_a_time(make):
    world = make(4, THROUGH)
    world.store("a")
    world.take()
    world.directory.purge()
    world.store("a")
    assert world.take() == []
    world.answer()
    assert world.work() == []
    assert world.dirty() == 0, "the tier has it by now"


# ---- release, death ----------------------------------------------------------------------------


def test_a_promotion_goes_on_when_its_engine_dies(make):
    world = make(4, BACK)
    world.holds("a")
    world.lookup("a")
    world.take()
    world.directory.end_engine("e")
    world.answer()
    world.join("f")
    assert len(world.lookup("a", "f").offsets) == 1


def test_a_released_lease_gets_nothing_more(make):
    world = make(4, BACK)
    world.holds("a")
    found = world.lookup("a")
    world.directory.release(found.lease)
    world.work()
    assert (world.events(), world.pinned()) == ([], 0)


# ---- victims -----------------------------------------------------------------------------------


def test_a_promoting_block_is_never_a_victim(make):
    world = make(2, BACK)
    world.holds("ab")
    found = world.lookup("ab")
    world.directory.release(found.lease)
    assert world.reserve("x").lease == 0


def test_clean_blocks_are_given_up_before_owed_ones(make):
    world = make(4, BACK, dirty_max=1.0, clean_tail=0.01)
    world.store("ab")
    world.holds("xy")
    assert world.dirty() == 2
    found = world.lookup("xy")
    assert world.take()[0] == "READ xy"
    world.answer()
    world.directory.release(found.lease)
    world.store("p")
    assert world.count("writeback_shed") == 0
    assert world.resident("ab") == 2, "older, yet owed"


def test_without_a_clean_block_the_coldest_owed_one_goes_and_is_counted(make):
    world = make(2, BACK, dirty_max=1.0, clean_tail=0.01)
    world.store("a")
    world.store("b")
    assert world.store("c") == 1
    assert world.count("writeback_shed") == 1
    assert (world.resident("a"), world.resident("b")) == (0, 1)


def test_a_clean_block_with_an_owed_successor_is_not_given_up_alone(make):
    world = make(4, BACK, dirty_max=1.0, clean_tail=0.01)
    world.holds("ab")
    world.store("abc")
    world.store("x")
    world.store("y")
    assert world.resident("abc") in (2, 3)
    assert len(world.directory.spaces[SPACE].orphans()) == 0


def test_a_block_that_dram_gives_up_is_touched_in_its_tier(make):
    world = make(2, THROUGH)
    world.store("ab")
    world.work()
    world.store("x")
    assert "TOUCH b" in world.take()


# ---- purge -------------------------------------------------------------------------------------


def purge(world, tiers=(0,), space=None):
    return world.tiering.purge(space, tiers, None, world.directory.purge(), world.now)


def test_a_purge_clears_what_tiers_hold_and_is_acknowledged_afterwards(make):
    world = make(4, THROUGH)
    world.holds("xyz")
    task = purge(world)
    assert world.lookup("xyz").lease == 0, "nothing is promoted from here on"
    assert world.events() == []
    world.work()
    assert world.events() == [TaskEnded(task, {"dram": 0, "fs": 3}, ())]


def test_a_purged_promotion_is_dropped_when_it_arrives(make):
    world = make(4, BACK)
    world.holds("a")
    world.lookup("a")
    world.take()
    purge(world)
    world.answer(OK)
    assert world.resident("a") == 0
    assert len(world.directory.spaces[SPACE].free) == 4


def test_a_demotion_that_ends_after_a_purge_is_followed_by_a_drop(make):
    world = make(4, THROUGH)
    world.store("a")
    world.take()
    (writing,) = world.jobs
    task = purge(world)
    world.take()
    world.jobs.rotate(-1)
    world.answer()  # the purge of the store ends first
    assert world.events() == []
    assert world.answer() == writing
    assert world.stores[0] == set(keys_of("a")), "the late write brought it back"
    assert world.below("a") == ""
    assert world.work() == ["DROP a"]
    assert world.stores[0] == set()
    assert world.events() == [TaskEnded(task, {"dram": 1, "fs": 0}, ())]


def test_a_write_that_failed_is_dropped_after_a_purge_too(make):
    """A killed process may have finished it, and a store may get it after its deadline."""
    world = make(4, THROUGH)
    world.store("a")
    world.take()
    purge(world)
    epoch = world.tiering.process_lost(0, world.now)
    world.stores[0] |= set(keys_of("a"))
    world.jobs.clear()
    world.tiering.process_gone(0, epoch, world.now)
    world.tiering.started(0, True)
    assert "DROP a" in world.work()
    assert world.stores[0] == set()


def test_a_purged_block_that_cannot_be_dropped_is_told(make):
    world = make(4, THROUGH)
    world.store("a")
    world.take()
    purge(world)
    world.answer()
    world.take()
    while world.jobs:
        job = world.jobs[0]
        world.answer(*([FAILED] if job.op is Op.DROP else []))
    (event,) = world.events()
    assert event.problems == ("fs: a purged block could not be dropped",)


def test_a_purge_does_not_wait_for_ever_for_a_tier_that_never_comes_back(make):
    world = make(4, THROUGH)
    world.store("a")
    world.take()
    purge(world)
    world.tick(0.1)
    world.answer()  # the late write: a drop must follow
    epoch = world.tiering.process_lost(0, world.now)
    world.tiering.process_gone(0, epoch, world.now)
    world.tick(31.0)
    world.tick(31.0)
    (event,) = world.events()
    assert event.problems == ("fs: does not answer",)


def test_a_purge_ends_although_reads_that_it_waits_for_are_never_begun(make):
    """What waits behind a purged head is forgotten, and the purge must hear so."""
    world = make(8, TierLimits("fs", read_threads=1), TierLimits("object"))
    world.holds("ac", 0)
    world.holds("b", 1)
    world.lookup("abc")
    world.take()
    purge(world, (0, 1))
    world.work()
    while world.jobs:
        world.answer()
    world.work()
    assert [type(e) for e in world.events() if isinstance(e, TaskEnded)] == [TaskEnded]
    world.holds("a")
    assert world.lookup("a").pending == 1, "the tier is read again"


def test_a_purge_by_age_leaves_what_was_used_since(make):
    world = make(4, THROUGH)
    world.store("a")
    world.now = 100.0
    world.store("b")
    world.directory.lookup("e", SPACE, keys_of("b"), 100.0)
    assert world.directory.purge(SPACE, 50.0, world.now) == 1
    assert world.resident("b") == 1


def test_a_purge_of_a_tier_that_is_down_is_acknowledged_with_a_problem(make):
    world = make(4, THROUGH)
    epoch = world.tiering.process_lost(0, world.now)
    world.tiering.process_gone(0, epoch, world.now)
    purge(world)
    world.tick(31.0)
    (event,) = world.events()
    assert event.problems == ("fs: does not answer",)


# ---- deadlines and processes -------------------------------------------------------------------


def test_a_late_read_is_a_miss_at_once_and_keeps_its_slot(make):
    world = make(2, BACK)
    world.holds("ab")
    world.lookup("ab")
    world.take()
    world.tick(BACK.deadline_s)
    (event,) = world.events()
    assert (len(event.offsets), event.pending) == (0, 0)
    assert world.reserve("xy").lease == 0, "the read may still write into both slots"
    world.answer(OK, OK)
    assert len(world.directory.spaces[SPACE].free) == 2
    assert world.below("ab") == "ab", "slow, yet there"


def test_a_read_that_never_began_is_late_too_and_frees_its_slots(make):
    world = make(200, TierLimits("fs", read_threads=1))
    keys = "".join(chr(n) for n in range(33, 123))
    world.holds(keys)
    world.lookup(keys)
    assert len(world.take()) == 1
    world.tick(BACK.deadline_s)
    assert world.events()[-1].pending == 0
    assert len(world.directory.spaces[SPACE].free) == 200 - 64
    world.answer()
    assert len(world.directory.spaces[SPACE].free) == 200


def test_a_hung_read_does_not_take_the_thread_of_the_next_one(make):
    world = make(8, TierLimits("fs", read_threads=1))
    world.holds("ab")
    world.lookup("a")
    assert world.take() == ["READ a"]
    world.lookup("b")
    assert world.take() == []
    world.tick(1.9)
    world.tick(0.1)
    world.lookup("b")
    assert world.take() == ["READ b"]


def test_waiting_for_a_thread_does_not_speak_against_the_tier(make):
    world = make(8, TierLimits("fs", read_threads=1))
    world.holds("abcde")
    for letter in "abcd":
        world.lookup(letter)
    world.take()
    world.tick(1.5)
    world.answer()
    world.take()
    world.tick(0.5)  # all are late now; the running one has run for half a second
    assert world.lookup("e").pending == 1


def test_a_process_hangs_when_an_operation_is_three_deadlines_old(make):
    world = make(4, BACK)
    world.holds("a")
    world.lookup("a")
    world.take()
    world.tick(HUNG_DEADLINES * BACK.deadline_s - 0.1)
    assert world.tiering.hung(world.now) == []
    world.tick(0.1)
    assert world.tiering.hung(world.now) == [0]


def test_slots_of_a_killed_process_are_free_when_it_is_gone(make):
    world = make(2, BACK)
    world.holds("ab")
    world.lookup("ab")
    world.take()
    epoch = world.tiering.process_lost(0, world.now)
    assert world.events()[-1].pending == 0
    world.tiering.started(0, True)
    assert world.reserve("xy").lease == 0
    world.tiering.process_gone(0, epoch, world.now)
    assert world.store("xy") == 2


def test_an_answer_of_a_process_that_is_gone_is_ignored(make):
    world = make(4, BACK)
    world.holds("a")
    world.lookup("a")
    world.take()
    epoch = world.tiering.process_lost(0, world.now)
    world.tiering.process_gone(0, epoch, world.now)
    world.answer(OK)
    assert world.count("unknown_jobs") == 1


def test_what_an_indexed_tier_holds_is_told_anew_by_the_next_process(make):
    world = make(4, BACK)
    world.holds("a")
    world.tiering.process_lost(0, world.now)
    world.tiering.started(0, True)
    assert world.lookup("a").lease == 0
    world.holds("a")
    assert world.lookup("a").pending == 1


# ---- hand-over, flush, sweep -------------------------------------------------------------------


def two_layouts(make, **limits):
    world = make(4, BACK, units=2, dirty_max=1.0, clean_tail=0.01, **limits)
    world.join("e", b"T" * 32, 8192)
    world.store("abcd")
    return world


def test_an_extent_that_changes_hands_is_written_before_it_is_dropped(make):
    world = two_layouts(make)
    assert world.reserve("x", space=b"T" * 32).lease == 0
    assert world.dirty() == 4
    written = "".join(line.removeprefix("WRITE ") for line in world.work())
    assert set("cd") <= set(written), "the tail of the chain lies in the extent that is given"
    world.tick(0.3)
    assert world.reserve("x", space=b"T" * 32).lease
    assert world.count("writeback_shed") == 0


def test_an_extent_whose_blocks_nobody_writes_changes_hands_in_the_end(make):
    world = two_layouts(make)
    world.reserve("x", space=b"T" * 32)
    world.tick(11.0)
    assert world.reserve("x", space=b"T" * 32).lease
    assert world.count("writeback_shed") > 0


def test_a_flush_writes_every_debt_hottest_first(make):
    world = make(200, TierLimits("fs", write_threads=1))
    keys = "".join(chr(n) for n in range(33, 123))
    world.store(keys[:80])
    world.tiering.cleaner.flush()
    assert world.tiering.cleaner.unflushed() == 80
    first = world.take()[0]
    assert first.startswith("WRITE " + keys[:10])
    while world.jobs:
        world.answer()
    world.work()
    assert world.tiering.cleaner.unflushed() == 0


def test_a_flush_writes_beyond_the_backlog_and_what_is_stored_meanwhile(make):
    world = make(40, TierLimits("fs", write_threads=1, backlog_max=2 * 8192))
    world.store("abcdefghijklmnop")
    world.tiering.cleaner.flush()
    world.store("q", after="p")
    world.work()
    assert (world.tiering.cleaner.unflushed(), world.count("backlog_shed")) == (0, 0)
    assert len(world.stores[0]) == 17


def test_write_back_sheds_nothing_for_want_of_a_backlog(make):
    world = make(64, TierLimits("fs", backlog_max=2 * 8192), dirty_max=0.1)
    for start in range(0, 48, 8):
        world.store("".join(chr(65 + start + n) for n in range(8)))
        world.work()
    assert world.count("backlog_shed") == 0


def test_a_tier_that_is_down_at_a_flush_is_past_hope_and_still_counted(make):
    world = make(4, BACK, dirty_max=1.0)
    world.store("ab")
    world.tiering.process_lost(0, 0.0)
    cleaner = world.tiering.cleaner
    assert (cleaner.unflushed(only_up=True), cleaner.unflushed()) == (0, 2)


def test_a_flush_leaves_tiers_alone_that_do_not_last(make):
    world = make(4, TierLimits("memory", is_durable=False))
    world.store("ab")
    assert world.tiering.cleaner.unflushed() == 0
