"""The daemon of the demonstration, as its parent asks and mistreats it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierkv.errors import DaemonUnavailableError
from tierkv.hashing import block_key
from tierkv.pool import DaemonLock, attach_pool
from tierkv.service import wire
from tierkv.service.client import Attachment, Client
from tierkv.tiers.frame import seal
from tierkv.types import FRAME_BYTES, BlockKey, EngineId, NamespaceId

WAIT_MAX_S = 60.0
PAUSE_S = 0.02
SOURCES = ("dram", "fs")


class DemoNode:
    """An administrator beside the engines."""

    def __init__(self, run: Path) -> None:
        self.socket = run / "daemon.sock"
        self.ssd = run / "ssd"

    # ---- questions ----

    def _ask(self, make: Callable[[int], wire.Request]) -> tuple[wire.Reply, int]:
        client = Client(self.socket, None)
        try:
            client.connect(10.0)
            assert client.welcome is not None, "a connected client was welcomed"
            return client.ask(make, 30.0), client.welcome.pid
        finally:
            client.close()

    def stats(self) -> dict[str, Any]:
        """The daemon's numbers."""
        reply, _ = self._ask(wire.Stats)
        assert isinstance(reply, wire.StatsReply), "Stats is answered by StatsReply"
        tree: dict[str, Any] = json.loads(reply.body)
        return tree

    def tokens(self) -> dict[str, int]:
        """Prompt tokens so far by tier, and the requests that they belong to."""
        total = self.stats()["tokens_total"]
        return {name: total["tokens"].get(name, 0) for name in SOURCES} | {
            "requests": total["requests"]
        }

    def wait(self, is_reached: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        """Look at the numbers until they say so."""
        end = time.monotonic() + WAIT_MAX_S
        while True:
            with contextlib.suppress(DaemonUnavailableError):
                stats = self.stats()
                if is_reached(stats):
                    return stats
            if time.monotonic() > end:
                raise SystemExit(f"waited {WAIT_MAX_S:.0f} s in vain for {what}")
            select.select([], [], [], PAUSE_S)

    def wait_written(self) -> None:
        """Wait until the SSD has everything that DRAM owes it."""
        self.wait(
            lambda s: s["dirty_blocks"] == 0 and not any(t["jobs"] for t in s["tiers"]),
            "blocks to be written",
        )

    def is_serving(self) -> bool:
        """Whether a daemon serves, grants slots, and knows what its SSD holds."""
        if not DaemonLock(self.socket).is_held():
            return False
        try:
            stats = self.stats()
        except DaemonUnavailableError:
            return False
        return bool(stats["is_granting"]) and all(t["is_scanned"] for t in stats["tiers"])

    # ---- mishaps ----

    def kill_daemon(self) -> None:
        """SIGKILL, as a crash would."""
        self._signal(signal.SIGKILL)

    def stop_daemon(self) -> None:
        """Let the daemon end, if there is one."""
        with contextlib.suppress(DaemonUnavailableError):
            if DaemonLock(self.socket).is_held():
                self._signal(signal.SIGTERM)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon and wait for its end."""
        _, pid = self._ask(wire.Stats)
        descriptor = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(descriptor, number)
            select.select([descriptor], [], [], WAIT_MAX_S)
        finally:
            os.close(descriptor)

    def forget_dram(self) -> None:
        """Drop all blocks in DRAM; the SSD keeps its own."""
        self._ask(lambda seq: wire.Purge(seq, "", ["dram"]))

    def _space(self) -> tuple[NamespaceId, int]:
        space = max(self.stats()["namespaces"], key=lambda s: int(s["blocks"]))
        return NamespaceId(bytes.fromhex(space["namespace"])), int(space["slot_bytes"])

    def damage_in_dram(self, prefix: list[str]) -> bool:
        """Overwrite the payload of a prefix's last block in the mapped pool file."""
        namespace, slot_bytes = self._space()
        client = Client(self.socket, EngineId(f"demo{os.getpid()}"), deadline_s=5.0)
        try:
            client.connect(10.0)
            client.attach(Attachment(namespace, slot_bytes, "demo", False))
            client.wait_attached(namespace, 5.0)
            answer = client.lookup(namespace, keys_of(prefix))
            if answer is None or len(answer.offsets) < len(prefix):
                return False
            pool = attach_pool(Path(self.stats()["pool"]))
            start = int(answer.offsets[-1]) + FRAME_BYTES
            end = int(answer.offsets[-1]) + slot_bytes
            pool.bytes[start:end] = pool.bytes[start:end][::-1].copy()
            client.release([answer.lease])
            return True
        finally:
            client.close()

    def damage_on_ssd(self, prefix: list[str]) -> bool:
        """Rewrite the file of a prefix's last block: a valid frame around other bytes."""
        namespace, _ = self._space()
        key = keys_of(prefix)[-1]
        path = self.ssd / namespace.hex() / key.hex()[:2] / key.hex()
        if not path.is_file():
            return False
        slot = bytearray(path.read_bytes())
        slot[FRAME_BYTES:] = slot[FRAME_BYTES:][::-1]
        seal(memoryview(slot), namespace, key)
        path.write_bytes(slot)
        return True


def keys_of(prefix: list[str]) -> list[BlockKey]:
    """Block keys of an engine's block hashes, given in hex."""
    return [block_key(bytes.fromhex(block_hash)) for block_hash in prefix]
