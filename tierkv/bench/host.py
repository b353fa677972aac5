"""A daemon in a child process, for benches: a run directory and pool of its own, gone at the end.

Run as ``python -m tierkv.bench.host ECHO_SOCKET``; the configuration comes as JSON on standard
input. Between two turns the daemon's thread also answers a bare echo (see `echo`), so that both
are measured between the same two processes and threads.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.bench.echo import EchoServer
from tierkv.config import DramConfig, NodeConfig, ServiceConfig
from tierkv.errors import DaemonUnavailableError
from tierkv.hashing import digest_of
from tierkv.service import wire
from tierkv.service.client import Attachment, Client
from tierkv.service.daemon import serve
from tierkv.types import EngineId, NamespaceId

START_WAIT_S = 30.0
STOP_WAIT_S = 10.0
LINGER_S = 10.0  # a daemon whose bench was killed ends by itself
ANSWER_WAIT_S = 120.0  # a slow machine gives a slow figure, not a failed bench


@dataclass(frozen=True, slots=True)
class Host:
    """A running daemon and one engine's client of it.

    Attributes:
        echo: socket of the bare echo in the daemon's process.
    """

    client: Client
    echo: Path

    def attach(self, label: str, slot_bytes: int) -> NamespaceId:
        """Attach a namespace of this name and wait until it is usable."""
        space = digest_of({"bench": label})
        self.client.attach(Attachment(space, slot_bytes, label, is_private=False))
        self.ping()
        assert self.client.is_attached(space), "a pool of a bench has room for its namespaces"
        return space

    def ping(self) -> None:
        """One empty round trip; everything sent before is done when it returns."""
        self.client.ask(wire.Ping, ANSWER_WAIT_S)

    def check(self) -> int:
        """Let the daemon recompute its books; the number of blocks.

        Raises:
            DaemonUnavailableError: they are wrong.
        """
        reply = self.client.ask(wire.Check, ANSWER_WAIT_S)
        assert isinstance(reply, wire.CheckedReply), "the daemon answers Check with CheckedReply"
        return reply.blocks

    def purge(self, space: NamespaceId) -> int:
        """Drop a namespace's blocks; how many there were."""
        reply = self.client.ask(lambda seq: wire.Purge(seq, space.hex()), ANSWER_WAIT_S)
        assert isinstance(reply, wire.PurgedReply), "the daemon answers Purge with PurgedReply"
        return reply.dropped["dram"]

    def read_stats(self) -> dict[str, Any]:
        """What `tierkv stats --json` prints."""
        reply = self.client.ask(wire.Stats, ANSWER_WAIT_S)
        assert isinstance(reply, wire.StatsReply), "the daemon answers Stats with StatsReply"
        tree: dict[str, Any] = json.loads(reply.body)
        return tree


@contextlib.contextmanager
def open_host(capacity: int, extent_unit: int) -> Iterator[Host]:
    """Start a daemon with a pool of this size and connect to it.

    The pool file lies in the temporary directory: nothing writes its bytes.

    Raises:
        DaemonUnavailableError: the daemon did not come up; says why.
    """
    with tempfile.TemporaryDirectory(prefix="tierkv-bench-") as name:
        folder = Path(name)
        config = NodeConfig(
            dram=DramConfig(
                capacity=capacity, directory=folder, extent_unit=extent_unit, numa="local"
            ),
            service=ServiceConfig(socket=folder / "daemon.sock"),
        )
        log = folder / "daemon.log"
        echo = folder / "echo.sock"
        with _running(config, echo, log) as process:
            client = Client(config.service.socket_path, EngineId(uuid.uuid4().hex))
            try:
                _connect(client, process, log)
                yield Host(client, echo)
            finally:
                client.close()


@contextlib.contextmanager
def _running(config: NodeConfig, echo: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "tierkv.bench.host", str(echo)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output)
    try:
        assert process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(config.model_dump_json().encode())
            process.stdin.close()
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _connect(client: Client, process: subprocess.Popen[bytes], log: Path) -> None:
    tries = int(START_WAIT_S / 0.2)
    for left in range(tries, 0, -1):
        try:
            client.connect(0.2)
            return
        except DaemonUnavailableError:
            if process.poll() is not None:
                lines = log.read_text(errors="replace").split("\n")
                last = next((line for line in reversed(lines) if line.strip()), "no message")
                raise DaemonUnavailableError(f"the bench's daemon ended: {last}") from None
            if left == 1:
                raise


def main() -> None:
    """Serve until SIGTERM."""
    config = NodeConfig.model_validate(json.load(sys.stdin))
    echo = EchoServer(Path(sys.argv[1]))
    try:
        serve(config, LINGER_S, lambda _daemon: echo.serve_phase())
    finally:
        echo.close()


if __name__ == "__main__":
    main()
