"""What fio says of the same disk, where it is installed. Printed beside, never compared."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

from tierkv.bench.fs_stage import Plan
from tierkv.bench.report import say

FIO_WAIT_S = 120.0


def measure_fio(folder: Path, plan: Plan, is_direct: bool) -> dict[str, float] | None:
    """GiB/s of overwriting and reading one file; None if fio is missing or has no answer."""
    if shutil.which("fio") is None:
        return None
    say("fio")
    found = {}
    for verb, threads in (("write", plan.write_threads), ("read", plan.read_threads)):
        speed = _measure(folder, plan, verb, threads, is_direct)
        if speed is None:
            return None
        found[verb] = speed
    return found


def _measure(folder: Path, plan: Plan, verb: str, threads: int, is_direct: bool) -> float | None:
    part = max(1, plan.blocks // threads) * plan.slot_bytes
    command = [
        "fio", "--name=bench", f"--filename={folder / 'fio'}", f"--rw={verb}", "--overwrite=1",
        f"--bs={plan.slot_bytes}", f"--size={part}", f"--offset_increment={part}",
        f"--filesize={part * threads}", f"--numjobs={threads}", f"--direct={int(is_direct)}",
        "--ioengine=psync", "--thread", "--group_reporting", "--output-format=json",
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=FIO_WAIT_S, check=True
        )
        job = json.loads(done.stdout)["jobs"][0]
        return round(float(job[verb]["bw_bytes"]) / (1 << 30), 3)
    except (OSError, subprocess.SubprocessError, ValueError, LookupError) as error:
        say(f"fio gave no answer: {error}")
        return None
    finally:
        (folder / "fio").unlink(missing_ok=True)
