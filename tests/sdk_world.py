"""Engines of one's own around the SDK: memory whose bytes tell their key, copies by steps.

Run as ``python -m tests.sdk_world KIND`` it is an engine that is told line by line what to
do; see `tests.sdk_node.SdkChild`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence

import numpy as np

import tierkv
from tests.processes import WAIT_MAX_S, wait_for
from tierkv.config import TierKVConfig
from tierkv.device.base import CopyEvent, Descriptors, Direction
from tierkv.device.cpu import copy_now

BLOCK_TOKENS = 4
SEAT_BLOCKS = 8  # device blocks that a seat stores from, and as many others that it loads into
WIPED = 0xEE
KINDS = ("numpy", "torch")


def payload(key: bytes, name: str, size: int) -> np.ndarray:
    """What the part of a block in one tensor must hold."""
    digest = hashlib.blake2b(key + name.encode()).digest()
    return np.resize(np.frombuffer(digest, np.uint8), size)


class Memory:
    """KV memory of an engine: `k` and `v` alternate in one buffer, `w` lies beside them.

    Attributes:
        tensors: as `tierkv.Cache` takes them.
        bytes: the same memory as bytes, by name, shape (blocks, bytes of a block).
    """

    def __init__(self, kind: str, blocks: int, dtype: str = "float16", width: int = 8) -> None:
        self.kind, self.blocks = kind, blocks
        if kind == "torch":
            import torch

            pair = torch.zeros((blocks, 2, BLOCK_TOKENS, width), dtype=getattr(torch, dtype))
            beside = torch.zeros((blocks, 3), dtype=torch.int8)
            raw = pair.view(torch.uint8).numpy(), beside.view(torch.uint8).numpy()
        else:
            pair = np.zeros((blocks, 2, BLOCK_TOKENS, width), dtype)
            beside = np.zeros((blocks, 3), "int8")
            raw = pair.view(np.uint8), beside.view(np.uint8)
        self.tensors = {"k": pair[:, 0], "v": pair[:, 1], "w": beside}
        both = raw[0].reshape(blocks, 2, -1)
        self.bytes = {"k": both[:, 0], "v": both[:, 1], "w": raw[1]}

    def fill(self, block: int, key: bytes) -> None:
        for name, raw in self.bytes.items():
            raw[block] = payload(key, name, raw.shape[1])

    def wipe(self, *blocks: int) -> None:
        for raw in self.bytes.values():
            raw[list(blocks)] = WIPED

    def is_right(self, block: int, key: bytes) -> bool:
        return all(
            bool((raw[block] == payload(key, name, raw.shape[1])).all())
            for name, raw in self.bytes.items()
        )

    def is_wiped(self, block: int) -> bool:
        return all(bool((raw[block] == WIPED).all()) for raw in self.bytes.values())


class Seat:
    """One user of a cache: device blocks of its own, and words that nobody else says.

    A letter stands for a block of tokens, so "abx" begins with the first two blocks of "abc".
    """

    def __init__(self, cache: tierkv.Cache, memory: Memory, label: str, place: int = 0) -> None:
        self.cache, self.memory, self.label = cache, memory, label
        first = 2 * SEAT_BLOCKS * place
        self.origins = list(range(first, first + SEAT_BLOCKS))
        # Backwards, so that no block comes to lie where it came from, or beside its neighbour.
        self.targets = list(range(first + 2 * SEAT_BLOCKS - 1, first + SEAT_BLOCKS - 1, -1))

    def move(self, label: str) -> Seat:
        """The same place, with other words."""
        return Seat(self.cache, self.memory, label, self.origins[0] // (2 * SEAT_BLOCKS))

    def tokens(self, text: str) -> list[int]:
        words = [f"{self.label} {letter} {i}" for letter in text for i in range(BLOCK_TOKENS)]
        return [int.from_bytes(hashlib.blake2b(w.encode()).digest()[:4], "big") for w in words]

    def keys(self, text: str, **more: object) -> list[bytes]:
        return self.cache.hash_tokens(self.tokens(text), **more)

    def fill(self, keys: Sequence[bytes]) -> list[int]:
        """Let device blocks hold the bytes of these keys; says which."""
        blocks = self.origins[: len(keys)]
        for block, key in zip(blocks, keys, strict=True):
            self.memory.fill(block, key)
        return blocks

    def store(self, text: str, behind: str = "", **more: object) -> int:
        """Store the blocks of a text behind those of another; the number of new ones."""
        keys = self.keys(behind + text, **more)
        after = keys[len(behind) - 1] if behind else None
        keys = keys[len(behind) :]
        return self.cache.store(keys, self.fill(keys), after=after)

    def share(self, text: str, behind: str = "", **more: object) -> int:
        """`store`, and wait until other caches can see it: a commit is one-way."""
        count = self.store(text, behind, **more)
        self.settle()
        return count

    def settle(self) -> None:
        """Returns when the daemon has worked off all that this cache has sent it."""
        self.cache.lookup(self.keys("?")).release()

    def load(self, hit: tierkv.Hit, keys: Sequence[bytes]) -> int:
        """Load all of a hit that begins with these keys. Fails on a wrong byte."""
        targets = self.wiped(hit.blocks)
        count = self.cache.load(hit, targets)
        assert count == len(targets)
        self.see(targets, keys)
        return count

    def wiped(self, count: int) -> list[int]:
        """Targets for so many blocks, after all targets were wiped."""
        self.memory.wipe(*self.targets)
        return self.targets[:count]

    def see(self, targets: Sequence[int], keys: Sequence[bytes]) -> None:
        """Fails unless the targets hold these keys, and all other targets nothing."""
        pairs = list(zip(targets, keys, strict=False))
        wrong = [at for at, pair in enumerate(pairs) if not self.memory.is_right(*pair)]
        assert not wrong, f"wrong bytes in blocks {wrong} of {len(pairs)}"
        touched = [b for b in self.targets if b not in targets and not self.memory.is_wiped(b)]
        assert not touched, f"device blocks {touched} were written unasked"

    def hit(self, text: str, count: int, held: int = 0, **more: object) -> tuple[str, ...]:
        """Fails unless a lookup finds so many blocks with the right bytes; their sources."""
        assert count > 0, "see `miss`"
        keys = self.keys(text, **more)
        with self.cache.lookup(keys, held=held) as hit:
            assert hit.is_done
            assert (hit.blocks, hit.tokens) == (count, count * BLOCK_TOKENS), text
            assert self.load(hit, keys[held:]) == count
            assert len(hit.sources) == count
            return hit.sources

    def miss(self, text: str, held: int = 0, **more: object) -> None:
        with self.cache.lookup(self.keys(text, **more), held=held) as hit:
            assert (hit.blocks, hit.tokens, hit.sources, hit.is_done) == (0, 0, (), True), text

    def resident(self, text: str, **more: object) -> int:
        """Blocks that a lookup finds; all of them are loaded and looked at."""
        keys = self.keys(text, **more)
        with self.cache.lookup(keys) as hit:
            return self.load(hit, keys) if hit.blocks else 0


# ---- copies by steps ---------------------------------------------------------------------------


class SteppedEvent:
    """End of a copy that is made in two halves."""

    def __init__(self, copies: Descriptors, changed: threading.Condition) -> None:
        self._copies, self._changed = copies, changed
        self._half = copies.sizes // 2
        self._is_done = self._is_ok = False

    def copy_half(self, direction: Direction) -> None:
        copies = self._copies
        copy_now(direction, Descriptors(copies.device, copies.host, self._half))

    def copy_rest(self, direction: Direction) -> None:
        copies, half = self._copies, self._half
        rest = Descriptors(copies.device + half, copies.host + half, copies.sizes - half)
        copy_now(direction, rest)

    def end(self, is_ok: bool) -> None:
        with self._changed:
            self._is_done, self._is_ok = True, is_ok
            self._changed.notify_all()

    def is_done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        with self._changed:
            ended = self._changed.wait_for(lambda: self._is_done, WAIT_MAX_S)
        assert ended, "a gate stayed closed"

    def finish(self) -> None:
        self.wait()

    @property
    def is_ok(self) -> bool:
        return self._is_ok


class SteppedEngine:
    """A copy engine whose copies wait for `half` and `rest` while it is stepped."""

    def __init__(self, is_stepped: bool = False) -> None:
        self.is_stepped = is_stepped
        self.waiting: dict[Direction, list[SteppedEvent]] = {way: [] for way in Direction}
        self.is_closed = False
        self._changed = threading.Condition()

    def submit(self, direction: Direction, copies: Descriptors) -> CopyEvent:
        assert not self.is_closed, "a copy after the end"
        event = SteppedEvent(copies, self._changed)
        self.waiting[direction].append(event)
        if not self.is_stepped:
            self.half(direction)
            self.rest(direction)
        return event

    def half(self, direction: Direction) -> int:
        """Copy the first half of the bytes of all that waits."""
        for event in self.waiting[direction]:
            event.copy_half(direction)
        return len(self.waiting[direction])

    def rest(self, direction: Direction, is_ok: bool = True) -> int:
        """Copy the other half, or leave it and say that the copies failed."""
        ended, self.waiting[direction] = self.waiting[direction], []
        for event in ended:
            if is_ok:
                event.copy_rest(direction)
            event.end(is_ok)
        return len(ended)

    def go_on(self) -> None:
        """From now on copies do not wait; those that wait are made."""
        self.is_stepped = False
        for direction in Direction:
            self.half(direction)
            self.rest(direction)

    def give_way(self) -> None:
        pass

    def close(self) -> None:
        self.go_on()
        self.is_closed = True


# ---- a process of its own ----------------------------------------------------------------------


class Puppet:
    """What a child does when told; each verb is a method."""

    def __init__(self, kind: str) -> None:
        self.memory = Memory(kind, 2 * SEAT_BLOCKS)
        self.engine = SteppedEngine()
        self.cache: tierkv.Cache | None = None
        self.seat: Seat | None = None
        self.hit: tierkv.Hit | None = None
        self.copy: tierkv.Copy | None = None
        self.keys: list[bytes] = []
        self.targets: list[int] = []

    @property
    def is_polling(self) -> bool:
        """A stepped engine gets on with nothing unless it is told."""
        return self.cache is not None and not self.engine.is_stepped

    def open(self, model: str, label: str, is_stepped: bool, config: str) -> int:
        """Make a cache; with a copy engine of steps or with the usual one."""
        more = {"copy_engine": self.engine} if is_stepped else {}
        settings = TierKVConfig.model_validate_json(config)
        self.cache = tierkv.Cache(
            self.memory.tensors, model=model, block_tokens=BLOCK_TOKENS, config=settings, **more
        )
        assert self.cache.wait_ready(WAIT_MAX_S), self.cache.refusal
        self.seat = Seat(self.cache, self.memory, label)
        return os.getpid()

    def scenario(self, name: str, label: str) -> str:
        from tests.sdk_scenarios import SCENARIOS

        SCENARIOS[name](Seat(self.cache, self.memory, label))
        return name

    def hash_tokens(self, text: str) -> list[str]:
        return [key.hex() for key in self.seat.keys(text)]

    def share(self, text: str) -> int:
        return self.seat.share(text)

    def resident(self, text: str) -> int:
        return self.seat.resident(text)

    # ---- one step at a time ----

    def lookup(self, text: str) -> int:
        self.engine.is_stepped = True
        self.keys = self.seat.keys(text)
        self.hit = self.cache.lookup(self.keys)
        return self.hit.blocks

    def start_load(self) -> int:
        self.targets = self.seat.wiped(self.hit.blocks)
        self.copy = self.cache.start_load(self.hit, self.targets)
        return self._submitted(Direction.LOAD)

    def start_store(self, text: str) -> int:
        self.engine.is_stepped = True
        self.keys = self.seat.keys(text)
        self.copy = self.cache.start_store(self.keys, self.seat.fill(self.keys))
        return self._submitted(Direction.STORE)

    def _submitted(self, direction: Direction) -> int:
        wait_for(lambda: self.engine.waiting[direction], self.cache, what="a copy to be submitted")
        return len(self.engine.waiting[direction])

    def half(self, direction: str) -> int:
        return self.engine.half(Direction(direction))

    def rest(self, direction: str) -> int:
        return self.engine.rest(Direction(direction))

    def finish_load(self) -> int:
        """Fails on a wrong byte."""
        count = self.copy.result()
        self.seat.see(self.targets, self.keys)
        return count

    def finish_store(self) -> int:
        return self.copy.result()

    def release(self) -> None:
        self.hit.release()
        self.engine.go_on()

    def go_on(self) -> None:
        self.engine.go_on()

    def close(self) -> None:
        self.cache.close()
        self.cache = None

    # ---- forgotten, forked ----

    def forget(self, times: int) -> list[int]:
        """Drop caches that are not closed, each with a hit; the blocks of the hits."""
        found = []
        for _ in range(times):
            cache = tierkv.Cache(
                self.memory.tensors,
                model="forgotten",
                block_tokens=BLOCK_TOKENS,
                config=self.cache.config,
            )
            assert cache.wait_ready(WAIT_MAX_S), cache.refusal
            hit = cache.lookup(self.seat.keys("ab"))
            found.append(hit.blocks)
            del cache, hit
            gc.collect()
        return found

    def fork(self) -> list[str]:
        """Fork, and say which error each call raises in the new process."""
        keys, blocks = self.seat.keys("ab"), self.seat.fill(self.seat.keys("ab"))
        hit = self.cache.lookup(keys)
        assert hit.blocks == 2
        calls: list[Callable[[], object]] = [
            lambda: self.cache.lookup(keys),
            lambda: self.cache.start_lookup(keys),
            lambda: self.cache.load(hit, self.seat.targets[:2]),
            lambda: self.cache.start_load(hit, self.seat.targets[:2]),
            lambda: self.cache.store(keys, blocks),
            lambda: self.cache.start_store(keys, blocks),
            lambda: self.cache.prefetch(keys),
            lambda: self.cache.touch(keys),
            self.cache.poll,
        ]
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            found = []
            for call in calls:
                try:
                    call()
                    found.append("none")
                except tierkv.TierKVError as error:
                    found.append(type(error).__name__)
            os.write(writer, json.dumps(found).encode())
            os._exit(0)
        os.close(writer)
        with open(reader, encoding="utf-8") as pipe:
            assert select.select([pipe], [], [], WAIT_MAX_S)[0], "the forked process says nothing"
            answers = json.loads(pipe.read())
        os.waitpid(pid, 0)
        assert self.seat.load(hit, keys) == 2, "the cache of the parent lives"
        hit.release()
        return answers


def _run(kind: str) -> None:
    puppet = Puppet(kind)
    while True:
        if puppet.is_polling:
            puppet.cache.poll()
        if not select.select([sys.stdin], [], [], 0.02)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            return
        verb, *arguments = json.loads(line)
        print(json.dumps(getattr(puppet, verb)(*arguments)), flush=True)


if __name__ == "__main__":
    _run(sys.argv[1])
