"""Identities: the same facts give the same digest everywhere, any other fact another one."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import random
from pathlib import Path

import pytest

from tierkv.hashing import (
    SAMPLE_BYTES,
    SAMPLES_PER_FILE,
    block_key,
    digest_of,
    files_fingerprint,
)

FACTS = {
    "model": "m",
    "dtype": "bfloat16",
    "ranks": 2,
    "shape": [16, 128],
    "seed": None,
    "ok": True,
}


# ---- facts -------------------------------------------------------------------------------------


def test_a_digest_has_32_bytes():
    assert len(digest_of(FACTS)) == len(digest_of({})) == 32


def test_the_order_of_the_facts_does_not_matter():
    seed = 11
    print(f"seed {seed}")
    items = list(FACTS.items())
    for _ in range(20):
        random.Random(seed).shuffle(items)
        assert digest_of(dict(items)) == digest_of(FACTS)
    assert digest_of({"a": {"b": 1, "c": 2}}) == digest_of({"a": {"c": 2, "b": 1}})


def test_the_digest_is_the_same_on_every_machine_and_in_every_version():
    """Nodes share stored blocks by it; who changes it makes all of them miss."""
    expected = hashlib.blake2b(b'{"a":[1,null,true],"b":"\\u00fc"}', digest_size=32).digest()
    assert digest_of({"b": "ü", "a": [1, None, True]}) == expected


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"ranks": 3},
        {"ranks": "2"},
        {"ranks": 2.0},
        {"shape": [128, 16]},
        {"shape": [16, 128, 1]},
        {"shape": "[16,128]"},
        {"seed": 0},
        {"seed": ""},
        {"ok": False},
        {"ok": 1},
        {"more": None},
    ],
)
def test_any_other_fact_is_another_digest(change):
    assert digest_of({**FACTS, **change}) != digest_of(FACTS)


def test_a_missing_fact_is_another_digest():
    for name in FACTS:
        assert digest_of({k: v for k, v in FACTS.items() if k != name}) != digest_of(FACTS)


@pytest.mark.parametrize(
    "value",
    [b"bytes", {1, 2}, object(), Path("/x"), 1j, len, [object()], {"deep": {"deeper": b""}}],
)
def test_what_is_no_plain_json_is_refused(value):
    with pytest.raises(TypeError):
        digest_of({"fact": value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_does_not_know_are_refused(value):
    with pytest.raises((TypeError, ValueError)):
        digest_of({"fact": value})


# ---- block keys --------------------------------------------------------------------------------

HASH = bytes(range(32))


def test_a_key_is_the_hash_and_its_group():
    assert block_key(HASH) == HASH + b"\x00"
    assert block_key(HASH, 255) == HASH + b"\xff"


def test_keys_differ_by_hash_group_and_adapter():
    keys = [
        block_key(block_hash, group, adapter)
        for block_hash in (HASH, HASH[::-1])
        for group in (0, 1, 255)
        for adapter in (None, b"a" * 32, b"b" * 32, b"a" * 64)
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {33}


def test_the_same_block_has_the_same_key():
    assert block_key(HASH, 3, b"a" * 32) == block_key(HASH, 3, b"a" * 32)


def test_keys_of_long_hashes_fit_the_protocol():
    assert len(block_key(b"h" * 64)) == 65


@pytest.mark.parametrize("group", [-1, 256])
def test_a_group_beyond_one_byte_is_refused(group):
    with pytest.raises(OverflowError):
        block_key(HASH, group)


# ---- files -------------------------------------------------------------------------------------


def safetensors(path: Path, header: bytes, payload: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(header).to_bytes(8, "little") + header + payload)
    return path


@pytest.fixture
def weights(tmp_path):
    """Two files; the first is so large that only parts of it are sampled."""
    seed = 3
    print(f"seed {seed}")
    rolls = random.Random(seed)
    return [
        safetensors(tmp_path / "a/w-1.safetensors", b"h" * 150_000, rolls.randbytes(8 << 20)),
        safetensors(tmp_path / "a/w-2.safetensors", b"i" * 1_000, rolls.randbytes(10_000)),
    ]


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def test_copies_elsewhere_with_other_times_have_the_same_fingerprint(tmp_path, weights):
    before = files_fingerprint(weights)
    copies = [tmp_path / "another" / "place" / path.name for path in weights]
    copies[0].parent.mkdir(parents=True)
    for source, target in zip(weights, copies, strict=True):
        target.write_bytes(source.read_bytes())
        os.utime(target, (1, 1))
    assert files_fingerprint(copies) == before
    os.utime(weights[0], (5, 5))
    weights[0].chmod(0o600)
    assert files_fingerprint(weights) == before


def test_the_order_in_which_files_are_named_does_not_matter(weights):
    assert files_fingerprint(reversed(weights)) == files_fingerprint(weights)


def test_a_changed_header_is_another_fingerprint_wherever_it_changed(weights):
    """All of it is read: the header says which tensor lies where."""
    before = files_fingerprint(weights)
    for at in (8, 8 + SAMPLE_BYTES + 20_000, 8 + 149_999):
        flip(weights[0], at)
        assert files_fingerprint(weights) != before, at
        flip(weights[0], at)
    assert files_fingerprint(weights) == before


def test_changed_bytes_of_every_sample_are_another_fingerprint(weights):
    before = files_fingerprint(weights)
    size = weights[0].stat().st_size
    for at in range(0, size, size // SAMPLES_PER_FILE):
        flip(weights[0], at)
        assert files_fingerprint(weights) != before, at
        flip(weights[0], at)
    for at in (0, 5_000, weights[1].stat().st_size - 1):
        flip(weights[1], at)
        assert files_fingerprint(weights) != before, f"a small file is read whole: {at}"
        flip(weights[1], at)


def test_retrained_weights_are_another_fingerprint(weights):
    """The usual change: every payload byte is new, header and size are the same."""
    before = files_fingerprint(weights)
    contents = weights[0].read_bytes()
    weights[0].write_bytes(contents[:150_008] + bytes(b ^ 1 for b in contents[150_008:]))
    assert files_fingerprint(weights) != before


@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_another_size_is_another_fingerprint(weights, change):
    before = files_fingerprint(weights)
    os.truncate(weights[0], weights[0].stat().st_size + change)
    assert files_fingerprint(weights) != before


def test_another_name_or_number_of_files_is_another_fingerprint(weights):
    before = files_fingerprint(weights)
    renamed = weights[1].rename(weights[1].with_name("w-3.safetensors"))
    prints = {before, files_fingerprint([weights[0], renamed]), files_fingerprint(weights[:1])}
    assert len(prints | {files_fingerprint([])}) == 4


def test_swapped_contents_are_another_fingerprint(tmp_path):
    one, two = tmp_path / "1.bin", tmp_path / "2.bin"
    one.write_bytes(b"a" * 100)
    two.write_bytes(b"b" * 100)
    before = files_fingerprint([one, two])
    one.write_bytes(b"b" * 100)
    two.write_bytes(b"a" * 100)
    assert files_fingerprint([one, two]) != before


@pytest.mark.parametrize("size", [0, 1, 7, 8, SAMPLE_BYTES - 1, SAMPLE_BYTES, SAMPLE_BYTES + 1])
def test_files_of_odd_sizes_are_read(tmp_path, size):
    for suffix in (".safetensors", ".bin"):
        path = tmp_path / f"x{suffix}"
        path.write_bytes(b"\xff" * size)
        prints = [files_fingerprint([path])]
        if size:
            flip(path, size - 1)
            prints.append(files_fingerprint([path]))
        assert len(set(prints)) == len(prints)


def test_a_missing_file_is_an_error_and_not_another_identity(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        files_fingerprint([tmp_path / "gone"])


def test_a_generator_of_paths_is_enough(weights):
    assert files_fingerprint(itertools.chain(weights)) == files_fingerprint(weights)
