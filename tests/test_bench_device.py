"""`tierkv bench device` on CPU tensors, tiny: it runs, verifies, and finds what is damaged.

What it measures is not judged here.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tierkv.bench import device, device_stage
from tierkv.bench.device_model import PagedModel
from tierkv.bench.device_plan import KIB, PLANS, Budget, Row
from tierkv.cli.main import main
from tierkv.device.base import CopyEvent, Descriptors, Direction
from tierkv.device.cpu import create_cpu_engine
from tierkv.errors import TierKVError

CPU = torch.device("cpu")
SHAPE = replace(
    PLANS["cpu"].model, layers=2, mlp=64, heads=2, kv_heads=1, head_dim=16,
    chunk_tokens=32, prefix_tokens=64, suffix_tokens=20, requests=2,
)  # fmt: skip
TINY = replace(
    PLANS["cpu"], page_sizes={16 * KIB: None, 64 * KIB: 0.9}, total_bytes=256 * KIB, samples=2,
    overlap_page_bytes=16 * KIB, matmul_size=16, loop_s=0.001, step_page_bytes=4 * KIB,
    step_blocks={"prefill": 4, "decode": 1}, steps=3, model=SHAPE,
)  # fmt: skip
FIGURES = {
    "store_16KiB", "load_16KiB", "store_64KiB", "load_64KiB", "overlap_matmul",
    "host_prefill_descriptors", "host_prefill_submit", "host_prefill_poll",
    "host_decode_descriptors", "host_decode_submit", "host_decode_poll", "loop_prefill_over_load",
}  # fmt: skip


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(PLANS, "cpu", TINY)


# ---- what it tells -----------------------------------------------------------------------------


def test_bench_device_verifies_its_results_and_prints_every_figure(capsys, tmp_path):
    file = tmp_path / "new" / "figures.json"
    with pytest.raises(SystemExit) as ended:
        main(["bench", "device", "--device", "cpu", "--json", "--output", str(file)])
    out, err = capsys.readouterr()
    assert not ended.value.code
    tree = json.loads(out, parse_constant=pytest.fail)
    assert json.loads(file.read_text()) == tree
    assert set(tree["figures"]) == FIGURES
    assert all(figure["value"] > 0 for figure in tree["figures"].values())
    assert (tree["verified"], tree["problems"], tree["cut"]) == (True, [], [])
    assert tree["placement"]["asked"] == "interleave"
    assert tree["copies"]["rung"] == "cpu"
    assert (tree["machine"]["kind"], tree["machine"]["torch"]) == ("cpu", torch.__version__)
    assert set(tree["machine"]) >= {"name", "driver", "cuda", "torch_npu"}
    assert tree["is_void"] is True, "two samples prove nothing"
    assert tree["seconds"] <= tree["seconds_max"] == 330
    assert "the model loop" in err


def test_a_figure_tells_what_it_was_measured_with():
    figures = measured().figures
    copies = figures["load_64KiB"]
    assert copies["page_bytes"] == 64 * KIB
    assert copies["bytes"] == 2 * TINY.layers * 64 * KIB, "two blocks at least"
    assert copies["rungs"] == ["cpu"]
    assert copies["at_least"] == 0.9
    assert "at_least" not in figures["load_16KiB"]
    step = figures["host_prefill_submit"]
    assert (step["pages"], step["steps"]) == (4 * TINY.step_layers, TINY.steps)
    assert step["p99"] >= step["value"] > 0


def test_outputs_after_a_load_are_equal_and_a_damaged_block_changes_them():
    loop = measured().figures["loop_prefill_over_load"]
    assert loop["tolerance"] == loop["difference_load"] == loop["difference_prefill"] == 0.0
    assert loop["difference_damaged"] > 0.1


def test_bench_device_prints_a_table_and_says_that_it_was_the_cpu(capsys):
    assert device.run(as_json=False, kind="cpu", seconds_max=60, output=None) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in FIGURES)
    assert "measured on CPU tensors, not on an accelerator" in out
    assert "rung: cpu" in out
    assert "too few samples; run it again" in out
    assert out.splitlines()[-1].startswith("verified")


def test_what_the_time_cuts_is_told(capsys):
    assert device.run(as_json=False, kind="cpu", seconds_max=1e-9, output=None) == 0
    out = capsys.readouterr().out
    parts = ("copies of 16KiB pages", "overlap with compute", "the host's time in a decode step")
    for part in (*parts, "the model loop"):
        assert f"left out, because 1e-09 s were over: {part}\n" in out
    assert not any(f" {name} " in out for name in FIGURES)


def test_a_budget_that_is_over_notes_each_part_and_another_none():
    over, other = Budget(0.0), Budget(60.0)
    assert not over.allows("a")
    assert not over.allows("b")
    assert other.allows("a")
    assert (over.cut, other.cut) == (["a", "b"], [])


def test_a_device_that_is_not_there_is_named():
    if torch.accelerator.is_available():
        pytest.skip("this machine has an accelerator")
    with pytest.raises(TierKVError, match="has no npu device here"):
        device.find_device("npu")
    assert device.find_device(None) == device.find_device("cpu") == CPU


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(capsys, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as ended:
        main(["bench", "device", "--device", "cpu", "--output", str(tmp_path / "file" / "x.json")])
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize(
    ("row", "is_met"),
    [
        (Row("x", 0.91, "x", 0.9, spread=0.0), True),
        (Row("x", 0.89, "x", 0.9, spread=0.0), False),
        (Row("x", 0.89, "x", 0.9, spread=0.02), True),
        (Row("x", 0.85, "x", 0.9, spread=0.02), False),
        (Row("x", 1.03, "x", 1.03, is_most=True, spread=0.0), True),
        (Row("x", 1.04, "x", 1.03, is_most=True, spread=0.0), False),
        (Row("x", 1.04, "x", 1.03, is_most=True, spread=0.02), True),
        (Row("x", 2.0, "x", 0.9, spread=0.2, void="noise"), None),
        (Row("x", 2.0, "x"), None),
    ],
)
def test_an_aim_is_met_up_to_the_spread_of_the_run(row, is_met):
    assert row.is_met is is_met


# ---- what it finds -----------------------------------------------------------------------------


def measured():
    """Exit code, problems and figures of a run on the CPU."""
    found = device.measure(CPU, TINY, Budget(60.0))
    return Found(found)


class Found:
    def __init__(self, run: device.Measured) -> None:
        self.problems = run.problems
        self.figures = {
            row.name: {"value": row.value, **aim_of(row), **row.facts} for row in run.rows
        }


def aim_of(row: Row) -> dict[str, float]:
    return {} if row.aim is None else {"at_least": row.aim}


class GivenEvent:
    """The end of a copy that is over already, whether or not it says so before it is waited for."""

    def __init__(self, is_ok: bool = True, is_told: bool = True) -> None:
        self.is_ok = is_ok
        self._is_told = is_told

    def is_done(self) -> bool:
        return self._is_told

    def wait(self) -> None:
        pass

    def finish(self) -> None:
        self._is_told = True


class FaultyEngine:
    """A real engine for CPU tensors, with something done before or after each of its copies."""

    def __init__(
        self,
        after: Callable[[Direction, Descriptors], bool] = lambda *_: True,
        before: Callable[[Direction, Descriptors], None] = lambda *_: None,
        is_told: bool = True,
    ) -> None:
        self._engine = create_cpu_engine()
        self._after, self._before, self._is_told = after, before, is_told

    def submit(self, direction: Direction, copies: Descriptors) -> CopyEvent:
        self._before(direction, copies)
        self._engine.submit(direction, copies).finish()
        return GivenEvent(self._after(direction, copies), self._is_told)

    def give_way(self) -> None:
        pass

    def close(self) -> None:
        self._engine.close()


def use(monkeypatch, **faults) -> None:
    monkeypatch.setattr(device_stage, "create_copy_engine", lambda _: FaultyEngine(**faults))


def flip_last_byte(where: Direction) -> Callable[[Direction, Descriptors], bool]:
    """Damage the last byte of the last copy in one direction, at its target."""

    def flip(direction: Direction, copies: Descriptors) -> bool:
        if direction is where:
            targets = copies.host if direction is Direction.STORE else copies.device
            address = int(targets[-1] + copies.sizes[-1] - 1)
            ctypes.c_uint8.from_address(address).value ^= 0x40
        return True

    return flip


def test_the_engine_of_these_tests_is_right_without_a_fault(monkeypatch):
    """The negative control of those below."""
    use(monkeypatch)
    assert measured().problems == ()


@pytest.mark.parametrize("direction", list(Direction), ids=lambda d: d.value)
def test_a_damaged_byte_is_exit_code_1(direction, capsys, monkeypatch):
    use(monkeypatch, after=flip_last_byte(direction))
    assert device.run(as_json=True, kind="cpu", seconds_max=60, output=None) == 1
    tree = json.loads(capsys.readouterr().out)
    assert tree["verified"] is False
    problems = " ".join(tree["problems"])
    side = "in the pool" if direction is Direction.STORE else "on the device"
    for part in ("of 16KiB pages", "beside compute"):
        assert f"a {direction.value} {part} left a wrong byte {side}" in problems
    if direction is Direction.STORE:
        assert "the store of a prefill step left a wrong byte in the pool" in problems
    assert "a loaded prefix has a wrong byte" in problems
    assert "outputs after a load differ by" in problems


def test_a_copy_that_the_engine_reports_as_failed_is_a_problem(monkeypatch):
    use(monkeypatch, after=lambda *_: False)
    assert measured().problems == ("the engine reported a failed copy",)


@pytest.mark.parametrize("outlasts", [True, False])
def test_copies_that_end_before_the_loop_does_prove_nothing(outlasts, monkeypatch):
    use(monkeypatch, is_told=not outlasts)
    run = device.measure(CPU, TINY, Budget(60.0))
    (row,) = (row for row in run.rows if row.name == "overlap_matmul")
    assert row.facts["loops"] >= TINY.samples
    assert row.facts["loops_outlasted"] == (row.facts["loops"] if outlasts else 0)
    assert row.void.startswith("too few samples" if outlasts else "copies ended before")


def test_a_loop_whose_damage_changes_nothing_proves_nothing(monkeypatch):
    """An engine that loads what it stored, whatever lies in the pool by then."""
    stored: dict[int, bytes] = {}

    def keep(direction: Direction, copies: Descriptors) -> bool:
        for address, size in zip(copies.host.tolist(), copies.sizes.tolist(), strict=True):
            if direction is Direction.STORE:
                stored[address] = ctypes.string_at(address, size)
        return True

    def restore(direction: Direction, copies: Descriptors) -> None:
        for address in copies.host.tolist() if direction is Direction.LOAD else []:
            ctypes.memmove(address, stored[address], len(stored[address]))

    use(monkeypatch, after=keep, before=restore)
    assert measured().problems == (
        "a damaged block changed the outputs by 0 only: the comparison proves nothing",
    )


def test_a_run_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(device_stage, "SHARED_MEMORY", tmp_path)
    assert measured().problems == ()
    assert list(tmp_path.iterdir()) == []


def test_without_room_in_shared_memory_the_pool_lies_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr(device_stage, "SHARED_MEMORY", Path("/nowhere"))
    assert measured().problems == ()
    assert "/nowhere has no room for" in capsys.readouterr().err


# ---- the model ---------------------------------------------------------------------------------


def outputs_of(table: list[int], *, chunk: int, damaged: int | None = None) -> torch.Tensor:
    """Outputs of the last tokens of one request, whose blocks lie where the table says."""
    model = PagedModel(CPU, SHAPE, blocks=6)
    inputs = model.make_inputs(64, 0)
    for start in range(0, 48, chunk):
        model.forward(inputs[start : start + chunk], torch.tensor(table), start)
    if damaged is not None:
        for kv in model.kv.values():
            kv[damaged] = 8.0
    return model.forward(inputs[48:], torch.tensor(table), 48)


def test_the_model_reads_its_prefix_through_the_block_table():
    table = [5, 0, 4, 2]
    straight = outputs_of([0, 1, 2, 3], chunk=16)
    assert torch.equal(outputs_of(table, chunk=16), straight)
    assert torch.equal(outputs_of(table, chunk=16, damaged=1), straight), "no block of the table"
    for block in table[:3]:
        assert (outputs_of(table, chunk=16, damaged=block) - straight).abs().max() > 0.1


def test_chunks_of_another_size_give_the_same_outputs():
    one, other = outputs_of([0, 1, 2, 3], chunk=16), outputs_of([0, 1, 2, 3], chunk=48)
    assert torch.allclose(one, other, atol=1e-4)
    assert float(one.square().mean()) == pytest.approx(1.0, abs=0.01)
