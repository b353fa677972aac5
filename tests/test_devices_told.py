"""What an engine tells of its devices: to daemons that know the message, and only to those."""

from __future__ import annotations

import pytest
import zmq

from tests.processes import WAIT_MAX_S, wait_for
from tierkv.device.facts import CopyFacts
from tierkv.pool import DaemonLock, make_private
from tierkv.service import wire
from tierkv.service.client import Client
from tierkv.service.connection import Link

FACTS = {1: CopyFacts(device="npu:1", rung="single"), 0: CopyFacts(device="npu:0", rung="batch")}
SILENCE_MS = 200  # what is said is there at once; this only bounds what is not


class Daemon:
    """The daemon's end of the socket, and nothing behind it."""

    def __init__(self, socket, lock: DaemonLock, generation: int) -> None:
        lock.tell(generation)
        self.generation = generation
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{socket}")

    def hear(self, client: Client, wait_ms: int = int(WAIT_MAX_S * 1000)) -> object:
        """The next message of the client; None if it says nothing."""
        for _ in range(max(1, wait_ms // 10)):
            client.poll()
            if self._socket.poll(10):
                self.peer, frame = self._socket.recv_multipart()
                return wire.decode_request(frame)
        return None

    def welcome(self, client: Client, version: int) -> None:
        hello = self.hear(client)
        assert isinstance(hello, wire.Hello)
        self.answer(client, hello, version)

    def answer(self, client: Client, hello: wire.Hello, version: int) -> None:
        reply = wire.Welcome(hello.seq, version, self.generation, "p", 1, False, "", 1)
        self._socket.send_multipart([self.peer, wire.encode(reply)])
        wait_for(lambda: client.link is Link.UP, client, what="the session")

    def close(self) -> None:
        self._socket.close()
        self._context.term()


@pytest.fixture
def world(tmp_path):
    """A socket, its lock, and a client that starts no daemon."""
    socket = make_private(tmp_path / "run") / "d.sock"
    lock = DaemonLock(socket)
    assert lock.acquire()
    client = Client(socket, "e" * 32, deadline_s=WAIT_MAX_S)
    yield socket, lock, client
    client.close()
    lock.release()


def ranks(message: object) -> list[tuple[int, str, str]]:
    assert isinstance(message, wire.Devices)
    return [(device.rank, device.device, device.rung) for device in message.ranks]


def test_devices_are_told_now_and_in_every_later_session(world):
    socket, lock, client = world
    told = [(0, "npu:0", "batch"), (1, "npu:1", "single")]
    client.say_devices(FACTS)
    for generation in (1, 2):
        daemon = Daemon(socket, lock, generation)
        daemon.welcome(client, wire.VERSION_MAX)
        assert ranks(daemon.hear(client)) == told
        client.say_devices(FACTS)
        assert ranks(daemon.hear(client)) == told
        daemon.close()


def test_a_daemon_that_does_not_know_the_message_never_gets_it(world):
    """Not even before it has told its version, when the one before it knew the message."""
    socket, lock, client = world
    daemon = Daemon(socket, lock, 1)
    daemon.welcome(client, wire.VERSION_DEVICES)
    daemon.close()
    daemon = Daemon(socket, lock, 2)
    hello = daemon.hear(client)
    assert isinstance(hello, wire.Hello)
    client.say_devices(FACTS)
    assert daemon.hear(client, SILENCE_MS) is None
    daemon.answer(client, hello, wire.VERSION_DEVICES - 1)
    client.say_devices(FACTS)
    assert daemon.hear(client, SILENCE_MS) is None
    daemon.close()
