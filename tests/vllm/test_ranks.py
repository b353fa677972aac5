"""Two tensor-parallel ranks, engine and workers in processes of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vllm.driver import TOLERANCE

pytestmark = pytest.mark.vllm

RUN_MAX_S = 400


def largest_gap(one: dict, other: dict) -> float:
    if one["tokens"] != other["tokens"]:
        return float("inf")
    return max(abs(a - b) for a, b in zip(one["logprobs"], other["logprobs"], strict=True))


def test_two_ranks_give_equal_outputs_with_hits_and_a_damaged_rank_changes_them(models, tmp_path):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.two_ranks", str(models["gqa"]), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_MAX_S,
        check=False,
    )
    lines = [line[7:] for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    results = {r["label"]: r for r in map(json.loads, lines)}
    assert set(results) == {"cold", "warm", "damaged"}, done.stdout[-3000:]
    assert results["cold"]["cached"] == 0
    assert results["warm"]["cached"] == results["damaged"]["cached"] == 896
    assert largest_gap(results["cold"], results["warm"]) <= TOLERANCE
    assert largest_gap(results["cold"], results["damaged"]) > 100 * TOLERANCE
