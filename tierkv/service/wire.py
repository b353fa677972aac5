"""The wire protocol: typed messages with limits, msgpack, over one ZMQ ROUTER/DEALER pair.

Rule 1: bytes of KV never cross the socket; messages carry keys, offsets and leases.
Rule 2: every message of a client has a sequence number. A connection is FIFO, so a reply to number
n acknowledges everything up to n. One-way messages are `Detach`, `Commit`, `Release`, `Trim`,
`Touch`, `Abandon`, `Outcome`, `Devices`, `Quiesced` and `Bye`; every other message of a client is
answered, errors included.
Rule 3: nothing is executed or trusted. Bad input closes that session and nothing else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from tierkv.errors import ProtocolError
from tierkv.types import BlockKey

VERSION_MIN = 2
VERSION_MAX = 3
VERSION_DEVICES = 3  # the first one with `Devices`
MESSAGE_BYTES_MAX = 16 << 20
KEYS_MAX = 65_536
KEY_BYTES_MAX = 65
LEASES_MAX = 16_384
TIERS_MAX = 8
RANKS_MAX = 1024
TEXT_MAX = 1024
AGE_MAX_S = 1e10  # some 300 years

Seq = Annotated[int, msgspec.Meta(ge=1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Text = Annotated[str, msgspec.Meta(max_length=TEXT_MAX)]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Keys = Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX * KEY_BYTES_MAX)]
KeyBytes = Annotated[int, msgspec.Meta(ge=2, le=KEY_BYTES_MAX)]
Leases = Annotated[list[Count], msgspec.Meta(max_length=LEASES_MAX)]


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    pass


# ---- client to daemon --------------------------------------------------------------------------


class Hello(_Message, frozen=True):
    """Opens a session.

    Attributes:
        version_min, version_max: protocol versions that the client speaks.
        engine: id of the engine; empty for an administrator, who may ask but not cache.
        is_return: the engine had a session before; its leases that are not in `held` end.
        held: leases whose slots the engine may still touch.
        node: the engine's `node:` configuration, to tell differences.
    """

    seq: Seq
    version_min: Count
    version_max: Count
    engine: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[A-Za-z0-9_-]*\Z")]
    is_return: bool
    held: Leases
    node: Annotated[str, msgspec.Meta(max_length=65_536)]


class Attach(_Message, frozen=True):
    """Makes a namespace usable for this session.

    Attributes:
        is_private: for this engine alone; such blocks never leave DRAM.
        block_tokens: tokens per block; 0 if unknown.
    """

    seq: Seq
    namespace: Digest
    slot_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
    label: Text
    is_private: bool
    block_tokens: Count = 0


class Detach(_Message, frozen=True):
    """Ends the use of a namespace; a private one is purged."""

    seq: Seq
    namespace: Digest


class Lookup(_Message, frozen=True):
    seq: Seq
    namespace: Digest
    key_bytes: KeyBytes
    keys: Keys


class Reserve(_Message, frozen=True):
    """`runs`: per run its predecessor (empty: none) and its number of keys."""

    seq: Seq
    namespace: Digest
    key_bytes: KeyBytes
    keys: Keys
    runs: Annotated[
        list[tuple[Annotated[bytes, msgspec.Meta(max_length=KEY_BYTES_MAX)], Count]],
        msgspec.Meta(max_length=KEYS_MAX),
    ]


class Commit(_Message, frozen=True):
    """`is_ok`: one byte per granted block, 1 if all its bytes are in place."""

    seq: Seq
    lease: Count
    is_ok: Annotated[bytes, msgspec.Meta(max_length=KEYS_MAX)]


class Release(_Message, frozen=True):
    seq: Seq
    leases: Leases


class Trim(_Message, frozen=True):
    seq: Seq
    lease: Count
    blocks: Count


class Touch(_Message, frozen=True):
    seq: Seq
    namespace: Digest
    key_bytes: KeyBytes
    keys: Keys


class Abandon(_Message, frozen=True):
    """The client gave up waiting for the reply to `request`; what it granted is taken back."""

    seq: Seq
    request: Seq


class Outcome(_Message, frozen=True):
    """Where the prompt tokens of one admitted request came from.

    Attributes:
        tiers: tokens by source: DRAM, then the secondary tiers in order.
    """

    seq: Seq
    device: Count
    tiers: Annotated[list[Count], msgspec.Meta(max_length=1 + TIERS_MAX)]
    computed: Count


class Device(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How one rank's copies are made; see `tierkv.device.base.CopyFacts`. Sizes in bytes."""

    rank: Count
    device: Text
    rung: Text
    registered: Count
    pool: Count
    staging: Count
    device_bytes: Count
    problem: Text


class Devices(_Message, frozen=True):
    """How all ranks of the engine copy, for statistics; replaces what was told before."""

    seq: Seq
    ranks: Annotated[list[Device], msgspec.Meta(max_length=RANKS_MAX)]


class Quiesced(_Message, frozen=True):
    """The engine knows the generation and has nothing in flight from an older one."""

    seq: Seq
    generation: Count


class Bye(_Message, frozen=True):
    seq: Seq


class Ping(_Message, frozen=True):
    seq: Seq


class Stats(_Message, frozen=True):
    seq: Seq


class Check(_Message, frozen=True):
    seq: Seq


class Purge(_Message, frozen=True):
    """Drops blocks. Answered when no older work is left that could bring one back.

    Attributes:
        namespace: leading hex digits of one namespace; empty for all.
        tiers: names of tiers, `dram` among them; empty for all.
        older_than_s: only blocks not used for this time; 0 for all.
    """

    seq: Seq
    namespace: Annotated[str, msgspec.Meta(max_length=64, pattern=r"^[0-9a-f]*\Z")]
    tiers: Annotated[list[Text], msgspec.Meta(max_length=1 + TIERS_MAX)] = []
    older_than_s: Annotated[float, msgspec.Meta(ge=0, le=AGE_MAX_S)] = 0.0


Request = (
    Hello | Attach | Detach | Lookup | Reserve | Commit | Release | Trim | Touch | Abandon | Outcome
    | Devices | Quiesced | Bye | Ping | Stats | Check | Purge
)  # fmt: skip


# ---- daemon to client --------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    """Answer to Hello.

    Attributes:
        must_quiesce: the engine mapped the pool under an older generation; nobody gets a slot
            before it says `Quiesced`.
        node: the daemon's `node:` configuration.
    """

    to: Seq
    version: Count
    generation: Count
    pool: str
    capacity: Count
    must_quiesce: bool
    node: str
    pid: Count


class Done(_Message, frozen=True):
    """Answer to Attach and Ping. `ignored`: leases named in vain so far."""

    to: Seq
    ignored: Count
    count: Count


class FoundReply(_Message, frozen=True):
    """`is_promoting`: some of the pending blocks come from a tier, not from another engine."""

    to: Seq
    ignored: Count
    lease: Count
    offsets: bytes
    pending: Count
    is_promoting: bool


class PurgedReply(_Message, frozen=True):
    """`dropped`: blocks by tier. `problems`: tiers that did not answer, and why."""

    to: Seq
    dropped: dict[str, Count]
    problems: list[str]


class CheckedReply(_Message, frozen=True):
    """Answer to Check: the books of DRAM are right; `problems` tells of the tiers."""

    to: Seq
    blocks: Count
    problems: list[str]


class GrantedReply(_Message, frozen=True):
    to: Seq
    ignored: Count
    lease: Count
    offsets: bytes


class StatsReply(_Message, frozen=True):
    """`body`: JSON text, the same that `tierkv stats --json` prints."""

    to: Seq
    body: str


class Failed(_Message, frozen=True):
    """A request that cannot be served. `code`: version, protocol, refused, closed, check."""

    to: Count
    code: str
    message: str


class ReadyPush(_Message, frozen=True):
    """A growing lease: offsets of all its readable blocks.

    Attributes:
        sources: per block 0 if DRAM had it, else 1 + the number of the tier it came from.
        pending: blocks behind them that may still come; 0: nothing more will.
    """

    lease: Count
    offsets: bytes
    sources: bytes
    pending: Count
    is_promoting: bool


class RecallPush(_Message, frozen=True):
    lease: Count


Reply = (
    Welcome | Done | FoundReply | GrantedReply | StatsReply | PurgedReply | CheckedReply | Failed
    | ReadyPush | RecallPush
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """One message as one ZMQ frame."""
    return _encoder.encode(message)


def decode_request(frame: bytes | memoryview) -> Request:
    """Decode what a client sent.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    try:
        return _request_decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message of this protocol: {error}") from error


def decode_reply(frame: bytes | memoryview) -> Reply:
    """Decode what the daemon sent.

    Raises:
        ProtocolError: it is no message of this protocol.
    """
    try:
        return _reply_decoder.decode(frame)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a reply of this protocol: {error}") from error


def split_keys(keys: bytes, key_bytes: int) -> list[BlockKey]:
    """Cut joined keys apart.

    Raises:
        ProtocolError: the length is no multiple, or a key stands twice.
    """
    if len(keys) % key_bytes:
        raise ProtocolError(f"{len(keys)} bytes are no whole number of {key_bytes}-byte keys")
    if len(keys) // key_bytes > KEYS_MAX:
        raise ProtocolError(f"more than {KEYS_MAX} keys in one message")
    found = [BlockKey(keys[at : at + key_bytes]) for at in range(0, len(keys), key_bytes)]
    if len(set(found)) != len(found):
        raise ProtocolError("a key stands twice in one message")
    return found


def pack_offsets(offsets: npt.NDArray[np.int64]) -> bytes:
    """Offsets as little-endian 64-bit integers."""
    return offsets.astype("<i8", copy=False).tobytes()


def unpack_offsets(packed: bytes) -> npt.NDArray[np.int64]:
    """Inverse of `pack_offsets`.

    Raises:
        ProtocolError: the length is no multiple of 8.
    """
    if len(packed) % 8:
        raise ProtocolError("offsets are no whole number of 64-bit integers")
    return np.frombuffer(packed, "<i8")
