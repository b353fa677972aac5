"""How large the pool may be: the facts are measured, the rule is one, a refusal says what to do."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.pool import HEADER_BYTES, create_pool
from tierkv.sizing import MemoryFacts, read_memory_facts, resolve_capacity

MIB = 1 << 20
GIB = 1 << 30
UNLIMITED_V1 = (1 << 63) - mmap.PAGESIZE


def node(
    root: Path, available: int = 100 * GIB, cgroup: str = "0::/\n", files: dict | None = None
) -> Path:
    """A tree that looks like the root of a node."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        f"MemTotal:       {4 * available // 1024} kB\nMemFree: 5 kB\n"
        f"MemAvailable:   {available // 1024} kB\n"
    )
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, value in (files or {}).items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return root


def facts_of(root: Path, pool: Path | None = None) -> MemoryFacts:
    return read_memory_facts(root, pool or root / "no.pool", root)


def refusal(size: int, facts: MemoryFacts) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve_capacity(size, facts)
    return str(caught.value)


# ---- facts -------------------------------------------------------------------------------------


def test_available_memory_comes_from_meminfo(tmp_path):
    facts = facts_of(node(tmp_path, available=7 * GIB))
    assert facts.available == 7 * GIB
    assert facts.container_limit is None
    assert facts.reusable == 0
    room = os.statvfs(tmp_path)
    assert 0 < facts.directory_free <= room.f_blocks * room.f_frsize


def test_a_meminfo_without_the_number_is_refused_with_the_remedy(tmp_path):
    root = node(tmp_path)
    (root / "proc/meminfo").write_text("MemTotal: 5 kB\n")
    with pytest.raises(ConfigError, match=r"MemAvailable; set node\.dram\.capacity"):
        facts_of(root)


def test_a_directory_that_is_not_there_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"node\.dram\.directory: .*gone.*create it"):
        read_memory_facts(tmp_path / "gone", tmp_path / "no.pool", node(tmp_path / "root"))


def test_the_limit_of_a_version_2_group_counts_less_its_use(tmp_path):
    files = {"a/memory.max": 8 * GIB, "a/memory.current": 3 * GIB}
    assert facts_of(node(tmp_path, cgroup="0::/a\n", files=files)).container_limit == 5 * GIB


def test_the_limit_of_a_version_1_group_counts_less_its_use(tmp_path):
    files = {
        "memory/a/memory.limit_in_bytes": 8 * GIB,
        "memory/a/memory.usage_in_bytes": 3 * GIB,
        "memory/memory.limit_in_bytes": UNLIMITED_V1,
    }
    cgroup = "5:cpu,cpuacct:/elsewhere\n4:memory:/a\n1:name=systemd:/b\n"
    assert facts_of(node(tmp_path, cgroup=cgroup, files=files)).container_limit == 5 * GIB


def test_a_version_1_group_counts_beside_an_empty_version_2_tree(tmp_path):
    """Many systems mount both: the memory controller is version 1, and `0::/` stands below it."""
    files = {"memory/a/memory.limit_in_bytes": 8 * GIB, "memory/a/memory.usage_in_bytes": 3 * GIB}
    cgroup = "4:memory:/a\n1:cpu:/\n0::/\n"
    assert facts_of(node(tmp_path, cgroup=cgroup, files=files)).container_limit == 5 * GIB


@pytest.mark.parametrize("tight", ["a", "a/b", "a/b/c"])
def test_the_tightest_of_nested_groups_counts(tmp_path, tight):
    files = {f"{name}/memory.max": 64 * GIB for name in ("a", "a/b", "a/b/c")}
    files |= {f"{name}/memory.current": GIB for name in ("a", "a/b", "a/b/c")}
    files[f"{tight}/memory.max"] = 4 * GIB
    root = node(tmp_path, cgroup="0::/a/b/c\n", files=files)
    assert facts_of(root).container_limit == 3 * GIB


def test_groups_beside_the_way_to_the_root_do_not_count(tmp_path):
    files = {"a/memory.max": 8 * GIB, "a/b/memory.max": "max", "z/memory.max": GIB}
    assert facts_of(node(tmp_path, cgroup="0::/a/b\n", files=files)).container_limit == 8 * GIB


def test_inside_a_container_the_limit_stands_at_the_top(tmp_path):
    """Without a group namespace the path names a group that the container cannot see."""
    files = {"memory/memory.limit_in_bytes": 2 * GIB, "memory/memory.usage_in_bytes": GIB}
    root = node(tmp_path, cgroup="4:memory:/docker/0123\n", files=files)
    assert facts_of(root).container_limit == GIB


@pytest.mark.parametrize(
    "files", [{}, {"a/memory.max": "max"}, {"memory/a/memory.limit_in_bytes": UNLIMITED_V1}]
)
def test_no_limit_is_no_bound(tmp_path, files):
    cgroup = "4:memory:/a\n" if "memory/a/memory.limit_in_bytes" in files else "0::/a\n"
    assert facts_of(node(tmp_path, cgroup=cgroup, files=files)).container_limit is None


def test_a_system_without_control_groups_has_no_limit(tmp_path):
    root = node(tmp_path)
    (root / "proc/self/cgroup").unlink()
    assert facts_of(root).container_limit is None


def test_memory_of_a_pool_that_is_already_there_is_reusable(tmp_path):
    root = node(tmp_path)
    create_pool(tmp_path / "x.pool", 8 * MIB, MIB).close()
    reusable = facts_of(root, tmp_path / "x.pool").reusable
    assert 8 * MIB + HEADER_BYTES <= reusable <= 9 * MIB


# ---- the rule ----------------------------------------------------------------------------------

PLENTY = 1 << 50


@pytest.mark.parametrize("available", [100 * GIB, 7 * GIB, 1000 * MIB])
def test_auto_is_a_quarter_of_the_available_memory(available):
    facts = MemoryFacts(available, None, PLENTY)
    assert resolve_capacity("auto", facts) == available // 4 // MIB * MIB


def test_auto_is_a_quarter_of_what_the_container_leaves():
    """All of it would leave nothing for the engine that the pool is for."""
    facts = MemoryFacts(available=1000 * GIB, container_limit=64 * GIB, directory_free=PLENTY)
    assert 0 < resolve_capacity("auto", facts) <= 16 * GIB


def test_auto_fits_the_directory():
    facts = MemoryFacts(available=1000 * GIB, container_limit=None, directory_free=64 * MIB)
    assert 0 < resolve_capacity("auto", facts) <= 64 * MIB


def test_auto_is_the_same_again_when_the_pool_is_already_there():
    before = MemoryFacts(100 * GIB, 80 * GIB, 50 * GIB)
    size = resolve_capacity("auto", before)
    after = MemoryFacts(100 * GIB - size, 80 * GIB - size, 50 * GIB - size, reusable=size)
    assert resolve_capacity("auto", after) == size


@pytest.mark.parametrize(
    "facts",
    [
        MemoryFacts(available=100 * GIB, container_limit=None, directory_free=0),
        MemoryFacts(available=100 * GIB, container_limit=0, directory_free=PLENTY),
        MemoryFacts(available=100 * GIB, container_limit=-GIB, directory_free=PLENTY),
        MemoryFacts(available=MIB, container_limit=None, directory_free=PLENTY),
    ],
)
def test_auto_without_room_for_any_pool_is_refused(facts):
    with pytest.raises(ConfigError, match=r"node\.dram"):
        resolve_capacity("auto", facts)


def test_a_size_that_fits_is_taken_exactly():
    assert resolve_capacity(3 * GIB + 5, MemoryFacts(8 * GIB, 8 * GIB, 8 * GIB)) == 3 * GIB + 5


def test_a_size_at_the_bound_is_taken_and_one_byte_more_is_not():
    facts = MemoryFacts(100 * GIB, None, 4 * GIB)
    assert resolve_capacity(4 * GIB, facts) == 4 * GIB
    refusal(4 * GIB + 1, facts)


def test_more_than_the_available_memory_is_refused_with_the_remedy():
    message = refusal(9600 * MIB, MemoryFacts(10_000 * MIB, None, PLENTY))
    assert message.startswith("node.dram.capacity: 9.4 GiB is more than available memory")
    assert "9.3 GiB" in message
    assert "lower it or free memory" in message


def test_more_than_the_directory_holds_is_refused_with_the_remedy():
    message = refusal(2 * GIB, MemoryFacts(100 * GIB, None, 64 * MIB))
    assert "node.dram.capacity: 2.0 GiB is more than free shared memory" in message
    assert "(64.0 MiB)" in message
    assert "lower it or enlarge it (mount -o remount,size=" in message
    assert "--shm-size" in message


def test_more_than_the_container_may_use_is_refused_with_the_remedy():
    message = refusal(2 * GIB, MemoryFacts(100 * GIB, GIB, PLENTY))
    assert "2.0 GiB is more than the container's memory limit (1.0 GiB)" in message
    assert "lower it or raise the limit" in message


def test_a_container_that_is_over_its_limit_leaves_nothing():
    message = refusal(1, MemoryFacts(100 * GIB, -GIB, PLENTY))
    assert "(0 B)" in message


@pytest.mark.parametrize("bound", ["memory", "directory", "container"])
def test_a_reusable_pool_counts_as_free(bound):
    scarce = {
        "memory": (0, None, PLENTY),
        "directory": (100 * GIB, None, 0),
        "container": (100 * GIB, 0, PLENTY),
    }[bound]
    refusal(GIB, MemoryFacts(*scarce))
    assert resolve_capacity(GIB, MemoryFacts(*scarce, reusable=2 * GIB)) == GIB


def test_this_machine_has_room_for_a_small_pool(tmp_path):
    facts = read_memory_facts(tmp_path, tmp_path / "no.pool")
    assert facts.available > 0
    assert facts.directory_free > 0
    assert facts.reusable == 0
    assert resolve_capacity(4 * MIB, facts) == 4 * MIB
    size = resolve_capacity("auto", facts)
    assert 0 < size <= facts.available // 4
    assert size % MIB == 0
