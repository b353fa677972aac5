"""Blocks that come back from an SSD: same outputs, whatever the SSD does; a changed file shows."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import wait_for
from tests.vllm.conftest import PROMPTS
from tests.vllm.driver import TOLERANCE, Driver, difference, prompt
from tierkv.config import parse_config
from tierkv.hashing import block_key
from tierkv.pool import DaemonLock
from tierkv.service import wire
from tierkv.tiers.frame import seal
from tierkv.types import FRAME_BYTES

pytestmark = pytest.mark.vllm
DEADLINE_S = 1.0


class Ssd:
    """An engine with an SSD tier that fails on command, and what lies on the SSD."""

    def __init__(self, models, run: Path, write_policy: str = "write_through", **dram) -> None:
        self.root = run / "ssd"
        self.control = run / "control"
        self.run = run
        tier = {
            "type": "fs",
            "path": str(self.root),
            "capacity": "1GiB",
            "deadline": f"{DEADLINE_S}s",
            "write_policy": write_policy,
        }
        self.node = {
            "tiers": [tier],
            "dram": {"capacity": "64MiB", "extent_unit": "8MiB", "promote_share_max": 1.0, **dram},
        }
        service = {"socket": str(run / "d.sock"), "quarantine_min": "200ms"}
        self._config = parse_config({"node": self.node | {"service": service}}).node
        self._daemon: subprocess.Popen | None = None
        self.start_daemon()
        self.models = models
        self.driver: Driver | None = None

    def start_daemon(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("tier_daemon.py"))]
        with (self.run / "daemon.log").open("ab") as log:
            self._daemon = subprocess.Popen(
                [*command, str(self.control)], stdin=subprocess.PIPE, stdout=log, stderr=log
            )
        self._daemon.stdin.write(self._config.model_dump_json().encode())
        self._daemon.stdin.close()
        lock = DaemonLock(self.run / "d.sock")
        wait_for(lambda: lock.is_held() and (self.run / "d.sock").exists(), what="the daemon")

    def engine(self, load_mode: str = "async") -> Driver:
        """An engine with this load mode; the last one goes on if it has it."""
        if self.driver is not None and self.driver.load_mode == load_mode:
            return self.driver
        if self.driver is not None:
            self.driver.close()
        settings = {"load_mode": load_mode, "promote_wait_max": "20s"}
        self.driver = Driver(self.models["gqa"], self.run, settings, node=self.node)
        self.driver.load_mode = load_mode
        self.wait_ready()
        return self.driver

    # ---- faults and files ----

    def fault(self, name: str, text: str = "") -> None:
        """Begin a fault of `FaultTier`."""
        half = self.control / "fs" / f".{name}"
        half.write_text(text)
        half.rename(self.control / "fs" / name)

    def end_faults(self) -> None:
        for file in (self.control / "fs").iterdir():
            if file.name != "log":
                file.unlink()

    def log(self, op: str) -> list[dict]:
        """Calls of the store so far."""
        path = self.control / "fs" / "log"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in map(json.loads, lines) if line["op"] == op]

    def reads_of(self, file: Path) -> int:
        return sum(file.name in line["keys"] for line in self.log("read"))

    def file_of(self, block_hash: bytes) -> Path:
        key = block_key(block_hash)
        (found,) = self.root.glob(f"*/{key.hex()[:2]}/{key.hex()}")
        return found

    # ---- states ----

    def wait_ready(self) -> None:
        def is_ready() -> bool:
            stats = self.driver.stats()
            return stats["is_granting"] and stats["tiers"][0]["is_scanned"]

        wait_for(is_ready, what="the tier to be known whole")

    def wait_written(self) -> None:
        def is_quiet() -> bool:
            stats = self.driver.stats()
            return stats["dirty_blocks"] == 0 and stats["tiers"][0]["jobs"] == 0

        wait_for(is_quiet, what="blocks to be written")

    def empty(self) -> None:
        """Nothing anywhere."""
        self.end_faults()
        self.wait_ready()
        self.driver.purge()
        self.driver.forget_device()

    def only_on_ssd(self) -> None:
        """Device and DRAM forget everything; the SSD keeps its blocks."""
        self.wait_written()
        self.driver.ask(lambda seq: wire.Purge(seq, "", ["dram"]))
        self.driver.forget_device()

    def fs_tokens(self) -> int:
        return self.driver.stats()["tokens_total"]["tokens"]["fs"]

    def close_engine(self) -> None:
        """One process has room for one engine at a time."""
        if self.driver is not None:
            self.driver.close()
            self.driver = None

    def close(self) -> None:
        self.close_engine()
        if (self.control / "fs").exists():
            self.end_faults()
        self._daemon.terminate()
        self._daemon.wait(30)
        lock = DaemonLock(self.run / "d.sock")
        if lock.is_held():  # one that the engine started
            os.kill(daemon_of(self.run), signal.SIGTERM)
            wait_for(lambda: not lock.is_held(), what="the daemon to end")

    def kill_daemon(self) -> None:
        self._daemon.kill()
        self._daemon.wait()


def daemon_of(run: Path) -> int:
    from tests.vllm.driver import daemon_pid

    return daemon_pid(run)


@pytest.fixture(scope="module")
def ssd(models, tmp_path_factory):
    found = Ssd(models, tmp_path_factory.mktemp("tiers"))
    yield found
    found.close()


def rewrite(file: Path) -> None:
    """Other bytes under a frame that says that they are right."""
    slot = bytearray(file.read_bytes())
    slot[FRAME_BYTES:] = slot[FRAME_BYTES:][::-1]
    namespace, key = bytes.fromhex(file.parents[1].name), bytes.fromhex(file.name)
    seal(memoryview(slot), namespace, key)
    file.write_bytes(slot)


@pytest.mark.parametrize("load", ["async", "layerwise"])
def test_outputs_are_equal_with_hits_from_ssd_and_change_with_a_rewritten_file(ssd, baseline, load):
    driver = ssd.engine(load)
    ssd.empty()
    for tokens in PROMPTS:
        driver.generate(tokens)
    ssd.only_on_ssd()
    before = ssd.fs_tokens()
    warm = [driver.generate(tokens) for tokens in PROMPTS]
    for want, got in zip(baseline[0], warm, strict=True):
        assert difference(want, got) <= TOLERANCE
    whole = 640 if load == "async" else 512
    assert [r.cached for r in warm] == [896, 896, whole, 1024]
    assert ssd.fs_tokens() - before == sum(r.cached for r in warm)

    ssd.only_on_ssd()
    rewrite(ssd.file_of(warm[0].hashes[2]))
    hurt = driver.generate(PROMPTS[0])
    assert hurt.cached == 896
    assert difference(baseline[0][0], hurt) > 100 * TOLERANCE
    driver.check()


def truncate(file: Path, _other: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def zero(file: Path, _other: Path) -> None:
    file.write_bytes(bytes(file.stat().st_size))


def flip(file: Path, _other: Path) -> None:
    slot = bytearray(file.read_bytes())
    slot[-1] ^= 1
    file.write_bytes(slot)


def swap(file: Path, other: Path) -> None:
    other.rename(file.with_name("aside"))
    file.rename(other)
    file.with_name("aside").rename(file)


def make_foreign(file: Path, _other: Path) -> None:
    file.write_bytes(b"somebody else's file".ljust(file.stat().st_size))


def make_fifo(file: Path, _other: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def make_link(file: Path, other: Path) -> None:
    file.unlink()
    file.symlink_to(other)


def make_directory(file: Path, _other: Path) -> None:
    file.unlink()
    file.mkdir()


def delete(file: Path, _other: Path) -> None:
    file.unlink()


DAMAGES = [truncate, zero, flip, swap, make_foreign, make_fifo, make_link, make_directory, delete]


@pytest.mark.parametrize("hurt", DAMAGES)
def test_a_damaged_file_is_a_shorter_hit_and_is_read_once(ssd, baseline, hurt):
    driver = ssd.engine()
    ssd.empty()
    hashes = driver.generate(PROMPTS[0]).hashes
    ssd.only_on_ssd()
    file = ssd.file_of(hashes[3])
    reads = ssd.reads_of(file)
    hurt(file, ssd.file_of(hashes[5]))
    result = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], result) <= TOLERANCE
    assert result.cached == 3 * 128, "the head is whole"
    driver.forget_device()
    again = driver.generate(PROMPTS[0])
    assert again.cached == 896, "what was computed was stored again"
    assert difference(baseline[0][0], again) <= TOLERANCE
    assert ssd.reads_of(file) - reads == 1
    if file.is_dir():
        file.rmdir()
    ssd.wait_written()
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_a_promotion_is_submitted_before_the_scheduler_asks(ssd, baseline):
    """The store is reached while the engine has not made a single step for the request."""
    driver = ssd.engine()
    ssd.empty()
    driver.generate(PROMPTS[0])
    ssd.only_on_ssd()
    begun = len(ssd.log("hang-read"))
    ssd.fault("hang-read")
    name = driver.add(PROMPTS[0])
    wait_for(lambda: len(ssd.log("hang-read")) > begun, what="a read before any step")
    ssd.end_faults()
    (result,) = driver.finish([name])
    assert result.cached == 896
    assert difference(baseline[0][0], result) <= TOLERANCE
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_a_hung_read_is_a_miss_and_the_process_is_replaced(ssd, baseline):
    driver = ssd.engine()
    ssd.empty()
    hashes = driver.generate(PROMPTS[0]).hashes
    driver.generate(PROMPTS[1])
    ssd.only_on_ssd()
    process = driver.stats()["tiers"][0]["process"]
    ssd.fault("hang-read", block_key(hashes[4]).hex())
    result = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], result) <= TOLERANCE
    assert result.cached < 896, "the hung block and what follows were computed"
    healthy = driver.generate(PROMPTS[1])
    assert healthy.cached == 896, "other blocks are read meanwhile"
    assert difference(baseline[0][1], healthy) <= TOLERANCE
    wait_for(lambda: driver.stats()["tiers"][0]["process"] > process, what="another process")
    ssd.end_faults()
    ssd.wait_ready()
    ssd.only_on_ssd()
    assert driver.generate(PROMPTS[0]).cached == 896
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


@pytest.mark.parametrize("fault", ["fail-read", "corrupt-read", "unavailable"])
def test_a_store_that_fails_costs_hits_only(ssd, baseline, fault):
    driver = ssd.engine()
    ssd.empty()
    driver.generate(PROMPTS[0])
    ssd.only_on_ssd()
    ssd.fault(fault)
    result = driver.generate(PROMPTS[0])
    assert result.cached == 0
    assert difference(baseline[0][0], result) <= TOLERANCE
    ssd.end_faults()
    driver.forget_device()
    again = driver.generate(PROMPTS[0])
    assert again.cached == 896, "DRAM has it"
    assert difference(baseline[0][0], again) <= TOLERANCE
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_a_store_that_loses_blocks_costs_hits_only(ssd, baseline):
    driver = ssd.engine()
    ssd.empty()
    ssd.fault("lose")
    driver.generate(PROMPTS[0])
    ssd.only_on_ssd()
    ssd.end_faults()
    result = driver.generate(PROMPTS[0])
    assert (result.cached, difference(baseline[0][0], result) <= TOLERANCE) == (0, True)
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def io_pid(run: Path) -> int:
    """The I/O process of the daemon: its mapper lock names it."""
    (lock,) = (run / "mappers").glob("io-fs.*")
    return int(lock.name.split(".")[1])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_io_process_that_dies_or_stops_costs_hits_only(ssd, baseline, number):
    driver = ssd.engine()
    ssd.empty()
    driver.generate(PROMPTS[0])
    ssd.only_on_ssd()
    process = driver.stats()["tiers"][0]["process"]
    os.kill(io_pid(ssd.run), number)
    result = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], result) <= TOLERANCE
    wait_for(lambda: driver.stats()["tiers"][0]["process"] > process, what="another process")
    ssd.wait_ready()
    ssd.only_on_ssd()
    again = driver.generate(PROMPTS[0])
    assert again.cached == 896
    assert difference(baseline[0][0], again) <= TOLERANCE
    driver.assert_damage_shows(baseline[0][0], PROMPTS[0])


def test_a_killed_daemon_is_started_anew_and_serves_from_ssd(ssd, baseline):
    """Our daemon's place is taken by the engine's own, whose tier has no faults."""
    driver = ssd.engine()
    ssd.empty()
    driver.generate(PROMPTS[0])
    ssd.wait_written()
    ssd.kill_daemon()
    lock = DaemonLock(ssd.run / "d.sock")
    computed = driver.generate(prompt(900, 300))
    assert computed.finish == "length", "the engine lives without a daemon"

    def is_back() -> bool:
        driver.generate(prompt(901, 10), new=1)
        with contextlib.suppress(Exception):
            return lock.is_held() and driver.stats()["is_granting"]
        return False

    wait_for(is_back, what="the engine to start a daemon")
    ssd.wait_ready()
    driver.forget_device()
    before = ssd.fs_tokens()
    result = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], result) <= TOLERANCE
    assert (result.cached, ssd.fs_tokens() - before) == (896, 896)
    ssd.only_on_ssd()
    rewrite(ssd.file_of(result.hashes[1]))
    hurt = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], hurt) > 100 * TOLERANCE
    shutil.rmtree(ssd.root)
    ssd.only_on_ssd()
    alone = driver.generate(PROMPTS[0])
    assert difference(baseline[0][0], alone) <= TOLERANCE


def test_write_back_keeps_what_dram_cannot_hold(ssd, models, baseline, tmp_path):
    """DRAM holds 12 blocks of 128 tokens, the prompts have 28."""
    ssd.close_engine()
    ssd = Ssd(models, tmp_path, "write_back", capacity="6MiB", extent_unit="512KiB")
    try:
        driver = ssd.engine()
        slots = 0
        for _ in range(2):
            for tokens in PROMPTS:
                driver.generate(tokens)
                driver.forget_device()
                slots = max(slots, sum(s["blocks"] for s in driver.stats()["namespaces"]))
        assert slots < 28, "DRAM was large enough; the test proves nothing"
        before = ssd.fs_tokens()
        results = [driver.generate(tokens) for tokens in PROMPTS]
        for want, got in zip(baseline[0], results, strict=True):
            assert difference(want, got) <= TOLERANCE
        assert ssd.fs_tokens() > before
        driver.check()
        ssd.only_on_ssd()
        for file in ssd.root.glob("*/*/*"):
            rewrite(file)
        hurt = driver.generate(PROMPTS[0])
        assert hurt.cached > 0
        assert difference(baseline[0][0], hurt) > 100 * TOLERANCE
    finally:
        ssd.close()
