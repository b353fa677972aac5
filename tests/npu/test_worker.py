"""The vLLM connector over NPU memory: vLLM's scheduler and classes, a real daemon and pool.

The stand-in counts what the engine costs: device memory, registrations, waits of the main thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.npu.standin import Way
from tests.processes import WAIT_MAX_S, Node, wait_for
from tierkv.device.select import STAGING_BYTES
from tierkv.hashing import block_key
from tierkv.pool import attach_pool
from tierkv.service.connection import Link
from tierkv.types import FRAME_BYTES

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "build" / "models" / "gqa-0.2"
TOKENS, PROMPT_BLOCKS, LAYERS = 128, 3, 3
HIT = PROMPT_BLOCKS * TOKENS
SLOW_US = 5_000
MODES = [(store, load) for store in ("step", "layerwise") for load in ("async", "layerwise")]
RUNGS = {
    "batch": {},
    "single": {"batch_is_supported": 0},
    "staged": {"register_is_supported": 0},
}
each_mode = pytest.mark.parametrize(("store_mode", "load_mode"), MODES)
each_rung = pytest.mark.parametrize("rung", RUNGS)


def prompt(seed: int, blocks: int = PROMPT_BLOCKS) -> list[int]:
    """So many whole blocks and a part of one."""
    print(f"seed={seed}")
    dice = random.Random(seed)
    return [dice.randrange(1_000) for _ in range(blocks * TOKENS + 40)]


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, slots=256)
    node.daemon = node.start_daemon()
    yield node
    node.close()


@pytest.fixture
def prepare(node, standin, tmp_path_factory):
    """Engines of this process, one at a time: vLLM has one worker connector per process."""
    import torch

    from tests.npu import engine as engines

    made = []

    def build(**settings):
        config = engines.vllm_config(node.config, MODEL, settings)
        engines.start_groups(config, tmp_path_factory.mktemp("groups"))
        made.append(engines.Engine(config, torch.device("npu:0")))
        return made[-1]

    yield build
    for engine in made:
        engine.close()


@pytest.fixture
def make(prepare):
    def build(**settings):
        engine = prepare(**settings)
        engine.register()
        engine.start()
        return engine

    return build


def load_again(engine, tokens: list[int]) -> list:
    """Forget what the device has, and compute the prompt with what the pool has; wrong reads."""
    engine.forget_device()
    name = engine.generate(tokens)
    assert engine.cached[name] == len(tokens) // TOKENS * TOKENS, "nothing was loaded"
    return [(layer, side, block) for _, layer, side, block in engine.wrong_reads()]


# ---- bytes -------------------------------------------------------------------------------------


@each_rung
@each_mode
def test_what_is_stored_is_loaded_bit_exact(make, standin, store_mode, load_mode, rung):
    """Loads and compute are slow, so that who does not wait for them reads what was before."""
    standin.set(latency_to_device_us=SLOW_US, latency_on_device_us=SLOW_US // 5, **RUNGS[rung])
    engine = make(store_mode=store_mode, load_mode=load_mode)
    first = engine.generate(prompt(1))
    assert engine.cached[first] == 0
    assert engine.wrong_reads() == []
    assert load_again(engine, prompt(1)) == []
    assert set(engine.worker.copies.rungs) == {rung}


@each_mode
def test_a_damaged_byte_in_the_pool_shows(make, node, store_mode, load_mode):
    """The negative control: attention reads the byte in its layer and block, and nothing else."""
    engine = make(store_mode=store_mode, load_mode=load_mode)
    engine.generate(prompt(1))
    assert engine.wrong_reads() == []
    spaces = [bytes.fromhex(space["namespace"]) for space in node.stats()["namespaces"]]
    keys = [block_key(one) for one in engine.hashes(prompt(1))]
    client = engine.scheduler.connector.scheduler_half.client
    answer = client.lookup(spaces[0], keys, 5)
    pool = attach_pool(Path(client.welcome.pool))
    pool.bytes[int(answer.offsets[1]) + FRAME_BYTES + 5_000] ^= 1
    client.release([answer.lease])
    assert load_again(engine, prompt(1)) == [(0, "k", 1)]
    pool.close()


def test_a_block_that_is_used_again_waits_for_its_store(make, standin):
    """Its store is slow, and the next request writes at once."""
    standin.set(latency_to_host_us=SLOW_US // 10)
    engine = make()
    one, other = (prompt(seed, 15) for seed in (1, 2))
    engine.add(one)
    engine.step()
    engine.add(other)
    engine.settle()
    assert engine.wrong_reads() == []
    standin.set(latency_to_host_us=0)
    assert load_again(engine, one) == []
    assert load_again(engine, other) == []


@each_mode
def test_a_load_that_fails_on_the_device_is_computed_instead(make, standin, store_mode, load_mode):
    """The runtime tells it at a synchronisation of the stream only."""
    engine = make(store_mode=store_mode, load_mode=load_mode)
    engine.generate(prompt(1))
    engine.forget_device()
    engine.wrong_reads()
    standin.fail_copies(way=Way.TO_DEVICE)
    name = engine.generate(prompt(1))
    assert standin.counts().failed_copies == 1
    assert engine.cached[name] == (0 if load_mode == "async" else HIT), "told before, or in, a step"
    assert engine.wrong_reads(is_last_only=True) == []
    assert load_again(engine, prompt(1)) == [], "nothing wrong was stored"


# ---- costs -------------------------------------------------------------------------------------


def test_the_main_thread_never_waits_for_the_device_in_step_and_async_mode(make, standin):
    engine = make(store_mode="step", load_mode="async")
    engine.generate(prompt(1))
    engine.wrong_reads()
    engine.forget_device()
    before = standin.counts()
    loaded = engine.generate(prompt(1))
    engine.generate(prompt(2))
    changes = standin.counts().since(before)
    assert engine.cached[loaded] == HIT
    assert changes["batch_copies"] >= 2
    assert "main_thread_waits" not in changes
    assert engine.wrong_reads() == [], "which waits"
    assert standin.counts().since(before)["main_thread_waits"], "the control"


def test_steps_go_on_while_a_store_is_held(make, standin):
    engine = make(store_mode="step", load_mode="async")
    engine.generate(prompt(1))
    with opened_in_the_end(standin, Way.TO_HOST):
        engine.add(prompt(2))
        for _ in range(5):
            engine.step()
        assert standin.counts().waiting_at_gates, "a step waited until the gate was opened for it"
        assert engine.scheduler.connector.has_pending_push_work()
    engine.settle()
    assert load_again(engine, prompt(2)) == []


@contextlib.contextmanager
def opened_in_the_end(standin, way: Way):
    """The gate is closed inside this block; who waits there all the same does not wait forever."""
    rescue = threading.Timer(WAIT_MAX_S, standin.open_gate, (way,))
    rescue.start()
    try:
        with standin.held(way):
            yield
    finally:
        rescue.cancel()
        rescue.join()


@pytest.mark.parametrize("rung", ["batch", "staged"])
@each_mode
def test_all_memory_is_allocated_when_the_caches_are_handed_over(
    prepare, standin, store_mode, load_mode, rung
):
    """Pinned memory, that is: TierKV takes none of the device's, neither then nor later."""
    import torch

    def memory() -> tuple[int, int, int, int]:
        """What torch allocated on the device so far, also from its cache, and what the driver."""
        counts, told = standin.counts(), torch.npu.memory_stats()
        return (
            told["allocation.all.allocated"],
            counts.device_allocations,
            counts.device_bytes_in_use,
            counts.host_bytes_in_use,
        )

    standin.set(**RUNGS[rung])
    engine = prepare(store_mode=store_mode, load_mode=load_mode)
    kept = use_up_pinned(standin)
    before = memory()
    engine.register()
    registered = memory()
    assert registered[:3] == before[:3]
    assert registered[3] - before[3] == engine.worker.copies.facts.staging
    engine.start()
    engine.generate(prompt(1))
    engine.wrong_reads()
    assert load_again(engine, prompt(1)) == []
    assert memory() == registered
    kept.append(torch.empty(4, device=engine.device))
    assert memory()[0] == registered[0] + 1, "the control"


def use_up_pinned(standin) -> list:
    """Take all pinned memory that torch keeps from earlier engines, so that new is new."""
    import torch

    before, kept = standin.counts().host_bytes_in_use, []
    while standin.counts().host_bytes_in_use == before:
        kept.append(torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True))
    return kept


def test_a_daemon_that_adopts_the_pool_costs_no_registration(make, node, standin):
    engine = make()
    engine.generate(prompt(1))
    engine.wrong_reads()
    client = engine.scheduler.connector.scheduler_half.client
    before, generation = standin.counts(), client.welcome.generation
    assert before.registered_bytes >= node.config.dram.capacity
    node.daemon.kill()
    wait_for(lambda: client.link is not Link.UP, client, what="the loss to be seen")
    node.start_daemon()
    wait_for(lambda: client.link is Link.UP, client, what="the new daemon")
    engine.wait_usable()
    node.wait_granting()
    assert client.welcome.generation > generation
    engine.forget_device()
    engine.generate(prompt(2))
    engine.wrong_reads()
    assert load_again(engine, prompt(2)) == []
    changes = standin.counts().since(before)
    assert not [kind for kind in changes if "registr" in kind]
    assert set(engine.worker.copies.rungs) == {"batch"}


def test_two_workers_register_one_pool_and_read_each_others_blocks(make, node, standin, tmp_path):
    engine = make()
    engine.generate(prompt(1))
    assert engine.wrong_reads() == []
    told = {
        "node": node.config.model_dump(mode="json"),
        "model": str(MODEL),
        "folder": str(tmp_path),
        "prompts": [prompt(1), prompt(2)],
    }
    child = subprocess.run(
        [sys.executable, "-m", "tests.npu.child", "worker"],
        cwd=ROOT,
        env=os.environ,
        input=json.dumps(told) + "\n",
        capture_output=True,
        text=True,
        check=False,
        timeout=6 * WAIT_MAX_S,
    )
    print(child.stderr)
    assert child.returncode == 0
    seen = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
    assert seen[0]["cached"] == [HIT, 0]
    assert seen[0]["wrong"] == []
    assert seen[0]["registered"] == standin.counts().registered_bytes > 0
    assert set(seen[0]["rungs"]) == {"batch"}
    assert seen[1] == {"registered": 0, "violations": 0}
    assert load_again(engine, prompt(2)) == [], "what the other process stored"


def test_layers_are_not_stored_one_by_one_where_microbatches_call_their_hooks(node, standin):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    from tests.npu import engine as engines
    from tierkv.errors import ConfigError

    for mode in ("step", "layerwise"):
        config = engines.vllm_config(node.config, MODEL, {"store_mode": mode})
        config.parallel_config.ubatch_size = 2
        arguments = (config, KVConnectorRole.SCHEDULER, engines.kv_cache_config())
        if mode == "layerwise":
            with pytest.raises(ConfigError, match=r"engine\.store_mode: .* --enable-dbo"):
                engines.NotingConnector(*arguments)
        else:
            engines.NotingConnector(*arguments).shutdown()
