"""The examples for engines of one's own run, notice planted faults, and are what pages show."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.util
import inspect
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import tierkv
from tests.test_docs import Block, blocks_of, sections_of, text_of
from tierkv.bench.demo.node import DemoNode
from tierkv.config import ENV_PREFIX
from tierkv.hashing import block_hashes
from tierkv.pool import attach_pool
from tierkv.service import wire
from tierkv.service.client import Attachment, Client
from tierkv.types import FRAME_BYTES, BlockKey, EngineId, NamespaceId

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"
HOW_TO = ROOT / "docs" / "how-to" / "custom-engine.md"
REFERENCE = ROOT / "docs" / "reference" / "sdk.md"
RUN_WAIT_S = 120

# The statement that protects device hits, and what stands behind it.
PROTECTION = "        self._blocks.pin(held)\n"
ALLOCATION = re.compile(r"        table = held \+ self\._allocate\([^\n]*\)\n")


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    """Whatever the machine that runs the tests has set must not decide them."""
    for name in list(os.environ):
        if name.startswith(ENV_PREFIX):
            monkeypatch.delenv(name)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A private directory with a short name: sockets allow no long ones."""
    with tempfile.TemporaryDirectory(prefix="tkv-") as name:
        yield Path(name)


def start(program: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end, with more variables in its environment."""
    return subprocess.run(
        [sys.executable, str(program), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **more},
        capture_output=True,
        text=True,
        timeout=RUN_WAIT_S,
        check=False,
    )


@contextmanager
def as_module(name: str) -> Iterator[ModuleType]:
    """A program of docs/examples, imported. It may lower torch's number of threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses look for it
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))
        del sys.modules[module.__name__]
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """docs/examples/engine.py."""
    with as_module("engine") as module:
        yield module


@functools.cache
def run_the_engine() -> tuple[str, list[str]]:
    """What the engine's program prints, and the files that are there afterwards."""
    with tempfile.TemporaryDirectory(prefix="tkv-") as name:
        pool = Path(name) / "pool"
        pool.mkdir()
        more = {"TMPDIR": name, "TIERKV_NODE__DRAM__DIRECTORY": str(pool)}
        run = start(EXAMPLES / "engine.py", **more)
        assert run.returncode == 0, run.stderr
        return run.stdout, [path.name for path in Path(name).rglob("*")]


# ---- the engine --------------------------------------------------------------------------------


def test_each_cache_computes_less_and_all_give_the_same_tokens(example, capsys):
    example.main(["--json"])
    none, device, tiers = json.loads(capsys.readouterr().out).values()
    assert none["computed"] > device["computed"] > tiers["computed"]
    assert none["outputs"] == device["outputs"] == tiers["outputs"]
    assert [len(turn) for turn in none["outputs"]] == [20] * 18
    assert tiers["offloaded"] > 0
    assert tiers["read_back"] > 0
    # Everything was stored, so only the end of each prompt is computed: the first question, and
    # later what did not fill a block.
    assert tiers["computed"] == 6 * (48 + (84 - 64) + (120 - 96))
    # One conversation fits the device, and all six together do not.
    blocks = -(-(120 + 20) // 16)
    assert blocks <= example.DEVICE_BLOCKS < 6 * blocks


def test_the_pool_of_the_engine_holds_what_it_says(example, directory):
    engine = example.Engine(True, example.make_config(directory))
    try:
        assert engine.cache.wait_ready(), engine.cache.refusal
        with Spy(directory / "daemon.sock") as spy:
            (space,) = spy.stats()["namespaces"]
            pool = spy.stats()["capacity"]
        assert pool // space["slot_bytes"] >= example.DRAM_BLOCKS == 200
    finally:
        engine.close()
        example.end_daemon(directory / "daemon.sock")


def test_the_engine_leaves_neither_pool_nor_file_behind():
    _, left = run_the_engine()
    assert left == ["pool"]


def test_an_engine_that_does_not_protect_its_device_hits_is_found_out(tmp_path):
    """The negative control of the comparison: hits are pinned after the rest is allocated."""
    for file in EXAMPLES.glob("*.py"):
        shutil.copy(file, tmp_path)
    program = tmp_path / "engine.py"
    text = text_of(program)
    assert text.count(PROTECTION) == 1
    (allocation,) = ALLOCATION.findall(text)
    right, wrong = PROTECTION + allocation, allocation + PROTECTION
    assert text.count(right) == 1
    program.write_text(text.replace(right, wrong), encoding="utf-8")
    run = start(program)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "the outputs are not equal: 'device cache only' gave other tokens" in run.stderr


def test_a_damaged_block_in_the_pool_changes_what_the_engine_says(example, directory):
    """The negative control of the hits: the bytes that were read back decide."""
    wanted = example.run(example.Engine(False)).outputs
    engine = example.Engine(True, example.make_config(directory))
    turns = example.converse(engine)
    try:
        assert engine.cache.wait_ready(), engine.cache.refusal
        first = list(itertools.islice(turns, example.CONVERSATIONS))
        assert first == wanted[: example.CONVERSATIONS]
        # The first conversation, as far as its KV was stored.
        dice = random.Random(example.SEED)
        history = [dice.randrange(example.VOCABULARY) for _ in range(example.FIRST_QUESTION)]
        keys = block_hashes([*history, *first[0][:-1]], example.BLOCK_TOKENS)
        with Spy(directory / "daemon.sock") as spy:
            spy.damage(engine.cache.namespace, keys, np.float64)
        before = engine.read_back
        answer = next(turns)
        assert engine.read_back > before, "nothing was loaded, so the output proves nothing"
        assert answer != wanted[example.CONVERSATIONS]
    finally:
        engine.close()
        example.end_daemon(directory / "daemon.sock")


def test_the_engine_explains_itself(example, capsys):
    with pytest.raises(SystemExit) as end:
        example.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0
    assert "--json" in text
    assert "6 conversations of 3 turns on 24 device blocks" in text


class Spy:
    """Looks into a daemon and its pool from outside, as a client of its own."""

    def __init__(self, socket: Path) -> None:
        self.client = Client(socket, EngineId("spy"), deadline_s=10.0)

    def __enter__(self) -> Spy:
        self.client.connect(20)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def stats(self) -> dict:
        return json.loads(self.client.ask(wire.Stats, 10).body)

    def damage(self, namespace: NamespaceId, prefix: list[BlockKey], number: type) -> None:
        """Turn the numbers of a prefix's last block around, behind the product's back."""
        stats = self.stats()
        (space,) = [s for s in stats["namespaces"] if s["namespace"] == namespace.hex()]
        slot_bytes = space["slot_bytes"]
        self.client.attach(Attachment(namespace, slot_bytes, "spy", False))
        assert self.client.wait_attached(namespace, 10), self.client.refusal
        answer = self.client.lookup(namespace, prefix, 10)
        assert answer is not None
        assert len(answer.offsets) == len(prefix), "the block to damage is not in DRAM"
        pool = attach_pool(Path(stats["pool"]))
        at = int(answer.offsets[-1])
        block = pool.bytes[at + FRAME_BYTES : at + slot_bytes].view(number)
        assert block.any(), "there is something to damage"
        block[:] = block[::-1].copy()
        self.client.release([answer.lease])
        pool.close()


# ---- generate ----------------------------------------------------------------------------------


def read_output(text: str) -> tuple[int, list[str]]:
    """Tokens from the cache, and the ids that were printed with it and without."""
    cached = re.search(r"^(\d+) of 200 tokens came from the cache$", text, re.MULTILINE)
    ids = re.findall(r"^(?:with TierKV|without cache): +([\d ]+)$", text, re.MULTILINE)
    assert cached is not None, text
    assert len(ids) == 2, text
    return int(cached[1]), ids


def test_generate_goes_on_from_the_cache_of_another_process(directory, monkeypatch, capsys):
    """The first process is one of its own, the second one is this."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    arguments = ["--run", str(directory)]
    try:
        first = start(EXAMPLES / "generate.py", *arguments)
        assert first.returncode == 0, first.stderr
        cached, (one, without) = read_output(first.stdout)
        assert (cached, one) == (0, without)
        with as_module("generate") as program:
            program.main(arguments)
            cached, (other, _) = read_output(capsys.readouterr().out)
            assert (cached, other) == (192, one)

            dice = random.Random(program.SEED)
            prompt = [dice.randrange(program.CONFIG.vocab_size) for _ in range(200)]
            with Spy(directory / "daemon.sock") as spy:
                (space,) = spy.stats()["namespaces"]
                namespace = NamespaceId(bytes.fromhex(space["namespace"]))
                spy.damage(namespace, block_hashes(prompt, program.BLOCK_TOKENS)[:4], np.float32)
            with pytest.raises(SystemExit, match="the outputs are not equal"):
                program.main(arguments)
            cached, (hurt, still) = read_output(capsys.readouterr().out)
            assert cached == 192, "the damaged block was not loaded"
            assert hurt != one, "the damaged block changes nothing"
            assert still == one
    finally:
        DemoNode(directory).stop_daemon()


# ---- the pages ---------------------------------------------------------------------------------


def code_of(page: Path) -> list[Block]:
    return [block for block in blocks_of(page) if block.language == "python"]


@pytest.mark.parametrize("block", code_of(HOW_TO), ids=lambda block: block.line)
def test_code_of_the_how_to_page_is_that_of_the_example(block):
    lines = text_of(EXAMPLES / "engine.py").splitlines(keepends=True)
    length = block.text.count("\n")
    parts = ("".join(lines[at : at + length]) for at in range(len(lines)))
    assert block.text in (textwrap.dedent(part) for part in parts)


def test_the_how_to_page_shows_the_code_of_the_example():
    assert len(code_of(HOW_TO)) >= 5
    (rule,) = [block for block in code_of(HOW_TO) if "THE RULE" in block.text]
    assert PROTECTION.strip() in rule.text


def test_the_how_to_page_shows_what_the_engine_prints():
    shown = [b.text for b in blocks_of(HOW_TO) if b.text.startswith("$ python docs/examples/eng")]
    assert shown == ["$ python docs/examples/engine.py\n" + run_the_engine()[0]]


def test_the_how_to_page_shows_what_generate_prints():
    """Which the test of `generate` has seen."""
    shown = re.findall(
        r"^(\d+) of (\d+) tokens came from the cache$", text_of(HOW_TO), re.MULTILINE
    )
    assert shown == [("0", "200"), ("192", "200")]


def test_the_how_to_page_compares_the_figures_of_this_run():
    rows = re.findall(r"^(\w[\w ]+?) +(\d+) +(\d+) +(\d+)$", run_the_engine()[0], re.MULTILINE)
    computed = [int(row[1]) for row in rows]
    ours = [*computed, int(rows[-1][2]), int(rows[-1][3])]
    row = re.compile(r"^\| (?:computed|with|blocks)[^|]*\| (\d+) \| (\d+) \|$", re.MULTILINE)
    table = row.findall(text_of(HOW_TO))
    assert [int(mine) for mine, _ in table] == ours
    assert [int(published) for _, published in table] == [1512, 1400, 1049, 47, 22]


PROGRAMS = [b for b in blocks_of(REFERENCE) if b.info in {"round.py", "answer.py"}]


@pytest.mark.parametrize("block", PROGRAMS, ids=lambda block: block.info)
def test_programs_of_the_reference_page_print_what_it_says(block, directory):
    assert len(PROGRAMS) == 2
    program = directory / block.info
    program.write_text(block.text, encoding="utf-8")
    run = directory / "run"
    try:
        process = start(program, TIERKV_NODE__SERVICE__SOCKET=str(run / "daemon.sock"))
        assert process.returncode == 0, process.stderr
    finally:
        DemoNode(run).stop_daemon()
    after = next(b for b in blocks_of(REFERENCE) if b.line > block.line)
    assert after.language == "output"
    assert process.stdout == after.text


PUBLIC = ["Cache", "Hit", "Copy"]


def public_names(kind: type) -> dict[str, object]:
    """Methods, properties, and what the constructor sets."""
    found: dict[str, object] = dict(inspect.getmembers_static(kind))
    source = textwrap.dedent(inspect.getsource(kind.__init__))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.setdefault(node.attr, None)
    return {name: member for name, member in found.items() if not name.startswith("_")}


def as_written(name: str, member: object) -> str:
    """A method with its arguments and their defaults, as the page writes it."""
    if not inspect.isfunction(member):
        return name
    _, *arguments = inspect.signature(member).parameters.values()
    plain = [argument.replace(annotation=inspect.Parameter.empty) for argument in arguments]
    return name + str(inspect.Signature(plain)).replace("'", '"')


@pytest.mark.parametrize("name", PUBLIC)
def test_the_reference_page_names_what_there_is_and_nothing_else(name):
    section = sections_of(REFERENCE, "##")[name]
    table = section.rpartition("| name | meaning |")[2]
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    kind = getattr(tierkv, name)
    assert sorted(rows) == sorted(as_written(n, m) for n, m in public_names(kind).items())


def test_the_reference_page_names_the_arguments_of_a_cache():
    section = sections_of(REFERENCE, "##")["Cache"]
    table = section.partition("| argument | meaning |")[2].partition("| name | meaning |")[0]
    rows = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    for kind in (tierkv.Cache, tierkv.AsyncCache):
        assert rows == list(inspect.signature(kind).parameters)


def test_the_reference_page_says_which_calls_of_an_async_cache_are_awaited():
    names, plain = public_names(tierkv.AsyncCache), public_names(tierkv.Cache)
    section = " ".join(sections_of(REFERENCE, "##")["AsyncCache"].split())
    waits, elsewhere = (
        set(re.findall(r"`(\w+)`", listed))
        for listed in re.findall(r"((?:`\w+`,? (?:and )?)+)are (?:coroutines|found in)", section)
    )
    assert waits == {name for name, member in names.items() if inspect.iscoroutinefunction(member)}
    assert set(names) - {"cache"} == set(plain) - elsewhere
    assert elsewhere <= set(plain)


def test_the_package_gives_the_names_that_the_reference_page_lists():
    listed = re.findall(r"`tierkv\.([A-Z]\w+)`", text_of(REFERENCE).partition("## Cache")[0])
    assert set(listed) == {*PUBLIC, "AsyncCache"}
    assert set(listed) <= set(tierkv.__all__)
    assert all(isinstance(getattr(tierkv, name), type) for name in listed)


def test_the_ranks_of_an_engine_load_what_all_of_them_hit(example, directory):
    """The fragment of the reference page, in two caches of one process that agree by hand."""
    script = next(b for b in blocks_of(REFERENCE) if b.info == "ranks.py")
    code = compile(script.text, str(script), "exec")
    stores = (4, 3)  # blocks that each rank has
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                tierkv.Cache(
                    {"kv": np.zeros((8, 64), np.float32)},
                    model="ranks",
                    block_tokens=16,
                    config=example.make_config(directory),
                    facts={"rank": number, "ranks": 2},
                )
            )
            for number in range(2)
        ]
        stack.callback(DemoNode(directory).stop_daemon)
        assert all(rank.wait_ready() for rank in ranks)
        keys = ranks[0].hash_tokens(range(64))
        for rank, blocks in zip(ranks, stores, strict=True):
            assert rank.store(keys[:blocks], range(blocks)) == blocks
        for rank, blocks in zip(ranks, stores, strict=True):
            told = []
            names = {"cache": rank, "keys": keys, "held": 0, "table": [4, 5, 6, 7]}
            names["all_reduce_min"] = lambda own, told=told: told.append(own) or min(stores)
            exec(code, names)  # noqa: S102
            assert (told, names["blocks"]) == ([blocks], min(stores))
            names["hit"].release()
