"""A small engine of one's own, with TierKV below its device cache.

    python docs/examples/engine.py

serves six conversations of three turns, one after the other round-robin, three times: without any
prefix cache, with one on the device, and with that one and TierKV. It prints how many prompt tokens
each had to compute, and fails unless all three gave the same tokens.

Read it from top to bottom. `BlockManager` is a usual prefix cache on the device and knows nothing
of TierKV. `Engine` is what you come for: every call of TierKV is in it. Below stand the workload
and the comparison. The model is in tiny_model.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import select
import signal
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path

import torch
from tiny_model import VOCABULARY, TinyModel, make_kv

import tierkv
from tierkv.errors import DaemonUnavailableError, LoadFailedError
from tierkv.hashing import block_hashes
from tierkv.service.client import Client
from tierkv.types import BlockKey, slot_bytes_of

BLOCK_TOKENS = 16
DEVICE_BLOCKS = 24
DRAM_BLOCKS = 200
CONVERSATIONS = 6
TURNS = 3
FIRST_QUESTION = 48  # tokens
NEXT_QUESTION = 16
NEW_TOKENS = 20  # per turn
SEED = 6
MODEL = "tiny-model@seed-0"  # other weights need another name


# ---- the device cache ---------------------------------------------------------------------------


class BlockManager:
    """Says which device block belongs to whom.

    A block that nobody uses keeps its bytes until it is taken for something else. That is the
    prefix cache of the device: `find` gives such blocks back to a prompt that begins alike.
    """

    def __init__(self, count: int) -> None:
        self._users = [0] * count
        # Blocks without a user, the one to be taken next first.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))
        self._block_of: dict[BlockKey, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def find(self, keys: Iterable[BlockKey]) -> list[int]:
        """Blocks that hold the leading keys. Until they are pinned any `allocate` may take them."""
        return [self._block_of[key] for key in takewhile(self._block_of.__contains__, keys)]

    def pin(self, blocks: Iterable[int]) -> None:
        """Count one user more of each."""
        for block in blocks:
            self._users[block] += 1
            self._free.pop(block, None)

    def unpin(self, blocks: Sequence[int]) -> None:
        """Count one user less of each. The last one is to be taken first: it is the tail."""
        for block in reversed(blocks):
            self._users[block] -= 1
            assert self._users[block] >= 0, f"device block {block} is unpinned once too often"
            if self._users[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._key_of)

    def allocate(self, count: int) -> list[int]:
        """Take and pin the blocks that were free for longest; what they held is forgotten."""
        if count > len(self._free):
            raise MemoryError(f"{count} device blocks are needed and {len(self._free)} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
        self.pin(blocks)
        return blocks

    def name(self, block: int, key: BlockKey) -> None:
        """Let `find` find a full block from now on, unless there is one of this key already."""
        if key not in self._block_of:
            self._block_of[key] = block
            self._key_of[block] = key


# ---- the engine ---------------------------------------------------------------------------------


class Engine:
    """Serves one request at a time, with greedy decoding.

    Args:
        has_prefix_cache: whether device blocks are found again.
        config: TierKV's configuration, see docs/reference/configuration.md; None: no TierKV.

    Attributes:
        computed: prompt tokens that went through the model so far. Not counted are those whose KV
            was on the device or came from TierKV, and generated tokens, which are always computed.
        offloaded: blocks that TierKV stored, without those that it had.
        read_back: blocks that came from TierKV.
    """

    def __init__(self, has_prefix_cache: bool, config: dict[str, object] | None = None) -> None:
        self.computed = self.offloaded = self.read_back = 0
        self._has_prefix_cache = has_prefix_cache
        self._model = TinyModel()
        self._kv = make_kv(DEVICE_BLOCKS, BLOCK_TOKENS)
        self._blocks = BlockManager(DEVICE_BLOCKS)
        self._stores: list[tierkv.Copy] = []
        self.cache: tierkv.Cache | None = None
        if config is not None:
            self.cache = tierkv.Cache(
                self._kv,
                model=MODEL,
                block_tokens=BLOCK_TOKENS,
                config=config,
            )

    def generate(self, prompt: Sequence[int], new: int) -> list[int]:
        """Tokens that follow a prompt."""
        tokens = list(prompt)
        table, known = self._begin(tokens)
        named = known // BLOCK_TOKENS
        self.computed += len(tokens) - known
        while True:
            # The first time around this is the prefill, behind the cached prefix; then one token.
            logits = self._model.forward(tokens[known:], known, table, self._kv)
            known = len(tokens)
            named = self._keep_full_blocks(tokens, table, named)
            tokens.append(int(logits.argmax()))
            if len(tokens) == len(prompt) + new:
                break  # the KV of the last token is not needed
            if len(tokens) > len(table) * BLOCK_TOKENS:
                table += self._allocate(1)
        self._blocks.unpin(table)
        return tokens[len(prompt) :]

    def _begin(self, tokens: Sequence[int]) -> tuple[list[int], int]:
        """Get the device blocks of a prompt.

        Returns:
            Its block table, and how many leading tokens have their KV in it.
        """
        # At least one token must go through the model, because it gives the logits.
        keys = block_hashes(tokens, BLOCK_TOKENS)[: (len(tokens) - 1) // BLOCK_TOKENS]
        held = self._blocks.find(keys)
        # THE RULE: device hits are pinned before blocks for the rest are allocated. They are free
        # until then, and often the oldest: the allocation would take just them for other tokens.
        self._blocks.pin(held)
        table = held + self._allocate(-(-len(tokens) // BLOCK_TOKENS) - len(held))
        loaded = self._load(keys, table, len(held), len(tokens))
        if self._has_prefix_cache:
            for block, key in zip(table[len(held) :], keys[len(held) :][:loaded], strict=False):
                self._blocks.name(block, key)
        return table, (len(held) + loaded) * BLOCK_TOKENS

    def _load(self, keys: Sequence[BlockKey], table: Sequence[int], held: int, prompt: int) -> int:
        """Fetch what TierKV has behind the device hits.

        Args:
            held: leading blocks that the device has.
            prompt: tokens of the prompt, for the statistics.
        Returns:
            How many blocks of the table were filled, from `held` on.
        """
        if self.cache is None:
            return 0
        with self.cache.lookup(keys, held=held) as hit:
            loaded = 0
            if hit.blocks:
                copy = self.cache.start_load(hit, table[held : held + hit.blocks])
                # An engine with other requests goes on with them here, and looks at copy.is_done.
                # A load that fails leaves any bytes in its blocks; they are computed like the rest.
                with contextlib.suppress(LoadFailedError):
                    loaded = copy.result()
            self.cache.report(held * BLOCK_TOKENS, hit, prompt - (held + loaded) * BLOCK_TOKENS)
        self.read_back += loaded
        return loaded

    def _keep_full_blocks(self, tokens: Sequence[int], table: Sequence[int], named: int) -> int:
        """Name blocks that became full, and start copying them to TierKV.

        Args:
            named: so many leading blocks were full before.
        Returns:
            How many are full now.
        """
        full = len(tokens) // BLOCK_TOKENS
        if full == named or not self._has_prefix_cache:
            return full
        keys = block_hashes(tokens, BLOCK_TOKENS)
        for block, key in zip(table[named:full], keys[named:full], strict=True):
            self._blocks.name(block, key)
        if self.cache is not None:
            after = keys[named - 1] if named else None
            copy = self.cache.start_store(keys[named:full], table[named:full], after=after)
            self._stores.append(copy)  # goes on while the next tokens are computed
        return full

    def _allocate(self, count: int) -> list[int]:
        """Device blocks that nobody reads any more, TierKV's copies included."""
        blocks = self._blocks.allocate(count)
        self._finish_stores(blocks)
        return blocks

    def _finish_stores(self, blocks: Iterable[int] = ()) -> None:
        """Count the stores that have ended; first wait for those that read any of `blocks`."""
        needed = set(blocks)
        for copy in list(self._stores):
            if not needed.isdisjoint(copy.blocks):
                copy.wait()  # hardly ever long: these blocks were free for longest
            if copy.is_done:
                self.offloaded += copy.result()
                self._stores.remove(copy)

    def close(self) -> None:
        """Finish the stores and leave TierKV. What it holds stays there for the next engine."""
        self._finish_stores(range(DEVICE_BLOCKS))
        if self.cache is not None:
            self.cache.close()


# ---- the workload -------------------------------------------------------------------------------


def converse(engine: Engine) -> Iterator[list[int]]:
    """All conversations, one turn of each at a time: the worst order for a small device cache.

    Yields:
        The new tokens of one turn.
    """
    dice = random.Random(SEED)
    lengths = [FIRST_QUESTION] + [NEXT_QUESTION] * (TURNS - 1)
    histories: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    for length in lengths:
        for history in histories:
            history.extend(dice.randrange(VOCABULARY) for _ in range(length))
            answer = engine.generate(history, NEW_TOKENS)
            history.extend(answer)
            yield answer


@dataclass
class Run:
    """What one run of the workload gave and cost; see `Engine`."""

    outputs: list[list[int]]
    computed: int
    offloaded: int
    read_back: int


def run(engine: Engine) -> Run:
    """The whole workload on a fresh engine."""
    outputs = list(converse(engine))
    engine.close()
    return Run(outputs, engine.computed, engine.offloaded, engine.read_back)


def make_config(directory: Path) -> dict[str, object]:
    """TierKV's configuration: a daemon of our own, with room for `DRAM_BLOCKS` blocks.

    Yours will be a YAML file, and have a pool of many GiB.
    """
    block_bytes = sum(pages[0].nbytes for pages in make_kv(1, BLOCK_TOKENS).values())
    slot_bytes = slot_bytes_of(block_bytes)
    return {
        "node": {
            "dram": {"capacity": DRAM_BLOCKS * slot_bytes, "extent_unit": 10 * slot_bytes},
            "service": {"socket": str(directory / "daemon.sock")},
        },
        "engine": {
            "swap_in_threshold": 0,  # this model is so small that even one block pays
            "request_deadline": "5s",  # so that a busy machine changes no number
        },
    }


def run_with_tierkv() -> Run:
    """The workload on an engine whose daemon begins and ends with it.

    Raises:
        SystemExit: TierKV does not work, so there would be nothing to compare.
    """
    with tempfile.TemporaryDirectory(prefix="tierkv-") as directory:
        engine = Engine(has_prefix_cache=True, config=make_config(Path(directory)))
        assert engine.cache is not None
        try:
            # A server need not wait: until TierKV is ready its lookups find nothing.
            if not engine.cache.wait_ready():
                raise SystemExit(f"TierKV is not ready: {engine.cache.refusal or 'no daemon'}")
            return run(engine)
        finally:
            end_daemon(Path(directory) / "daemon.sock")


def end_daemon(socket: Path) -> None:
    """End a daemon and wait for it. A server does no such thing: its daemon outlives it."""
    client = Client(socket, None)
    with contextlib.suppress(DaemonUnavailableError):
        client.connect(wait_s=5)
    if client.welcome is None:
        return
    process = os.pidfd_open(client.welcome.pid)
    client.close()
    signal.pidfd_send_signal(process, signal.SIGTERM)
    select.select([process], [], [], 30)
    os.close(process)


# ---- the comparison -----------------------------------------------------------------------------


def table(runs: dict[str, Run]) -> str:
    """What the runs cost, for people."""
    lines = [f"{'':19}{'computed tokens':>17}{'offloaded blocks':>18}{'blocks read back':>18}"]
    for name, one in runs.items():
        lines.append(f"{name:19}{one.computed:17}{one.offloaded:18}{one.read_back:18}")
    return "\n".join(lines)


def check(runs: dict[str, Run]) -> None:
    """The reason to run this program.

    Raises:
        SystemExit: outputs are not equal, or a cache saved nothing.
    """
    wanted, *others = runs.values()
    for name, one in list(runs.items())[1:]:
        if one.outputs != wanted.outputs:
            raise SystemExit(f"the outputs are not equal: '{name}' gave other tokens")
    computed = [one.computed for one in runs.values()]
    if computed != sorted(set(computed), reverse=True):
        raise SystemExit(f"a cache saved nothing: {computed} tokens were computed")
    if not (others[-1].offloaded and others[-1].read_back):
        raise SystemExit("TierKV stored nothing, or nothing came back")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all three, print the table, compare."""
    parser = argparse.ArgumentParser(
        description=f"{CONVERSATIONS} conversations of {TURNS} turns on {DEVICE_BLOCKS} device "
        "blocks: without a cache, with one on the device, and with TierKV below that."
    )
    parser.add_argument("--json", action="store_true", help="print numbers and outputs as JSON")
    is_json = parser.parse_args(arguments).json
    torch.set_num_threads(1)  # the model is too small for more
    runs = {
        "no cache": run(Engine(has_prefix_cache=False)),
        "device cache only": run(Engine(has_prefix_cache=True)),
        "with TierKV": run_with_tierkv(),
    }
    if is_json:
        print(json.dumps({name: asdict(one) for name, one in runs.items()}))
    else:
        print(table(runs))
    check(runs)
    if not is_json:
        print("all outputs are equal")


if __name__ == "__main__":
    main()
