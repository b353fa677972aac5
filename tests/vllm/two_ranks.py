"""An engine of two ranks with processes of its own: ``python -m tests.vllm.two_ranks MODEL RUN``.

Prints one JSON line per run of one prompt: cold, warm, and with rank 1's part of a block damaged.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.processes import wait_for
from tierkv.pool import attach_pool
from tierkv.service import wire
from tierkv.service.client import Client
from tierkv.types import FRAME_BYTES

os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0|1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


def main(model: str, run: Path) -> None:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from tests.vllm.driver import prompt

    tree = {
        "node": {
            "dram": {"capacity": "64MiB", "extent_unit": "8MiB"},
            "service": {"socket": str(run / "d.sock"), "linger": "1s"},
        },
        "engine": {"swap_in_threshold": 0, "request_deadline": "5s"},
    }
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        max_model_len=2048,
        enforce_eager=True,
        dtype="float32",
        block_size=128,
        seed=0,
        tensor_parallel_size=2,
        kv_transfer_config={
            "kv_connector": "TierKVConnector",
            "kv_connector_module_path": "tierkv.connectors.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": tree,
        },
    )
    tokens = prompt(0, 1000)
    sampling = SamplingParams(
        max_tokens=8, temperature=0, logprobs=1, ignore_eos=True, detokenize=False
    )

    def generate(label: str) -> None:
        output = llm.generate([TokensPrompt(prompt_token_ids=tokens)], sampling, use_tqdm=False)[0]
        done = output.outputs[0]
        steps = zip(done.logprobs, done.token_ids, strict=True)
        result = {
            "label": label,
            "tokens": list(done.token_ids),
            "logprobs": [step[token].logprob for step, token in steps],
            "cached": output.num_cached_tokens,
        }
        print("RESULT", json.dumps(result), flush=True)

    admin = Client(run / "d.sock", None)
    admin.connect(60)
    stats: dict = {}

    def is_ready() -> bool:
        """The engine has its namespace, and both workers have mapped the pool."""
        stats.update(json.loads(admin.ask(wire.Stats, 10).body))
        locks = [p.name.split(".") for p in (run / "mappers").iterdir()]
        workers = [pid for _, pid, role in locks if role != "session"]
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in workers]
        return bool(stats["namespaces"]) and sum(stats["pool"] in m for m in maps) == 2

    wait_for(is_ready, admin, what="the engine to be attached and its workers to map the pool")
    generate("cold")

    def stored() -> bool:
        stats.update(json.loads(admin.ask(wire.Stats, 10).body))
        return stats["counters"]["blocks_stored"] >= 7

    wait_for(stored, admin, what="the stores of both ranks")
    llm.reset_prefix_cache()
    generate("warm")
    pool = attach_pool(Path(stats["pool"]))
    (space,) = stats["namespaces"]
    half = (space["slot_bytes"] - FRAME_BYTES) // 2
    for slot in range(7):  # rank 1's half of every block, rank 0's stays as it is
        start = slot * space["slot_bytes"] + FRAME_BYTES + half
        pool.bytes[start : start + half] = pool.bytes[start : start + half][::-1].copy()
    llm.reset_prefix_cache()
    generate("damaged")
    admin.close()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
