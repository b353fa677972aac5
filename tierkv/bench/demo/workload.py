"""The demonstration's workload, its engines' options, and its negative controls."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

from tierkv.bench.demo.child import Engine
from tierkv.bench.demo.node import SOURCES, DemoNode
from tierkv.bench.tiny_models import VOCABULARY

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
    """TierKV's configuration here: a small pool, an SSD tier, an embedded daemon."""
    return {
        "node": {
            "dram": {"capacity": "96MiB", "extent_unit": "8MiB"},
            "tiers": [{"type": "fs", "path": str(run / "ssd"), "capacity": "256MiB"}],
            "write_policy": "write_through",
            "service": {
                "socket": str(run / "daemon.sock"),
                "linger": "30s",
                "quarantine_min": "1s",
            },
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
    results: list[dict[str, Any]],
    reference: list[dict[str, Any]] | None,
    tiers: dict[str, int] | None = None,
) -> dict[str, Any]:
    """One row of the table.

    Args:
        tiers: tokens by tier as the daemon counted them.
    """
    prompts = sum(len(r["prompt"]) for r in results)
    hits = {"device": sum(r["hits"]["device"] for r in results)}
    hits |= tiers if tiers is not None else dict.fromkeys(SOURCES, 0)
    external = sum(r["hits"]["external"] for r in results)
    if external != sum(hits[name] for name in SOURCES):
        raise SystemExit(f"vLLM counts {external} loaded tokens, the daemon {tiers}")
    cached = sum(r["cached"] for r in results)
    return {
        "computed_tokens": prompts - cached,
        "prompt_tokens": prompts,
        "hit_tokens": hits,
        "ttft_ms_p50": round(statistics.median(r["ttft_ms"] for r in results), 1),
        "outputs_equal": reference is None or differs_by(results, reference) <= LOGPROB_TOLERANCE,
    }


def negative_control(
    engine: Engine, node: DemoNode, reference: dict[str, Any], tier: str
) -> dict[str, Any]:
    """Damage one block that the next request loads from a tier; its output has to change."""

    def again() -> tuple[dict[str, Any], int]:
        """The request once more, with an empty device, and what the tier gave to it."""
        if tier != "dram":
            node.wait_written()
            node.forget_dram()
        engine.reset_device_cache()
        before = node.tokens()
        result = engine.generate(reference["prompt"], ANSWER_TOKENS)
        return result, hits_since(node, before, 1)[tier]

    before, _ = again()
    damage = node.damage_in_dram if tier == "dram" else node.damage_on_ssd
    is_damaged = damage(before["hashes"][:2])
    after, hits = again()
    difference = differs_by([after], [reference])
    return {
        "block_damaged": is_damaged,
        "equal_before": differs_by([before], [reference]) <= LOGPROB_TOLERANCE,
        "hit_tokens": hits,
        "logprob_difference": difference if difference != float("inf") else "tokens differ",
        "output_changed": difference > LOGPROB_TOLERANCE * CONTROL_FACTOR,
    }


def hits_since(node: DemoNode, before: dict[str, int], requests: int) -> dict[str, int]:
    """Tokens by tier that requests got since then; waits until all of them are counted."""
    node.wait(
        lambda s: s["tokens_total"]["requests"] - before["requests"] >= requests,
        "the daemon to count the requests",
    )
    after = node.tokens()
    return {name: after[name] - before[name] for name in SOURCES}
