"""What every tier must do, as tests. Subclass `TierContract`, say how your tier is made:

    class TestMyTier(TierContract):
        def make_tier(self, directory, capacity):
            return MyTier(TierSettings(type="mine", path=str(directory), capacity=capacity))

After each test the tier's books must agree with its store.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tierkv.testing.slots import aligned_views, fill_slot, name_of
from tierkv.tiers.base import BlockName, Outcome, Tier, read_verified, write_sealed
from tierkv.types import FRAME_BYTES, PAGE_BYTES

OK, MISSING, CORRUPT = Outcome.OK, Outcome.MISSING, Outcome.CORRUPT
SEED = 20_261_129
SCANS_MAX = 10_000
CHANGES_MAX = 10_000
BATCH_MIN = 8
HOUR_S = 3600.0
THREAD_WAIT_MAX_S = 60.0


class TierContract:
    """The contract of `tierkv.tiers.base.Tier` as tests. The tier takes `BATCH_MIN` names at once.

    Attributes:
        slot_bytes: of the blocks that are written, a multiple of the page.
        blocks_max: what the tier must hold at the least in the tests that do not fill it.
        small_blocks: how many blocks fit in the tests that fill it.
        stress_rounds: calls of each thread in the stress.
    """

    slot_bytes = 3 * PAGE_BYTES
    blocks_max = 64
    small_blocks = 6
    stress_rounds = 60

    def make_tier(self, directory: Path, capacity: int) -> Tier:
        """Open the tier under test.

        Args:
            directory: this test's own; the same again means the same store.
            capacity: bytes; for tiers that have one.
        """
        raise NotImplementedError("say how your tier is made")

    def damage(self, tier: Tier, name: BlockName) -> None:
        """Break the stored bytes of a block; they keep their length."""
        (view,) = aligned_views(1, self.slot_bytes)
        assert tier.read([name], [view]) == [OK]
        view[0] ^= 0xFF
        assert tier.drop([name]) == [OK]
        assert tier.write([name], [view]) == [OK]

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A fresh tier with room for `blocks_max`; its books are checked when the test is over."""
        yield from self.checked(self.make_tier(tmp_path, self.blocks_max * self.slot_bytes))

    @pytest.fixture
    def small_tier(self, tmp_path: Path) -> Iterator[Tier]:
        """A fresh tier with room for `small_blocks`."""
        tier = self.make_tier(tmp_path, self.small_blocks * self.slot_bytes)
        if tier.info.capacity is None:
            tier.close()
            pytest.skip("this tier has no capacity of its own")
        yield from self.checked(tier)

    def checked(self, tier: Tier) -> Iterator[Tier]:
        """Lend a tier to a test, with everything known, and compare its books afterwards."""
        assert tier.info.batch_max >= BATCH_MIN
        settle(tier)
        yield tier
        assert tier.check() == []
        tier.close()

    def filled(self, names: Sequence[BlockName], version: int = 0) -> list[memoryview]:
        """Slots with payloads of these names, unsealed."""
        views = aligned_views(len(names), self.slot_bytes)
        for name, view in zip(names, views, strict=True):
            fill_slot(view, name, version)
        return views

    def put(self, tier: Tier, names: Sequence[BlockName], version: int = 0) -> list[memoryview]:
        """Store blocks; all must be OK. Returns the slots as they were written."""
        views = self.filled(names, version)
        assert write_sealed(tier, names, views) == [OK] * len(names)
        return views

    def get(self, tier: Tier, names: Sequence[BlockName]) -> tuple[list[Outcome], list[memoryview]]:
        """Read blocks into fresh slots."""
        views = aligned_views(len(names), self.slot_bytes)
        return read_verified(tier, names, views), views

    # ---- round trip ----------------------------------------------------------------------------

    def test_a_sealed_slot_comes_back_bit_for_bit(self, tier: Tier) -> None:
        """Also when the slot that was written from is reused."""
        names = [name_of(n) for n in range(min(4, tier.info.batch_max))]
        written = self.put(tier, names)
        before = [bytes(view) for view in written]
        for view in written:
            view[:] = bytes(self.slot_bytes)
        outcomes, views = self.get(tier, names)
        assert outcomes == [OK] * len(names)
        assert [bytes(view) for view in views] == before

    def test_writing_leaves_the_slot_as_it_is(self, tier: Tier) -> None:
        """Other tiers and engines read the same slot at the same time."""
        written = self.put(tier, [name_of(1)])
        expected = self.filled([name_of(1)])
        assert written[0][FRAME_BYTES:] == expected[0][FRAME_BYTES:]

    def test_a_call_with_the_most_names_is_served(self, tier: Tier) -> None:
        """`batch_max` is a promise."""
        names = [name_of(n) for n in range(min(tier.info.batch_max, self.blocks_max))]
        written = self.put(tier, names)
        outcomes, views = self.get(tier, names)
        assert outcomes == [OK] * len(names)
        assert views == written
        assert tier.probe(names) == [OK] * len(names)
        assert tier.drop(names) == [OK] * len(names)

    def test_a_call_without_names_does_nothing(self, tier: Tier) -> None:
        """The caller need not look for empty batches."""
        assert tier.read([], []) == []
        assert tier.write([], []) == []
        assert tier.probe([]) == []
        assert tier.drop([]) == []

    def test_outcomes_come_in_the_order_of_the_names(self, tier: Tier) -> None:
        """A missing block leaves the others of its batch readable."""
        present = [name_of(n) for n in (1, 3, 4)]
        written = dict(zip(present, self.put(tier, present), strict=True))
        names = [name_of(n) for n in (4, 2, 1, 5, 3, 0)]
        outcomes, views = self.get(tier, names)
        assert outcomes == [OK, MISSING, OK, MISSING, OK, MISSING]
        for name, view, outcome in zip(names, views, outcomes, strict=True):
            assert outcome is MISSING or view == written[name]

    # ---- what is there -------------------------------------------------------------------------

    def test_probe_tells_what_is_there(self, tier: Tier) -> None:
        """In the order of the names."""
        self.put(tier, [name_of(2)])
        assert tier.probe([name_of(1), name_of(2), name_of(3)]) == [MISSING, OK, MISSING]

    def test_a_second_write_keeps_the_first_bytes(self, tier: Tier) -> None:
        """A name that is there already with the same length is not written again."""
        first = self.put(tier, [name_of(1)], version=1)
        self.put(tier, [name_of(1)], version=2)
        outcomes, views = self.get(tier, [name_of(1)])
        assert outcomes == [OK]
        assert views == first

    def test_a_second_write_takes_no_room(self, tmp_path: Path) -> None:
        """Room for two: a, a again and b are then both there."""
        tier = self.make_tier(tmp_path, 2 * self.slot_bytes)
        settle(tier)
        for number in (1, 1, 2):
            self.put(tier, [name_of(number)])
        assert tier.probe([name_of(1), name_of(2)]) == [OK, OK]
        assert tier.statistics().get("blocks", 2) == 2
        assert tier.check() == []
        tier.close()

    def test_a_dropped_block_is_missing(self, tier: Tier) -> None:
        """And may be written again."""
        names = [name_of(1), name_of(2)]
        self.put(tier, names)
        assert tier.drop(names[:1]) == [OK]
        assert tier.probe(names) == [MISSING, OK]
        assert self.get(tier, names)[0] == [MISSING, OK]
        again = self.put(tier, names[:1], version=2)
        assert self.get(tier, names[:1]) == ([OK], again)

    def test_dropping_an_absent_block_is_ok(self, tier: Tier) -> None:
        """It is not there afterwards, which is what was asked for."""
        assert tier.drop([name_of(1), name_of(1)]) == [OK, OK]

    def test_a_touch_of_an_absent_block_is_nothing(self, tier: Tier) -> None:
        """The core may know of a block that the tier has just evicted."""
        tier.touch([name_of(1)])
        assert tier.probe([name_of(1)]) == [MISSING]

    def test_namespaces_do_not_mix(self, tier: Tier) -> None:
        """One key in two namespaces is two blocks."""
        names = [name_of(1, space=0), name_of(1, space=1)]
        written = self.put(tier, names)
        assert self.get(tier, names) == ([OK, OK], written)
        assert tier.drop(names[:1]) == [OK]
        assert tier.probe(names) == [MISSING, OK]

    def test_keys_of_two_lengths_do_not_mix(self, tier: Tier) -> None:
        """33 and 65 bytes, and the longer one begins with the shorter one."""
        names = [name_of(1, key_bytes=33), name_of(1, key_bytes=65)]
        assert names[1].key.startswith(names[0].key)
        written = self.put(tier, names)
        assert self.get(tier, names) == ([OK, OK], written)

    # ---- wrong bytes ---------------------------------------------------------------------------

    def test_damaged_bytes_are_corrupt_and_gone(self, tier: Tier) -> None:
        """The block beside them is served."""
        names = [name_of(1), name_of(2)]
        self.put(tier, names)
        self.damage(tier, names[0])
        assert self.get(tier, names)[0] == [CORRUPT, OK]
        assert self.get(tier, names)[0] == [MISSING, OK]
        again = self.put(tier, names[:1], version=2)
        assert self.get(tier, names[:1]) == ([OK], again)

    def test_a_flipped_byte_is_found_wherever_it_is(self, tier: Tier) -> None:
        """First and last of the frame's fields and of the payload."""
        places = [0, 12, 50, FRAME_BYTES, self.slot_bytes // 2, self.slot_bytes - 1]
        for number, at in enumerate(places):
            name = name_of(number)
            (view,) = self.put(tier, [name])
            view[at] ^= 0x01
            assert tier.drop([name]) == [OK]
            assert tier.write([name], [view]) == [OK]
            assert self.get(tier, [name])[0] == [CORRUPT], f"byte {at}"

    def test_zeros_are_no_block(self, tier: Tier) -> None:
        """A file of full length and zeros is what a crash leaves."""
        assert tier.write([name_of(1)], aligned_views(1, self.slot_bytes)) == [OK]
        assert self.get(tier, [name_of(1)])[0] == [CORRUPT]
        assert tier.probe([name_of(1)]) == [MISSING]

    def test_a_block_under_anothers_name_is_corrupt(self, tier: Tier) -> None:
        """Whole and valid, but not what was asked for."""
        names = [name_of(1), name_of(2), name_of(1, space=1)]
        written = self.put(tier, names)
        swapped = [written[1], written[0], written[0]]
        assert tier.drop(names) == [OK] * 3
        assert tier.write(names, swapped) == [OK] * 3
        assert self.get(tier, names)[0] == [CORRUPT] * 3
        assert tier.probe(names) == [MISSING] * 3

    def test_a_block_of_another_length_is_corrupt(self, tier: Tier) -> None:
        """Longer or shorter than the slot; the name can be written with the right length then."""
        names = [name_of(1), name_of(2)]
        for name, length in zip(
            names, (2 * self.slot_bytes, FRAME_BYTES + PAGE_BYTES), strict=True
        ):
            views = aligned_views(1, length)
            fill_slot(views[0], name)
            assert write_sealed(tier, [name], views) == [OK]
        assert self.get(tier, names)[0] == [CORRUPT, CORRUPT]
        assert tier.probe(names) == [MISSING, MISSING]
        written = self.put(tier, names)
        assert self.get(tier, names) == ([OK, OK], written)

    def test_a_write_of_another_length_is_not_ignored(self, tier: Tier) -> None:
        """What is there is of no use to anybody, so the new block takes its place."""
        views = aligned_views(1, 2 * self.slot_bytes)
        assert write_sealed(tier, [name_of(1)], views) == [OK]
        written = self.put(tier, [name_of(1)])
        assert self.get(tier, [name_of(1)]) == ([OK], written)

    # ---- threads -------------------------------------------------------------------------------

    def test_readers_and_writers_never_see_a_part(self, tier: Tier) -> None:
        """Writers of different names, readers of all of them."""
        self.stress(tier, names_per_writer=6)

    def test_readers_never_see_a_part_of_an_evicted_block(self, small_tier: Tier) -> None:
        """The same, with every write evicting what others read."""
        self.stress(small_tier, names_per_writer=self.small_blocks)

    def stress(self, tier: Tier, names_per_writer: int) -> None:
        """Two threads write and drop their own names, two read all; nothing is ever CORRUPT."""
        shares = [
            [name_of(1000 * writer + n) for n in range(names_per_writer)] for writer in range(2)
        ]
        everything = [name for share in shares for name in share]
        wrong: list[str] = []

        def write(seed: int, mine: list[BlockName]) -> None:
            dice = random.Random(seed)
            for _ in range(self.stress_rounds):
                name = dice.choice(mine)
                if dice.random() < 0.25:
                    outcome = tier.drop([name])[0]
                else:
                    outcome = write_sealed(tier, [name], self.filled([name]))[0]
                if outcome not in {OK, Outcome.FULL}:
                    wrong.append(f"write or drop of {name.key.hex()} is {outcome.name}")

        def read(seed: int) -> None:
            dice = random.Random(seed)
            for _ in range(self.stress_rounds):
                names = dice.sample(everything, k=min(3, tier.info.batch_max))
                for name, outcome in zip(names, self.get(tier, names)[0], strict=True):
                    if outcome not in {OK, MISSING}:
                        wrong.append(f"read of {name.key.hex()} is {outcome.name}")

        threads = [
            threading.Thread(target=write, args=(SEED + 0, shares[0])),
            threading.Thread(target=write, args=(SEED + 1, shares[1])),
            threading.Thread(target=read, args=(SEED + 2,)),
            threading.Thread(target=read, args=(SEED + 3,)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(THREAD_WAIT_MAX_S)
        assert [thread.name for thread in threads if thread.is_alive()] == [], f"seed {SEED}"
        assert wrong == [], f"seed {SEED}"

    # ---- capacity ------------------------------------------------------------------------------

    def test_a_tier_is_never_over_its_capacity(self, small_tier: Tier) -> None:
        """Neither by its own count nor by what can be read."""
        capacity = small_tier.info.capacity
        assert capacity is not None
        names = [name_of(n) for n in range(3 * self.small_blocks)]
        for name in names:
            self.put(small_tier, [name])
            present = probe_all(small_tier, names).count(OK)
            assert present * self.slot_bytes <= capacity
            assert small_tier.statistics().get("bytes", 0) <= capacity

    def test_the_newest_block_survives_at_capacity(self, small_tier: Tier) -> None:
        """A block that was just written is not the one that makes room for itself or the next."""
        names = [name_of(n) for n in range(3 * self.small_blocks)]
        for earlier, name in zip([names[0], *names], names, strict=False):
            self.put(small_tier, [name])
            assert small_tier.probe([earlier, name]) == [OK, OK]

    def test_a_block_greater_than_the_capacity_is_full(self, small_tier: Tier) -> None:
        """It would push everything out and still not fit."""
        self.put(small_tier, [name_of(1)])
        views = aligned_views(1, (self.small_blocks + 1) * self.slot_bytes)
        assert write_sealed(small_tier, [name_of(2)], views) == [Outcome.FULL]
        assert small_tier.probe([name_of(1), name_of(2)]) == [OK, MISSING]

    # ---- changes -------------------------------------------------------------------------------

    def test_changes_replay_to_what_probe_tells(self, small_tier: Tier) -> None:
        """Through writes, evictions, drops, damage and purges."""
        if not small_tier.info.is_indexed:
            pytest.skip("an unindexed tier tells no changes")
        dice = random.Random(SEED)
        names = [name_of(n, space=n % 2) for n in range(4 * self.small_blocks)]
        believed: dict[BlockName, int] = {}
        for turn in range(120):
            name = dice.choice(names)
            match dice.choice(("write", "write", "write", "read", "drop", "damage", "purge")):
                case "write":
                    self.put(small_tier, [name])
                case "read":
                    self.get(small_tier, [name])
                case "drop":
                    small_tier.drop([name])
                case "damage" if small_tier.probe([name]) == [OK]:
                    self.damage(small_tier, name)
                    self.get(small_tier, [name])
                case "purge" if dice.random() < 0.3:
                    small_tier.purge(name.namespace, None)
            if turn % 7 == 0:
                replay(small_tier, believed, most=3)
        replay(small_tier, believed, most=CHANGES_MAX)
        present = probe_all(small_tier, names)
        stored = {name for name, o in zip(names, present, strict=True) if o is OK}
        assert set(believed) == stored, f"seed {SEED}"
        assert set(believed.values()) <= {self.slot_bytes}
        assert small_tier.take_changes(CHANGES_MAX) == []

    def test_at_most_so_many_changes_are_taken(self, tier: Tier) -> None:
        """The rest comes with the next call, oldest first."""
        names = [name_of(n) for n in range(4)]
        for name in names:
            self.put(tier, [name])
        taken = [tier.take_changes(3), tier.take_changes(3), tier.take_changes(3)]
        expected = names if tier.info.is_indexed else []
        assert [len(changes) for changes in taken] == ([3, 1, 0] if expected else [0, 0, 0])
        assert [change.name for changes in taken for change in changes] == expected

    # ---- purge and restart ---------------------------------------------------------------------

    def test_a_purge_of_a_namespace_leaves_the_others(self, tier: Tier) -> None:
        """And tells how many blocks went."""
        names = [name_of(1, space=0), name_of(2, space=0), name_of(1, space=1)]
        self.put(tier, names)
        assert tier.purge(names[0].namespace, None) == 2
        assert tier.probe(names) == [MISSING, MISSING, OK]
        assert tier.purge(names[0].namespace, None) == 0

    def test_a_purge_of_all_leaves_nothing(self, tier: Tier) -> None:
        """Blocks can be written again afterwards."""
        names = [name_of(n, space=n) for n in range(3)]
        self.put(tier, names)
        assert tier.purge(None, None) == 3
        assert tier.probe(names) == [MISSING] * 3
        written = self.put(tier, names)
        assert self.get(tier, names) == ([OK] * 3, written)

    def test_a_purge_by_age_leaves_what_was_used_since(self, tier: Tier) -> None:
        """Everything here is younger than an hour and older than nothing."""
        names = [name_of(1, space=0), name_of(1, space=1)]
        self.put(tier, names)
        assert tier.purge(None, HOUR_S) == 0
        assert tier.probe(names) == [OK, OK]
        assert tier.purge(names[1].namespace, 0.0) == 1
        assert tier.probe(names) == [OK, MISSING]
        assert tier.purge(None, 0.0) == 1

    def test_what_is_durable_survives_close_and_open(self, tmp_path: Path) -> None:
        """Bit for bit, and an indexed tier tells about it."""
        capacity = self.blocks_max * self.slot_bytes
        first = self.make_tier(tmp_path, capacity)
        if not first.info.is_durable:
            first.close()
            pytest.skip("this tier forgets when it is closed")
        settle(first)
        names = [name_of(1), name_of(2, space=1), name_of(3, key_bytes=65)]
        written = self.put(first, names)
        assert first.drop(names[1:2]) == [OK]
        first.close()
        second = self.make_tier(tmp_path, capacity)
        settle(second)
        assert self.get(second, names)[0] == [OK, MISSING, OK]
        assert self.get(second, names[::2])[1] == written[::2]
        believed: dict[BlockName, int] = {}
        replay(second, believed, most=CHANGES_MAX)
        expected = names[::2] if second.info.is_indexed else []
        assert believed == dict.fromkeys(expected, self.slot_bytes)
        assert second.check() == []
        second.close()

    def test_a_tier_knows_everything_after_finitely_many_scans(self, tier: Tier) -> None:
        """And goes on saying so."""
        settle(tier)
        self.put(tier, [name_of(1)])
        assert tier.scan()


def settle(tier: Tier) -> None:
    """Scan until the tier knows its whole content."""
    assert any(tier.scan() for _ in range(SCANS_MAX)), "the scan does not end"


def probe_all(tier: Tier, names: Sequence[BlockName]) -> list[Outcome]:
    """Probe any number of blocks in calls that the tier takes."""
    most = tier.info.batch_max
    return [o for at in range(0, len(names), most) for o in tier.probe(names[at : at + most])]


def replay(tier: Tier, believed: dict[BlockName, int], most: int) -> None:
    """Take changes and follow them: name -> slot_bytes."""
    for change in tier.take_changes(most):
        if change.is_added:
            believed[change.name] = change.slot_bytes
        else:
            believed.pop(change.name, None)
