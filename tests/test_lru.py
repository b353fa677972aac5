"""LRU against a plain list, newest first, and its placement rules in words."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tierkv.core.eviction.lru import Lru

ROWS = 24


def rows(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def fresh(*runs: tuple[int, ...]) -> Lru:
    """An order after these runs were stored, each a prefix of its own."""
    policy = Lru()
    policy.grow(ROWS + 1)
    for run in runs:
        policy.insert(rows(*run), 0)
    return policy


def given_up(policy: Lru) -> list[int]:
    return [int(row) for row in policy.candidates()]


# ---- rules -------------------------------------------------------------------------------------


def test_an_empty_order_has_no_candidates():
    assert given_up(Lru()) == []
    assert len(Lru()) == 0
    assert given_up(fresh()) == []


def test_of_a_run_the_tail_goes_first_and_the_head_last():
    assert given_up(fresh((1, 2, 3))) == [3, 2, 1]


def test_of_two_prefixes_the_older_goes_first():
    assert given_up(fresh((1, 2), (3, 4))) == [2, 1, 4, 3]


def test_a_continuation_is_placed_directly_older_than_its_predecessor():
    policy = fresh((1, 2), (3, 4))
    policy.insert(rows(5, 6), after=2)
    assert given_up(policy) == [6, 5, 2, 1, 4, 3], "not newer than the prefix stored later"


def test_a_continuation_of_the_newest_block_goes_before_it():
    policy = fresh((1,))
    policy.insert(rows(2), after=1)
    assert given_up(policy) == [2, 1]


def test_a_branch_is_placed_between_a_block_and_its_first_continuation():
    policy = fresh((1, 2, 3))
    policy.insert(rows(4, 5), after=1)
    assert given_up(policy) == [3, 2, 5, 4, 1]


def test_a_touched_prefix_becomes_the_newest_head_last_to_go():
    policy = fresh((1, 2, 3), (4, 5))
    policy.touch(rows(1, 2))
    assert given_up(policy) == [3, 5, 4, 2, 1]


def test_touching_gathers_blocks_that_were_stored_apart():
    policy = fresh((1,), (7,), (2,), (8,), (3,))
    policy.touch(rows(1, 2, 3))
    assert given_up(policy) == [7, 8, 3, 2, 1]


def test_touching_the_newest_prefix_changes_nothing():
    policy = fresh((1, 2), (3, 4))
    policy.touch(rows(3, 4))
    assert given_up(policy) == [2, 1, 4, 3]


def test_after_a_touch_no_block_goes_before_its_continuation():
    """Also when they lay the wrong way round before."""
    policy = fresh((3,), (2,), (1,))
    policy.touch(rows(3, 2, 1))
    assert given_up(policy) == [1, 2, 3]


def test_touching_or_removing_nothing_changes_nothing():
    policy = fresh((1, 2))
    policy.touch(rows())
    policy.insert(rows(), 1)
    policy.remove(rows())
    assert given_up(policy) == [2, 1]
    assert len(policy) == 2


def test_removed_rows_are_forgotten_and_may_come_back_elsewhere():
    policy = fresh((1, 2, 3, 4))
    policy.remove(rows(2, 4))
    assert given_up(policy) == [3, 1]
    assert len(policy) == 2
    policy.insert(rows(4, 2), 0)
    assert given_up(policy) == [3, 1, 2, 4]
    policy.remove(rows(1, 2, 3, 4))
    assert given_up(policy) == []
    assert len(policy) == 0


def test_growing_keeps_the_order():
    policy = fresh((1, 2), (3,))
    policy.grow(1000)
    policy.grow(5)
    policy.insert(rows(999), 0)
    assert given_up(policy) == [2, 1, 3, 999]


def test_candidates_are_told_one_by_one():
    walk = iter(fresh((1, 2), (3, 4)).candidates())
    assert [next(walk), next(walk)] == [2, 1]


# ---- against a list ----------------------------------------------------------------------------


@settings(max_examples=300)
@given(st.data())
def test_the_order_is_that_of_a_plain_list(data):
    policy, newest_first = fresh(), []
    for _ in range(data.draw(st.integers(1, 12), label="steps")):
        absent = sorted(set(range(1, ROWS + 1)) - set(newest_first))
        verb = data.draw(st.sampled_from(["insert", "touch", "remove"]), label="verb")
        source = absent if verb == "insert" else newest_first
        if not source:
            continue
        chosen = data.draw(st.lists(st.sampled_from(source), unique=True, max_size=8), label="rows")
        if verb == "insert":
            after = data.draw(st.sampled_from([0, *newest_first]), label="after")
            place = newest_first.index(after) + 1 if after else 0
            newest_first[place:place] = chosen
            policy.insert(rows(*chosen), after)
        else:
            newest_first = [row for row in newest_first if row not in chosen]
            if verb == "touch":
                newest_first = chosen + newest_first
                policy.touch(rows(*chosen))
            else:
                policy.remove(rows(*chosen))
        assert given_up(policy) == newest_first[::-1]
        assert len(policy) == len(newest_first)


@given(st.data())
def test_a_segment_in_any_place_moves_as_a_whole(data):
    """Runs lie side by side in the list; cuts at their borders are where links go wrong."""
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4), label="runs")
    numbers = iter(range(1, ROWS + 1))
    runs = [[next(numbers) for _ in range(length)] for length in lengths]
    policy = fresh(*map(tuple, runs))
    newest_first = [row for run in reversed(runs) for row in run]
    begin = data.draw(st.integers(0, len(newest_first)), label="begin")
    end = data.draw(st.integers(begin, len(newest_first)), label="end")
    part = newest_first[begin:end]
    policy.touch(rows(*part))
    newest_first = part + newest_first[:begin] + newest_first[end:]
    assert given_up(policy) == newest_first[::-1]
    policy.remove(rows(*part))
    assert given_up(policy) == newest_first[len(part) :][::-1]
