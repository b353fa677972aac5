"""Names: of an engine, and of everything that makes its KV bytes interchangeable.

vLLM's block hash covers tokens, salt, adapter name and multimodal input, but neither model nor
dtype nor layout. All of that goes into the namespace: another layout is another namespace and
therefore a miss, never wrong bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tierkv.connectors.vllm.meta import WorkerGeometry
from tierkv.errors import LayoutMismatchError
from tierkv.hashing import digest_of, files_fingerprint
from tierkv.types import EngineId, NamespaceId

logger = logging.getLogger(__name__)

SLOT_FORMAT = 1
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def engine_id_of(vllm_config: Any) -> EngineId:
    """The same name in both halves of an engine, another one at every start."""
    transfer = vllm_config.kv_transfer_config
    text = f"{transfer.engine_id}/{vllm_config.instance_id}"
    return EngineId(hashlib.blake2b(text.encode(), digest_size=16).hexdigest())


def weights_identity(model: str, revision: str | None, explicit: str | None) -> str | None:
    """Fingerprint of the weights by content, or the explicit version; None if neither is known."""
    if explicit is not None:
        return f"version:{explicit}"
    folder = Path(model)
    if not folder.exists():
        folder = _downloaded(model, revision) or folder
    if folder.is_file():
        return f"file:{files_fingerprint([folder])}"
    if not folder.is_dir():
        return None
    files = [f for f in folder.iterdir() if f.suffix in WEIGHT_SUFFIXES and f.is_file()]
    return f"files:{files_fingerprint(files)}" if files else None


def _downloaded(model: str, revision: str | None) -> Path | None:
    """The local snapshot of a model hub repository, without going to the network."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        return Path(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        return None


def geometry_by_rank(
    handshakes: Mapping[tuple[int, int], object], ranks: int
) -> list[WorkerGeometry]:
    """The geometries in (pp, tp) order.

    Raises:
        LayoutMismatchError: a rank is missing, or ranks of one pipeline stage differ.
    """
    found: list[WorkerGeometry] = []
    by_stage: dict[int, WorkerGeometry] = {}
    for stage, rank in sorted(handshakes):
        geometry = handshakes[stage, rank]
        if not isinstance(geometry, WorkerGeometry):
            raise LayoutMismatchError(f"rank {rank} of stage {stage} told no KV layout")
        first = by_stage.setdefault(stage, geometry)
        if geometry.page_bytes != first.page_bytes or geometry.forms != first.forms:
            raise LayoutMismatchError(
                f"rank {rank} of stage {stage} has another KV layout than rank 0 "
                f"({geometry.page_bytes} bytes per block and layer, not {first.page_bytes}); "
                "TierKV needs equal ranks"
            )
        found.append(geometry)
    if len(found) != ranks:
        raise LayoutMismatchError(f"{len(found)} of {ranks} ranks told their KV layout")
    return found


def _model_facts(model_config: Any) -> str:
    """The effective model configuration as text, without what does not change the KV."""
    tree = model_config.hf_config.to_dict()
    for name in ("_name_or_path", "transformers_version", "name_or_path"):
        tree.pop(name, None)
    return json.dumps(tree, sort_keys=True, default=str)


def _attention_facts(vllm_config: Any) -> str:
    """What may order the bytes of a page otherwise without a trace in its dtype and shape.

    Hardware plug-ins keep such switches in `additional_config`, which is theirs alone to read; so
    all of it counts, and two engines that differ in anything there share nothing.
    """
    backend = getattr(getattr(vllm_config, "attention_config", None), "backend", None)
    extra = getattr(vllm_config, "additional_config", None) or {}
    extra = extra if isinstance(extra, Mapping) else repr(extra)
    return json.dumps([str(backend), extra], sort_keys=True, default=str)


def namespace_facts(
    vllm_config: Any,
    geometries: list[WorkerGeometry],
    *,
    block_tokens: int,
    weights: str,
    hash_seed: str,
    scales: str,
) -> dict[str, object]:
    """Everything that makes bytes interchangeable, as plain values.

    Args:
        scales: how KV values are quantised and where their scales lie.
    """
    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    return {
        "slot_format": SLOT_FORMAT,
        "model": hashlib.sha256(_model_facts(model).encode()).hexdigest(),
        "weights": weights,
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_dtype": str(cache.cache_dtype),
        "device": str(getattr(vllm_config.device_config, "device_type", "")),
        "attention": _attention_facts(vllm_config),
        "kv_scales": [scales, bool(getattr(cache, "calculate_kv_scales", False))],
        "tp": parallel.tensor_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": getattr(parallel, "prefill_context_parallel_size", 1),
        "dcp": getattr(parallel, "decode_context_parallel_size", 1),
        "block_tokens": block_tokens,
        "engine_block_tokens": cache.block_size,
        "hash_algorithm": cache.prefix_caching_hash_algo,
        "hash_seed": hash_seed,
        "ranks": [[list(g.names), list(g.page_bytes), list(g.forms)] for g in geometries],
    }


def namespace_of(facts: Mapping[str, object], epoch: str | None) -> NamespaceId:
    """The namespace; an epoch makes it private to one engine until its next restart."""
    return digest_of({**facts, "epoch": epoch or ""})


def new_epoch() -> str:
    """A random epoch, made locally so that a reset works with a dead daemon."""
    return secrets.token_hex(16)
