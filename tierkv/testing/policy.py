"""What every eviction policy must do, as tests. Subclass `PolicyContract`, say how yours is made:

    class TestMyPolicy(PolicyContract):
        def make_policy(self):
            return MyPolicy()

The first half asks the policy alone, the second half lets a real directory ask it, and its audit.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np

from tierkv.core.directory import Directory
from tierkv.core.eviction.base import EvictionPolicy, Rows
from tierkv.core.values import Limits, Run
from tierkv.types import PAGE_BYTES, BlockKey, EngineId, LeaseId, NamespaceId

SEED = 20_270_214
ROWS = 40
RUN_MAX = 4
HELD_MAX = 2
_ENGINE = EngineId("contract")


class PolicyContract:
    """The contract of `tierkv.core.eviction.base.EvictionPolicy` as tests.

    Attributes:
        turns: calls in each seeded test.
    """

    turns = 400

    def make_policy(self) -> EvictionPolicy:
        """Make the policy under test; a new one each time."""
        raise NotImplementedError("say how your policy is made")

    # ---- the policy alone ----------------------------------------------------------------------

    def test_an_empty_policy_proposes_nothing(self) -> None:
        """Also when it knows how many rows and slots there may be."""
        policy = self.make_policy()
        assert (len(policy), list(policy.candidates())) == (0, [])
        policy.grow(ROWS)
        policy.resize(ROWS)
        assert (len(policy), list(policy.candidates())) == (0, [])

    def test_what_came_and_did_not_go_is_proposed_exactly_once(self) -> None:
        """Through runs that come, uses, victims, removals and a namespace that shrinks."""
        world = _Rows(self.make_policy())
        for turn in range(self.turns):
            world.step()
            world.check(f"turn {turn}, seed {SEED}")

    def test_asking_who_goes_changes_nothing(self) -> None:
        """The cleaner asks much more often than somebody goes, and often for the first few only."""
        world = _Rows(self.make_policy())
        for turn in range(self.turns // 4):
            world.step()
            order = list(world.policy.candidates())
            assert [row for row, _ in zip(world.policy.candidates(), range(2), strict=False)] == (
                order[:2]
            ), f"turn {turn}, seed {SEED}"
            assert list(world.policy.candidates()) == order, f"turn {turn}, seed {SEED}"

    def test_the_order_is_kept_when_there_are_more_rows(self) -> None:
        """The namespace got another extent."""
        world = _Rows(self.make_policy())
        for _ in range(20):
            world.step()
        order = list(world.policy.candidates())
        for rows in (ROWS, 2 * ROWS, 5 * ROWS):
            world.policy.grow(rows)
            assert list(world.policy.candidates()) == order, f"seed {SEED}"

    def test_two_policies_share_nothing(self) -> None:
        """Each namespace has one of its own."""
        one, other = self.make_policy(), self.make_policy()
        for policy in (one, other):
            policy.grow(ROWS)
            policy.resize(ROWS)
        one.insert(_rows(1, 2), 0, [_key(1), _key(2)])
        assert (len(one), len(other), list(other.candidates())) == (2, 0, [])

    # ---- in a directory ------------------------------------------------------------------------

    def test_the_audit_finds_nothing_after_any_request(self) -> None:
        """One layout in a pool that is always full; some blocks are pinned."""
        world = _Requests(self, slots=24, spaces=1)
        for _ in range(self.turns):
            world.step()

    def test_the_audit_finds_nothing_while_layouts_take_room_from_each_other(self) -> None:
        """Extents change hands, so namespaces grow and shrink."""
        world = _Requests(self, slots=24, spaces=3)
        sizes: list[list[int]] = []
        for _ in range(self.turns):
            world.step()
            sizes.append([space.slots for space in world.directory.spaces.values()])
        shrunk = [one > two for turn in itertools.pairwise(sizes)
                  for one, two in zip(*turn, strict=True)]  # fmt: skip
        assert any(shrunk), f"no extent changed hands, so nothing was tried; seed {SEED}"

    def test_a_prompt_that_comes_again_is_found(self) -> None:
        """The room is enough for it, and nothing else is asked for."""
        world = _Requests(self, slots=24, spaces=1)
        prompt = [_key(n) for n in range(8)]
        for _ in range(3):
            world.request(world.spaces[0], prompt)
        assert world.request(world.spaces[0], prompt) == len(prompt)

    def test_room_is_made_for_what_comes_next(self) -> None:
        """Whatever was stored before: of many different prompts some later ones are kept, too."""
        world = _Requests(self, slots=24, spaces=1)
        stored = []
        for first in range(100, 100 + 40 * RUN_MAX, RUN_MAX):
            prompt = [_key(n) for n in range(first, first + RUN_MAX)]
            world.request(world.spaces[0], prompt)
            stored.append(world.stored_last)
            world.request(world.spaces[0], prompt)
        assert world.directory.counters["evicted"] > 0
        assert sum(stored[20:]) > 0, "it holds on to the first prompts for ever"


class _Rows:
    """A policy and what it must know by now: rows, and which row comes before which."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.dice = random.Random(SEED)
        self.before: dict[int, int] = {}
        self.keys: dict[int, BlockKey] = {}
        self.number = 0
        policy.grow(ROWS)
        policy.resize(ROWS - 1)

    def step(self) -> None:
        """One call, or those that belong together."""
        match self.dice.choice(("come", "come", "come", "use", "use", "go", "drop", "resize")):
            case "come":
                self._come()
            case "use" if self.before:
                self.policy.touch(_rows(*self._path(self.dice.choice(list(self.before)))))
            case "go":
                self._give_up(self.dice.randint(1, RUN_MAX), stay=set())
            case "drop" if self.before:
                self._drop(self.dice.choice(list(self.before)))
            case "resize":
                self.policy.resize(self.dice.randint(max(1, len(self.before)), ROWS - 1))
            case _:
                pass

    def check(self, when: str) -> None:
        """Compare the order with what came and went."""
        order = list(self.policy.candidates())
        assert len(self.policy) == len(self.before), when
        assert sorted(order) == sorted(self.before), when
        if self.policy.keeps_prefixes:
            place = {row: at for at, row in enumerate(order)}
            wrong = [
                row for row, before in self.before.items() if before and place[before] < place[row]
            ]
            assert wrong == [], f"{when}: proposed behind their predecessors, see keeps_prefixes"

    def _come(self) -> None:
        count = self.dice.randint(1, RUN_MAX)
        keys = [_key(self.number + n) for n in range(count)]
        self.number += count
        after = self.dice.choice([0, 0, *self.before])
        room = self.policy.miss(keys, self.keys[after] if after else None)
        assert 0 <= room.blocks <= count, "so many of the keys deserve room"
        assert room.candidates >= 0, "so many blocks may go for them"
        short = room.blocks - len(self._free())
        self._give_up(min(short, room.candidates), stay=set(self._path(after)))
        free = self._free()
        rows = self.dice.sample(free, min(count, len(free)))
        if rows:
            self.policy.insert(_rows(*rows), after, keys[: len(rows)])
        for row, key in zip(rows, keys, strict=False):
            self.before[row], self.keys[row] = after, key
            after = row

    def _free(self) -> list[int]:
        return [row for row in range(1, ROWS) if row not in self.before]

    def _path(self, row: int) -> list[int]:
        """A row and all before it, head first."""
        path = []
        while row:
            path.append(row)
            row = self.before[row]
        return path[::-1]

    def _give_up(self, count: int, stay: set[int]) -> None:
        """As the books do it: in the policy's order, and never a row that is needed."""
        gone: list[int] = []
        while len(gone) < count:
            may_go = self.before.keys() - set(self.before.values()) - stay
            row = next((row for row in self.policy.candidates() if row in may_go), 0)
            assert row or not may_go, f"blocks may go and none is proposed; seed {SEED}"
            if not row:
                break
            gone.append(row)
            del self.before[row]
        if gone:
            self.policy.evict(_rows(*gone))

    def _drop(self, row: int) -> None:
        """A row and all that need it, in no order."""
        doomed = [other for other in self.before if row in self._path(other)]
        self.dice.shuffle(doomed)
        self.policy.remove(_rows(*doomed))
        for each in doomed:
            del self.before[each]


class _Requests:
    """A real directory under requests of a few conversations; audited after each step."""

    def __init__(self, contract: PolicyContract, slots: int, spaces: int) -> None:
        slot_bytes = 2 * PAGE_BYTES
        limits = Limits(slots * slot_bytes, slots * slot_bytes // 4, pinned_share_max=1.0)
        self.directory = Directory(limits, (), contract.make_policy)
        self.directory.open_engine(_ENGINE)
        self.spaces = [NamespaceId(bytes([n + 1]) * 32) for n in range(spaces)]
        for number, space in enumerate(self.spaces):
            refusal = self.directory.attach(_ENGINE, space, (1 + number % 2) * slot_bytes)
            assert refusal is None, refusal
        self.dice = random.Random(SEED)
        self.now = 0.0
        self.stored_last = 0  # blocks that the last request could store
        self._held: list[LeaseId] = []

    def step(self) -> None:
        """One request, purge, or end of a read."""
        self.now += 1.0
        space = self.dice.choice(self.spaces)
        match self.dice.choice(("ask", "ask", "ask", "ask", "ask", "hold", "let go", "purge")):
            case "ask":
                self.request(space, self._prompt())
            case "hold" if len(self._held) < HELD_MAX:
                found = self.directory.lookup(_ENGINE, space, self._prompt(), self.now)
                self._held += [found.lease] if found.lease else []
            case "let go" if self._held:
                self.directory.release(self._held.pop(0))
            case "purge" if self.dice.random() < 0.2:
                self.directory.purge(space, self.dice.choice((None, 5.0)), self.now)
            case _:
                pass
        self.directory.tiering.tick(self.now)
        self.audit()

    def audit(self) -> None:
        """Let the directory recompute its books; the policy's order is part of them."""
        try:
            self.directory.check()
        except AssertionError as error:
            raise AssertionError(f"{error} (request {self.now:.0f}, seed {SEED})") from error

    def request(self, space: NamespaceId, keys: Sequence[BlockKey]) -> int:
        """Look a prompt up and store what is missing; the leading blocks that were there."""
        found = self.directory.lookup(_ENGINE, space, keys, self.now)
        hits = len(found.offsets)
        if found.lease:
            self.directory.release(found.lease)
        self.stored_last = 0
        if hits < len(keys):
            run = Run(keys[hits - 1] if hits else None, keys[hits:])
            granted = self.directory.reserve(_ENGINE, space, [run], self.now)
            self.stored_last = int((granted.offsets >= 0).sum())
            if granted.lease:
                self.directory.commit(granted.lease, [True] * self.stored_last)
        self.audit()
        return hits

    def _prompt(self) -> list[BlockKey]:
        """Some turns of one of a few conversations; they share their first blocks."""
        conversation = self.dice.randrange(6)
        length = self.dice.randint(1, 10)
        return [_key(at if at < 2 else 100 * (conversation + 1) + at) for at in range(length)]


def _rows(*numbers: int) -> Rows:
    return np.array(numbers, np.int32)


def _key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(8, "little") + b"\0")
