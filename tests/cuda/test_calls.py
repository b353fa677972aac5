"""The raw calls of CUDA: arguments in the right order and number, and errors that are told.

They run in a process of their own, which finds the stand-in where CUDA's libraries would be.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
SOURCE = Path(__file__).with_name("calls.cpp")
ROOT = Path(__file__).parents[2]

SCRIPT = """
import ctypes, sys
import numpy as np
from tierkv.device.base import Descriptors, Direction
from tierkv.device.cuda import CudaHooks
from tierkv.device.hooks import DeviceCallError

class Stream:
    cuda_stream = 77

library = ctypes.CDLL("libcudart.so.12")
library.standin_calls.restype = ctypes.c_char_p
hooks = CudaHooks()
device = np.arange(64, dtype=np.uint8)
host = np.zeros(64, np.uint8)
places = lambda array, *offsets: np.array([array.ctypes.data + o for o in offsets], np.int64)
copies = Descriptors(places(device, 0, 32), places(host, 8, 48), np.array([8, 16], np.int64))
print("has batch", hooks.has_batch)
hooks.register(host.ctypes.data, 64)
for direction in (Direction.STORE, Direction.LOAD):
    try:
        hooks.copy_batch(direction, copies, Stream())
    except DeviceCallError as error:
        print(error)
    for side in (host[8:16], host[48:], device[:8], device[32:48]):
        print(direction.name, side.tolist())
    device[:] = 0
device[32:36] = (32, 33, 34, 35)
hooks.copy_one(Direction.STORE, device.ctypes.data + 32, host.ctypes.data, 4, Stream())
hooks.copy_blocking(Direction.LOAD, device.ctypes.data, host.ctypes.data, 4)
print("one", device[:4].tolist(), host[:4].tolist())
library.standin_fail_next(2)
try:
    hooks.register(host.ctypes.data, 64)
except DeviceCallError as error:
    print(error)
with hooks.outside_capture():
    hooks.unregister(host.ctypes.data)
print(library.standin_calls().decode().replace(str(host.ctypes.data), "HOST"))
"""


def run(folder: Path, *options: str) -> list[str]:
    library = folder / "libcudart.so.12"
    subprocess.run(["g++", "-shared", "-fPIC", *options, "-o", library, SOURCE], check=True)
    # One library under both names, so that both see the same calls.
    (folder / "libcuda.so.1").symlink_to(library.name)
    (folder / "libcudart.so.13").symlink_to(library.name)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


@needs_compiler
def test_every_call_gets_its_arguments(tmp_path):
    lines = run(tmp_path, "-DWITH_BATCH")
    one, other = list(range(8)), list(range(32, 48))
    sides = [f"{way} {side}" for way in ("STORE", "LOAD") for side in (one, other, one, other)]
    assert lines[:9] == ["has batch True", *sides]
    assert lines[9:11] == [
        "one [32, 33, 34, 35] [32, 33, 34, 35]",
        "cudaHostRegister failed with code 2",
    ]
    assert [line for line in lines[11:] if line] == [
        "register HOST 64 1",
        "batch 2 1 1 0 1 77",
        "batch 2 1 1 0 1 77",
        "async 2 77",
        "blocking 1",
        "register HOST 64 1",
        "last error",
        "capture mode 2",
        "unregister HOST",
        "capture mode 0",
    ]


@needs_compiler
def test_a_driver_without_batched_copies_says_so(tmp_path):
    lines = run(tmp_path)
    refusal = "cuMemcpyBatchAsync is not in this version of the driver"
    assert lines[:2] == ["has batch False", refusal]
    assert lines.count(refusal) == 2
    assert f"STORE {[0] * 8}" in lines
