"""Made-up machines for tests of placement and of what a host has: files below a folder."""

from __future__ import annotations

from pathlib import Path

KIB = 1024


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def make_node(
    root: Path, number: int, cpus: str, total_kib: int, *, free_kib: int = 0, cache_kib: int = 0
) -> None:
    """A NUMA node as the kernel shows it; `cache_kib` in each of the three kinds it gives up."""
    folder = root / f"sys/devices/system/node/node{number}"
    lines = {
        "MemTotal": total_kib, "MemFree": free_kib, "Active(file)": cache_kib,
        "Inactive(file)": cache_kib, "SReclaimable": cache_kib, "Shmem": 7,
    }  # fmt: skip
    text = "".join(f"Node {number} {name}: {value:>12} kB\n" for name, value in lines.items())
    write(folder / "meminfo", text + f"Node {number} HugePages_Total:     0\n")
    write(folder / "cpulist", cpus + "\n")


def make_status(root: Path, mems: str = "0-4095", capabilities: int = 0) -> None:
    """What a process is told about itself."""
    text = f"Name:\tpython\nCapEff:\t{capabilities:016x}\nMems_allowed_list:\t{mems}\n"
    write(root / "proc/self/status", text)


def make_device(root: Path, address: str, vendor: str, kind: str, node: int | None) -> None:
    """A device on the PCI bus; `node`: None if it has no such file."""
    folder = root / "sys/bus/pci/devices" / address
    write(folder / "vendor", vendor + "\n")
    write(folder / "class", kind + "\n")
    if node is not None:
        write(folder / "numa_node", f"{node}\n")
