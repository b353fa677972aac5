"""The daemon's side of the I/O processes: starts, feeds, kills and replaces them.

Rule 1: the daemon never waits for one of them: sockets do not block, and a process that is being
killed is looked at again later.
Rule 2: slots of a killed process are free when the process is gone, not before.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierkv.config import NodeConfig, TierConfig
from tierkv.core.tiering import TieringManager
from tierkv.core.values import Job, TierLimits
from tierkv.errors import ProtocolError
from tierkv.service import io_wire
from tierkv.tiers.base import TierSettings
from tierkv.types import BlockKey, NamespaceId, Outcome

logger = logging.getLogger(__name__)

RESTART_FIRST_S = 0.5
RESTART_MAX_S = 30.0
STEADY_S = 60.0  # a process that served this long is started anew at once
SOCKET_BYTES = 4 << 20
PACKETS_PER_STEP_MAX = 256
DYING_MAX = 4  # killed processes of a tier that the system has not ended yet
STOP_WAIT_S = 5.0
IO_COMMAND = (sys.executable, "-m", "tierkv.service.io_process")


def limits_of(tier: TierConfig, node: NodeConfig) -> TierLimits:
    """What the core must know of a configured tier before its store is open.

    What the store is, it says itself then: see `TieringManager.describe`. Until then nobody asks
    it, and what it is owed counts as lost if the daemon ends.
    """
    return TierLimits(
        name=tier.type,
        write_policy=tier.write_policy or node.write_policy,
        hits_min=tier.hits_min,
        is_indexed=False,
        is_durable=True,
        capacity=None if tier.capacity == "auto" else tier.capacity,
        read_threads=tier.read_threads,
        write_threads=tier.write_threads,
        backlog_max=tier.backlog_max,
        promote_min_tokens=tier.promote_min_tokens,
        deadline_s=tier.deadline_s,
    )


def settings_of(tier: TierConfig, owner: str) -> TierSettings:
    """What the I/O process must know of a configured tier."""
    return TierSettings(
        type=tier.type,
        path=str(tier.path) if tier.path is not None else None,
        url=tier.url,
        capacity=None if tier.capacity == "auto" else tier.capacity,
        reserve=tier.reserve,
        io=tier.io,
        read_threads=tier.read_threads,
        write_threads=tier.write_threads,
        deadline_s=tier.deadline_s,
        options=dict(tier.options) | ({"owner": owner} if tier.type == "fs" else {}),
    )


@dataclass(slots=True, eq=False)
class _Process:
    """One I/O process that serves or dies."""

    child: subprocess.Popen[bytes]
    end: socket.socket
    started_at: float
    epoch: int = 0
    unsent: list[io_wire.Do] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Seat:
    """Where the process of a tier sits.

    Attributes:
        serving: the process that gets jobs, or None.
        dying: killed or ended, not gone yet.
    """

    settings: TierSettings
    serving: _Process | None = None
    dying: list[_Process] = field(default_factory=list)
    start_at: float = 0.0
    pause_s: float = RESTART_FIRST_S
    last_problem: str = ""


class TierHost:
    """All I/O processes of a daemon.

    Args:
        pool, generation, run_directory: what they map, and where their locks lie.
        stores: per tier the store's numbers, for the statistics; filled here.
        command: how a process is started.
    """

    def __init__(
        self,
        tiers: Sequence[TierConfig],
        manager: TieringManager,
        *,
        pool: str,
        generation: int,
        run_directory: str,
        stores: list[dict[str, int]],
        command: Sequence[str] = IO_COMMAND,
    ) -> None:
        owner = f"{os.getpid()}-{generation}"
        self._seats = [_Seat(settings_of(tier, owner)) for tier in tiers]
        self._manager = manager
        self._pool = pool
        self._generation = generation
        self._run_directory = run_directory
        self._stores = stores
        self._command = list(command)

    def sockets(self) -> list[socket.socket]:
        """Ends to wait for."""
        return [s.serving.end for s in self._seats if s.serving is not None]

    def pids(self) -> list[int | None]:
        """Per tier the process that serves it."""
        return [s.serving.child.pid if s.serving is not None else None for s in self._seats]

    def step(self, now: float) -> None:
        """Take in what processes say; replace those that hang or ended; start those that lack."""
        for tier, seat in enumerate(self._seats):
            if seat.serving is not None:
                self._listen(tier, seat, now)
            self._reap(tier, seat, now)
        for tier in self._manager.hung(now):
            logger.warning("tier=%s hangs: its I/O process is replaced", self._name(tier))
            self._lose(tier, now)
        for tier, seat in enumerate(self._seats):
            has_room = len(seat.dying) < DYING_MAX
            if seat.serving is None and has_room and now >= seat.start_at:
                self._start(tier, seat, now)

    def hand_out(self, jobs: Sequence[Job], now: float) -> None:
        """Give jobs to their processes."""
        for job in jobs:
            process = self._seats[job.tier].serving
            assert process is not None, "jobs are made for tiers that are up"
            process.unsent.append(io_wire.Do(
                job.id, job.op, job.namespace, job.slot_bytes, [bytes(k) for k in job.keys],
                list(job.offsets), job.older_than_s,
            ))  # fmt: skip
        for tier, seat in enumerate(self._seats):
            if seat.serving is not None and seat.serving.unsent:
                self._send(tier, seat.serving, now)

    def close(self, wait_s: float = STOP_WAIT_S) -> None:
        """Let the processes end; those that do not are killed and left to the system."""
        waiting = []
        for seat in self._seats:
            process = seat.serving
            if process is not None:
                process.end.setblocking(True)
                process.end.settimeout(1.0)
                with contextlib.suppress(OSError):
                    io_wire.send(process.end, io_wire.Stop())
                waiting.append(process)
            waiting += seat.dying
        for process in waiting:
            try:
                process.child.wait(wait_s)
            except subprocess.TimeoutExpired:
                process.child.kill()
            process.end.close()

    # ---- steps ---------------------------------------------------------------------------------

    def _name(self, tier: int) -> str:
        return self._seats[tier].settings.type

    def _start(self, tier: int, seat: _Seat, now: float) -> None:
        seat.start_at = now + seat.pause_s
        seat.pause_s = min(RESTART_MAX_S, seat.pause_s * 2)
        begin = io_wire.Begin(seat.settings, self._pool, self._generation, self._run_directory)
        ends: list[socket.socket] = []
        try:
            ends += socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours, theirs = ends
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SOCKET_BYTES)
            ours.setblocking(False)
            command, number = self._command, theirs.fileno()
            child = subprocess.Popen(command, stdin=number, close_fds=True, cwd="/")
        except OSError as error:
            self._note_problem(tier, f"no I/O process can be started: {error.strerror}")
            for end in ends:
                end.close()
            return
        theirs.close()
        seat.serving = _Process(child, ours, now)
        try:
            io_wire.send(ours, begin)
        except OSError:
            self._lose(tier, now)  # it ended at once
            return
        logger.info("tier=%s I/O process started: pid=%d", self._name(tier), child.pid)

    def _listen(self, tier: int, seat: _Seat, now: float) -> None:
        process = seat.serving
        assert process is not None, "only called with a process"
        for _ in range(PACKETS_PER_STEP_MAX):
            try:
                message = io_wire.receive_in_daemon(process.end)
            except BlockingIOError:
                return
            except (ProtocolError, OSError) as error:
                logger.error("tier=%s: %s", self._name(tier), error)
                message = None
            if message is None:
                self._lose(tier, now)
                return
            self._take(tier, seat, message, now)
            if seat.serving is None:
                return

    def _take(self, tier: int, seat: _Seat, message: io_wire.ToDaemon, now: float) -> None:
        manager = self._manager
        match message:
            case io_wire.Outcomes():
                outcomes = [Outcome(o) if o in set(Outcome) else Outcome.FAILED
                            for o in message.outcomes]  # fmt: skip
                manager.outcomes(tier, message.job, outcomes, now)
            case io_wire.Changed():
                keys = [BlockKey(key) for key in message.keys]
                manager.changed(tier, NamespaceId(message.namespace), keys, message.is_added)
            case io_wire.Ended():
                manager.store_ended(tier, message.job, message.count, message.problems, now)
            case io_wire.Facts():
                self._stores[tier] = message.statistics
            case io_wire.Ready():
                manager.describe(tier, message.is_indexed, message.is_durable, message.capacity)
                manager.started(tier, False)
                seat.last_problem = ""
                logger.info("tier=%s is open: %s", self._name(tier), message.text)
            case io_wire.Scanned():
                manager.started(tier, True)
                known = manager.presence.counts[tier]
                logger.info("tier=%s is known whole: blocks=%d", self._name(tier), known)
            case io_wire.Broken():
                self._note_problem(tier, message.message)
                self._lose(tier, now)

    def _note_problem(self, tier: int, text: str) -> None:
        """Say why a tier is off, once per reason."""
        seat = self._seats[tier]
        if text != seat.last_problem:
            logger.error("tier=%s is off: %s", self._name(tier), text)
            seat.last_problem = text

    def _lose(self, tier: int, now: float) -> None:
        """The serving process ended or must end; a new one follows."""
        seat = self._seats[tier]
        process = seat.serving
        if process is None:
            return
        process.epoch = self._manager.process_lost(tier, now)
        process.child.kill()
        seat.serving = None
        seat.dying.append(process)
        if now - process.started_at >= STEADY_S:
            seat.pause_s, seat.start_at = RESTART_FIRST_S, now

    def _reap(self, tier: int, seat: _Seat, now: float) -> None:
        for process in list(seat.dying):
            if process.child.poll() is not None:
                seat.dying.remove(process)
                process.end.close()
                self._manager.process_gone(tier, process.epoch, now)
                code = process.child.returncode
                logger.info("tier=%s I/O process gone: status=%d", self._name(tier), code)

    def _send(self, tier: int, process: _Process, now: float) -> None:
        while process.unsent:
            try:
                io_wire.send(process.end, process.unsent[0])
            except BlockingIOError:
                return  # it does not read; its jobs' deadlines run
            except OSError:
                self._lose(tier, now)
                return
            del process.unsent[0]
