"""What operators copy: sizes in shipped configurations, containers, and the newcomer's path."""

from __future__ import annotations

import ast
import json
import operator
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.test_docs import (
    CONFIGS,
    DOCS,
    ROOT,
    VLLM_FILES,
    blocks_of,
    text_of,
    transfer_config_of,
)
from tierkv.bench.replay import Setup, replay
from tierkv.bench.trace import load_trace
from tierkv.config import load_config, parse_config, warnings_of
from tierkv.core.extents import ExtentMap
from tierkv.pool import make_private
from tierkv.types import slot_bytes_of

NEWCOMER = ROOT / "scripts" / "newcomer.sh"
TUTORIAL = DOCS / "tutorials" / "first-hit.md"
COMMANDS_MAX = 5
ROUNDING = 0.006  # figures in comments have three digits
NODE_FILES = [file for file in CONFIGS if file.name not in VLLM_FILES]
UNTESTED = [
    *(ROOT / "configs" / name for name in (
        "cuda-node.yaml", "ascend-a2-node.yaml", "ascend-a3-node.yaml", "vllm-cuda.yaml",
        "vllm-ascend.yaml",
    )),
    *(DOCS / "how-to" / name for name in ("vllm-on-cuda.md", "vllm-on-ascend.md")),
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    for name in list(os.environ):
        if name.startswith("TIERKV_"):
            monkeypatch.delenv(name)


# ---- shipped configurations --------------------------------------------------------------------


@pytest.mark.parametrize("file", NODE_FILES, ids=lambda f: f.name)
def test_nothing_is_unwise_in_a_shipped_configuration(file):
    """But on which disk an example's directories would lie on the machine that tests."""
    found = warnings_of(load_config(file))
    assert [text for text in found if " lies on " not in text] == []


OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
EQUATION = re.compile(r"((?:\(|\d)[\d.,()*/+\- ]*[*/+\-][\d.,()*/+\- ]*) = (\d[\d.,]*)")


def worth(text: str) -> float:
    """What an expression of numbers and + - * / is worth."""

    def of(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        assert isinstance(node, ast.Constant), ast.dump(node)
        return float(node.value)

    return of(ast.parse(text.replace(",", "").strip(), mode="eval").body)


def equations_in(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        for match in EQUATION.finditer(line.partition("#")[2]):
            yield match[1], match[2].rstrip(".,")


@pytest.mark.parametrize("file", CONFIGS, ids=lambda f: f.name)
def test_the_arithmetic_in_a_configuration_is_right(file):
    wrong = [
        f"{left} = {right}, not {worth(left)}"
        for left, right in equations_in(text_of(file))
        if worth(left) != pytest.approx(worth(right), rel=ROUNDING)
    ]
    assert wrong == []


def test_wrong_arithmetic_would_be_found():
    """The negative control, and that the files have something to check."""
    found = list(equations_in("x: 1  # 2 * (8 - 3) = 11 bytes. And 900 * 3,277 = 2,949,300,"))
    assert found == [("2 * (8 - 3)", "11"), ("900 * 3,277", "2,949,300")]
    assert [worth(left) == worth(right) for left, right in found] == [False, True]
    for name in ("cuda-node.yaml", "ascend-a2-node.yaml", "ascend-a3-node.yaml"):
        assert len(list(equations_in(text_of(ROOT / "configs" / name)))) >= 10


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [("cuda-node", 327_680), ("ascend-a2-node", 262_144), ("ascend-a3-node", 281_088)],
)
def test_the_extents_of_an_example_waste_little(name, bytes_per_token):
    file = ROOT / "configs" / f"{name}.yaml"
    assert f"{bytes_per_token:,} bytes" in text_of(file)
    dram = load_config(file).node.dram
    pool = ExtentMap(dram.capacity, dram.extent_unit)
    slot = slot_bytes_of(128 * bytes_per_token)
    units = pool.units_per_extent(slot)
    blocks = pool.units // units * (units * pool.unit_bytes // slot)
    assert 0.98 < blocks * slot / dram.capacity <= 1


@pytest.mark.parametrize("file", UNTESTED, ids=lambda f: f.name)
def test_what_was_not_run_on_hardware_says_so_at_its_top(file):
    top = " ".join(text_of(file)[:400].replace("#", " ").split()).lower()
    assert "not tested on hardware: nothing" in top
    assert "was run on a" in top


def texts_of_the_code() -> str:
    """Every text in the package, with what varies as the pages write it."""
    found = []
    for file in sorted((ROOT / "tierkv").rglob("*.py")):
        for node in ast.walk(ast.parse(text_of(file))):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", None) for part in node.values]
                found.append("".join(p if isinstance(p, str) else "..." for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"%(\.\d)?[sdf]", "...", node.value))
    return "\n".join(found)


@pytest.mark.parametrize("name", ["vllm-on-cuda.md", "vllm-on-ascend.md"])
def test_messages_that_a_page_explains_are_those_of_the_code(name):
    """Those in its table of what may go wrong, by their longest fixed part."""
    table = text_of(DOCS / "how-to" / name).partition("\n## What may go wrong\n")[2]
    rows = re.findall(r"^\| ([^|]*`[^|]*) \|", table.partition("\n## ")[0], re.MULTILINE)
    quoted = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) >= 6
    code = texts_of_the_code()
    assert "no such message" not in code, "the control"
    fixed = [max(re.split(r"\.\.\.|(?<=rung=)|\w+:0", text), key=len) for text in quoted]
    assert [words for words in fixed if words.strip(" :") not in code] == []


# ---- containers --------------------------------------------------------------------------------


def documents() -> list[dict]:
    page = DOCS / "how-to" / "containers.md"
    (block,) = [block for block in blocks_of(page) if block.info == "kubernetes"]
    return list(yaml.safe_load_all(block.text))


def test_the_containers_of_a_pod_share_what_they_must():
    stored, pod = documents()
    config = parse_config(yaml.safe_load(stored["data"]["tierkv.yaml"]))
    spec = pod["spec"]
    places = [
        {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        for container in spec["containers"]
    ]
    assert len(places) == 2
    assert places[0] == places[1], "the same volumes at the same paths"
    assert str(config.node.dram.directory) in places[0]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert set(places[0].values()) == set(volumes)
    assert volumes[places[0]["/dev/shm"]]["emptyDir"]["medium"] == "Memory"
    assert volumes[places[0]["/etc/tierkv"]]["configMap"]["name"] == stored["metadata"]["name"]
    assert config.node.service.mode == "external"
    run = config.node.service.socket_path.parent
    assert str(run.parent) in places[0], "one directory below the volume, which is open to all"
    assert spec["securityContext"]["runAsUser"] == 1000
    assert spec["terminationGracePeriodSeconds"] > config.node.service.flush_budget


def test_the_memory_of_a_pod_holds_the_pool():
    stored, pod = documents()
    config = parse_config(yaml.safe_load(stored["data"]["tierkv.yaml"]))
    daemon = pod["spec"]["containers"][0]
    limit = int(daemon["resources"]["limits"]["memory"].removesuffix("Gi"))
    (shared,) = [v for v in pod["spec"]["volumes"] if v.get("emptyDir", {}).get("medium")]
    room = int(shared["emptyDir"]["sizeLimit"].removesuffix("Gi"))
    assert config.node.dram.capacity < room << 30 < limit << 30


def test_the_commands_of_a_pod_name_its_configuration():
    _, pod = documents()
    daemon, engine = pod["spec"]["containers"]
    assert daemon["command"][:2] == ["tierkv", "serve"]
    transfer = json.loads(engine["args"][0])
    file = transfer["kv_connector_extra_config"]["config"]
    assert daemon["command"][2:] == ["--config", file]
    assert engine["command"][-1] == "--kv-transfer-config"
    transfer["kv_connector_extra_config"] = {}
    assert transfer_config_of({"kv-transfer-config": transfer}) == {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {},
    }


def test_a_run_directory_below_a_volume_that_is_open_to_all_is_private(tmp_path):
    volume = tmp_path / "volume"
    volume.mkdir()
    volume.chmod(0o777)
    run = make_private(volume / "private")
    assert run.stat().st_mode & 0o777 == 0o700


# ---- the default policy ------------------------------------------------------------------------


def test_the_figures_of_the_decision_on_the_default_are_what_the_bench_says():
    """One column of its first table, with the trace that is shipped."""
    table = text_of(DOCS / "decisions" / "0014-slru-by-default.md").partition("Coding agents:")[2]
    rows = [re.findall(r"[\w.]+", line) for line in table.splitlines() if line.startswith("| ")]
    head, *said = rows[:4]
    column = 1 + [float(share) for share in head[1:]].index(1.0)
    trace = load_trace(ROOT / "tests" / "traces" / "claude_code_80s_512.jsonl.gz")
    slots = trace.unique // 100
    assert [row[0] for row in said] == ["lru", "slru", "arc"]
    for name, *figures in said:
        result = replay(trace, Setup(slots, 0, policy=name))
        assert result.problems == ()
        assert result.hit_rate == pytest.approx(float(figures[column - 1]), abs=0.001), name


# ---- the newcomer's path -----------------------------------------------------------------------


def path_of(page: Path) -> list[str]:
    blocks = [b for b in blocks_of(page) if (b.language, b.info) == ("bash", "newcomer")]
    return [line for block in blocks for line in block.text.splitlines()]


def test_a_newcomer_types_at_most_five_commands():
    commands = path_of(TUTORIAL)
    assert 1 < len(commands) <= COMMANDS_MAX
    assert commands[0] == "git clone URL tierkv"
    assert "make setup" in commands
    assert commands[-1].startswith("python docs/tutorials/first_hit.py")


GIT = ["git", "-c", "user.name=ada", "-c", "user.email=ada@example.com"]
HIT = "second: 2944 of 3000 tokens came from DRAM, 0.06 s"


@pytest.fixture
def repository(tmp_path):
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "word").write_text("hello\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "one"]):
        subprocess.run([*GIT, *words], cwd=folder, check=True)
    return folder


def follow(repository: Path, *commands: str, limit_s: int = 60) -> subprocess.CompletedProcess:
    """Follow a page of these commands, behind the clone; a folder for what it leaves behind."""
    page, rest = repository.parent / "page.md", repository.parent / "rest"
    rest.mkdir()
    lines = "\n".join(["git clone URL tierkv", *commands])
    page.write_text(f"# A page\n\n```bash\nfalse\n```\n\n```bash newcomer\n{lines}\n```\n")
    run = subprocess.run(
        ["bash", str(NEWCOMER), str(repository), str(page)],
        env={**os.environ, "TMPDIR": str(rest), "LIMIT_S": str(limit_s)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert list(rest.iterdir()) == [], "it cleans up behind itself"
    return run


def test_a_path_with_a_hit_is_followed_in_one_shell(repository):
    run = follow(repository, "cd tierkv", "export A=word", f'cat "$A"; echo "{HIT}" 2>/dev/null')
    assert run.returncode == 0, run.stderr
    assert f"$ git clone {repository} tierkv\n" in run.stdout, "each command is shown"
    assert "\nhello\n" in run.stdout
    assert re.search(r"^total: \d+ s for 4 commands$", run.stdout, re.MULTILINE)
    assert run.stdout.endswith("first hit: 2944 of 3000 tokens\n")


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        (f"echo '{HIT.replace('2944', '0')}'", "no hit"),
        ("true", "no hit"),
        (f"echo '{HIT}'; false", "failed with 1"),
    ],
)
def test_a_path_without_a_hit_or_with_a_failure_is_an_error(repository, command, complaint):
    run = follow(repository, command)
    assert run.returncode == 1
    assert complaint in run.stderr


def test_a_path_that_takes_too_long_is_an_error(repository):
    run = follow(repository, "read -r _ < <(tail -f /dev/null)", limit_s=1)
    assert run.returncode == 1
    assert "not done after 1 s" in run.stderr


def test_a_path_of_more_commands_is_refused(repository):
    run = follow(repository, *["true"] * COMMANDS_MAX)
    assert run.returncode == 1
    assert "has 6 commands" in run.stderr


def test_the_daemon_of_a_path_is_ended(repository):
    """A process stands in for it, and its line in the log."""
    stand_in = (
        'bash -c "exec -a tierkv-stand-in tail -f /dev/null" >/dev/null 2>&1 & '
        'echo "x serving: socket=s pid=$!" '
        '>"$(dirname "$TIERKV_NODE__SERVICE__SOCKET")/daemon.log"; echo "pid $!"'
    )
    run = follow(repository, stand_in, f"echo '{HIT}'")
    assert run.returncode == 0, run.stderr
    pid = re.search(r"^pid (\d+)$", run.stdout, re.MULTILINE)
    assert pid is not None
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid[1]), 0)
