"""The worker half: maps the pool, copies, and reports what ended.

It never talks to the daemon. Its thread is the model runner's; copies run in the copy engine.
Rule 1: a store is reported only when its copy has completed, never when it was issued.
Rule 2: in a layer-wise step `wait_for_layer_load(l)` waits for layer l of all loads of the step,
because other requests of the batch may share those blocks.
Rule 3: nothing computed after a failed load is stored before the scheduler has dealt with it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tierkv.connectors.vllm.kv_layout import PageSize, describe
from tierkv.connectors.vllm.meta import (
    LoadPlan,
    StepPlan,
    StorePlan,
    WorkerGeometry,
    WorkerReport,
)
from tierkv.device.base import CopyEngine, CopyEvent, Direction, PoolAdopter
from tierkv.device.facts import CopyFacts, facts_of
from tierkv.device.layout import KvLayout
from tierkv.errors import LayoutMismatchError
from tierkv.mapper import PoolMapper
from tierkv.pool import Pool
from tierkv.types import EngineId

if TYPE_CHECKING:
    import torch

    from tierkv.connectors.vllm.kv_layout import KvCache

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Load:
    plan: LoadPlan
    events: list[CopyEvent]
    by_run: dict[str, CopyEvent]


@dataclass(slots=True, eq=False)
class _Store:
    plan: StorePlan
    events: list[CopyEvent]
    is_submitted: bool = False
    is_tainted: bool = False


class WorkerHalf:
    """One rank of an engine.

    Args:
        make_copies: makes the copy engine of a device; called once, in `register`.
        fences_early: the model runner writes new blocks before it calls `fence`, so the compute
            waits for a step's stores at the end of that step.
    """

    def __init__(
        self,
        engine: EngineId,
        pool: Path,
        run_directory: Path,
        *,
        make_copies: Callable[[torch.device], CopyEngine],
        is_layerwise_store: bool,
        rank: int,
        fences_early: bool = False,
    ) -> None:
        self._engine = engine
        self._pool_path = pool
        self._run_directory = run_directory
        self._make_copies = make_copies
        self._is_layerwise_store = is_layerwise_store
        self._fences_early = fences_early
        self._rank = rank
        self._copies: CopyEngine | None = None
        self._mapper: PoolMapper | None = None
        self._layout: KvLayout | None = None
        self._by_layer: dict[str, tuple[str, ...]] = {}
        self._early: list[str] = []  # runs that the forward reads without asking
        self._told: CopyFacts | None = None
        self._plan = StepPlan()
        self._loads: list[_Load] = []  # asynchronous ones in flight
        self._step_loads: list[_Load] = []  # those that this step's forward needs
        self._step_store: _Store | None = None
        self._stored: set[str] = set()  # runs of this step
        self._stores: dict[int, _Store] = {}
        self._report = WorkerReport()
        self._bad_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._load_failures = 0
        self._has_computed = False

    # ---- start ---------------------------------------------------------------------------------

    def register(
        self,
        caches: Mapping[str, KvCache],
        blocks: int,
        pages: Mapping[str, PageSize] | None = None,
        hookless: Collection[str] = (),
    ) -> None:
        """Learn where the KV cache lies, make the copy engine, and start to map the pool.

        All device and pinned host memory that TierKV takes is allocated here.

        Args:
            caches, blocks, pages: see `describe`.
            hookless: layers for which `wait_for_layer` is never called.
        Raises:
            LayoutMismatchError: the layout or the device is not supported; names it.
        """
        described = describe(caches, blocks, pages)
        self._copies = self._make_copies(_device_of(caches))
        self._layout = KvLayout(described.runs, 1)
        self._by_layer = described.by_layer
        early = (run for name in caches if name in hookless for run in self._by_layer[name])
        self._early = list(dict.fromkeys(early))
        adopter = self._copies if isinstance(self._copies, PoolAdopter) else None
        self._mapper = PoolMapper(self._pool_path, self._run_directory, self._engine, adopter)

    def set_engine_blocks(self, engine_blocks: int) -> None:
        """Learn how many engine blocks make a TierKV block."""
        assert self._layout is not None, "tensors are registered first"
        self._layout = KvLayout(self._layout.layers, engine_blocks)

    def geometry(self) -> WorkerGeometry | None:
        """What this rank's tensors look like; None before `register`."""
        if self._layout is None:
            return None
        layers = self._layout.layers
        return WorkerGeometry(
            tuple(layer.name for layer in layers),
            tuple(layer.page_bytes for layer in layers),
            tuple(layer.form for layer in layers),
        )

    def is_mapped(self, pool: str, generation: int) -> bool:
        """Whether copies have a chance now; mapping goes on in the background."""
        return self._mapper is not None and self._mapper.get(pool, generation) is not None

    # ---- one step ------------------------------------------------------------------------------

    def fence(self, plan: StepPlan) -> None:
        """Before any block of the step is written: wait for the stores that still read one."""
        for lease in plan.fences:
            store = self._stores.get(lease)
            if store is not None:
                for event in store.events:
                    event.wait()

    def begin_step(self, plan: StepPlan) -> None:
        """Take the work of a step."""
        self._plan = plan
        self._step_store = None
        self._stored = set()
        self._has_computed = False

    def start_loads(self) -> None:
        """Submit the loads of the step."""
        self._count_copies(len(self._plan.loads))
        for plan in self._plan.loads:
            load = self._submit_load(plan)
            if load is None:
                self._fail_load(plan)
            elif plan.is_async:
                self._loads.append(load)
            else:
                self._step_loads.append(load)
                for run in self._early:
                    load.by_run[run].wait()

    def wait_for_layer(self, name: str) -> None:
        """Before a layer's attention: its blocks of all loads of the step are there."""
        for load in self._step_loads:
            for run in self._by_layer.get(name, ()):
                event = load.by_run.get(run)
                if event is not None:
                    event.wait()

    def layer_computed(self, name: str) -> None:
        """After a layer's attention: store that layer now, in layer-wise mode."""
        self._has_computed = True
        if self._is_layerwise_store and self._plan.store is not None:
            runs = [run for run in self._by_layer.get(name, ()) if run not in self._stored]
            if runs:
                self._store_runs(runs)

    def end_forward(self) -> None:
        """After the forward: everything of the step that is not submitted yet is submitted."""
        self._finish_step_loads()
        if self._plan.store is not None and self._layout is not None:
            rest = [run for run in self._layout.names if run not in self._stored]
            if rest:
                self._store_runs(rest)
        store = self._step_store
        if store is not None:
            seen = self._plan.failures_seen.get(self._rank, 0)
            store.is_tainted = self._load_failures > seen
            store.is_submitted = True
            if self._fences_early:
                for event in store.events:
                    event.wait()

    def take_loaded(self) -> set[str]:
        """Requests whose asynchronous load ended since the last call, well or not."""
        self._finish_step_loads()
        if self._copies is not None and not self._has_computed and (self._loads or self._stores):
            self._copies.give_way()
        ended = [load for load in self._loads if all(e.is_done() for e in load.events)]
        for load in ended:
            self._loads.remove(load)
            self._note_load(load.plan, all(e.is_ok for e in load.events))
        return {load.plan.request for load in ended} | self._take_failed_requests()

    def take_bad_blocks(self) -> set[int]:
        """Device blocks whose load failed since the last call."""
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_report(self) -> WorkerReport | None:
        """What ended since the last call, for the scheduler half."""
        for lease, store in list(self._stores.items()):
            # With a draft model vLLM asks before the step's last layers are submitted.
            if store.is_submitted and all(event.is_done() for event in store.events):
                del self._stores[lease]
                is_ok = not store.is_tainted and all(event.is_ok for event in store.events)
                self._report.stored[lease] = (1, [is_ok] * store.plan.blocks)
        self._count_copies(0)
        self._report.load_failures = {self._rank: self._load_failures}
        if self._copies is not None and (facts := facts_of(self._copies)) != self._told:
            self._told = facts
            self._report.devices = {self._rank: facts}
        report, self._report = self._report, WorkerReport()
        return report if report.stored or report.loaded or report.devices else None

    def close(self) -> None:
        """Let copies end, then give up the mapping."""
        if self._copies is not None:
            self._copies.close()
        if self._mapper is not None:
            self._mapper.close()

    # ---- steps ---------------------------------------------------------------------------------

    def _count_copies(self, about_to_start: int) -> None:
        """Tell in the lock file what is in flight, before the pool's generation is looked at."""
        in_flight = len(self._loads) + len(self._step_loads) + len(self._stores)
        if self._mapper is not None:
            self._mapper.note_copies(in_flight + about_to_start)

    def _pool_for(self, generation: int) -> Pool | None:
        if self._mapper is None or generation != self._plan.generation:
            return None
        return self._mapper.get(self._plan.pool, generation)

    def _submit_load(self, plan: LoadPlan) -> _Load | None:
        pool = self._pool_for(plan.generation)
        if pool is None:
            return None
        assert self._layout is not None, "a pool is only looked for with a layout"
        assert self._copies is not None, "made together with the layout"
        offset = self._plan.rank_offsets[self._rank]
        names = self._layout.names
        if not plan.is_async and self._early:
            names = [*self._early, *(name for name in names if name not in self._early)]
        groups = [names] if plan.is_async else [[name] for name in names]
        events = []
        for group in groups:
            copies = self._layout.descriptors(group, plan.pages, pool.address, offset)
            events.append(self._copies.submit(Direction.LOAD, copies))
        by_run = {} if plan.is_async else dict(zip(names, events, strict=True))
        return _Load(plan, events, by_run)

    def _store_runs(self, names: Sequence[str]) -> None:
        plan = self._plan.store
        assert plan is not None, "only called with a store to do"
        self._count_copies(1)
        if self._step_store is None:
            self._step_store = _Store(plan, [])
            self._stores[plan.lease] = self._step_store
        self._stored.update(names)
        pool = self._pool_for(plan.generation)
        if pool is None:
            self._step_store.events.append(_FailedCopy())
            return
        assert self._layout is not None, "a pool is only looked for with a layout"
        assert self._copies is not None, "made together with the layout"
        offset = self._plan.rank_offsets[self._rank]
        copies = self._layout.descriptors(list(names), plan.pages, pool.address, offset)
        self._step_store.events.append(self._copies.submit(Direction.STORE, copies))

    def _finish_step_loads(self) -> None:
        # vLLM takes failures of this step only now, so it is the host that waits.
        for load in self._step_loads:
            for event in load.events:
                event.finish()
            self._note_load(load.plan, all(e.is_ok for e in load.events))
        self._step_loads = []

    def _note_load(self, plan: LoadPlan, is_ok: bool) -> None:
        self._report.loaded[plan.lease] = (1, is_ok)
        if not is_ok:
            self._load_failures += 1
            self._bad_blocks.update(plan.pages.device_blocks)
            logger.warning("a load failed: blocks=%d; they are computed", len(plan.pages.slots))

    def _fail_load(self, plan: LoadPlan) -> None:
        self._note_load(plan, False)
        if plan.is_async:
            self._failed_requests.add(plan.request)

    def _take_failed_requests(self) -> set[str]:
        failed, self._failed_requests = self._failed_requests, set()
        return failed


def _device_of(caches: Mapping[str, KvCache]) -> torch.device:
    """The one device that all tensors lie on."""
    found = set()
    for cache in caches.values():
        for tensor in [cache] if hasattr(cache, "device") else cache:
            if tensor is not None:
                found.add(tensor.device)
    if len(found) != 1:
        names = ", ".join(sorted(str(device) for device in found)) or "no device"
        raise LayoutMismatchError(f"the KV cache lies on {names}; TierKV copies one device")
    return found.pop()


class _FailedCopy:
    """The event of a copy that was never issued."""

    is_ok = False

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def finish(self) -> None:
        return
