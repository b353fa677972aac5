"""What a machine has, and what `tierkv doctor` says of it: made-up machines, and this one."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

import pytest
import yaml

from tests.numa_trees import make_device, make_status, write
from tests.processes import Node
from tierkv.cli.administer import doctor
from tierkv.errors import ConfigError
from tierkv.host_facts import (
    Accelerator,
    HostFacts,
    read_host_facts,
    what_falls_back,
    what_is_far,
)

GIB = 1 << 30
ASCEND = Accelerator("0000:c1:00.0", "ascend", 1)
NVIDIA = Accelerator("0000:41:00.0", "nvidia", 0)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch):
    for name in [name for name in os.environ if name.startswith("TIERKV_")]:
        monkeypatch.delenv(name)


# ---- reading -----------------------------------------------------------------------------------


def test_nothing_that_can_be_read_is_no_error(tmp_path):
    assert read_host_facts(tmp_path) == HostFacts(None, None, False, (), None, None)


def test_accelerators_are_found_by_vendor_and_class_with_their_node(tmp_path):
    make_device(tmp_path, "0000:c1:00.0", "0x19e5", "0x120000", 1)
    make_device(tmp_path, "0000:41:00.0", "0x10de", "0x030200", 0)
    make_device(tmp_path, "0000:42:00.0", "0x10de", "0x030000", -1)  # a virtual machine
    make_device(tmp_path, "0000:43:00.0", "0x10de", "0x030000", None)
    make_device(tmp_path, "0000:41:00.1", "0x10de", "0x040300", 0)  # the GPU's sound
    make_device(tmp_path, "0000:05:00.0", "0x19e5", "0x030000", 0)  # a server's console
    make_device(tmp_path, "0000:06:00.0", "0x8086", "0x120000", 0)
    assert read_host_facts(tmp_path).accelerators == (
        NVIDIA,
        Accelerator("0000:42:00.0", "nvidia", None),
        Accelerator("0000:43:00.0", "nvidia", None),
        ASCEND,
    )


LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"


@pytest.mark.parametrize(("text", "limit"), [("8388608", 8 << 20), ("unlimited", None)])
def test_kernel_and_lock_limit_are_those_of_this_process(tmp_path, text, limit):
    write(tmp_path / "proc/sys/kernel/osrelease", "5.10.0-216.0.0.115.oe2203sp4.aarch64\n")
    write(tmp_path / "proc/self/limits", f"{LIMITS}Max locked memory         {text}   99   bytes\n")
    make_status(tmp_path, capabilities=1 << 14 | 1)
    facts = read_host_facts(tmp_path)
    assert facts.kernel == "5.10.0-216.0.0.115.oe2203sp4.aarch64"
    assert facts.memlock_bytes == limit
    assert facts.may_lock_all
    make_status(tmp_path, capabilities=1 << 13)
    assert not read_host_facts(tmp_path).may_lock_all


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("Version=25.2.0\nascendhal_version=7.35.23\n", "25.2.0"),
        ("package=x\nversion=24.1.rc2\n", "24.1.rc2"),
        ("ascendhal_version=7.35.23\n", None),
    ],
)
def test_the_ascend_driver_tells_its_version(tmp_path, text, version):
    write(tmp_path / "usr/local/Ascend/driver/version.info", text)
    assert read_host_facts(tmp_path).ascend_driver == version


def test_the_ascend_driver_may_be_installed_elsewhere(tmp_path):
    write(tmp_path / "opt/npu/driver/version.info", "Version=25.5.0\n")
    assert read_host_facts(tmp_path).ascend_driver is None
    write(tmp_path / "etc/ascend_install.info", "UserName=x\nDriver_Install_Path_Param=/opt/npu\n")
    assert read_host_facts(tmp_path).ascend_driver == "25.5.0"


@pytest.mark.parametrize(
    ("line", "version"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024",
         "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  565.57.01  Release Build",
         "565.57.01"),
        ("NVRM version: none", None),
    ],
)  # fmt: skip
def test_the_nvidia_driver_tells_its_version(tmp_path, line, version):
    write(tmp_path / "proc/driver/nvidia/version", f"{line}\nGCC version:  gcc version 12.3.0\n")
    assert read_host_facts(tmp_path).nvidia_driver == version


def test_this_machine_is_read_as_the_system_tells_it():
    assert read_host_facts().kernel == platform.release()


# ---- what falls back to what -------------------------------------------------------------------


def facts(
    *devices: Accelerator,
    kernel: str | None = "6.6.0-72",
    memlock: int | None = None,
    may_lock_all: bool = False,
    ascend: str | None = "25.5.0",
    nvidia: str | None = "550.54.15",
) -> HostFacts:
    return HostFacts(kernel, memlock, may_lock_all, devices, ascend, nvidia)


def test_a_machine_that_lacks_nothing_is_told_nothing():
    assert what_falls_back(facts(ASCEND, NVIDIA), 64 * GIB) == []
    assert what_falls_back(facts(ASCEND, memlock=64 * GIB), 64 * GIB) == []


def test_without_an_accelerator_nothing_can_be_lacking():
    poor = facts(kernel="4.19.90", memlock=0, ascend=None, nvidia=None)
    assert what_falls_back(poor, 64 * GIB) == []


@pytest.mark.parametrize(
    ("kernel", "is_old"),
    [("4.19.90-2107", True), ("5.10.0-216.oe2203", True), ("5.10.226", True), ("5.11.0", False),
     ("5.15.0-119-generic", False), ("6.6.0", False), (None, False)],
)  # fmt: skip
def test_a_kernel_that_cannot_register_host_memory_is_told_for_ascend_only(kernel, is_old):
    said = what_falls_back(facts(ASCEND, kernel=kernel), GIB)
    assert [text for text in said if f"kernel {kernel}" in text and "5.10" in text] == said
    assert len(said) == is_old
    assert what_falls_back(facts(NVIDIA, kernel=kernel), GIB) == []


@pytest.mark.parametrize(
    ("version", "expected"),
    [("25.5.0", []), ("26.0.rc1", []), ("25.2.0", ["Ascend driver 25.2.0"]),
     ("24.1.rc2", ["Ascend driver 24.1.rc2"]), (None, ["cannot be read"])],
)  # fmt: skip
def test_an_ascend_driver_that_hides_registered_memory_is_told(version, expected):
    said = what_falls_back(facts(ASCEND, ascend=version), GIB)
    assert len(said) == len(expected)
    for text, words in zip(said, expected, strict=True):
        assert words in text


@pytest.mark.parametrize(
    ("memlock", "may_lock_all", "pool", "is_short"),
    [(8 << 20, False, GIB, True), (8 << 20, True, GIB, False), (8 << 20, False, 8 << 20, False),
     (None, False, GIB, False), (8 << 20, False, None, False)],
)  # fmt: skip
def test_a_lock_limit_below_the_pool_is_told(memlock, may_lock_all, pool, is_short):
    found = facts(NVIDIA, memlock=memlock, may_lock_all=may_lock_all)
    said = what_falls_back(found, pool)
    assert len(said) == is_short
    assert all("memlock allows 8.0 MiB and the pool has 1.0 GiB" in text for text in said)


def test_a_gpu_without_its_driver_is_told():
    (said,) = what_falls_back(facts(NVIDIA, nvidia=None), GIB)
    assert "no driver is loaded" in said


@pytest.mark.parametrize(
    ("mode", "nodes", "far"),
    [
        ("bind", [0], [ASCEND]),
        ("local", [0], [ASCEND]),
        ("bind", [1], [NVIDIA]),
        ("bind", [0, 1], []),
        ("interleave", [0], []),
        ("local", [], []),
    ],
)
def test_an_accelerator_beside_another_node_than_the_pools_is_told(mode, nodes, far):
    unknown = Accelerator("0000:99:00.0", "nvidia", None)
    said = what_is_far([ASCEND, NVIDIA, unknown], mode, nodes)
    assert len(said) == len(far)
    for text, device in zip(said, far, strict=True):
        assert f"{device.address} on node {device.node}" in text
        assert f"({mode})" in text


# ---- the command -------------------------------------------------------------------------------

KEYS = {
    "kernel", "memlock_bytes", "may_lock_all", "ascend_driver", "nvidia_driver", "numa_nodes",
    "accelerators", "pool", "warnings",
}  # fmt: skip


def examine(capsys, *arguments: object) -> tuple[str, str]:
    """What the command prints, to standard output and standard error."""
    capsys.readouterr()
    doctor.main([str(argument) for argument in arguments], "tierkv doctor", standalone_mode=False)
    out, err = capsys.readouterr()
    return out, err


def config_in(folder: Path, **dram: object) -> Path:
    tree = {
        "dram": {"capacity": "1MiB", "directory": str(folder), "extent_unit": "1MiB", **dram},
        "service": {"socket": str(folder / "d.sock")},
    }
    path = folder / "tierkv.yaml"
    path.write_text(yaml.safe_dump({"node": tree}))
    return path


def test_doctor_without_a_daemon_tells_where_a_pool_would_lie(tmp_path, capsys):
    config = config_in(tmp_path, numa="bind")
    tree = json.loads(examine(capsys, "--config", config, "--json")[0])
    assert set(tree) == KEYS
    assert tree["kernel"] == platform.release()
    assert tree["pool"]["capacity"] == 1 << 20
    assert tree["pool"]["is_running"] is False
    assert tree["pool"]["placement"]["asked"] == "bind"
    assert tree["pool"]["placement"]["pages_by_node"] == {}
    known = {node["node"] for node in tree["numa_nodes"]}
    assert set(tree["pool"]["placement"]["nodes"]) <= known
    out, _ = examine(capsys, "--config", config)
    rows = {line[:16].strip(): line[16:] for line in out.splitlines()}
    assert {"kernel", "memlock", "ascend driver", "nvidia driver", "pool"} <= set(rows)
    assert rows["kernel"] == platform.release()
    assert rows["pool"].startswith("no daemon answers; bind from here means numa node ")


def test_doctor_says_why_a_pool_cannot_be_made(tmp_path, capsys):
    config = config_in(tmp_path, capacity="900TiB")
    out, err = examine(capsys, "--config", config)
    assert "warning: node.dram.capacity: 900.0 TiB is more than" in err
    tree = json.loads(examine(capsys, "--config", config, "--json")[0])
    assert tree["pool"]["capacity"] is None
    assert any("node.dram.capacity" in text for text in tree["warnings"])
    assert out.count("\n") >= len(KEYS) - 3


def test_doctor_refuses_a_wrong_configuration(tmp_path):
    with pytest.raises(ConfigError, match=r"node\.dram\.numa"):
        doctor.main(["--config", str(config_in(tmp_path, numa="far"))], standalone_mode=False)


def test_doctor_asks_a_daemon_that_runs_where_its_pool_lies(tmp_path, capsys):
    tmp_path.chmod(0o700)
    node = Node(tmp_path)
    try:
        node.start_daemon()
        tree = json.loads(examine(capsys, "--socket", node.socket, "--json")[0])
        assert tree["pool"]["is_running"] is True
        assert tree["pool"]["capacity"] == node.config.dram.capacity
        placement = tree["pool"]["placement"]
        assert placement["asked"] == "interleave"
        if placement["in_force"] is not None:
            assert sum(placement["pages_by_node"].values()) + placement["pages_absent"] > 0
        out, _ = examine(capsys, "--socket", node.socket)
        assert "no daemon answers" not in out
    finally:
        node.close()
