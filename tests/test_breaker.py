"""The circuit breaker: when it opens, how rarely it tries, and how it closes."""

from __future__ import annotations

import itertools
import random

import pytest

from tierkv.service.breaker import (
    FAILURE_SHARE_MAX,
    FAILURES_IN_A_ROW_MAX,
    RETRY_FIRST_S,
    RETRY_MAX_S,
    WINDOW,
    Breaker,
)


def opened(now: float = 0.0) -> Breaker:
    breaker = Breaker()
    for _ in range(FAILURES_IN_A_ROW_MAX):
        breaker.note(False, now)
    assert breaker.is_open
    return breaker


def tries(breaker: Breaker, end: float, start: float = 0.0, step: float = 0.25) -> list[float]:
    """When it would send a trial, asked four times a second."""
    times = [start + n * step for n in range(int((end - start) / step) + 1)]
    return [now for now in times if breaker.may_try(now)]


def test_a_new_breaker_is_closed_and_needs_no_trial():
    breaker = Breaker()
    assert not breaker.is_open
    assert not breaker.may_try(1e9)


def test_successes_never_open_it():
    breaker = Breaker()
    for now in range(1000):
        breaker.note(True, float(now))
    assert not breaker.is_open


def test_three_failures_in_a_row_open_it_and_two_do_not():
    breaker = Breaker()
    breaker.note(False, 0.0)
    breaker.note(False, 0.0)
    assert not breaker.is_open
    breaker.note(False, 0.0)
    assert breaker.is_open
    assert FAILURES_IN_A_ROW_MAX == 3


def test_a_success_starts_the_row_anew():
    breaker = Breaker()
    for is_ok in [False, False, True] * 3:
        breaker.note(is_ok, 0.0)
    assert not breaker.is_open


def scattered(failures: int, total: int) -> list[bool]:
    """So many failures, never two in a row, the last one at the end."""
    marks = [True] * total
    for n in range(failures):
        marks[total - 1 - n * (total // failures)] = False
    return marks


@pytest.mark.parametrize(("failures", "is_open"), [(9, False), (11, True), (30, True)])
def test_more_than_a_tenth_of_the_last_hundred_open_it(failures, is_open):
    assert (WINDOW, FAILURE_SHARE_MAX) == (100, 0.1)
    breaker = Breaker()
    for is_ok in scattered(failures, WINDOW):
        breaker.note(is_ok, 0.0)
    assert breaker.is_open == is_open


def test_the_share_needs_a_whole_window():
    breaker = Breaker()
    for is_ok in [True, False] * ((WINDOW - 2) // 2):
        breaker.note(is_ok, 0.0)
    assert not breaker.is_open, "half of 98 failed, and nobody knows yet"


def test_failures_of_long_ago_do_not_count():
    breaker = Breaker()
    for is_ok in scattered(9, WINDOW) + [True] * WINDOW + scattered(9, WINDOW):
        breaker.note(is_ok, 0.0)
    assert not breaker.is_open


def test_an_open_breaker_tries_at_doubling_intervals_up_to_a_maximum():
    assert (RETRY_FIRST_S, RETRY_MAX_S) == (0.5, 30.0)
    times = tries(opened(), 160.0)
    assert times[:6] == [0.5, 1.5, 3.5, 7.5, 15.5, 31.5]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert set(gaps[5:]) == {RETRY_MAX_S}


def test_the_first_trial_is_counted_from_the_opening():
    breaker = opened(now=1000.0)
    assert not breaker.may_try(1000.0 + RETRY_FIRST_S - 0.01)
    assert breaker.may_try(1000.0 + RETRY_FIRST_S)


def test_one_trial_is_one_trial():
    breaker = opened()
    assert breaker.may_try(5.0)
    assert not breaker.may_try(5.0)


def test_failures_of_an_open_breaker_do_not_put_off_the_trial():
    breaker = opened()
    for _ in range(50):
        breaker.note(False, 0.4)
    assert tries(breaker, 2.0) == [0.5, 1.5]


def test_a_late_success_alone_does_not_close_it():
    """An answer to an old request says nothing about the next one; the client decides."""
    breaker = opened()
    breaker.note(True, 0.1)
    assert breaker.is_open


def test_a_closed_breaker_has_forgotten_everything():
    breaker = opened()
    breaker.close(0.5)
    assert not breaker.is_open
    assert not breaker.may_try(1e9)
    breaker.note(False, 1.0)
    breaker.note(False, 1.0)
    assert not breaker.is_open, "the row starts anew"
    breaker.note(False, 1.0)
    assert breaker.is_open


def test_an_opening_after_a_close_starts_with_the_shortest_interval():
    breaker = opened()
    assert len(tries(breaker, 100.0)) > 5
    breaker.close(100.0)
    for _ in range(FAILURES_IN_A_ROW_MAX):
        breaker.note(False, 200.0)
    assert tries(breaker, 204.0, start=200.0) == [200.5, 201.5, 203.5]


def test_a_breaker_that_opens_again_soon_is_tried_more_rarely():
    """Else a daemon that is always a little too slow opens and closes it for ever."""
    breaker, now, first = opened(), 0.0, []
    for _ in range(5):
        while not breaker.may_try(now):
            now += 0.25
        first.append(now)
        breaker.close(now)
        for _ in range(FAILURES_IN_A_ROW_MAX):
            breaker.note(False, now)
    gaps = [b - a for a, b in itertools.pairwise(first)]
    assert gaps == sorted(gaps)
    assert gaps[-1] >= 8 * gaps[0]


def test_it_opens_exactly_when_a_plain_count_says_so():
    seed = 5
    print(f"seed {seed}")
    rolls = random.Random(seed)
    for share in (0.02, 0.08, 0.15, 0.4):
        breaker, history = Breaker(), []
        for now in range(2000):
            history.append(rolls.random() >= share)
            breaker.note(history[-1], float(now))
            is_row = len(history) >= 3 and not any(history[-3:])
            last = history[-WINDOW:]
            is_share = len(last) == WINDOW and last.count(False) > WINDOW * FAILURE_SHARE_MAX
            assert breaker.is_open == (is_row or is_share)
            if breaker.is_open:
                breaker.close(float(now))
                history.clear()
