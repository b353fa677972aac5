"""Tiny models with real random weights, made on the spot.

Weights of vLLM's `dummy` loader are so small that greedy output ignores the KV cache; equal outputs
would then prove nothing. Normal weights with a standard deviation of 0.2 make every token depend on
its whole context.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCABULARY = 2048
POSITIONS_MAX = 4096


def _config(kind: str) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "max_position_embeddings": POSITIONS_MAX,
    }
    if kind == "gqa":
        return transformers.Qwen3Config(
            num_hidden_layers=4, num_key_value_heads=2, head_dim=32, **common
        )
    assert kind == "mla", "kinds are gqa and mla"
    return transformers.DeepseekV2Config(
        num_hidden_layers=3,
        num_key_value_heads=4,
        moe_intermediate_size=64,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_rope_head_dim=64,
        qk_nope_head_dim=32,
        v_head_dim=32,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
        **common,
    )


def make_model(folder: Path, kind: str = "gqa", std: float = 0.2, seed: int = 0) -> Path:
    """Write a model that vLLM can serve; keeps one that is there already.

    Args:
        kind: `gqa` (Qwen3, 4 layers) or `mla` (DeepSeek-V2, 3 layers).
        std: standard deviation of the weight matrices.
    Returns:
        The folder.
    """
    import torch
    from transformers import AutoModelForCausalLM

    recipe = {"kind": kind, "std": std, "seed": seed}
    mark = folder / "recipe.json"
    if mark.exists() and json.loads(mark.read_text()) == recipe:
        return folder
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(kind), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.normal_(0, std)
    model.save_pretrained(folder)
    mark.write_text(json.dumps(recipe))
    return folder
