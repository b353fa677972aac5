"""What of a machine decides how fast blocks move between the pool and its accelerators.

Rule 1: everything is read from files below a root, and nothing is started, loaded or changed.
Rule 2: what cannot be read is None, never an error; containers hide much.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tierkv.units import approximate_size

_MAKERS = {("0x19e5", "0x12"): "ascend", ("0x10de", "0x03"): "nvidia"}  # PCI vendor, base class
_TITLES = {"ascend": "Ascend NPU", "nvidia": "NVIDIA GPU"}
_KERNEL_TOO_OLD = (5, 10)  # and all before; CANN's documentation of aclrtHostRegisterV2
_ASCEND_DRIVER_MIN = (25, 5)  # torch_npu, AclInterface.cpp
_IPC_LOCK = 14  # CAP_IPC_LOCK


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A device on the PCI bus.

    Attributes:
        kind: `ascend` or `nvidia`.
        node: its NUMA node; None if the system names none, as virtual machines often do.
    """

    address: str
    kind: str
    node: int | None


@dataclass(frozen=True, slots=True)
class HostFacts:
    """What `read_host_facts` found.

    Attributes:
        memlock_bytes: how much this process may lock, RLIMIT_MEMLOCK; None without a limit.
        may_lock_all: it has the capability that lifts that limit.
    """

    kernel: str | None
    memlock_bytes: int | None
    may_lock_all: bool
    accelerators: tuple[Accelerator, ...]
    ascend_driver: str | None
    nvidia_driver: str | None


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """Look at this machine, as far as this process can see it."""
    kernel = _text(root / "proc/sys/kernel/osrelease").strip()
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)", _text(root / "proc/self/status"), re.M)
    return HostFacts(
        kernel or None,
        _memlock(root),
        bool(capabilities and int(capabilities[1], 16) >> _IPC_LOCK & 1),
        _accelerators(root),
        _ascend_driver(root),
        _nvidia_driver(root),
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _memlock(root: Path) -> int | None:
    found = re.search(r"^Max locked memory\s+(\d+)", _text(root / "proc/self/limits"), re.MULTILINE)
    return int(found[1]) if found else None  # the soft limit; no number means `unlimited`


def _accelerators(root: Path) -> tuple[Accelerator, ...]:
    found = []
    for device in sorted((root / "sys/bus/pci/devices").glob("*")):
        vendor, kind = (_text(device / name).strip() for name in ("vendor", "class"))
        maker = _MAKERS.get((vendor, kind[:4]))
        if maker is not None:
            node = _text(device / "numa_node").strip()
            found.append(Accelerator(device.name, maker, int(node) if node.isdigit() else None))
    return tuple(found)


def _ascend_driver(root: Path) -> str | None:
    """From the driver's folder; another one is named where the installer noted it."""
    note = _text(root / "etc/ascend_install.info")
    named = re.search(r"^Driver_Install_Path_Param=/?(\S+)", note, re.MULTILINE)
    for folder in ("usr/local/Ascend", *([named[1]] if named else [])):
        info = _text(root / folder / "driver/version.info")
        version = re.search(r"^Version=\s*(\S+)", info, re.MULTILINE | re.IGNORECASE)
        if version:
            return version[1]
    return None


def _nvidia_driver(root: Path) -> str | None:
    line = _text(root / "proc/driver/nvidia/version").partition("\n")[0]
    version = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", line + " ")
    return version[1] if version else None


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    found = [int(number) for number in re.findall(r"\d+", version)[:2]]
    major, minor = (*found, 0, 0)[:2]
    return major, minor


def what_falls_back(facts: HostFacts, pool_bytes: int | None) -> list[str]:
    """Plain sentences about what this machine lacks, and what takes its place.

    Args:
        pool_bytes: None if it is not known.
    """
    kinds = {device.kind for device in facts.accelerators}
    said = _about_ascend(facts) if "ascend" in kinds else []
    if "nvidia" in kinds and facts.nvidia_driver is None:
        said.append(
            "an NVIDIA GPU is on the bus and no driver is loaded: engines cannot use it; install "
            "the driver"
        )
    return [*said, *(_about_memlock(facts, pool_bytes) if kinds else [])]


def _about_memlock(facts: HostFacts, pool_bytes: int | None) -> list[str]:
    limit = facts.memlock_bytes
    if limit is None or pool_bytes is None or limit >= pool_bytes or facts.may_lock_all:
        return []
    return [
        f"memlock allows {approximate_size(limit)} and the pool has "
        f"{approximate_size(pool_bytes)}: if it is the same for engines, a driver may refuse to "
        "register the pool, and copies go through a small page-locked buffer; raise it for engines "
        "(ulimit -l unlimited, LimitMEMLOCK=infinity, --ulimit memlock=-1)"
    ]


def _about_ascend(facts: HostFacts) -> list[str]:
    said = []
    if facts.kernel is not None and _numbers(facts.kernel) <= _KERNEL_TOO_OLD:
        said.append(
            f"kernel {facts.kernel}: the Ascend runtime registers host memory only on kernels "
            "above 5.10; the pool stays unregistered, and copies go through a small page-locked "
            "buffer; use a newer kernel"
        )
    if facts.ascend_driver is None:
        said.append(
            "the version of the Ascend driver cannot be read (/usr/local/Ascend/driver/"
            "version.info): whether the pool can be registered shows when an engine starts; in a "
            "container mount that file"
        )
    elif _numbers(facts.ascend_driver) < _ASCEND_DRIVER_MIN:
        said.append(
            f"Ascend driver {facts.ascend_driver}: below 25.5 torch-npu takes registered memory "
            "for pageable and copies it blocking; TierKV calls the runtime itself instead, and if "
            "that is refused copies go through a small page-locked buffer; use a newer driver"
        )
    return said


def what_is_far(
    accelerators: Collection[Accelerator], mode: str, nodes: Collection[int]
) -> list[str]:
    """A sentence per accelerator whose NUMA node holds nothing of a pool that lies on chosen nodes.

    Args:
        mode: of the pool's placement; an interleaved pool is equally far from all.
        nodes: where the pool's pages lie or will lie.
    """
    if mode == "interleave" or not nodes:
        return []
    shown = ", ".join(map(str, sorted(nodes)))
    return [
        f"the pool lies on NUMA node {shown} ({mode}) and the {_TITLES[device.kind]} "
        f"{device.address} on node {device.node}: every copy crosses the nodes; start the daemon "
        "on CPUs of that node, or set node.dram.numa to interleave"
        for device in accelerators
        if device.node is not None and device.node not in nodes
    ]
