"""Benches run and verify their results. What they measure is not judged here."""

from __future__ import annotations

import json
import math

import pytest

from tierkv.bench import rpc
from tierkv.bench.report import Figure, aa_spread, median_ratio
from tierkv.cli.main import main

FIGURES = {
    "noop_ratio",
    "lookup_release_1000_ms",
    "reserve_commit_1000_ms",
    "reserve_commit_evict_1000_ms",
    "lookup_ratio_1e6_over_1e3",
    "lookup_release_1000_large_ms",
    "lookup_release_1000_random_ms",
}


def test_bench_rpc_verifies_its_results_and_prints_every_figure(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "rpc", "--json", "--blocks-max", "4321", "--samples", "2"])
    out, err = capsys.readouterr()
    assert not ended.value.code
    tree = json.loads(out)
    assert tree["verified"] is True
    assert tree["problems"] == []
    assert tree["blocks_max"] == 4321
    assert tree["is_void"] is True, "two samples prove nothing"
    assert all(tree[name] > 0 for name in FIGURES)
    assert set(tree["targets"]) == set(tree["met"]) == FIGURES - {"lookup_release_1000_random_ms"}
    assert "filling the index" in err


def test_bench_rpc_prints_a_table_with_targets(capsys):
    assert rpc.run(as_json=False, blocks_max=4_000, samples=1) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FIGURES)
    assert "<= 1.5 x" in out
    assert "verified" in out


def test_a_wrong_result_is_exit_code_1(capsys, monkeypatch):
    """A pool without room for what the bench stores: figures come, but nothing is verified."""
    monkeypatch.setattr(rpc, "SMALL_SLOTS", rpc.BATCH)
    assert rpc.run(as_json=True, blocks_max=4_000, samples=1) == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["verified"] is False
    assert "a reserve granted fewer slots than blocks" in tree["problems"]


def test_a_wrong_result_is_noted_once():
    series = rpc.Series()
    series.expect(True, "never seen")
    series.expect(False, "a lookup missed stored blocks")
    series.expect(False, "a lookup missed stored blocks")
    assert series.problems == ["a lookup missed stored blocks"]


ARM = [1.0, 2.0, 4.0] * 3


def test_the_spread_of_equal_arms_is_nothing():
    assert aa_spread(ARM, ARM) == 0.0


def test_the_spread_does_not_depend_on_which_arm_is_slower():
    slow = [value * 1.1 for value in ARM]
    assert aa_spread(ARM, slow) == pytest.approx(aa_spread(slow, ARM)) == pytest.approx(0.1)


def test_arms_that_differ_to_both_sides_have_a_spread():
    """The median ratio is 1, but one more sample could have made it anything."""
    assert aa_spread([1.0, 2.0, 4.0] * 3, [2.0, 2.0, 2.0] * 3) > 0.5


def test_few_samples_prove_nothing():
    assert math.isinf(aa_spread(ARM[:8], ARM[:8]))


def test_ratios_are_taken_pair_by_pair():
    """A slow moment hits both arms of a pair."""
    assert median_ratio([2.0, 200.0, 2.0], [1.0, 100.0, 1.0]) == 2.0


@pytest.mark.parametrize(("value", "is_met"), [(1.5, True), (1.6, False)])
def test_a_figure_is_met_up_to_its_target(value, is_met):
    assert Figure("x", value, "ms", 1.5).is_met is is_met
    assert Figure("x", value, "ms").is_met is None
