"""The planted-bug runner: what it counts as killed, and in which environment targets run.

It runs as a user runs it, on a small project of its own. The environment with torch-npu is played
by this interpreter behind a script that adds a module of that name.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutants.py"
SOURCE = (
    "def add(one, other):\n    return one + other\n\n\ndef is_small(number):\n    return True\n"
)
TESTS = """
from tierkv.sums import add, is_small

def test_sums():
    assert add(2, 2) == 4

def test_small():
    is_small(3)
"""
TESTS_NPU = """
import os
import torch_npu
from tierkv.sums import add

def test_sums():
    assert os.environ["LD_LIBRARY_PATH"] == torch_npu.STANDIN
    assert os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert os.environ.get("WORD", "none") in ("none", "given")
    assert add(2, 2) == 4
"""
WRONG_SUM = {"file": "tierkv/sums.py", "old": "one + other", "new": "one - other"}
ON_MAIN = {"name": "main sum", **WRONG_SUM, "targets": ["tests/test_sums.py"]}
ON_NPU = {
    "name": "npu sum", **WRONG_SUM, "targets": ["tests/test_npu.py"], "environment": "npu",
}  # fmt: skip
UNSEEN = {
    "name": "unseen", "file": "tierkv/sums.py", "old": "True", "new": "False",
    "targets": ["tests/test_sums.py"],
}  # fmt: skip


class Project:
    """A folder with the runner, a package and its tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.npu = folder / "npu"
        for name, text in {
            "tierkv/__init__.py": "",
            "tierkv/sums.py": SOURCE,
            "tests/test_sums.py": TESTS,
            "tests/test_npu.py": TESTS_NPU,
            "pyproject.toml": "[tool.pytest.ini_options]\n",
        }.items():
            self.write(name, text)
        (folder / "scripts").mkdir()
        shutil.copy2(SCRIPT, folder / "scripts")

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def make_npu(self) -> None:
        """An environment that has torch_npu; the one of this test has it not."""
        self.write("npu/site/torch_npu.py", f"STANDIN = {str(self.npu / 'standin')!r}\n")
        self.write("npu/standin/libascendcl.so", "")
        python = self.write(
            "npu/bin/python",
            f'#!/bin/sh\nexport PYTHONPATH="$PYTHONPATH:{self.npu}/site"\n'
            f'exec "{sys.executable}" "$@"\n',
        )
        python.chmod(0o755)

    def run(self, *mutants: dict, options: tuple[str, ...] = ()) -> tuple[int, str]:
        """Exit status, and all that was printed."""
        self.write("tests/mutants.yaml", yaml.safe_dump({"mutants": list(mutants)}))
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            [sys.executable, "scripts/mutants.py", *options],
            cwd=self.folder,
            env=kept,
            capture_output=True,
            text=True,
            check=False,
        )
        print(ended.stdout, ended.stderr)
        return ended.returncode, ended.stdout + ended.stderr

    def outcomes(self, output: str) -> dict[str, str]:
        """What became of each mutant."""
        words = ("killed", "survived", "wrong")
        lines = [line.split("  ") for line in output.splitlines()]
        found = {
            line[0]: [part.strip() for part in line if part.strip() in words] for line in lines
        }
        return {name: parts[0] for name, parts in found.items() if parts}


@pytest.fixture
def project(tmp_path) -> Project:
    return Project(tmp_path)


def test_a_mutant_that_a_test_notices_is_killed(project):
    status, output = project.run(ON_MAIN)
    assert (status, project.outcomes(output)) == (0, {"main sum": "killed"})


def test_a_mutant_that_no_test_notices_survives_and_fails_the_run(project):
    status, output = project.run(ON_MAIN, UNSEEN)
    assert status == 1
    assert project.outcomes(output) == {"main sum": "killed", "unseen": "survived"}


def test_a_mutant_whose_text_is_gone_is_wrong(project):
    status, output = project.run({**ON_MAIN, "old": "one * other"})
    assert (status, project.outcomes(output)) == (1, {"main sum": "wrong"})
    assert "stands 0 times" in output


def test_targets_that_fail_without_a_mutant_prove_nothing(project):
    project.write("tests/test_sums.py", TESTS.replace("4", "5"))
    status, output = project.run(ON_MAIN)
    assert status == 1
    assert "fail without a mutant" in output
    assert project.outcomes(output) == {}


@pytest.mark.parametrize("change", [{"new": "one + other"}, {"environment": "gpu"}])
def test_a_mutant_that_makes_no_sense_is_refused(change, project):
    status, output = project.run({**ON_MAIN, **change})
    assert status == 1
    assert "main sum" in output
    assert project.outcomes(output) == {}


# ---- the environment with torch-npu ------------------------------------------------------------


def test_each_mutant_runs_in_its_environment_with_the_variables_of_that(project):
    project.make_npu()
    worded = {**ON_NPU, "name": "npu worded", "env": {"WORD": "given"}}
    status, output = project.run(ON_MAIN, ON_NPU, worded, options=("--npu", "npu"))
    assert status == 0
    names = ("main sum", "npu sum", "npu worded")
    assert project.outcomes(output) == dict.fromkeys(names, "killed")
    for name in ("main", "npu"):
        assert f"environment {name}: 1 targets pass without a mutant" in output


def test_targets_of_an_environment_that_fail_without_a_mutant_prove_nothing(project):
    project.make_npu()
    project.write("npu/site/torch_npu.py", "STANDIN = 'elsewhere'\n")
    status, output = project.run(ON_MAIN, ON_NPU, options=("--npu", "npu"))
    assert status == 1
    assert "fail without a mutant (environment npu" in output
    assert project.outcomes(output) == {}


def test_mutants_of_that_environment_are_left_out_only_if_told_and_aloud(project):
    status, output = project.run(ON_MAIN, ON_NPU, options=("--skip-npu", "no compiler"))
    assert status == 0
    assert "skipped: 1 mutants that need torch-npu: no compiler" in output
    assert "1 of 1 mutants killed" in output


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("", "--npu names no environment"),
        ("bin/python", "lacks"),
        ("standin/libascendcl.so", "lacks"),
        ("site/torch_npu.py", "cannot import torch_npu"),
    ],
)
def test_without_torch_npu_its_mutants_fail_the_run_and_say_what_to_do(missing, message, project):
    project.make_npu()
    if missing:
        (project.npu / missing).unlink()
    status, output = project.run(ON_MAIN, ON_NPU, options=("--npu", "npu") if missing else ())
    assert status == 1
    assert message in output
    assert missing.rsplit("/", 1)[-1].removesuffix(".py") in output
    assert "make mutants" in output
    assert project.outcomes(output) == {}, "nothing was tried"


def test_without_mutants_for_it_the_environment_need_not_be_there(project):
    status, output = project.run(ON_MAIN, options=("--npu", "npu"))
    assert (status, project.outcomes(output)) == (0, {"main sum": "killed"})
