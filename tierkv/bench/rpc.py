"""``tierkv bench rpc``: what a scheduler pays for the daemon's answers.

Two daemons run in child processes, one with an index of 1,000 blocks and one with a large, exactly
full index. The client is this process. Samples of the arms that are compared are interleaved, the
median counts, and the arm in the denominator is measured twice (A/A) so that the run can tell its
own noise.

Commit and release are one-way messages. Every timed operation therefore ends with a Ping, whose
answer comes after their work: each figure includes that empty round trip.

No block's bytes are written: slots are a few bytes, and the index does not care.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from tierkv.bench.echo import STOP, EchoClient, echo_client
from tierkv.bench.host import ANSWER_WAIT_S, Host, open_host
from tierkv.bench.report import (
    AA_SPREAD_MAX,
    Figure,
    aa_spread,
    median_ratio,
    print_figures,
    say,
)
from tierkv.errors import DaemonUnavailableError
from tierkv.hashing import block_key
from tierkv.service import wire
from tierkv.types import BlockKey, NamespaceId

BATCH = 1_000
SLOT_BYTES = 64
WARM_UPS = 3
ROUND_TRIPS = 100  # per sample of the empty round trip
ROUNDS = 5  # of lookups per sample; their median, so that one preemption does not decide
SEED = 20_240
SAMPLES = 25
SMALL_SLOTS = 4 * BATCH

Run = tuple[BlockKey | None, Sequence[BlockKey]]


@dataclass(slots=True)
class Series:
    """Samples in milliseconds, by arm, and what turned out wrong on the way."""

    ms: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def note(self, arm: str, seconds: float) -> None:
        """Note one sample of an arm."""
        self.ms.setdefault(arm, []).append(seconds * 1000)

    def expect(self, is_right: bool, problem: str) -> None:
        """Note a wrong result; it fails the bench."""
        if not is_right and problem not in self.problems:
            self.problems.append(problem)

    def median(self, *arms: str) -> float:
        """Milliseconds; over the samples of all the arms together."""
        return statistics.median(value for arm in arms for value in self.ms[arm])


@dataclass(frozen=True, slots=True)
class World:
    """Both daemons with their indexes filled.

    Attributes:
        prompt: the keys of one stored prompt, in both daemons.
        scattered: keys of a prompt in the large index whose blocks do not lie together: it grew
            block by block while others were stored.
    """

    small: Host
    large: Host
    small_space: NamespaceId
    store_space: NamespaceId
    large_space: NamespaceId
    prompt: list[BlockKey]
    scattered: list[BlockKey]
    blocks_max: int


def make_keys(label: str, count: int) -> list[BlockKey]:
    """Keys of one prompt: 32 bytes of hash and one of group index."""
    return [
        block_key(hashlib.blake2b(f"{label}:{n}".encode(), digest_size=32).digest())
        for n in range(count)
    ]


def run(as_json: bool, blocks_max: int = 1_000_000, samples: int = SAMPLES) -> int:
    """Measure, print, and return the exit code: 1 if a result was wrong, whatever the figures.

    Args:
        blocks_max: size of the large index, at least four prompts.
        samples: per figure; with fewer than `SAMPLES_MIN` the run is void.
    """
    assert blocks_max >= 4 * BATCH, "the large index holds prompt, scattered blocks and others"
    series = Series()
    with _open_world(blocks_max, series) as world:
        say(f"measuring: {samples} samples")
        with echo_client(world.small.echo) as echo:
            _repeat(samples, series, lambda into: _sample_noop(world, echo, into))
        _repeat(samples, series, lambda into: _sample_lookups(world, into))
        labels = iter(range(1 << 30))
        _repeat(samples, series, lambda into: _sample_stores(world, f"store{next(labels)}", into))
        say("verifying")
        _verify(world, series, (samples + WARM_UPS) * BATCH)
    _report(series, as_json, blocks_max, samples)
    return 1 if series.problems else 0


def _repeat(samples: int, series: Series, sample: Callable[[Series], None]) -> None:
    warm = Series(problems=series.problems)
    for _ in range(WARM_UPS):
        sample(warm)
    for _ in range(samples):
        sample(series)


# ---- the world ---------------------------------------------------------------------------------


@contextlib.contextmanager
def _open_world(blocks_max: int, series: Series) -> Iterator[World]:
    unit = BATCH * SLOT_BYTES
    with (
        open_host(SMALL_SLOTS * SLOT_BYTES, unit) as small,
        open_host(blocks_max * SLOT_BYTES, blocks_max * SLOT_BYTES) as large,
    ):
        world = World(
            small,
            large,
            small.attach("small", SLOT_BYTES),
            small.attach("store", SLOT_BYTES),
            large.attach("large", SLOT_BYTES),
            make_keys("prompt", BATCH),
            make_keys("scattered", BATCH),
            blocks_max,
        )
        _store(small, world.small_space, [(None, world.prompt)], series)
        _fill(world, series)
        yield world


def _fill(world: World, series: Series) -> None:
    """Fill the large index to its last slot: other prompts, and ours among them.

    `prompt` is stored at once, half-way; `scattered` grows by single blocks at random times.
    """
    others = world.blocks_max - len(world.prompt) - len(world.scattered)
    prompts = -(-others // BATCH)
    dice = random.Random(SEED)
    growth = sorted(dice.randrange(prompts) for _ in world.scattered)
    grown = 0
    for number in range(prompts):
        if number % 100 == 0:
            say(f"filling the index: {number * BATCH:,} of {world.blocks_max:,} blocks")
        keys = make_keys(f"other{number}", min(BATCH, others - number * BATCH))
        runs: list[Run] = [(None, keys)]
        if number == prompts // 2:
            runs.append((None, world.prompt))
        more = world.scattered[grown : bisect.bisect_right(growth, number)]
        if more:
            runs.append((world.scattered[grown - 1] if grown else None, more))
            grown += len(more)
        _store(world.large, world.large_space, runs, series)


# ---- operations --------------------------------------------------------------------------------


def _lookup_release(
    host: Host, space: NamespaceId, keys: Sequence[BlockKey], series: Series
) -> float:
    """Seconds of a lookup that pins all keys, the release, and a Ping."""
    start = time.perf_counter()
    answer = host.client.lookup(space, keys, ANSWER_WAIT_S)
    if answer is None:
        raise DaemonUnavailableError("the bench's daemon gave no answer to a lookup")
    host.client.release([answer.lease])
    host.ping()
    seconds = time.perf_counter() - start
    series.expect(len(set(answer.offsets.tolist())) == len(keys), "a lookup missed stored blocks")
    series.expect(answer.pending == 0, "a lookup found blocks that were still being written")
    return seconds


def _store(host: Host, space: NamespaceId, runs: Sequence[Run], series: Series) -> float:
    """Seconds of a reserve of all keys, the commit, and a Ping."""
    count = sum(len(keys) for _, keys in runs)
    flags = [True] * count
    start = time.perf_counter()
    grant = host.client.reserve(space, runs, ANSWER_WAIT_S)
    if grant is None:
        raise DaemonUnavailableError("the bench's daemon granted no slot")
    host.client.commit(grant.lease, flags)
    host.ping()
    seconds = time.perf_counter() - start
    offsets = {int(offset) for offset in grant.offsets if offset >= 0}
    series.expect(len(offsets) == count, "a reserve granted fewer slots than blocks")
    return seconds


# ---- samples -----------------------------------------------------------------------------------


def _sample_noop(world: World, echo: EchoClient, series: Series) -> None:
    """Bare echoes, Pings, bare echoes; each between the same two threads of the same processes."""
    series.note("echo_a", _echo_phase(world.small, echo))
    start = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        world.small.ping()
    series.note("ping", (time.perf_counter() - start) / ROUND_TRIPS)
    series.note("echo_b", _echo_phase(world.small, echo))


def _echo_phase(host: Host, echo: EchoClient) -> float:
    """Seconds of one echo. The Ping wakes the daemon's loop, which then finds the echo waiting."""
    frame = wire.encode(wire.Ping(1 << 20))
    echo.send(frame)
    host.ping()
    echo.receive()
    start = time.perf_counter()
    for _ in range(ROUND_TRIPS):
        echo.send(frame)
        echo.receive()
    seconds = (time.perf_counter() - start) / ROUND_TRIPS
    echo.send(STOP)
    echo.receive()
    return seconds


def _sample_lookups(world: World, series: Series) -> None:
    """The arms take turns, so that no lookup finds the caches as its own predecessor left them."""
    small, large = world.small, world.large
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for arm, host, space, keys in (
            ("lookup_a", small, world.small_space, world.prompt),
            ("lookup_large", large, world.large_space, world.prompt),
            ("lookup_b", small, world.small_space, world.prompt),
            ("lookup_random", large, world.large_space, world.scattered),
        ):
            host.ping()
            times.setdefault(arm, []).append(_lookup_release(host, space, keys, series))
    for arm, seconds in times.items():
        series.note(arm, statistics.median(seconds))


def _sample_stores(world: World, label: str, series: Series) -> None:
    """One prompt into free slots of the small daemon, one into the full pool of the large one."""
    keys = make_keys(label, BATCH)
    small, large = world.small, world.large
    small.ping()
    series.note("store", _store(small, world.store_space, [(None, keys)], series))
    large.ping()
    series.note("store_evict", _store(large, world.large_space, [(None, keys)], series))
    _lookup_release(small, world.store_space, keys, series)
    _lookup_release(large, world.large_space, keys, series)
    dropped = small.purge(world.store_space)
    series.expect(dropped == BATCH, "a purge dropped another number of blocks than stored")


# ---- results -----------------------------------------------------------------------------------


def _verify(world: World, series: Series, evicted: int) -> None:
    """The daemons' own books must agree with what was done to them."""
    for name, host, blocks, gone in (
        ("small", world.small, BATCH, 0),
        ("large", world.large, world.blocks_max, evicted),
    ):
        tree = host.read_stats()
        series.expect(tree["blocks"] == blocks, f"{name} index: {tree['blocks']} blocks")
        series.expect(tree["leases"] == 0, f"{name} index: {tree['leases']} leases are left")
        series.expect(tree["pinned_blocks"] == 0, f"{name} index: blocks are still pinned")
        counters = tree["counters"]
        series.expect(counters["evicted"] == gone, f"{name} index: {counters['evicted']} evicted")
        for counter in ("unknown_leases", "duplicate_messages", "protocol_errors", "abandoned"):
            series.expect(counters[counter] == 0, f"{name} index: {counters[counter]} {counter}")
        try:
            checked = host.check()
        except DaemonUnavailableError as error:
            series.expect(False, f"{name} index: the books are wrong: {error}")
        else:
            series.expect(checked == blocks, f"{name} index: {checked} blocks checked")


def _figures(series: Series) -> list[Figure]:
    echo = [(a + b) / 2 for a, b in zip(series.ms["echo_a"], series.ms["echo_b"], strict=True)]
    small = [(a + b) / 2 for a, b in zip(series.ms["lookup_a"], series.ms["lookup_b"], strict=True)]
    large = series.ms["lookup_large"]
    return [
        Figure("noop_ratio", median_ratio(series.ms["ping"], echo), "x", 1.5, "Ping / echo"),
        Figure("lookup_release_1000_ms", series.median("lookup_a", "lookup_b"), "ms", 1.5),
        Figure("reserve_commit_1000_ms", series.median("store"), "ms", 6.0),
        Figure("reserve_commit_evict_1000_ms", series.median("store_evict"), "ms", 9.0,
               "large index"),
        Figure("lookup_ratio_1e6_over_1e3", median_ratio(large, small), "x", 2.0,
               "large / small"),
        Figure("lookup_release_1000_large_ms", series.median("lookup_large"), "ms", 3.0,
               "large index"),
        Figure("lookup_release_1000_random_ms", series.median("lookup_random"), "ms", None,
               "large, scattered"),
        Figure("ping_us", series.median("ping") * 1000, "us"),
        Figure("echo_us", series.median("echo_a", "echo_b") * 1000, "us"),
    ]  # fmt: skip


def _report(series: Series, as_json: bool, blocks_max: int, samples: int) -> None:
    figures = _figures(series)
    spread = {
        "noop": aa_spread(series.ms["echo_a"], series.ms["echo_b"]),
        "lookup": aa_spread(series.ms["lookup_a"], series.ms["lookup_b"]),
    }
    is_void = max(spread.values()) > AA_SPREAD_MAX
    if as_json:
        print(json.dumps({
            **{figure.name: round(figure.value, 4) for figure in figures},
            "targets": {f.name: f.target for f in figures if f.target is not None},
            "met": {f.name: f.is_met for f in figures if f.target is not None},
            "blocks_max": blocks_max,
            "samples": samples,
            "aa_spread": {n: round(v, 4) if v < math.inf else None for n, v in spread.items()},
            "is_void": is_void,
            "verified": not series.problems,
            "problems": series.problems,
        }))  # fmt: skip
        return
    noise = ", ".join(
        f"{name} {value:.1%}" if value < math.inf else f"{name} unknown"
        for name, value in spread.items()
    )
    remarks = [
        f"{samples} samples; large index {blocks_max:,} blocks; each figure includes one Ping",
        f"A/A spread: {noise}" + ("; void: too noisy or too few samples" if is_void else ""),
        "verified" if not series.problems else "WRONG: " + "; ".join(series.problems),
    ]
    print_figures(f"1,000 blocks of {SLOT_BYTES}-byte slots", figures, remarks)
