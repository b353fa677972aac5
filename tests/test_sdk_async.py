"""`AsyncCache`: the same by await, many tasks at a time, and what a cancellation leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

import pytest

import tierkv
from tests.processes import PAUSE_S, WAIT_MAX_S, wait_for
from tests.sdk_node import SdkNode, users_of
from tests.sdk_world import BLOCK_TOKENS, KINDS, SEAT_BLOCKS, Memory, Seat, SteppedEngine
from tierkv.device.base import Direction
from tierkv.errors import TierKVError, UsageError

TASKS = 12


@pytest.fixture(scope="module", params=["auto", "external"])
def shared(request, tmp_path_factory):
    node = SdkNode(tmp_path_factory.mktemp("sdk"), request.param, slots=1024, extent_slots=16)
    yield node
    node.close()


@pytest.fixture
def node(shared):
    with users_of(shared):
        yield shared


class AsyncSeat(Seat):
    """`Seat` at an `AsyncCache`."""

    async def store(self, text: str, behind: str = "", **more: object) -> int:
        keys = self.keys(behind + text, **more)
        after = keys[len(behind) - 1] if behind else None
        keys = keys[len(behind) :]
        return await self.cache.store(keys, self.fill(keys), after=after)

    async def share(self, text: str, behind: str = "", **more: object) -> int:
        count = await self.store(text, behind, **more)
        (await self.cache.lookup(self.keys("?"))).release()
        return count

    async def load(self, hit: tierkv.Hit, keys) -> int:
        targets = self.wiped(hit.blocks)
        count = await self.cache.load(hit, targets)
        assert count == len(targets)
        self.see(targets, keys)
        return count

    async def hit(self, text: str, count: int, held: int = 0, **more: object) -> None:
        keys = self.keys(text, **more)
        with await self.cache.lookup(keys, held=held) as hit:
            assert (hit.blocks, hit.is_done) == (count, True)
            assert await self.load(hit, keys[held:]) == count

    async def miss(self, text: str, **more: object) -> None:
        with await self.cache.lookup(self.keys(text, **more)) as hit:
            assert (hit.blocks, hit.is_done) == (0, True)


@contextlib.asynccontextmanager
async def seats(
    node: SdkNode, model: str, count: int = 1, kind: str = "numpy", **more: object
) -> AsyncIterator[list[AsyncSeat]]:
    """Several at one cache."""
    memory = Memory(kind, 2 * SEAT_BLOCKS * count)
    settings = node.settings(**more.pop("engine", {}))
    async with tierkv.AsyncCache(
        memory.tensors, model=model, block_tokens=BLOCK_TOKENS, config=settings, **more
    ) as cache:
        assert await cache.wait_ready(WAIT_MAX_S), cache.refusal
        try:
            yield [AsyncSeat(cache, memory, f"task {n}", n) for n in range(count)]
        finally:
            if "copy_engine" in more:
                more["copy_engine"].go_on()


async def until(condition: Callable[[], object], what: str) -> None:
    """`wait_for` for a loop that must go on."""
    end = time.monotonic() + WAIT_MAX_S
    while not condition():
        assert time.monotonic() < end, f"waited in vain: {what}"
        await asyncio.sleep(PAUSE_S)


async def use(seat: AsyncSeat) -> None:
    await seat.miss("abcd")
    assert await seat.store("abcd") == 4
    await seat.hit("abcde", 4)
    await seat.hit("abx", 2)
    await seat.hit("abcd", 2, held=2)
    await seat.miss("ba")
    await seat.miss("ab", salt=b"tenant")
    assert await seat.store("ef", behind="abcd") == 2
    assert await seat.store("abcd") == 0
    await seat.hit("abcdef", 6)
    copy = seat.cache.start_store(seat.keys("xy"), seat.fill(seat.keys("xy")))
    await until(lambda: copy.is_done, "a store")
    assert copy.result() == 2
    hit = seat.cache.start_lookup(seat.keys("xy"))
    await until(lambda: hit.is_done, "a lookup")
    targets = seat.wiped(2)
    load = seat.cache.start_load(hit, targets)
    await until(lambda: load.is_done, "a load")
    assert load.result() == 2
    seat.see(targets, seat.keys("xy"))
    seat.cache.release(hit)
    seat.cache.prefetch(seat.keys("xy"))
    seat.cache.touch(seat.keys("xy"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, TASKS])
def test_tasks_at_one_cache_get_right_bytes(node, request, kind, count):
    async def run() -> None:
        async with seats(node, request.node.name, count, kind) as users:
            await asyncio.gather(*map(use, users))

    asyncio.run(run())


def test_an_async_cache_and_a_cache_share_blocks(node):
    async def run() -> None:
        async with seats(node, "shared") as [user]:
            assert await user.share("abc") == 3
            other = node.seat("shared", label=user.label)
            assert other.cache.namespace == user.cache.namespace
            other.hit("abcd", 3)
            assert other.share("d", behind="abc") == 1
            await user.hit("abcd", 4)

    asyncio.run(run())


def test_the_loop_goes_on_while_a_task_waits(node):
    """A copy that is not made yet keeps its own task waiting and nobody else."""
    engine = SteppedEngine()

    async def run() -> None:
        async with seats(node, "waits", 2, copy_engine=engine) as [one, two]:
            assert await one.store("ab") == 2
            assert await two.store("ab") == 2
            targets = one.wiped(2)
            with await one.cache.lookup(one.keys("ab")) as hit:
                engine.is_stepped = True
                loading = asyncio.create_task(one.cache.load(hit, targets))
                await until(lambda: engine.waiting[Direction.LOAD], "the copy")
                with await two.cache.lookup(two.keys("ab")) as other:
                    assert other.blocks == 2
                assert not loading.done()
                engine.go_on()
                assert await loading == 2
            one.see(targets, one.keys("ab"))

    asyncio.run(run())


# ---- cancelled ---------------------------------------------------------------------------------


async def cancel(task: asyncio.Task) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_cancelled_lookup_leaves_no_pins(node):
    """Cancelled before its answer, and while it waits for blocks that another cache is storing."""
    engine = SteppedEngine()

    async def run() -> None:
        async with (
            seats(node, "lookups", copy_engine=engine) as [writer],
            seats(node, "lookups", engine={"fill_wait_max": WAIT_MAX_S}) as [reader],
        ):
            assert await writer.share("ab") == 2
            engine.is_stepped = True
            keys = writer.keys("abcd")
            copy = writer.cache.start_store(keys[2:], writer.fill(keys)[2:], after=keys[1])
            await until(lambda: writer.cache.poll() or engine.waiting[Direction.STORE], "the store")
            for turns in range(6):
                task = asyncio.create_task(reader.cache.lookup(keys))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    (await task).release()
            tasks = [asyncio.create_task(reader.cache.lookup(keys)) for _ in range(TASKS)]
            for task in tasks:
                task.cancel()
            for hit in await asyncio.gather(*tasks, return_exceptions=True):
                if isinstance(hit, tierkv.Hit):
                    hit.release()
                else:
                    assert isinstance(hit, asyncio.CancelledError)
            await until(lambda: node.held()[0] == 1, "the end of all leases but the writer's")
            engine.go_on()
            await until(lambda: copy.is_done, "the store")
            assert copy.result() == 2
            await reader.hit("abcd", 4)

    asyncio.run(run())
    wait_for(lambda: node.held() == (0, 0), what="the end of all pins")


@pytest.mark.parametrize("is_released", [True, False])
def test_a_cancelled_load_ends_with_its_copy_or_tells_which_blocks_are_in_use(node, is_released):
    """The caller may reuse its blocks when the task has ended, so no copy may run then."""
    engine = SteppedEngine()

    async def run() -> None:
        model = f"loads {is_released}"
        async with seats(node, model, copy_engine=engine) as [user]:
            assert await user.store("ab") == 2
            hit = await user.cache.lookup(user.keys("ab"))
            targets = user.wiped(2)
            engine.is_stepped = True
            task = asyncio.create_task(user.cache.load(hit, targets))
            await until(lambda: engine.waiting[Direction.LOAD], "the copy")
            engine.half(Direction.LOAD)
            task.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            if is_released:
                hit.release()
            had_ended = task.done()
            if had_ended:
                user.wiped(2)
            engine.go_on()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            if had_ended:
                assert all(map(user.memory.is_wiped, targets)), "a copy ran on behind its task"
            else:
                user.see(targets, user.keys("ab"))
            hit.release()
            await until(lambda: node.held() == (0, 0), "the end of all pins")
            await user.hit("ab", 2)

    asyncio.run(run())


def test_a_cancelled_store_never_shows_half_a_block(node):
    engine = SteppedEngine()

    async def run() -> None:
        async with seats(node, "stores", copy_engine=engine) as [user]:
            assert await user.store("ab") == 2
            engine.is_stepped = True
            keys = user.keys("abcd")
            origins = user.fill(keys)[2:]
            task = asyncio.create_task(user.cache.store(keys[2:], origins, after=keys[1]))
            await until(lambda: engine.waiting[Direction.STORE], "the copy")
            engine.half(Direction.STORE)
            task.cancel()
            for _ in range(100):
                await asyncio.sleep(0)
            if task.done():
                user.memory.wipe(*origins)  # the caller thinks that they are its own again
            engine.go_on()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await until(lambda: user.cache.poll() or node.held() == (0, 0), "the end of all pins")
            user.fill(keys)
            keys = user.keys("abcd")
            with await user.cache.lookup(keys) as hit:
                assert hit.blocks in (2, 4)
                assert await user.load(hit, keys) == hit.blocks

    asyncio.run(run())


def test_a_cancelled_wait_for_a_daemon_can_be_tried_again(tmp_path):
    node = SdkNode(tmp_path, "external", is_started=False)

    async def run() -> None:
        memory = Memory("numpy", 2 * SEAT_BLOCKS)
        async with tierkv.AsyncCache(
            memory.tensors, model="m", block_tokens=BLOCK_TOKENS, config=node.settings()
        ) as cache:
            assert not await cache.wait_ready(0.0)
            task = asyncio.create_task(cache.wait_ready(WAIT_MAX_S))
            await asyncio.sleep(0)
            await cancel(task)
            await asyncio.get_running_loop().run_in_executor(None, node.start_daemon)
            assert await cache.wait_ready(WAIT_MAX_S)
            user = AsyncSeat(cache, memory, "")
            assert await user.store("ab") == 2
            await user.hit("ab", 2)

    try:
        asyncio.run(run())
    finally:
        node.close()


def test_a_daemon_that_dies_is_a_miss_and_then_a_new_one(tmp_path):
    node = SdkNode(tmp_path, "auto")

    async def run() -> None:
        async with seats(node, "m") as [user]:
            assert await user.store("ab") == 2
            await user.hit("ab", 2)
            node.kill_daemon()
            await user.miss("ab")
            assert await user.store("cd") == 0
            assert await user.cache.wait_ready(WAIT_MAX_S)
            await until(lambda: node.serves() and node.stats()["is_granting"], "slots")
            assert await user.store("ab") == 2
            await user.hit("ab", 2)

    try:
        asyncio.run(run())
    finally:
        node.close()


def test_a_cancelled_close_closes_all_the_same(node):
    engine = SteppedEngine()

    async def run() -> None:
        async with seats(node, "closing", copy_engine=engine) as [seat]:
            engine.is_stepped = True
            keys = seat.keys("ab")
            seat.cache.start_store(keys, seat.fill(keys))
            await until(lambda: seat.cache.poll() or engine.waiting[Direction.STORE], "the store")
            task = asyncio.create_task(seat.cache.close())
            await asyncio.sleep(0)
            engine.go_on()
            await cancel(task)
            with pytest.raises(UsageError):
                seat.cache.start_lookup(keys)

    asyncio.run(run())
    wait_for(lambda: node.held() == (0, 0), what="the end of all pins")


def test_a_closed_async_cache_refuses(node):
    async def run() -> None:
        async with seats(node, "closed") as [user]:
            assert await user.store("ab") == 2
            hit = await user.cache.lookup(user.keys("ab"))
        for call in (
            lambda: user.cache.lookup(user.keys("ab")),
            lambda: user.cache.load(hit, user.wiped(2)),
            lambda: user.cache.store(user.keys("cd"), [0, 1]),
        ):
            with pytest.raises(UsageError):
                await call()

    asyncio.run(run())
    assert issubclass(UsageError, TierKVError)
