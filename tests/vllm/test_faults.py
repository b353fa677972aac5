"""Copies that fail, overlap or come late, and daemons that die: same output, living engine."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from tests.vllm.conftest import PROMPTS
from tests.vllm.driver import TOLERANCE, difference
from tests.vllm.gates import CURRENT
from tierkv.device.base import Direction

pytestmark = pytest.mark.vllm

LATE_MAX = 20  # misses in a row of a daemon that has 50 ms, before a test calls it silent


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_a_failed_load_is_computed_and_not_tried_for_ever(make_engine, baseline, load):
    driver = make_engine(gated=True, engine={"load_mode": load})
    driver.purge()
    driver.generate(PROMPTS[0])
    driver.forget_device()
    gate = CURRENT["gate"]
    before = gate.submitted[Direction.LOAD]
    gate.fail_next(Direction.LOAD, 1)
    result = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], result) <= TOLERANCE
    per_load = 1 if load == "async" else 4  # layer by layer
    assert gate.submitted[Direction.LOAD] - before == per_load, "a failed load was tried again"
    driver.check()
    driver.forget_device()
    assert driver.generate(PROMPTS[0]).cached == 896, "the blocks were never bad"
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_nothing_computed_after_a_failed_load_is_published(make_engine, baseline):
    """The request's later blocks are stored in the very step whose load fails."""
    driver = make_engine(gated=True, engine={"load_mode": "layerwise"})
    driver.purge()
    driver.generate(PROMPTS[0][:300], new=1)
    driver.forget_device()
    gate = CURRENT["gate"]
    gate.fail_next(Direction.LOAD, 4)
    result = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], result) <= TOLERANCE
    driver.forget_device()
    again = driver.generate(PROMPTS[0])
    assert again.cached >= 256
    assert difference(baseline[0][0], again) <= TOLERANCE
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


@pytest.mark.parametrize("store", ["step", "layerwise"])
def test_a_failed_store_is_a_later_miss(make_engine, baseline, store):
    driver = make_engine(gated=True, engine={"store_mode": store})
    driver.purge()
    CURRENT["gate"].fail_next(Direction.STORE, 1)
    first = driver.generate(PROMPTS[0])
    driver.forget_device()
    second = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], first) <= TOLERANCE
    assert difference(baseline[0][0], second) <= TOLERANCE
    assert second.cached == 0
    assert driver.stats()["counters"]["commit_failed"] > 0
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


@pytest.mark.parametrize("store", ["step", "layerwise"])
def test_stores_overlap_the_forward_and_are_committed_when_they_end(make_engine, store):
    driver = make_engine(gated=True, engine={"store_mode": store})
    driver.purge()
    gate = CURRENT["gate"]
    CURRENT["log"].clear()
    before = driver.stats()["counters"]["blocks_stored"]
    gate.close_gate(Direction.STORE)
    name = driver.add(PROMPTS[0], new=1)
    while driver.engine.has_unfinished_requests():
        driver.step()
    computed = [layer for what, layer, _ in CURRENT["log"] if what == "computed"]
    assert len(computed) == 4, "the forward went through all layers with the gate closed"
    assert gate.held(Direction.STORE) == (1 if store == "step" else 4)
    for _ in range(20):
        driver.core.step_fn()
    assert driver.stats()["counters"]["blocks_stored"] == before, "nothing is committed early"
    gate.open_gate(Direction.STORE)
    driver.settle()
    assert driver.stats()["counters"]["blocks_stored"] - before == 7
    assert name
    driver.check()


def test_layerwise_loads_overlap_the_forward_and_are_waited_for(make_engine, baseline):
    """Each layer's load goes through only when that layer waits for it."""
    driver = make_engine(gated=True, engine={"load_mode": "layerwise"})
    driver.purge()
    driver.generate(PROMPTS[0], new=1)
    driver.forget_device()
    gate = CURRENT["gate"]
    CURRENT["log"].clear()
    gate.close_gate(Direction.LOAD, on_demand=True)
    result = driver.generate(PROMPTS[0])
    gate.open_gate(Direction.LOAD)
    assert result.cached == 896
    assert difference(baseline[0][0], result) <= TOLERANCE
    held = [count for what, _, count in CURRENT["log"] if what == "computed"][:4]
    assert held == [3, 2, 1, 0], "a layer was computed while later layers were still to be loaded"
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_a_block_is_not_used_again_before_its_store_has_read_it(make_engine, baseline):
    """A device of few blocks, stores held back: the next request must wait at the fence."""
    driver = make_engine(gated=True, num_gpu_blocks_override=17)
    driver.purge()
    gate = CURRENT["gate"]
    gate.close_gate(Direction.STORE)
    names = [driver.add(PROMPTS[0], new=1)]
    while driver.engine.has_unfinished_requests():
        driver.step()

    def open_when_somebody_waits() -> None:
        assert gate.waiting.wait(15), "nobody waited for the store"
        gate.open_gate(Direction.STORE)

    helper = threading.Thread(target=open_when_somebody_waits)
    helper.start()
    names = [driver.add(tokens) for tokens in (PROMPTS[1], PROMPTS[3])]
    driver.finish(names)
    helper.join()
    driver.forget_device()
    result = driver.generate(PROMPTS[0])
    assert result.cached == 896
    assert difference(baseline[0][0], result) <= TOLERANCE
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_a_killed_daemon_costs_entries_and_comes_back_by_itself(make_engine, baseline):
    driver = make_engine(engine={"request_deadline": "2s"})
    driver.purge()
    driver.generate(PROMPTS[0])
    pool = driver.stats()["pool"]
    inode, generation = Path(pool).stat().st_ino, driver.stats()["generation"]
    driver.forget_device()
    os.kill(driver.daemon_pid(), signal.SIGKILL)
    result = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], result) <= TOLERANCE
    for _ in range(10_000):  # requests go on while the daemon comes back
        driver.forget_device()
        result = driver.generate(PROMPTS[0])
        assert difference(baseline[0][0], result) <= TOLERANCE
        if result.cached:
            break
    assert result.cached == 896
    stats = driver.stats()
    assert stats["generation"] == generation + 1
    assert Path(pool).stat().st_ino == inode, "the memory was adopted"
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_a_stopped_daemon_costs_hits_not_requests(make_engine, baseline):
    driver = make_engine(engine={"request_deadline": "50ms"})
    driver.purge()
    driver.generate(PROMPTS[0])
    driver.forget_device()
    pid = driver.daemon_pid()
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(6):
            result = driver.generate(PROMPTS[0])
            assert result.cached == 0
            assert difference(baseline[0][0], result) <= TOLERANCE
            driver.forget_device()
    finally:
        os.kill(pid, signal.SIGCONT)
    for _ in range(10_000):
        driver.forget_device()
        if driver.generate(PROMPTS[0]).cached:
            break
    result = driver.generate(PROMPTS[0])
    assert result.cached == 896
    driver.check()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0], tries=LATE_MAX)
