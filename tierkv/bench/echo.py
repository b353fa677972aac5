"""A bare ZMQ echo between two processes: what an empty round trip costs without TierKV.

Both sides do the least that a peer can do which must not block: poll, receive one frame without
waiting, answer at once. The ratio to a Ping is then TierKV's own work: encoding, sessions,
deadlines and bookkeeping.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import zmq

WAIT_MS = 2_000
STOP = b""


class EchoServer:
    """The side that answers. `serve_phase` costs next to nothing while nobody asks."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{path}")

    def serve_phase(self) -> None:
        """If a peer has sent something, echo until it says `STOP` or falls silent."""
        if self._socket.poll(0) == 0:
            return
        while self._socket.poll(WAIT_MS):
            with contextlib.suppress(zmq.Again):
                while True:
                    peer, frame = self._socket.recv_multipart(zmq.NOBLOCK)
                    self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
                    if frame == STOP:
                        return

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()
        self._context.term()


class EchoClient:
    """The side that asks."""

    def __init__(self, path: Path) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{path}")

    def send(self, frame: bytes) -> None:
        """Send without waiting for the echo."""
        self._socket.send(frame, zmq.NOBLOCK)

    def receive(self) -> bytes:
        """Wait for one echo.

        Raises:
            TimeoutError: none came within `WAIT_MS`.
        """
        while self._socket.poll(WAIT_MS):
            with contextlib.suppress(zmq.Again):
                return self._socket.recv(zmq.NOBLOCK)
        raise TimeoutError(f"no echo within {WAIT_MS} ms")

    def close(self) -> None:
        """Free the socket."""
        self._socket.close()
        self._context.term()


@contextlib.contextmanager
def echo_client(path: Path) -> Iterator[EchoClient]:
    """An `EchoClient`, closed at the end."""
    client = EchoClient(path)
    try:
        yield client
    finally:
        client.close()
