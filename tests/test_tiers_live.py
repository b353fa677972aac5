"""Tiers as they live: a real daemon, its I/O processes, and files that outlive both.

Faults of the stores themselves are in `test_tiers_live_faults.py`. Nothing here waits by the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.core_world import SPACE, keys_of
from tests.fault_io import faulty_io
from tests.fs_mounts import read_only, undeletable
from tests.processes import (
    SLOT_BYTES,
    WAIT_MAX_S,
    Child,
    EngineHalf,
    Node,
    raw_peer,
    wait_for,
    wait_for_end,
)
from tierkv.config import TierConfig
from tierkv.errors import RefusedError
from tierkv.service import wire

SLOTS = 8
DEADLINE_S = 0.5  # of the tiers: an operation that takes longer is a miss
IN_TIME_S = 5.0  # an answer, although its tier hangs for as long as a test likes
END_MAX_S = 15.0  # of a daemon whose tier hangs
PREFIXES = ("abcd", "efgh", "ijkl", "mnop", "qrst", "uvwx")


class Faults:
    """Commands to the `FaultTier` of one I/O process, and what it did."""

    def __init__(self, control: Path) -> None:
        self.control = control

    def set(self, fault: str, letters: str = "") -> None:
        """Let a fault begin, for the blocks of these letters or for all."""
        self.control.mkdir(parents=True, exist_ok=True)
        fresh = self.control / "fresh"
        fresh.write_text("\n".join(key.hex() for key in keys_of(letters)))
        fresh.rename(self.control / fault)

    def end(self, fault: str) -> None:
        (self.control / fault).unlink()

    def calls(self, op: str, letter: str = "") -> int:
        """Calls of this kind that ended, or began to hang, with the block of a letter."""
        with contextlib.suppress(FileNotFoundError):
            lines = [json.loads(text) for text in (self.control / "log").read_text().splitlines()]
            keys = {key.hex() for key in keys_of(letter)}
            return sum(line["op"] == op and keys <= set(line["keys"]) for line in lines)
        return 0


class LiveNode(Node):
    """A node with tiers whose stores fail on command, and verbs that read well."""

    def __init__(
        self,
        tmp_path: Path,
        *tiers: TierConfig,
        slots: int = SLOTS,
        policy: str = "write_through",
        io_command: tuple[str, ...] = (),
        **service: object,
    ) -> None:
        tmp_path.mkdir(exist_ok=True)
        self.control = tmp_path / "control"
        super().__init__(
            tmp_path,
            slots,
            io_command=io_command or faulty_io(self.control),
            log=tmp_path / "log",
            tiers=tiers,
            write_policy=policy,
        )
        dram = self.config.dram.model_copy(update={"promote_share_max": 1.0})
        changed = self.config.service.model_copy(update=service)
        self.config = self.config.model_copy(update={"dram": dram, "service": changed})
        self.faults = Faults(self.control / "fs")

    def start(self) -> Child:
        """A daemon whose tiers are known whole."""
        daemon = self.start_daemon()
        self.wait_ready()
        return daemon

    def tier(self, at: int = 0) -> dict:
        return self.stats()["tiers"][at]

    def count(self, counter: str) -> int:
        return self.stats()["counters"][counter]

    def is_ready(self) -> bool:
        tiers = self.stats()["tiers"]
        return all(t["is_up"] and (t["is_scanned"] or t["tier"] == "object") for t in tiers)

    def wait_ready(self) -> None:
        wait_for(self.is_ready, what="the tiers to be known")

    def is_written(self) -> bool:
        """Whether no block is owed, and no tier has work."""
        stats = self.stats()
        return not stats["dirty_blocks"] and not any(t["jobs"] for t in stats["tiers"])

    def wait_written(self) -> None:
        wait_for(self.is_written, what="the tiers to have everything")

    def purge(self, *tiers: str, namespace: str = "", older_than_s: float = 0.0):
        return self.admin.ask(
            lambda seq: wire.Purge(seq, namespace, list(tiers), older_than_s), WAIT_MAX_S
        )

    def forget(self, *tiers: str) -> None:
        """Drop the blocks of DRAM, or of these tiers."""
        assert self.purge(*(tiers or ("dram",))).problems == []

    def io_pid(self, tier: str = "fs") -> int:
        """The process that serves a tier; while another one is dying there may be two."""
        names = [p.name for p in (self.run_directory / "mappers").glob(f"io-{tier}.*")]
        living = [pid for n in names if Path("/proc", pid := n.split(".")[1]).exists()]
        assert len(living) == 1, (names, living)
        return int(living[0])

    def says(self, text: str) -> bool:
        """Whether the log of our daemons and their I/O processes has this text."""
        return text in self.log.read_text()


def fs(tmp_path: Path, **more: object) -> TierConfig:
    """An fs tier of 64 blocks."""
    settings = {"capacity": 64 * SLOT_BYTES, "deadline": DEADLINE_S} | more
    return TierConfig(type="fs", path=tmp_path / "ssd", **settings)


def store(tmp_path: Path, **more: object) -> TierConfig:
    """An object store in a directory."""
    return TierConfig(type="object", url=f"file://{tmp_path}/bucket", **more)


def files_of(folder: Path) -> set[str]:
    """The letters of the blocks that lie in an fs tier or an object store."""
    return {bytes.fromhex(p.name)[:1].decode() for p in folder.rglob("*00") if p.is_file()}


@contextlib.contextmanager
def closing(node: LiveNode) -> Iterator[LiveNode]:
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def node(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path))) as node:
        yield node


def return_to(node: LiveNode, engine: EngineHalf) -> None:
    """Let an engine, which has noticed the loss, greet the new daemon of its node."""
    engine.connect()
    engine.quiesce()
    node.wait_granting()
    node.wait_ready()


# ---- the way of a block ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "direct", "buffered", "object"])
def test_a_stored_block_comes_back_from_the_tier_when_dram_has_lost_it(tmp_path, kind):
    tier = {
        "memory": lambda: TierConfig(type="memory", capacity=64 * SLOT_BYTES),
        "direct": lambda: fs(tmp_path, io="direct"),
        "buffered": lambda: fs(tmp_path, io="buffered"),
        "object": lambda: store(tmp_path),
    }[kind]()
    with closing(LiveNode(tmp_path, tier)) as node:
        node.start()
        engine = node.engine("e")
        assert engine.store("abcd") == 4
        node.wait_written()
        assert engine.load_from("abcd") == [0] * 4
        node.forget("dram")
        assert engine.load_from("abcd") == [1] * 4
        assert engine.load_from("abcd") == [0] * 4, "it is in DRAM again"
        node.wait_written()
        assert (node.count("blocks_demoted"), node.count("blocks_promoted")) == (4, 4)
        assert node.held() == (0, 0)
        node.check()


def test_a_block_that_only_the_object_store_has_is_on_the_ssd_again_after_a_load(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path), store(tmp_path))) as node:
        node.start()
        engine = node.engine("e")
        assert engine.store("abcd") == 4
        node.wait_written()
        assert files_of(tmp_path / "ssd") == files_of(tmp_path / "bucket") == set("abcd")
        node.forget("dram", "fs")
        assert files_of(tmp_path / "ssd") == set()
        assert engine.load_from("abcd") == [2] * 4
        node.wait_written()
        assert files_of(tmp_path / "ssd") == set("abcd")
        node.forget("dram")
        assert engine.load_from("abcd") == [1] * 4
        node.check()


def test_a_prefix_that_lies_in_three_tiers_is_one_hit(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path), store(tmp_path))) as node:
        node.start()
        engine = node.engine("e")
        engine.store("abcdef")
        node.wait_written()
        node.forget("dram")
        for letter in "ef":
            (file_of(tmp_path, letter)).unlink()
        engine.load("ab")
        sources = engine.load_from("abcdef")
        if len(sources) < 6:  # the SSD's books learn of the loss by the read that fails
            node.forget("dram")
            engine.load("ab")
            sources = engine.load_from("abcdef")
        assert sources == [0, 0, 1, 1, 2, 2]
        node.wait_written()
        assert files_of(tmp_path / "ssd") == set("abcdef")
        node.check()


def file_of(tmp_path: Path, letter: str) -> Path:
    """Where the fs tier keeps a block."""
    key = keys_of(letter)[0].hex()
    return tmp_path / "ssd" / SPACE.hex() / key[:2] / key


# ---- write-back and the flush ------------------------------------------------------------------


def store_all(node: LiveNode, engine: EngineHalf) -> None:
    """Store more than DRAM holds, no faster than the cleaner works."""
    for prefix in PREFIXES:
        wait_for(lambda: node.stats()["dirty_blocks"] <= SLOTS // 2, what="the cleaner")
        assert engine.store(prefix) == len(prefix)


def test_a_working_set_larger_than_dram_ends_in_the_tier_and_outlives_the_daemon(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path), policy="write_back")) as node:
        daemon = node.start()
        engine = node.engine("e")
        store_all(node, engine)
        wait_for(lambda: node.stats()["dirty_blocks"] <= SLOTS // 2, what="the cleaner")
        assert node.count("writeback_shed") == 0
        assert sum(engine.load(prefix) for prefix in PREFIXES) == 24
        assert node.count("blocks_promoted") >= 24 - SLOTS
        engine.store("yz")
        assert node.stats()["dirty_blocks"] > 0, "something is owed"
        daemon.process.terminate()
        assert daemon.process.wait(WAIT_MAX_S) == 0
        assert node.says("not_flushed=0")
        assert files_of(tmp_path / "ssd") == set("".join(PREFIXES)) | set("yz")
        engine.notice_loss()
        node.start()
        return_to(node, engine)
        for prefix in (*PREFIXES, "yz"):
            assert engine.load_from(prefix) == [1] * len(prefix)
        node.check()


@pytest.mark.parametrize("why", ["no budget", "a write hangs", "the process stands still"])
def test_the_log_says_how_many_blocks_could_not_be_flushed_and_the_daemon_ends(tmp_path, why):
    budget = 0.0 if why == "no budget" else 0.3
    tier = fs(tmp_path, deadline=10.0)
    with closing(LiveNode(tmp_path, tier, policy="write_back", flush_budget=budget)) as node:
        daemon = node.start()
        engine = node.engine("e")
        assert engine.store("abc") == 3
        pid = node.io_pid()
        if why == "a write hangs":
            node.faults.set("hang-write")
        elif why == "the process stands still":
            os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
        daemon.process.terminate()
        assert daemon.process.wait(WAIT_MAX_S) == 0
        assert time.monotonic() - begin < END_MAX_S
        assert node.says("not_flushed=3")
        wait_for_end(pid)
        assert files_of(tmp_path / "ssd") == set()
        engine.notice_loss()
        if why == "a write hangs":
            node.faults.end("hang-write")
        node.start()
        return_to(node, engine)
        assert engine.load("abc") == 0
        assert engine.store("abc") == 3
        assert engine.load("abc") == 3
        node.check()


def test_nothing_is_granted_while_the_daemon_flushes_and_its_log_adds_up(tmp_path):
    """What were stored now would be lost, or keep the flush from ever ending."""
    tier = fs(tmp_path, deadline=20.0)
    with closing(LiveNode(tmp_path, tier, policy="write_back", flush_budget=20.0)) as node:
        daemon = node.start()
        engine, dying = node.engine("e"), node.child("dying")
        assert engine.store("ab") == 2
        node.faults.set("hang-write")
        daemon.process.terminate()
        wait_for(lambda: node.faults.calls("hang-write"), what="the flush")
        assert engine.store("x") == 0
        dying.kill()
        wait_for(lambda: node.stats()["engines"] == 1, what="the daemon to look at locks")
        assert engine.store("y") == 0
        node.faults.end("hang-write")
        assert daemon.process.wait(WAIT_MAX_S) == 0
        assert node.says("flushed: blocks=2 not_flushed=0")
        assert files_of(tmp_path / "ssd") == set("ab")


# ---- deaths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_auto", [False, True])
def test_after_a_kill_of_the_daemon_the_tier_is_trusted_and_dram_is_not(node, tmp_path, is_auto):
    daemon = None if is_auto else node.start()
    engine = node.engine("e", is_auto=is_auto)
    node.wait_ready()
    assert engine.store("abcd") == 4
    node.wait_written()
    pid, io_pid = node.note_daemon(engine), node.io_pid()
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    wait_for_end(io_pid)
    engine.notice_loss()
    assert engine.load("abcd") == 0
    file_of(tmp_path, "c").unlink()  # from now on DRAM alone has had it
    node.forget_admin()
    if daemon is not None:
        daemon.kill()
        node.start_daemon()
    engine.connect()
    assert node.note_daemon(engine) != pid
    return_to(node, engine)
    assert engine.load_from("abcd") == [1, 1]
    assert engine.store("cd", after="b") == 2
    node.wait_written()
    node.forget("dram")
    assert engine.load_from("abcd") == [1] * 4
    node.check()


@pytest.mark.parametrize("fate", [signal.SIGKILL, signal.SIGSTOP])
def test_an_io_process_that_is_killed_or_stands_still_is_replaced(node, fate):
    daemon = node.start()
    engine = node.engine("e")
    engine.store("ab")
    engine.store("cd")
    node.wait_written()
    node.forget("dram")
    assert engine.load_from("cd") == [1, 1]
    pid, epoch = node.io_pid(), node.tier()["process"]
    os.kill(pid, fate)
    begin = time.monotonic()
    assert engine.load("cd") == 2, "DRAM serves on"
    assert engine.store("ef") == 2
    engine.load("ab")  # a miss in time, or the hit of a new process
    assert time.monotonic() - begin < IN_TIME_S
    wait_for(lambda: node.tier()["process"] > epoch, what="the loss to be seen")
    wait_for_end(pid)
    node.wait_ready()
    wait_for(lambda: engine.load("ab") == 2, what="the reads to be tried again")
    wait_for(lambda: node.tier()["is_writing"], what="the writes to be tried again")
    assert engine.store("gh") == 2
    node.wait_written()
    node.forget("dram")
    assert engine.load_from("ab") == [1, 1]
    assert engine.load_from("gh") == [1, 1]
    assert daemon.process.poll() is None
    assert node.held() == (0, 0)
    node.check()


def test_an_io_process_killed_in_the_middle_of_writes_leaves_blocks_or_nothing(node, tmp_path):
    node.start()
    engine = node.engine("e")
    for round_ in range(3):
        node.faults.set("hang-written" if round_ % 2 else "hang-write")
        engine.store(PREFIXES[round_])
        fault = "hang-written" if round_ % 2 else "hang-write"
        wait_for(lambda r=round_, f=fault: node.faults.calls(f) > r // 2, what="the write")
        os.kill(node.io_pid(), signal.SIGKILL)
        node.faults.end(fault)
        wait_for(lambda r=round_: node.tier()["process"] > r, what="the loss to be seen")
        node.wait_ready()
        assert engine.load(PREFIXES[round_]) == 4, "DRAM has it"
    node.wait_written()
    assert files_of(tmp_path / "ssd") == set(PREFIXES[1])
    node.forget("dram")
    assert engine.load_from(PREFIXES[1]) == [1] * 4
    assert [engine.load(PREFIXES[at]) for at in (0, 2)] == [0, 0]
    wait_for(lambda: not list((tmp_path / "ssd").rglob(".tmp*")), what="what writers left")
    node.check()


def test_after_a_kill_in_the_middle_of_a_read_nothing_is_granted_before_the_reader_is_gone(node):
    node.faults.set("outlive")
    daemon = node.start()
    engine = node.engine("e")
    engine.store("abcd")
    node.wait_written()
    node.forget("dram")
    node.faults.set("hang-read")
    assert engine.client.send_lookup(SPACE, keys_of("abcd"))
    wait_for(lambda: node.faults.calls("hang-read"), engine.client, what="the read")
    reader = node.io_pid()
    os.kill(reader, signal.SIGSTOP)  # as a thread in the kernel it ends neither by itself nor by us
    try:
        daemon.kill()
        engine.notice_loss()
        node.faults.end("outlive")
        node.faults.end("hang-read")
        node.start_daemon()
        engine.connect()
        engine.quiesce()
        control = node.child("control")
        control.kill()
        wait_for(lambda: node.stats()["engines"] == 1, what="the daemon to look at locks")
        assert not node.stats()["is_granting"], "the old reader may still write into any slot"
        assert engine.store("x") == 0
        assert engine.load("abcd") == 0
        assert list((node.run_directory / "mappers").glob(f"io-fs.{reader}.*"))
    finally:
        os.kill(reader, signal.SIGKILL)
    return_to(node, engine)
    assert engine.load_from("abcd") == [1] * 4
    assert engine.store("ef") == 2
    node.wait_written()
    node.check()


# ---- two daemons -------------------------------------------------------------------------------


def test_a_second_daemon_serves_without_the_directory_until_the_first_has_ended(tmp_path):
    tier = fs(tmp_path)
    first, second = LiveNode(tmp_path / "1", tier), LiveNode(tmp_path / "2", tier)
    with closing(first), closing(second):
        daemon = first.start()
        one = first.engine("one")
        one.store("abcd")
        first.wait_written()
        second.start_daemon()
        two = second.engine("two")
        wait_for(lambda: second.says("is off"), what="the second to be refused")
        assert second.says(f"process {first.io_pid()} ")
        assert second.says("give this tier a directory of its own")
        assert (two.store("xy"), two.load("xy")) == (2, 2)
        assert not second.tier()["is_up"]
        assert one.load("abcd") == 4
        first.check()
        daemon.process.terminate()
        assert daemon.process.wait(WAIT_MAX_S) == 0
        second.wait_ready()
        assert two.load_from("abcd") == [1] * 4
        second.wait_written()
        assert files_of(tmp_path / "ssd") == set("abcdxy")
        second.check()


# ---- purge -------------------------------------------------------------------------------------


@contextlib.contextmanager
def purging(node: LiveNode, *tiers: str) -> Iterator[Callable[[], wire.PurgedReply | None]]:
    """A purge that is asked for and may take its time; gives what tells its answer, if any."""
    peer = raw_peer(node.socket)
    try:
        hello = wire.Hello(1, wire.VERSION_MIN, wire.VERSION_MAX, "", False, [], "")
        peer.send(wire.encode(hello))
        assert isinstance(_hear(peer), wire.Welcome)
        peer.send(wire.encode(wire.Purge(2, "", list(tiers))))
        yield lambda: _hear(peer) if peer.poll(0) else None
    finally:
        peer.close()


def _hear(peer):
    assert peer.poll(WAIT_MAX_S * 1000), "no answer"
    return wire.decode_reply(peer.recv())


def answer_of(hear: Callable[[], wire.PurgedReply | None]) -> wire.PurgedReply:
    found = []
    wait_for(lambda: found or found.extend([r for r in [hear()] if r]), what="the acknowledgement")
    return found[0]


@pytest.fixture
def patient(tmp_path):
    """A node whose tier may hang for long before its process is replaced."""
    with closing(LiveNode(tmp_path, fs(tmp_path, deadline=WAIT_MAX_S))) as node:
        yield node


def test_nothing_of_before_comes_back_after_a_purge_although_writes_hung(patient, tmp_path):
    node = patient
    node.start()
    engine = node.engine("e")
    engine.store("abcd")
    node.wait_written()
    node.faults.set("hang-write")
    engine.store("efgh")
    wait_for(lambda: node.faults.calls("hang-write"), what="the write")
    with purging(node) as hear:
        wait_for(lambda: node.faults.calls("purge"), what="the tier to be purged")
        assert files_of(tmp_path / "ssd") == set()
        assert [engine.load(text) for text in ("abcd", "efgh")] == [0, 0]
        assert hear() is None, "an older write may still bring a block back"
        assert engine.store("ijkl") == 4, "stores go on"
        node.faults.end("hang-write")
        reply = answer_of(hear)
    assert reply.problems == []
    assert reply.dropped == {"dram": 8, "fs": 4}
    assert not files_of(tmp_path / "ssd") & set("abcdefgh")
    assert [engine.load(text) for text in ("abcd", "efgh")] == [0, 0]
    node.wait_written()
    node.forget("dram")
    assert engine.load_from("ijkl") == [1] * 4
    node.check()


def test_nothing_comes_back_after_a_purge_although_a_writing_process_was_killed(patient, tmp_path):
    """It had written the blocks, after the purge of its store, and told nobody."""
    node = patient
    node.start()
    engine = node.engine("e")
    node.faults.set("hang-write")
    node.faults.set("hang-written")
    engine.store("abcd")
    wait_for(lambda: node.faults.calls("hang-write"), what="the write")
    with purging(node) as hear:
        wait_for(lambda: node.faults.calls("purge"), what="the tier to be purged")
        node.faults.end("hang-write")
        wait_for(lambda: node.faults.calls("hang-written"), what="the files to be there")
        assert files_of(tmp_path / "ssd") == set("abcd")
        os.kill(node.io_pid(), signal.SIGKILL)
        node.faults.end("hang-written")
        reply = answer_of(hear)
    node.wait_ready()
    assert engine.load("abcd") == 0
    assert files_of(tmp_path / "ssd") == set() or reply.problems
    node.check()


def test_a_block_stored_anew_is_not_written_while_an_older_write_of_it_runs(tmp_path):
    """A tier is never called twice at a time for writing one name."""
    tier = fs(tmp_path, deadline=WAIT_MAX_S, write_threads=4)
    with closing(LiveNode(tmp_path, tier)) as node:
        node.start()
        engine = node.engine("e")
        node.faults.set("hang-write")
        engine.store("ab")
        wait_for(lambda: node.faults.calls("hang-write", "a"), what="the write")
        node.forget("dram")
        assert engine.store("ab") == 2
        assert engine.store("cd") == 2
        wait_for(lambda: node.faults.calls("hang-write", "c"), what="what came after it")
        begun = node.faults.calls("hang-write", "a")
        node.faults.end("hang-write")
        node.wait_written()
        assert begun == 1
        node.forget("dram")
        assert engine.load_from("ab") == engine.load_from("cd") == [1, 1]
        node.check()


def test_a_purge_of_a_tier_that_is_not_up_says_so_and_another_one_helps(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path))) as node:
        node.start()
        engine = node.engine("e")
        engine.store("abcd")
        node.wait_written()
        node.faults.set("hang-write")
        engine.store("ef")
        wait_for(lambda: node.faults.calls("hang-write"), what="the write")
        os.kill(node.io_pid(), signal.SIGSTOP)
        reply = node.purge()
        (problem,) = reply.problems
        assert problem.startswith("fs")
        assert "does not answer" in problem
        node.faults.end("hang-write")
        node.wait_ready()
        reply = node.purge()
        assert reply.problems == []
        assert reply.dropped["fs"] == 4
        assert engine.load("abcd") == engine.load("ef") == 0
        assert files_of(tmp_path / "ssd") == set()
        node.check()


def test_a_purge_takes_the_named_tier_or_namespace_or_what_is_old_and_nothing_else(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path), store(tmp_path))) as node:
        node.start()
        engine = node.engine("e")
        engine.store("abcd")
        node.wait_written()
        assert node.purge("object").dropped == {"object": 4}
        assert files_of(tmp_path / "bucket") == set()
        assert node.purge("fs", older_than_s=3600.0).dropped == {"fs": 0}
        assert engine.load_from("abcd") == [0] * 4
        os.utime(file_of(tmp_path, "d"), (1, 1))
        assert node.purge(namespace=SPACE.hex()[:8], older_than_s=3600.0).dropped == {
            "dram": 0, "fs": 0, "object": 0,
        }  # fmt: skip
        node.forget("dram")
        assert engine.load_from("abcd") == [1] * 4, "and asked the object store in vain"
        with pytest.raises(RefusedError, match="0 namespaces begin with ff"):
            node.purge(namespace="ff")
        with pytest.raises(RefusedError, match="no tier is named tape"):
            node.purge("tape")
        assert node.purge(namespace=SPACE.hex()).dropped["fs"] == 4
        assert engine.load("abcd") == 0
        node.check()


def test_what_is_too_old_is_purged_by_age_and_the_rest_of_the_tier_stays(tmp_path):
    with closing(LiveNode(tmp_path, fs(tmp_path))) as node:
        daemon = node.start()
        engine = node.engine("e")
        engine.store("abcd")
        engine.store("ef")
        node.wait_written()
        daemon.process.terminate()
        assert daemon.process.wait(WAIT_MAX_S) == 0
        for letter in "abcd":
            os.utime(file_of(tmp_path, letter), (1, 1))
        engine.notice_loss()
        node.start()
        return_to(node, engine)
        assert node.purge(older_than_s=3600.0).dropped == {"dram": 0, "fs": 4}
        assert engine.load("abcd") == 0
        assert engine.load_from("ef") == [1, 1]
        node.check()


@pytest.mark.parametrize("fault", [undeletable, read_only])
def test_a_purge_that_could_not_remove_a_file_says_so(tmp_path, fault):
    """Else what was purged for being wrong is a hit again after the next start."""
    with closing(LiveNode(tmp_path, fs(tmp_path))) as node:
        node.start()
        engine = node.engine("e")
        engine.store("ab")
        node.wait_written()
        with fault(file_of(tmp_path, "a") if fault is undeletable else tmp_path / "ssd"):
            reply = node.purge()
            assert "a" in files_of(tmp_path / "ssd")
            assert engine.load("ab") == 0
        assert reply.problems
        assert node.purge().problems == []
        assert files_of(tmp_path / "ssd") == set()
        node.check()


# ---- all together ------------------------------------------------------------------------------

SEED = 20261129
ROUNDS = 120
KILLS = (30, 60, 90)
BACK_AFTER = 10  # rounds after a kill without the tier
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"


def test_the_books_are_right_while_blocks_are_written(tmp_path):
    """`tierkv check` is asked of a daemon that serves."""
    tier = fs(tmp_path, capacity=12 * SLOT_BYTES)
    with closing(LiveNode(tmp_path, tier)) as node:
        node.start()
        engine, stored = node.child("e"), 0
        for at in range(0, 4 * len(LETTERS), 4):
            text = LETTERS[at % len(LETTERS) :][:4]
            print(json.dumps(["store", text]), file=engine.process.stdin)
            node.check()
            stored += engine.hear()  # 0 while all of DRAM is being written
        assert stored > len(LETTERS)
        node.wait_written()
        engine.call("store", "abcd")
        node.wait_written()
        node.forget("dram")
        assert engine.call("load_from", "abcd") == [1] * 4
        node.check()


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_two_engines_get_right_bytes_or_none_while_the_io_process_is_killed(tmp_path, policy):
    dice = random.Random(f"{SEED} {policy}")
    print(f"seed: {SEED}")
    tier = fs(tmp_path, capacity=24 * SLOT_BYTES, deadline=2.0)
    texts = [LETTERS[at : at + 4] for at in range(0, len(LETTERS), 4)]
    sources: Counter[int] = Counter()
    with closing(LiveNode(tmp_path, tier, policy=policy)) as node:
        node.start()
        engines = [node.child("one"), node.child("two")]
        for round_ in range(ROUNDS):
            asked = []
            for engine in engines:
                text = dice.choice(texts)
                verb = dice.choice(["load_from", "load_from", "store"])
                asked.append(verb)
                print(json.dumps([verb, text]), file=engine.process.stdin)
            for verb, engine in zip(asked, engines, strict=True):
                found = engine.hear()
                if verb == "load_from":
                    sources.update(found)
            if round_ in KILLS:
                os.kill(node.io_pid(), signal.SIGKILL)
            if round_ - BACK_AFTER in KILLS:
                lost = KILLS.index(round_ - BACK_AFTER) + 1
                wait_for(lambda n=lost: node.tier()["process"] == n, what="the loss to be seen")
                node.wait_ready()
                wait_for(lambda: node.tier()["is_writing"], what="the pause")
        wait_for(lambda: node.held() == (0, 0) and not node.tier()["jobs"], what="all to be quiet")
        stats = node.stats()
        print(dict(sources), {k: v for k, v in stats["counters"].items() if v})
        assert sources[0] > 0
        assert sources[1] > 0
        assert stats["counters"]["blocks_demoted"] > 0
        assert stats["tiers"][0]["process"] == len(KILLS)
        node.check()
        assert len(files_of(tmp_path / "ssd")) <= 24
