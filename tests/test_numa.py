"""On which NUMA nodes the pool lies: made-up machines, and this machine's kernel where it answers.

Where only one node is there, a policy can be seen in /proc/self/numa_maps, and its effect cannot.
"""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.numa_trees import KIB, make_node, make_status
from tierkv.errors import PoolError
from tierkv.numa import (
    Node,
    Placement,
    describe,
    drop_own_policy,
    nodes_for,
    place,
    read_nodes,
    where,
)
from tierkv.pool import HEADER_BYTES, attach_pool, create_pool

MIB = 1 << 20
TIB = 1 << 40
PAGE = mmap.PAGESIZE
WAIT_S = 60
SHARED_MEMORY = Path("/dev/shm")
EVERY_CPU = "0-4095"


def probe() -> Placement:
    """What this kernel tells about memory without a policy."""
    words = np.ones(PAGE, np.uint64)
    return describe(words.ctypes.data, words.nbytes, "local")


ANSWERS = probe().in_force is not None and SHARED_MEMORY.is_dir()
needs_kernel = pytest.mark.skipif(not ANSWERS, reason="this kernel tells no memory policy")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in a memory file system, where a file has a policy of its own."""
    with tempfile.TemporaryDirectory(prefix="tkv-numa-", dir=SHARED_MEMORY) as name:
        yield Path(name)


@pytest.fixture(autouse=True)
def no_policy():
    """A vLLM that ran in this process has left its own, which a `local` pool would follow."""
    drop_own_policy()


def policies_of(path: Path) -> list[str]:
    """Policies of this process's mappings of a file, as the kernel writes them: `bind:0`."""
    lines = Path("/proc/self/numa_maps").read_text().splitlines()
    return [line.split()[1] for line in lines if f"file={path}" in line.split()]


class Mapping:
    """A new file of some pages in a memory file system, mapped and not allocated."""

    def __init__(self, folder: Path, pages: int) -> None:
        self.path = folder / f"{pages}.file"
        with self.path.open("w+b") as file:
            file.truncate(pages * PAGE)
            self._map = mmap.mmap(file.fileno(), pages * PAGE)
        self.bytes = np.frombuffer(self._map, np.uint8)
        self.size = pages * PAGE
        self.address = int(self.bytes.ctypes.data)


# ---- what the machine has ----------------------------------------------------------------------


def test_nodes_with_memory_are_told_in_order_with_what_they_can_give(tmp_path):
    make_status(tmp_path, "0-15")
    make_node(tmp_path, 10, "8-11,14", 5000, free_kib=100, cache_kib=10)
    make_node(tmp_path, 2, "0-7", 4000, free_kib=200)
    assert read_nodes(tmp_path) == (
        Node(2, frozenset(range(8)), 4000 * KIB, 200 * KIB),
        Node(10, frozenset([8, 9, 10, 11, 14]), 5000 * KIB, 130 * KIB),
    )


def test_a_node_without_memory_or_outside_the_control_group_is_not_told(tmp_path):
    make_status(tmp_path, "0,2-3")
    for number, total in ((0, 1000), (1, 1000), (2, 0), (3, 1000)):
        make_node(tmp_path, number, str(number), total)
    assert [node.number for node in read_nodes(tmp_path)] == [0, 3]


@pytest.mark.parametrize("broken", ["meminfo", "cpulist"])
def test_what_cannot_be_read_is_no_error(tmp_path, broken):
    make_node(tmp_path, 0, "0", 1000)
    (tmp_path / "sys/devices/system/node/node0" / broken).write_text("\0 -,x- kB\nNode 0\n")
    nodes = read_nodes(tmp_path)
    assert [node.cpus for node in nodes] == ([] if broken == "meminfo" else [frozenset()])
    assert read_nodes(tmp_path / "nothing") == ()


def node(number: int, *cpus: int) -> Node:
    return Node(number, frozenset(cpus), MIB, MIB)


@pytest.mark.parametrize(
    ("mode", "nodes", "cpus", "expected"),
    [
        ("interleave", [node(0, 0), node(1, 1)], {0}, [0, 1]),
        ("interleave", [node(0, 0), node(1, 1), node(2)], {0}, [0, 1]),  # 2: of an accelerator
        ("interleave", [node(2), node(3)], {0}, [2, 3]),
        ("bind", [node(0, 0, 1), node(1, 2, 3)], {2}, [1]),
        ("bind", [node(0, 0, 1), node(1, 2, 3)], {1, 2}, [0, 1]),
        ("bind", [node(0, 0)], {5}, []),
        ("local", [node(0, 0)], {0}, []),
    ],
)
def test_the_nodes_that_a_mode_means(mode, nodes, cpus, expected):
    assert [found.number for found in nodes_for(mode, nodes, cpus)] == expected


# ---- setting a policy --------------------------------------------------------------------------


OWN_POLICY = """
import ctypes, pathlib, platform
from tierkv.numa import drop_own_policy
def own():
    lines = pathlib.Path("/proc/self/numa_maps").read_text().splitlines()
    return {line.split()[1] for line in lines if "heap" in line.split()}
number = {"x86_64": 238, "aarch64": 237}[platform.machine()]  # of set_mempolicy; 2 is bind
mask = (ctypes.c_ulong * 2)(1, 0)
code = ctypes.CDLL(None).syscall(number, 2, ctypes.byref(mask), ctypes.c_ulong(65))
print(code, own(), drop_own_policy(), own())
"""


@needs_kernel
def test_what_a_process_inherited_can_be_dropped():
    done = subprocess.run(
        [sys.executable, "-c", OWN_POLICY], capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[0] == "0 {'bind:0'} True {'default'}"


@needs_kernel
@pytest.mark.parametrize("mode", ["interleave", "bind", "local"])
def test_the_policy_is_that_of_the_file_whoever_maps_it(folder, mode):
    path = folder / "x.pool"
    owner = create_pool(path, MIB, MIB, numa=mode)
    engine = attach_pool(path)
    found = set(policies_of(path))
    assert len(policies_of(path)) == 2, "both mappings are seen"
    numbers = [n.number for n in nodes_for(mode, read_nodes(), os.sched_getaffinity(0))]
    assert owner.placement.in_force == mode
    assert owner.placement.problem == ""
    assert list(owner.placement.nodes) == numbers
    if mode == "local":
        assert found == {"default"}
    else:
        assert {text.partition(":")[0] for text in found} == {mode}
    assert owner.placement.absent == 0
    assert sum(count for _, count in owner.placement.pages) == MIB // PAGE
    assert not engine.bytes.any()


@needs_kernel
def test_pages_follow_the_policy_on_a_machine_of_several_nodes(folder):
    nodes = nodes_for("interleave", read_nodes(), os.sched_getaffinity(0))
    if len(nodes) < 2:
        pytest.skip("one node with memory and CPUs")
    pool = create_pool(folder / "x.pool", 4 * MIB, MIB, numa="interleave")
    assert not pool.bytes.any()  # every page is touched
    found = where(pool.address, pool.capacity, samples=1 << 20)
    assert found is not None
    pages, absent = found
    assert absent == 0
    assert set(pages) == {found.number for found in nodes}
    assert max(pages.values()) <= 1.5 * min(pages.values())


def test_the_policy_is_set_before_any_page_is_there(folder):
    """More than any node and any file system has: what is refused first, is done first."""
    if os.statvfs(folder).f_blocks == 0 or not nodes_for("bind", read_nodes(), {*range(4096)}):
        pytest.skip("nothing bounds shared memory here, or no node is shown")
    with pytest.raises(PoolError) as refused:
        create_pool(folder / "x.pool", 16 * TIB, MIB, numa="bind")
    assert "node.dram.numa: bind" in str(refused.value)
    assert list(folder.iterdir()) == [], "nothing stays behind"
    assert create_pool(folder / "x.pool", MIB, MIB, numa="bind").capacity == MIB


def test_a_pool_that_is_bound_to_too_little_memory_is_refused_with_key_and_figures(
    folder, tmp_path
):
    make_status(tmp_path)
    make_node(tmp_path, 3, EVERY_CPU, 9000, free_kib=1000, cache_kib=8)
    memory = Mapping(folder, 512)
    with pytest.raises(PoolError) as refused:
        place(memory.address, 2 * MIB, "bind", root=tmp_path)
    assert str(refused.value) == (
        "node.dram.numa: bind: the pool takes 2.0 MiB, and the memory of the daemon's own CPUs "
        "(node 3) has 1.0 MiB available; lower node.dram.capacity, or set node.dram.numa to "
        "interleave"
    )
    if ANSWERS:
        assert policies_of(memory.path) == ["default"]
    make_node(tmp_path, 3, EVERY_CPU, 9000, free_kib=2048)
    place(memory.address, 2 * MIB, "bind", root=tmp_path)  # what it says of node 3 is the kernel's
    make_node(tmp_path, 3, EVERY_CPU, 9000)
    place(memory.address, 2 * MIB, "interleave", root=tmp_path)  # others help out


def test_a_node_that_is_not_there_is_a_problem_and_no_error(folder, tmp_path):
    make_status(tmp_path)
    memory = Mapping(folder, 8)
    none = place(memory.address, memory.size, "interleave", root=tmp_path)
    assert none == "the system names no NUMA node with memory for it"
    make_node(tmp_path, 4095, EVERY_CPU, 9000, free_kib=9000)
    assert place(memory.address, memory.size, "bind", root=tmp_path).startswith(
        "the kernel refused"
    )
    assert place(memory.address, memory.size, "local", root=tmp_path) == ""


@needs_kernel
def test_a_processor_whose_calls_are_unknown_is_a_problem_and_no_error(folder):
    memory = Mapping(folder, 8)
    problem = place(memory.address, memory.size, "interleave", machine="vax")
    assert problem == "the kernel refused it (mbind: Function not implemented)"
    assert policies_of(memory.path) == ["default"]
    assert place(memory.address, memory.size, "interleave") == "", "the negative control"
    assert policies_of(memory.path) != ["default"]


# A filter as containers have it: three calls give EPERM, everything else is allowed.
REFUSING = """
import ctypes, json, logging, platform, struct, sys
from pathlib import Path
CALLS = {"x86_64": (237, 239, 279), "aarch64": (235, 236, 239)}[platform.machine()]
LOAD, JUMP_IF, RETURN = 0x20, 0x15, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | 1
code = [(LOAD, 0, 0, 0)]
for left, number in enumerate(reversed(CALLS)):
    code.insert(1, (JUMP_IF, left + 1, 0, number))
code += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in code))
program = struct.pack("H6xQ", len(code), ctypes.addressof(packed))
libc = ctypes.CDLL(None, use_errno=True)
if sys.argv[2] == "refuse":
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    if libc.prctl(22, 2, program, 0, 0) != 0:
        sys.exit("no filters here")
logging.basicConfig(format="%(levelname)s %(message)s", level=logging.INFO)
from tierkv.config import DramConfig, NodeConfig, ServiceConfig
from tierkv.service.daemon import prepare_pool
folder = Path(sys.argv[1])
pool = prepare_pool(NodeConfig(
    dram=DramConfig(capacity=1 << 20, directory=folder, extent_unit=1 << 20),
    service=ServiceConfig(socket=folder / "d.sock"),
))
pool.bytes[:] = 1
pool.unlink()
print(json.dumps(pool.placement.tree()))
"""


def start_pool(folder: Path, how: str) -> tuple[dict, list[str]]:
    """Placement, and log lines, of a daemon's pool in a process of its own."""
    run = subprocess.run(
        [sys.executable, "-c", REFUSING, str(folder), how],
        capture_output=True, text=True, timeout=WAIT_S, check=False,
    )  # fmt: skip
    if "no filters here" in run.stderr:
        pytest.skip("this kernel has no filters for calls")
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout), run.stderr.splitlines()


@needs_kernel
def test_calls_that_a_container_refuses_are_one_warning_and_a_pool_that_works(folder):
    tree, log = start_pool(folder, "refuse")
    assert tree == {
        "asked": "interleave", "in_force": None, "nodes": [], "pages_by_node": {},
        "pages_absent": 0,
        "problem": "the kernel refused it (mbind: Operation not permitted)",
    }  # fmt: skip
    assert [line for line in log if line.startswith("WARNING")] == [
        "WARNING node.dram.numa: the pool is not placed as asked (interleave): the kernel refused "
        "it (mbind: Operation not permitted)"
    ]
    assert any("numa=unknown nodes=unknown" in line for line in log)


@needs_kernel
def test_calls_that_are_not_refused_are_no_warning(folder):
    tree, log = start_pool(folder, "allow")
    assert tree["in_force"] == "interleave"
    assert sum(tree["pages_by_node"].values()) == MIB // PAGE
    assert [line for line in log if line.startswith("WARNING")] == []
    assert any("numa=interleave nodes=" in line for line in log)


@needs_kernel
def test_an_adopted_pool_keeps_its_policy_and_says_so(folder):
    path = folder / "x.pool"
    create_pool(path, MIB, MIB, numa="local").close()
    other = create_pool(path, MIB, MIB, numa="interleave")
    assert other.was_adopted
    assert other.placement.in_force == "local"
    assert other.placement.problem == "an adopted pool keeps the policy that it was made with"
    assert set(policies_of(path)) == {"default"}
    other.close()
    assert create_pool(path, MIB, MIB, numa="local").placement.problem == ""


@needs_kernel
def test_a_file_system_without_policies_is_told(tmp_path):
    lines = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    device = tmp_path.stat().st_dev
    mine = f"{os.major(device)}:{os.minor(device)}"
    kinds = {line[line.index("-") + 1] for line in lines if line[2] == mine}
    if not kinds & {"ext4", "xfs", "btrfs"}:
        pytest.skip("temporary files lie on no disk, or on one whose ways are not known")
    pool = create_pool(tmp_path / "x.pool", MIB, MIB, numa="interleave")
    assert pool.placement.in_force == "local"
    assert pool.placement.problem == (
        f"the file system of {tmp_path} sets a policy of its own, or none"
    )
    assert create_pool(tmp_path / "y.pool", MIB, MIB, numa="local").placement.problem == ""


# ---- asking where pages lie --------------------------------------------------------------------


@needs_kernel
def test_pages_that_are_not_there_are_absent_and_stay_so(folder):
    memory = Mapping(folder, 64)
    for _ in range(2):
        assert where(memory.address, memory.size) == ({}, 64)
    assert memory.path.stat().st_blocks == 0, "nothing was allocated"
    memory.bytes[: memory.size // 2] = 1
    found = where(memory.address, memory.size)
    assert found is not None
    assert (sum(found[0].values()), found[1]) == (32, 32)
    assert set(found[0]) <= {node.number for node in read_nodes()}


@needs_kernel
@pytest.mark.parametrize("period", [2, 4, 8, 16])
def test_a_sample_is_not_led_astray_by_an_even_pattern(folder, period):
    """Every other page is there, as it lies on one of two nodes in an interleaved pool."""
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text():
        pytest.skip("pages of shared memory may be huge here")
    memory = Mapping(folder, 8192)
    memory.bytes[:: period * PAGE] = 1
    found = where(memory.address, memory.size, samples=256)
    assert found is not None
    present = sum(found[0].values())
    assert present + found[1] == 256
    assert 0.5 < present / (256 / period) < 1.5


@needs_kernel
def test_a_piece_smaller_than_the_sample_is_looked_at_page_by_page(folder):
    memory = Mapping(folder, 3)
    memory.bytes[PAGE] = 1
    found = where(memory.address, memory.size)
    assert found is not None
    assert (sum(found[0].values()), found[1]) == (1, 2)
    inside = where(memory.address + PAGE + 5, 10)
    assert inside is not None
    assert (sum(inside[0].values()), inside[1]) == (1, 0)


# ---- telling it --------------------------------------------------------------------------------

TOLD = [
    (
        Placement("interleave", "interleave", (0, 1), ((0, 130), (1, 126))),
        "interleave over nodes 0, 1; of 256 sampled pages 130 on node 0, 126 on node 1",
    ),
    (Placement("bind", "bind", (3,), (), 8), "bind over node 3; of 8 sampled pages 8 absent"),
    (Placement("local", "local"), "local"),
    (Placement("bind", problem="no"), "unknown; asked bind: no"),
]


@pytest.mark.parametrize(("placement", "text"), TOLD)
def test_a_placement_is_told_in_one_line_and_survives_json(placement, text):
    assert placement.text() == text
    again = Placement.from_tree(json.loads(json.dumps(placement.tree())))
    assert again == placement
    assert again != Placement("interleave", "local")


def test_the_header_is_part_of_what_is_placed():
    assert HEADER_BYTES % PAGE == 0, "a policy begins at a page border"
