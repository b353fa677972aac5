"""One example per cell of the state table: absent, FILLING, RESIDENT (and doomed) by event."""

from __future__ import annotations

import pytest

from tests.core_world import SLOT_BYTES, SPACE, World, keys_of
from tierkv.core.namespace import State
from tierkv.core.values import Limits, Ready, Recall, Run


@pytest.fixture(autouse=True)
def books_are_right(world):
    yield
    world.directory.check()


# ---- lookup ------------------------------------------------------------------------------------


def test_lookup_of_an_absent_block_is_a_miss_and_opens_no_lease(world):
    found = world.lookup("a")
    assert (found.lease, len(found.offsets), found.pending) == (0, 0, 0)
    assert world.count("miss_absent") == 1


def test_lookup_of_a_resident_block_pins_it(world):
    world.store("ab")
    found = world.lookup("abc")
    assert len(found.offsets) == 2
    assert found.pending == 0
    assert world.pinned() == 2


def test_lookup_of_a_filling_block_is_pending_and_grows_at_commit(world):
    granted = world.reserve("ab")
    found = world.lookup("ab")
    assert (len(found.offsets), found.pending) == (0, 2)
    world.directory.commit(granted.lease, [True, True])
    (event,) = world.directory.take_events()
    assert event.pending == 0
    assert event.offsets.tolist() == granted.offsets.tolist()
    assert world.pinned() == 2


def test_lookup_of_a_block_whose_writer_closed_is_a_miss(world):
    world.join("w")
    world.reserve("a", engine="w")
    world.directory.close_engine("w")
    assert world.lookup("a").pending == 0


def test_lookup_of_a_doomed_block_is_a_miss(world):
    world.store("a")
    world.lookup("a")
    world.directory.purge()
    assert world.lookup("a").lease == 0


def test_a_hit_ends_at_the_first_absent_block(world):
    world.store("a")
    world.store("c")
    assert world.resident("abc") == 1


# ---- reserve -----------------------------------------------------------------------------------


def test_reserve_of_an_absent_block_takes_a_slot_that_nobody_can_read(world):
    granted = world.reserve("a")
    assert granted.lease
    assert granted.offsets.tolist() != [-1]
    assert world.resident("a") == 0


def test_reserve_of_a_filling_block_is_skipped(world):
    world.reserve("a")
    assert world.reserve("a").offsets.tolist() == [-1]
    assert world.count("skipped_present") == 1


def test_reserve_of_a_resident_block_is_skipped(world):
    world.store("a")
    assert world.reserve("a").lease == 0


def test_reserve_of_a_doomed_key_takes_another_slot(world):
    world.store("a")
    old = world.lookup("a").offsets.tolist()
    world.directory.purge()
    new = world.reserve("a").offsets.tolist()
    assert new != [-1]
    assert new != old


def test_reserve_without_room_grants_the_head_of_the_run_only(world):
    granted = world.reserve("abcdef")
    assert [o >= 0 for o in granted.offsets.tolist()] == [True] * 4 + [False] * 2
    assert world.count("skipped_no_room") == 2


def test_reserve_behind_an_absent_predecessor_is_skipped(world):
    assert world.reserve("b", after="a").lease == 0
    assert world.count("skipped_orphan") == 1


def test_one_lease_covers_all_runs_of_a_step(world):
    runs = [Run(None, keys_of("a")), Run(None, keys_of("b"))]
    granted = world.directory.reserve("e", SPACE, runs, 0.0)
    world.directory.commit(granted.lease, [True, False])
    assert world.resident("a") == 1
    assert world.resident("b") == 0


# ---- commit ------------------------------------------------------------------------------------


def test_commit_makes_a_filling_block_resident(world):
    world.store("a")
    assert world.resident("a") == 1


def test_a_failed_block_frees_its_slot_and_cuts_the_run_behind_it(world):
    granted = world.reserve("abc")
    world.directory.commit(granted.lease, [True, False, True])
    assert world.resident("abc") == 1
    assert len(world.directory.spaces[SPACE].free) == 3


def test_commit_of_an_unknown_lease_is_counted_and_ignored(world):
    world.directory.commit(99, [True])
    assert world.count("unknown_leases") == 1


def test_a_second_commit_of_one_lease_is_ignored(world):
    granted = world.reserve("a")
    world.directory.commit(granted.lease, [True])
    world.directory.commit(granted.lease, [True])
    assert world.count("unknown_leases") == 1
    assert world.resident("a") == 1


def test_commit_of_a_read_lease_is_ignored(world):
    world.store("a")
    found = world.lookup("a")
    world.directory.commit(found.lease, [True])
    assert world.pinned() == 1


def test_commit_with_the_wrong_number_of_outcomes_is_ignored(world):
    granted = world.reserve("ab")
    world.directory.commit(granted.lease, [True])
    assert world.resident("ab") == 0


def test_commit_behind_an_evicted_predecessor_frees_the_slot(world):
    world.store("a")
    granted = world.reserve("b", after="a")
    world.store("xyz")  # evicts a
    assert world.resident("a") == 0
    world.directory.commit(granted.lease, [True])
    assert world.count("commit_orphaned") == 1
    assert len(world.directory.spaces[SPACE].free) == 1


def test_commit_of_a_doomed_block_frees_its_slot(world):
    granted = world.reserve("a")
    world.directory.purge()
    world.directory.commit(granted.lease, [True])
    assert world.resident("a") == 0
    assert len(world.directory.spaces[SPACE].free) == 4


# ---- release, trim, engine death ---------------------------------------------------------------


def test_release_unpins(world):
    world.store("a")
    world.directory.release(world.lookup("a").lease)
    assert world.pinned() == 0


def test_release_of_an_unknown_lease_is_counted_and_ignored(world):
    world.directory.release(7)
    assert world.count("unknown_leases") == 1


def test_release_never_ends_a_write_lease(world):
    granted = world.reserve("a")
    world.directory.release(granted.lease)
    world.directory.commit(granted.lease, [True])
    assert world.resident("a") == 1


def test_release_of_a_doomed_block_frees_its_slot(world):
    world.store("a")
    lease = world.lookup("a").lease
    world.directory.purge()
    assert len(world.directory.spaces[SPACE].free) == 3
    world.directory.release(lease)
    assert len(world.directory.spaces[SPACE].free) == 4


def test_trim_keeps_the_head_and_stops_growth(world):
    world.store("ab")
    granted = world.reserve("c", after="b")
    found = world.lookup("abc")
    world.directory.trim(found.lease, 1)
    world.directory.commit(granted.lease, [True])
    assert world.pinned() == 1
    assert world.directory.take_events() == []


def test_trim_to_nothing_ends_the_lease(world):
    world.store("a")
    found = world.lookup("a")
    world.directory.trim(found.lease, 0)
    assert not world.directory.leases


def test_slots_of_a_dead_writer_stay_untouched_until_its_end(world):
    world.join("w")
    granted = world.reserve("abcd", engine="w")
    world.directory.close_engine("w")
    assert world.reserve("x").lease == 0, "quarantined slots are not granted"
    world.directory.end_engine("w")
    assert world.reserve("wxyz").lease
    assert granted.lease not in world.directory.leases


def test_a_key_whose_slot_is_quarantined_may_be_reserved_elsewhere(world):
    world.join("w")
    old = world.reserve("a", engine="w").offsets.tolist()
    world.directory.close_engine("w")
    assert world.store("a") == 1
    assert world.lookup("a").offsets.tolist() != old


def test_pins_of_a_dead_reader_stay_until_its_end(world):
    world.join("r")
    world.store("a")
    world.lookup("a", engine="r")
    world.directory.close_engine("r")
    assert world.pinned() == 1
    world.directory.end_engine("r")
    assert world.pinned() == 0
    assert world.resident("a") == 1


def test_a_reconnecting_engine_keeps_only_the_leases_it_holds(world):
    world.store("ab")
    kept, given_up = world.lookup("a").lease, world.lookup("ab").lease
    written = world.reserve("c", after="b").lease
    world.directory.keep_leases("e", [kept])
    assert set(world.directory.leases) == {kept}
    assert given_up not in world.directory.leases
    assert written not in world.directory.leases


# ---- victims -----------------------------------------------------------------------------------


def test_the_coldest_block_is_the_victim(world):
    for letter in "abcd":
        world.store(letter)
    world.resident("a")
    world.store("e")
    assert [world.resident(x) for x in "abcde"] == [1, 0, 1, 1, 1]


def test_eviction_never_takes_a_pinned_block(world):
    world.store("abcd")
    world.lookup("abcd")
    assert world.store("x") == 0
    assert world.count("skipped_no_room") == 1


def test_eviction_never_takes_a_filling_block(world):
    world.reserve("abcd")
    assert world.store("x") == 0


def test_the_tail_of_a_prefix_is_evicted_first(world):
    world.store("abcd")
    world.store("x")
    assert world.resident("abcd") == 3


def test_a_block_is_placed_directly_older_than_its_predecessor(world):
    world.store("ab")
    world.store("x")
    world.store("c", after="b")  # older than b, so older than x
    world.store("y")
    assert world.resident("abc") == 2
    assert world.resident("x") == 1


def test_a_touch_moves_the_whole_prefix_head_newest(world):
    world.store("ab")
    world.store("xy")
    world.directory.touch(SPACE, keys_of("ab"), 0.0)
    world.store("z")
    assert (world.resident("ab"), world.resident("xy")) == (2, 1)


def test_a_prompt_stored_in_steps_under_pressure_leaves_no_unreachable_block():
    world = World(slots=8)
    world.store("ZYX")
    letters = "abcdefghijklmnop"
    for at, letter in enumerate(letters):
        world.store(letter, after=letters[at - 1] if at else None)
        world.directory.check()  # asserts that each resident block's predecessor is resident
    assert world.resident(letters) == 8


# ---- purge and recall --------------------------------------------------------------------------


def test_purge_of_an_absent_namespace_drops_nothing(world):
    assert world.directory.purge() == 0


def test_purge_drops_resident_and_filling_blocks(world):
    world.store("ab")
    world.reserve("c", after="b")
    assert world.directory.purge(SPACE) == 3
    assert world.resident("abc") == 0


def test_purge_keeps_the_bytes_of_lease_holders(world):
    world.store("a")
    offset = world.lookup("a").offsets[0]
    world.directory.purge()
    granted = world.reserve("wxyz")
    assert offset not in granted.offsets.tolist()


def test_a_purge_ends_the_wait_of_a_growing_lease(world):
    world.reserve("a")
    found = world.lookup("a")
    world.directory.purge()
    (event,) = world.directory.take_events()
    assert event == Ready("e", found.lease, event.offsets, b"", 0)
    assert len(event.offsets) == 0


def test_too_many_pins_recall_the_youngest_waiting_lease():
    world = World(slots=4, pinned_share_max=0.5)
    world.store("ab")
    world.store("xy")
    world.directory.trim(world.lookup("ab").lease, 2)  # taken: never recalled
    young = world.lookup("xy").lease
    assert world.directory.take_events() == [Recall("e", young)]
    world.directory.check()


# ---- namespaces --------------------------------------------------------------------------------


def test_other_namespaces_never_hit(world):
    world.store("a")
    world.join("e", b"T" * 32)
    assert world.resident("a", space=b"T" * 32) == 0


def test_a_slot_larger_than_the_pool_is_refused_with_the_remedy(world):
    message = world.directory.attach("e", b"T" * 32, 1 << 30)
    assert "node.dram.capacity" in message
    assert "holds 0 slots" in message


def test_one_namespace_has_one_slot_size(world):
    assert "not 4096" in world.directory.attach("e", SPACE, 4096)


def test_a_private_namespace_is_refused_to_others_and_purged_at_its_engines_end(world):
    private = b"P" * 32
    world.directory.attach("e", private, SLOT_BYTES, is_private=True)
    world.directory.open_engine("f")
    assert "private" in world.directory.attach("f", private, SLOT_BYTES)
    world.store("a", space=private)
    world.directory.end_engine("e")
    assert not world.directory.spaces[private].index


def test_a_second_model_gets_hits_when_the_first_has_filled_the_pool():
    world = World(slots=16, units=4)
    for letter in "ABCDEFGHIJKLMNOP":
        world.store(letter)
    other = b"T" * 32
    world.join("e", other)
    assert world.store("abc", space=other) == 3
    assert world.resident("abc", space=other) == 3
    assert world.resident("P") == 1, "the warmest blocks of the first model stay"
    world.directory.check()


def test_a_handed_over_extent_leaves_no_unreachable_blocks():
    world = World(slots=16, units=4)
    world.store("ABCDEFGHIJKLMNOP")
    other = b"T" * 32
    world.join("e", other)
    world.store("ab", space=other)
    world.directory.check()
    kept = len(world.directory.spaces[SPACE].index)
    assert world.resident("ABCDEFGHIJKLMNOP") == kept


def test_an_extent_with_a_pinned_block_changes_hands_at_the_last_unpin():
    world = World(slots=4, units=2)
    world.store("ab")
    world.store("cd")
    lease = world.lookup("ab").lease
    lease2 = world.lookup("cd").lease
    other = b"T" * 32
    world.join("e", other)
    assert world.store("x", space=other) == 0
    world.directory.release(lease)
    world.directory.release(lease2)
    world.directory.check()
    assert world.store("x", space=other) == 1


def test_granting_can_be_held_back(world):
    world.directory.may_grant = False
    assert world.reserve("a").lease == 0
    world.directory.may_grant = True
    assert world.reserve("a").lease


def test_states_are_what_the_table_says(world):
    granted = world.reserve("a")
    space = world.directory.spaces[SPACE]
    row = space.index[keys_of("a")[0]]
    assert space.state[row] == State.FILLING
    world.directory.commit(granted.lease, [True])
    assert space.state[row] == State.RESIDENT
    world.lookup("a")
    world.directory.purge()
    assert space.state[row] == State.DOOMED


def test_a_layout_without_users_gives_even_its_last_extent():
    world = World(slots=4, units=1)
    world.store("abcd")
    world.directory.end_engine("e")
    other = b"T" * 32
    world.join("f", other)
    assert world.store("x", engine="f", space=other) == 1
    world.directory.check()


def test_a_run_may_follow_another_run_of_the_same_step(world):
    runs = [Run(None, keys_of("ab")), Run(keys_of("b")[0], keys_of("c"))]
    granted = world.directory.reserve("e", SPACE, runs, 0.0)
    world.directory.commit(granted.lease, [True] * 3)
    assert world.resident("abc") == 3


def test_slots_that_are_too_many_for_an_index_are_refused(world):
    from tierkv.core.directory import Directory

    directory = Directory(Limits(1 << 30, 1 << 20))
    directory.open_engine("e")
    assert "too many" in directory.attach("e", SPACE, 1)


@pytest.mark.parametrize("is_gone", [True, False])
def test_a_layout_that_nobody_hits_any_more_gives_its_extents_back(is_gone):
    """Heat is halved every minute, whether or not anybody asks."""
    world = World(slots=16, units=8)
    directory = world.directory
    letters = "ABCDEFGHIJKLMNOP"
    world.store(letters)
    for _ in range(50):
        world.resident(letters)
    if is_gone:
        directory.end_engine("e")
    other = b"T" * 32
    world.join("f", other)
    keys = keys_of("abcdefgh")
    for minute in range(1_440, 1_460):
        now = minute * 60.0
        granted = directory.reserve("f", other, [Run(None, keys)], now)
        if granted.lease:
            directory.commit(granted.lease, [True] * int((granted.offsets >= 0).sum()))
        found = directory.lookup("f", other, keys, now)
        if found.lease:
            directory.release(found.lease)
    directory.check()
    assert len(found.offsets) == len(keys)
