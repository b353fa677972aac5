"""Engines and daemons that are killed or stand still at every step of the SDK.

Nothing here waits by the clock. The steps of a copy are made by hand, see `SteppedEngine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from tests.processes import QUARANTINE_S, wait_for
from tests.sdk_node import SdkNode
from tests.sdk_world import SteppedEngine
from tierkv.device.base import Direction
from tierkv.errors import LoadFailedError

SLOTS = 8
LOAD = [["lookup", "ab"], ["start_load"], ["half", "load"], ["rest", "load"]]
STORE = [["start_store", "cd"], ["half", "store"], ["rest", "store"]]
NAMES = ["looked up", "before the copy", "midway", "after the copy"]


def steps(reached: str, all_steps: list[list[str]]) -> list[list[str]]:
    return all_steps[: NAMES.index(reached) + 1 - (len(NAMES) - len(all_steps))]


@pytest.fixture
def external(tmp_path):
    node = SdkNode(tmp_path, "external", SLOTS)
    yield node
    node.close()


@pytest.fixture
def peopled(tmp_path):
    node = SdkNode(tmp_path, "external", SLOTS, spares=2)
    yield node
    node.close()


@pytest.fixture
def auto(tmp_path):
    node = SdkNode(tmp_path, "auto", SLOTS)
    yield node
    node.close()


# ---- engines -----------------------------------------------------------------------------------


@pytest.mark.parametrize("reached", NAMES)
def test_a_reader_stopped_or_killed_at_any_step_costs_its_own_pins_only(peopled, reached):
    node = peopled
    observer = node.seat("m")
    assert observer.share("ab") == 2
    stopped, killed = node.children_with_caches("m", 2)
    for child in (stopped, killed):
        for step in steps(reached, LOAD):
            child.call(*step)
    assert node.held()[1] == 2, "two leases of the same two blocks"
    stopped.stop()
    killed.kill()
    wait_for(lambda: node.stats()["engines"] == 2, observer.cache, what="the end of the killed")
    assert node.held() == (1, 2), "a process that only stands still keeps its pins"
    node.check()
    others = "klmnopqr"
    assert observer.store(others) == SLOTS - 2, "all but what is pinned can be had"
    assert observer.resident("ab") == 2
    stopped.go_on()
    for step in LOAD[len(steps(reached, LOAD)) :]:
        stopped.call(*step)
    assert stopped.call("finish_load") == 2
    stopped.call("release")
    wait_for(lambda: node.held() == (0, 0), observer.cache, what="the release")
    assert observer.share("stuvwxyz") == SLOTS, "nothing is pinned"
    assert stopped.call("resident", "stuvwxyz") == SLOTS
    node.check()


@pytest.mark.parametrize("reached", NAMES[1:])
def test_a_writer_stopped_or_killed_at_any_step_costs_its_own_slots_only(peopled, reached):
    node = peopled
    observer = node.seat("m")
    assert observer.share("ab") == 2
    stopped, killed = node.children_with_caches("m", 2)
    begun = steps(reached, STORE)
    for child, text in ((stopped, "cd"), (killed, "xy")):
        child.call("start_store", text)
        for step in begun[1:]:
            child.call(*step)
    assert node.held() == (2, 4)
    stopped.stop()
    killed.kill()
    wait_for(lambda: node.stats()["engines"] == 2, observer.cache, what="the end of the killed")
    assert node.held() == (1, 2), "a process that only stands still keeps its slots"
    node.check()
    observer.miss("xy")
    with observer.cache.lookup(observer.keys("cd"), wait_s=0.0) as hit:
        assert hit.blocks == 0, "an unfinished block is never a hit"
    observer.hit("ab", 2)
    assert observer.store("xy") == 2, "the key of a dead writer is free"
    assert observer.store("klmn") == SLOTS - 4, "its slots too, and those of what is cold"
    stopped.go_on()
    for step in STORE[len(begun) :]:
        stopped.call(*step)
    assert stopped.call("finish_store") == 2
    stopped.call("go_on")
    wait_for(lambda: node.held() == (0, 0), observer.cache, what="the commit")
    observer.hit("cd", 2)
    assert stopped.call("resident", "xy") == 2
    assert observer.store("stuvwxyz") == SLOTS
    observer.hit("stuvwxyz", SLOTS)
    node.check()


def test_the_slots_of_a_killed_writer_come_back_for_others(external):
    """All of them are its own, so that nobody stores anything before."""
    node = external
    observer, [killed] = node.seat("m"), node.children_with_caches("m", 1)
    killed.call("start_store", "abcdefgh")
    killed.call("half", "store")
    assert observer.store("xy") == 0
    killed.kill()
    wait_for(lambda: observer.store("xy") == 2, observer.cache, what="the quarantine")
    assert observer.store("klmnop") == SLOTS - 2
    observer.hit("xy", 2)
    observer.miss("abcdefgh")
    node.check()


# ---- daemons -----------------------------------------------------------------------------------


class Victim:
    """An engine in this process, and a bystander, whose daemon is killed between two steps."""

    def __init__(self, node: SdkNode) -> None:
        self.node = node
        self.engine = SteppedEngine()
        self.seat = node.seat("m", copy_engine=self.engine)
        self.other = node.seat("m")
        assert self.seat.share("ab") == 2

    def kill(self) -> None:
        """From now on there is no daemon, until the caches or `works_again` start one."""
        self.node.kill_daemon()

    def works_again(self) -> None:
        """The new daemon serves both, and never a byte of before."""
        self.engine.go_on()
        if self.node.mode == "external" and not self.node.serves():
            self.node.start_daemon()
        self.node.wait_back(self.seat, self.other)
        assert self.other.resident("ab") == self.other.resident("cd") == 0, "contents are gone"
        assert self.seat.share("abcdefgh") == SLOTS
        self.other.hit("abcdefgh", SLOTS)
        assert self.other.share("stuvwxyz") == SLOTS
        self.seat.hit("stuvwxyz", SLOTS)
        wait_for(lambda: self.node.held() == (0, 0), self.seat.cache, self.other.cache)
        self.node.check()


@pytest.fixture
def victim(request, tmp_path):
    node = SdkNode(tmp_path, request.param, SLOTS)
    yield Victim(node)
    node.close()


@pytest.mark.parametrize(
    ("reached", "victim"),
    list(zip(NAMES, ["auto", "external", "auto", "external"], strict=True)),
    indirect=["victim"],
)
def test_a_daemon_killed_at_any_step_of_a_load_means_a_miss_or_an_error(victim, reached):
    """And never a wrong byte in a block of which a load said that it is there."""
    seat, engine = victim.seat, victim.engine
    keys = seat.keys("ab")
    hit = seat.cache.lookup(keys)
    assert hit.blocks == 2
    targets = seat.wiped(2)
    copy = None
    engine.is_stepped = True
    if reached != "looked up":
        copy = seat.cache.start_load(hit, targets)
    if reached in ("midway", "after the copy"):
        engine.half(Direction.LOAD)
    if reached == "after the copy":
        engine.rest(Direction.LOAD)
    victim.kill()
    seat.miss("ab")
    engine.go_on()
    try:
        count = copy.result() if copy else seat.cache.load(hit, targets)
    except LoadFailedError:
        assert reached != "after the copy", "what had been copied was right"
    else:
        assert count == 2
        seat.see(targets, keys)
    hit.release()
    victim.works_again()


@pytest.mark.parametrize(
    ("reached", "victim"),
    list(zip(NAMES[1:], ["external", "auto", "external"], strict=True)),
    indirect=["victim"],
)
def test_a_daemon_killed_at_any_step_of_a_store_costs_these_blocks_only(victim, reached):
    seat, engine = victim.seat, victim.engine
    engine.is_stepped = True
    keys = seat.keys("cd")
    copy = seat.cache.start_store(keys, seat.fill(keys))
    wait_for(lambda: engine.waiting[Direction.STORE], seat.cache, what="the copy")
    if reached in ("midway", "after the copy"):
        engine.half(Direction.STORE)
    if reached == "after the copy":
        engine.rest(Direction.STORE)
    victim.kill()
    if reached != "after the copy":
        seat.cache.poll()
        assert not copy.is_done, "the copy still reads the device"
    engine.go_on()
    assert copy.result() in range(3)
    assert copy.is_done
    assert seat.store("ef") == 0, "nobody is there to store it"
    victim.works_again()


def replace_daemon(victim: Victim) -> None:
    """The daemon is killed, and both caches have told the next one all they know, long ago."""
    victim.kill()
    victim.node.start_daemon()
    caches = victim.seat.cache, victim.other.cache
    wait_for(lambda: victim.node.stats()["sessions"] == 2, *caches, what="both to come back")
    for seat in (victim.seat, victim.other):
        assert seat.cache.wait_ready()
        seat.settle()
    end = time.monotonic() + 5 * QUARANTINE_S
    wait_for(lambda: time.monotonic() > end, *caches, what="the quarantine of those that died")


def test_a_new_daemon_grants_no_slot_that_an_old_copy_may_still_write(external):
    victim = Victim(external)
    seat, other, engine = victim.seat, victim.other, victim.engine
    keys = seat.keys("cd")
    engine.is_stepped = True
    copy = seat.cache.start_store(keys, seat.fill(keys))
    wait_for(lambda: engine.waiting[Direction.STORE], seat.cache, what="the copy")
    engine.half(Direction.STORE)
    replace_daemon(victim)
    assert not external.stats()["is_granting"]
    assert other.store("xy") == 0
    engine.rest(Direction.STORE)
    assert copy.result() == 0
    wait_for(lambda: other.store("xy") == 2, seat.cache, what="slots to be granted")
    other.hit("xy", 2)
    other.miss("cd")
    victim.works_again()


def test_a_new_daemon_grants_no_slot_that_an_old_copy_is_reading(external):
    victim = Victim(external)
    seat, other, engine = victim.seat, victim.other, victim.engine
    hit, targets = seat.cache.lookup(seat.keys("ab")), seat.wiped(2)
    engine.is_stepped = True
    copy = seat.cache.start_load(hit, targets)
    engine.half(Direction.LOAD)
    replace_daemon(victim)
    assert other.store("stuvwxyz") == 0, "or the slots that are being read would change"
    engine.rest(Direction.LOAD)
    assert copy.result() == 2
    seat.see(targets, seat.keys("ab"))
    wait_for(lambda: other.store("stuvwxyz") == SLOTS, seat.cache, what="slots to be granted")
    hit.release()
    victim.works_again()


def test_a_hit_of_an_older_daemon_cannot_be_loaded(auto):
    victim = Victim(auto)
    seat = victim.seat
    hits = [seat.cache.lookup(seat.keys("ab")) for _ in range(2)]
    assert [hit.blocks for hit in hits] == [2, 2]
    asked = seat.cache.start_lookup(seat.keys("ab"))
    victim.kill()
    auto.wait_back(seat, victim.other)
    assert victim.other.store("stuvwxyz") == SLOTS, "into the slots of the hits"
    with pytest.raises(LoadFailedError):
        seat.cache.load(hits[0], seat.wiped(2))
    copy = seat.cache.start_load(hits[1], seat.wiped(2))
    with pytest.raises(LoadFailedError):
        copy.result()
    assert copy.is_done
    assert asked.wait()
    if asked.blocks:
        with pytest.raises(LoadFailedError):
            seat.cache.load(asked, seat.wiped(asked.blocks))
    for hit in (*hits, asked):
        hit.release()
    victim.works_again()


def test_an_external_daemon_that_is_replaced_is_used_again(external):
    victim = Victim(external)
    victim.kill()
    for seat in (victim.seat, victim.other):
        seat.miss("ab")
        assert seat.store("xy") == 0
        assert not seat.cache.is_ready
    victim.works_again()


def test_a_daemon_that_stands_still_means_misses_and_its_late_answers_leave_no_pins(external):
    """Deadlines are the cache's own; nothing waits for the daemon to be told dead."""
    node = external
    seat = node.seat("m", engine={"request_deadline": 0.2})
    wait_for(lambda: seat.store("ab") or seat.resident("ab") == 2, seat.cache, what="a store")
    daemon = node.daemons[0]
    daemon.stop()
    found: list[Callable[[], bool]] = []
    for _ in range(5):
        seat.miss("ab")
        assert seat.store("cd") == 0
        hit = seat.cache.start_lookup(seat.keys("ab"))
        found.append(lambda hit=hit: hit.is_done)
        hit.release()
    daemon.go_on()
    wait_for(lambda: seat.resident("ab") == 2, seat.cache, what="a hit")
    wait_for(lambda: node.held() == (0, 0), seat.cache, what="the end of all leases")
    wait_for(lambda: all(is_done() for is_done in found), seat.cache, what="released lookups")
    node.check()


def test_an_engine_and_the_daemon_killed_together_leave_a_clean_node(auto):
    node = auto
    victim = Victim(node)
    [child] = node.children_with_caches("m", 1, "child")
    child.call("start_store", "abc")
    child.call("half", "store")
    victim.kill()
    child.kill()
    victim.works_again()
