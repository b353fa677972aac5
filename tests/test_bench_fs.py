"""The bench of the fs tier runs, verifies and cleans up. What it measures is not judged here."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.processes import start_interruptible
from tierkv.bench.fio import measure_fio
from tierkv.bench.fs import Comparison, Measured, measure
from tierkv.bench.fs_stage import Plan, open_stage, require_room
from tierkv.cli.main import main
from tierkv.errors import TierKVError
from tierkv.tiers.frame import seal

FIGURES = {"write_ratio", "write_new_ratio", "read_ratio"}
QUIET = [1.0, 1.01, 0.99] * 3
SMALL = ["--block", "60KiB", "--bytes", "1MiB"]


def plan_in(path, pairs=1) -> Plan:
    return Plan(path, 60 << 10, 1 << 20, pairs)


def test_bench_fs_verifies_what_it_measured_and_leaves_nothing(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "fs", "--path", str(tmp_path), "--pairs", "2", "--json", *SMALL])
    out, err = capsys.readouterr()
    tree = json.loads(out)
    assert tree["verified"] is True
    assert tree["problems"] == []
    assert all(tree[name] > 0 for name in FIGURES)
    assert set(tree["targets"]) == set(tree["met"]) == set(tree["aa_spread"]) == FIGURES
    assert (tree["blocks"], tree["slot_bytes"]) == (17, 64 << 10)
    assert tree["placement"]["asked"] == "local"
    assert list(tmp_path.iterdir()) == []
    assert ended.value.code == 1, "two pairs prove nothing"
    assert err.count("void: too few pairs; once more") == 1


def test_bench_fs_prints_a_table_with_targets(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["bench", "fs", "--path", str(tmp_path), "--pairs", "1", *SMALL])
    out = capsys.readouterr().out
    for word in (*FIGURES, ">= 0.8", "verified", "void: too few pairs", "placement: "):
        assert word in out


def measured_with(reference: list[float], problems: tuple[str, ...] = ()) -> Measured:
    found = Comparison(list(QUIET), list(QUIET), reference)
    return Measured(Plan(None), True, dict.fromkeys(FIGURES, found), problems)


def test_a_quiet_run_without_a_wrong_byte_succeeds():
    assert measured_with(QUIET).exit_code == 0


def test_a_reference_that_differs_from_itself_makes_the_run_void():
    assert measured_with([value * 1.14 for value in QUIET]).exit_code == 0
    noisy = measured_with([value * 1.16 for value in QUIET])
    assert noisy.is_void
    assert noisy.exit_code == 1


def test_a_wrong_byte_fails_a_quiet_run():
    assert measured_with(QUIET, ("1 blocks are not what was written",)).exit_code == 1


def test_a_ratio_is_our_speed_over_that_of_the_reference():
    slow = Comparison([1.0] * 9, [2.0] * 9, [1.0] * 9)
    assert slow.ratio == 0.5


def files_of_the_tier(folder):
    return sorted(file for file in (folder / "tier").rglob("*") if len(file.name) > 60)


def test_a_damaged_file_is_found(tmp_path):
    with open_stage(tmp_path, plan_in(tmp_path)) as stage:
        stage.fill()
        stage.verify()
        assert stage.problems == []
        file = next(f for f in files_of_the_tier(tmp_path) if f.is_file())
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        stage.verify()
        assert "the tier did not read a block" in stage.problems


def test_other_bytes_with_a_valid_frame_are_found(tmp_path):
    """The tier itself cannot know; the bench does."""
    with open_stage(tmp_path, plan_in(tmp_path)) as stage:
        stage.fill()
        file = next(f for f in files_of_the_tier(tmp_path) if f.is_file())
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        namespace, key = bytes.fromhex(file.parts[-3]), bytes.fromhex(file.name)
        seal(memoryview(content), namespace, key)
        file.write_bytes(content)
        stage.verify()
        assert stage.problems == ["1 blocks are not what was written"]


def test_every_write_at_capacity_recycles(tmp_path):
    with open_stage(tmp_path, plan_in(tmp_path)) as stage:
        stage.fill()
        stage.new_content()
        stage.write_tier()
        assert stage.problems == []
        assert sum(f.is_file() for f in files_of_the_tier(tmp_path)) == stage.plan.blocks


def test_without_direct_io_both_arms_are_buffered(tmp_path):
    measured = measure(replace(plan_in(tmp_path), io="buffered"))
    assert measured.problems == ()
    assert measured.is_direct is False


def test_a_disk_without_room_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(TierKVError, match=r"3 times --bytes; lower --bytes"):
        require_room(replace(plan_in(tmp_path), sample_bytes=1 << 60))
    with pytest.raises(TierKVError, match="cannot be used"):
        require_room(plan_in(tmp_path / "absent"))


def test_a_sample_smaller_than_a_block_is_wrong_usage(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", "fs", "--path", str(tmp_path), "--bytes", "1MiB"])
    assert ended.value.code == 2
    assert "--bytes" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "tierkv.cli.main", "bench", "fs", "--path", str(tmp_path)]
    command += ["--block", "1MiB", "--bytes", "32MiB", "--pairs", "1000"]
    with start_interruptible(command, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        for line in child.stderr:
            if "pair 2" in line:
                break
        assert list(tmp_path.iterdir()) != []
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read()
        assert child.wait(60) == 1
    assert "error: stopped" in rest
    assert list(tmp_path.iterdir()) == []


def test_without_fio_nothing_is_said_of_it(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert measure_fio(tmp_path, plan_in(tmp_path), False) is None


def test_a_fio_that_fails_costs_only_its_own_figures(tmp_path, monkeypatch, capsys):
    fake = tmp_path / "fio"
    fake.write_text("#!/bin/sh\necho '{}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "disk"
    folder.mkdir()
    assert measure_fio(folder, plan_in(folder), False) is None
    assert "fio gave no answer" in capsys.readouterr().err


def test_fio_measures_the_same_bytes(tmp_path, monkeypatch):
    fake = tmp_path / "fio"
    answer = json.dumps({"jobs": [{v: {"bw_bytes": 1 << 30} for v in ("write", "read")}]})
    fake.write_text(f"#!/bin/sh\necho '{answer}'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    folder = tmp_path / "disk"
    folder.mkdir()
    assert measure_fio(folder, plan_in(folder), True) == {"write": 1.0, "read": 1.0}
