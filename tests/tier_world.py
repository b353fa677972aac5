"""A small directory with tiers whose every job is done by hand."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tests.core_world import SLOT_BYTES, SPACE, World, keys_of
from tierkv.core.directory import Directory
from tierkv.core.eviction.base import EvictionPolicy
from tierkv.core.eviction.slru import Slru
from tierkv.core.values import Job, Limits, Op, TierLimits
from tierkv.types import Outcome


def text_of(keys) -> str:
    """Inverse of `keys_of`."""
    return "".join(key[:1].decode("latin-1") for key in keys)


class TierWorld(World):
    """`slots` slots, one namespace, engine `e`, and tiers that do nothing by themselves."""

    def __init__(
        self,
        slots: int = 4,
        *tiers: TierLimits,
        units: int = 1,
        make_policy: Callable[[], EvictionPolicy] = Slru,
        **limits,
    ) -> None:
        unit = SLOT_BYTES * (slots // units)
        limits = {"pinned_share_max": 1.0, "promote_share_max": 1.0} | limits
        self.directory = Directory(Limits(unit * units, unit, **limits), tiers, make_policy)
        self.tiering = self.directory.tiering
        self.now = 0.0
        self.jobs: deque[Job] = deque()
        self.stores: list[set[bytes]] = [set() for _ in tiers]
        self.log: list[str] = []
        for tier in range(len(tiers)):
            self.tiering.started(tier, True)
        self.join("e")

    def lookup(self, text: str, engine: str = "e", space: bytes = SPACE):
        return self.directory.lookup(engine, space, keys_of(text), self.now)

    def holds(self, text: str, tier: int = 0) -> None:
        """A tier has these blocks from before."""
        self.stores[tier] |= set(keys_of(text))
        if self.tiering.lanes[tier].limits.is_indexed:
            self.tiering.changed(tier, SPACE, keys_of(text), True)

    def take(self) -> list[str]:
        """Hand jobs out; what they are, as `READ abc`."""
        jobs = self.tiering.take_jobs(self.now)
        self.jobs.extend(jobs)
        return [f"{job.op.name} {text_of(job.keys)}".strip() for job in jobs]

    def answer(self, *outcomes: Outcome) -> Job:
        """Answer the oldest job: the given outcomes, or what its tier would say."""
        job = self.jobs.popleft()
        if job.op in (Op.PURGE, Op.CHECK):
            gone = set(self.stores[job.tier])
            if job.op is Op.PURGE:
                self.stores[job.tier].clear()
                self.tell(job.tier, gone, False)
            self.tiering.store_ended(job.tier, job.id, len(gone), [], self.now)
            return job
        found = list(outcomes) or [self.do(job, key) for key in job.keys]
        self.tiering.outcomes(job.tier, job.id, found, self.now)
        return job

    def do(self, job: Job, key: bytes) -> Outcome:
        store = self.stores[job.tier]
        match job.op:
            case Op.READ | Op.PROBE:
                return Outcome.OK if key in store else Outcome.MISSING
            case Op.WRITE:
                store.add(key)
                self.tell(job.tier, [key], True)
            case Op.DROP:
                store.discard(key)
                self.tell(job.tier, [key], False)
            case _:
                pass
        return Outcome.OK

    def tell(self, tier: int, keys, is_added: bool) -> None:
        if self.tiering.lanes[tier].limits.is_indexed:
            self.tiering.changed(tier, SPACE, list(keys), is_added)

    def work(self) -> list[str]:
        """Do everything that the tiers are asked to, until nothing is left; what it was."""
        done = []
        while found := self.take():
            done += found
            while self.jobs:
                self.answer()
        return done

    def below(self, text: str, tier: int = 0) -> str:
        """Which of these blocks the daemon believes a tier to hold."""
        presence = self.tiering.presence
        return text_of(key for key in keys_of(text) if presence.has(SPACE, key, tier))

    def dirty(self) -> int:
        return self.directory.spaces[SPACE].dirty

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.tiering.tick(self.now)

    def events(self):
        return self.directory.take_events()
