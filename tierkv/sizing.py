"""How large the pool may be: measured facts, one rule, a clear refusal."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from tierkv.errors import ConfigError
from tierkv.units import approximate_size

AUTO_SHARE = 0.25
RESERVE_SHARE = 0.05
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Memory of the node in bytes, as far as this process may use it.

    Attributes:
        available: memory that can be had without swapping.
        container_limit: free part of the smallest control-group limit; None if unlimited.
        directory_free: free space of the file system of the pool file.
        reusable: bytes of a pool file that is already there; they count as free.
    """

    available: int
    container_limit: int | None
    directory_free: int
    reusable: int = 0


def _available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ConfigError("/proc/meminfo tells no MemAvailable; set node.dram.capacity")


def _number_in(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and int(text) < 1 << 60 else None


def _container_free(root: Path) -> int | None:
    """Smallest (limit - usage) on the way from this process's control group to the root."""
    base = root / "sys/fs/cgroup"
    group = ""
    try:
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            is_memory = "memory" in controllers.split(",")
            if is_memory or (number == "0" and not group):
                group = path
            if is_memory:
                break
    except (OSError, ValueError):
        group = "/"
    names = (("memory.max", "memory.current"),
             ("memory.limit_in_bytes", "memory.usage_in_bytes"))  # fmt: skip
    found: list[int] = []
    for top in (base, base / "memory"):
        at = top / group.strip("/")
        for folder in [at, *at.parents]:
            if top != folder and top not in folder.parents:
                break
            for limit_name, usage_name in names:
                limit = _number_in(folder / limit_name)
                if limit is not None:
                    found.append(limit - (_number_in(folder / usage_name) or 0))
    return min(found) if found else None


def read_memory_facts(directory: Path, pool: Path, root: Path = Path("/")) -> MemoryFacts:
    """Measure what the pool may use.

    Raises:
        ConfigError: the directory is not there.
    """
    try:
        room = os.statvfs(directory)
    except OSError as error:
        raise ConfigError(
            f"node.dram.directory: {directory}: {error.strerror}; create it or name another"
        ) from error
    reusable = pool.stat().st_blocks * 512 if pool.exists() else 0
    return MemoryFacts(
        _available(root), _container_free(root), room.f_bavail * room.f_frsize, reusable
    )


def resolve_capacity(configured: int | str, facts: MemoryFacts) -> int:
    """The pool's size in bytes.

    Raises:
        ConfigError: it does not fit; says by how much and what to do.
    """
    usable = int((facts.available + facts.reusable) * (1 - RESERVE_SHARE))
    bounds = [
        (usable, "available memory less a reserve of 5 %", "free memory"),
        (facts.directory_free + facts.reusable, "free shared memory in node.dram.directory",
         "enlarge it (mount -o remount,size=..., or --shm-size of the container)"),
    ]  # fmt: skip
    if facts.container_limit is not None:
        limit = max(0, facts.container_limit + facts.reusable)
        bounds.append((limit, "the container's memory limit", "raise the limit"))
    if configured == "auto":
        whole = facts.available + facts.reusable
        if facts.container_limit is not None:
            whole = min(whole, max(0, facts.container_limit + facts.reusable))
        size = min(int(whole * AUTO_SHARE), *(b[0] for b in bounds)) // MIB * MIB
        if size == 0:
            raise ConfigError(
                "node.dram.capacity: auto finds no room: "
                + "; ".join(f"{name} is {approximate_size(bound)}" for bound, name, _ in bounds)
                + "; free memory or give a size"
            )
        return size
    size = int(configured)
    for bound, name, remedy in bounds:
        if size > bound:
            raise ConfigError(
                f"node.dram.capacity: {approximate_size(size)} is more than {name} "
                f"({approximate_size(bound)}); lower it or {remedy}"
            )
    return size
