"""The demonstration's workload, its engines' options, and its negative control."""

from __future__ import annotations

import json
import os
import random
import statistics
from pathlib import Path
from typing import Any

from tierkv.bench.demo.child import Engine
from tierkv.bench.tiny_models import VOCABULARY
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
SEED = 20240917


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
            result = engine.generate(history, ANSWER_TOKENS)
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


def damage_block(run: Path, prefix: list[str]) -> bool:
    """Overwrite the payload of a prefix's last block in the mapped pool file."""
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
    keys = [block_key(bytes.fromhex(block_hash)) for block_hash in prefix]
    answer = client.lookup(namespace, keys)
    if answer is None or len(answer.offsets) < len(prefix):
        return False
    pool = attach_pool(Path(stats["pool"]))
    start = int(answer.offsets[-1]) + FRAME_BYTES
    end = int(answer.offsets[-1]) + space["slot_bytes"]
    pool.bytes[start:end] = pool.bytes[start:end][::-1].copy()
    client.release([answer.lease])
    client.close()
    return True


def negative_control(engine: Engine, run: Path, reference: dict[str, Any]) -> dict[str, Any]:
    """Damage one block that the next request loads; its output has to change."""
    engine.reset_device_cache()
    before = engine.generate(reference["prompt"], ANSWER_TOKENS)
    before_difference = differs_by([before], [reference])
    is_damaged = damage_block(run, before["hashes"][:2])
    engine.reset_device_cache()
    after = engine.generate(reference["prompt"], ANSWER_TOKENS)
    difference = differs_by([after], [reference])
    return {
        "block_damaged": is_damaged,
        "equal_before": before_difference <= LOGPROB_TOLERANCE,
        "hit_tokens": after["hits"]["dram"],
        "logprob_difference": difference if difference != float("inf") else "tokens differ",
        "output_changed": difference > LOGPROB_TOLERANCE * CONTROL_FACTOR,
    }
