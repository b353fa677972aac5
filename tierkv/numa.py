"""On which NUMA nodes the pool's pages lie: asked of the kernel, and asked back from it.

Rule 1: a policy the kernel refuses costs speed, never a start; it comes back as a sentence.
Rule 2: a policy is set before the pages are there. A file in a memory file system keeps it itself,
for every process that maps the file, and pages that exist already do not move.

glibc has no wrappers for these calls, so they go through syscall(2).

Source: mbind(2), get_mempolicy(2), move_pages(2); numbers from the kernel's table of x86-64 and its
generic table, which AArch64 uses.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tierkv.errors import PoolError
from tierkv.units import approximate_size

SAMPLES_MAX = 256
_NODES_MAX = 4096  # more than any kernel can be built for
_WORDS = _NODES_MAX // 64
_SEED = 5
_CALLS = {
    "x86_64": {"mbind": 237, "set_mempolicy": 238, "get_mempolicy": 239, "move_pages": 279},
    "aarch64": {"mbind": 235, "set_mempolicy": 237, "get_mempolicy": 236, "move_pages": 239},
}
_MODES = {"bind": 2, "interleave": 3}
_NAMES = ("local", "preferred", "bind", "interleave", "local", "preferred_many",
          "weighted_interleave")  # fmt: skip
_MODE_BITS = 0xFF  # above them are flags
_F_ADDR = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long
_Mask = ctypes.c_ulong * _WORDS


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node that has memory. Bytes.

    Attributes:
        cpus: may be empty: memory of its own kind, or of an accelerator.
        available: free, or a cache that the kernel gives up when asked.
    """

    number: int
    cpus: frozenset[int]
    total: int
    available: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where pages lie, and why.

    Attributes:
        asked: `interleave`, `local` or `bind`.
        in_force: the policy the kernel tells, `local` if none is set; None if it does not tell.
        nodes: those of the policy.
        pages: (node, how many of the sampled pages lie there), ascending.
        absent: sampled pages that are not in memory.
        problem: why it is not what was asked for; empty if it is.
    """

    asked: str
    in_force: str | None = None
    nodes: tuple[int, ...] = ()
    pages: tuple[tuple[int, int], ...] = ()
    absent: int = 0
    problem: str = ""

    def tree(self) -> dict[str, object]:
        """The same as plain values."""
        return {
            "asked": self.asked,
            "in_force": self.in_force,
            "nodes": list(self.nodes),
            "pages_by_node": {str(node): pages for node, pages in self.pages},
            "pages_absent": self.absent,
            "problem": self.problem,
        }

    @classmethod
    def from_tree(cls, tree: Mapping[str, Any]) -> Placement:
        """What `tree` was made of."""
        pages = tuple((int(node), int(count)) for node, count in tree["pages_by_node"].items())
        return cls(
            tree["asked"], tree["in_force"], tuple(tree["nodes"]), pages, tree["pages_absent"],
            tree["problem"],
        )  # fmt: skip

    def text(self) -> str:
        """One line for people."""
        text = self.in_force or "unknown"
        if self.nodes:
            text += f" over {_nodes_text(self.nodes)}"
        if self.pages or self.absent:
            shares = [f"{count:,} on node {node}" for node, count in self.pages]
            shares += [f"{self.absent:,} absent"] if self.absent else []
            sampled = sum(count for _, count in self.pages) + self.absent
            text += f"; of {sampled:,} sampled pages {', '.join(shares)}"
        return text + (f"; asked {self.asked}: {self.problem}" if self.problem else "")


def _nodes_text(numbers: Sequence[int]) -> str:
    return f"node{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def read_nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """The nodes with memory that this process may use, ascending; none if the kernel shows none."""
    allowed = _allowed(root)
    found = []
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        number = int(folder.name[len("node") :])
        memory = _memory(folder)
        if memory.get("MemTotal") and (allowed is None or number in allowed):
            parts = ("MemFree", "Active(file)", "Inactive(file)", "SReclaimable")
            available = sum(memory.get(part, 0) for part in parts)
            cpus = frozenset(_parse_list(_text(folder / "cpulist")))
            found.append(Node(number, cpus, memory["MemTotal"], available))
    return tuple(sorted(found, key=lambda node: node.number))


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _allowed(root: Path) -> set[int] | None:
    """Nodes on which the control group lets this process allocate; None if it is not told."""
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return _parse_list(line.partition(":")[2])
    return None


def _memory(folder: Path) -> dict[str, int]:
    """Bytes by name; lines read `Node 0 MemTotal:  8743116 kB`."""
    found = {}
    for line in _text(folder / "meminfo").splitlines():
        words = line.split()
        if len(words) >= 4 and words[3].isdigit():
            found[words[2].rstrip(":")] = int(words[3]) * 1024
    return found


def _parse_list(text: str) -> set[int]:
    """Numbers of a list such as `0-3,8`; what is no number is left out."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (last or first).isdigit():
            found |= set(range(int(first), min(int(last or first), _NODES_MAX) + 1))
    return found


def nodes_for(mode: str, nodes: Sequence[Node], cpus: Set[int]) -> tuple[Node, ...]:
    """The nodes that a mode means; none for `local`.

    A node without any CPU is left out of `interleave` if others have some: an accelerator may show
    its own memory as such a node, and its engine needs that.

    Args:
        cpus: those on which the process may run.
    """
    if mode == "bind":
        return tuple(node for node in nodes if node.cpus & cpus)
    if mode == "interleave":
        return tuple(node for node in nodes if node.cpus) or tuple(nodes)
    return ()


def drop_own_policy() -> bool:
    """Forget the policy of this thread, which every child inherits; whether the kernel did.

    vLLM binds its workers' memory to their CPUs' node.
    """
    nowhere = ctypes.c_void_p(None)
    return _call("set_mempolicy", None, ctypes.c_int(0), nowhere, ctypes.c_ulong(0)) == 0


def place(
    address: int, size: int, mode: str, root: Path = Path("/"), machine: str | None = None
) -> str:
    """Set the policy of a mapping whose pages are not there yet.

    Of a shared mapping in a memory file system it becomes the file's own.

    Args:
        address: of the mapping, at a page border.
        mode: `interleave`: over the nodes that have memory and CPUs. `bind`: only nodes of the CPUs
            that this process may run on. `local`: nothing is set.
        machine: as `platform.machine` names it; default: this one.
    Returns:
        Why the policy could not be set; empty if it is.
    Raises:
        PoolError: `bind`, and those nodes have too little memory. The kernel would kill processes.
    """
    if mode == "local":
        return ""
    nodes = nodes_for(mode, read_nodes(root), os.sched_getaffinity(0))
    if not nodes:
        return "the system names no NUMA node with memory for it"
    numbers = _nodes_text([node.number for node in nodes])
    available = sum(node.available for node in nodes)
    if mode == "bind" and size > available:
        raise PoolError(
            f"node.dram.numa: bind: the pool takes {approximate_size(size)}, and the memory of "
            f"the daemon's own CPUs ({numbers}) has {approximate_size(available)} available; "
            "lower node.dram.capacity, or set node.dram.numa to interleave"
        )
    mask = _Mask()
    for node in nodes:
        mask[node.number // 64] |= 1 << node.number % 64
    # The kernel takes one bit less than it is told.
    code = _call(
        "mbind", machine, ctypes.c_void_p(address), ctypes.c_ulong(size),
        ctypes.c_long(_MODES[mode]), ctypes.byref(mask), ctypes.c_ulong(_NODES_MAX + 1),
        ctypes.c_ulong(0),
    )  # fmt: skip
    return "" if code == 0 else f"the kernel refused it (mbind: {os.strerror(code)})"


def _call(name: str, machine: str | None, *arguments: object) -> int:
    """Make one call; 0, or the error's number."""
    number = _CALLS.get(machine or platform.machine(), {}).get(name)
    if number is None:
        return errno.ENOSYS
    if _libc.syscall(ctypes.c_long(number), *arguments) == 0:
        return 0
    return ctypes.get_errno()


def _policy_at(address: int) -> tuple[str, tuple[int, ...]] | None:
    """The policy for a page of ours, and its nodes; None if the kernel does not tell."""
    mode, mask = ctypes.c_int(), _Mask()
    code = _call(
        "get_mempolicy", None, ctypes.byref(mode), ctypes.byref(mask),
        ctypes.c_ulong(_NODES_MAX + 1), ctypes.c_void_p(address), ctypes.c_ulong(_F_ADDR),
    )  # fmt: skip
    if code:
        return None
    number = mode.value & _MODE_BITS
    name = _NAMES[number] if number < len(_NAMES) else f"policy {number}"
    words = enumerate(mask)
    return name, tuple(64 * at + bit for at, word in words for bit in range(64) if word >> bit & 1)


def _sampled(address: int, size: int, samples: int) -> npt.NDArray[np.uintp]:
    """Addresses of pages, one from each of equal parts, at a place in it that a dice says.

    At equal distances all of them could lie on one node of an even interleave.
    """
    first, end = address // mmap.PAGESIZE, -(-(address + size) // mmap.PAGESIZE)
    borders = np.linspace(first, end, min(samples, end - first) + 1).astype(np.int64)
    pages = np.random.default_rng(_SEED).integers(borders[:-1], borders[1:])
    return (pages * mmap.PAGESIZE).astype(np.uintp)


def where(address: int, size: int, samples: int = SAMPLES_MAX) -> tuple[dict[int, int], int] | None:
    """On which nodes pages lie, by a sample. Brings no page into memory.

    A page that this process has not touched counts as absent, whoever else has.

    Returns:
        (pages by node, pages absent); None if the kernel does not tell.
    """
    pages = _sampled(address, size, samples)
    status = np.full(len(pages), -errno.ENOENT, np.int32)
    code = _call(
        "move_pages", None, ctypes.c_long(0), ctypes.c_ulong(len(pages)),
        ctypes.c_void_p(pages.ctypes.data), ctypes.c_void_p(None),
        ctypes.c_void_p(status.ctypes.data), ctypes.c_long(0),
    )  # fmt: skip
    if code:
        return None
    counts = Counter(node for node in status.tolist() if node >= 0)
    return dict(sorted(counts.items())), len(pages) - counts.total()


def describe(address: int, size: int, asked: str, problem: str = "") -> Placement:
    """What the kernel tells about a mapping. Touches the sampled pages, so they must be allocated.

    Args:
        problem: what `place` returned.
    """
    for page in _sampled(address, size, SAMPLES_MAX).tolist():
        ctypes.c_ubyte.from_address(max(page, address)).value  # noqa: B018
    policy, found = _policy_at(address), where(address, size)
    in_force, nodes = policy or (None, ())
    pages, absent = found or ({}, 0)
    return Placement(asked, in_force, nodes, tuple(pages.items()), absent, problem)
