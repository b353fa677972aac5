"""Processes for what torch_npu decides once, or does not survive: python -m tests.npu.child NAME

Each prints what it saw, one JSON object per line.
"""

from __future__ import annotations

import json
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from tests.npu.acl import Acl
from tests.npu.memory import Mapping
from tests.npu.standin import StandIn, Way
from tests.processes import wait_for
from tierkv.device.accelerator import AcceleratorCopyEngine
from tierkv.device.base import Descriptors, Direction
from tierkv.device.npu import NpuHooks

SIZE = 64 << 10


def show(**seen: object) -> None:
    print(json.dumps(seen), flush=True)


def use_registered_memory(standin: StandIn, device: torch.device) -> None:
    """Register memory and copy it with `non_blocking`. The environment names the driver."""
    mapping, target, stream = Mapping(SIZE), torch.empty(SIZE, device=device), torch.Stream(device)
    acl = Acl()
    registered = acl.register(mapping.address, SIZE)
    before = standin.counts()
    with stream:
        target.view(torch.uint8)[:SIZE].copy_(mapping.tensor, non_blocking=True)
    stream.synchronize()
    show(
        registered=registered,
        is_pinned=mapping.tensor.is_pinned(),
        is_own_memory_pinned=torch.empty(SIZE, pin_memory=True).is_pinned(),
        changes=standin.counts().since(before),
    )
    acl.unregister(mapping.address)


def copy_with_our_engine(standin: StandIn, device: torch.device) -> None:
    """The same with the copy engine, whose copies are held meanwhile."""
    mapping, source = Mapping(SIZE), torch.empty(SIZE, dtype=torch.uint8, device=device)
    values = torch.arange(SIZE, dtype=torch.int32).to(torch.uint8)
    source.copy_(values)
    engine = AcceleratorCopyEngine(device, NpuHooks(0), staging_bytes=0)
    engine.adopt(mapping.address, SIZE, threading.Event())
    places = (source.data_ptr(), mapping.address, SIZE)
    before = standin.counts()
    with standin.held(Way.TO_HOST):
        event = engine.submit(
            Direction.STORE, Descriptors(*(np.array([n], np.int64) for n in places))
        )
        is_over = event.is_done()
    wait_for(event.is_done, what="the copy")
    changes = standin.counts().since(before)
    show(
        rung=engine.rung,
        is_over=is_over,
        is_ok=event.is_ok,
        is_right=torch.equal(mapping.tensor, values),
        main_thread_waits=changes.get("main_thread_waits", 0),
        batches=changes["batch_copies"],
    )
    engine.close()
    engine.abandon(mapping.address, SIZE)


def use_an_operator(standin: StandIn, device: torch.device) -> None:
    """Compute something: nothing comes back."""
    show(sum=(torch.zeros(4, device=device) + 1).cpu().tolist())


def refuse_a_queued_copy(standin: StandIn, device: torch.device) -> None:
    """Let the driver refuse a copy that torch_npu has in its queue, and go on."""
    target, stream = torch.empty(SIZE, device=device, dtype=torch.uint8), torch.Stream(device)
    source = torch.ones(SIZE, dtype=torch.uint8).pin_memory()
    events = [torch.Event(device) for _ in range(9)]
    standin.fail_submissions(way=Way.TO_DEVICE)
    raised = []
    for event in events:
        try:
            with stream:
                target.copy_(source, non_blocking=True)
            event.record(stream)
            stream.query()  # lets the queue run empty
        except RuntimeError as error:
            raised.append(str(error))
    torch.accelerator.synchronize()
    show(
        raised=len(raised),
        says_so=all("inner error" in text for text in raised),
        copied=standin.counts().copies_to_device,
        is_last_reached=events[-1].query(),
        is_stream_idle=stream.query(),
    )


def wait_in_threads(standin: StandIn, device: torch.device) -> None:
    """Wait in other threads for a copy that is held; this one must go on meanwhile, or hangs."""
    target, stream = torch.empty(SIZE, device=device, dtype=torch.uint8), torch.Stream(device)
    end = torch.Event(device)
    source = torch.ones(SIZE, dtype=torch.uint8).pin_memory()
    before = standin.counts()
    standin.close_gate(Way.TO_DEVICE)
    with stream:
        target.copy_(source, non_blocking=True)
    end.record(stream)
    calls = (stream.synchronize, end.synchronize, torch.accelerator.synchronize)
    threads = [threading.Thread(target=_call_on, args=(device, call)) for call in calls]
    for thread in threads:
        thread.start()
    wait_for(lambda: standin.counts().host_waits >= before.host_waits + 3, what="all to wait")
    is_over = [not thread.is_alive() for thread in threads]
    standin.open_gate(Way.TO_DEVICE)
    for thread in threads:
        thread.join()
    changes = standin.counts().since(before)
    show(is_over=is_over, main_thread_waits=changes.get("main_thread_waits", 0))


def run_a_worker(standin: StandIn, device: torch.device) -> None:
    """An engine of its own, on standard input: its node, a prompt to load and one to store."""
    from tests.npu import engine as engines
    from tierkv.config import NodeConfig

    told = json.loads(sys.stdin.readline())
    config = engines.vllm_config(NodeConfig.model_validate(told["node"]), Path(told["model"]), {})
    engines.start_groups(config, Path(told["folder"]))
    engine = engines.Engine(config, device)
    engine.register()
    engine.start()
    cached = [engine.cached[engine.generate(prompt)] for prompt in told["prompts"]]
    show(
        cached=cached,
        wrong=engine.wrong_reads(),
        registrations=standin.counts().registrations,
        registered=standin.counts().registered_bytes,
        rungs=dict(engine.worker.copies.rungs),
    )
    engine.close()
    show(registered=standin.counts().registered_bytes, violations=standin.counts().violations)


def _call_on(device: torch.device, call: Callable[[], None]) -> None:
    torch.npu.set_device(device)
    call()


ROLES = {
    "old-driver": (use_registered_memory, copy_with_our_engine, use_an_operator),
    "refused": (refuse_a_queued_copy,),
    "threads": (wait_in_threads,),
    "worker": (run_a_worker,),
}


def main() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch_npu  # noqa: F401

        torch.npu.set_device(0)
    for part in ROLES[sys.argv[1]]:
        part(StandIn(), torch.device("npu:0"))


if __name__ == "__main__":
    main()
