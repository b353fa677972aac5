"""Run the demonstration: ``python -m tierkv.bench.demo``."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tierkv.bench.tiny_models import VOCABULARY, make_model
from tierkv.hashing import block_key
from tierkv.pool import attach_pool
from tierkv.service import wire
from tierkv.service.client import Attachment, Client
from tierkv.types import FRAME_BYTES, EngineId, NamespaceId

CONVERSATIONS = 6
TURNS = 3
SYSTEM_TOKENS = 256
QUESTION_TOKENS = 160
ANSWER_TOKENS = 24
BLOCK_TOKENS = 32
DEVICE_BLOCKS = 40
LOGPROB_TOLERANCE = 1e-4
CONTROL_FACTOR = 100
ANSWER_WAIT_S = 240
SEED = 20240917


class Engine:
    """A child process with one engine."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        reader, writer = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tierkv.bench.demo.engine", str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                text=True,
            )
        os.close(writer)
        self._answers = os.fdopen(reader)
        self._log = log
        self._send(options)
        self._receive()

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "a pipe was asked for"
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def _receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"the engine ended unexpectedly; end of {self._log}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, tokens: list[int], new: int = ANSWER_TOKENS) -> dict[str, Any]:
        self._send({"op": "generate", "tokens": tokens, "new": new})
        return self._receive()

    def reset_device_cache(self) -> None:
        self._send({"op": "reset"})
        if not self._receive()["ok"]:
            raise SystemExit("vLLM did not reset its prefix cache")

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        self._send({"op": "stop"})
        self._process.wait(60)


def options_of(model: Path, tierkv: dict[str, Any] | None, prefix_caching: bool) -> dict[str, Any]:
    """Engine options of one mode."""
    options: dict[str, Any] = {
        "model": str(model),
        "max_model_len": DEVICE_BLOCKS * BLOCK_TOKENS - BLOCK_TOKENS,
        "block_size": BLOCK_TOKENS,
        "num_gpu_blocks_override": DEVICE_BLOCKS,
        "enable_prefix_caching": prefix_caching,
        "max_num_seqs": 4,
    }
    if tierkv is not None:
        options["kv_transfer_config"] = {
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": tierkv,
        }
    return options


def tierkv_tree(run: Path) -> dict[str, Any]:
    """TierKV's configuration for the demonstration: a small pool, an embedded daemon."""
    return {
        "node": {
            "dram": {"capacity": "96MiB", "extent_unit": "8MiB"},
            "service": {"socket": str(run / "daemon.sock"), "linger": "30s"},
        },
        "engine": {"swap_in_threshold": 64, "request_deadline": "2s", "block_tokens": BLOCK_TOKENS},
    }


def converse(engine: Engine) -> list[dict[str, Any]]:
    """The workload: conversations take turns, so that each finds the device full of the others."""
    dice = random.Random(SEED)
    system = [dice.randrange(VOCABULARY) for _ in range(SYSTEM_TOKENS)]
    histories = [list(system) for _ in range(CONVERSATIONS)]
    results = []
    for _ in range(TURNS):
        for history in histories:
            history.extend(dice.randrange(VOCABULARY) for _ in range(QUESTION_TOKENS))
            result = engine.generate(history)
            result["prompt"] = list(history)
            results.append(result)
            history.extend(result["tokens"])
    return results


def differs_by(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Largest difference of log-probabilities; infinite where tokens differ."""
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if a["tokens"] != b["tokens"]:
            return float("inf")
        pairs = zip(a["logprobs"], b["logprobs"], strict=True)
        worst = max(worst, *(abs(x - y) for x, y in pairs))
    return worst


def summarise(
    results: list[dict[str, Any]], reference: list[dict[str, Any]] | None
) -> dict[str, Any]:
    """One row of the table."""
    prompts = sum(len(r["prompt"]) for r in results)
    hits = {name: sum(r["hits"][name] for r in results) for name in ("device", "dram")}
    cached = sum(r["cached"] for r in results)
    return {
        "computed_tokens": prompts - cached,
        "prompt_tokens": prompts,
        "hit_tokens": hits,
        "ttft_ms_p50": round(statistics.median(r["ttft_ms"] for r in results), 1),
        "outputs_equal": reference is None or differs_by(results, reference) <= LOGPROB_TOLERANCE,
    }


def damage_block(run: Path, block_hash: str) -> bool:
    """Overwrite the payload of one cached block in the mapped pool file."""
    socket = run / "daemon.sock"
    client = Client(socket, EngineId(f"demo{os.getpid()}"), deadline_s=5.0)
    client.connect(10.0)
    reply = client.ask(wire.Stats, 5.0)
    assert isinstance(reply, wire.StatsReply), "Stats is answered by StatsReply"
    stats = json.loads(reply.body)
    space = max(stats["namespaces"], key=lambda s: int(s["blocks"]))
    namespace = NamespaceId(bytes.fromhex(space["namespace"]))
    client.attach(Attachment(namespace, space["slot_bytes"], "demo", False))
    client.wait_attached(namespace, 5.0)
    answer = client.lookup(namespace, [block_key(bytes.fromhex(block_hash))])
    if answer is None or not len(answer.offsets):
        return False
    pool = attach_pool(Path(stats["pool"]))
    start = int(answer.offsets[0]) + FRAME_BYTES
    end = int(answer.offsets[0]) + space["slot_bytes"]
    pool.bytes[start:end] = pool.bytes[start:end][::-1].copy()
    client.release([answer.lease])
    client.close()
    return True


def negative_control(engine: Engine, run: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """Damage one block that the next request loads; its output has to change."""
    engine.reset_device_cache()
    before = engine.generate(reference["prompt"])
    before_difference = differs_by([before], [reference])
    is_damaged = damage_block(run, before["hashes"][1])
    engine.reset_device_cache()
    after = engine.generate(reference["prompt"])
    difference = differs_by([after], [reference])
    return {
        "block_damaged": is_damaged,
        "equal_before": before_difference <= LOGPROB_TOLERANCE,
        "hit_tokens": after["hits"]["dram"],
        "logprob_difference": difference if difference != float("inf") else "tokens differ",
        "output_changed": difference > LOGPROB_TOLERANCE * CONTROL_FACTOR,
    }


def run_modes(model: Path, run: Path) -> dict[str, Any]:
    """All modes, one after the other, and the negative control."""
    log = run / "engines.log"
    tree = tierkv_tree(run)
    modes: dict[str, Any] = {}

    def tell(name: str) -> None:
        print(f"[{len(modes) + 1}/5] {name} ...", file=sys.stderr, flush=True)

    tell("no_cache: prefix caching off")
    engine = Engine(options_of(model, None, False), log)
    reference = converse(engine)
    modes["no_cache"] = summarise(reference, None)
    engine.stop()

    tell("device_only: vLLM's own prefix cache")
    engine = Engine(options_of(model, None, True), log)
    modes["device_only"] = summarise(converse(engine), reference)
    engine.stop()

    tell("dram: with TierKV, daemon started by the engine")
    engine = Engine(options_of(model, tree, True), log)
    modes["dram"] = summarise(converse(engine), reference)

    tell("dram_after_engine_restart: the engine is killed with SIGKILL, the daemon lives")
    engine.kill()
    engine = Engine(options_of(model, tree, True), log)
    modes["dram_after_engine_restart"] = summarise(converse(engine), reference)

    tell("second_engine: another engine beside it, which never computed these tokens")
    second = Engine(options_of(model, tree, True), log)
    modes["second_engine"] = summarise(converse(second), reference)
    second.stop()

    print("negative control: one block in the pool is overwritten ...", file=sys.stderr, flush=True)
    control = negative_control(engine, run, reference[-1])
    engine.stop()
    return {"modes": modes, "negative_control": {"dram": control}}


def print_table(result: dict[str, Any]) -> None:
    """The figures for people."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{CONVERSATIONS} conversations, {TURNS} turns, vLLM on CPU")
    for name in ("mode", "computed", "from device", "from DRAM", "TTFT p50 ms", "outputs equal"):
        table.add_column(name, justify="left" if name == "mode" else "right")
    for name, row in result["modes"].items():
        hits = row["hit_tokens"]
        table.add_row(
            name, str(row["computed_tokens"]), str(hits["device"]), str(hits["dram"]),
            f"{row['ttft_ms_p50']:.1f}", "yes" if row["outputs_equal"] else "NO",
        )  # fmt: skip
    Console().print(table)
    control = result["negative_control"]["dram"]
    changed = "changed" if control["output_changed"] else "DID NOT CHANGE"
    print(f"negative control: one block overwritten in the pool, the output {changed}")


def verdict(result: dict[str, Any]) -> list[str]:
    """What is wrong with the figures; empty if nothing."""
    modes = result["modes"]
    wrong = [f"{name}: outputs differ" for name, row in modes.items() if not row["outputs_equal"]]
    for name in ("dram", "dram_after_engine_restart", "second_engine"):
        if modes[name]["computed_tokens"] >= modes["device_only"]["computed_tokens"]:
            wrong.append(f"{name}: computes no less than device_only")
        if modes[name]["hit_tokens"]["dram"] <= 0:
            wrong.append(f"{name}: no hits from DRAM")
    control = result["negative_control"]["dram"]
    if not (control["output_changed"] and control["equal_before"] and control["hit_tokens"] > 0):
        wrong.append("the negative control proves nothing")
    return wrong


def main() -> int:
    """Run it, print a table, write the figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m tierkv.bench.demo", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/demo.json"))
    parser.add_argument("--models", type=Path, default=Path("build/models"))
    arguments = parser.parse_args()
    start = time.monotonic()
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    model = make_model(arguments.models / "gqa-0.2").resolve()
    with tempfile.TemporaryDirectory(prefix="tierkv-demo-") as folder:
        result = run_modes(model, Path(folder))
    result["seconds"] = round(time.monotonic() - start, 1)
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print_table(result)
    print(f"{result['seconds']} s; figures in {arguments.output}")
    wrong = verdict(result)
    for line in wrong:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
