"""The daemon process: pool, socket, and the loop that feeds `Server.turn`.

One thread. This is the only place of the service that reads a clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import zmq

from tierkv.config import NodeConfig, node_warnings
from tierkv.core.directory import Directory
from tierkv.core.eviction.base import EvictionPolicy
from tierkv.core.values import Limits
from tierkv.errors import ConfigError, DaemonUnavailableError
from tierkv.plugins import policy_factory
from tierkv.pool import (
    HEADER_BYTES,
    DaemonLock,
    Held,
    Pool,
    create_pool,
    held_locks,
    make_private,
    pool_path,
)
from tierkv.service import wire
from tierkv.service.server import Frame, Server, ServerFacts
from tierkv.service.tier_host import IO_COMMAND, TierHost, limits_of
from tierkv.sizing import read_memory_facts, resolve_capacity
from tierkv.types import EngineId
from tierkv.units import approximate_size

logger = logging.getLogger(__name__)

LIVENESS_PERIOD_S = 0.25
FRAMES_PER_STEP_MAX = 256
FLUSH_STEP_S = 0.02
LOST_DEBTS = ("demote_failed", "demote_full", "backlog_shed", "writeback_shed")
SEND_QUEUE_MAX = 100_000
JUST_DEAD = EngineId("-")  # stands for engines that died shortly before us; no lock names it
SOCKET_PATH_BYTES_MAX = 100  # sun_path has 108, ZMQ adds a prefix of its own


def node_text(config: NodeConfig) -> str:
    """The `node:` part as canonical JSON; equal configurations give equal texts."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True)


def prepare_pool(config: NodeConfig) -> Pool:
    """Create or adopt the pool that the configuration asks for.

    Raises:
        ConfigError, PoolError: it does not fit, or cannot be made; says what to do.
    """
    dram = config.dram
    path = pool_path(dram.directory, config.service.socket_path)
    facts = read_memory_facts(dram.directory, path)
    is_mapped = any(held.mappers for held in held_locks(config.service.socket_path.parent).values())
    is_adopted = path.exists() and path.stat().st_size - HEADER_BYTES == dram.capacity
    if is_mapped and not is_adopted and dram.capacity != "auto":
        facts = dataclasses.replace(facts, reusable=0)  # the old file stays as long as it is mapped
    capacity = resolve_capacity(dram.capacity, facts)
    if dram.capacity == "auto" and path.exists():
        # What is free changes while engines run; an automatic size must not lose their pool.
        capacity = max(path.stat().st_size - HEADER_BYTES, 0) or capacity
    pool = create_pool(path, capacity, dram.extent_unit, numa=dram.numa)
    has_huge = dram.hugepages == "auto" and pool.ask_for_huge_pages()
    logger.info(
        "pool %s: path=%s capacity=%s generation=%d hugepages=%s numa=%s nodes=%s",
        "adopted" if pool.was_adopted else "created",
        path,
        approximate_size(capacity),
        pool.generation,
        "advised" if has_huge else "no",
        pool.placement.in_force or "unknown",
        ",".join(str(node) for node, _ in pool.placement.pages) or "unknown",
    )
    if pool.placement.problem:
        logger.warning(
            "node.dram.numa: the pool is not placed as asked (%s): %s",
            dram.numa,
            pool.placement.problem,
        )
    return pool


class Daemon:
    """A running daemon. Use `open_daemon`."""

    def __init__(
        self,
        config: NodeConfig,
        pool: Pool,
        socket: zmq.Socket[bytes],
        make_policy: Callable[[], EvictionPolicy],
        io_command: Sequence[str] = IO_COMMAND,
    ) -> None:
        self.config = config
        self.pool = pool
        self.run_directory = config.service.socket_path.parent
        self._socket = socket
        dram = config.dram
        limits = Limits(
            pool.capacity, dram.extent_unit, dram.pinned_share_max, pool.generation,
            dram.clean_tail, dram.dirty_max, dram.promote_share_max,
        )  # fmt: skip
        old = [e for e, held in held_locks(self.run_directory).items() if held.mappers]
        old.append(JUST_DEAD)
        facts = ServerFacts(
            str(pool.path),
            pool.capacity,
            pool.generation,
            node_text(config),
            config.node_strict,
            config.service.quarantine_min,
            placement=pool.placement,
        )
        tiers = [limits_of(tier, config) for tier in config.tiers]
        directory = Directory(limits, tiers, make_policy)
        self.server = Server(directory, facts, old if pool.was_adopted else ())
        self.tiers = TierHost(
            config.tiers,
            self.server.directory.tiering,
            pool=str(pool.path),
            generation=pool.generation,
            run_directory=str(self.run_directory),
            stores=self.server.stores,
            command=io_command,
        )
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._listened: list[int] = []
        self._look_at = 0.0
        self.is_stopping = False

    def step(self, wait_s: float) -> None:
        """Wait for messages, at most `wait_s`, and work them off, each reply at once."""
        self._listen_to_tiers()
        if self._socket in dict(self._poller.poll(int(wait_s * 1000))):
            self._receive()
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LIVENESS_PERIOD_S
            self._turn([], self._look())
        if self.config.tiers:
            self.tiers.step(now)
            self._turn([], None)
            self.tiers.hand_out(self.server.take_jobs(now), now)

    def _listen_to_tiers(self) -> None:
        """Wake up when an I/O process says something; processes come and go."""
        ends = [end.fileno() for end in self.tiers.sockets()]
        if ends != self._listened:
            for end in self._listened:
                self._poller.unregister(end)
            for end in ends:
                self._poller.register(end, zmq.POLLIN)
            self._listened = ends

    def _receive(self) -> None:
        for _ in range(FRAMES_PER_STEP_MAX):
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) == 2:
                self._turn([(parts[0], parts[1])], None)
            else:
                self.server.directory.counters["protocol_errors"] += 1

    def _look(self) -> dict[EngineId, Held] | None:
        try:
            return held_locks(self.run_directory)
        except OSError as error:
            logger.warning("the locks cannot be looked at: %s", error)
            return None

    def _turn(self, inbox: list[Frame], held: dict[EngineId, Held] | None) -> None:
        for peer, frame in self.server.turn(time.monotonic(), inbox, held):
            with contextlib.suppress(zmq.Again):  # a client that reads nothing loses its replies
                self._socket.send_multipart([peer, frame], zmq.NOBLOCK)

    def run(
        self,
        linger_s: float | None,
        on_turn: Callable[[Daemon], None] | None = None,
    ) -> None:
        """Serve until stopped, or until no engine was known for `linger_s`."""
        idle_since = time.monotonic()
        while not self.is_stopping:
            self.step(LIVENESS_PERIOD_S)
            if on_turn is not None:
                on_turn(self)
            now = time.monotonic()
            if self.server.engines_known or self.server.old_mappers:
                idle_since = now
            elif linger_s is not None and now - idle_since >= linger_s:
                logger.info("no engine for %.0f s: the daemon ends", linger_s)
                break
        if self.config.tiers:
            self._flush()

    def _flush(self) -> None:
        """Write owed blocks to durable tiers, within the budget; a second signal cuts it short."""
        cleaner, budget_s = self.server.directory.tiering.cleaner, self.config.service.flush_budget
        owed = cleaner.unflushed()
        counters = self.server.directory.counters
        lost = sum(counters[name] for name in LOST_DEBTS)
        if owed == 0:
            return
        logger.info("flushing: blocks=%d budget=%.1f s", owed, budget_s)
        self.is_stopping = False
        self.server.is_ending = True
        self.server.directory.may_grant = False
        cleaner.flush()
        end = time.monotonic() + budget_s
        while not self.is_stopping and cleaner.unflushed(True) and time.monotonic() < end:
            self.step(FLUSH_STEP_S)
        left = cleaner.unflushed() + sum(counters[name] for name in LOST_DEBTS) - lost
        level = logging.WARNING if left else logging.INFO
        logger.log(level, "flushed: blocks=%d not_flushed=%d", max(0, owed - left), left)


@contextlib.contextmanager
def open_daemon(config: NodeConfig, io_command: Sequence[str] = IO_COMMAND) -> Iterator[Daemon]:
    """Become the daemon of a node: lock, pool, socket; all given back at the end.

    The pool file stays if some process still maps it, so that the next daemon can adopt it.

    Raises:
        DaemonUnavailableError: another daemon serves this socket.
        ConfigError, PoolError: see `prepare_pool` and `policy_factory`.
    """
    socket_path = config.service.socket_path
    if len(os.fsencode(socket_path)) > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"node.service.socket: {socket_path} is longer than {SOCKET_PATH_BYTES_MAX} bytes; "
            "name a shorter one"
        )
    make_policy = policy_factory(config.eviction)
    make_private(socket_path.parent)
    lock = DaemonLock(socket_path)
    if not lock.acquire():
        raise DaemonUnavailableError(
            f"{socket_path}: another daemon serves this socket; stop it or set node.service.socket"
        )
    try:
        pool = prepare_pool(config)
        lock.tell(pool.generation)
        for text in node_warnings(config, pool.capacity):
            logger.warning("configuration: %s", text)
        try:
            with _bound_socket(socket_path) as socket:
                daemon = Daemon(config, pool, socket, make_policy, io_command)
                try:
                    yield daemon
                finally:
                    daemon.tiers.close()
        finally:
            if not any(held.mappers for held in held_locks(socket_path.parent).values()):
                pool.unlink()
            pool.close()
    finally:
        lock.release()


@contextlib.contextmanager
def _bound_socket(path: Path) -> Iterator[zmq.Socket[bytes]]:
    path.unlink(missing_ok=True)  # we hold the lock: nobody serves a socket that is left here
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, wire.MESSAGE_BYTES_MAX)
    socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_MAX)
    old = os.umask(0o177)
    try:
        socket.bind(f"ipc://{path}")
    except zmq.ZMQError as error:
        raise DaemonUnavailableError(
            f"{path}: cannot be bound: {error}; set node.service.socket"
        ) from error
    finally:
        os.umask(old)
    try:
        yield socket
    finally:
        socket.close()
        context.term()
        path.unlink(missing_ok=True)


def serve(
    config: NodeConfig,
    linger_s: float | None = None,
    on_turn: Callable[[Daemon], None] | None = None,
    io_command: Sequence[str] = IO_COMMAND,
) -> None:
    """Run the daemon until SIGTERM or SIGINT, or until it lingered long enough without engines.

    Args:
        linger_s: None to run until a signal.
        on_turn: called after every turn.
        io_command: how the I/O process of a tier is started.
    """
    with open_daemon(config, io_command) as daemon:

        def stop(signal_number: int, _frame: object) -> None:
            logger.info("signal %d: the daemon ends", signal_number)
            daemon.is_stopping = True

        _allow_descriptors()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        logger.info("serving: socket=%s pid=%d", config.service.socket_path, os.getpid())
        # Flat arrays hold the index; without cycles the collector only costs pauses.
        gc.collect()
        gc.freeze()
        gc.disable()
        daemon.run(linger_s, on_turn)


def _allow_descriptors() -> None:
    """Every session costs descriptors; take as many as the system lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
