"""Differences between vLLM releases, found by looking and not by version number."""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core import kv_cache_utils

from tierkv.config import python_hash_seed


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


def share_log() -> None:
    """Let TierKV's messages appear in vLLM's log, which configures its own loggers only."""
    ours, theirs = logging.getLogger("tierkv"), logging.getLogger("vllm")
    if not ours.handlers and theirs.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
        ours.propagate = False
