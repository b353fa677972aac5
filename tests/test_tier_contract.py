"""Every tier of ours against the contract, and what is special to some of them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.s3_server import ACCESS_KEY, BUCKET, SECRET_KEY, S3Server
from tierkv.errors import ConfigError, TierUnavailableError
from tierkv.testing import FaultTier, TierContract, aligned_views, fill_slot, name_of
from tierkv.tiers import open_tier
from tierkv.tiers.base import Change, Outcome, TierSettings, read_verified, write_sealed
from tierkv.tiers.memory import MemoryTier
from tierkv.tiers.object_store import ObjectStoreTier

OK, MISSING, CORRUPT = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT
FULL, FAILED = Outcome.FULL, Outcome.FAILED
SLOT_BYTES = 8192
WAIT_MAX_S = 20.0


def memory_settings(capacity: int | None) -> TierSettings:
    return TierSettings(type="memory", capacity=capacity)


def fs_settings(directory, capacity: int, io: str) -> TierSettings:
    return TierSettings(type="fs", path=str(directory), capacity=capacity, reserve=0.0, io=io)


def object_settings(url: str, options=None, deadline_s: float = 10.0) -> TierSettings:
    return TierSettings(type="object", url=url, options=options or {}, deadline_s=deadline_s)


def slots(*names, slot_bytes: int = SLOT_BYTES):
    views = aligned_views(len(names), slot_bytes)
    for name, view in zip(names, views, strict=True):
        fill_slot(view, name)
    return views


def put(tier, *names):
    return write_sealed(tier, names, slots(*names))


def get(tier, *names):
    return read_verified(tier, names, aligned_views(len(names), SLOT_BYTES))


def flip_a_byte_of_the_file(directory, name) -> None:
    (path,) = [p for p in directory.rglob(f"*{name.key.hex()}*") if name.namespace.hex() in str(p)]
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 0xFF]))


# ---- the contract ------------------------------------------------------------------------------


class TestMemoryTier(TierContract):
    def make_tier(self, directory, capacity):
        return open_tier(memory_settings(capacity))


class TestObjectStoreTierOverFiles(TierContract):
    def make_tier(self, directory, capacity):
        self.directory = directory
        return open_tier(object_settings((directory / "store").as_uri()))

    def damage(self, tier, name):
        flip_a_byte_of_the_file(self.directory, name)


@pytest.fixture(scope="module")
def s3(tmp_path_factory):
    server = S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def s3_environment(monkeypatch):
    for variable in list(os.environ):
        if variable.startswith("AWS_") or variable.lower().endswith("_proxy"):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


def s3_settings(endpoint: str, prefix: str = "", deadline_s: float = 10.0, **options: str):
    defaults = {"endpoint": endpoint, "region": "us-east-1", "allow_http": "true"}
    return object_settings(f"s3://{BUCKET}/{prefix}", defaults | options, deadline_s)


@pytest.mark.usefixtures("s3_environment")
class TestObjectStoreTierOverS3(TierContract):
    stress_rounds = 25

    @pytest.fixture(autouse=True)
    def find_server(self, s3):
        self.endpoint = s3.endpoint

    def make_tier(self, directory, capacity):
        return open_tier(s3_settings(self.endpoint, prefix=directory.name))


class TestFsTierDirect(TierContract):
    io = "direct"

    def make_tier(self, directory, capacity):
        self.directory = directory
        return open_tier(fs_settings(directory / "store", capacity, self.io))

    def damage(self, tier, name):
        flip_a_byte_of_the_file(self.directory, name)


class TestFsTierBuffered(TestFsTierDirect):
    io = "buffered"


class TestFaultTierOverMemory(TierContract):
    def make_tier(self, directory, capacity):
        return FaultTier(open_tier(memory_settings(capacity)), directory / "control")


class TestFaultTierOverFs(TierContract):
    io = "buffered"

    def make_tier(self, directory, capacity):
        inner = open_tier(fs_settings(directory / "store", capacity, self.io))
        return FaultTier(inner, directory / "control")


class TestFaultTierOverFsDirect(TestFaultTierOverFs):
    io = "direct"


class TestFaultTierOverObjectStore(TierContract):
    def make_tier(self, directory, capacity):
        inner = open_tier(object_settings((directory / "store").as_uri()))
        return FaultTier(inner, directory / "control")


@pytest.mark.usefixtures("s3_environment")
class TestFaultTierOverS3(TierContract):
    stress_rounds = 5

    @pytest.fixture(autouse=True)
    def find_server(self, s3):
        self.endpoint = s3.endpoint

    def make_tier(self, directory, capacity):
        inner = open_tier(s3_settings(self.endpoint, prefix=f"fault-{directory.name}"))
        return FaultTier(inner, directory / "control")


def test_the_contract_finds_a_tier_that_breaks_it(tmp_path):
    """The negative control: a tier that loses writes, and one that flips bytes."""
    contract = TestFaultTierOverMemory()
    for fault in ("lose", "corrupt-read", "fail-read", "full"):
        tier = contract.make_tier(tmp_path / fault, 64 * contract.slot_bytes)
        (tmp_path / fault / "control" / fault).touch()
        with pytest.raises(AssertionError):
            contract.test_a_sealed_slot_comes_back_bit_for_bit(tier)


# ---- memory ------------------------------------------------------------------------------------


class Clock:
    def __init__(self, now: float = 0.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("capacity", [None, 0, -1])
def test_a_memory_tier_without_capacity_is_refused(capacity):
    with pytest.raises(ConfigError, match="capacity"):
        open_tier(memory_settings(capacity))


def test_an_unknown_type_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="memory, fs, object"):
        open_tier(TierSettings(type="tape"))


@pytest.mark.parametrize("use", ["read", "touch", "write"])
def test_a_used_block_gets_a_second_chance(use):
    tier = MemoryTier(memory_settings(3 * SLOT_BYTES))
    names = [name_of(n) for n in range(5)]
    put(tier, *names[:3])
    {"read": lambda: get(tier, names[0]), "touch": lambda: tier.touch(names[:1])}.get(
        use, lambda: put(tier, names[0])
    )()
    put(tier, names[3])
    assert tier.probe(names[:4]) == [OK, MISSING, OK, OK]
    put(tier, names[4])
    assert tier.probe(names) == [OK, MISSING, MISSING, OK, OK]
    assert tier.statistics() == {"blocks": 3, "bytes": 3 * SLOT_BYTES, "evicted": 2}
    assert tier.check() == []


def test_a_second_chance_is_only_one():
    tier = MemoryTier(memory_settings(2 * SLOT_BYTES))
    put(tier, name_of(0), name_of(1))
    tier.touch([name_of(0)])
    put(tier, name_of(2))
    assert tier.probe([name_of(0), name_of(1)]) == [OK, MISSING]
    put(tier, name_of(3))
    assert tier.probe([name_of(0), name_of(2), name_of(3)]) == [MISSING, OK, OK]


def test_all_blocks_used_still_leaves_room_for_a_new_one():
    tier = MemoryTier(memory_settings(3 * SLOT_BYTES))
    names = [name_of(n) for n in range(4)]
    put(tier, *names[:3])
    tier.touch(names[:3])
    assert put(tier, names[3]) == [OK]
    assert tier.probe(names) == [MISSING, OK, OK, OK]


def test_an_idle_block_of_a_memory_tier_is_purged_and_a_used_one_stays():
    clock = Clock(1000.0)
    tier = MemoryTier(memory_settings(9 * SLOT_BYTES), clock)
    names = [name_of(n) for n in range(3)]
    put(tier, *names)
    clock.now += 100.0
    tier.touch(names[:1])
    get(tier, names[1])
    assert tier.purge(None, 101.0) == 0
    assert tier.purge(None, 50.0) == 1
    assert tier.probe(names) == [OK, OK, MISSING]


def test_a_block_that_came_and_went_untold_is_not_told():
    tier = MemoryTier(memory_settings(9 * SLOT_BYTES))
    put(tier, name_of(0), name_of(1))
    tier.drop([name_of(0)])
    assert tier.take_changes(9) == [Change(name_of(1), True, SLOT_BYTES)]
    tier.drop([name_of(1)])
    put(tier, name_of(1))
    tier.drop([name_of(1)])
    assert tier.take_changes(9) == [Change(name_of(1), False)]
    assert tier.check() == []


# ---- object store ------------------------------------------------------------------------------


def test_a_purge_takes_blocks_written_before_and_nothing_foreign(tmp_path):
    clock = Clock(time.time())
    tier = ObjectStoreTier(object_settings(tmp_path.as_uri()), clock)
    foreign = tmp_path / name_of(0).namespace.hex() / "README.md"
    names = [name_of(n, space=n % 2) for n in range(4)]
    put(tier, *names)
    foreign.write_text("not ours")
    assert tier.purge(None, 50.0) == 0
    clock.now += 100.0
    assert tier.purge(names[0].namespace, 50.0) == 2
    assert tier.purge(None, 50.0) == 2
    assert tier.probe(names) == [MISSING] * 4
    assert foreign.read_text() == "not ours"


def test_objects_are_named_by_namespace_and_key(tmp_path):
    tier = open_tier(object_settings(tmp_path.as_uri()))
    name = name_of(1)
    put(tier, name)
    files = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert [str(path) for path in files] == [f"{name.namespace.hex()}/{name.key.hex()}"]


def test_a_block_that_is_there_is_not_sent_again(tmp_path):
    tier = open_tier(object_settings(tmp_path.as_uri()))
    put(tier, name_of(1))
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    before = path.stat()
    assert put(tier, name_of(1)) == [OK]
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert tier.statistics() == {"write_ok": 2, "present": 1, "late": 0}


def test_an_object_tier_over_s3_is_one_store_for_all_nodes(s3, s3_environment):
    one, other = (open_tier(s3_settings(s3.endpoint, "shared")) for _ in range(2))
    assert put(one, name_of(1)) == [OK]
    assert get(other, name_of(1)) == [OK]
    assert put(other, name_of(1)) == [OK]
    assert other.statistics()["present"] == 1
    assert (one.info.is_shared, one.info.is_durable, one.info.is_indexed) == (True, True, False)


def test_a_missing_bucket_is_told_with_the_endpoint(s3, s3_environment):
    settings = object_settings("s3://nowhere/x", s3_settings(s3.endpoint).options)
    with pytest.raises(TierUnavailableError, match=f"nowhere.*{s3.endpoint}.*404 NoSuchBucket"):
        open_tier(settings)


def test_a_refused_client_is_told_without_its_credentials(s3, s3_environment, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-secret")
    with pytest.raises(TierUnavailableError, match="HTTP 403") as caught:
        open_tier(s3_settings(s3.endpoint))
    text = f"{caught.value} {caught.value!r} {caught.value.__cause__}"
    assert "wrong-secret" not in text
    assert ACCESS_KEY not in text


def test_a_tier_does_not_show_credentials(s3, s3_environment):
    tier = open_tier(s3_settings(s3.endpoint))
    put(tier, name_of(7))
    assert SECRET_KEY not in f"{tier!r} {tier.statistics()}"
    assert s3.endpoint in repr(tier)


def test_a_store_that_went_away_fails_each_block(tmp_path, s3_environment):
    server = S3Server(tmp_path)
    try:
        tier = open_tier(s3_settings(server.endpoint, deadline_s=5.0))
        assert put(tier, name_of(1)) == [OK]
    finally:
        server.stop()
    names = [name_of(1), name_of(2)]
    assert get(tier, *names) == [FAILED, FAILED]
    assert tier.probe(names) == [FAILED, FAILED]
    assert put(tier, *names) == [FAILED, FAILED]
    assert tier.drop(names) == [FAILED, FAILED]
    with pytest.raises(TierUnavailableError, match="purge"):
        tier.purge(None, None)
    assert tier.statistics()["read_failed"] == 2


class Gate:
    """Stands between client and server; while it is shut, answers and requests stay in it.

    With an `answer` it gives that to every request itself, after `answer_after_s`.
    """

    def __init__(self, endpoint: str):
        host, _, port = endpoint.removeprefix("http://").partition(":")
        self.target = (host, int(port))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.open, self.over = threading.Event(), threading.Event()
        self.seen = b""
        self.answer: bytes | None = None
        self.answer_after_s = 0.0
        self.open.set()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self) -> None:
        peers: dict[socket.socket, socket.socket] = {}
        while not self.over.is_set():
            for ready in select.select([self.listener, *peers], [], [], 0.01)[0]:
                if ready is self.listener:
                    client, server = ready.accept()[0], socket.create_connection(self.target)
                    peers |= {client: server, server: client}
                elif ready in peers:
                    self.pass_on(ready, peers)
        for peer in peers:
            peer.close()
        self.listener.close()

    def pass_on(self, ready, peers) -> None:
        while not (self.open.wait(0.01) or self.over.is_set()):
            pass
        with contextlib.suppress(OSError):
            passed = ready.recv(1 << 20)
            self.seen += passed
            if passed and self.answer is not None:
                self.over.wait(self.answer_after_s)
                ready.sendall(b"HTTP/1.1 " + self.answer + b"\r\ncontent-length: 0\r\n\r\n")
                return
            if passed:
                peers[ready].sendall(passed)
                return
        peers.pop(peers.pop(ready)).close()

    def stop(self) -> None:
        self.over.set()
        self.thread.join(WAIT_MAX_S)


@pytest.fixture
def gate(s3):
    gate = Gate(s3.endpoint)
    yield gate
    gate.stop()


def test_a_call_to_a_stalled_store_ends_within_its_deadline(gate, s3_environment):
    """And the tier serves again when the store does."""
    tier = open_tier(s3_settings(gate.endpoint, "stall", deadline_s=0.5))
    names = [name_of(1), name_of(2)]
    assert put(tier, *names) == [OK, OK]
    gate.open.clear()
    for call in (lambda: get(tier, *names), lambda: put(tier, *names), lambda: tier.drop(names)):
        start = time.monotonic()
        assert call() == [FAILED, FAILED]
        assert time.monotonic() - start < 5.0
    gate.open.set()
    end = time.monotonic() + WAIT_MAX_S
    while get(tier, *names) != [OK, OK] and time.monotonic() < end:
        put(tier, *names)
    assert get(tier, *names) == [OK, OK]


def test_opening_a_stalled_store_ends_within_its_deadline(s3_environment):
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        endpoint = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(TierUnavailableError, match=endpoint):
            open_tier(s3_settings(endpoint, deadline_s=0.3))
        assert time.monotonic() - start < 5.0


def test_retries_do_not_outlast_the_deadline(gate, s3_environment):
    """The store answers, always with an error, and its second answer would come too late."""
    tier = open_tier(s3_settings(gate.endpoint, "busy", deadline_s=0.5))
    gate.answer, gate.answer_after_s = b"503 Slow Down", 0.4
    assert tier.probe([name_of(1)]) == [FAILED]
    assert tier.statistics() == {"probe_failed": 1, "late": 1}


def test_a_write_into_a_bucket_that_is_gone_fails(gate, s3_environment):
    """404 to a question is a missing block, 404 to a block is a missing bucket."""
    tier = open_tier(s3_settings(gate.endpoint, "gone"))
    gate.answer = b"404 Not Found"
    assert put(tier, name_of(1)) == [FAILED]
    assert get(tier, name_of(1)) == [MISSING]


def test_blocks_are_sent_without_hashing_them_again(gate, s3_environment):
    tier = open_tier(s3_settings(gate.endpoint, "unsigned"))
    assert put(tier, name_of(1)) == [OK]
    assert b"x-amz-content-sha256: UNSIGNED-PAYLOAD" in gate.seen


@pytest.mark.parametrize(
    ("url", "options", "match"),
    [
        (None, {}, "s3://bucket/prefix"),
        ("ftp://a/b", {}, "ftp://a/b"),
        ("memory://", {}, "s3://bucket/prefix"),
        ("s3://key:secret@bucket/x", {}, "environment"),
        ("s3://", {}, "refused"),
        ("s3://b/p", {"endpont": "x"}, "endpont"),
        ("s3://b/p", {"allow_http": "perhaps"}, "allow_http|refused"),
        ("s3://b/p", {"secret_access_key": "hidden"}, "secret_access_key.*environment"),
        ("s3://b/p", {"timeout": "9s"}, "deadline"),
        ("s3://b/p", {"endpoint": "http://127.0.0.1:1"}, "allow_http"),
        ("s3://b/p", {"endpoint": "http://key:hidden@127.0.0.1:1"}, "environment"),
        ("file:///tmp/x", {"endpoint": "x"}, "takes none"),
    ],
)
def test_a_url_or_option_of_no_use_is_refused(url, options, match, s3_environment):
    with pytest.raises(ConfigError, match=match) as caught:
        open_tier(TierSettings(type="object", url=url, options=options))
    assert "hidden" not in str(caught.value)


def test_without_obstore_the_message_says_what_to_install():
    text = (
        "import sys; sys.modules['obstore'] = None\n"
        "from tierkv.tiers import open_tier; from tierkv.tiers.base import TierSettings\n"
        "from tierkv.errors import ConfigError\n"
        "try: open_tier(TierSettings(type='object', url='file:///tmp'))\n"
        "except ConfigError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert "pip install 'tierkv-sdk[object]'" in out.stdout


# ---- faults ------------------------------------------------------------------------------------


class Commanded:
    """A fault tier over memory and the hand on its control directory."""

    def __init__(self, directory):
        self.control = directory / "control"
        self.inner = MemoryTier(memory_settings(64 * SLOT_BYTES))
        self.tier = FaultTier(self.inner, self.control)

    def order(self, fault: str, text: str = "") -> None:
        draft = self.control / "draft"
        draft.write_text(text)
        draft.rename(self.control / fault)

    def end(self, fault: str) -> None:
        (self.control / fault).unlink()

    def log(self) -> list[dict]:
        return [json.loads(line) for line in (self.control / "log").read_text().splitlines()]

    def wait_for(self, op: str) -> None:
        end = time.monotonic() + WAIT_MAX_S
        while op not in [line["op"] for line in self.log()]:
            assert time.monotonic() < end, f"no {op} in the log"
            select.select([], [], [], 0.005)


@pytest.fixture
def commanded(tmp_path):
    return Commanded(tmp_path)


A, B = name_of(1), name_of(2)


def test_a_fault_tier_logs_every_call_and_its_outcomes(commanded):
    put(commanded.tier, A)
    get(commanded.tier, A, B)
    commanded.tier.probe([B])
    commanded.tier.drop([A])
    commanded.tier.purge(None, None)
    a, b = A.key.hex(), B.key.hex()
    assert commanded.log() == [
        {"op": "write", "keys": [a], "outcomes": ["OK"]},
        {"op": "read", "keys": [a, b], "outcomes": ["OK", "MISSING"]},
        {"op": "probe", "keys": [b], "outcomes": ["MISSING"]},
        {"op": "drop", "keys": [a], "outcomes": ["OK"]},
        {"op": "purge", "keys": [], "outcomes": []},
    ]


@pytest.mark.parametrize(
    ("fault", "call", "outcome"),
    [("fail-read", get, FAILED), ("fail-write", put, FAILED), ("full", put, FULL)],
)
def test_a_failing_call_fails_all_blocks_or_those_named(commanded, fault, call, outcome):
    assert put(commanded.tier, A, B) == [OK, OK]
    commanded.order(fault)
    assert call(commanded.tier, A, B) == [outcome, outcome]
    commanded.order(fault, f"{B.key.hex()[:8]}\nffffffff\n")
    assert call(commanded.tier, A, B) == [OK, outcome]
    commanded.end(fault)
    assert call(commanded.tier, A, B) == [OK, OK]


def test_a_failed_write_leaves_nothing(commanded):
    commanded.order("fail-write")
    put(commanded.tier, A)
    assert commanded.inner.probe([A]) == [MISSING]


def test_a_corrupt_read_is_found_and_the_block_dropped(commanded):
    put(commanded.tier, A, B)
    commanded.order("corrupt-read", A.key.hex())
    assert get(commanded.tier, A, B) == [CORRUPT, OK]
    assert commanded.inner.probe([A, B]) == [MISSING, OK]
    assert get(commanded.tier, A) == [MISSING]


def test_a_lost_write_is_ok_and_gone(commanded):
    commanded.order("lose", A.key.hex())
    assert put(commanded.tier, A, B) == [OK, OK]
    assert get(commanded.tier, A, B) == [MISSING, OK]


def test_an_unavailable_tier_raises_in_every_call(commanded):
    commanded.order("unavailable")
    (view,) = slots(A)
    for call in (
        lambda: commanded.tier.probe([A]),
        lambda: commanded.tier.read([A], [view]),
        lambda: commanded.tier.write([A], [view]),
        lambda: commanded.tier.drop([A]),
        lambda: commanded.tier.purge(None, None),
    ):
        with pytest.raises(TierUnavailableError, match="unavailable"):
            call()
    assert {tuple(line["outcomes"]) for line in commanded.log()} == {("UNAVAILABLE",)}
    commanded.end("unavailable")
    assert put(commanded.tier, A) == [OK]


def test_a_slow_read_takes_its_time_and_succeeds(commanded):
    put(commanded.tier, A)
    commanded.order("slow-read", "80")
    start = time.monotonic()
    assert get(commanded.tier, A) == [OK]
    assert time.monotonic() - start >= 0.08


@pytest.mark.parametrize(("fault", "call"), [("hang-read", get), ("hang-write", put)])
def test_a_hanging_call_goes_on_when_its_file_is_gone(commanded, fault, call):
    """Calls for other blocks pass meanwhile."""
    put(commanded.tier, A, B)
    commanded.order(fault, A.key.hex()[:10])
    outcomes: list[Outcome] = []
    thread = threading.Thread(target=lambda: outcomes.extend(call(commanded.tier, A)))
    thread.start()
    try:
        commanded.wait_for(fault)
        assert call(commanded.tier, B) == [OK]
        assert thread.is_alive()
        assert outcomes == []
    finally:
        commanded.end(fault)
        thread.join(WAIT_MAX_S)
    assert outcomes == [OK]
    ops = [line["op"] for line in commanded.log() if line["keys"] == [A.key.hex()]]
    assert ops[-2:] == [fault, fault.removeprefix("hang-")]
