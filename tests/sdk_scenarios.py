"""What one user does with a cache. Others do the same beside him, with words of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tests.processes import wait_for
from tests.sdk_world import BLOCK_TOKENS, Seat

SCENARIOS: dict[str, Callable[[Seat], None]] = {}


def scenario(does: Callable[[Seat], None]) -> Callable[[Seat], None]:
    SCENARIOS[does.__name__] = does
    return does


@scenario
def what_was_stored_is_loaded_into_other_blocks(seat: Seat) -> None:
    seat.miss("abcd")
    assert seat.store("abcd") == 4
    assert seat.hit("abcd", 4) == ("dram",) * 4


@scenario
def a_hit_is_the_longest_prefix(seat: Seat) -> None:
    assert seat.store("abc") == 3
    seat.hit("abcde", 3)
    seat.hit("ab", 2)
    seat.hit("abxc", 2)
    seat.miss("xabc")


@scenario
def tokens_behind_the_last_full_block_have_no_key(seat: Seat) -> None:
    whole = seat.tokens("abc")
    for more in range(1, BLOCK_TOKENS):
        assert seat.cache.hash_tokens(whole + [7] * more) == seat.keys("abc")
        assert seat.cache.hash_tokens(whole[:-more]) == seat.keys("ab")
    assert seat.cache.hash_tokens([]) == []
    assert seat.cache.hash_tokens(np.array(whole)) == seat.keys("abc")


@scenario
def blocks_in_another_order_are_another_prefix(seat: Seat) -> None:
    assert seat.store("abc") == 3
    for text in ("bca", "cab", "ba", "c"):
        seat.miss(text)
    seat.hit("acb", 1)
    assert seat.store("cba") == 3
    seat.hit("cba", 3)
    seat.hit("abc", 3)


@scenario
def another_salt_or_adapter_or_image_is_another_prompt(seat: Seat) -> None:
    assert seat.store("abc") == 3
    others: list[dict[str, object]] = [
        {"salt": b"tenant"},
        {"adapter": b"a" * 32},
        {"extras": {0: b"an image"}},
        {"extras": {0: b"another image"}},
        {"salt": b"tenant", "adapter": b"a" * 32},
        {"salt": b"a" * 32},
        {"adapter": b"tenant"},
    ]
    for other in others:
        seat.miss("abc", **other)
        assert seat.store("ab", **other) == 2
    for other in others:
        seat.hit("abc", 2, **other)
    seat.hit("abc", 2, extras={2: b"an image"})
    seat.hit("abc", 1, extras={1: b"an image"})
    seat.hit("abc", 3)


@scenario
def what_the_device_holds_is_not_offered(seat: Seat) -> None:
    assert seat.store("abcd") == 4
    for held in (1, 2, 3):
        seat.hit("abcd", 4 - held, held)
        seat.hit("abcde", 4 - held, held)
    seat.miss("abcd", held=4)
    seat.miss("abcde", held=4)


@scenario
def a_store_goes_on_behind_an_earlier_one(seat: Seat) -> None:
    assert seat.store("ab") == 2
    assert seat.store("cd", behind="ab") == 2
    seat.hit("abcd", 4)
    assert seat.store("e", behind="abcd") == 1
    seat.hit("abcdef", 5)


@scenario
def what_is_there_is_not_stored_again(seat: Seat) -> None:
    assert seat.store("ab") == 2
    assert seat.store("ab") == 0
    assert seat.store("abcd") == 2
    assert seat.store("bcd", behind="a") == 0
    seat.hit("abcd", 4)


@scenario
def everything_can_be_polled(seat: Seat) -> None:
    """No call here may wait."""
    keys = seat.keys("abc")
    origins = seat.fill(keys)
    copy = seat.cache.start_store(keys, origins)
    wait_for(lambda: copy.is_done, what="a store")
    assert copy.result() == 3
    assert copy.wait(0.0)
    hit = seat.cache.start_lookup(keys)
    wait_for(lambda: hit.is_done, what="a lookup")
    assert hit.wait(0.0)
    assert (hit.blocks, hit.tokens, hit.sources) == (3, 3 * BLOCK_TOKENS, ("dram",) * 3)
    targets = seat.wiped(3)
    copy = seat.cache.start_load(hit, targets)
    if not copy.is_done:
        assert sorted(copy.blocks) == sorted(targets)
    wait_for(lambda: copy.is_done, what="a load")
    assert copy.result() == 3
    seat.see(targets, keys)
    hit.release()


@scenario
def a_hit_may_be_loaded_in_parts_and_more_than_once(seat: Seat) -> None:
    assert seat.store("abcd") == 4
    keys = seat.keys("abcd")
    with seat.cache.lookup(keys) as one, seat.cache.lookup(keys, held=1) as two:
        assert (one.blocks, two.blocks) == (4, 3)
        targets = seat.wiped(2)
        assert seat.cache.load(one, targets) == 2
        seat.see(targets, keys)
        assert seat.load(two, keys[1:]) == 3
        assert seat.load(one, keys) == 4


@scenario
def a_load_may_begin_anywhere_in_a_hit(seat: Seat) -> None:
    assert seat.store("abcdef") == 6
    keys = seat.keys("abcdef")
    with seat.cache.lookup(keys, held=1) as hit:
        assert hit.blocks == 5
        for first, count in ((0, 2), (2, 3), (4, 1), (5, 0)):
            targets = seat.wiped(count)
            assert seat.cache.load(hit, targets, first=first) == count
            seat.see(targets, keys[1 + first :])


@scenario
def hashing_goes_on_behind_a_key(seat: Seat) -> None:
    whole = seat.keys("abcd", salt=b"tenant")
    rest = seat.cache.hash_tokens(seat.tokens("cd"), after=whole[1])
    assert rest == whole[2:]
    assert seat.store("ab", salt=b"tenant") == 2
    assert seat.cache.store(rest, seat.fill(rest), after=whole[1]) == 2
    seat.hit("abcd", 4, salt=b"tenant")


@scenario
def copies_beside_each_other_do_not_mix(seat: Seat) -> None:
    keys = {text: seat.keys(text) for text in ("ab", "cd", "ef", "gh")}
    origins = seat.fill([key for pair in keys.values() for key in pair])
    pairs = [origins[at : at + 2] for at in range(0, 8, 2)]
    stores = [seat.cache.start_store(k, b) for k, b in zip(keys.values(), pairs, strict=True)]
    assert [store.result() for store in stores] == [2] * 4
    hits = [seat.cache.start_lookup(k) for k in keys.values()]
    assert all(hit.wait() for hit in hits)
    targets = seat.wiped(8)
    pairs = [targets[at : at + 2] for at in range(0, 8, 2)]
    loads = [seat.cache.start_load(hit, b) for hit, b in zip(hits, pairs, strict=True)]
    for hit in hits:
        hit.release()
    assert [load.result() for load in loads] == [2] * 4
    seat.see(targets, [key for pair in keys.values() for key in pair])


@scenario
def a_hit_is_released_as_often_as_one_likes(seat: Seat) -> None:
    assert seat.store("ab") == 2
    with seat.cache.lookup(seat.keys("ab")) as hit:
        assert hit.blocks == 2
        hit.release()
    hit.release()
    seat.cache.release(hit)
    another = seat.cache.lookup(seat.keys("ab"))
    seat.cache.release(another)
    another.release()
    never = seat.cache.start_lookup(seat.keys("ab"))
    never.release()
    seat.hit("ab", 2)


@scenario
def hints_change_no_bytes(seat: Seat) -> None:
    assert seat.store("abc") == 3
    seat.cache.prefetch(seat.keys("abcde"))
    seat.cache.touch(seat.keys("abc"))
    seat.cache.touch(seat.keys("xyz"))
    seat.cache.prefetch(seat.keys("xyz"))
    seat.cache.poll()
    seat.hit("abcde", 3)
    seat.miss("xyz")


@scenario
def nothing_to_do_is_no_error(seat: Seat) -> None:
    assert seat.store("ab") == 2
    assert seat.cache.store([], []) == 0
    assert seat.cache.start_store([], []).result() == 0
    with seat.cache.lookup([]) as none:
        assert (none.blocks, none.is_done) == (0, True)
        assert seat.cache.load(none, []) == 0
    with seat.cache.lookup(seat.keys("ab")) as hit:
        assert seat.cache.load(hit, []) == 0
    seat.cache.prefetch([])
    seat.cache.touch([])
    seat.hit("ab", 2)
