"""Policies and tiers of other packages: those of the how-to pages, good ones and broken ones.

A package is a folder with modules and a `*.dist-info`, on the path of this process and of those
that it starts. What the pages show is taken from them, so it is tested as a reader copies it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import tomllib
import yaml

from tests.core_world import SPACE, keys_of
from tests.processes import SLOT_BYTES, WAIT_MAX_S, Node, wait_for
from tests.tier_world import TierWorld
from tierkv.config import NodeConfig, TierConfig, parse_config
from tierkv.core.eviction.arc import Arc
from tierkv.core.eviction.base import EvictionPolicy, Room
from tierkv.core.eviction.lru import Lru
from tierkv.core.eviction.slru import Slru
from tierkv.core.values import TierLimits
from tierkv.errors import ConfigError
from tierkv.plugins import (
    OUR_POLICIES,
    OUR_TIERS,
    POLICY_GROUP,
    TIER_GROUP,
    known_policies,
    known_tiers,
    policy_factory,
)
from tierkv.testing import PolicyContract
from tierkv.tiers import open_tier
from tierkv.tiers.base import TierSettings
from tierkv.types import BlockKey

ROOT = Path(__file__).parents[1]
TIER_PAGE = ROOT / "docs" / "how-to" / "write-a-tier.md"
POLICY_PAGE = ROOT / "docs" / "how-to" / "write-a-policy.md"
TRACE = ROOT / "tests" / "traces" / "mooncake_conversation.jsonl.gz"
SLOTS = 8
RUN_WAIT_S = 120


def blocks_of(page: Path) -> dict[str, str]:
    """The named blocks of a page: what stands behind their language -> their text."""
    fence = re.compile(r"^```\S+ +(\S[^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = fence.findall(page.read_text(encoding="utf-8"))
    assert len({name for name, _ in found}) == len(found), "a name stands twice"
    return dict(found)


Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path, monkeypatch) -> Iterator[Install]:
    """Put a package on the path of this process and of its children, without its code being run."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)

    def put(package: str, entries: Mapping[str, Mapping[str, str]], **modules: str) -> Path:
        info = folder / f"{package.replace('-', '_')}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = []
        for group, names in entries.items():
            lines += [f"[{group}]", *(f"{name} = {value}" for name, value in names.items())]
        (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
        for name, text in modules.items():
            (folder / f"{name}.py").write_text(text)
        return folder

    yield put
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


@pytest.fixture
def install_page(install) -> Callable[[Path], Path]:
    """Install the package that a page describes, as its pyproject.toml says."""

    def put(page: Path) -> Path:
        blocks = blocks_of(page)
        project = tomllib.loads(blocks["pyproject.toml"])
        modules = project["tool"]["setuptools"]["py-modules"]
        entries = project["project"]["entry-points"]
        text = {name: blocks[f"{name}.py"] for name in modules}
        return install(project["project"]["name"], entries, **text)

    return put


class PluginNode(Node):
    """A node with tiers of any kind, and its log."""

    def __init__(self, tmp_path: Path, *tiers: TierConfig, **node: object) -> None:
        folder = tmp_path / "node"
        folder.mkdir()
        super().__init__(folder, SLOTS, log=folder / "log", tiers=tiers, **node)
        dram = self.config.dram.model_copy(update={"promote_share_max": 1.0})
        self.config = self.config.model_copy(update={"dram": dram})

    def wait_up(self) -> None:
        wait_for(lambda: all(t["is_up"] for t in self.stats()["tiers"]), what="the tiers to be up")

    def wait_written(self) -> None:
        def is_written() -> bool:
            stats = self.stats()
            return not stats["dirty_blocks"] and not any(t["jobs"] for t in stats["tiers"])

        wait_for(is_written, what="the tiers to have everything")

    def says(self, text: str) -> bool:
        return text in self.log.read_text()

    def wait_says(self, text: str) -> None:
        wait_for(lambda: self.says(text), what=f"the log to say {text!r}")


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., PluginNode]]:
    """A node with a daemon, ended with the test."""
    nodes: list[PluginNode] = []

    def make(*tiers: TierConfig, **node: object) -> PluginNode:
        nodes.append(PluginNode(tmp_path, *tiers, **node))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def run(command: list[str], folder: Path) -> str:
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=RUN_WAIT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-4000:] + ended.stderr[-2000:]
    return ended.stdout


# ---- the pages ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "names", "least"),
    [
        (TIER_PAGE, ("tierkv_sqlite.py", "test_tierkv_sqlite.py"), 28),
        (POLICY_PAGE, ("tierkv_fifo.py", "test_tierkv_fifo.py"), 9),
    ],
    ids=["tier", "policy"],
)
def test_what_a_page_shows_keeps_the_contract(install_page, tmp_path, page, names, least):
    module, suite = names
    assert (install_page(page) / module).exists()
    (tmp_path / suite).write_text(blocks_of(page)[suite])
    said = run(["-m", "pytest", "-q", "-p", "no:cacheprovider", suite], tmp_path)
    (passed,) = re.findall(r"(\d+) passed", said)
    assert int(passed) >= least
    assert "failed" not in said


def test_the_policy_of_the_page_hits_what_the_page_says(install_page, tmp_path):
    install_page(POLICY_PAGE)
    (tmp_path / "replay_fifo.py").write_text(blocks_of(POLICY_PAGE)["replay_fifo.py"])
    said = run(["replay_fifo.py", str(TRACE), "lru", "fifo"], tmp_path)
    (promised,) = re.findall(
        r"^\$ python replay_fifo\.py \S+ lru fifo\n(.*?)^```$",
        POLICY_PAGE.read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert said == promised


@pytest.mark.parametrize("page", [TIER_PAGE, POLICY_PAGE])
def test_the_configuration_of_a_page_is_one_when_its_package_is_installed(install_page, page):
    tree = yaml.safe_load(blocks_of(page)["tierkv.yaml"])
    with pytest.raises(ConfigError, match=r"no (tier|eviction policy) is named"):
        parse_config(tree)
    install_page(page)
    node = parse_config(tree).node
    assert (node.eviction, [t.type for t in node.tiers]) in [("fifo", []), ("slru", ["sqlite"])]


def sqlite_tier(tmp_path: Path, **more: object) -> TierConfig:
    return TierConfig(type="sqlite", path=tmp_path / "db", capacity=64 * SLOT_BYTES, **more)


@pytest.mark.parametrize(("eviction", "sources"), [("fifo", [0, 0, 1, 1]), ("slru", [0] * 4)])
def test_a_daemon_uses_the_tier_and_the_policy_that_the_pages_show(
    install_page, start, tmp_path, eviction, sources
):
    """A use saves a block from every order but first in, first out; the tier brings it back."""
    install_page(TIER_PAGE)
    install_page(POLICY_PAGE)
    node = start(sqlite_tier(tmp_path), eviction=eviction, write_policy="write_through")
    daemon = node.start_daemon()
    node.wait_up()
    assert not node.stats()["tiers"][0]["is_indexed"], "as the opened store says"
    engine = node.engine("e")
    assert engine.store("abcd") == 4
    assert engine.store("efgh") == 4
    node.wait_written()
    assert engine.load_from("abcd") == [0] * 4
    assert engine.store("ij") == 2
    assert engine.load_from("abcd") == sources
    assert node.stats()["counters"]["blocks_promoted"] == sum(sources)
    node.wait_written()
    node.check()
    daemon.process.terminate()
    assert daemon.process.wait(WAIT_MAX_S) == 0
    engine.notice_loss()
    node.start_daemon()
    engine.connect()
    engine.quiesce()
    node.wait_granting()
    node.wait_up()
    assert engine.load_from("abcd") == [1] * 4, "the database outlives the daemon"
    node.check()


def test_a_daemon_that_ends_writes_to_a_tier_that_says_it_is_durable(install_page, start, tmp_path):
    install_page(TIER_PAGE)
    node = start(sqlite_tier(tmp_path))
    daemon = node.start_daemon()
    node.wait_up()
    assert node.engine("e").store("abc") == 3
    daemon.process.terminate()
    assert daemon.process.wait(WAIT_MAX_S) == 0
    assert node.says("flushed: blocks=3 not_flushed=0")


# ---- what a store says of itself ---------------------------------------------------------------

FLEETING = """
import dataclasses
from tierkv.tiers.memory import MemoryTier
class Fleeting(MemoryTier):
    @property
    def info(self):
        return dataclasses.replace(super().info, type="fleeting")
"""


def test_a_daemon_that_ends_writes_nothing_to_a_tier_that_says_it_forgets(install, start):
    install("fleeting", {TIER_GROUP: {"fleeting": "fleeting:Fleeting"}}, fleeting=FLEETING)
    node = start(TierConfig(type="fleeting", capacity=64 * SLOT_BYTES))
    daemon = node.start_daemon()
    node.wait_up()
    assert node.stats()["tiers"][0]["is_indexed"]
    assert node.engine("e").store("abc") == 3
    assert node.stats()["dirty_blocks"] == 3
    daemon.process.terminate()
    assert daemon.process.wait(WAIT_MAX_S) == 0
    assert not node.says("flush")


def test_a_store_that_became_another_is_believed():
    """An upgraded package may open the same tier as one that is asked, or no longer is."""
    world = TierWorld(4, TierLimits("fs"))
    world.holds("ab")
    assert world.below("ab") == "ab"
    world.tiering.process_lost(0, 0.0)
    world.tiering.describe(0, is_indexed=False, is_durable=True, capacity=None)
    world.tiering.started(0, True)
    assert world.tiering.lanes[0].limits.capacity is None
    assert world.lookup("ab").pending == 2, "it is asked"
    assert world.take() == ["PROBE ab"]
    world.answer()
    assert world.below("ab") == "ab"
    world.tiering.process_lost(0, 0.0)
    assert world.below("ab") == "ab", "what an asked store said is remembered"
    world.tiering.describe(0, is_indexed=True, is_durable=True, capacity=1 << 20)
    assert world.below("ab") == "", "an indexed one tells it anew"
    world.tiering.started(0, True)
    assert world.lookup("xy").pending == 0, "it is known whole"


def test_a_description_that_changes_nothing_forgets_nothing():
    world = TierWorld(4, TierLimits("fs"))
    world.holds("ab")
    world.tiering.describe(0, is_indexed=True, is_durable=False, capacity=5)
    assert world.below("ab") == "ab"
    limits = world.tiering.lanes[0].limits
    assert (limits.is_durable, limits.capacity, limits.name) == (False, 5, "fs")


# ---- who imports what --------------------------------------------------------------------------

LOGGING_IMPORT = """
import os, pathlib
with (pathlib.Path(__file__).parent / "imported_by").open("a") as file:
    file.write(f"{os.getpid()} ")
"""


def importers(folder: Path) -> set[int]:
    file = folder / "imported_by"
    return {int(pid) for pid in file.read_text().split()} if file.exists() else set()


def test_the_package_of_a_tier_is_imported_in_its_io_process_only(install, start):
    text = LOGGING_IMPORT + FLEETING
    folder = install("fleeting", {TIER_GROUP: {"fleeting": "fleeting:Fleeting"}}, fleeting=text)
    assert known_tiers() == [*OUR_TIERS, "fleeting"]
    node = start(TierConfig(type="fleeting", capacity=SLOT_BYTES))
    assert importers(folder) == set(), "a name is checked by what is installed, not by an import"
    daemon = node.start_daemon()
    node.wait_up()
    (pid,) = importers(folder)
    assert pid not in (os.getpid(), daemon.process.pid)
    assert Path(f"/proc/{pid}/comm").read_text() == "tierkv-io fleet\n"


def test_packages_that_the_configuration_does_not_name_are_never_imported(install, start):
    folder = install(
        "unused",
        {POLICY_GROUP: {"unused": "unused:Any"}, TIER_GROUP: {"unused": "unused:Any"}},
        unused=LOGGING_IMPORT,
    )
    assert known_policies() == [*OUR_POLICIES, "unused"]
    node = start(TierConfig(type="memory", capacity=SLOT_BYTES))
    node.start_daemon()
    node.wait_up()
    assert importers(folder) == set()


# ---- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), [("lru", Lru), ("slru", Slru), ("arc", Arc)])
def test_our_policies_have_names(name, kind):
    made = policy_factory(name)()
    assert type(made) is kind
    assert policy_factory(name)() is not made, "one per namespace"


def test_every_name_of_ours_can_be_configured(tmp_path):
    for name in OUR_POLICIES:
        assert NodeConfig(eviction=name).eviction == name
    needs = {"memory": {"capacity": 1}, "fs": {"path": tmp_path}, "object": {"url": "s3://b/p"}}
    assert [TierConfig(type=name, **needs[name]).type for name in OUR_TIERS] == list(OUR_TIERS)


GROUPS = pytest.mark.parametrize(
    ("group", "tree"),
    [
        (POLICY_GROUP, lambda name: {"node": {"eviction": name}}),
        (TIER_GROUP, lambda name: {"node": {"tiers": [{"type": name}]}}),
    ],
    ids=["policies", "tiers"],
)


def message_for(tree: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@GROUPS
def test_an_unknown_name_is_told_with_the_nearest_and_all_known_ones(install, group, tree):
    install("tapes", {group: {"tape-drive": "tapes:Tape"}})
    message = message_for(tree("tape-driv"))
    assert "is named 'tape-driv'; did you mean tape-drive? Known are " in message
    known = known_policies() if group == POLICY_GROUP else known_tiers()
    assert f"{', '.join(known)}; install the package" in message
    assert "; known are " in message_for(tree("zzzzzz"))
    key = "node.eviction" if group == POLICY_GROUP else "node.tiers[0].type"
    assert message.startswith(f"configuration: {key}: ")


@GROUPS
def test_a_package_cannot_take_a_name_of_ours(install, group, tree):
    name = {POLICY_GROUP: "lru", TIER_GROUP: "fs"}[group]
    install("usurper", {group: {name: "usurper:Any"}})
    message = message_for(tree(name))
    assert f"'{name}' is a name of TierKV's own, and package usurper takes it too" in message
    assert known_policies() == list(OUR_POLICIES)
    assert known_tiers() == list(OUR_TIERS)


def test_a_default_that_a_package_takes_stops_the_start(install):
    """The configuration need not name it: nobody should have to guess whose code runs."""
    install("usurper", {POLICY_GROUP: {"slru": "usurper:Any"}})
    with pytest.raises(ConfigError, match="package usurper takes it too"):
        policy_factory(NodeConfig().eviction)


@pytest.mark.parametrize("name", ["dram", "device", "computed"])
def test_a_tier_has_no_name_that_stands_for_something_else_in_statistics(install, name):
    install("confusing", {TIER_GROUP: {name: "confusing:Any"}})
    assert "is a name of TierKV's own" in message_for({"node": {"tiers": [{"type": name}]}})
    assert known_tiers() == list(OUR_TIERS)


def test_mooncake_stays_reserved(install):
    install("mooncakes", {TIER_GROUP: {"mooncake": "mooncakes:Any"}})
    message = message_for({"node": {"tiers": [{"type": "mooncake"}]}})
    assert "tier type 'mooncake' is not available in this version" in message


@GROUPS
def test_two_packages_of_one_name_are_refused(install, group, tree):
    install("one", {group: {"tape": "one:Any"}})
    install("two", {group: {"tape": "two:Any"}})
    message = message_for(tree("tape"))
    assert "'tape' is offered by package one and package two; uninstall all but one" in message


@GROUPS
@pytest.mark.parametrize("name", ["Tape", "tape.drive", "../tape", "t" * 33, "9track"])
def test_a_name_that_would_not_do_for_a_lock_is_refused(install, group, tree, name):
    install("tapes", {group: {name: "tapes:Any"}})
    assert "cannot be used under that name" in message_for(tree(name))
    assert name not in [*known_policies(), *known_tiers()]


def test_a_tier_of_a_package_may_use_every_key_and_needs_none(install):
    install("tapes", {TIER_GROUP: {"tape": "tapes:Any"}})
    assert TierConfig(type="tape").capacity == "auto"
    full = {"path": "/x", "url": "tape://0", "capacity": "1GiB", "options": {"speed": "9"}}
    tier = TierConfig(type="tape", **full)
    assert (tier.url, tier.capacity, tier.options) == ("tape://0", 1 << 30, {"speed": "9"})
    assert tier.deadline_s == 2.0
    for secret in ({"options": {"password": "SEKRET"}}, {"url": "tape://me:SEKRET@host"}):
        message = message_for({"node": {"tiers": [{"type": "tape"} | secret]}})
        assert "credentials belong into the environment" in message
        assert "SEKRET" not in message


# ---- packages that do not work -----------------------------------------------------------------

BROKEN = {
    "absent": ("nowhere:Any", "cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
    "raising": ("raising:Any", "cannot be imported: RuntimeError: not on this machine"),
    "torn": ("torn:Any", "cannot be imported: SyntaxError: "),
    "nameless": ("shapes:Nothing", "cannot be imported: AttributeError: "),
    "number": ("shapes:NUMBER", "is a int; it must name a class"),
    "other": ("shapes:Other", "makes a Other; it must subclass tierkv."),
}
MODULES = {
    "raising": "raise RuntimeError('not on\\nthis machine')",
    "torn": "class Any(",
    "shapes": """
import dataclasses
from tierkv.core.eviction.base import EvictionPolicy, Room
from tierkv.tiers.memory import MemoryTier
NUMBER = 5
class Other:
    def __init__(self, settings=None):
        pass
class Half(EvictionPolicy):
    def grow(self, rows):
        pass
class Misnamed(MemoryTier):
    pass
class Failing(MemoryTier):
    def __init__(self, settings=None):
        raise ValueError("no tape in the drive")
""",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_policy_that_does_not_work_says_whose_it_is_and_what_failed(install, name):
    value, reason = BROKEN[name]
    install("broken", {POLICY_GROUP: {name: value}}, **MODULES)
    assert NodeConfig(eviction=name).eviction == name, "nothing of it is imported yet"
    with pytest.raises(ConfigError) as caught:
        policy_factory(name)
    message = str(caught.value)
    assert message.startswith(f"eviction policy '{name}' of package broken ({value}) ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("value", "reason"),
    [("shapes:Half", "TypeError: Can't instantiate abstract class Half"),
     ("shapes:Failing", "ValueError: no tape in the drive")],
)  # fmt: skip
def test_a_policy_that_cannot_be_made_stops_the_start(install, value, reason):
    install("broken", {POLICY_GROUP: {"half": value}}, **MODULES)
    with pytest.raises(ConfigError, match=rf"cannot be made: {reason}"):
        policy_factory("half")


def test_a_daemon_with_a_policy_that_does_not_work_ends_with_one_line(install, tmp_path):
    install("broken", {POLICY_GROUP: {"other": "shapes:Other"}}, **MODULES)
    file = tmp_path / "tierkv.yaml"
    socket = tmp_path / "d.sock"
    file.write_text(f"node: {{eviction: other, service: {{socket: {socket}}}}}\n")
    command = [sys.executable, "-m", "tierkv.cli.main", "serve", "--config", str(file)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_WAIT_S, check=False)
    assert ended.returncode == 1
    assert ended.stderr.startswith("error: eviction policy 'other' of package broken")
    assert ended.stderr.count("\n") == 1
    assert not socket.exists()


def test_a_tier_that_does_not_work_is_off_and_the_log_says_why(install, start):
    """Each costs itself and nothing else: DRAM and the tier that works go on."""
    broken = {name: BROKEN[name] for name in ("absent", "raising", "nameless", "other")}
    broken["misnamed"] = ("shapes:Misnamed", "says of itself that its type is 'memory'")
    broken["failing"] = ("shapes:Failing", "failing raised ValueError: no tape in the drive")
    entries = {TIER_GROUP: {name: value for name, (value, _) in broken.items()}}
    install("broken", entries, **MODULES)
    names = ["memory", *broken]
    tiers = [TierConfig(type=name, capacity=64 * SLOT_BYTES) for name in names]
    node = start(*tiers, write_policy="write_through")
    node.start_daemon()
    for name, (_, reason) in broken.items():
        node.wait_says(f"tier={name} is off: ")
        line = next(t for t in node.log.read_text().splitlines() if f"tier={name} is off: " in t)
        assert reason in line
    assert node.says('raise ValueError("no tape in the drive")'), "with its traceback"
    wait_for(lambda: node.stats()["tiers"][0]["is_up"], what="the tier that works")
    engine = node.engine("e")
    assert engine.store("ab") == 2
    assert engine.load_from("ab") == [0, 0]
    assert [tier["is_up"] for tier in node.stats()["tiers"]] == [True] + [False] * len(broken)


def test_an_unknown_type_is_refused_when_a_store_is_opened():
    with pytest.raises(ConfigError, match=r"no tier is named 'tape'; known are memory, fs, object"):
        open_tier(TierSettings(type="tape"))


# ---- the contract of a policy ------------------------------------------------------------------


class TestLru(PolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return Lru()


class TestSlru(PolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return Slru()


class TestArc(PolicyContract):
    def make_policy(self) -> EvictionPolicy:
        return Arc()


class Forgetful(Lru):
    """Loses sight of every third block that comes."""

    def insert(self, rows, after, keys=()):
        super().insert(rows[rows % 3 > 0], after)


class Lingering(Lru):
    """Proposes blocks that were given up."""

    def evict(self, rows):
        del rows


class HeadFirst(Lru):
    """Proposes the head of a prefix first, and says otherwise."""

    def insert(self, rows, after, keys=()):
        for row in rows:
            super().insert(rows[rows == row], 0)


class Restless(Lru):
    """Asking who goes brings the first one to the end."""

    def candidates(self):
        rows = list(super().candidates())
        if rows:
            import numpy as np

            super().touch(np.array(rows[:1], np.int32))
        yield from rows


class Stubborn(Lru):
    """Gives up nothing, whatever comes."""

    def miss(self, keys, after):
        del keys, after
        return Room(0, 0)


class Shared(Lru):
    """One order for all namespaces."""

    one: EvictionPolicy | None = None

    def __new__(cls):
        if cls.one is None:
            cls.one = super().__new__(cls)
        return cls.one

    def __init__(self):
        if not hasattr(self, "_count"):
            super().__init__()


@pytest.mark.parametrize(
    ("kind", "test"),
    [
        (Forgetful, "test_what_came_and_did_not_go_is_proposed_exactly_once"),
        (Forgetful, "test_the_audit_finds_nothing_after_any_request"),
        (Lingering, "test_what_came_and_did_not_go_is_proposed_exactly_once"),
        (Lingering, "test_the_audit_finds_nothing_while_layouts_take_room_from_each_other"),
        (HeadFirst, "test_what_came_and_did_not_go_is_proposed_exactly_once"),
        (HeadFirst, "test_the_audit_finds_nothing_after_any_request"),
        (Restless, "test_asking_who_goes_changes_nothing"),
        (Stubborn, "test_room_is_made_for_what_comes_next"),
        (Shared, "test_two_policies_share_nothing"),
    ],
)
def test_the_contract_finds_a_policy_that_breaks_it(kind, test):
    """The negative control."""

    class Contract(PolicyContract):
        def make_policy(self):
            return kind()

    with pytest.raises(AssertionError):
        getattr(Contract(), test)()


def test_keys_reach_a_policy_with_their_rows(install):
    """What a third party keeps by key is kept under the right one."""
    install("watching", {POLICY_GROUP: {"watching": "watching:Watching"}}, watching=WATCHING)
    from tierkv.core.directory import Directory
    from tierkv.core.values import Limits, Run

    make = policy_factory("watching")
    directory = Directory(Limits(4 * SLOT_BYTES, 4 * SLOT_BYTES), (), make)
    directory.open_engine("e")
    directory.attach("e", SPACE, SLOT_BYTES)
    granted = directory.reserve("e", SPACE, [Run(None, keys_of("abc"))], 0.0)
    directory.commit(granted.lease, [True] * 3)
    policy = directory.spaces[SPACE].policy
    index = directory.spaces[SPACE].index
    assert policy.keys == {index[BlockKey(key)]: key for key in keys_of("abc")}


WATCHING = """
from tierkv.core.eviction.lru import Lru
class Watching(Lru):
    def __init__(self):
        super().__init__()
        self.keys = {}
    def insert(self, rows, after, keys):
        super().insert(rows, after, keys)
        self.keys.update(zip(rows.tolist(), keys, strict=True))
"""
