"""The I/O process of one tier: maps the pool, runs the store's calls in threads, tells outcomes.

A process of its own, because Python work in threads would delay the daemon's loop, a thread stuck
in uninterruptible I/O cannot be removed, and a crash in a native client must not take the index
along. Run as ``python -m tierkv.service.io_process``; its socket is file descriptor 0.

Rule 1: it decides nothing. What to do comes from the daemon, one outcome per key goes back.
Rule 2: this is the border where anything that a store raises becomes `FAILED`.
Rule 3: it holds a mapper lock and counts what it has in flight, like every process that maps the
pool, so that a daemon that adopts the pool knows when nothing of ours can write into it any more.
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from tierkv.core.values import Op
from tierkv.errors import TierKVError, TierUnavailableError
from tierkv.pool import MapperLock, Pool, attach_pool
from tierkv.service import io_wire
from tierkv.tiers import open_tier
from tierkv.tiers.base import BlockName, Tier, TierSettings, read_verified, write_sealed
from tierkv.types import BlockKey, EngineId, NamespaceId, Outcome

logger = logging.getLogger(__name__)

PIECE_BYTES_MAX = 4 << 20  # one call of the tier; its outcomes go back at once
FACTS_PERIOD_S = 1.0
THREADS_MAX = 128
CLOSE_WAIT_S = 0.5
CLOSE_LOOKS_MAX = 4  # then the store is closed under a call that hangs
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_libc = ctypes.CDLL(None, use_errno=True)


class Threads:
    """Threads made on demand: a job never waits behind one that hangs.

    The daemon hands out no more jobs than the tier has threads, hung ones not counted.
    """

    def __init__(self, name: str, run: Callable[[io_wire.Do], None]) -> None:
        self._name = name
        self._run = run
        self._jobs: queue.SimpleQueue[io_wire.Do] = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._count = 0

    def put(self, job: io_wire.Do) -> None:
        """Run a job in a thread that is free, or a new one."""
        self._jobs.put(job)
        if not self._idle.acquire(blocking=False) and self._count < THREADS_MAX:
            self._count += 1
            name = f"{self._name}-{self._count}"
            threading.Thread(target=self._loop, name=name, daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._run(self._jobs.get())
            self._idle.release()


class IoProcess:
    """Serves one tier until the daemon says stop or is gone."""

    def __init__(
        self, end: socket.socket, begin: io_wire.Begin, make: Callable[[TierSettings], Tier]
    ) -> None:
        self._end = end
        self._sending = threading.Lock()
        self._telling = threading.Lock()
        self._in_flight = 0
        self._counting = threading.Lock()
        self._generation = begin.generation
        self._lock = MapperLock(Path(begin.run_directory), EngineId(f"io-{begin.settings.type}"))
        self._lock.note_copies(0)
        self._pool: Pool = attach_pool(Path(begin.pool))
        self._bytes = self._pool.bytes.data
        self._errors = 0
        self._stop = threading.Event()
        self._scanner = threading.Thread(target=self._scan, name="scan", daemon=True)
        self._idle = threading.Event()
        self._idle.set()
        self.tier = make(begin.settings)
        self._reads = Threads("read", self._do)
        self._writes = Threads("write", self._do)
        self._tasks = Threads("task", self._do_on_store)

    def run(self) -> None:
        """Serve. Returns after `Stop`; ends the process when the daemon is gone."""
        info = self.tier.info
        self._send(io_wire.Ready(
            bool(info.is_indexed), bool(info.is_durable), info.capacity,
            str(info)[: io_wire.TEXT_MAX],
        ))  # fmt: skip
        self._scanner.start()
        while True:
            message = io_wire.receive_in_process(self._end)
            if message is None:
                os._exit(0)  # threads may hang in the store; nothing of ours is worth a wait
            if isinstance(message, io_wire.Stop):
                break
            if isinstance(message, io_wire.Do):
                self._accept(message)
        self._stop.set()
        for _ in range(CLOSE_LOOKS_MAX):
            if self._idle.wait(CLOSE_WAIT_S):
                break
        self._scanner.join(CLOSE_WAIT_S * CLOSE_LOOKS_MAX)
        self.tier.close()
        self._tell_changes()

    def _accept(self, job: io_wire.Do) -> None:
        self._count(1)
        if job.op in (Op.PURGE, Op.CHECK):
            self._tasks.put(job)
        elif job.op in (Op.READ, Op.PROBE):
            self._reads.put(job)
        else:
            self._writes.put(job)

    # ---- jobs ----------------------------------------------------------------------------------

    def _do(self, job: io_wire.Do) -> None:
        try:
            self._do_in_pieces(job)
        finally:
            self._count(-1)

    def _do_in_pieces(self, job: io_wire.Do) -> None:
        namespace = NamespaceId(job.namespace or b"")
        names = [BlockName(namespace, BlockKey(key)) for key in job.keys]
        most = self.tier.info.batch_max
        if job.offsets:
            most = max(1, min(most, PIECE_BYTES_MAX // job.slot_bytes))
        for first in range(0, len(names), most):
            if self._stop.is_set():
                return  # nobody listens any more
            piece = names[first : first + most]
            offsets = job.offsets[first : first + most]
            outcomes = self._guarded(job, piece, offsets)
            self._tell_changes()
            self._send(io_wire.Outcomes(job.id, bytes(outcomes)))
            if job.op == Op.PROBE and Outcome.MISSING in outcomes and first + most < len(names):
                # The keys are one prefix: nobody can use what lies behind a hole.
                rest = len(names) - first - most
                self._send(io_wire.Outcomes(job.id, bytes([Outcome.MISSING] * rest)))
                return

    def _guarded(
        self, job: io_wire.Do, names: list[BlockName], offsets: list[int]
    ) -> list[Outcome]:
        """One call of the tier, whatever it raises."""
        try:
            if offsets and self._pool.generation != self._generation:
                return [Outcome.FAILED] * len(names)  # another daemon owns the slots by now
            views = [self._bytes[at : at + job.slot_bytes] for at in offsets]
            outcomes = self._call(job.op, names, views)
            assert len(outcomes) == len(names), "one outcome per name"
            return outcomes
        except TierUnavailableError as error:
            logger.warning("tier op=%s keys=%d: %s", Op(job.op).name, len(names), error)
            return [Outcome.FAILED] * len(names)
        except Exception:
            self._errors += 1
            logger.exception("tier op=%s keys=%d failed", Op(job.op).name, len(names))
            return [Outcome.FAILED] * len(names)

    def _call(self, op: int, names: list[BlockName], views: list[memoryview]) -> list[Outcome]:
        match op:
            case Op.READ:
                return read_verified(self.tier, names, views)
            case Op.WRITE:
                return write_sealed(self.tier, names, views)
            case Op.PROBE:
                return self.tier.probe(names)
            case Op.DROP:
                return self.tier.drop(names)
            case _:
                self.tier.touch(names)
                return [Outcome.OK] * len(names)

    def _do_on_store(self, job: io_wire.Do) -> None:
        count, problems = 0, []
        try:
            if job.op == Op.PURGE:
                namespace = NamespaceId(job.namespace) if job.namespace is not None else None
                count = self.tier.purge(namespace, job.older_than_s)
            else:
                problems = self.tier.check()[: io_wire.PROBLEMS_MAX]
                count = self.tier.statistics().get("blocks", 0)
        except TierUnavailableError as error:
            logger.warning("tier op=%s: %s", Op(job.op).name, error)
            problems = [str(error)]
        except Exception as error:
            self._errors += 1
            logger.exception("tier op=%s failed", Op(job.op).name)
            problems = [f"{Op(job.op).name.lower()} failed: {error}"]
        self._count(-1)
        self._tell_changes()
        self._send(io_wire.Ended(job.id, count, [p[: io_wire.TEXT_MAX] for p in problems]))

    def _count(self, step: int) -> None:
        with self._counting:
            self._in_flight += step
            if self._in_flight == 0:
                self._idle.set()
            else:
                self._idle.clear()
            self._lock.note_copies(self._in_flight)

    # ---- telling -------------------------------------------------------------------------------

    def _send(self, message: io_wire.ToDaemon) -> None:
        with self._sending:
            try:
                io_wire.send(self._end, message)
            except OSError:
                os._exit(0)  # the daemon is gone

    def _tell_changes(self) -> None:
        """Tell what came and went, in its order, before the outcome that it belongs to."""
        with self._telling:
            while changes := self.tier.take_changes(io_wire.CHANGES_MAX):
                runs: deque[io_wire.Changed] = deque()
                for change in changes:
                    name, last = change.name, runs[-1] if runs else None
                    is_same = (
                        last is not None
                        and last.namespace == name.namespace
                        and last.is_added == change.is_added
                    )
                    if last is not None and is_same:
                        last.keys.append(name.key)
                    else:
                        runs.append(io_wire.Changed(name.namespace, [name.key], change.is_added))
                for run in runs:
                    self._send(run)

    def _scan(self) -> None:
        """Tell what is there from before, then the store's numbers now and then."""
        is_whole = False
        told: dict[str, int] = {}
        while not self._stop.wait(FACTS_PERIOD_S if is_whole else 0.0):
            try:
                is_done = self.tier.scan()
                facts = self.tier.statistics() | {"errors": self._errors}
            except Exception:
                self._errors += 1
                logger.exception("scan failed")
                self._stop.wait(FACTS_PERIOD_S)
                continue
            self._tell_changes()
            if is_done and not is_whole:
                self._send(io_wire.Scanned())
            is_whole = is_done
            if facts != told:
                self._send(io_wire.Facts(facts))
                told = facts


def _name_process(text: str) -> None:
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(text.encode()[:15]), 0, 0, 0)


def main(make: Callable[[TierSettings], Tier] = open_tier) -> None:
    """Serve the daemon whose socket is file descriptor 0.

    Args:
        make: opens the store; for people who try out tiers of their own.
    """
    parent = os.getppid()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the daemon flushes first, then says stop
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s tierkv-io[%(process)d] %(levelname)s %(message)s",
    )
    end = socket.socket(fileno=0)
    begin = io_wire.receive_in_process(end)
    if not isinstance(begin, io_wire.Begin) or os.getppid() != parent:
        return
    _name_process(f"tierkv-io {begin.settings.type}")
    try:
        process = IoProcess(end, begin, make)
    except (TierKVError, OSError) as error:
        io_wire.send(end, io_wire.Broken(str(error)[: io_wire.TEXT_MAX]))
        return
    except Exception as error:
        logger.exception("the store cannot be opened")
        text = f"{begin.settings.type} raised {type(error).__name__}: {error}"
        io_wire.send(end, io_wire.Broken(text[: io_wire.TEXT_MAX]))
        return
    try:
        process.run()
    except Exception:
        logger.exception("the store could not be closed")
    finally:
        os._exit(0)  # threads that hang in the store must not keep the process


if __name__ == "__main__":
    main()
