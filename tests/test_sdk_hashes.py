"""Block hashes of the SDK: the formula, by an implementation of it that is independent of ours."""

from __future__ import annotations

import hashlib
import os
import struct
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.processes import ROOT, WAIT_MAX_S
from tierkv.hashing import block_hashes

ALGORITHMS = ("sha256", "xxh3")
TOKENS = list(range(100, 150))

unhurried = settings(deadline=None)  # the machine may have other work to do

token_lists = st.lists(st.integers(0, 3) | st.integers(0, 2**32 - 1), max_size=20)
small_bytes = st.binary(max_size=3)
extras = st.dictionaries(st.integers(0, 4), small_bytes, max_size=2)


def common(one, two) -> int:
    """Length of the common prefix."""
    count = 0
    for a, b in zip(one, two, strict=False):
        if a != b:
            break
        count += 1
    return count


def by_the_book(algorithm, tokens, size, *, salt, adapter, extras) -> list[str]:
    """The formula as it is documented, in other words."""
    digest = {
        "sha256": lambda text: hashlib.sha256(text).digest(),
        "xxh3": lambda text: bytes.fromhex(xxhash.xxh3_128(text).hexdigest()),
    }[algorithm]
    last = digest(b"TKVHSH1" + struct.pack("<II", size, len(salt)) + salt + adapter)
    keys = []
    for at in range(len(tokens) // size):
        text = struct.pack(f"<{size}I", *tokens[at * size : (at + 1) * size])
        last = digest(last + text + extras.get(at, b""))
        keys.append((last + b"\0").hex())
    return keys


PLAIN = {"tokens": [1, 2, 3, 4, 5, 6, 7, 8, 9], "block_tokens": 4}
FULL = {
    "tokens": [0, 2**32 - 1],
    "block_tokens": 1,
    "salt": b"tenant",
    "adapter": b"\1" * 32,
    "extras": {1: b"image"},
}
# Stored blocks are found by these: who changes one makes every cache on every node cold.
GOLDEN = {
    ("sha256", "plain"): [
        "3b395a482507fca1e86fb1983831a85510252872cb67ce91ac78ef4be9373fb000",
        "44887d3aa25abb70da9dce242c3fe59ba593f4fcadb73f04c7b562cf6cd610fe00",
    ],
    ("sha256", "full"): [
        "848709304f43f93ba841306f25d4b56320026a3908b309dde45958b03a409a6400",
        "e5865c9c2f8b7751dd2520930b9edf186ef6cbf3b3abafa1c3202ba58befb23800",
    ],
    ("xxh3", "plain"): [
        "f2a4d3b7806628df644af2017fea688d00",
        "bace7f38de6ebf9b2316b28d91f8b32000",
    ],
    ("xxh3", "full"): [
        "9032090106a68800f499ca74266194f100",
        "482d721d6edaadc6b8c529f7c73aad1700",
    ],
}


@pytest.mark.parametrize(("algorithm", "prompt"), GOLDEN)
def test_keys_are_the_same_on_every_machine_and_in_every_version(algorithm, prompt):
    facts = PLAIN if prompt == "plain" else FULL
    found = [key.hex() for key in block_hashes(**facts, algorithm=algorithm)]
    assert found == GOLDEN[algorithm, prompt]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@unhurried
@given(tokens=token_lists, size=st.integers(1, 5), more=st.tuples(small_bytes, small_bytes, extras))
def test_keys_follow_the_documented_formula(algorithm, tokens, size, more):
    facts = dict(zip(("salt", "adapter", "extras"), more, strict=True))
    facts["extras"] = {at: e for at, e in facts["extras"].items() if at < len(tokens) // size}
    found = block_hashes(tokens, size, algorithm=algorithm, **facts)
    expected = by_the_book(algorithm, tokens, size, **facts)
    assert [key.hex() for key in found] == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@unhurried
@given(head=token_lists, one=token_lists, two=token_lists, size=st.integers(1, 5))
def test_two_prompts_share_exactly_their_common_full_blocks(algorithm, head, one, two, size):
    a, b = head + one, head + two
    keys_a, keys_b = (block_hashes(t, size, algorithm=algorithm) for t in (a, b))
    assert (len(keys_a), len(keys_b)) == (len(a) // size, len(b) // size)
    shared = common(a, b) // size
    assert keys_a[:shared] == keys_b[:shared]
    assert not set(keys_a[shared:]) & set(keys_b)
    assert not set(keys_b[shared:]) & set(keys_a)
    assert len(set(keys_a)) == len(keys_a)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@unhurried
@given(
    tokens=st.lists(st.integers(0, 2), min_size=10, max_size=11),
    one=st.tuples(small_bytes, small_bytes, extras),
    two=st.tuples(small_bytes, small_bytes, extras),
)
def test_salt_adapter_and_extras_are_part_of_every_block_behind_them(algorithm, tokens, one, two):
    """And never run into each other: salt "ab" and adapter "c" are not "a" and "bc"."""

    def keys(salt, adapter, more):
        return block_hashes(tokens, 2, algorithm=algorithm, salt=salt, adapter=adapter, extras=more)

    def facts(salt, adapter, more):
        return [(salt, adapter, more.get(at, b"")) for at in range(len(tokens) // 2)]

    a, b = keys(*one), keys(*two)
    shared = common(facts(*one), facts(*two))
    assert a[:shared] == b[:shared]
    assert not set(a[shared:]) & set(b)


def test_an_image_may_reach_into_the_last_block_that_is_not_full():
    """Whoever describes a prompt need not know where its full blocks end."""
    assert block_hashes(TOKENS[:6], 4, extras={1: b"image"}) == block_hashes(TOKENS[:6], 4)


@pytest.mark.parametrize("wrong", [-1, -2, 13])
def test_extras_of_no_block_of_the_prompt_are_refused(wrong):
    """Else a slip in counting would make two images one prompt."""
    with pytest.raises(ValueError, match=str(wrong)):
        block_hashes(TOKENS, 4, extras={wrong: b"image"})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_two_ways_to_split_tokens_into_blocks_differ(algorithm):
    of_four = block_hashes(TOKENS, 4, algorithm=algorithm)
    of_two = block_hashes(TOKENS, 2, algorithm=algorithm)
    assert not set(of_four) & set(of_two)


def test_the_algorithms_have_no_key_in_common():
    assert not set(block_hashes(TOKENS, 4)) & set(block_hashes(TOKENS, 4, algorithm="xxh3"))
    assert block_hashes(TOKENS, 4) == block_hashes(TOKENS, 4, algorithm="sha256")


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64", "uint8", ">i4", "int16"])
def test_arrays_of_any_integer_type_have_the_keys_of_a_list(algorithm, dtype):
    expected = block_hashes(TOKENS, 4, algorithm=algorithm)
    array = np.array(TOKENS, dtype)
    assert block_hashes(array, 4, algorithm=algorithm) == expected
    assert block_hashes(tuple(TOKENS), 4, algorithm=algorithm) == expected
    spread = np.zeros(2 * len(TOKENS), dtype)
    spread[::2] = array
    assert block_hashes(spread[::2], 4, algorithm=algorithm) == expected


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_keys_are_the_same_in_every_process(algorithm):
    code = (
        "from tierkv.hashing import block_hashes\n"
        f"keys = block_hashes(range(100, 150), 4, algorithm={algorithm!r}, salt=b's')\n"
        "print(*[key.hex() for key in keys])"
    )
    found = set()
    for seed in ("0", "1"):
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=WAIT_MAX_S,
            check=True,
        )
        found.add(ended.stdout.strip())
    assert found == {
        " ".join(k.hex() for k in block_hashes(TOKENS, 4, algorithm=algorithm, salt=b"s"))
    }
