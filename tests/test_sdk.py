"""The SDK by its contract: scenarios for one user and for many, and what caches share.

The daemon is started by the first cache, or by the test; memory is numpy's or torch's; a user is
alone, a thread of several at one cache, a thread with a cache of its own, or a process.
"""

from __future__ import annotations

import itertools
import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

import tierkv
from tests.processes import WAIT_MAX_S, wait_for
from tests.sdk_node import SdkChild, SdkNode, users_of
from tests.sdk_scenarios import SCENARIOS
from tests.sdk_world import BLOCK_TOKENS, KINDS, SEAT_BLOCKS, Memory, Seat
from tierkv.hashing import block_hashes

USERS = 3
PROCESSES = 2
SLOTS = 4096  # enough that nothing is evicted here
EXTENT_SLOTS = 16
PLENTY = 2 * SEAT_BLOCKS * USERS


@pytest.fixture(scope="module", params=["auto", "external"])
def shared(request, tmp_path_factory):
    node = SdkNode(tmp_path_factory.mktemp("sdk"), request.param, SLOTS, EXTENT_SLOTS)
    yield node
    node.close()


@pytest.fixture
def node(shared):
    with users_of(shared):
        yield shared


@pytest.fixture
def model(request) -> str:
    """A namespace that no other test knows."""
    return request.node.name


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


# ---- scenarios ---------------------------------------------------------------------------------

Crowd = Callable[[str], None]


def alone(node: SdkNode, kind: str) -> Crowd:
    seat = node.seat("alone", kind)
    return lambda name: SCENARIOS[name](seat.move(name))


def as_threads_at_one_cache(node: SdkNode, kind: str) -> Crowd:
    memory = Memory(kind, PLENTY)
    cache = node.cache(memory, "threads")
    seats = [Seat(cache, memory, f"user {n}", n) for n in range(USERS)]
    return lambda name: all_at_once(name, seats)


def as_threads_with_a_cache_each(node: SdkNode, kind: str) -> Crowd:
    seats = [node.seat("caches", kind, f"user {n}") for n in range(USERS)]
    return lambda name: all_at_once(name, seats)


def all_at_once(name: str, seats: list[Seat]) -> None:
    start = threading.Barrier(len(seats))

    def run(seat: Seat) -> None:
        start.wait(WAIT_MAX_S)
        SCENARIOS[name](seat.move(f"{seat.label} {name}"))

    with ThreadPoolExecutor(len(seats)) as threads:
        for result in [threads.submit(run, seat) for seat in seats]:
            result.result(WAIT_MAX_S)


CROWDS = {
    "alone": alone,
    "threads at one cache": as_threads_at_one_cache,
    "threads with a cache each": as_threads_with_a_cache_each,
}


@pytest.fixture(scope="module", params=CROWDS)
def crowd(request, shared, kind):
    """Users who do a scenario all at once; their caches stay for the next one."""
    with users_of(shared):
        yield CROWDS[request.param](shared, kind)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_user_gets_what_the_contract_says(shared, crowd, name):
    crowd(name)
    wait_for(lambda: shared.held() == (0, 0), what="the end of all pins")
    shared.check()


@pytest.fixture(scope="module")
def processes():
    """Children by their kind of memory, who join one node after another."""
    found: dict[str, list[SdkChild]] = {kind: [] for kind in KINDS}
    yield found
    for child in itertools.chain(*found.values()):
        child.kill()


@pytest.fixture
def children(processes, node, kind, model) -> Iterator[list[SdkChild]]:
    children = processes[kind]
    children += [SdkChild(kind) for _ in range(PROCESSES - len(children))]
    for child in children:
        child.tell("open", model, "", False, node.settings().model_dump_json())
    for child in children:
        assert child.hear() == child.process.pid
    yield children
    for child in children:
        child.call("close")


def test_processes_get_what_the_contract_says(node, children):
    for name in SCENARIOS:
        for number, child in enumerate(children):
            child.tell("scenario", name, f"user {number}, {name}")
        for child in children:
            assert child.hear() == name


# ---- who shares with whom ----------------------------------------------------------------------


def test_caches_of_one_model_share_blocks_and_are_two_engines(node, kind, model):
    one, two = node.seat(model, kind), node.seat(model, kind)
    assert one.cache.namespace == two.cache.namespace
    assert node.stats()["sessions"] == 2
    assert one.share("abc") == 3
    two.hit("abcd", 3)
    assert two.share("abcd") == 1
    one.hit("abcd", 4)
    one.cache.close()
    two.hit("abcd", 4)


def test_processes_share_blocks_and_agree_on_keys(node, children, kind, model):
    seat, (one, two) = node.seat(model, kind), children
    assert one.call("hash_tokens", "abc") == [key.hex() for key in seat.keys("abc")]
    assert one.call("share", "abc") == 3
    seat.hit("abc", 3)
    assert seat.share("d", behind="abc") == 1
    assert two.call("resident", "abcd") == 4


def test_torch_and_numpy_memory_share_right_bytes_or_none(node, model):
    one, two = node.seat(model, "numpy"), node.seat(model, "torch")
    assert one.share("ab") == 2
    is_shared = one.cache.namespace == two.cache.namespace
    assert two.resident("ab") == (2 if is_shared else 0)


OTHERS = {
    "model": {"model": "another"},
    "version": {"model": "m@2"},
    "facts": {"facts": {"rank": 1}},
    "other facts": {"facts": {"rank": "0"}},
    "algorithm": {"hash_algorithm": "xxh3"},
    "dtype": {"dtype": "int16"},
    "width": {"width": 16},
    "tokens": {"block_tokens": 2},
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_changes_the_bytes_is_another_namespace(node, kind, model, other):
    """And both namespaces go on beside each other."""
    change = dict(OTHERS[other])
    memory = Memory(kind, 16, change.pop("dtype", "float16"), change.pop("width", 8))
    name = f"{model} {change.pop('model')}" if "model" in change else model
    base = {"facts": {"rank": 0}}
    seat = node.seat(model, kind, **base)
    stranger = Seat(node.cache(memory, name, **(base | change)), memory, "")
    assert seat.cache.namespace != stranger.cache.namespace
    keys = seat.keys("abcd")
    assert seat.store("abcd") == 4
    with stranger.cache.lookup(keys) as none:
        assert none.blocks == 0
    assert stranger.cache.store(keys, stranger.fill(keys)) == 4
    for each in (seat, stranger):
        with each.cache.lookup(keys) as hit:
            assert hit.blocks == 4
            assert each.load(hit, keys) == 4


def test_the_order_of_facts_does_not_matter_and_that_of_tensors_costs_no_byte(node, kind, model):
    one = node.seat(model, kind, facts={"rank": 0, "ranks": 2})
    two = node.seat(model, kind, facts={"ranks": 2, "rank": 0})
    assert one.cache.namespace == two.cache.namespace
    memory = Memory(kind, 16)
    memory.tensors = dict(reversed(memory.tensors.items()))
    three = Seat(node.cache(memory, model, facts={"rank": 0, "ranks": 2}), memory, "")
    assert one.share("ab") == 2
    two.hit("ab", 2)
    assert three.resident("ab") in (0, 2), "and the bytes were looked at"


def test_other_names_of_tensors_are_no_wrong_bytes(node, kind, model):
    one = node.seat(model, kind)
    assert one.share("ab") == 2
    memory = Memory(kind, 16)
    memory.tensors = dict(zip("vkw", memory.tensors.values(), strict=True))
    memory.bytes = dict(zip("vkw", memory.bytes.values(), strict=True))
    two = Seat(node.cache(memory, model), memory, "")
    assert two.resident("ab") in (0, 2), "and the bytes were looked at"


def test_ranks_of_one_engine_have_namespaces_of_their_own(node, kind, model):
    ranks = [node.seat(model, kind, facts={"rank": r, "ranks": 2}) for r in range(2)]
    assert ranks[0].keys("abc") == ranks[1].keys("abc")
    assert ranks[0].store("abc") == 3
    assert ranks[1].store("ab") == 2
    keys = ranks[0].keys("abc")
    hits = [rank.cache.lookup(keys) for rank in ranks]
    assert [hit.blocks for hit in hits] == [3, 2]
    for hit, rank in zip(hits, ranks, strict=True):
        targets = rank.wiped(2)  # the smallest over the ranks
        assert rank.cache.load(hit, targets) == 2
        rank.see(targets, keys)
        hit.release()


# ---- thresholds --------------------------------------------------------------------------------


def test_below_the_threshold_nothing_is_swapped_in(node, kind, model):
    seat = node.seat(model, kind, engine={"swap_in_threshold": 3 * BLOCK_TOKENS})
    assert seat.store("abcde") == 5
    seat.miss("ab")
    seat.miss("abx")
    seat.hit("abc", 3)
    seat.miss("abcde", held=3)
    seat.hit("abcde", 3, held=2)
    odd = node.seat(model, kind, engine={"swap_in_threshold": 2 * BLOCK_TOKENS + 1})
    odd.miss("ab")
    odd.hit("abc", 3)


def test_a_hit_below_the_threshold_leaves_no_pins(node, kind, model):
    seat = node.seat(model, kind, engine={"swap_in_threshold": 3 * BLOCK_TOKENS})
    assert seat.store("abcde") == 5
    hit = seat.cache.start_lookup(seat.keys("ab"))
    wait_for(lambda: hit.is_done, what="a lookup")
    assert hit.blocks == 0
    wait_for(lambda: node.held() == (0, 0), what="the end of the lease")
    seat.hit("abcde", 5)


# ---- the daemon's view -------------------------------------------------------------------------


def told(node: SdkNode, tmp_path: Path) -> dict:
    """What `tierkv stats --json` prints."""
    path = tmp_path / "tierkv.yaml"
    path.write_text(yaml.safe_dump(node.settings().model_dump(mode="json")))
    command = [sys.executable, "-m", "tierkv.cli.main", "stats", "--json", "--config", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_MAX_S, check=True)
    return yaml.safe_load(ended.stdout)


def test_the_numbers_of_the_daemon_agree_with_what_was_done(node, model, tmp_path):
    with users_of(node):
        first = node.seat(model)
        before = told(node, tmp_path)
        assert first.store("abcd") == 4
        assert first.store("ab") == 0
        first.hit("abcdef", 4)
        first.hit("abcd", 3, held=1)
        first.miss("xyz")
        with first.cache.lookup(first.keys("abcdefgh"), held=1) as hit:
            assert first.load(hit, first.keys("abcd")[1:]) == 3
        first.cache.report(held_tokens=1 * BLOCK_TOKENS, hit=hit, computed_tokens=16)
        wait_for(lambda: node.held() == (0, 0), first.cache, what="the last release")
        after = told(node, tmp_path)
    counted = {k: v - before["counters"][k] for k, v in after["counters"].items()}
    assert counted["blocks_stored"] == counted["blocks_reserved"] == 4
    assert counted["skipped_present"] in (0, 2), "a cache may know it without asking"
    assert counted["lookups"] == 4
    assert counted["blocks_hit"] in (4 + 3 + 3, 4 + 4 + 4), "held blocks may be part of a lease"
    assert counted["unknown_leases"] == counted["protocol_errors"] == counted["evicted"] == 0
    assert after["sessions"] == before["sessions"] == 1
    assert after["pinned_blocks"] == 0
    tokens = {k: v - before["tokens_total"]["tokens"].get(k, 0)
              for k, v in after["tokens_total"]["tokens"].items()}  # fmt: skip
    assert tokens == {"device": 4, "dram": 3 * BLOCK_TOKENS, "computed": 16}
    [space] = [s for s in after["namespaces"] if s["namespace"] == first.cache.namespace.hex()]
    assert (space["blocks"], space["pinned_blocks"]) == (4, 0)


def test_a_damaged_byte_in_the_pool_is_seen(node, kind, model):
    """The negative control: every comparison here can fail."""
    seat = node.seat(model, kind, label=model)  # bytes that no other test has stored
    assert seat.store("ab") == 2
    seat.hit("ab", 2)
    needle = seat.memory.bytes["v"][seat.origins[1]].tobytes()
    with Path(node.stats()["pool"]).open("r+b") as file, mmap.mmap(file.fileno(), 0) as pool:
        at = pool.find(needle)
        assert at >= 0
        assert pool.find(needle, at + 1) < 0
        pool[at + 3] ^= 1
        with pytest.raises(AssertionError, match=r"wrong bytes in blocks \[1\] of 2"):
            seat.hit("ab", 2)
        pool[at + 3] ^= 1
    seat.hit("ab", 2)


# ---- configuration and who starts the daemon ---------------------------------------------------


def test_a_configuration_comes_as_values_mapping_or_file(node, model, tmp_path):
    settings = node.settings()
    tree = settings.model_dump(mode="json")
    path = tmp_path / "tierkv.yaml"
    path.write_text(yaml.safe_dump(tree))
    seats = [node.seat(model, config=form) for form in (settings, tree, path, str(path))]
    assert seats[0].share("ab") == 2
    for seat in seats:
        seat.hit("ab", 2)


def test_a_wrong_configuration_is_refused_at_once(tmp_path):
    memory = Memory("numpy", 16)
    for wrong in ({"nod": {}}, {"engine": {"swap_in_threshold": "many"}}, tmp_path / "nowhere"):
        with pytest.raises(tierkv.ConfigError):
            tierkv.Cache(memory.tensors, model="m", block_tokens=BLOCK_TOKENS, config=wrong)


def test_a_cache_says_what_it_is(node, model):
    seat = node.seat(model)
    assert seat.cache.is_ready
    assert seat.cache.refusal is None
    assert seat.cache.block_tokens == BLOCK_TOKENS
    assert len(seat.cache.namespace) == 32
    assert seat.cache.wait_ready(0.0)


@pytest.mark.parametrize("algorithm", ["sha256", "xxh3"])
def test_a_cache_hashes_as_the_function_does(node, model, algorithm):
    seat = node.seat(model, hash_algorithm=algorithm)
    more = {"salt": b"s", "adapter": b"a", "extras": {1: b"e"}}
    expected = block_hashes(seat.tokens("abc"), BLOCK_TOKENS, algorithm=algorithm, **more)
    assert seat.keys("abc", **more) == expected
    assert seat.store("abc", **more) == 3
    seat.hit("abcd", 3, **more)


def test_the_first_cache_starts_the_daemon_and_it_outlives_the_cache(tmp_path):
    node = SdkNode(tmp_path, "auto")
    try:
        assert not node.serves()
        one = node.seat("m")
        pid = node.admin.welcome.pid
        assert pid != os.getpid()
        assert one.share("ab") == 2
        one.cache.close()
        two = node.seat("m")
        two.hit("ab", 2)
        assert node.admin.welcome.pid == pid
    finally:
        node.close()


def test_an_external_daemon_is_never_started_and_used_once_it_is_there(tmp_path):
    node = SdkNode(tmp_path, "external", is_started=False)
    try:
        seat = node.seat("m", is_ready=False)
        assert not seat.cache.wait_ready(0.0)
        assert not seat.cache.is_ready
        seat.miss("ab")
        assert seat.store("ab") == 0
        assert not node.serves()
        node.start_daemon()
        assert seat.cache.wait_ready(WAIT_MAX_S)
        assert seat.store("ab") == 2
        seat.hit("ab", 2)
    finally:
        node.close()
