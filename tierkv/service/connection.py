"""One engine's connection to the daemon, kept up across crashes of the daemon.

Belongs to one thread and never waits. A lost daemon is found by its lock, not by waiting, and
started anew where the configuration allows it.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path
from typing import Protocol

import zmq

from tierkv.errors import ProtocolError, TierKVError
from tierkv.pool import DaemonLock, MapperLock
from tierkv.service import wire
from tierkv.types import EngineId, LeaseId

logger = logging.getLogger(__name__)

HELLO_WAIT_S = 1.0
START_PAUSE_FIRST_S = 1.0
START_PAUSE_MAX_S = 30.0
LOCK_PERIOD_S = 0.25
RETRY_PAUSE_S = 1.0
SEND_QUEUE_MAX = 16_384


class Link(Enum):
    """State of the connection."""

    DOWN = "down"
    GREETING = "greeting"
    UP = "up"


class Listener(Protocol):
    """Who uses a connection."""

    def leases_held(self) -> Iterable[LeaseId]:
        """Leases that a new session should keep."""

    def on_welcome(self, welcome: wire.Welcome, is_other_daemon: bool) -> None:
        """A session is open; with another daemon no lease of before means anything."""

    def on_reply(self, reply: wire.Reply) -> None:
        """Anything else that came."""

    def on_loss(self) -> None:
        """The session is lost; what was waited for will not come."""


class Connection:
    """Greets, notices losses, starts daemons, and numbers messages."""

    def __init__(
        self,
        socket: Path,
        engine: EngineId | None,
        listener: Listener,
        *,
        node: str,
        start: Callable[[], subprocess.Popen[bytes]] | None,
        start_wait_s: float,
    ) -> None:
        self.socket_path = socket
        self.engine = engine
        self.link = Link.DOWN
        self.welcome: wire.Welcome | None = None
        self.refusal: str | None = None
        self._listener = listener
        self._node = node
        self._start = start
        self._start_wait_s = start_wait_s
        self._launcher: subprocess.Popen[bytes] | None = None
        self._daemon_lock = DaemonLock(socket)
        self._session_lock: MapperLock | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._seq = 0
        self._hello_seq = 0
        self._retry_at = 0.0
        self._start_at = 0.0
        self._start_pause_s = START_PAUSE_FIRST_S
        self._greet_until = 0.0
        self._look_at = 0.0
        self._problem = ""
        self._has_greeted = False  # a Hello that got no answer may have arrived all the same

    @property
    def version(self) -> int:
        """Protocol version of the session; 0 before its welcome."""
        return self.welcome.version if self.welcome is not None and self.link is Link.UP else 0

    @property
    def generation(self) -> int:
        """Generation of the last daemon that welcomed us; 0 before the first."""
        return self.welcome.generation if self.welcome is not None else 0

    def next_seq(self) -> int:
        """The number of the next message."""
        self._seq += 1
        return self._seq

    def poll(self, now: float) -> None:
        """Take in what came, and get on with connecting."""
        if self.link is not Link.DOWN:
            self.drain()
            if now >= self._look_at:
                self._look_at = now + LOCK_PERIOD_S
                if self._is_gone():
                    self.lose("the daemon is gone")
        if self.link is Link.GREETING and now >= self._greet_until:
            self.lose("the daemon does not answer")
        if self.link is Link.DOWN and now >= self._retry_at:
            try:
                self._connect_or_start(now)
            except (OSError, TierKVError, zmq.ZMQError) as error:
                self._cannot_connect(str(error), now)

    def _is_gone(self) -> bool:
        try:
            holder = self._daemon_lock.holder()
        except OSError:
            return False  # out of descriptors, say: no news
        return holder is None or (self.link is Link.UP and holder != self.generation)

    def _cannot_connect(self, problem: str, now: float) -> None:
        """Nothing here may reach the engine: it serves without cache."""
        if problem != self._problem:
            logger.warning("cannot connect to the daemon: %s", problem)
        self._problem = problem
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None
        self.link = Link.DOWN
        self._retry_at = now + RETRY_PAUSE_S

    def wait(self, wait_s: float) -> None:
        """Wait for one message, at most `wait_s`, and take it in."""
        if self._socket is None:
            time.sleep(wait_s)
        elif self._socket.poll(max(1, int(wait_s * 1000))):
            self._receive()

    def post(self, message: wire.Request) -> bool:
        """Send; False if there is nobody to send to. Works behind a Hello not yet answered."""
        if self._socket is None:
            return False
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.lose(f"the daemon takes no messages ({error})")
            return False
        return True

    def drain(self) -> None:
        """Take in everything that came."""
        while self._socket is not None and self._receive():
            pass

    def _receive(self) -> bool:
        """Take in one message if there is one."""
        assert self._socket is not None, "only called while connected"
        try:
            frame = self._socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            self.lose(f"the connection failed ({error})")
            return False
        try:
            self._take_in(wire.decode_reply(frame))
        except ProtocolError as error:
            self.lose(f"the daemon sent {error}")
        return True

    def lose(self, reason: str) -> None:
        """Give the session up; the next `poll` tries again."""
        if self.link is Link.UP:
            logger.warning("%s; serving without cache until it is back", reason)
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = None
        self.link = Link.DOWN
        self._retry_at = 0.0
        self._listener.on_loss()

    def close(self) -> None:
        """End the session politely and free everything."""
        if self.link is Link.UP:
            self.post(wire.Bye(self.next_seq()))
        if self._socket is not None:
            self._socket.close(linger=200)
        self._socket = None
        self.link = Link.DOWN
        self._context.term()
        if self._session_lock is not None:
            self._session_lock.release()
        if self._launcher is not None:
            self._launcher.poll()

    def _connect_or_start(self, now: float) -> None:
        if self._launcher is not None and self._launcher.poll() is not None:
            self._launcher = None
        if self._daemon_lock.is_held():
            if self.socket_path.exists():  # else it is still preparing its pool
                self._greet(now)
            return
        self._retry_at = now + 0.02
        if self._start is None or self._launcher is not None or now < self._start_at:
            return
        try:
            self._launcher = self._start()
        except (OSError, TierKVError) as error:
            logger.warning("the daemon cannot be started: %s", error)
        self._start_at = now + min(self._start_pause_s, self._start_wait_s)
        self._start_pause_s = min(self._start_pause_s * 2, START_PAUSE_MAX_S)

    def _greet(self, now: float) -> None:
        if self.engine is not None and self._session_lock is None:
            self._session_lock = MapperLock(self.socket_path.parent, self.engine, is_session=True)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MESSAGE_BYTES_MAX)
        self._socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MAX)
        self._socket.connect(f"ipc://{self.socket_path}")
        self.link = Link.GREETING
        self._greet_until = now + HELLO_WAIT_S
        self._look_at = now + LOCK_PERIOD_S
        self._hello_seq = self.next_seq()  # numbers never repeat: old tickets stay old
        held = sorted(set(self._listener.leases_held()))[: wire.LEASES_MAX]
        hello = wire.Hello(
            self._hello_seq,
            wire.VERSION_MIN,
            wire.VERSION_MAX,
            self.engine or "",
            self._has_greeted,
            [int(lease) for lease in held],
            self._node,
        )
        self._has_greeted = True
        self.post(hello)

    def _take_in(self, reply: wire.Reply) -> None:
        match reply:
            case wire.Welcome():
                is_other = self.welcome is not None and reply.generation != self.generation
                self.welcome = reply
                self.link = Link.UP
                self.refusal = None
                self._start_at = 0.0
                self._start_pause_s = START_PAUSE_FIRST_S
                logger.info("connected: pid=%d generation=%d", reply.pid, reply.generation)
                self._listener.on_welcome(reply, is_other)
            case wire.Failed(code="version" | "refused") if reply.to == self._hello_seq:
                if self.refusal is None:
                    logger.error("the daemon refuses this engine: %s", reply.message)
                self.refusal = reply.message
                self.lose("refused")
                self._retry_at = time.monotonic() + START_PAUSE_MAX_S
            case wire.Failed(code="protocol" | "closed"):
                self.lose(f"the daemon closed the session: {reply.message}")
            case _:
                self._listener.on_reply(reply)
