"""Messages between the daemon and the I/O process of a tier, over a socket pair.

One message per packet, msgpack. Both ends are ours; limits stand here all the same, because a
process whose native store client went wrong must not take the daemon along.
"""

from __future__ import annotations

import socket
from typing import Annotated, TypeVar

import msgspec

from tierkv.errors import ProtocolError
from tierkv.tiers.base import TierSettings

PACKET_BYTES_MAX = 192 << 10  # below the smallest default of a socket's buffer
KEYS_MAX = 1_024
CHANGES_MAX = 1_000
PROBLEMS_MAX = 100
TEXT_MAX = 500

Key = Annotated[bytes, msgspec.Meta(max_length=65)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Keys = Annotated[list[Key], msgspec.Meta(max_length=KEYS_MAX)]


class _Packet(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


class Begin(_Packet, frozen=True):
    """The first packet: which store, and which pool its bytes come from and go to."""

    settings: TierSettings
    pool: str
    generation: int
    run_directory: str


class Do(_Packet, frozen=True):
    """A job; see `tierkv.core.values.Job`."""

    id: int
    op: int
    namespace: bytes | None
    slot_bytes: int
    keys: Keys
    offsets: Annotated[list[int], msgspec.Meta(max_length=KEYS_MAX)]
    older_than_s: float | None


class Stop(_Packet, frozen=True):
    """Close the store and end."""


class Ready(_Packet, frozen=True):
    """The store is open, and this is what it is; see `tierkv.tiers.base.TierInfo`."""

    is_indexed: bool
    is_durable: bool
    capacity: Annotated[int, msgspec.Meta(ge=0)] | None
    text: Text  # all of it, for the log


class Scanned(_Packet, frozen=True):
    """Everything that an indexed store holds has been told."""


class Broken(_Packet, frozen=True):
    """The store cannot be opened; the process ends."""

    message: Text


class Outcomes(_Packet, frozen=True):
    """What became of the next keys of a job, one byte each."""

    job: int
    outcomes: Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX)]


class Ended(_Packet, frozen=True):
    """A job on the whole store ended. `count`: blocks removed, or blocks that are there."""

    job: int
    count: int
    problems: Annotated[list[Text], msgspec.Meta(max_length=PROBLEMS_MAX)]


class Changed(_Packet, frozen=True):
    """Blocks that came or went."""

    namespace: bytes
    keys: Keys
    is_added: bool


class Facts(_Packet, frozen=True):
    """The store's counters and gauges."""

    statistics: dict[str, int]


ToProcess = Begin | Do | Stop
ToDaemon = Ready | Scanned | Broken | Outcomes | Ended | Changed | Facts
_Message = TypeVar("_Message")

_encoder = msgspec.msgpack.Encoder()
_to_process = msgspec.msgpack.Decoder(ToProcess)
_to_daemon = msgspec.msgpack.Decoder(ToDaemon)


def send(end: socket.socket, message: ToProcess | ToDaemon) -> None:
    """Send one message.

    Raises:
        BlockingIOError: the other end does not read, on a socket that does not block.
        OSError: the other end is gone.
    """
    end.send(_encoder.encode(message))


def receive_in_process(end: socket.socket) -> ToProcess | None:
    """Wait for a message of the daemon; None: it is gone."""
    packet = end.recv(PACKET_BYTES_MAX)
    return _to_process.decode(packet) if packet else None


def receive_in_daemon(end: socket.socket) -> ToDaemon | None:
    """The next message of a process; None: it is gone.

    Raises:
        BlockingIOError: there is none now.
        ProtocolError: it sent something else.
    """
    packet = end.recv(PACKET_BYTES_MAX)
    if not packet:
        return None
    try:
        return _to_daemon.decode(packet)
    except (msgspec.DecodeError, ValueError) as error:
        raise ProtocolError(f"an I/O process sent no message of ours: {error}") from error
