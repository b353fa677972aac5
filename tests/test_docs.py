"""The documentation is right: it names what exists, and everything that exists is named.

`python -m tests.test_docs` writes the tables of docs/reference/configuration.md anew.
"""

from __future__ import annotations

import ast
import configparser
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import typing
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import yaml
from pydantic import BaseModel

import tierkv
from tests.tier_world import TierWorld
from tests.vllm.driver import stop_daemon
from tierkv import config as config_module
from tierkv import errors, sizing, units
from tierkv.cli.main import tierkv as command_line
from tierkv.config import (
    NodeConfig,
    TierConfig,
    TierKVConfig,
    from_extra_config,
    known_keys,
    load_config,
    parse_config,
)
from tierkv.core import directory, extents, handover, lanes, presence, promotion, tiering, work
from tierkv.core.eviction import slru
from tierkv.core.values import TierLimits
from tierkv.service import breaker, io_wire, launcher, server, tier_host, wire
from tierkv.service.daemon import node_text
from tierkv.service.server import Server, ServerFacts
from tierkv.service.stats import collect
from tierkv.tiers.fs import tier as fs_tier

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *DOCS.rglob("*.md")])
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
VLLM_FILES = {"vllm-cpu.yaml", "vllm-cuda.yaml", "vllm-ascend.yaml"}
FRAGMENT_MIN = 12
RUN_WAIT_S = 300
# Every language that a page may use, and what holds its blocks to the truth.
RULES = {
    "bash": "it parses, and every command, option and make target in it exists",
    "console": "as bash, for the lines behind a $",
    "yaml": "it loads as a configuration; those of Kubernetes share what they must",
    "json": "it parses",
    "jsonl": "every line of it parses",
    "toml": "it parses",
    "ini": "it parses, and a unit is one that systemd takes",
    "python": "a test runs it: marked `run` or named as a file that a test runs",
    "output": "it is what the block before it prints",
    "mermaid": "a picture, of a kind that exists",
    "text": "output or a picture; nothing that anybody would type",
}


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    """Whatever the machine that runs the tests has set must not decide them."""
    for name in list(os.environ):
        if name.startswith(config_module.ENV_PREFIX):
            monkeypatch.delenv(name)


# ---- reading pages -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """One fenced block of a page. `info` is what stands behind the language."""

    page: Path
    line: int
    language: str
    info: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks_of(page: Path) -> list[Block]:
    found = []
    fence = re.compile(r"^```(\S*)[ ]*([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    text = text_of(page)
    for match in fence.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        found.append(Block(page, line, match[1], match[2].strip(), match[3]))
    return found


ALL_BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def written_in(*languages: str) -> list[Block]:
    return [block for block in ALL_BLOCKS if block.language in languages]


def prose_of(page: Path) -> str:
    """A page with white space made equal, to find sentences across line ends."""
    return " ".join(text_of(page).split())


def sections_of(page: Path, level: str) -> dict[str, str]:
    parts = re.split(rf"^{level} (.+)$", text_of(page), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


each_page = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def each(blocks: list[Block]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("block", blocks, ids=str)


# ---- links and marks ---------------------------------------------------------------------------


def anchor_of(heading: str) -> str:
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower()
    return plain.replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    outside = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    return {anchor_of(h) for h in re.findall(r"^#+ (.+)$", outside, re.MULTILINE)}


@each_page
def test_internal_links_lead_somewhere(page):
    outside = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.MULTILINE | re.DOTALL)
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", outside):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors_of(file)):
            broken.append(target)
    assert broken == []


def test_every_page_is_reached_from_the_index():
    index = text_of(DOCS / "index.md")
    pages = [page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")]
    assert [page for page in pages if page != "index.md" and f"({page})" not in index] == []


@each_page
def test_files_that_a_page_names_exist(page):
    named = set(
        re.findall(r"`((?:configs|docs|tierkv|tests|scripts)/[\w./-]+\.\w+)`", text_of(page))
    )
    named |= set(re.findall(r"(?<=\s)configs/[\w./-]+\.yaml", text_of(page)))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


# ---- configuration -----------------------------------------------------------------------------


def transfer_config_of(tree: dict) -> dict | None:
    """The `kv-transfer-config` of a file for `vllm serve --config`, if it is one."""
    return tree.get("kv-transfer-config")


def load_tree(tree: dict, source: str) -> TierKVConfig:
    transfer = transfer_config_of(tree)
    if transfer is None:
        return parse_config(tree, source)
    assert transfer["kv_connector"] == "TierKVConnector"
    assert transfer["kv_connector_module_path"] == "tierkv.connectors.vllm"
    assert transfer["kv_load_failure_policy"] == "recompute"
    assert transfer["kv_role"] in {"kv_both", "kv_producer", "kv_consumer"}
    return from_extra_config(transfer["kv_connector_extra_config"])


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.name)
def test_every_shipped_configuration_loads(file, monkeypatch):
    monkeypatch.chdir(ROOT)  # files for vLLM name others relative to the checkout
    if file.name in VLLM_FILES:
        tree = yaml.safe_load(text_of(file))
        assert transfer_config_of(tree) is not None
        assert load_tree(tree, file.name) != TierKVConfig()
    else:
        load_config(file)


def test_the_shipped_configurations_are_these():
    names = {file.name for file in CONFIGS}
    assert names >= {
        "minimal.yaml", "cpu-node.yaml", "cpu-node-ssd.yaml", "cuda-node.yaml",
        "ascend-a2-node.yaml", "ascend-a3-node.yaml", "all-options.yaml",
        "vllm-cpu.yaml", "vllm-cuda.yaml", "vllm-ascend.yaml",
    }  # fmt: skip
    assert {name for name in names if name.startswith("vllm-")} == VLLM_FILES


@each([block for block in written_in("yaml") if block.info != "kubernetes"])
def test_every_configuration_in_a_page_loads(block, tmp_path):
    tree = yaml.safe_load(block.text)
    assert isinstance(tree, dict), "a YAML block is a configuration; write ```text otherwise"
    transfer = transfer_config_of(tree)
    named = transfer and transfer["kv_connector_extra_config"].get("config")
    if transfer and named:  # a file of the reader's; ours stands in for it
        transfer["kv_connector_extra_config"]["config"] = str(ROOT / "configs" / "minimal.yaml")
        assert Path(named).is_absolute(), "a service starts vLLM in a directory of its own"
    load_tree(tree, str(block))


def leaf_keys() -> list[str]:
    """Every key that can be set, without groups and without those of single tiers."""
    keys = [key for key in known_keys() if "[]" not in key]
    return [key for key in keys if not any(other.startswith(key + ".") for other in keys)]


def keys_of(tree: dict, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_all_options_names_every_key_once_with_its_default():
    file = ROOT / "configs" / "all-options.yaml"
    assert sorted(keys_of(yaml.safe_load(text_of(file)))) == sorted(leaf_keys())
    assert load_config(file) == TierKVConfig()
    shown = TierKVConfig().model_dump(mode="json")
    assert yaml.safe_load(text_of(file)) == shown, "values are written as `config show` writes them"


def test_all_options_explains_every_key():
    lines = text_of(ROOT / "configs" / "all-options.yaml").splitlines()
    keys = [line for line in lines if re.match(r"\s*\w+:", line)]
    bare = [line.strip() for line in keys if "  # " not in line]
    assert [line for line in bare if not line.endswith(":")] == []


WORDS = {
    units.parse_size: "size",
    units.parse_duration: "duration",
    units.parse_share: "share",
}
PLAIN = {int: "whole number", bool: "`true`, `false`", str: "text", Path: "path"}


def words_for(kind: object, metadata: tuple[object, ...] | list[object] = ()) -> list[str]:
    """What a key may hold, as words for people."""
    for item in metadata:
        function = getattr(item, "func", None)
        if function in WORDS:
            return [WORDS[function]]
    if typing.get_origin(kind) is typing.Annotated:
        base, *extra = typing.get_args(kind)
        return words_for(base, extra)
    if typing.get_origin(kind) is typing.Literal:
        return [f"`{value}`" for value in typing.get_args(kind)]
    if typing.get_origin(kind) is tuple:
        return ["list"]
    if typing.get_origin(kind) is dict:
        return ["mapping"]
    if kind is type(None):
        return ["unset"]
    if isinstance(kind, type) and kind in PLAIN:
        return [PLAIN[kind]]
    return [word for part in typing.get_args(kind) for word in words_for(part)]


def limits_of(metadata: list[object]) -> str:
    for item in metadata:
        for name, word in (("ge", "at least"), ("gt", "above")):
            bound = getattr(item, name, None)
            if bound:
                return f" {word} {bound}"
    return ""


def rows_of(model: type[BaseModel], prefix: str) -> Iterator[str]:
    """The table of one group of keys, made from its model."""
    shown = model.model_construct().model_dump(mode="json")
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield f"| `{prefix}.{name}` | group | | {kind.__doc__} |"
            continue
        first, *others = words_for(kind, field.metadata)
        words = ", ".join([first + limits_of(field.metadata), *others])
        value = shown.get(name)
        default = "unset" if value is None else f"`{json.dumps(value).strip(chr(34))}`"
        default = "required" if field.is_required() else default
        assert field.description, f"{prefix}.{name} has no description"
        yield f"| `{prefix}.{name}` | {words} | {default} | {field.description} |"


GROUPS = {
    "node": config_module.NodeConfig,
    "node.dram": config_module.DramConfig,
    "node.tiers[]": TierConfig,
    "node.service": config_module.ServiceConfig,
    "engine": config_module.EngineConfig,
}


def configuration_page() -> str:
    """The page with its tables made from the models."""
    text = text_of(REFERENCE / "configuration.md")
    for group, model in GROUPS.items():
        start = f"<!-- keys of {group} -->\n"
        before, mark, rest = text.partition(start)
        assert mark, f"the page has no place for {group}"
        _, end, after = rest.partition("<!-- end of keys -->")
        table = "\n".join(rows_of(model, group))
        text = f"{before}{start}\n{table}\n\n{end}{after}"
    return text


def test_the_configuration_page_is_that_of_the_models():
    is_equal = text_of(REFERENCE / "configuration.md") == configuration_page()
    assert is_equal, "run `python -m tests.test_docs`"


def test_the_configuration_page_names_every_key():
    text = text_of(REFERENCE / "configuration.md")
    assert [key for key in known_keys() if f"`{key}`" not in text] == []


@each_page
def test_keys_that_a_page_names_exist(page):
    """`node.dram.capacity` and the like; a renamed key must not survive in a text."""
    named = set(re.findall(r"`((?:node|engine)\.[a-z_.\[\]]+)`", text_of(page)))
    known = {*known_keys(), "node.", "engine."}
    assert [key for key in sorted(named) if key not in known] == []


# ---- commands ----------------------------------------------------------------------------------


def commands_in(script: str) -> Iterator[list[str]]:
    """The words of every `tierkv ...` command, wherever it stands in a script."""
    script = script.replace("\\\n", " ")
    for inner in re.findall(r"\$\(([^()]*)\)", script):
        yield from commands_in(inner)
    for line in re.sub(r"\$\(([^()]*)\)", "SUBSTITUTED", script).splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        words = list(lexer)
        while words:
            end = next((i for i, w in enumerate(words) if w[0] in "|&;<>"), len(words))
            yield from _command_of(words[:end])
            words = words[end + 1 :]


def _command_of(words: list[str]) -> Iterator[list[str]]:
    """Also behind variables, and behind `docker run` and the like."""
    places = [i for i, word in enumerate(words) if re.fullmatch(r"(/[^:]*/bin/)?tierkv", word)]
    if places:
        yield words[places[0] + 1 :]


def lines_typed(block: Block) -> str:
    """What a reader types: all of a bash block, the lines behind `$` of a console block."""
    if block.language == "bash":
        return block.text
    lines = [line[2:] for line in block.text.splitlines() if line.startswith("$ ")]
    return "\n".join(lines)


def check_command(words: list[str]) -> None:
    """Raise `click.UsageError` if a command, option or argument does not exist."""
    command: click.Command = command_line
    context = click.Context(command, info_name="tierkv")
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        below = command.get_command(context, words[0])
        if below is None:
            raise click.UsageError(f"no command {words[0]}")
        context = click.Context(below, info_name=words[0], parent=context)
        command, words = below, words[1:]
    command.make_parser(context).parse_args(args=list(words))
    if not isinstance(command, click.Group):
        command.make_context(command.name, list(words), parent=context.parent)


WRONG_ON_PURPOSE = ["stats --wach"]


@each(written_in("bash", "console"))
def test_commands_in_a_page_exist(block):
    for words in commands_in(lines_typed(block)):
        if " ".join(words) not in WRONG_ON_PURPOSE:
            check_command(words)


def test_wrong_commands_would_be_found():
    """The negative control."""
    found = list(
        commands_in('A=1 vllm serve X --kv "$(tierkv vllm-config --dramm 1GiB)" && tierkv x')
    )
    assert len(found) == 2
    for words in found:
        with pytest.raises(click.UsageError):
            check_command(words)


def all_commands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from all_commands(below, f"{path} {name}")


def test_every_command_and_option_is_documented():
    text = text_of(REFERENCE / "cli.md")
    missing = []
    for path, command in all_commands(command_line, "tierkv"):
        if path not in text:
            missing.append(path)
        sections = {
            **sections_of(REFERENCE / "cli.md", "##"),
            **sections_of(REFERENCE / "cli.md", "###"),
        }
        section = "\n".join(s for title, s in sections.items() if path in title)
        for option in command.params:
            names = [name for name in option.opts if name.startswith("--")]
            is_own = isinstance(option, click.Option) and path != "tierkv"
            if is_own and names and not any(name in section for name in names):
                missing.append(f"{path} {names[0]}")
    assert missing == []


@each(written_in("bash"))
def test_make_targets_in_a_page_exist(block):
    makefile = text_of(ROOT / "Makefile")
    for target in re.findall(r"^make ([\w-]+)", block.text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"


# ---- errors ------------------------------------------------------------------------------------

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.TierKVError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_class_is_documented(kind):
    assert kind.__name__ in sections_of(REFERENCE / "errors.md", "##")


def messages_raised() -> Iterator[tuple[str, str]]:
    """Where an error of ours is raised, and the longest fixed part of its message."""
    names = {kind.__name__ for kind in ERRORS}
    for file in sorted(Path(tierkv.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(file))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            module, _, name = ast.unparse(node.exc.func).rpartition(".")
            if name in names and module != "click":  # it has a UsageError, too
                parts = [
                    str(part.value)
                    for argument in node.exc.args
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                fixed = max((p for part in parts for p in part.split("`")), key=len, default="")
                yield f"{file.relative_to(ROOT)}:{node.lineno} {name}", fixed


def test_every_message_that_a_user_can_meet_is_documented():
    """By its longest fixed part, shortened where the page shortens it."""
    text = prose_of(REFERENCE / "errors.md")
    missing = []
    for place, fixed in messages_raised():
        words = " ".join(fixed.strip(" :;,.()").split())
        if len(words) >= FRAGMENT_MIN and words[:40].rsplit(" ", 1)[0] not in text:
            missing.append(f"{place}: {words}")
    assert missing == []


# ---- messages and statistics -------------------------------------------------------------------

MESSAGES = [*typing.get_args(wire.Request), *typing.get_args(wire.Reply)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.__name__)
def test_every_message_is_documented_with_its_fields_in_order(message):
    section = sections_of(REFERENCE / "wire-protocol.md", "###").get(message.__name__)
    assert section is not None, "no section"
    listed = re.search(r"Fields: ([^.]*)\.", section)
    assert listed is not None, "no list of fields"
    assert tuple(re.findall(r"`(\w+)`", listed[1])) == message.__struct_fields__
    one_way = {
        "Detach", "Commit", "Release", "Trim", "Touch", "Abandon", "Outcome", "Devices", "Quiesced",
        "Bye",
    }  # fmt: skip
    assert ("One-way." in " ".join(section.split())) == (message.__name__ in one_way)


def test_only_messages_that_exist_are_documented():
    found = set(sections_of(REFERENCE / "wire-protocol.md", "###"))
    assert found == {message.__name__ for message in MESSAGES}


def test_the_limits_of_the_protocol_are_right():
    text = text_of(REFERENCE / "wire-protocol.md")
    assert f"{wire.MESSAGE_BYTES_MAX >> 20} MiB" in text
    for number in (wire.KEYS_MAX, wire.LEASES_MAX, wire.KEY_BYTES_MAX):
        assert f"{number:,}" in text
    assert (wire.VERSION_MIN, wire.VERSION_MAX) == (2, 3)
    assert "**Version.** 3;" in text


FIGURES = [
    ("explanation/architecture.md", f"{wire.KEYS_MAX:,} keys per message"),
    ("explanation/architecture.md", f"{wire.MESSAGE_BYTES_MAX >> 20} MiB per message"),
    ("explanation/architecture.md", f"{directory.LEASES_PER_ENGINE_MAX:,} leases per engine"),
    ("explanation/architecture.md", f"{server.SESSIONS_MAX:,} sessions"),
    ("explanation/architecture.md", f"{directory.NAMESPACES_MAX:,} namespaces"),
    ("explanation/architecture.md", f"{directory.SLOTS_MAX:,} slots per namespace"),
    ("explanation/architecture.md", f"{presence.KEYS_PER_TIER_MAX:,} known blocks per tier"),
    ("explanation/concurrency.md", f"after {breaker.RETRY_FIRST_S} s, then after doubled times"),
    ("explanation/concurrency.md", f"up to {breaker.RETRY_MAX_S:.0f} s"),
    ("explanation/eviction.md", f"at most {slru.PROTECTED_SHARE * 100:.0f} % of"),
    ("explanation/failure-model.md", f"within {breaker.SOON_S:.0f} s of closing"),
    ("explanation/life-of-a-block.md", f"for at most {handover.DRAIN_WAIT_S:.0f} s"),
    (
        "explanation/security.md",
        f"{io_wire.PACKET_BYTES_MAX >> 10} KiB and {io_wire.KEYS_MAX:,} keys",
    ),
    ("explanation/tiers.md", f"has {lanes.HUNG_READS_MAX} hung reads"),
    ("explanation/tiers.md", f"left alone for {lanes.PAUSE_MIN_S:.0f} s"),
    ("explanation/tiers.md", f"up to {lanes.PAUSE_MAX_S:.0f} s"),
    ("explanation/tiers.md", f"{work.JOB_BYTES_MAX >> 20} MiB or {work.JOB_KEYS_MAX} blocks"),
    ("explanation/tiers.md", f"up to {promotion.PROBE_KEYS_MAX} keys at a time"),
    ("explanation/tiers.md", f"reported as not answering, after {tiering.TASK_WAIT_S:.0f} s"),
    ("explanation/tiers.md", f"If the next {fs_tier.VICTIMS_SCANNED_MAX} were all used"),
    ("explanation/tiers.md", f"again after {tier_host.RESTART_FIRST_S} s"),
    ("how-to/no-hits.md", f"{directory.LEASES_PER_ENGINE_MAX:,} leases"),
    ("how-to/run-the-daemon-yourself.md", f"larger than {launcher.LOG_BYTES_MAX >> 20} MiB"),
    ("how-to/size-the-pool.md", f"at most {extents.WASTE_MAX * 100:.0f} % of the pool are lost"),
    ("how-to/size-the-pool.md", f"takes {sizing.AUTO_SHARE * 100:.0f} % of the memory"),
    ("decisions/0014-slru-by-default.md", f"{slru.PROTECTED_SHARE * 100:.0f} % of a namespace's"),
]


@pytest.mark.parametrize(("page", "words"), FIGURES)
def test_figures_in_a_page_are_those_of_the_code(page, words):
    assert words in prose_of(DOCS / page)


def statistics_tree() -> dict:
    """What a daemon with one namespace, one tier and one engine tells."""
    facts = ServerFacts("/pool", 1 << 20, 1, node_text(NodeConfig()), False, 5.0)
    server = Server(TierWorld(4, TierLimits("fs")).directory, facts)
    device = wire.Device(0, "npu:0", "batch", 1, 1, 0, 0, "")
    hello = wire.Hello(1, wire.VERSION_MIN, wire.VERSION_MAX, "engine", False, [], "")
    messages = (hello, wire.Devices(2, [device]))
    server.turn(0.0, [(b"peer", wire.encode(message)) for message in messages])
    return collect(server, 0.0)


def names_in(tree: object) -> Iterator[str]:
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield name
            yield from names_in(value)
    elif isinstance(tree, list):
        for value in tree:
            yield from names_in(value)


def test_every_number_of_the_statistics_is_documented_and_no_other():
    text = text_of(REFERENCE / "statistics.md")
    names = set(names_in(statistics_tree()))
    assert "is_private" in names, "a namespace is there to be described"
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []
    rows = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert rows - names == set()


# ---- blocks ------------------------------------------------------------------------------------


def test_every_block_has_a_language_with_a_rule():
    """A new language needs a rule here and a test that holds it."""
    assert [f"{b}: {b.language or 'none'}" for b in ALL_BLOCKS if b.language not in RULES] == []


@each(written_in("bash", "console"))
def test_commands_in_a_page_are_shell(block):
    """`bash -n` reads without running."""
    script = lines_typed(block).replace("...", "")
    run = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def parse_lines(text: str) -> None:
    for line in text.splitlines():
        json.loads(line)


def parse_toml(text: str) -> None:
    import tomllib  # Python 3.11

    tomllib.loads(text)


PARSERS = {"json": json.loads, "jsonl": parse_lines, "toml": parse_toml}


@each(written_in(*PARSERS))
def test_what_has_a_form_of_its_own_parses(block):
    PARSERS[block.language](block.text)


@each(written_in("mermaid"))
def test_pictures_are_of_a_kind_that_exists(block):
    assert block.text.split()[0] in {"sequenceDiagram", "stateDiagram-v2", "flowchart"}


def unit_of(block: Block) -> configparser.ConfigParser:
    """A systemd unit or another file of sections; keys keep their case."""
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[method-assign, assignment]
    parser.read_string(block.text)
    return parser


UNITS = [block for block in written_in("ini") if block.info.endswith(".service")]


@each(written_in("ini"))
def test_ini_in_a_page_parses(block):
    assert unit_of(block).sections()


@each(UNITS)
def test_a_unit_starts_a_command_that_exists(block):
    unit = unit_of(block)
    assert unit.sections() == ["Unit", "Service", "Install"]
    command = unit["Service"]["ExecStart"]
    assert Path(command.split()[0]).is_absolute(), "systemd looks in no PATH of ours"
    assert command.split()[0].endswith(("/tierkv", "/vllm"))
    for words in commands_in(command):
        check_command(words)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@each(UNITS)
def test_systemd_takes_the_unit(block, tmp_path):
    """Its own checker; the command is exchanged for one that is there."""
    unit = re.sub(r"(?m)^ExecStart=\S+", f"ExecStart={sys.executable}", block.text)
    unit = re.sub(r"(?m)^RequiresMountsFor=.*\n", "", unit)
    name = Path(block.info).name.replace("@", "")
    said = verify_unit(tmp_path / name, unit.replace("%i", "8000"))
    assert said == ""
    said = verify_unit(tmp_path / name, unit.replace("[Service]\n", "[Service]\nUsr=x\n"))
    assert "Unknown key" in said, "the negative control"


def verify_unit(file: Path, text: str) -> str:
    """What `systemd-analyze verify` finds in a unit; it may want for units of the host."""
    file.write_text(text)
    run = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(file)],
        env={**os.environ, "LC_ALL": "C"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "\n".join(line for line in run.stderr.splitlines() if file.name in line)


# ---- code --------------------------------------------------------------------------------------

PYTHON = written_in("python")
TESTS = "\n".join(text_of(file) for file in sorted((ROOT / "tests").rglob("*.py")))


def test_every_python_block_is_run_by_a_test():
    """Marked `run`, or named as a file that a test names; what nobody runs goes wrong unseen."""
    named = [b for b in PYTHON if b.info.endswith(".py") and f'"{b.info}"' in TESTS]
    assert [str(b) for b in PYTHON if b.info != "run" and b not in named] == []


def test_the_script_about_obstore_does_what_its_page_says(tmp_path, monkeypatch):
    script = next(block for block in PYTHON if block.info == "obstore_batches.py")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    run = subprocess.run(
        [sys.executable, "-c", script.text], cwd=ROOT, capture_output=True, text=True,
        timeout=RUN_WAIT_S, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert re.sub(r"\d+ ms", "N ms", run.stdout).splitlines() == [
        "write, 16 per call: N ms", "read, 16 per call: N ms",
        "write, 1 per call: N ms", "read, 1 per call: N ms",
    ]  # fmt: skip


def test_the_script_of_the_tutorial_is_the_file():
    script = next(block for block in PYTHON if block.info == "first_hit.py")
    assert script.text == text_of(DOCS / "tutorials" / "first_hit.py")


@each(PYTHON)
def test_python_in_a_page_compiles(block):
    compile(block.text, str(block), "exec")


@each([block for block in PYTHON if block.info == "run"])
def test_python_that_is_marked_runs_and_prints_what_the_page_says(block):
    out = io.StringIO()
    with redirect_stdout(out):
        exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})  # noqa: S102
    after = [b for b in blocks_of(block.page) if b.line > block.line and b.language == "output"]
    assert after, "an `output` block follows"
    assert out.getvalue() == after[0].text


@pytest.mark.vllm
def test_the_tutorial_gives_the_hits_that_it_promises(tmp_path):
    script = DOCS / "tutorials" / "first_hit.py"
    page = blocks_of(script.with_name("first-hit.md"))
    said = [b.text for b in page if b.text.startswith(f"$ python {script.relative_to(ROOT)}")]
    assert len(said) == 2
    tmp_path.chmod(0o700)
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TIERKV_NODE__SERVICE__SOCKET": str(tmp_path / "d.sock"),
        "TIERKV_NODE__DRAM__CAPACITY": "64MiB",
        "PYTHONPATH": str(ROOT),
    }
    tokens = re.compile(r"^(\w+: \d+ of \d+ tokens came from DRAM)", re.MULTILINE)
    try:
        for promise in said:
            run = subprocess.run(
                [sys.executable, str(script)],
                env=environment,
                cwd=ROOT,
                capture_output=True,
                text=True,
                timeout=RUN_WAIT_S,
                check=True,
            )
            assert tokens.findall(run.stdout) == tokens.findall(promise), run.stderr[-2000:]
    finally:
        stop_daemon(tmp_path)


# ---- README ------------------------------------------------------------------------------------


def test_the_readme_says_what_it_must():
    text = prose_of(ROOT / "README.md")
    for word in (
        "make demo", "make test", "tierkv-sdk", "tierkv vllm-config --dram 10GiB", "vllm serve",
        "--kv-offloading-size", "Few repeats", "Short prompts", "NPU", "P2P", "encoder", "Apache",
    ):  # fmt: skip
        assert word in text, word


def test_no_page_names_what_is_not_part_of_the_product():
    for page in [*PAGES, *CONFIGS]:
        for word in ("TODO", "FIXME"):
            assert word not in text_of(page), f"{page}: {word}"


if __name__ == "__main__":
    (REFERENCE / "configuration.md").write_text(configuration_page(), encoding="utf-8")
