"""Prove that the tests notice bugs: each kept mutant is applied to a copy and must be killed.

A mutant is one exact text of a source file and what replaces it; its targets must kill it.
The list is `tests/mutants.yaml`. Exit status 1 if a mutant survives, if its text is not found
exactly once (the code moved: bring the list up to date), or if the targets fail without it.

A mutant with `environment: npu` is for targets that need torch-npu: they run with the interpreter
and the stand-in of the environment that `make setup-npu` makes; `make mutants` tells where it is,
or leaves them out aloud where there is no compiler to build the stand-in.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
MAIN, NPU = "main", "npu"
MUTANTS = ROOT / "tests" / "mutants.yaml"
COPIED = ("tierkv", "tests", "pyproject.toml")
WORKERS = 2
TIME_LIMIT_S = 120.0
BASELINE_LIMIT_S = 300.0
TESTS_FAILED = 1  # pytest's exit status; 2 to 5 mean that it could not run the tests
TAIL_LINES = 15
GUARD = '''"""Ends the run if the tests would import a TierKV that is not the copy beside us."""
import pathlib
import pytest
import tierkv

def pytest_configure(config):
    here = pathlib.Path(__file__).resolve().parent
    if not pathlib.Path(tierkv.__file__).resolve().is_relative_to(here):
        pytest.exit(f"tierkv comes from {tierkv.__file__}", 99)
'''


@dataclass(frozen=True, slots=True)
class Mutant:
    """One bug on purpose. `env` is set for its tests, which run in `environment`."""

    name: str
    file: str
    old: str
    new: str
    targets: tuple[str, ...]
    env: dict[str, str] = field(default_factory=dict)
    environment: str = MAIN


@dataclass(frozen=True, slots=True)
class Environment:
    """Where tests run: an interpreter, and what must be set for it."""

    name: str
    python: str
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant: killed, survived, or wrong (it proves nothing). `tail`: why."""

    name: str
    outcome: str
    seconds: float
    tail: str = ""


def load_mutants(path: Path) -> list[Mutant]:
    """Read the list; `defaults` hold what its mutants leave out.

    Raises:
        SystemExit: two mutants share a name, or one changes nothing or has an unknown environment.
    """
    tree = yaml.safe_load(path.read_text())
    found = []
    for item in tree["mutants"]:
        whole = {**tree.get("defaults", {}), **item}
        env = {key: str(value) for key, value in whole.get("env", {}).items()}
        targets = tuple(whole["targets"])
        texts = (whole["name"], whole["file"], whole["old"], whole["new"])
        found.append(Mutant(*texts, targets, env, whole.get("environment", MAIN)))
    if len({m.name for m in found}) != len(found):
        raise SystemExit(f"{path}: two mutants share a name; rename one")
    for mutant in found:
        if mutant.old == mutant.new:
            raise SystemExit(f"{path}: '{mutant.name}' changes nothing")
        if mutant.environment not in (MAIN, NPU):
            raise SystemExit(
                f"{path}: '{mutant.name}' is for the environment '{mutant.environment}'; there are "
                f"{MAIN} and {NPU}"
            )
    return found


def npu_environment(folder: Path | None) -> Environment:
    """The environment with torch-npu, once it is known to work.

    Raises:
        SystemExit: it does not; without it nobody would know whether its mutants are killed.
    """
    remedy = "run `make mutants`, which sets it up"
    if folder is None:
        raise SystemExit(f"some mutants need torch-npu, and --npu names no environment; {remedy}")
    folder = folder.resolve()
    python, standin = folder / "bin" / "python", folder / "standin"
    for file in (python, standin / "libascendcl.so"):
        if not file.exists():
            raise SystemExit(f"the environment with torch-npu lacks {file}; {remedy}")
    # Without the second one `import torch` would load torch-npu everywhere.
    env = {"LD_LIBRARY_PATH": str(standin), "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    command = [str(python), "-W", "ignore", "-c", "import torch_npu"]
    ended = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        tail = "\n".join(ended.stderr.splitlines()[-TAIL_LINES:])
        raise SystemExit(f"{python} cannot import torch_npu; {remedy}:\n{tail}")
    return Environment(NPU, str(python), env)


def environments_for(mutants: Sequence[Mutant], npu: Path | None) -> dict[str, Environment]:
    """Those that the mutants need, by name."""
    found = {MAIN: Environment(MAIN, sys.executable)}
    if any(mutant.environment == NPU for mutant in mutants):
        found[NPU] = npu_environment(npu)
    return found


def copy_tree(target: Path) -> None:
    """Copy what the tests need."""
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=ignore)
        else:
            shutil.copy2(source, target / name)
    (target / "mutant_guard.py").write_text(GUARD)


def run_tests(
    copy: Path,
    targets: Sequence[str],
    env: dict[str, str],
    limit_s: float,
    environment: Environment,
) -> tuple[int | None, str]:
    """Run pytest on a copy.

    Returns:
        Its exit status, None if it ran past the limit, and what it printed.
    """
    ours = {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    options = ["-q", "-x", "-p", "no:cacheprovider", "-p", "mutant_guard"]
    process = subprocess.Popen(
        [environment.python, "-m", "pytest", *options, *targets],
        cwd=copy,
        env={**os.environ, **ours, **environment.env, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, ""
    return process.returncode, output


def try_mutant(mutant: Mutant, limit_s: float, environment: Environment) -> Verdict:
    """Apply a mutant to a copy of its own and see whether its tests notice."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierkv-mutant-") as folder:
        copy = Path(folder)
        copy_tree(copy)
        file = copy / mutant.file
        text = file.read_text()
        found = text.count(mutant.old)
        if found != 1:
            return Verdict(mutant.name, "wrong", 0.0, f"its text stands {found} times, not once")
        file.write_text(text.replace(mutant.old, mutant.new))
        status, output = run_tests(copy, mutant.targets, mutant.env, limit_s, environment)
    seconds = time.monotonic() - begin
    if status == 0:
        return Verdict(mutant.name, "survived", seconds)
    if status not in (TESTS_FAILED, None):
        tail = "\n".join(output.splitlines()[-TAIL_LINES:])
        return Verdict(mutant.name, "wrong", seconds, f"pytest ended with {status}:\n{tail}")
    return Verdict(mutant.name, "killed" if status else "killed (time)", seconds)


def check_baseline(mutants: Sequence[Mutant], environment: Environment) -> None:
    """Run all targets of an environment once without any mutant.

    Raises:
        SystemExit: they fail, so that a killed mutant would prove nothing.
    """
    mutants = [mutant for mutant in mutants if mutant.environment == environment.name]
    if not mutants:
        return
    targets = list(dict.fromkeys(target for mutant in mutants for target in mutant.targets))
    env = {key: value for mutant in mutants for key, value in mutant.env.items()}
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tierkv-mutant-") as folder:
        copy_tree(Path(folder))
        status, output = run_tests(Path(folder), targets, env, BASELINE_LIMIT_S, environment)
    if status != 0:
        print(output)
        raise SystemExit(
            f"the targets fail without a mutant (environment {environment.name}, pytest: "
            f"{status}); mend them first"
        )
    print(
        f"environment {environment.name}: {len(targets)} targets pass without a mutant, "
        f"{time.monotonic() - begin:.1f} s"
    )


def main() -> int:
    """Run all mutants, or those whose names contain one of the given words."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("words", nargs="*", help="only mutants whose names contain one of these")
    parser.add_argument("--list", type=Path, default=MUTANTS, help="file of mutants")
    parser.add_argument("--limit", type=float, default=TIME_LIMIT_S, help="seconds per mutant")
    parser.add_argument("--npu", type=Path, help="folder of the environment with torch-npu")
    parser.add_argument(
        "--skip-npu", metavar="WHY", help="leave out the mutants that need that environment"
    )
    arguments = parser.parse_args()
    mutants = load_mutants(arguments.list)
    if arguments.words:
        mutants = [m for m in mutants if any(word in m.name for word in arguments.words)]
    if not mutants:
        raise SystemExit("no mutant has such a name")
    if arguments.skip_npu:
        skipped = [m.name for m in mutants if m.environment == NPU]
        mutants = [m for m in mutants if m.environment != NPU]
        print(f"skipped: {len(skipped)} mutants that need torch-npu: {arguments.skip_npu}")
    begin = time.monotonic()
    environments = environments_for(mutants, arguments.npu)

    def verdict_of(mutant: Mutant) -> Verdict:
        return try_mutant(mutant, arguments.limit, environments[mutant.environment])

    with ThreadPoolExecutor(WORKERS) as workers:
        baselines = [workers.submit(check_baseline, mutants, e) for e in environments.values()]
        judged = [workers.submit(verdict_of, mutant) for mutant in mutants]
        try:
            for baseline in baselines:
                baseline.result()
        except SystemExit:
            workers.shutdown(wait=False, cancel_futures=True)
            raise
        verdicts = [future.result() for future in judged]
    width = max(len(mutant.name) for mutant in mutants)
    for verdict in verdicts:
        print(f"{verdict.name:{width}}  {verdict.outcome:13}  {verdict.seconds:6.1f} s")
    for verdict in verdicts:
        if verdict.tail:
            print(f"\n{verdict.name}: {verdict.tail}")
    killed = sum(verdict.outcome.startswith("killed") for verdict in verdicts)
    total = time.monotonic() - begin
    print(f"{killed} of {len(verdicts)} mutants killed, {total:.0f} s")
    return 0 if killed == len(verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
