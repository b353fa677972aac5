"""`vllm serve` with the shipped configuration file, through its OpenAI API, and both restarted."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.processes import wait_for_end
from tests.vllm.driver import TOLERANCE, prompt
from tierkv.pool import DaemonLock
from tierkv.service import wire
from tierkv.service.client import Client
from tierkv.tiers.frame import seal
from tierkv.types import FRAME_BYTES

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
START_WAIT_S = 400
PROMPT = prompt(77, 700)  # five full blocks of 128 tokens


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Served:
    """A `vllm serve` process, and the daemon that it starts."""

    def __init__(self, model: Path, run: Path) -> None:
        self.model = str(model)
        self.socket = run / "d.sock"
        self.log = run / "serve.log"
        self.port = free_port()
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", self.model,
            "--config", "configs/vllm-cpu.yaml", "--skip-tokenizer-init", "--enforce-eager",
            "--host", "127.0.0.1", "--port", str(self.port),
        ]  # fmt: skip
        tier = {"type": "fs", "path": str(run / "ssd"), "capacity": "256MiB"}
        environment = os.environ | {
            "TIERKV_NODE__SERVICE__SOCKET": str(self.socket),
            "TIERKV_NODE__SERVICE__QUARANTINE_MIN": "200ms",
            "TIERKV_NODE__SERVICE__LINGER": "60s",
            "TIERKV_NODE__DRAM__CAPACITY": "64MiB",
            "TIERKV_NODE__DRAM__EXTENT_UNIT": "8MiB",
            "TIERKV_NODE__TIERS": json.dumps([tier]),
            "TIERKV_NODE__WRITE_POLICY": "write_through",
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        self._wait()

    def _wait(self) -> None:
        for _ in range(START_WAIT_S):
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                self.call("/health")
                return
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(1)
                break
        pytest.fail(f"vllm serve did not start:\n{self.log.read_text()[-3000:]}")

    def call(self, path: str, body: dict | None = None) -> bytes:
        """GET, or POST with a JSON body."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=120) as reply:
            return reply.read()

    def complete(self, tokens: list[int]) -> tuple[list[str], list[float]]:
        """Tokens and their log-probabilities."""
        body = {
            "model": self.model, "prompt": tokens, "max_tokens": 8, "temperature": 0,
            "logprobs": 1, "ignore_eos": True, "return_tokens_as_token_ids": True,
            "detokenize": False,
        }  # fmt: skip
        choice = json.loads(self.call("/v1/completions", body))["choices"][0]
        return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache; TierKV keeps what it has."""
        self.call("/reset_prefix_cache", {})

    def stats(self) -> tuple[dict, int]:
        """The daemon's numbers and its process id."""
        client = Client(self.socket, None)
        try:
            client.connect(30)
            return json.loads(client.ask(wire.Stats, 30).body), client.welcome.pid
        finally:
            client.close()

    def purge_dram(self) -> None:
        client = Client(self.socket, None)
        try:
            client.connect(30)
            client.ask(lambda seq: wire.Purge(seq, "", ["dram"]), 30)
        finally:
            client.close()

    def wait_for_stats(self, is_reached) -> dict:
        for _ in range(600):
            stats, _ = self.stats()
            if is_reached(stats):
                return stats
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(0.1)
        pytest.fail(f"waited in vain: {stats}")

    def hits(self, requests: int) -> dict[str, int]:
        """Tokens by source when so many requests are counted."""
        stats = self.wait_for_stats(lambda s: s["tokens_total"]["requests"] >= requests)
        return stats["tokens_total"]["tokens"]

    def stop(self) -> None:
        """Both processes end, and everything with them."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        if DaemonLock(self.socket).is_held():
            _, pid = self.stats()
            os.kill(pid, signal.SIGTERM)
            wait_for_end(pid)


def is_equal(one: tuple[list[str], list[float]], other: tuple[list[str], list[float]]) -> bool:
    pairs = zip(one[1], other[1], strict=True)
    return one[0] == other[0] and all(abs(a - b) <= TOLERANCE for a, b in pairs)


def exchange(files: list[Path]) -> None:
    """Each file gets the bytes of the next one, under a frame that says that they are right.

    Bytes of other blocks, because the API refuses to tell a log-probability that is no number.
    """
    payloads = [file.read_bytes()[FRAME_BYTES:] for file in files]
    for file, payload in zip(files, payloads[1:] + payloads[:1], strict=True):
        slot = bytearray(FRAME_BYTES) + payload
        seal(memoryview(slot), bytes.fromhex(file.parents[1].name), bytes.fromhex(file.name))
        file.write_bytes(slot)


def test_a_served_model_hits_after_a_reset_and_after_a_restart_of_both(models, tmp_path):
    served = Served(models["gqa"], tmp_path)
    try:
        first = served.complete(PROMPT)
        assert served.hits(1)["dram"] == 0
        served.forget_device()
        assert is_equal(served.complete(PROMPT), first)
        hits = served.hits(2)
        assert (hits["device"], hits["dram"], hits["fs"]) == (0, 640, 0)
        other = served.complete(prompt(78, 700))
        assert not is_equal(other, first), "any prompt gives the same; the test proves nothing"
        served.wait_for_stats(lambda s: s["tiers"][0]["blocks_known"] >= 10)
    finally:
        served.stop()
    served = Served(models["gqa"], tmp_path)
    try:
        served.wait_for_stats(lambda s: s["is_granting"] and s["tiers"][0]["is_scanned"])
        assert is_equal(served.complete(PROMPT), first)
        hits = served.hits(1)
        assert (hits["device"], hits["dram"] + hits["fs"]) == (0, 640)
        assert hits["fs"] > 0
        served.purge_dram()
        served.forget_device()
        files = list(tmp_path.glob("ssd/*/*/*"))
        assert len(files) == 10
        exchange(files)
        assert not is_equal(served.complete(PROMPT), first), "a rewritten file must show"
        assert served.hits(2)["fs"] > hits["fs"]
    finally:
        served.stop()
