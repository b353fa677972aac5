"""TierKV takes no device memory that vLLM would count wrong: as many blocks with as without it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
HAS_VLLM = importlib.util.find_spec("vllm") is not None

pytestmark = pytest.mark.skipif(
    not (torch.cuda.is_available() and HAS_VLLM),
    reason="compares vLLM's device blocks with and without TierKV: needs vLLM and a CUDA device",
)

SCRIPT = """
import json, sys
from vllm import LLM
options = json.loads(sys.argv[1])
llm = LLM(enforce_eager=True, skip_tokenizer_init=True, gpu_memory_utilization=0.3, **options)
config = llm.llm_engine.vllm_config.cache_config
print("blocks", config.num_gpu_blocks)
"""


def blocks_of(options: dict) -> int:
    """Blocks that vLLM allocates, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("blocks ")]
    return int(line.split()[1])


def test_vllm_has_as_many_device_blocks_with_tierkv(tmp_path):
    from tierkv.bench.tiny_models import make_model

    model = {"model": str(make_model(tmp_path, "gqa"))}
    transfer = {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "node": {
                "dram": {"capacity": "256MiB"},
                "service": {"socket": str(tmp_path / "run" / "d.sock"), "linger": "1s"},
            }
        },
    }
    without = blocks_of(model)
    assert without > 0
    assert blocks_of({**model, "kv_transfer_config": transfer}) == without
