"""Nodes for tests of the SDK: who starts the daemon, caches, and children with a cache."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import tierkv
from tests.processes import ROOT, WAIT_MAX_S, Child, Node, wait_for, wait_for_end
from tests.sdk_world import BLOCK_TOKENS, Memory, Seat, SteppedEngine
from tierkv.config import EngineConfig, TierKVConfig


class SdkNode(Node):
    """A node whose daemon is started by the first cache (`auto`) or by the test (`external`).

    Args:
        extent_slots: slots of one extent; None: one extent is the whole pool.
        spares: children that get ready while the daemon starts.
    """

    def __init__(
        self,
        tmp_path: Path,
        mode: str = "external",
        slots: int = 8,
        extent_slots: int | None = None,
        *,
        is_started: bool = True,
        pinned_share_max: float = 1.0,
        spares: int = 0,
        **more: object,
    ) -> None:
        more.setdefault("eviction", "lru")  # all that is not pinned has to go for what is new
        super().__init__(tmp_path, slots, log=tmp_path / "log", **more)
        unit = self.config.dram.capacity // slots * (extent_slots or slots)
        dram = {"extent_unit": unit, "promote_share_max": 1.0, "pinned_share_max": pinned_share_max}
        service = {"mode": mode, "start_wait_max": 2.0}
        self.config = self.config.model_copy(
            update={
                "dram": self.config.dram.model_copy(update=dram),
                "service": self.config.service.model_copy(update=service),
            }
        )
        self.mode = mode
        self.caches: list[tierkv.Cache] = []
        self.engines: list[SteppedEngine] = []
        self.sdk_children: list[SdkChild] = []
        self.spares = [SdkChild("numpy") for _ in range(spares)]
        self.daemons: list[Child] = []
        if mode == "external" and is_started:
            self.start_daemon()

    def start_daemon(self, linger_s: float | None = None) -> Child:
        daemon = super().start_daemon(linger_s)
        self.daemons.append(daemon)
        return daemon

    def settings(self, **engine: object) -> TierKVConfig:
        defaults = {
            "swap_in_threshold": 0,
            "request_deadline": WAIT_MAX_S,
            "promote_wait_max": WAIT_MAX_S,
        }
        return TierKVConfig(node=self.config, engine=EngineConfig(**(defaults | engine)))

    def cache(
        self,
        memory: Memory,
        model: str,
        *,
        engine: dict[str, object] | None = None,
        is_ready: bool = True,
        **more: object,
    ) -> tierkv.Cache:
        """A cache over a memory, closed with the node."""
        more.setdefault("config", self.settings(**(engine or {})))
        more.setdefault("block_tokens", BLOCK_TOKENS)
        cache = tierkv.Cache(memory.tensors, model=model, **more)
        self.caches.append(cache)
        self.engines += [more["copy_engine"]] if "copy_engine" in more else []
        if is_ready:
            assert cache.wait_ready(WAIT_MAX_S), cache.refusal
        return cache

    def seat(
        self, model: str, kind: str = "numpy", label: str = "", blocks: int = 16, **more: object
    ) -> Seat:
        """A cache with memory of its own, and who sits at it."""
        memory = Memory(kind, blocks)
        return Seat(self.cache(memory, model, **more), memory, label)

    def children_with_caches(
        self, model: str, count: int, label: str = "", is_stepped: bool = True
    ) -> list[SdkChild]:
        """Processes with a cache each, killed with the other users."""
        children = [self.spares.pop() if self.spares else SdkChild("numpy") for _ in range(count)]
        self.sdk_children += children
        for child in children:
            child.tell("open", model, label, is_stepped, self.settings().model_dump_json())
        for child in children:
            assert child.hear() == child.process.pid
        return children

    def kill_daemon(self) -> int:
        """SIGKILL the daemon that serves now; its generation."""
        pid, generation = self.admin.welcome.pid, self.admin.generation
        self.forget_admin()
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        for daemon in self.daemons:
            daemon.process.poll()  # a child that is gone stays until it is waited for
        return generation

    def wait_back(self, *seats: Seat) -> None:
        """Wait until the daemon that serves now has these users, and grants slots."""
        caches = [seat.cache for seat in seats]
        wait_for(self.serves, *caches, what="a daemon")
        wait_for(
            lambda: self.stats()["sessions"] == len(caches), *caches, what="the caches to come back"
        )
        for cache in caches:
            assert cache.wait_ready(WAIT_MAX_S), cache.refusal
        wait_for(lambda: self.stats()["is_granting"], *caches, what="slots to be granted")

    def end_users(self) -> None:
        """Close all caches, and fail unless they left nothing behind."""
        for engine in self.engines:
            engine.go_on()  # a test that failed may have left a gate closed
        for cache in self.caches:
            cache.close()
        self.engines.clear()
        self.caches.clear()
        for child in self.sdk_children:
            child.go_on()
            child.kill()
        self.sdk_children.clear()
        if self.serves():
            wait_for(lambda: self.stats()["sessions"] == 0, what="the end of all sessions")
            wait_for(lambda: self.held() == (0, 0), what="the end of all pins")
            self.check()

    def close(self) -> None:
        try:
            self.end_users()
        finally:
            if self.mode == "auto" and self.serves():
                self.kill_daemon()
            for child in self.spares:
                child.kill()
            super().close()


@contextlib.contextmanager
def users_of(node: SdkNode) -> Iterator[SdkNode]:
    """What is opened inside is closed behind, and leaves nothing."""
    try:
        yield node
    finally:
        node.end_users()


class SdkChild(Child):
    """A process with a cache under our hands."""

    def __init__(self, kind: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sdk_world", kind],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def tell(self, verb: str, *arguments: object) -> None:
        """Let it do one step beside us; `hear` waits for that."""
        print(json.dumps([verb, *arguments]), file=self.process.stdin)
