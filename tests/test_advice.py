"""What a configuration may say and nobody should want: each warning, and when it is not given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tests.processes import SLOT_BYTES, Node
from tierkv import config as config_module
from tierkv.cli.main import main
from tierkv.config import TierConfig, from_extra_config, node_warnings, parse_config, warnings_of

ROOT = Path(__file__).parents[1]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
MIB = 1 << 20
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_overrides(monkeypatch):
    """Whatever the machine that runs the tests has set must not decide them."""
    for name in list(os.environ):
        if name.startswith(config_module.ENV_PREFIX):
            monkeypatch.delenv(name)


def fs(**more: object) -> dict:
    # Where /proc is, no block could lie; but it is certainly no memory file system.
    return {"type": "fs", "path": "/proc/tierkv", "capacity": "10GiB"} | more


def warned(dram: dict | None = None, *tiers: dict, engine: dict | None = None, **node: object):
    """The warnings about a small configuration whose DRAM is a GiB."""
    tree = {
        "node": {"dram": {"capacity": "1GiB"} | (dram or {}), "tiers": list(tiers)} | node,
        "engine": engine or {},
    }
    return warnings_of(parse_config(tree))


def assert_one(found: list[str], *parts: str) -> None:
    assert len(found) == 1, found
    assert "\n" not in found[0]
    assert [part for part in parts if part not in found[0]] == [], found[0]


# ---- nothing to say ----------------------------------------------------------------------------


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.name)
def test_no_shipped_configuration_draws_a_warning(file):
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    transfer = tree.get("kv-transfer-config")
    if transfer is not None:
        config = from_extra_config(transfer["kv_connector_extra_config"])
    else:
        config = parse_config(tree)
    assert warnings_of(config) == []


def test_the_shipped_configurations_are_looked_at():
    assert len(CONFIGS) >= 5


@pytest.mark.parametrize("policy", ["write_back", "write_through", "write_through_selective"])
def test_an_ssd_below_dram_is_wise(policy):
    assert warned({}, fs(), write_policy=policy) == []


def test_an_ssd_and_an_object_store_are_wise():
    assert warned({}, fs(), {"type": "object", "url": "s3://b/p"}) == []


# ---- sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["512MiB", "1GiB"])
def test_a_tier_that_is_not_larger_than_dram_holds_what_dram_holds(size):
    found = warned({}, fs(capacity=size))
    assert_one(found, "node.tiers[0].capacity (fs, ", "node.dram.capacity (1.0 GiB)", "give it")


def test_a_tier_that_is_not_larger_than_the_tier_above_it():
    memory = {"type": "memory", "capacity": "20GiB"}
    found = [text for text in warned({}, memory, fs()) if "capacity" in text.partition(" ")[0]]
    assert_one(found, "node.tiers[1].capacity (fs, 10.0 GiB)", "node.tiers[0].capacity (20.0 GiB)")


def test_a_tier_without_a_size_is_stepped_over():
    """What `auto` becomes is known to nobody yet, but the one below it must exceed DRAM."""
    object_store = {"type": "object", "url": "s3://b/p"}
    assert warned({}, object_store, fs(capacity="2GiB")) == []
    assert_one(warned({}, object_store, fs(capacity="1GiB")), "node.tiers[1].capacity (fs, ")
    assert warned({}, fs(capacity="auto")) == []


def test_an_automatic_size_of_dram_counts_where_it_is_known():
    node = parse_config({"node": {"tiers": [fs()]}}).node
    assert node.dram.capacity == "auto"
    assert node_warnings(node) == []
    assert node_warnings(node, 9 * GIB) == []
    assert_one(node_warnings(node, 11 * GIB), "node.dram.capacity (11.0 GiB)")
    assert_one(node_warnings(node, 64 * MIB), "node.dram.extent_unit")


@pytest.mark.parametrize(
    ("capacity", "unit", "pieces"),
    [
        ("704MiB", "64MiB", "11 pieces"),
        ("64MiB", "64MiB", "1 piece:"),
        ("1MiB", "4MiB", "1 piece:"),
    ],
)
def test_an_extent_that_is_a_large_part_of_dram_cannot_be_shared(capacity, unit, pieces):
    found = warned({"capacity": capacity, "extent_unit": unit})
    assert_one(found, f"node.dram.extent_unit ({unit})", pieces, "or less")


def test_twelve_extents_are_enough():
    assert warned({"capacity": "768MiB", "extent_unit": "64MiB"}) == []


# ---- shares ------------------------------------------------------------------------------------


def test_a_pool_that_waiting_requests_may_pin_whole_takes_no_new_blocks():
    assert_one(warned({"pinned_share_max": "95%"}), "node.dram.pinned_share_max (95%)", "90%")
    assert warned({"pinned_share_max": "90%"}) == []


@pytest.mark.parametrize(("tail", "dirty"), [("50%", "50%"), ("60%", "40%")])
def test_a_clean_tail_that_reaches_dirty_max_makes_write_back_useless(tail, dirty):
    dram = {"clean_tail": tail, "dirty_max": dirty}
    found = warned(dram, fs())
    assert_one(found, f"node.dram.clean_tail ({tail})", f"node.dram.dirty_max ({dirty})")
    assert warned(dram) == [], "without tiers nothing is written"
    assert warned(dram, fs(), write_policy="write_through") == []
    assert_one(warned(dram, fs(write_policy="write_back"), write_policy="write_through"), tail)
    assert warned({"clean_tail": "49%", "dirty_max": "50%"}, fs()) == []


# ---- when blocks are written -------------------------------------------------------------------


def test_write_back_without_a_flush_loses_what_is_owed_at_each_stop():
    none = {"flush_budget": 0}
    found = warned({}, fs(), service=none)
    assert_one(found, "node.service.flush_budget (0s)", "node.tiers[0] (fs)", "write_through")
    assert warned({}, fs(), service=none, write_policy="write_through") == []
    assert warned({}, fs(), service={"flush_budget": "1s"}) == []
    assert warned({}, service=none) == [], "without tiers nothing is owed"


def test_a_selective_policy_that_waits_for_one_use_writes_everything():
    found = warned({}, fs(write_policy="write_through_selective", hits_min=1))
    assert_one(found, "node.tiers[0].hits_min (1)", "write_through")
    assert_one(warned({}, fs(hits_min=1), write_policy="write_through_selective"), "hits_min")
    assert warned({}, fs(hits_min=1)) == [], "another policy does not count uses"
    assert warned({}, fs(hits_min=2), write_policy="write_through_selective") == []


# ---- where blocks lie --------------------------------------------------------------------------


def test_a_memory_tier_is_for_tests():
    memory = {"type": "memory", "capacity": "2GiB"}
    assert_one(warned({}, memory), "node.tiers[0].type (memory)", "node.dram.capacity")
    assert_one(warned({}, memory, service={"flush_budget": 0}), "(memory)")


@pytest.mark.parametrize("path", ["/dev/shm", "/dev/shm/not/there/yet"])
def test_an_ssd_tier_on_a_memory_file_system_takes_dram_twice(path):
    found = warned({}, fs(path=path))
    assert_one(found, f"node.tiers[0].path ({path}) lies on tmpfs", "on a disk")


def test_a_pool_on_a_disk_is_written_to_it():
    found = warned({"directory": "/proc"})
    assert_one(found, "node.dram.directory (/proc) lies on proc", "/dev/shm")


def test_a_path_is_judged_without_being_looked_at(tmp_path):
    """A link that leads nowhere stands for a file system that does not answer."""
    link = tmp_path / "link"
    link.symlink_to(link)
    found = warned({}, fs(path=str(link / "blocks")))
    above = warned({}, fs(path=str(tmp_path)))
    assert [text.replace(f"{link}/blocks", str(tmp_path)) for text in found] == above


# ---- how long requests wait --------------------------------------------------------------------


@pytest.mark.parametrize(("threshold", "block"), [(1, 128), (127, 128), (128, 256)])
def test_a_threshold_below_a_block_refuses_nothing(threshold, block):
    engine = {"swap_in_threshold": threshold, "block_tokens": block}
    found = warned(engine=engine)
    assert_one(found, f"engine.swap_in_threshold ({threshold})", f"block_tokens ({block})")


@pytest.mark.parametrize("engine", [
    {"swap_in_threshold": 0, "block_tokens": 128}, {"swap_in_threshold": 128, "block_tokens": 128},
    {"swap_in_threshold": 16},
])  # fmt: skip
def test_a_threshold_of_a_block_or_of_nothing_is_wise(engine):
    """And one whose block is the engine's, which the configuration does not know."""
    assert warned(engine=engine) == []


def test_requests_that_never_wait_get_nothing_from_a_tier():
    engine = {"promote_wait_max": 0}
    assert_one(warned({}, fs(), engine=engine), "engine.promote_wait_max (0s)", "1s")
    assert warned(engine=engine) == [], "without tiers nobody waits"


def test_an_object_store_alone_needs_requests_that_wait_for_it():
    store = {"type": "object", "url": "s3://b/p"}
    found = warned({}, store)
    assert_one(found, "engine.promote_wait_max (1s)", "node.tiers[0].deadline (10s)", "type fs")
    assert warned({}, store, engine={"promote_wait_max": "10s"}) == []
    assert warned({}, store | {"deadline": "1s"}) == []
    assert warned({}, fs(), store) == []
    assert_one(warned({}, store, engine={"promote_wait_max": 0}), "(0s) lets no request wait")


# ---- where warnings are shown ------------------------------------------------------------------


@pytest.fixture
def check(tmp_path, capsys):
    """Run `tierkv config check` on a text; exit code, standard output, standard error."""

    def run(text: str, *options: str) -> tuple[int, str, str]:
        file = tmp_path / "tierkv.yaml"
        file.write_text(text)
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["config", "check", str(file), *options])
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


UNWISE = "node: {dram: {capacity: 1GiB, pinned_share_max: 95%, extent_unit: 1GiB}}\n"


def test_config_check_tells_warnings_and_succeeds(check):
    code, out, err = check(UNWISE)
    assert (code, out) == (0, "ok\n")
    first, second = err.splitlines()
    assert first.startswith("warning: node.dram.pinned_share_max (95%) ")
    assert second.startswith("warning: node.dram.extent_unit (1GiB) ")


def test_config_check_fails_on_warnings_if_it_is_to_be_strict(check):
    code, out, err = check(UNWISE, "--strict")
    assert (code, out, err.count("warning: ")) == (1, "", 2)
    assert check("node: {dram: {capacity: 1GiB}}", "--strict") == (0, "ok\n", "")


def test_a_wrong_configuration_is_an_error_strict_or_not(check):
    for options in ([], ["--strict"]):
        code, out, err = check("node: {dram: {capacity: much}}", *options)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")


def test_a_daemon_logs_what_is_unwise_at_its_start(tmp_path):
    """With the size that its pool has got, and not about the engines' part."""
    tier = TierConfig(type="memory", capacity=4 * SLOT_BYTES)
    node = Node(tmp_path, 8, log=tmp_path / "log", tiers=[tier])
    try:
        node.start_daemon()
        lines = (tmp_path / "log").read_text().splitlines()
        start = "WARNING configuration: "
        found = [line.removeprefix(start) for line in lines if line.startswith(start)]
        assert [text.partition(" ")[0] for text in found] == [
            "node.dram.pinned_share_max",
            "node.dram.extent_unit",
            "node.tiers[0].capacity",
            "node.tiers[0].type",
        ]
    finally:
        node.close()
