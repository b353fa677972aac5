"""A vLLM engine whose KV memory lies on an NPU: vLLM's own scheduler, connector calls and classes.

Only the model is missing. In its place each layer writes the pages of the step's tokens and reads
all pages of the context, as attention does, with copies on the compute stream: what is written
depends on all tokens so far, so what is read tells whether every page is the right one. It is
written with copies on the device, so that all copies to the device are loads.

Import it after torch_npu.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tests.npu.memory import aligned_on_device
from tests.processes import wait_for
from tierkv.bench.tiny_models import make_model
from tierkv.config import NodeConfig
from tierkv.connectors.vllm.connector import TierKVConnector
from tierkv.device.base import CopyEngine
from tierkv.service import wire

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

LAYERS, BLOCKS, TOKENS = 3, 24, 128  # vLLM on Ascend has blocks of 128 tokens
HEADS, SIZE_K, SIZE_V = 2, 16, 8
NAMES = [f"model.layers.{at}.self_attn.attn" for at in range(LAYERS)]
SIDES = {"k": SIZE_K, "v": SIZE_V}
BANK_BYTES = 32 << 20
PAGES = 199  # of which neighbours in a layer or in a context are hardly ever the same
SEED = 20261130
WORD = 1_000  # tokens are below it


class Attention:
    """Of this name are the layers around which vLLM calls hooks, in this method."""

    def forward(self) -> None:
        raise NotImplementedError


class NotingConnector(TierKVConnector):
    """Keeps the copy engine where tests can ask it for its facts."""

    copies: CopyEngine

    def make_copy_engine(self, device: torch.device) -> CopyEngine:
        self.copies = super().make_copy_engine(device)
        return self.copies


def page_shape(side: str) -> tuple[int, int, int]:
    return TOKENS, HEADS, SIDES[side]


def digest(tokens: list[int]) -> bytes:
    return hashlib.blake2b(np.array(tokens, np.int32).tobytes(), digest_size=16).digest()


class Content:
    """What layers keep: one of many random pages, told by layer and all tokens so far."""

    def __init__(self, device: torch.device) -> None:
        print(f"seed={SEED}")
        dice = np.random.default_rng(SEED)
        self.on_host, self.on_device = {}, {}
        for side in SIDES:
            numbers = dice.integers(0, 1 << 16, (PAGES, *page_shape(side)), np.uint16)
            self.on_host[side] = torch.from_numpy(numbers.view(np.int16)).view(torch.bfloat16)
            self.on_device[side] = self.on_host[side].to(device)

    @staticmethod
    def number(layer: int, prefix: bytes) -> int:
        """Which page the last block of these tokens has. `prefix`: their digest."""
        told = hashlib.blake2b(prefix, digest_size=8, person=f"layer {layer}".encode())
        return int.from_bytes(told.digest(), "little") % PAGES


def vllm_config(node: NodeConfig, model: Path, engine: dict[str, object]):
    """vLLM's configuration of an engine that uses a node's pool."""
    from vllm.engine.arg_utils import EngineArgs

    tree = {
        "node": node.model_dump(mode="json"),
        "engine": {"swap_in_threshold": 0, "request_deadline": "5s", **engine},
    }
    arguments = EngineArgs(
        model=str(make_model(model)),
        skip_tokenizer_init=True,
        max_model_len=2048,
        enforce_eager=True,
        dtype="bfloat16",
        block_size=TOKENS,
        seed=0,
        distributed_executor_backend="uni",
        kv_transfer_config={
            "kv_connector": "NotingConnector",
            "kv_connector_module_path": "tests.npu.engine",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": tree,
        },
    )
    config = arguments.create_engine_config()
    config.cache_config.num_gpu_blocks = BLOCKS
    for name in NAMES:
        config.compilation_config.static_forward_context[name] = Attention()
    return config


def kv_cache_config():
    """One group of full attention, V with smaller heads than K."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheTensor,
    )

    spec = FullAttentionSpec(
        block_size=TOKENS,
        num_kv_heads=HEADS,
        head_size=SIZE_K,
        head_size_v=SIZE_V,
        dtype=torch.bfloat16,
    )
    page = spec.page_size_bytes
    return KVCacheConfig(
        num_blocks=BLOCKS,
        kv_cache_tensors=[KVCacheTensor(
            size=LAYERS * BLOCKS * page, layers=NAMES, layer_stride=BLOCKS * page, block_stride=page
        )],
        kv_cache_groups=[KVCacheGroupSpec(NAMES, spec)],
        hash_block_size=TOKENS,
    )  # fmt: skip


def start_groups(config, folder: Path) -> None:
    """vLLM's process groups, of this process alone; once per process."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    with set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            1, 0, f"file://{folder / 'rendezvous'}", 0, backend="gloo"
        )
        parallel_state.initialize_model_parallel()


class Bank:
    """Pinned pages to read into, all allocated at once; each is lent once."""

    def __init__(self) -> None:
        self._memory = torch.empty(BANK_BYTES, dtype=torch.uint8, pin_memory=True)
        self._used = 0

    def lend(self, side: str) -> torch.Tensor:
        size = TOKENS * HEADS * SIDES[side] * 2
        first, self._used = self._used, self._used + size
        assert self._used <= BANK_BYTES, "a larger bank, or a shorter test"
        return self._memory[first : self._used].view(torch.bfloat16).view(page_shape(side))


@dataclass
class Running:
    """What a model runner keeps of a request."""

    tokens: list[int]
    blocks: list[int]
    computed: int
    prompt: int


@dataclass(frozen=True)
class Read:
    """A page that attention read, and what it should have been."""

    request: str
    layer: int
    side: str
    block: int
    expected: torch.Tensor
    found: torch.Tensor


@dataclass
class Engine:
    """Scheduler and worker of one engine in this process.

    Attributes:
        caches: per layer K and V, each at a huge page of an allocation of its own.
        cached: per request, tokens that were not computed.
    """

    config: object
    device: torch.device
    caches: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(init=False)
    cached: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from vllm.distributed.kv_transfer import (
            ensure_kv_transfer_initialized,
            get_kv_transfer_group,
        )

        self.kv_config = kv_cache_config()
        self.caches = {name: (self._cache("k"), self._cache("v")) for name in NAMES}
        self.content = Content(self.device)
        self.bank = Bank()
        ensure_kv_transfer_initialized(self.config, self.kv_config)
        self.worker: NotingConnector = get_kv_transfer_group()
        self._running: dict[str, Running] = {}
        self._reads: list[Read] = []
        self._count = 0
        self.scheduler = None

    def _cache(self, side: str) -> torch.Tensor:
        shape = (BLOCKS, *page_shape(side))
        raw = aligned_on_device(2 * int(np.prod(shape)), self.device)
        return raw.view(torch.bfloat16).view(shape)

    def register(self) -> None:
        """Hand the KV memory over."""
        self.worker.register_kv_caches(self.caches)

    def start(self) -> None:
        """What a core does then: scheduler and handshake; wait until copies can succeed."""
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.structured_output import StructuredOutputManager

        hash_function = get_hash_fn_by_name(self.config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(TOKENS, hash_function)
        manager = StructuredOutputManager(self.config)
        self.scheduler = Scheduler(
            self.config, self.kv_config, manager, TOKENS, TOKENS, log_stats=True
        )
        handshake = self.worker.get_handshake_metadata()
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): handshake})
        self.wait_usable()

    def wait_usable(self) -> None:
        """Until the daemon is known, the pool mapped, and its registration over, well or not."""
        half, copies = self.scheduler.connector.scheduler_half, self.worker.copies
        wait_for(lambda: half.is_ready, half.client, what="the namespace to be attached")
        welcome, worker = half.client.welcome, self.worker.worker_half
        wait_for(lambda: worker.is_mapped(welcome.pool, welcome.generation), what="the pool")
        wait_for(
            lambda: copies.facts.problem or copies.facts.registered == copies.facts.pool > 0,
            what="the registration",
        )

    # ---- requests ----

    def add(self, tokens: list[int]) -> str:
        """A request for one token behind these."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self._count += 1
        name = f"r{self._count}"
        sampling = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True, detokenize=False)
        self.scheduler.add_request(Request(name, tokens, sampling, None, block_hasher=self._hasher))
        return name

    def hashes(self, tokens: list[int]) -> list[bytes]:
        """Those of the whole blocks."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        request = Request("hashes", tokens, SamplingParams(), None, block_hasher=self._hasher)
        return [bytes(one) for one in request.block_hashes]

    def generate(self, tokens: list[int]) -> str:
        """Run a request to its end, and all copies; its name."""
        name = self.add(tokens)
        self.settle()
        return name

    def settle(self) -> None:
        """Step until there is nothing left to do, and the daemon knows of it."""

        def step_once() -> bool:
            if self.scheduler.has_requests():
                self.step()
            return not self.scheduler.has_requests()

        wait_for(step_once, what="the engine to come to rest")
        self.scheduler.connector.scheduler_half.client.ask(wire.Ping, 5)

    def forget_device(self) -> None:
        """Empty vLLM's own prefix cache, and spoil all that lies on the device."""
        assert self.scheduler.reset_prefix_cache(), "blocks are in use"
        for pair in self.caches.values():
            for tensor in pair:
                tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype))

    # ---- one step ----

    def step(self) -> None:
        scheduled = self.scheduler.schedule()
        output = self._execute(scheduled)
        self.scheduler.update_from_output(scheduled, output)

    def _execute(self, scheduled):
        """What vLLM's model runner does, in its order."""
        from vllm.forward_context import set_forward_context
        from vllm.v1.outputs import ModelRunnerOutput
        from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

        self.worker.handle_preemptions(scheduled.kv_connector_metadata)
        self._update(scheduled)
        if not scheduled.total_num_scheduled_tokens:
            return KVConnectorModelRunnerMixin.kv_connector_no_forward(scheduled, self.config)
        with (
            set_forward_context(None, self.config),
            KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(scheduled) as told,
        ):
            for layer in range(LAYERS):
                self._compute(layer, scheduled)
        names = list(scheduled.num_scheduled_tokens)
        return ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            [self._sample(name, scheduled) for name in names],
            kv_connector_output=told,
        )

    def _update(self, scheduled) -> None:
        for name in scheduled.finished_req_ids:
            self._running.pop(name, None)
        for new in scheduled.scheduled_new_reqs:
            self._running[new.req_id] = Running(
                list(new.prompt_token_ids),
                list(new.block_ids[0]),
                new.num_computed_tokens,
                len(new.prompt_token_ids),
            )
            self.cached[new.req_id] = new.num_computed_tokens
        old = scheduled.scheduled_cached_reqs
        for at, name in enumerate(old.req_ids):
            blocks = old.new_block_ids[at]
            if name in old.resumed_req_ids:
                self._running[name].blocks = list(blocks[0])
            elif blocks is not None:
                self._running[name].blocks += blocks[0]
            known = self._running[name]
            known.computed = old.num_computed_tokens[at]
            # vLLM throws away what was sampled in a step whose loads failed.
            del known.tokens[known.prompt + old.num_output_tokens[at] :]

    def _compute(self, layer: int, scheduled) -> None:
        """Write the new tokens' KV, wait for the layer's loads, and read the whole context."""
        name = NAMES[layer]
        pair = dict(zip(SIDES, self.caches[name], strict=True))
        reads = []
        for request, count in scheduled.num_scheduled_tokens.items():
            known = self._running[request]
            end = known.computed + count
            for block in range(-(-end // TOKENS)):
                prefix = digest(known.tokens[: min(end, (block + 1) * TOKENS)])
                is_new = (block + 1) * TOKENS > known.computed
                number = self.content.number(layer, prefix)
                for side, cache in pair.items():
                    target = cache[known.blocks[block]]
                    if is_new:
                        target.copy_(self.content.on_device[side][number], non_blocking=True)
                    expected = self.content.on_host[side][number]
                    read = Read(request, layer, side, block, expected, self.bank.lend(side))
                    reads.append((read, target))
        self.worker.wait_for_layer_load(name)
        for read, target in reads:
            read.found.copy_(target, non_blocking=True)
            self._reads.append(read)
        self.worker.save_kv_layer(name, pair, None)

    def _sample(self, name: str, scheduled) -> list[int]:
        known = self._running[name]
        if known.computed + scheduled.num_scheduled_tokens[name] < len(known.tokens):
            return []
        token = int.from_bytes(digest(known.tokens)[:4], "little") % WORD
        known.tokens.append(token)
        return [token]

    # ---- questions ----

    def wrong_reads(self, *, is_last_only: bool = False) -> list[tuple[str, int, str, int]]:
        """Request, layer, side and block of every read since the last call that was wrong.

        With `is_last_only` the last read of each counts: vLLM repeats a step whose loads failed.
        """
        torch.accelerator.synchronize()
        reads, self._reads = self._reads, []
        assert reads, "attention read something"
        told = [((read.request, read.layer, read.side, read.block), read) for read in reads]
        if is_last_only:
            told = list(dict(told).items())
        return [
            place
            for place, read in told
            if not torch.equal(read.expected.view(torch.int16), read.found.view(torch.int16))
        ]

    def close(self) -> None:
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown

        torch.accelerator.synchronize()
        ensure_kv_transfer_shutdown()
        if self.scheduler is not None:
            self.scheduler.shutdown()
