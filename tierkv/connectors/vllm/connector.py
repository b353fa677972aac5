"""vLLM's view of TierKV: a thin class that hands every call to one of the two halves.

Which calls come in which order is vLLM's affair; this file only translates names.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorRole,
)

from tierkv.config import TierKVConfig, block_tokens_of, from_extra_config
from tierkv.connectors.vllm import compat, identity
from tierkv.connectors.vllm.meta import StepPlan, WorkerReport
from tierkv.connectors.vllm.requests import Roles, Sizes
from tierkv.connectors.vllm.scheduler import SchedulerHalf
from tierkv.connectors.vllm.worker import WorkerHalf
from tierkv.core.extents import slots_in
from tierkv.device.base import CopyEngine
from tierkv.device.facts import CopyFacts
from tierkv.device.select import create_copy_engine
from tierkv.errors import ConfigError, LayoutMismatchError, TierKVError
from tierkv.pool import pool_path
from tierkv.service.client import Attachment, Client
from tierkv.service.launcher import start_daemon
from tierkv.types import RankGeometry, slot_bytes_of
from tierkv.units import approximate_size

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

START_WAIT_S = 2.0

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource

    _HOST = CacheHitSource.HOST
except ImportError:  # releases before 0.30 do not tell sources apart
    _HOST = None


class TierKVConnector(KVConnectorBase_V1):
    """One KV cache group of full attention, loaded from and stored to the node's DRAM pool."""

    _cache_hit_source = _HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Refuse what cannot be served correctly, then make one of the two halves.

        Raises:
            ConfigError, LayoutMismatchError: says what to change.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self.config = from_extra_config(transfer.kv_connector_extra_config or {})
        self._refuse(transfer)
        compat.share_log()
        self.engine_id = identity.engine_id_of(vllm_config)
        page = vllm_config.cache_config.block_size
        self._sizes = Sizes(
            page,
            block_tokens_of(self.config.engine.block_tokens, page),
            vllm_config.parallel_config.world_size,
        )
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._facts: dict[str, object] | None = None
        self._slot_bytes = 0
        self._rank_offsets: tuple[int, ...] = ()
        self._is_private = False
        self._devices: dict[int, CopyFacts] = {}
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = self._make_scheduler(transfer)
        else:
            self._worker = self._make_worker()

    def _refuse(self, transfer: Any) -> None:
        groups = self._kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            listed = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
            raise LayoutMismatchError(
                f"this model has {len(groups)} KV cache groups ({listed}); TierKV serves models "
                "with one group of full attention for now"
            )
        kinds = compat.unsupported_kinds(groups[0].kv_cache_spec)
        if kinds:
            raise LayoutMismatchError(
                f"{', '.join(kinds)} is not supported yet; TierKV serves full attention and MLA"
            )
        self._refuse_context_parallelism()
        if self.config.engine.store_mode == "layerwise" and compat.has_microbatches(
            self._vllm_config
        ):
            raise ConfigError(
                "engine.store_mode: 'layerwise' stores a layer when its first microbatch is done; "
                "use 'step' with --enable-dbo and --ubatch-size"
            )
        is_failing = not compat.is_recompute(transfer)
        if is_failing and not self.config.engine.allow_failed_requests:
            raise ConfigError(
                "kv_load_failure_policy: 'fail' ends requests when a copy fails; set it to "
                "'recompute', or set engine.allow_failed_requests: true"
            )

    def _refuse_context_parallelism(self) -> None:
        parallel = self._vllm_config.parallel_config
        for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
            if getattr(parallel, name, 1) > 1:
                raise LayoutMismatchError(
                    f"{name} is {getattr(parallel, name)}; context parallelism is not supported yet"
                )
        page = self._vllm_config.cache_config.block_size
        unit = getattr(self._kv_cache_config, "hash_block_size", None)
        if unit not in (None, page):
            raise LayoutMismatchError(
                f"blocks of {page} tokens are hashed in units of {unit}; that is not supported yet"
            )

    # ---- making the halves ---------------------------------------------------------------------

    def _make_scheduler(self, transfer: Any) -> SchedulerHalf:
        from tierkv.service.daemon import node_text

        node = self.config.node
        is_auto = node.service.mode == "auto"
        client = Client(
            node.service.socket_path,
            self.engine_id,
            node=node_text(node),
            deadline_s=self.config.engine.request_deadline,
            start=(lambda: start_daemon(node)) if is_auto else None,
            start_wait_s=node.service.start_wait_max,
        )
        client.poll()  # the daemon starts while the engine still does
        roles = Roles(transfer.is_kv_consumer, transfer.is_kv_producer)
        return SchedulerHalf(client, self.config.engine, self._sizes, roles)

    def _make_worker(self) -> WorkerHalf:
        node = self.config.node
        socket = node.service.socket_path
        return WorkerHalf(
            self.engine_id,
            pool_path(node.dram.directory, socket),
            socket.parent,
            make_copies=self.make_copy_engine,
            is_layerwise_store=self.config.engine.store_mode == "layerwise",
            rank=_rank_index(),
            fences_early=compat.writes_before_fence(self._vllm_config, self._kv_cache_config),
        )

    def make_copy_engine(self, device: torch.device) -> CopyEngine:
        """The copy engine of this worker's device; a subclass may wrap it."""
        return create_copy_engine(device)

    @property
    def scheduler_half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "only the scheduler's connector has one"
        return self._scheduler

    @property
    def worker_half(self) -> WorkerHalf:
        assert self._worker is not None, "only a worker's connector has one"
        return self._worker

    # ---- worker --------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        pages = compat.page_sizes(self._kv_cache_config)
        hookless = compat.hookless_layers(self._vllm_config, kv_caches)
        blocks = self._kv_cache_config.num_blocks
        self.worker_half.register(kv_caches, blocks, pages, hookless)
        self.worker_half.set_engine_blocks(self._sizes.engine_blocks)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self.worker_half.geometry()

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self.worker_half.fence(kv_connector_metadata)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker_half.begin_step(connector_metadata)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self.worker_half.begin_step(StepPlan())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker_half.start_loads()

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.worker_half.wait_for_layer(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self.worker_half.layer_computed(layer_name)

    def wait_for_save(self) -> None:
        self.worker_half.end_forward()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        return None, self.worker_half.take_loaded()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.worker_half.take_bad_blocks()

    def build_connector_worker_meta(self) -> WorkerReport | None:
        return self.worker_half.take_report()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None
        if self._scheduler is not None:
            self._scheduler.close()
            self._scheduler = None

    # ---- scheduler -----------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """All ranks' geometry is here: compute the namespace and start caching."""
        try:
            self._start_caching(metadata)
        except (TierKVError, OSError) as error:
            logger.error("TierKV is off for this engine: %s", error)

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        """Releases before pipeline-aware handshakes: all ranks belong to stage 0."""
        self.set_xfer_handshake_metadata_pp_aware({(0, r): m for r, m in metadata.items()})

    def _start_caching(self, handshakes: dict[tuple[int, int], Any]) -> None:
        geometries = identity.geometry_by_rank(handshakes, self._sizes.ranks)
        per = self._sizes.engine_blocks
        sizes = [RankGeometry(g.page_bytes, per).bytes for g in geometries]
        self._rank_offsets = tuple(sum(sizes[:at]) for at in range(len(sizes)))
        self._slot_bytes = slot_bytes_of(sum(sizes))
        model = self._vllm_config.model_config
        explicit = self.config.engine.model_version
        weights = identity.weights_identity(model.model, getattr(model, "revision", None), explicit)
        if str(self._vllm_config.load_config.load_format) == "dummy":
            weights = None if explicit is None else weights  # random, whatever the files say
        algorithm = self._vllm_config.cache_config.prefix_caching_hash_algo
        seed, is_shared = compat.hash_seed(algorithm)
        if weights is None:
            logger.warning(
                "the weights of %s cannot be identified, so this engine shares nothing; set "
                "engine.model_version", model.model,
            )  # fmt: skip
        if not is_shared:
            logger.warning(
                "block hashes of %s have a random root in this process, so this engine shares "
                "nothing; use sha256 or set PYTHONHASHSEED", algorithm,
            )  # fmt: skip
        has_own_scales = bool(getattr(self._vllm_config.cache_config, "calculate_kv_scales", False))
        if has_own_scales:
            logger.warning(
                "calculate_kv_scales: each engine has scales of its own, so this one shares "
                "nothing; use a checkpoint with scales"
            )
        self._is_private = weights is None or not is_shared or has_own_scales
        self._facts = identity.namespace_facts(
            self._vllm_config,
            geometries,
            block_tokens=self._sizes.block,
            weights=weights or "unknown",
            hash_seed=seed,
            scales=compat.quantisation(self._kv_cache_config),
        )
        self._attach(identity.new_epoch() if self._is_private else None, START_WAIT_S)

    def _attach(self, epoch: str | None, wait_s: float) -> None:
        assert self._facts is not None, "the geometry is known"
        namespace = identity.namespace_of(self._facts, epoch)
        model = str(self._vllm_config.model_config.model).rstrip("/").rsplit("/", 1)[-1]
        label = f"{model[-100:]}, {self._sizes.block} tokens"
        tokens = self._sizes.block
        wanted = Attachment(namespace, self._slot_bytes, label, epoch is not None, tokens)
        is_usable = self.scheduler_half.attach(wanted, self._rank_offsets, wait_s)
        unit = self.config.node.dram.extent_unit
        slots = slots_in(self.scheduler_half.pool_bytes, unit, self._slot_bytes)
        logger.info(
            "TierKV %s: pool=%s blocks=%d tokens=%d namespace=%s block_tokens=%d slot=%s store=%s "
            "load=%s threshold=%d",
            "ready" if is_usable else "waits for its daemon",
            approximate_size(self.scheduler_half.pool_bytes),
            slots,
            slots * self._sizes.block,
            namespace.hex()[:12],
            self._sizes.block,
            approximate_size(self._slot_bytes),
            self.config.engine.store_mode,
            self.config.engine.load_mode,
            self.config.engine.swap_in_threshold,
        )

    def on_new_request(self, request: Any) -> None:
        self.scheduler_half.new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler_half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_block_ids()
        self.scheduler_half.allocated(request, list(ids[0]), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepPlan:
        return self.scheduler_half.plan_step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self.scheduler_half.take_report(report)
            if report.devices:
                self._devices.update(report.devices)
                self.scheduler_half.client.say_devices(self._devices)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.scheduler_half.request_finished(request)
        return False, None

    def has_pending_push_work(self) -> bool:
        return self._scheduler is not None and self._scheduler.has_copies

    def reset_cache(self) -> bool:
        """This engine alone starts over in a fresh private namespace; works with a dead daemon.

        vLLM calls it when weights may have changed, so nothing stored before may hit.
        """
        if self._facts is not None:
            self._attach(identity.new_epoch(), 0.0)
        return True

    @property
    def requires_kv_delivery(self) -> bool:
        """A lost store is a later miss, so preempted requests need no recomputation for it."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks are skipped in full graphs, so only layer-wise modes need piecewise ones."""
        engine = _config_of(extra_config).engine
        return "layerwise" in (engine.store_mode, engine.load_mode)

    def take_events(self) -> Iterable[Any]:
        return ()


def _config_of(extra: dict[str, Any]) -> TierKVConfig:
    return from_extra_config(extra or {})


def _rank_index() -> int:
    """This worker's place in (pp, tp) order."""
    from vllm.distributed.parallel_state import (
        get_pp_group,
        get_tensor_model_parallel_rank,
        get_tensor_model_parallel_world_size,
    )

    stage = int(get_pp_group().rank_in_group)
    return stage * int(get_tensor_model_parallel_world_size()) + int(
        get_tensor_model_parallel_rank()
    )
