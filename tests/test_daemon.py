"""Daemons, engines and workers as real processes, stopped and killed at every step.

Nothing here waits by the clock. Where a test must show that something does *not* happen, another
process to which it does happen is the control.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket as sockets
import stat
import subprocess
import sys
import time

import pytest

from tests.core_world import SPACE, keys_of
from tests.processes import SLOT_BYTES, WAIT_MAX_S, Node, raw_peer, wait_for, wait_for_end
from tierkv.errors import DaemonUnavailableError, PoolError
from tierkv.pool import DaemonLock, MapperLock, create_pool
from tierkv.service import wire
from tierkv.service.client import Attachment, Client
from tierkv.service.connection import HELLO_WAIT_S, Link
from tierkv.service.daemon import node_text

SLOTS = 8
LOAD = ["lookup", "start_read", "finish_read", "release"]
STORE = ["reserve", "start_write", "finish_write", "commit"]
DEADLINE_S = 0.05
FAR_BELOW_A_WAIT_S = 2.0


@pytest.fixture
def node(tmp_path):
    node = Node(tmp_path, SLOTS)
    yield node
    node.close()


# ---- engines die and stand still ---------------------------------------------------------------


@pytest.mark.parametrize("reached", LOAD[:3])
def test_a_reader_stopped_or_killed_at_any_step_costs_its_own_pins_only(node, reached):
    node.start_daemon()
    observer = node.engine("observer")
    assert observer.store("ab") == 2
    stopped, killed = node.child("stopped"), node.child("killed")
    done = LOAD[: LOAD.index(reached) + 1]
    for child in (stopped, killed):
        offsets, *_ = [child.call(step, *(["ab"] if step == "lookup" else [])) for step in done]
    assert node.held() == (2, 2)
    stopped.stop()
    killed.kill()
    wait_for(lambda: node.stats()["engines"] == 2, what="the end of the killed engine")
    assert node.held() == (1, 2), "a process that only stands still keeps its pins"
    node.check()
    assert observer.store("klmnopqr") == SLOTS - 2, "all but what is pinned can be had"
    assert not set(observer.offsets) & set(offsets)
    stopped.go_on()
    for step in LOAD[len(done) :]:
        assert stopped.call(step) is not False, "wrong bytes"
    stopped.call("ping")
    assert node.held() == (0, 0)
    assert observer.load("ab") == 2
    node.check()


@pytest.mark.parametrize("reached", STORE[:3])
def test_a_writer_stopped_or_killed_at_any_step_costs_its_own_slots_only(node, reached):
    node.start_daemon()
    observer = node.engine("observer")
    assert observer.store("ab") == 2
    stopped, killed = node.child("stopped"), node.child("killed")
    done = STORE[: STORE.index(reached) + 1]
    offsets = stopped.call("reserve", "cd", "b")
    killed.call("reserve", "xy")
    for child in (stopped, killed):
        for step in done[1:]:
            child.call(step)
    assert node.held() == (2, 4)
    stopped.stop()
    killed.kill()
    wait_for(lambda: node.stats()["engines"] == 2, what="the end of the killed engine")
    assert node.held() == (1, 2), "a process that only stands still keeps its slots"
    node.check()
    assert observer.load("xy") == 0, "an unfinished block is never a hit"
    assert observer.load("abcd") == 2
    assert observer.store("klmn") == SLOTS - 4, "the slots of the dead came back"
    assert not set(observer.offsets) & set(offsets)
    stopped.go_on()
    for step in STORE[len(done) :]:
        stopped.call(step)
    assert node.held() == (0, 0)
    assert observer.load("abcd") == 4
    assert observer.load("klmn") == 4
    node.check()


def test_slots_of_a_killed_scheduler_stay_while_its_worker_lives(node):
    node.start_daemon()
    observer = node.engine("observer")
    orphaned, control = node.child("orphaned"), node.child("control")
    worker = node.mapper("orphaned")
    orphaned.call("reserve", "ab")
    control.call("reserve", "cd")
    for child in (orphaned, control):
        child.kill()
    wait_for(lambda: node.stats()["engines"] == 2, what="the end of the control")
    assert node.held() == (1, 2)
    assert observer.store("klmnopqr") == SLOTS - 2
    worker.kill()
    wait_for(lambda: node.stats()["engines"] == 1, what="the end of the engine")
    assert node.held() == (0, 0)
    assert observer.store("yz") == 2
    node.check()


def test_two_engines_share_blocks_through_the_pool(node):
    node.start_daemon()
    child, engine = node.child("one"), node.engine("two")
    assert child.call("store", "abc") == 3
    assert engine.load("abc") == 3
    assert engine.store("de", after="c") == 2
    assert child.call("load", "abcde") == 5
    child.call("ping")
    assert node.held() == (0, 0)


def test_a_thousand_lookups_with_a_deadline_of_zero_leave_no_pins(node):
    node.start_daemon()
    engine = node.engine("e")
    engine.store("abc")
    asked = 0

    def ask_and_give_up():
        nonlocal asked
        ticket = engine.client.send_lookup(SPACE, keys_of("abc"))
        if ticket:
            asked += 1
            answer = engine.client.take_answer(ticket, 0.0)
            if answer is not None:
                engine.client.release([answer.lease])
        else:
            engine.client.poll()  # the breaker is open; a late answer closes it
        return asked == 1_000

    end = time.monotonic() + WAIT_MAX_S
    while not ask_and_give_up():
        assert time.monotonic() < end
    engine.ping()
    stats = node.stats()
    assert (stats["leases"], stats["pinned_blocks"]) == (0, 0)
    assert stats["counters"]["lookups"] == 1_000
    assert stats["counters"]["abandoned"] > 0
    node.check()


# ---- the daemon dies and stands still ----------------------------------------------------------


def test_a_killed_daemon_is_started_anew_and_adopts_the_pool(node):
    engine = node.engine("e", is_auto=True)
    assert engine.store("abc") == 3
    generation, pool, pid = engine.client.generation, engine.pool, node.note_daemon(engine)
    inode = pool.path.stat().st_ino
    engine.lookup("ab")
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    engine.notice_loss()
    assert engine.load("abc") == 0, "without a daemon everything is a miss"
    engine.connect()
    assert node.note_daemon(engine) != pid
    assert engine.client.generation == generation + 1 == pool.generation
    assert pool.path.stat().st_ino == inode
    assert engine.pool is pool, "nothing is mapped again"
    assert engine.client.welcome.must_quiesce
    assert engine.load("abc") == 0, "the memory is adopted, not the contents"
    assert engine.store("abc") == 0, "something may still be in flight"
    engine.quiesce()
    node.wait_granting()
    assert engine.store("abc") == 3
    assert engine.load("abc") == 3
    assert node.held() == (0, 0)
    node.check()


def test_after_a_restart_nothing_is_granted_under_the_copy_of_another_engine(node):
    engine = node.engine("e", is_auto=True)
    writer = node.child("writer")
    writer.call("reserve", "ab")
    writer.call("start_write")
    pid = node.note_daemon(engine)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    writer.call("notice_loss")
    engine.notice_loss()
    engine.connect()
    node.note_daemon(engine)
    engine.quiesce()
    assert engine.store("k") == 0
    wait_for(lambda: node.stats()["sessions"] == 2, what="the writer to come back")
    assert engine.store("k") == 0
    writer.call("finish_write")
    writer.call("quiesce")
    node.wait_granting()
    assert engine.store("klmnopqr") == SLOTS
    assert engine.load("klmnopqr") == SLOTS
    assert engine.load("ab") == 0
    node.check()


def test_after_a_restart_a_dead_writer_holds_nothing_back_for_long(node):
    engine = node.engine("e", is_auto=True)
    writer = node.child("writer")
    writer.call("reserve", "ab")
    pid = node.note_daemon(engine)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
    engine.notice_loss()
    engine.connect()
    node.note_daemon(engine)
    engine.quiesce()
    assert not node.stats()["is_granting"]
    writer.kill()
    wait_for(lambda: node.stats()["is_granting"], what="the quarantine of the writer")
    assert engine.store("klmnopqr") == SLOTS


def test_an_idle_engine_notices_a_daemon_that_was_replaced_between_two_looks(node):
    """Else it never says Quiesced, and nobody on the node can store anything."""
    daemon = node.start_daemon()
    engine = node.engine("e")
    generation = engine.client.generation
    daemon.kill()
    node.start_daemon()
    wait_for(
        lambda: engine.client.generation == generation + 1 and engine.client.is_up,
        engine.client,
        what="the engine to greet the new daemon",
    )
    engine.quiesce()
    node.wait_granting()
    assert node.engine("f").store("a") == 1


def test_two_engines_that_start_the_daemon_at_once_get_the_same_one(node):
    clients = [Client(node.socket, name, start=node.launch) for name in ("e", "f")]
    try:
        wait_for(lambda: all(c.is_up for c in clients), *clients, what="both sessions")
        assert clients[0].welcome.pid == clients[1].welcome.pid
    finally:
        engine = node.engine("g")
        node.note_daemon(engine)
        for client in clients:
            client.close()


def test_a_stopped_daemon_means_misses_within_the_deadline_and_no_pins_later(node):
    daemon = node.start_daemon()
    engine = node.engine("e", deadline_s=DEADLINE_S)
    wait_for(lambda: engine.store("abc") or engine.load("abc") == 3, engine.client)
    daemon.stop()
    for _ in range(10):
        begin = time.monotonic()
        assert engine.client.lookup(SPACE, keys_of("abc")) is None
        assert engine.client.reserve(SPACE, [(None, keys_of("x"))]) is None
        assert time.monotonic() - begin < FAR_BELOW_A_WAIT_S
        engine.client.poll()
    assert engine.client.breaker.is_open
    assert engine.client.send_lookup(SPACE, keys_of("abc")) == 0, "nobody is asked meanwhile"
    assert engine.client.link is Link.UP, "its lock says that it lives"
    daemon.go_on()
    wait_for(lambda: engine.client.is_up, engine.client, what="the breaker to close")
    wait_for(lambda: engine.load("abc") == 3, engine.client, what="a hit")
    engine.ping()
    stats = node.stats()
    assert (stats["leases"], stats["pinned_blocks"], stats["engines"]) == (0, 0, 1)
    assert stats["counters"]["abandoned"] >= 1
    node.check()


def test_an_engine_whose_first_hello_met_a_busy_daemon_is_served_later(node):
    """Its first connection is given up after `HELLO_WAIT_S`, but that Hello was delivered."""
    node.start_daemon()
    client = Client(node.socket, "e")
    with node.busy():
        end = time.monotonic() + 1.5 * HELLO_WAIT_S
        wait_for(lambda: time.monotonic() > end, client)
        assert not client.is_up
    try:
        wait_for(lambda: client.is_up or client.refusal, client)
        assert client.refusal is None
    finally:
        client.close()


@pytest.mark.parametrize("link", [Link.DOWN, Link.GREETING])
@pytest.mark.parametrize("is_trimmed", [False, True])
def test_a_release_while_a_session_is_lost_leaves_no_pin(node, link, is_trimmed):
    node.start_daemon()
    engine = node.engine("e")
    engine.store("ab")
    engine.lookup("ab")
    if is_trimmed:  # a message that is sent again in the next session
        engine.client.trim(engine.lease, 1)
    hijacker = raw_peer(node.socket)  # takes the session away, so that the client must return
    hijacker.send(wire.encode(wire.Hello(1, 2, 2, "e", True, [int(engine.lease)], "")))
    assert hijacker.poll(WAIT_MAX_S * 1000)
    hijacker.close()
    assert engine.client.lookup(SPACE, keys_of("a")) is None, "the old session is closed"
    wait_for(lambda: engine.client.link is link, engine.client)
    engine.release()
    engine.connect()
    engine.ping()
    assert node.held() == (0, 0)


# ---- who may be the daemon ---------------------------------------------------------------------


def test_a_second_daemon_on_one_socket_is_refused_with_one_clear_line(node):
    node.start_daemon()
    engine = node.engine("e")
    engine.store("a")
    second = subprocess.run(
        [sys.executable, "-m", "tierkv.service.launcher"],
        input=node.config.model_dump_json().encode(),
        stderr=subprocess.PIPE,
        timeout=WAIT_MAX_S,
        check=False,
    )
    (line,) = second.stderr.decode().splitlines()
    assert "ERROR" in line
    assert f"{node.socket}: another daemon serves this socket" in line
    assert "set node.service.socket" in line
    assert engine.load("a") == 1


def test_a_pool_in_use_is_refused_with_one_clear_line(node):
    node.start_daemon()
    engine = node.engine("e")
    with pytest.raises(PoolError, match="another daemon owns this pool") as refusal:
        create_pool(engine.pool.path, SLOTS * 8192, 8192)
    assert "\n" not in str(refusal.value)


def test_a_stale_socket_file_does_not_hinder_a_start(node):
    node.run_directory.mkdir(mode=0o700)
    with sockets.socket(sockets.AF_UNIX) as stale:
        stale.bind(str(node.socket))
    node.socket.with_suffix(".lock").touch(mode=0o600)
    assert node.socket.exists()
    assert not node.serves()
    node.start_daemon()
    assert node.engine("e").store("a") == 1


def test_a_client_that_looks_never_keeps_a_daemon_from_starting(node):
    node.run_directory.mkdir(mode=0o700)
    client = Client(node.socket, "e")
    try:
        client.poll()
        node.start_daemon()
        wait_for(lambda: client.is_up, client)
    finally:
        client.close()


def test_what_the_daemon_makes_is_for_its_user_only(node):
    old = os.umask(0)
    try:
        node.start_daemon()
        engine = node.engine("e")
    finally:
        os.umask(old)
    modes = {
        node.run_directory: 0o700,
        node.run_directory / "mappers": 0o700,
        node.socket: 0o600,
        DaemonLock(node.socket).path: 0o600,
        engine.pool.path: 0o600,
        engine.lock.path: 0o600,
    }
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in modes} == modes


# ---- the end of a daemon -----------------------------------------------------------------------


def test_a_daemon_without_engines_ends_after_its_linger_and_removes_its_files(node, tmp_path):
    daemon = node.start_daemon(linger_s=1.0)
    engine = node.engine("e")
    assert engine.store("a") == 1
    control = Node(tmp_path / "control", linger_s=1.0)
    try:
        lonely = control.start_daemon(linger_s=1.0)
        assert lonely.process.wait(WAIT_MAX_S) == 0
        assert not control.socket.exists()
        assert list(control.pool_directory.iterdir()) == []
    finally:
        control.close()
    assert engine.load("a") == 1, "a daemon with an engine stays"
    pool = engine.pool.path
    engine.close()
    assert daemon.process.wait(WAIT_MAX_S) == 0
    assert not node.socket.exists()
    assert not pool.exists()


def test_a_daemon_that_is_asked_to_end_leaves_the_pool_to_those_who_map_it(node):
    daemon = node.start_daemon()
    engine = node.engine("e")
    engine.store("a")
    generation, inode = engine.client.generation, engine.pool.path.stat().st_ino
    daemon.process.terminate()
    assert daemon.process.wait(WAIT_MAX_S) == 0
    assert not node.socket.exists()
    assert engine.pool.path.stat().st_ino == inode
    engine.notice_loss()
    node.start_daemon()
    assert engine.connect() == generation + 1
    engine.quiesce()
    node.wait_granting()
    assert engine.store("a") == 1
    assert engine.load("a") == 1


def test_an_orderly_end_with_no_mapper_left_removes_the_pool(node):
    daemon = node.start_daemon()
    engine = node.engine("e")
    pool = engine.pool.path
    engine.close()
    daemon.process.terminate()
    assert daemon.process.wait(WAIT_MAX_S) == 0
    assert not pool.exists()
    assert list((node.run_directory / "mappers").iterdir()) == []


# ---- bad input ---------------------------------------------------------------------------------


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (self.path,))


def test_garbage_and_pickles_disturb_no_other_session_and_run_nothing(node, tmp_path):
    daemon = node.start_daemon()
    engine = node.engine("e")
    engine.store("ab")
    proof = tmp_path / "executed"
    frames = [b"", b"\xff" * 100, pickle.dumps(Bomb(str(proof))), os.urandom(1000)]
    peer = raw_peer(node.socket)
    for frame in frames:
        peer.send(frame)
        assert peer.poll(WAIT_MAX_S * 1000), "bad input is answered"
        assert wire.decode_reply(peer.recv()).code == "protocol"
    peer.send_multipart([b"two", b"parts"])
    peer.close()
    with sockets.socket(sockets.AF_UNIX) as plain:  # not even the transport's protocol
        plain.connect(str(node.socket))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        assert engine.load("ab") == 2
    wait_for(lambda: node.stats()["counters"]["protocol_errors"] == len(frames) + 1)
    assert not proof.exists()
    assert daemon.process.poll() is None
    assert node.held() == (0, 0)
    node.check()


def test_garbage_of_an_engine_closes_its_own_session_and_frees_nothing(node):
    node.start_daemon()
    engine = node.engine("e")
    engine.store("ab")
    node.run_directory.joinpath("mappers").mkdir(exist_ok=True)
    lock = MapperLock(node.run_directory, "bad", is_session=True)
    peer = raw_peer(node.socket)
    messages = [
        wire.Hello(1, 2, 2, "bad", False, [], ""),
        wire.Attach(2, SPACE, 8192, "", False),
        wire.Lookup(3, SPACE, 2, b"a\0b\0"),
    ]
    for message in messages:
        peer.send(wire.encode(message))
        assert peer.poll(WAIT_MAX_S * 1000)
        peer.recv()
    peer.send(pickle.dumps(messages))
    assert peer.poll(WAIT_MAX_S * 1000)
    peer.close()
    assert node.stats()["sessions"] == 1
    assert node.held() == (1, 2), "its process may still read"
    lock.release()
    wait_for(lambda: node.held() == (0, 0), what="its end")
    assert engine.load("ab") == 2


def test_an_engine_with_another_node_part_attaches_with_one_warning_naming_both_values(
    node, caplog
):
    node.start_daemon()
    other = node.config.model_copy(
        update={"dram": node.config.dram.model_copy(update={"hugepages": "auto"})}
    )
    client = Client(node.socket, "other", node=node_text(other))
    try:
        with caplog.at_level("WARNING", logger="tierkv"):
            client.connect(WAIT_MAX_S)
            lose_session(client, node)
            client.connect(WAIT_MAX_S)
        warnings = [r.getMessage() for r in caplog.records if "node:" in r.getMessage()]
        assert len(warnings) == 1
        assert "dram.hugepages: auto / off" in warnings[0]
    finally:
        client.close()


def lose_session(client: Client, node: Node) -> None:
    """Let somebody else take the session, so that the client has to return."""
    hijacker = raw_peer(node.socket)
    hijacker.send(wire.encode(wire.Hello(1, 2, 2, client.engine, True, [], "")))
    assert hijacker.poll(WAIT_MAX_S * 1000)
    hijacker.close()
    with contextlib.suppress(DaemonUnavailableError):
        client.ask(wire.Ping, 1.0)
    wait_for(lambda: client.link is not Link.UP, client)


def test_a_ticket_of_a_lost_session_never_gets_the_answer_of_another_request(node):
    node.start_daemon()
    engine = node.engine("e")
    engine.store("ab")
    engine.store("xy")
    old = engine.client.send_lookup(SPACE, keys_of("ab"))
    lose_session(engine.client, node)
    engine.connect()
    new = [engine.client.send_lookup(SPACE, keys_of("xy")) for _ in range(8)]
    assert old not in new
    assert engine.client.take_answer(old) is None
    for ticket in new:
        engine.client.release([engine.client.take_answer(ticket).lease])
    engine.ping()
    assert node.held() == (0, 0)


def test_a_recall_reaches_an_answer_that_nobody_has_read(tmp_path):
    node = Node(tmp_path, SLOTS)
    node.config = node.config.model_copy(
        update={"dram": node.config.dram.model_copy(update={"pinned_share_max": 0.5})}
    )
    try:
        node.start_daemon()
        engine = node.engine("e")
        engine.store("abcdef")
        ticket = engine.client.send_lookup(SPACE, keys_of("abcdef"))
        engine.ping()
        answer = engine.client.take_answer(ticket)
        assert answer is not None
        assert len(answer.offsets) == 0, "it became a miss"
        engine.ping()
        assert node.held() == (0, 0)
    finally:
        node.close()


def test_nothing_that_goes_wrong_while_connecting_reaches_the_engine(node):
    node.start_daemon()
    mappers = node.run_directory / "mappers"
    mappers.mkdir(mode=0o700, exist_ok=True)
    mappers.chmod(0o755)
    client = Client(node.socket, "late")
    try:
        for _ in range(5):
            client.poll()
        assert client.link is Link.DOWN
        mappers.chmod(0o700)
        client.connect(WAIT_MAX_S)
    finally:
        mappers.chmod(0o700)
        client.close()


def test_a_namespace_given_up_before_it_was_attached_is_detached(node):
    node.start_daemon()
    engine = node.engine("e")
    private = b"P" * 32
    engine.client.attach(Attachment(private, SLOT_BYTES, "", True))
    engine.client.detach(private)
    engine.ping()
    engine.ping()
    space = next(s for s in node.stats()["namespaces"] if s["namespace"] == private.hex())
    assert space["users"] == 0
