"""The wire protocol: every message survives, everything else is refused, and nothing runs."""

from __future__ import annotations

import os
import pickle
import random
import typing

import msgspec
import numpy as np
import pytest

from tierkv.errors import ProtocolError
from tierkv.service import wire
from tierkv.service.wire import (
    KEY_BYTES_MAX,
    KEYS_MAX,
    LEASES_MAX,
    MESSAGE_BYTES_MAX,
    decode_reply,
    decode_request,
    encode,
    pack_offsets,
    split_keys,
    unpack_offsets,
)

SPACE = bytes(range(32))
TOP = 1 << 62
KEYS = bytes(range(66))  # two keys of 33 bytes
OFFSETS = pack_offsets(np.array([0, 4096, -1], np.int64))

REQUESTS = [
    wire.Hello(1, 1, 1, "engine-0_A", False, [], "{}"),
    wire.Hello(TOP, 0, TOP, "", True, [0, TOP], '{"dram": {"capacity": "1GiB"}}'),
    wire.Attach(2, SPACE, 1 << 40, "a model, größer", True, 128),
    wire.Detach(3, SPACE),
    wire.Lookup(3, SPACE, 33, KEYS),
    wire.Lookup(3, SPACE, 2, b""),
    wire.Reserve(4, SPACE, 33, KEYS, [(b"", 1), (b"p" * 33, 1)]),
    wire.Commit(5, TOP, b"\x01\x00"),
    wire.Release(6, [1, 2, TOP]),
    wire.Trim(7, 1, 0),
    wire.Touch(8, SPACE, 33, KEYS),
    wire.Abandon(9, 8),
    wire.Outcome(10, 1, [2, 4], 3),
    wire.Devices(10, [wire.Device(0, "npu:0", "batch", 1, 2, 3, 4, "")]),
    wire.Quiesced(11, 5),
    wire.Bye(12),
    wire.Ping(13),
    wire.Stats(14),
    wire.Check(15),
    wire.Purge(16, ""),
    wire.Purge(16, "0123456789abcdef" * 4, ["dram", "fs"], 3600.0),
]
REPLIES = [
    wire.Welcome(1, 1, 7, "/dev/shm/x.pool", 1 << 40, True, "{}", 4242),
    wire.Done(2, 0, 5),
    wire.FoundReply(3, 0, 1, OFFSETS, 4, True),
    wire.GrantedReply(4, 1, 0, b""),
    wire.StatsReply(5, "{}"),
    wire.Failed(0, "protocol", "no message"),
    wire.PurgedReply(6, {"dram": 2, "fs": TOP}, ["object does not answer"]),
    wire.CheckedReply(7, 3, []),
    wire.ReadyPush(1, OFFSETS, b"\0\1\0", 2, True),
    wire.RecallPush(1),
]


def name_of(message: object) -> str:
    return type(message).__name__


def refuse(frame: bytes) -> None:
    for decode in (decode_request, decode_reply):
        with pytest.raises(ProtocolError):
            decode(frame)


# ---- messages ----------------------------------------------------------------------------------


@pytest.mark.parametrize("message", REQUESTS, ids=name_of)
def test_a_request_survives_the_way(message):
    assert decode_request(encode(message)) == message
    assert decode_request(memoryview(encode(message))) == message


@pytest.mark.parametrize("message", REPLIES, ids=name_of)
def test_a_reply_survives_the_way(message):
    assert decode_reply(encode(message)) == message
    assert decode_reply(memoryview(encode(message))) == message


def test_every_message_of_the_protocol_is_tried_here():
    assert {type(m) for m in REQUESTS} == set(typing.get_args(wire.Request))
    assert {type(m) for m in REPLIES} == set(typing.get_args(wire.Reply))


@pytest.mark.parametrize("message", REPLIES, ids=name_of)
def test_a_client_cannot_send_what_only_the_daemon_says(message):
    with pytest.raises(ProtocolError):
        decode_request(encode(message))


@pytest.mark.parametrize("message", REQUESTS, ids=name_of)
def test_a_daemon_cannot_send_what_only_a_client_says(message):
    with pytest.raises(ProtocolError):
        decode_reply(encode(message))


def test_a_message_never_changes():
    with pytest.raises(AttributeError):
        REQUESTS[0].seq = 5


def test_encoding_is_the_same_every_time():
    assert [encode(m) for m in REQUESTS] == [encode(m) for m in REQUESTS]


# ---- limits ------------------------------------------------------------------------------------

TOO_MUCH = {
    "sequence number 0": wire.Ping(0),
    "negative sequence number": wire.Ping(-1),
    "sequence number that is text": wire.Ping("1"),
    "sequence number that is a fraction": wire.Ping(1.5),
    "count below 0": wire.Trim(1, -1, 0),
    "count above its maximum": wire.Trim(1, TOP + 1, 0),
    "abandoned request 0": wire.Abandon(1, 0),
    "engine name too long": wire.Hello(1, 1, 1, "e" * 65, False, [], ""),
    "engine name with a slash": wire.Hello(1, 1, 1, "../e", False, [], ""),
    "engine name with a dot": wire.Hello(1, 1, 1, "e.1", False, [], ""),
    "engine name with a line end": wire.Hello(1, 1, 1, "e\n", False, [], ""),
    "engine name with a zero": wire.Hello(1, 1, 1, "e\0", False, [], ""),
    "too many held leases": wire.Hello(1, 1, 1, "e", True, [1] * (LEASES_MAX + 1), ""),
    "node text too long": wire.Hello(1, 1, 1, "e", False, [], "x" * 65_537),
    "namespace too short": wire.Attach(1, SPACE[:31], 1, "", False),
    "namespace too long": wire.Lookup(1, SPACE + b"x", 33, b""),
    "namespace that is text": wire.Touch(1, "x" * 32, 33, b""),
    "slot of no bytes": wire.Attach(1, SPACE, 0, "", False),
    "slot above its maximum": wire.Attach(1, SPACE, (1 << 40) + 1, "", False),
    "label too long": wire.Attach(1, SPACE, 1, "x" * 1025, False),
    "key of one byte": wire.Lookup(1, SPACE, 1, b""),
    "key of no bytes": wire.Lookup(1, SPACE, 0, b""),
    "key too long": wire.Lookup(1, SPACE, KEY_BYTES_MAX + 1, b""),
    "too many bytes of keys": wire.Lookup(1, SPACE, 33, bytes(KEYS_MAX * KEY_BYTES_MAX + 1)),
    "predecessor too long": wire.Reserve(1, SPACE, 33, b"", [(bytes(KEY_BYTES_MAX + 1), 1)]),
    "run of negative length": wire.Reserve(1, SPACE, 33, b"", [(b"", -1)]),
    "too many runs": wire.Reserve(1, SPACE, 33, b"", [(b"", 0)] * (KEYS_MAX + 1)),
    "too many flags": wire.Commit(1, 1, bytes(KEYS_MAX + 1)),
    "too many leases": wire.Release(1, [1] * (LEASES_MAX + 1)),
    "negative lease": wire.Release(1, [-1]),
    "purge of no digits": wire.Purge(1, "xyz"),
    "purge with upper case": wire.Purge(1, "AB"),
    "purge of a path": wire.Purge(1, "../"),
    "purge with a line end": wire.Purge(1, "ab\n"),
    "purge too long": wire.Purge(1, "a" * 65),
}


@pytest.mark.parametrize("name", sorted(TOO_MUCH))
def test_a_limit_refuses(name):
    with pytest.raises(ProtocolError, match="not a message of this protocol"):
        decode_request(encode(TOO_MUCH[name]))


AT_THE_LIMIT = {
    "hello": wire.Hello(TOP, TOP, TOP, "e" * 64, True, [TOP] * LEASES_MAX, "x" * 65_536),
    "attach": wire.Attach(TOP, SPACE, 1 << 40, "x" * 1024, True),
    "lookup": wire.Lookup(TOP, SPACE, KEY_BYTES_MAX, bytes(KEYS_MAX * KEY_BYTES_MAX)),
    "commit": wire.Commit(TOP, TOP, bytes(KEYS_MAX)),
    "release": wire.Release(TOP, [TOP] * LEASES_MAX),
    "reserve": wire.Reserve(TOP, SPACE, KEY_BYTES_MAX, bytes(KEYS_MAX * KEY_BYTES_MAX), [(b"", 1)]),
    "reserve with a predecessor per key": wire.Reserve(
        TOP,
        SPACE,
        KEY_BYTES_MAX,
        bytes(KEYS_MAX * KEY_BYTES_MAX),
        [(bytes(KEY_BYTES_MAX), 1)] * KEYS_MAX,
    ),
}


@pytest.mark.parametrize("name", sorted(AT_THE_LIMIT))
def test_the_largest_allowed_message_is_read_and_fits_the_largest_frame(name):
    """A frame above the maximum closes the connection, so no allowed message may reach it."""
    frame = encode(AT_THE_LIMIT[name])
    assert decode_request(frame) == AT_THE_LIMIT[name]
    assert len(frame) <= MESSAGE_BYTES_MAX


def test_the_largest_answers_fit_the_largest_frame():
    offsets = bytes(8 * KEYS_MAX)
    for message in (
        wire.FoundReply(TOP, TOP, TOP, offsets, TOP, True),
        wire.GrantedReply(TOP, TOP, TOP, offsets),
        wire.ReadyPush(TOP, offsets, bytes(len(offsets) // 8), TOP, True),
    ):
        assert len(encode(message)) <= MESSAGE_BYTES_MAX


# ---- bad input ---------------------------------------------------------------------------------


class Trap:
    """Writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_refused_and_not_executed(tmp_path, protocol):
    frame = pickle.dumps(Trap(tmp_path / "sprung"), protocol)
    refuse(frame)
    refuse(pickle.dumps(["Ping", 1], protocol))
    refuse(msgspec.msgpack.encode(["Ping", frame]))
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "tree",
    [
        None,
        1,
        "Ping",
        [],
        {},
        ["Ping"],
        ["Ping", 1, 2],
        ["Pong", 1],
        [1, "Ping"],
        ["Ping", [1]],
        ["Ping", {"seq": 1}],
        {"type": "Ping", "seq": 1},
        ["tierkv.service.wire.Ping", 1],
        ["_Message"],
        ["Release", 1, 5],
        ["Reserve", 1, SPACE, 33, b"", [[b""]]],
        ["Reserve", 1, SPACE, 33, b"", [[b"", 1, 1]]],
        [["Ping", 1], ["Ping", 2]],
    ],
)
def test_well_formed_messages_of_other_shapes_are_refused(tree):
    refuse(msgspec.msgpack.encode(tree))


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\xff" * 100,
        b"\x91" * 200_000,
        b"\x81" * 200_000,
        b"\x92\xa7Release" + b"\x91" * 200_000,
        b"\x93\xa7Release\x01\xdd\xff\xff\xff\xff",
        b"\x93\xa7Release\x01\xdc\xff\xff\x01",
        b"\xdd\xff\xff\xff\xff",
        b"\x92\xa4Ping\xdb\xff\xff\xff\xff",
        b"\x92\xa4Ping\xc6\xff\xff\xff\xff",
        b"\xa4\xff\xff\xff\xff",
        encode(REQUESTS[0]) + b"\x00",
        encode(wire.Ping(1)) + encode(wire.Ping(2)),
    ],
    ids=range(14),
)
def test_frames_made_to_hurt_are_refused(frame):
    refuse(frame)


def decodes_or_refuses(frame: bytes) -> None:
    for decode in (decode_request, decode_reply):
        try:
            decode(frame)
        except ProtocolError:
            continue


def dice(salt: int) -> random.Random:
    seed = int(os.environ.get("TEST_SEED", "20240229")) + salt
    print(f"seed {seed}")
    return random.Random(seed)


def test_random_bytes_give_only_protocol_errors():
    rolls = dice(1)
    for _ in range(20_000):
        decodes_or_refuses(rolls.randbytes(rolls.randrange(60)))


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name_of)
def test_a_message_that_is_cut_off_is_refused(message):
    frame = encode(message)
    for length in range(len(frame)):
        refuse(frame[:length])


@pytest.mark.parametrize("message", [*REQUESTS, *REPLIES], ids=name_of)
def test_a_message_with_damaged_bytes_gives_only_protocol_errors(message):
    rolls = dice(2)
    frame = encode(message)
    for _ in range(800):
        damaged = bytearray(frame)
        for _ in range(rolls.randint(1, 4)):
            kind, at = rolls.randrange(4), rolls.randrange(len(damaged))
            if kind == 0:
                damaged[at] ^= 1 << rolls.randrange(8)
            elif kind == 1:
                damaged[at] = rolls.choice([0, 0x7F, 0x80, 0xC0, 0xC1, 0xC6, 0xDB, 0xDD, 0xFF])
            elif kind == 2:
                damaged.insert(at, rolls.randrange(256))
            elif len(damaged) > 1:
                del damaged[at]
        decodes_or_refuses(bytes(damaged))


# ---- keys and offsets --------------------------------------------------------------------------


def test_keys_are_cut_apart_in_order():
    assert split_keys(b"aabbcc", 2) == [b"aa", b"bb", b"cc"]
    assert split_keys(b"", 33) == []


@pytest.mark.parametrize("length", [1, 32, 34, 65])
def test_a_length_that_is_no_multiple_is_refused(length):
    with pytest.raises(ProtocolError, match=f"^{length} bytes are no whole number of 33-byte keys"):
        split_keys(bytes(length), 33)


def test_a_key_that_stands_twice_is_refused():
    with pytest.raises(ProtocolError, match="stands twice"):
        split_keys(b"aabbaa", 2)


def test_more_keys_than_allowed_are_refused_before_they_are_cut():
    def keys(count: int) -> bytes:
        return np.arange(count, dtype="<u4").tobytes()

    assert len(split_keys(keys(KEYS_MAX), 4)) == KEYS_MAX
    with pytest.raises(ProtocolError, match=f"more than {KEYS_MAX} keys"):
        split_keys(keys(KEYS_MAX + 1), 4)


@pytest.mark.parametrize("offsets", [[], [0], [-1, 4096, (1 << 63) - 1, -(1 << 63)]])
def test_offsets_survive_the_way(offsets):
    packed = pack_offsets(np.array(offsets, np.int64))
    assert len(packed) == 8 * len(offsets)
    assert unpack_offsets(packed).tolist() == offsets


def test_offsets_are_little_endian_on_every_machine():
    assert pack_offsets(np.array([1], np.int64)) == b"\x01" + bytes(7)
    assert pack_offsets(np.array([1], ">i8")) == b"\x01" + bytes(7)


@pytest.mark.parametrize("length", [1, 7, 9])
def test_offsets_of_a_broken_length_are_refused(length):
    with pytest.raises(ProtocolError, match="64-bit"):
        unpack_offsets(bytes(length))
