"""The two halves of the connector without an engine: real client, daemon, pool and copy engine.

Requests and scheduler outputs are plain stand-ins for vLLM's objects; what vLLM really sends is
covered by the tests beside this one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from tests.processes import Node, wait_for
from tests.vllm.gates import GatedEngine
from tierkv.config import EngineConfig, TierConfig
from tierkv.connectors.vllm import compat
from tierkv.connectors.vllm.adapters import AdapterDigests
from tierkv.connectors.vllm.identity import geometry_by_rank, namespace_of
from tierkv.connectors.vllm.meta import (
    NO_GENERATION,
    LoadPlan,
    StepPlan,
    WorkerGeometry,
    WorkerReport,
)
from tierkv.connectors.vllm.requests import Roles, Sizes
from tierkv.connectors.vllm.scheduler import SchedulerHalf
from tierkv.connectors.vllm.worker import WorkerHalf
from tierkv.device.base import Direction
from tierkv.device.cpu import create_cpu_engine
from tierkv.device.layout import Pages
from tierkv.errors import LayoutMismatchError
from tierkv.pool import pool_path
from tierkv.service import wire
from tierkv.service.client import Attachment, Client
from tierkv.types import slot_bytes_of

pytestmark = pytest.mark.vllm

LAYERS, BLOCKS, PAGE = 3, 16, 4096
RANKS = 2
SPACE = b"V" * 32


@dataclass
class Request:
    """What the scheduler half reads of a vLLM request."""

    request_id: str
    num_tokens: int
    block_hashes: list[bytes]
    lora_request: object = None
    num_prompt_tokens: int = 0
    num_preemptions: int = 0

    def __post_init__(self):
        self.num_prompt_tokens = self.num_tokens


@dataclass
class Output:
    """What the scheduler half reads of a vLLM scheduler output."""

    num_scheduled_tokens: dict = field(default_factory=dict)
    scheduled_new_reqs: list = field(default_factory=list)
    preempted_req_ids: set = field(default_factory=set)
    scheduled_cached_reqs: object = field(
        default_factory=lambda: SimpleNamespace(
            req_ids=[], num_computed_tokens=[], new_block_ids=[], resumed_req_ids=set()
        )
    )


def new_step(name: str, block_ids: list[int], computed: int, tokens: int) -> Output:
    new = SimpleNamespace(req_id=name, block_ids=(block_ids,), num_computed_tokens=computed)
    return Output({name: tokens}, [new])


def request_of(name: str, blocks: int) -> Request:
    hashes = [bytes([at]) * 32 for at in range(blocks)]
    return Request(name, blocks * 16, hashes)


class Engine:
    """A scheduler half and the workers of two ranks over one daemon.

    Args:
        engine_blocks: engine blocks of 16 tokens per TierKV block.
    """

    def __init__(
        self,
        node: Node,
        name: str,
        engine_blocks: int = 1,
        fences_early: bool = False,
        hookless: tuple[str, ...] = (),
        **config,
    ) -> None:
        settings = {"swap_in_threshold": 0, "request_deadline": "5s", **config}
        self.client = Client(node.socket, name, deadline_s=5.0)
        sizes = Sizes(engine_block=16, block=16 * engine_blocks, ranks=RANKS)
        self.scheduler = SchedulerHalf(
            self.client, EngineConfig(**settings), sizes, Roles(True, True)
        )
        self.tensors, self.workers, self.gates = [], [], []
        for rank in range(RANKS):
            store = torch.zeros(LAYERS, BLOCKS, PAGE, dtype=torch.uint8)
            self.tensors.append(store)
            worker = WorkerHalf(
                name,
                pool_path(node.config.dram.directory, node.socket),
                node.run_directory,
                make_copies=self.make_copies,
                is_layerwise_store=False,
                rank=rank,
                fences_early=fences_early,
            )
            caches = {f"l{at}": store[at].view(BLOCKS, 1, PAGE) for at in range(LAYERS)}
            worker.register(caches, BLOCKS, hookless=hookless)
            worker.set_engine_blocks(engine_blocks)
            self.workers.append(worker)
        part = LAYERS * PAGE * engine_blocks
        attachment = Attachment(SPACE, slot_bytes_of(RANKS * part), "test", False)
        assert self.scheduler.attach(attachment, (0, part), 20.0)

    def make_copies(self, device):
        self.gates.append(GatedEngine(create_cpu_engine()))
        return self.gates[-1]

    def run(self, plan: StepPlan, ranks=range(RANKS)) -> list[WorkerReport]:
        """One step on some ranks, copies ended."""
        reports = []
        for rank in ranks:
            worker = self.workers[rank]
            worker.fence(plan)
            worker.begin_step(plan)
            worker.start_loads()
            for layer in range(LAYERS):
                worker.wait_for_layer(f"l{layer}")
            worker.end_forward()
            reports.append(self.report_of(worker))
        return reports

    @staticmethod
    def report_of(worker: WorkerHalf) -> WorkerReport:
        found = []

        def look() -> bool:
            worker.take_loaded()
            report = worker.take_report()
            has_ended = report is not None and (report.stored or report.loaded)
            found.extend([report] if has_ended else [])
            return bool(found)

        wait_for(look, what="a copy to end")
        return found[0]

    def fill(self, block: int, value: int) -> None:
        for rank, store in enumerate(self.tensors):
            for layer in range(LAYERS):
                store[layer, block] = (value + 40 * rank + 10 * layer) % 251

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, slots=32)
    node.start_daemon()
    yield node
    node.close()


@pytest.fixture
def tiered(tmp_path):
    """A node with a tier in memory that gets every block at once."""
    tier = TierConfig(type="memory", capacity=1 << 20, deadline=60)
    node = Node(tmp_path, slots=64, tiers=(tier,), write_policy="write_through")
    dram = node.config.dram.model_copy(update={"promote_share_max": 1.0})
    node.config = node.config.model_copy(update={"dram": dram})
    node.start_daemon()
    yield node
    node.close()


@pytest.fixture
def make(node):
    engines = []

    def build(name="e", **config):
        engines.append(Engine(node, name, **config))
        return engines[-1]

    yield build
    for engine in engines:
        engine.close()


def store(
    engine: Engine, name: str, block_ids: list[int], request: Request | None = None
) -> StepPlan:
    request = request or request_of(name, len(block_ids))
    engine.scheduler.new_request(request)
    assert engine.scheduler.matched_tokens(request, 0) == (0, False)
    engine.scheduler.allocated(request, block_ids, 0)
    return engine.scheduler.plan_step(new_step(name, block_ids, 0, 16 * len(block_ids)))


def warm_up(engine: Engine) -> None:
    """Wait until the workers have mapped the pool in the background."""
    welcome = engine.client.welcome
    for worker in engine.workers:
        wait_for(lambda w=worker: w.is_mapped(welcome.pool, welcome.generation), what="the map")


def found_by(node: Node, blocks: int) -> int:
    keys = [bytes([at]) * 32 + b"\0" for at in range(blocks)]
    client = Client(node.socket, uuid.uuid4().hex, deadline_s=5)
    try:
        client.attach(Attachment(SPACE, slot_bytes_of(RANKS * LAYERS * PAGE), "test", False))
        assert client.wait_attached(SPACE, 10)
        answer = client.lookup(SPACE, keys)
        client.release([answer.lease] if answer.lease else [])
        return len(answer.offsets)
    finally:
        client.close()


def test_a_block_is_readable_only_when_every_rank_has_stored_it(make, node):
    engine = make()
    warm_up(engine)
    plan = store(engine, "r", [3, 4])
    (first,) = engine.run(plan, [0])
    engine.scheduler.take_report(first)
    assert engine.scheduler.has_copies
    assert found_by(node, 2) == 0, "one rank's bytes are missing"
    (second,) = engine.run(plan, [1])
    engine.scheduler.take_report(second)
    assert not engine.scheduler.has_copies
    wait_for(lambda: node.stats()["counters"]["blocks_stored"] == 2, engine.client)
    assert found_by(node, 2) == 2


def test_reports_of_one_step_are_added_up(make, node):
    engine = make()
    warm_up(engine)
    plan = store(engine, "r", [3, 4])
    first, second = engine.run(plan)
    engine.scheduler.take_report(first.aggregate(second))
    wait_for(lambda: node.stats()["counters"]["blocks_stored"] == 2, engine.client)


def test_a_block_that_one_rank_failed_to_store_is_not_published(make, node):
    engine = make()
    warm_up(engine)
    plan = store(engine, "r", [3, 4])
    first, second = engine.run(plan)
    lease = plan.store.lease
    second.stored[lease] = (1, [True, False])
    engine.scheduler.take_report(first.aggregate(second))
    wait_for(lambda: node.stats()["leases"] == 0, engine.client)
    assert node.stats()["counters"]["blocks_stored"] == 1


def test_every_byte_of_every_rank_and_layer_comes_back(make, node):
    engine = make()
    warm_up(engine)
    blocks = [5, 2, 9]
    for at, block in enumerate(blocks):
        engine.fill(block, at + 1)
    before = [t.clone() for t in engine.tensors]
    first, second = engine.run(store(engine, "r", blocks))
    engine.scheduler.take_report(first.aggregate(second))
    engine.scheduler.request_finished(request_of("r", 3))

    other = make("f")
    warm_up(other)
    request = request_of("s", 3)
    other.scheduler.new_request(request)
    assert other.scheduler.matched_tokens(request, 0) == (48, True)
    other.scheduler.allocated(request, [1, 7, 8], 48)
    plan = other.scheduler.plan_step(Output())
    reports = other.run(plan)
    for rank in range(RANKS):
        for source, target in zip(blocks, [1, 7, 8], strict=True):
            assert torch.equal(before[rank][:, source], other.tensors[rank][:, target])
    assert sum(int(t.sum()) for t in other.tensors) > 0
    other.scheduler.take_report(reports[0].aggregate(reports[1]))
    wait_for(lambda: node.held() == (0, 0), other.client)


def test_a_load_waits_for_the_report_of_every_rank_before_its_lease_ends(make, node):
    engine = make()
    warm_up(engine)
    first, second = engine.run(store(engine, "r", [1]))
    engine.scheduler.take_report(first.aggregate(second))
    request = request_of("s", 1)
    engine.scheduler.new_request(request)
    assert engine.scheduler.matched_tokens(request, 0) == (16, True)
    engine.scheduler.allocated(request, [6], 16)
    reports = engine.run(engine.scheduler.plan_step(Output()))
    engine.scheduler.request_finished(request)  # an abort: the copies go on
    engine.scheduler.take_report(reports[0])
    assert node.held() == (1, 1)
    engine.scheduler.take_report(reports[1])
    wait_for(lambda: node.held() == (0, 0), engine.client)


def test_a_step_that_uses_a_block_again_names_the_stores_that_read_it(make):
    engine = make()
    warm_up(engine)
    request = request_of("r", 2)
    plan = store(engine, "r", [3, 4], request)
    other = request_of("s", 2)
    other.block_hashes = [b"x" * 32, b"y" * 32]
    engine.scheduler.new_request(other)
    engine.scheduler.matched_tokens(other, 0)
    engine.scheduler.allocated(other, [8, 4], 0)
    again = engine.scheduler.plan_step(new_step("s", [8, 4], 0, 32))
    assert again.fences == (plan.store.lease,)
    untouched = engine.scheduler.plan_step(Output())
    assert untouched.fences == ()
    request.num_preemptions = 1
    preempted = engine.scheduler.plan_step(Output(preempted_req_ids={"r"}))
    assert plan.store.lease in preempted.fences
    for step in (plan, again):
        for report in engine.run(step):
            engine.scheduler.take_report(report)
    assert engine.scheduler.plan_step(Output(preempted_req_ids={"r"})).fences == ()


def test_asking_again_costs_no_message_and_gives_the_same_answer(make, node):
    engine = make()
    warm_up(engine)
    first, second = engine.run(store(engine, "r", [1]))
    engine.scheduler.take_report(first.aggregate(second))
    request = request_of("s", 1)
    engine.scheduler.new_request(request)
    before = node.stats()["counters"]["lookups"]
    answers = {engine.scheduler.matched_tokens(request, 0) for _ in range(170)}
    assert answers == {(16, True)}
    assert node.stats()["counters"]["lookups"] - before <= 1
    engine.scheduler.request_finished(request)  # aborted while it waits for admission
    wait_for(lambda: node.held() == (0, 0), engine.client)


def test_a_block_that_another_engine_is_writing_is_asked_for_again_once(make):
    writer, reader = make("w"), make("r")
    warm_up(writer)
    plan = store(writer, "r", [1])
    request = request_of("s", 1)
    reader.scheduler.new_request(request)
    assert reader.scheduler.matched_tokens(request, 0) == (None, False)
    first, second = writer.run(plan)
    writer.scheduler.take_report(first.aggregate(second))
    writer.client.ask(wire.Ping, 5)
    reader.client.ask(wire.Ping, 5)
    assert reader.scheduler.matched_tokens(request, 0) == (16, True)
    reader.scheduler.request_finished(request)


def test_at_most_so_many_loads_are_parked(make):
    engine = make(parked_loads_max=1)
    warm_up(engine)
    first, second = engine.run(store(engine, "r", [1]))
    engine.scheduler.take_report(first.aggregate(second))
    one, two = request_of("s", 1), request_of("t", 1)
    for request in (one, two):
        engine.scheduler.new_request(request)
    assert engine.scheduler.matched_tokens(one, 0) == (16, True)
    engine.scheduler.allocated(one, [6], 16)
    assert engine.scheduler.matched_tokens(two, 0) == (None, False)
    for report in engine.run(engine.scheduler.plan_step(Output())):
        engine.scheduler.take_report(report)
    assert engine.scheduler.matched_tokens(two, 0) == (16, True)


def test_unknown_requests_are_ignored(make):
    engine = make()
    ghost = request_of("ghost", 2)
    assert engine.scheduler.matched_tokens(ghost, 0) == (0, False)
    engine.scheduler.allocated(ghost, [1, 2], 0)
    engine.scheduler.request_finished(ghost)
    plan = engine.scheduler.plan_step(new_step("ghost", [1, 2], 0, 32))
    assert plan.store is None


# ---- geometry and namespace ---------------------------------------------------------------------


def geometry(page: int) -> WorkerGeometry:
    return WorkerGeometry(("l0",), (page,), ("form",))


def test_unequal_ranks_are_refused_with_both_values():
    with pytest.raises(LayoutMismatchError, match=r"rank 1 .*\(64,\).*\(128,\)"):
        geometry_by_rank({(0, 0): geometry(128), (0, 1): geometry(64)}, 2)


def test_a_missing_rank_is_refused():
    with pytest.raises(LayoutMismatchError, match="1 of 2 ranks"):
        geometry_by_rank({(0, 0): geometry(128)}, 2)


def test_stages_of_a_pipeline_may_differ():
    found = geometry_by_rank({(1, 0): geometry(64), (0, 0): geometry(128)}, 2)
    assert [g.page_bytes for g in found] == [(128,), (64,)]


def test_every_ingredient_changes_the_namespace():
    facts = {"dtype": "bf16", "block_tokens": 128}
    same = namespace_of(dict(reversed(list(facts.items()))), None)
    assert namespace_of(facts, None) == same
    assert namespace_of({**facts, "dtype": "fp16"}, None) != same
    assert namespace_of(facts, "epoch") != same


def test_a_request_preempted_and_resumed_in_one_step_keeps_its_new_blocks(make, node):
    """vLLM preempts outside of a step too; its blocks then arrive in the step that names it."""
    engine = make()
    warm_up(engine)
    request = request_of("r", 3)
    for report in engine.run(store(engine, "r", [3, 4], request)):
        engine.scheduler.take_report(report)
    node.admin.ask(lambda seq: wire.Purge(seq, ""), 5)
    request.num_preemptions = 1
    engine.scheduler.matched_tokens(request, 0)
    engine.scheduler.allocated(request, [7, 8, 9], 0)
    for at, block in enumerate([7, 8, 9]):
        engine.fill(block, at + 1)
    step = new_step("r", [7, 8, 9], 0, 48)
    step.preempted_req_ids = {"r"}
    plan = engine.scheduler.plan_step(step)
    assert plan.store.pages.device_blocks == (7, 8, 9)


def test_a_promise_is_not_kept_beyond_its_admission(make):
    """A request preempted outside of a step is asked about again before the next plan."""
    engine = make()
    warm_up(engine)
    first, second = engine.run(store(engine, "r", [1]))
    engine.scheduler.take_report(first.aggregate(second))
    request = request_of("s", 1)
    engine.scheduler.new_request(request)
    assert engine.scheduler.matched_tokens(request, 0) == (16, True)
    engine.scheduler.allocated(request, [6], 16)
    for report in engine.run(engine.scheduler.plan_step(Output())):
        engine.scheduler.take_report(report)
    request.num_preemptions = 1
    assert engine.scheduler.matched_tokens(request, 0) == (16, True), "looked up anew"
    engine.scheduler.allocated(request, [7], 16)
    (load,) = engine.scheduler.plan_step(Output()).loads
    assert load.pages.device_blocks == (7,)


def test_a_load_whose_answer_is_gone_fails_instead_of_raising(make):
    engine = make()
    request = request_of("s", 1)
    engine.scheduler.new_request(request)
    engine.scheduler.allocated(request, [6], 16)
    plan = engine.scheduler.plan_step(Output())
    for worker in engine.workers:
        worker.begin_step(plan)
        worker.start_loads()
        assert worker.take_loaded() == {"s"}
        assert worker.take_bad_blocks() == {6}


def test_a_failed_load_taints_the_stores_of_its_own_rank(make):
    """One rank's old failure must not hide another rank's first one."""
    engine = make(load_mode="layerwise")
    warm_up(engine)
    plan = store(engine, "r", [3])
    bad = LoadPlan(1, NO_GENERATION, "x", Pages((5,), (0,), (0,)), False)
    plan.loads.append(bad)
    plan.failures_seen = {0: 1}
    worker = engine.workers[1]
    worker.begin_step(plan)
    worker.start_loads()
    worker.end_forward()
    report = engine.report_of(worker)
    while plan.store.lease not in report.stored:
        report = report.aggregate(engine.report_of(worker))
    assert report.stored[plan.store.lease] == (1, [False])


def test_a_store_is_not_reported_before_the_step_has_ended(make):
    """With a draft model vLLM asks for reports before the last layers are submitted."""
    engine = make()
    warm_up(engine)
    plan = store(engine, "r", [3])
    worker = engine.workers[0]
    worker.begin_step(plan)
    worker.start_loads()
    early = worker.take_report()
    assert early is None or not early.stored
    worker.end_forward()
    assert plan.store.lease in engine.report_of(worker).stored


@pytest.mark.parametrize("fences_early", [False, True])
def test_compute_waits_for_stores_where_blocks_are_written_before_the_fence(make, fences_early):
    """Model Runner V2 zeroes new blocks before it calls `handle_preemptions`."""
    engine = make(fences_early=fences_early)
    warm_up(engine)
    plan = store(engine, "r", [3])
    gate = engine.gates[0]
    before = gate.waits[Direction.STORE]
    engine.workers[0].begin_step(plan)
    engine.workers[0].end_forward()
    assert (gate.waits[Direction.STORE] > before) == fences_early
    assert plan.store.lease in engine.report_of(engine.workers[0]).stored


@pytest.mark.parametrize(("hookless", "waits"), [((), 0), (("l1",), 1), (("l2", "l1"), 2)])
def test_loads_of_layers_without_hooks_are_waited_for_before_the_forward(make, hookless, waits):
    """The index of sparse attention is read without anybody asking for its load."""
    engine = make(hookless=hookless)
    warm_up(engine)
    welcome, worker, gate = engine.client.welcome, engine.workers[0], engine.gates[0]
    load = LoadPlan(1, welcome.generation, "r", Pages((3,), (0,), (0,)), is_async=False)
    worker.begin_step(StepPlan(welcome.pool, welcome.generation, (0, 0), [load]))
    worker.start_loads()
    assert gate.waits[Direction.LOAD] == waits
    worker.wait_for_layer("l0")
    assert gate.waits[Direction.LOAD] == waits + 1
    worker.end_forward()
    assert worker.take_report().loaded == {1: (1, True)}


def test_layers_around_which_vllm_calls_no_hook_are_known_by_their_forward():
    class Attention:
        def forward(self):
            raise NotImplementedError

    class OfAPlugIn(Attention):
        pass

    class OfAModel(Attention):
        def forward(self):
            raise NotImplementedError

    class MLAAttention:
        def __init__(self, is_direct: bool) -> None:
            self.use_direct_call = is_direct

        def forward(self):
            raise NotImplementedError

    layers = {"a": Attention(), "b": OfAPlugIn(), "own": OfAModel(), "index": object()}
    layers |= {"mla": MLAAttention(False), "direct": MLAAttention(True)}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    names = [*layers, "unknown"]
    assert compat.hookless_layers(config, names) == {"own", "index", "direct", "unknown"}


def test_tails_behind_a_shared_prefix_are_stored_in_the_same_step(make):
    engine = make()
    one, two = request_of("r", 2), request_of("s", 2)
    two.block_hashes = [one.block_hashes[0], b"z" * 32]
    for request in (one, two):
        engine.scheduler.new_request(request)
        engine.scheduler.matched_tokens(request, 0)
    engine.scheduler.allocated(one, [1, 2], 0)
    engine.scheduler.allocated(two, [1, 3], 0)
    step = new_step("r", [1, 2], 0, 32)
    step.scheduled_new_reqs += new_step("s", [1, 3], 16, 16).scheduled_new_reqs
    step.num_scheduled_tokens["s"] = 16
    plan = engine.scheduler.plan_step(step)
    assert plan.store.pages.device_blocks == (1, 2, 3)


def test_kv_of_before_a_reset_is_not_stored_in_the_namespace_of_after(make):
    """Also while its load is in flight, when vLLM has not yet reported any block of it."""
    engine = make()
    warm_up(engine)
    first, second = engine.run(store(engine, "r", [1, 2]))
    engine.scheduler.take_report(first.aggregate(second))
    request = request_of("s", 2)
    engine.scheduler.new_request(request)
    assert engine.scheduler.matched_tokens(request, 0) == (32, True)
    engine.scheduler.allocated(request, [6, 7], 32)
    fresh = Attachment(b"W" * 32, slot_bytes_of(RANKS * LAYERS * PAGE), "test", True)
    assert engine.scheduler.attach(fresh, (0, LAYERS * PAGE), 20.0)
    for report in engine.run(engine.scheduler.plan_step(Output())):
        engine.scheduler.take_report(report)
    engine.scheduler.allocated(request, [6, 7], 0)
    assert engine.scheduler.plan_step(new_step("s", [6, 7], 31, 1)).store is None
    request.num_preemptions = 1  # computed anew, it may be stored
    engine.scheduler.matched_tokens(request, 0)
    engine.scheduler.allocated(request, [6, 7], 0)
    assert engine.scheduler.plan_step(new_step("s", [6, 7], 0, 32)).store is not None


def test_one_step_asks_for_a_bounded_number_of_blocks(make, monkeypatch):
    monkeypatch.setattr("tierkv.connectors.vllm.scheduler.RESERVE_KEYS_MAX", 3)
    engine = make()
    plan = store(engine, "r", [1, 2, 3, 4, 5])
    assert plan.store.blocks == 3
    cached = SimpleNamespace(
        req_ids=["r"], num_computed_tokens=[80], new_block_ids=[None], resumed_req_ids=set()
    )
    rest = engine.scheduler.plan_step(Output({"r": 1}, [], set(), cached))
    assert rest.store.blocks == 2


def adapter(tmp_path, content: bytes):
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "adapter_model.bin").write_bytes(content)
    return SimpleNamespace(lora_int_id=1, lora_path=str(tmp_path), load_inplace=False)


def test_an_adapters_files_decide_and_a_silent_change_is_not_cached(tmp_path):
    digests = AdapterDigests()
    lora = adapter(tmp_path / "a", b"one")
    first = digests.digest_of(lora)
    assert digests.digest_of(lora) == first is not None
    adapter(tmp_path / "a", b"another")
    assert digests.digest_of(lora) is None, "nobody knows which files the engine has loaded"
    lora.load_inplace = True
    assert digests.digest_of(lora) not in (None, first)
    gone = SimpleNamespace(lora_int_id=2, lora_path=str(tmp_path / "gone"))
    assert digests.digest_of(gone) is None


# ---- after a reset -----------------------------------------------------------------------------


def admitted(engine: Engine, request: Request, block_ids: list[int], local_tokens: int) -> StepPlan:
    """The first step of a request of which nothing is stored and the device has this much."""
    engine.scheduler.new_request(request)
    assert engine.scheduler.matched_tokens(request, local_tokens) == (0, False)
    engine.scheduler.allocated(request, block_ids, 0)
    rest = request.num_tokens - local_tokens
    return engine.scheduler.plan_step(new_step(request.request_id, block_ids, local_tokens, rest))


def reset(engine: Engine, engine_blocks: int = 1) -> None:
    """As the connector does it: another namespace, whatever became of the device's cache."""
    part = LAYERS * PAGE * engine_blocks
    fresh = Attachment(b"W" * 32, slot_bytes_of(RANKS * part), "test", True)
    assert engine.scheduler.attach(fresh, (0, part), 20.0)


def branch_of(request: Request, first: int) -> Request:
    """The same request, but for the blocks from this one on."""
    count = len(request.block_hashes)
    request.block_hashes[first:] = [bytes([200 + at]) * 32 for at in range(first, count)]
    return request


def test_a_device_hit_is_stored_before_a_reset_and_not_after_it(make):
    """The device may still have, from before the reset, what a new request hits there."""
    engine = make()
    warm_up(engine)
    before = admitted(engine, request_of("before", 4), [1, 2, 3, 4], 32)
    assert before.store.pages.device_blocks == (1, 2, 3, 4)
    for report in engine.run(before):  # the pool's only extent goes from layout to layout
        engine.scheduler.take_report(report)
    reset(engine)
    whole = admitted(engine, branch_of(request_of("whole", 1), 0), [5], 0)
    assert whole.store.pages.device_blocks == (5,), "all of it was computed after"
    orphan = admitted(engine, request_of("orphan", 4), [1, 2, 3, 4], 32)
    assert orphan.store is None, "the rest is unreachable without its head"
    again = admitted(engine, request_of("again", 4), [5, 6, 7, 8], 0)
    assert again.store.pages.device_blocks == (5, 6, 7, 8)
    tail = admitted(engine, branch_of(request_of("tail", 4), 2), [1, 2, 9, 10], 32)
    assert tail.store.pages.device_blocks == (9, 10)


def test_after_a_reset_a_block_that_the_device_has_in_part_is_not_stored(make):
    engine = make(engine_blocks=2)
    reset(engine, 2)
    whole = admitted(engine, branch_of(request_of("whole", 4), 0), [5, 6, 7, 8], 0)
    assert whole.store.pages.device_blocks == (5, 6, 7, 8)
    part = admitted(engine, request_of("part", 4), [1, 2, 3, 4], 16)
    assert part.store is None, "the first half of its head may be of before the reset"
    again = admitted(engine, request_of("again", 4), [5, 6, 7, 8], 0)
    assert again.store.pages.device_blocks == (5, 6, 7, 8)


# ---- blocks that come from a tier --------------------------------------------------------------


@contextlib.contextmanager
def engine_on(node: Node, name: str = "e", **config):
    engine = Engine(node, name, **config)
    try:
        yield engine
    finally:
        engine.close()


def fill_tier(node: Node, pages: int, pages_in_dram: int, engine_blocks: int = 1) -> None:
    """Blocks of which the tier has all, and DRAM only the leading ones."""
    with engine_on(node, "filler", engine_blocks=engine_blocks, promote_wait_max="20s") as engine:
        warm_up(engine)
        wait_for(lambda: node.stats()["tiers"][0]["is_scanned"], engine.client, what="the tier")
        plan = store(engine, "first", list(range(1, pages + 1)))
        for report in engine.run(plan):
            engine.scheduler.take_report(report)

        def is_written() -> bool:
            (tier,) = node.stats()["tiers"]
            return tier["blocks_known"] == plan.store.blocks and not tier["jobs"]

        wait_for(is_written, engine.client, what="the tier to have everything")
        node.admin.ask(lambda seq: wire.Purge(seq, "", ["dram"]), 5)
        head = request_of("head", pages_in_dram)
        engine.scheduler.new_request(head)
        assert told_in_the_end(engine, head) == (pages_in_dram * 16, True)


def told_in_the_end(engine: Engine, request: Request, local_tokens: int = 0) -> tuple[int, bool]:
    """What the scheduler is told when it need not ask again."""
    told = []

    def is_told() -> bool:
        told.append(engine.scheduler.matched_tokens(request, local_tokens))
        return told[-1][0] is not None

    wait_for(is_told, engine.client, what="an answer")
    return told[-1]


@contextlib.contextmanager
def standing_still(node: Node):
    """The tier's process does nothing inside this block."""
    (lock,) = (node.run_directory / "mappers").glob("io-memory.*")
    pid = int(lock.name.split(".")[1])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_request_waits_for_a_tier_so_long_and_then_takes_what_is_there(tiered):
    wait_s = 0.4
    fill_tier(tiered, 3, 2)
    with engine_on(tiered, promote_wait_max=wait_s, fill_wait_max="20s") as engine:
        request = request_of("s", 3)
        with standing_still(tiered):
            engine.scheduler.new_request(request)
            begin = time.monotonic()
            assert engine.scheduler.matched_tokens(request, 0) == (None, False)
            assert told_in_the_end(engine, request) == (32, True)
            assert time.monotonic() - begin >= wait_s
            assert engine.scheduler.matched_tokens(request, 0) == (32, True), "it is decided"
        engine.scheduler.allocated(request, [5, 6], 32)
        (load,) = engine.scheduler.plan_step(Output()).loads
        assert load.pages.device_blocks == (5, 6)


def test_a_request_that_waits_takes_what_a_tier_brings_in_time(tiered):
    fill_tier(tiered, 3, 2)
    with engine_on(tiered, promote_wait_max="20s", fill_wait_max="0s") as engine:
        request = request_of("s", 3)
        with standing_still(tiered):
            engine.scheduler.new_request(request)
            asked = {engine.scheduler.matched_tokens(request, 0) for _ in range(50)}
            assert asked == {(None, False)}
        assert told_in_the_end(engine, request) == (48, True)


@pytest.mark.parametrize(
    ("config", "local_tokens", "told"),
    [
        ({"promote_wait_max": 0.0}, 0, (32, True)),
        ({"promote_wait_max": "20s", "swap_in_threshold": 40}, 16, (0, False)),
    ],
    ids=["no time", "below the threshold"],
)
def test_a_request_does_not_wait_for_a_tier(tiered, config, local_tokens, told):
    fill_tier(tiered, 3, 2)
    with engine_on(tiered, fill_wait_max="20s", **config) as engine:
        request = request_of("s", 3)
        with standing_still(tiered):
            engine.scheduler.new_request(request)
            assert engine.scheduler.matched_tokens(request, local_tokens) == told


@pytest.mark.parametrize(
    ("load", "prompt_tokens", "told", "tokens"),
    [
        ("async", 100, 80, {"device": 16, "dram": 16, "memory": 64, "computed": 4}),
        ("layerwise", 96, 64, {"device": 16, "dram": 16, "memory": 48, "computed": 16}),
    ],
)
def test_the_outcome_names_the_source_of_every_token(tiered, load, prompt_tokens, told, tokens):
    """Blocks of 32 tokens: the hit starts inside the first, and may end inside the last."""
    fill_tier(tiered, 6, 2, engine_blocks=2)
    with engine_on(tiered, engine_blocks=2, load_mode=load, promote_wait_max="20s") as engine:
        warm_up(engine)
        before = tiered.stats()["tokens_total"]
        request = Request("s", prompt_tokens, request_of("s", 6).block_hashes)
        engine.scheduler.new_request(request)
        assert told_in_the_end(engine, request, 16) == (told, load == "async")
        pages = [1, 2, 3, 4, 5, 6][: 1 + told // 16]
        engine.scheduler.allocated(request, pages, told)
        for report in engine.run(engine.scheduler.plan_step(Output())):
            engine.scheduler.take_report(report)
        engine.scheduler.request_finished(request)
        engine.client.ask(wire.Ping, 5)
        after = tiered.stats()["tokens_total"]
        assert after["requests"] - before["requests"] == 1
        said = {name: count - before["tokens"][name] for name, count in after["tokens"].items()}
        assert said == tokens
