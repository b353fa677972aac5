"""Differences between vLLM releases, found by looking and not by version number."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from vllm.v1.core import kv_cache_utils

from tierkv.config import python_hash_seed
from tierkv.connectors.vllm.kv_layout import PageSize

FULL_ATTENTION = ("FullAttentionSpec", "MLAAttentionSpec")
# vLLM's own kinds that derive from those and keep more, or less, than all tokens' KV.
_SPECIAL = ("HiddenStateCacheSpec", "RSWASpec", "SinkFullAttentionSpec")


def hash_seed(algorithm: str) -> tuple[str, bool]:
    """The seed of vLLM's hash chain, and whether other processes have the same.

    The xxhash algorithms draw a random seed per process unless PYTHONHASHSEED is set; releases
    before 0.29 do so for every algorithm and have no default seed. The root itself is not made yet
    when ranks tell their layout.
    """
    told = python_hash_seed()
    if told is not None:
        return f"PYTHONHASHSEED={told}", True
    default = getattr(kv_cache_utils, "DEFAULT_NONE_HASH_SEED", None)
    return str(default), default is not None and algorithm.startswith("sha256")


def is_recompute(transfer_config: Any) -> bool:
    """Whether vLLM computes again what could not be loaded."""
    return bool(getattr(transfer_config, "kv_load_failure_policy", "fail") == "recompute")


def unsupported_kinds(group_spec: Any) -> list[str]:
    """Kinds of layers in a group that are not full attention over all tokens.

    Hardware plug-ins derive their own kinds, so ancestors count; some releases put layers with
    pages of different sizes into one group.
    """
    specs = getattr(group_spec, "kv_cache_specs", None) or {"": group_spec}
    bad = set()
    for spec in specs.values():
        ancestry = [kind.__name__ for kind in type(spec).__mro__]
        is_full = any(name in ancestry for name in FULL_ATTENTION)
        if not is_full or any(name in ancestry for name in _SPECIAL):
            bad.add(type(spec).__name__)
    return sorted(bad)


def page_sizes(kv_cache_config: Any) -> dict[str, PageSize]:
    """Bytes per block of each layer, as the block manager counts them."""
    found = {}
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {}
        for name in group.layer_names:
            spec = specs.get(name, group.kv_cache_spec)
            padded = int(spec.page_size_bytes)
            payload = int(getattr(spec, "real_page_size_bytes", padded))
            found[name] = PageSize(payload, padded)
    return found


def writes_before_fence(vllm_config: Any, kv_cache_config: Any) -> bool:
    """Whether the model runner writes new blocks before it calls `handle_preemptions`.

    Model Runner V2 zeroes blocks, and copies those that a request shares in part, first.
    """
    if not getattr(vllm_config, "use_v2_model_runner", False):
        return False
    unit = getattr(kv_cache_config, "hash_block_size", None)
    has_parts = unit not in (None, vllm_config.cache_config.block_size)
    return has_parts or bool(getattr(kv_cache_config, "needs_kv_cache_zeroing", False))


def hookless_layers(vllm_config: Any, names: Iterable[str]) -> frozenset[str]:
    """Layers around whose attention vLLM calls no hook of the connector.

    vLLM calls them in the operators that `forward` of `Attention` and `MLAAttention` uses. The
    index of sparse attention has a cache of its own and is read without any, and some models derive
    from those classes with a `forward` of their own. In doubt a layer has no hooks; that costs
    overlap only.
    """
    compilation = getattr(vllm_config, "compilation_config", None)
    layers = getattr(compilation, "static_forward_context", None) or {}
    found = set()
    for name in names:
        layer = layers.get(name)
        kinds = type(layer).__mro__
        forward = next((kind.__name__ for kind in kinds if "forward" in vars(kind)), "")
        # On platforms without opaque operators MLA goes past its hooked operator.
        is_direct = forward == "MLAAttention" and getattr(layer, "use_direct_call", False)
        if forward not in ("Attention", "MLAAttention") or is_direct:
            found.add(name)
    return frozenset(found)


def has_microbatches(vllm_config: Any) -> bool:
    """Whether a step runs every layer, and its hooks, several times with parts of the batch."""
    return bool(getattr(vllm_config.parallel_config, "use_ubatching", False))


def quantisation(kv_cache_config: Any) -> str:
    """How KV values are quantised and where their scales lie, as far as vLLM says it."""
    modes = set()
    for group in kv_cache_config.kv_cache_groups:
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", None) or {"": group.kv_cache_spec}
        for spec in specs.values():
            mode = getattr(spec, "kv_quant_mode", "")
            text = getattr(spec, "cache_dtype_str", None)
            modes.add(f"{getattr(mode, 'name', mode)} {text or ''}".strip())
    return ", ".join(sorted(modes))


def share_log() -> None:
    """Let TierKV's messages appear in vLLM's log, which configures its own loggers only."""
    ours, theirs = logging.getLogger("tierkv"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
