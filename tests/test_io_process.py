"""The I/O process in this process: its loop, its border, and its respect for the pool."""

from __future__ import annotations

import dataclasses
import socket
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from tests.core_world import SPACE
from tests.processes import wait_for
from tierkv.core.values import Op
from tierkv.errors import ProtocolError, TierUnavailableError
from tierkv.pool import create_pool, held_locks
from tierkv.service import io_wire
from tierkv.service.io_process import IoProcess
from tierkv.tiers.base import TierSettings
from tierkv.tiers.memory import MemoryTier
from tierkv.types import FRAME_BYTES, Outcome

SLOT_BYTES = 8192
KEYS = [bytes([n]) * 33 for n in range(8)]


class Broken(MemoryTier):
    """Raises what a store should not raise, if the first key of a call says so."""

    def read(self, names, views):
        if names[0].key == KEYS[6]:
            raise RuntimeError("a bug of the store's client")
        if names[0].key == KEYS[7]:
            raise TierUnavailableError("the store is away")
        return super().read(names, views)


class Host:
    """The daemon's end of one I/O process that runs in a thread of the test."""

    def __init__(self, tmp_path: Path, make=MemoryTier):
        self.pool = create_pool(tmp_path / "pool", 8 * SLOT_BYTES, 8 * SLOT_BYTES)
        self.run = tmp_path / "run"
        self.end, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.settimeout(20)
        settings = TierSettings("memory", capacity=1 << 20)
        begin = io_wire.Begin(settings, str(self.pool.path), self.pool.generation, str(self.run))
        self.process = IoProcess(theirs, begin, make)
        self.thread = threading.Thread(target=self.process.run, daemon=True)
        self.thread.start()
        self.heard: list[object] = []
        self.number = 0

    def hear(self, kind):
        """The next message of a kind; others are kept in `heard`."""
        while True:
            message = io_wire.receive_in_daemon(self.end)
            assert message is not None, "the process ended"
            if isinstance(message, kind):
                return message
            self.heard.append(message)

    def post(self, op: Op, keys=(), slots=(), namespace: bytes | None = SPACE) -> int:
        self.number += 1
        offsets = [slot * SLOT_BYTES for slot in slots]
        io_wire.send(self.end, io_wire.Do(
            self.number, op, namespace, SLOT_BYTES, list(keys), offsets, None
        ))  # fmt: skip
        return self.number

    def do(self, op: Op, keys=(), slots=()) -> list[Outcome]:
        """A job to its end; its outcomes."""
        job, found = self.post(op, keys, slots), []
        while len(found) < len(keys):
            message = self.hear(io_wire.Outcomes)
            assert message.job == job
            found += [Outcome(o) for o in message.outcomes]
        return found

    def payload(self, slot: int):
        return self.pool.bytes[slot * SLOT_BYTES + FRAME_BYTES : (slot + 1) * SLOT_BYTES]

    def close(self) -> None:
        io_wire.send(self.end, io_wire.Stop())
        self.thread.join(20)
        self.end.close()
        self.pool.close()


@pytest.fixture
def start(tmp_path):
    hosts: list[Host] = []

    def make(*arguments):
        hosts.append(Host(tmp_path, *arguments))
        return hosts[-1]

    yield make
    for host in hosts:
        host.close()


def test_a_block_goes_down_and_comes_up_in_another_slot(start):
    host = start()
    host.payload(0)[:] = 7
    assert host.do(Op.WRITE, KEYS[:1], [0]) == [Outcome.OK]
    assert host.do(Op.READ, KEYS[:1], [3]) == [Outcome.OK]
    assert (host.payload(3) == 7).all()


def test_the_first_message_says_what_the_store_is(start):
    """The daemon believes the store and nothing else, so it comes before what the store holds."""
    ready = io_wire.receive_in_daemon(start().end)
    assert isinstance(ready, io_wire.Ready)
    assert (ready.is_indexed, ready.is_durable, ready.capacity) == (True, False, 1 << 20)
    assert "TierInfo(type='memory'" in ready.text


class Endless(MemoryTier):
    """A store with other answers than the one it is made of."""

    @property
    def info(self):
        return dataclasses.replace(super().info, is_indexed=False, is_durable=True, capacity=None)


def test_a_store_without_a_bound_says_so(start):
    ready = io_wire.receive_in_daemon(start(Endless).end)
    assert isinstance(ready, io_wire.Ready)
    assert (ready.is_indexed, ready.is_durable, ready.capacity) == (False, True, None)


def test_changes_are_told_before_the_outcome_that_they_belong_to(start):
    host = start()
    host.do(Op.WRITE, KEYS[:2], [0, 1])
    (change,) = [m for m in host.heard if isinstance(m, io_wire.Changed)]
    assert (change.namespace, change.keys, change.is_added) == (SPACE, KEYS[:2], True)


def test_a_missing_block_is_missing(start):
    host = start()
    assert host.do(Op.READ, KEYS[:1], [0]) == [Outcome.MISSING]
    assert host.do(Op.PROBE, KEYS[:2]) == [Outcome.MISSING] * 2


class Narrow(MemoryTier):
    """Takes two names in a call, and remembers what it was asked."""

    asked: ClassVar[list[int]] = []

    @property
    def info(self):
        return dataclasses.replace(super().info, batch_max=2)

    def probe(self, names):
        self.asked.append(len(names))
        return super().probe(names)


def test_nothing_is_asked_about_blocks_behind_a_hole(start):
    Narrow.asked.clear()
    host = start(Narrow)
    host.do(Op.WRITE, [KEYS[0], KEYS[1], KEYS[2], KEYS[6]], [0, 1, 2, 3])
    found = host.do(Op.PROBE, KEYS[:8])
    assert found == [Outcome.OK] * 3 + [Outcome.MISSING] * 5
    assert Narrow.asked == [2, 2]


def test_whatever_a_store_raises_is_a_failed_operation(start):
    host = start(Broken)
    assert host.do(Op.READ, KEYS[6:7], [0]) == [Outcome.FAILED]
    assert host.do(Op.READ, KEYS[7:8], [0]) == [Outcome.FAILED]
    assert host.do(Op.READ, KEYS[:1], [0]) == [Outcome.MISSING], "it goes on"


def test_nothing_is_read_into_the_pool_of_another_generation(start, tmp_path):
    host = start()
    host.payload(0)[:] = 7
    host.do(Op.WRITE, KEYS[:1], [0])
    host.pool.close()
    adopted = create_pool(tmp_path / "pool", 8 * SLOT_BYTES, 8 * SLOT_BYTES)
    assert adopted.was_adopted
    assert host.do(Op.READ, KEYS[:1], [3]) == [Outcome.FAILED]
    assert (adopted.bytes[3 * SLOT_BYTES : 4 * SLOT_BYTES] == 0).all()
    adopted.close()


def test_a_process_holds_a_mapper_lock_that_says_when_it_is_idle(start):
    host = start()
    host.do(Op.PROBE, KEYS[:1])
    name = "io-memory"
    wait_for(lambda: held_locks(host.run)[name].idle_mappers == 1, what="the job to be counted off")
    assert held_locks(host.run)[name].mappers == 1


def test_purge_and_check_answer_with_counts(start):
    host = start()
    host.do(Op.WRITE, KEYS[:3], [0, 1, 2])
    host.post(Op.CHECK, namespace=None)
    checked = host.hear(io_wire.Ended)
    assert (checked.count, checked.problems) == (3, [])
    host.post(Op.PURGE)
    assert host.hear(io_wire.Ended).count == 3
    assert host.do(Op.READ, KEYS[:1], [4]) == [Outcome.MISSING]


def test_a_store_is_known_whole_after_its_scan_and_tells_its_numbers(start):
    host = start()
    host.hear(io_wire.Scanned)
    assert host.hear(io_wire.Facts).statistics["blocks"] == 0


def test_garbage_of_a_process_is_refused():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        for packet in (b"\xc1", b"hello", b"\x93\x01\x02\x03"):
            theirs.send(packet)
            with pytest.raises(ProtocolError):
                io_wire.receive_in_daemon(ours)
        theirs.close()
        assert io_wire.receive_in_daemon(ours) is None
