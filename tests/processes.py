"""Real processes for tests: daemons, engines that copy one step at a time, waiting without sleep.

Run as ``python -m tests.processes daemon|engine|mapper ...`` it is such a process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import zmq

from tests.core_world import SPACE, keys_of
from tierkv.config import DramConfig, NodeConfig, ServiceConfig
from tierkv.pool import DaemonLock, MapperLock, attach_pool, make_private
from tierkv.service import wire
from tierkv.service.client import Attachment, Client
from tierkv.service.connection import Link
from tierkv.service.daemon import Daemon, serve
from tierkv.service.launcher import start_daemon
from tierkv.service.tier_host import IO_COMMAND
from tierkv.types import FRAME_BYTES

ROOT = Path(__file__).parents[1]
SLOT_BYTES = 8192
PAYLOAD_BYTES = SLOT_BYTES - FRAME_BYTES
HALF = PAYLOAD_BYTES // 2
WAIT_MAX_S = 30.0
PAUSE_S = 0.005
QUARANTINE_S = 0.1


def payload(key: bytes) -> np.ndarray:
    """What the slot of a key must hold behind its frame."""
    return np.resize(np.frombuffer(hashlib.blake2b(key).digest(), np.uint8), PAYLOAD_BYTES)


def wait_for(condition: Callable[[], object], *clients: Client, what: str = "") -> None:
    """Look until a condition holds, driving the clients; fails after `WAIT_MAX_S`."""
    end = time.monotonic() + WAIT_MAX_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what or condition}"
        for client in clients:
            client.poll()
        select.select([], [], [], PAUSE_S)


def wait_for_end(pid: int) -> None:
    """Wait until a process that need not be our child is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], WAIT_MAX_S)[0], f"process {pid} does not end"
    finally:
        os.close(descriptor)


def start_interruptible(command: list[str], **more) -> subprocess.Popen:
    """A child that Ctrl-C reaches; background jobs of a shell, and their children, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, text=True, **more)
    finally:
        signal.signal(signal.SIGINT, before)


class EngineHalf:
    """An engine whose every step is a call of its own. Payloads tell whose they are."""

    def __init__(self, config: NodeConfig, name: str, start=None, deadline_s: float = 10.0):
        socket = config.service.socket_path
        make_private(socket.parent)
        self.lock = MapperLock(socket.parent, name)
        self.client = Client(socket, name, deadline_s=deadline_s, start=start)
        self.client.attach(Attachment(SPACE, SLOT_BYTES, "test", False))
        self.pool = None
        self.keys: list[bytes] = []
        self.lease = 0
        self.offsets: list[int] = []
        self.sources: list[int] = []  # of the last lookup: 0 DRAM, 1 the first tier
        self.copied: list[np.ndarray] = []

    def connect(self) -> int:
        """Wait for a session and map the pool; the generation."""
        assert self.client.wait_attached(SPACE, WAIT_MAX_S), self.client.refusal
        path = Path(self.client.welcome.pool)
        if self.pool is None or self.pool.path != path or not self.pool.is_current:
            self.pool = attach_pool(path)
        return self.client.generation

    def slot(self, offset: int) -> np.ndarray:
        return self.pool.bytes[offset + FRAME_BYTES : offset + SLOT_BYTES]

    # ---- load ----

    def lookup(self, text: str) -> list[int]:
        self.keys = keys_of(text)
        answer = self.client.lookup(SPACE, self.keys)
        if answer is not None:
            # Not for blocks that another engine is writing: it may be stopped for good.
            wait_for(lambda: not answer.is_promoting, self.client, what="blocks on their way up")
        self.lease = answer.lease if answer else 0
        self.offsets = answer.offsets.tolist() if answer else []
        self.sources = list(answer.sources) if answer else []
        return self.offsets

    def start_read(self) -> None:
        self.copied = [self.slot(offset)[:HALF].copy() for offset in self.offsets]

    def finish_read(self) -> bool:
        """Read the rest; whether every byte is right."""
        pairs = zip(self.copied, self.offsets, strict=True)
        found = [np.concatenate([head, self.slot(offset)[HALF:]]) for head, offset in pairs]
        return all((f == payload(k)).all() for f, k in zip(found, self.keys, strict=False))

    def release(self) -> None:
        if self.lease:
            self.client.release([self.lease])

    def load_from(self, text: str) -> list[int]:
        """Load, and tell for each hit where it came from."""
        self.load(text)
        return self.sources

    def load(self, text: str) -> int:
        """All steps of a load; the number of hits. Fails on a wrong byte."""
        self.lookup(text)
        self.start_read()
        assert self.finish_read(), "a hit with wrong bytes"
        self.release()
        if self.client.is_up:
            self.ping()  # a release is one-way, and others ask the daemon beside us
        return len(self.offsets)

    # ---- store ----

    def reserve(self, text: str, after: str = "") -> list[int]:
        keys = keys_of(text)
        grant = self.client.reserve(SPACE, [(keys_of(after)[0] if after else None, keys)])
        pairs = list(zip(keys, grant.offsets.tolist(), strict=True)) if grant else []
        self.keys = [key for key, offset in pairs if offset >= 0]
        self.offsets = [offset for _, offset in pairs if offset >= 0]
        self.lease = grant.lease if grant else 0
        return self.offsets

    def start_write(self) -> None:
        for key, offset in zip(self.keys, self.offsets, strict=True):
            self.slot(offset)[:HALF] = payload(key)[:HALF]

    def finish_write(self) -> bool:
        for key, offset in zip(self.keys, self.offsets, strict=True):
            self.slot(offset)[HALF:] = payload(key)[HALF:]
        return True

    def commit(self) -> None:
        if self.lease:
            self.client.commit(self.lease, [True] * len(self.offsets))
            self.ping()

    def store(self, text: str, after: str = "") -> int:
        """All steps of a store; the number of blocks that found room."""
        self.reserve(text, after)
        self.start_write()
        self.finish_write()
        self.commit()
        return len(self.offsets)

    # ---- the rest ----

    def ping(self) -> None:
        """Returns when the daemon has worked off all that was sent before."""
        self.client.ask(wire.Ping, WAIT_MAX_S)

    def notice_loss(self) -> None:
        """Wait until the client knows that its daemon is gone."""
        wait_for(lambda: self.client.link is not Link.UP, self.client, what="the lock to be seen")

    def quiesce(self) -> None:
        self.client.say_quiesced()
        self.ping()

    def close(self) -> None:
        self.client.close()
        self.lock.release()
        if self.pool is not None:
            self.pool.close()


class Child:
    """A process of this module under our hands: told what to do line by line."""

    def __init__(self, *arguments: str, log: Path | None = None) -> None:
        command = [sys.executable, "-m", "tests.processes", *arguments]
        with contextlib.ExitStack() as files:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=files.enter_context(log.open("ab")) if log is not None else None,
                text=True,
                bufsize=1,
            )

    def call(self, verb: str, *arguments: object) -> object:
        """Let it do one step, and wait until that is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([verb, *arguments]), file=self.process.stdin)
        return self.hear()

    def hear(self) -> object:
        found = select.select([self.process.stdout], [], [], WAIT_MAX_S)[0]
        line = self.process.stdout.readline() if found else ""
        assert line, f"the child says nothing; exit status {self.process.poll()}"
        return json.loads(line)

    def stop(self) -> None:
        """SIGSTOP; returns when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class Node:
    """Directories and processes of one test; `close` ends and removes them all.

    Args:
        io_command: how daemons that are our children start I/O processes.
        log: where those daemons and their I/O processes write their log; None: as we do.
    """

    def __init__(
        self,
        tmp_path: Path,
        slots: int = 8,
        linger_s: float = 30.0,
        *,
        io_command: Sequence[str] = IO_COMMAND,
        log: Path | None = None,
        **node: object,
    ) -> None:
        memory = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
        self.pool_directory = Path(tempfile.mkdtemp(prefix="tierkv-test-", dir=memory))
        self.run_directory = tmp_path / "run"
        self.config = NodeConfig(
            dram=DramConfig(
                capacity=slots * SLOT_BYTES,
                directory=self.pool_directory,
                extent_unit=slots * SLOT_BYTES,
                hugepages="off",
                pinned_share_max=1.0,
            ),
            service=ServiceConfig(
                socket=self.run_directory / "d.sock", quarantine_min=QUARANTINE_S, linger=linger_s
            ),
            **node,
        )
        self.socket = self.config.service.socket_path
        self.gate = tmp_path / "gate"
        self.io_command = io_command
        self.log = log
        self._children: list[Child] = []
        self._engines: list[EngineHalf] = []
        self._admin: Client | None = None
        self._launched: set[int] = set()

    # ---- processes ----

    def start_daemon(self, linger_s: float | None = None) -> Child:
        """A daemon that is our child; returns when it serves."""
        self.forget_admin()
        daemon = Child(
            "daemon",
            self.config.model_dump_json(),
            json.dumps(linger_s),
            str(self.gate),
            json.dumps(list(self.io_command)),
            log=self.log,
        )
        self._children.append(daemon)
        wait_for(lambda: self.serves() or daemon.process.poll() is not None)
        assert daemon.process.poll() is None, "the daemon ended at once"
        return daemon

    def serves(self) -> bool:
        return DaemonLock(self.socket).is_held() and self.socket.exists()

    def launch(self) -> subprocess.Popen[bytes]:
        """A daemon as an engine starts it; its pid is known to whoever connects."""
        return start_daemon(self.config)

    def child(self, name: str) -> Child:
        """An engine in a process of its own, connected."""
        child = Child("engine", self.config.model_dump_json(), name)
        self._children.append(child)
        child.call("connect")
        return child

    def mapper(self, engine: str) -> Child:
        """A worker process of an engine: it maps the pool and never talks."""
        child = Child("mapper", self.config.model_dump_json(), engine)
        self._children.append(child)
        child.hear()
        return child

    def engine(self, name: str, is_auto: bool = False, deadline_s: float = 10.0) -> EngineHalf:
        """An engine in this process, connected."""
        start = self.launch if is_auto else None
        engine = EngineHalf(self.config, name, start, deadline_s)
        self._engines.append(engine)
        engine.connect()
        self.note_daemon(engine)
        return engine

    def note_daemon(self, engine: EngineHalf) -> int:
        """The daemon behind an engine; ended with the test."""
        pid = engine.client.welcome.pid
        if pid not in {child.process.pid for child in self._children}:
            self._launched.add(pid)
        return pid

    def close(self) -> None:
        for child in self._children:
            child.go_on()
            child.kill()
        for pid in self._launched:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            wait_for_end(pid)
        for engine in self._engines:
            engine.close()
        self.forget_admin()
        shutil.rmtree(self.pool_directory)

    # ---- questions ----

    @property
    def admin(self) -> Client:
        if self._admin is None:
            self._admin = Client(self.socket, None)
        wait_for(lambda: self._admin.is_up, self._admin, what="an administrator's session")
        return self._admin

    def forget_admin(self) -> None:
        """The daemon is another one from now on, and must be asked in a new session."""
        if self._admin is not None:
            self._admin.close()
        self._admin = None

    def stats(self) -> dict:
        return json.loads(self.admin.ask(wire.Stats, WAIT_MAX_S).body)

    def check(self) -> None:
        """Fails if the daemon's books are wrong, or those of a tier."""
        problems = self.admin.ask(wire.Check, WAIT_MAX_S).problems
        assert not problems, problems

    def wait_granting(self) -> None:
        """Wait out the quarantine of engines that died just before the daemon did."""
        wait_for(lambda: self.stats()["is_granting"], what="slots to be granted")

    def held(self) -> tuple[int, int]:
        """Leases and pinned blocks."""
        stats = self.stats()
        return stats["leases"], stats["pinned_blocks"]

    @contextlib.contextmanager
    def busy(self):
        """The daemon's thread is busy inside this block; its socket accepts on its own."""
        self.gate.mkdir()
        pipe = self.gate / "pipe"
        os.mkfifo(pipe)
        (self.gate / "hold").touch()
        with pipe.open("w"):  # returns when the daemon has come to read
            (self.gate / "hold").unlink()
            yield
        shutil.rmtree(self.gate)


# ---- inside the processes ----------------------------------------------------------------------


def _run_daemon(config: str, linger: str, gate: str, io_command: str) -> None:
    hold, pipe = Path(gate) / "hold", Path(gate) / "pipe"

    def on_turn(_daemon: Daemon) -> None:
        if hold.exists():
            pipe.read_text()

    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    serve(
        NodeConfig.model_validate_json(config), json.loads(linger), on_turn, json.loads(io_command)
    )


def _run_engine(config: str, name: str) -> None:
    engine = EngineHalf(NodeConfig.model_validate_json(config), name)
    while True:
        engine.client.poll()
        if not select.select([sys.stdin], [], [], 0.02)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(engine, verb)(*arguments)), flush=True)
        if verb == "close":
            return


def _run_mapper(config: str, engine: str) -> None:
    lock = MapperLock(NodeConfig.model_validate_json(config).service.socket_path.parent, engine)
    print(json.dumps(str(lock.path)), flush=True)
    sys.stdin.read()


def raw_peer(socket: Path) -> zmq.Socket[bytes]:
    """A connection without any protocol of ours. The caller closes it."""
    peer = zmq.Context.instance().socket(zmq.DEALER)
    peer.setsockopt(zmq.LINGER, 0)
    peer.connect(f"ipc://{socket}")
    return peer


if __name__ == "__main__":
    {"daemon": _run_daemon, "engine": _run_engine, "mapper": _run_mapper}[sys.argv[1]](
        *sys.argv[2:]
    )
