"""What torch_npu decides once per process, and what it does not survive."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.npu.standin import Code
from tests.processes import WAIT_MAX_S

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def children():
    """All at once: importing torch_npu is what takes the time."""
    started = {
        "old-driver": start("old-driver", STANDIN_DRIVER_VERSION="25.2.0"),
        "refused": start("refused"),
        "threads": start("threads"),
    }
    yield started
    for child in started.values():
        child.kill()
        child.wait()


def start(role: str, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.npu.child", role],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def old_driver(children):
    """The exit code, what was seen, and the words on stderr."""
    return end(children["old-driver"])


def end(child: subprocess.Popen) -> tuple[int, list[dict], str]:
    out, err = child.communicate(timeout=2 * WAIT_MAX_S)
    print(err)
    # torch_npu prints warnings, too.
    seen = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return child.returncode, seen, err


def test_below_driver_25_5_torch_npu_does_not_see_registrations(old_driver):
    """The memory is registered all the same; only torch_npu copies it as if it were not."""
    seen = old_driver[1][0]
    assert seen["registered"] == Code.OK
    assert not seen["is_pinned"]
    assert seen["is_own_memory_pinned"]
    # Asynchronous for the driver, which knows the memory; torch_npu made the host wait for it.
    assert seen["changes"]["stream_synchronizations"] == 2


def test_below_driver_25_5_our_copies_are_asynchronous_all_the_same(old_driver):
    """The runtime is called past torch_npu, so what torch_npu believes does not matter."""
    assert old_driver[1][1] == {
        "rung": "batch",
        "is_over": False,
        "is_ok": True,
        "is_right": True,
        "main_thread_waits": 0,
        "batches": 1,
    }


def test_an_operator_that_is_not_simulated_ends_the_process_and_is_named(old_driver):
    code, seen, err = old_driver
    assert code == -signal.SIGABRT
    assert "is not simulated" in err
    assert len(seen) == 2


def test_a_thread_that_waits_for_the_device_lets_the_others_run(children):
    """The host's waits give the interpreter lock up; if not, the child hangs and is killed."""
    code, seen, _ = end(children["threads"])
    assert code == 0
    assert seen == [{"is_over": [False] * 3, "main_thread_waits": 0}]


def test_after_a_refused_copy_torch_npu_drops_what_it_is_given(children):
    """It raises once; later copies and records vanish, and their events never come.

    Whoever waits for such an event waits forever, so nobody may wait for one without a limit.
    """
    code, seen, _ = end(children["refused"])
    assert code == 0
    assert seen == [
        {
            "raised": 1,
            "says_so": True,
            "copied": 0,
            "is_last_reached": False,
            "is_stream_idle": True,
        }
    ]
