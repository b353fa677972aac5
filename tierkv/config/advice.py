"""What a configuration may say and nobody should want, as one line each with the remedy.

None of it is an error: everything starts and serves. What depends on the traffic is not judged
here, and what is a matter of taste neither.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from tierkv.config.models import NodeConfig, TierConfig, TierKVConfig
from tierkv.units import approximate_size, format_duration, format_share, format_size

PINNED_SHARE_WISE = 0.9
EXTENTS_WISE = 12
EXTENT_MIN = 4096  # what the key allows
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")  # how blanks are written there
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")


def warnings_of(config: TierKVConfig) -> list[str]:
    """What is unwise in a whole configuration; sizes that only a machine can tell are left out."""
    return [*node_warnings(config.node), *_of_engine(config)]


def node_warnings(node: NodeConfig, dram_bytes: int | None = None) -> list[str]:
    """What is unwise in the daemon's part.

    Args:
        dram_bytes: size of the pool if it is known; otherwise the configured one counts.
    """
    configured = node.dram.capacity
    if dram_bytes is None and isinstance(configured, int):
        dram_bytes = configured
    found = [*_of_dram(node, dram_bytes), *_of_sizes(node, dram_bytes)]
    for at, tier in enumerate(node.tiers):
        found += _of_tier(node, tier, f"node.tiers[{at}]")
    return found


def _policy_of(node: NodeConfig, tier: TierConfig) -> str:
    return tier.write_policy or node.write_policy


def _of_dram(node: NodeConfig, size: int | None) -> Iterator[str]:
    dram = node.dram
    if dram.pinned_share_max > PINNED_SHARE_WISE:
        yield (
            f"node.dram.pinned_share_max ({format_share(dram.pinned_share_max)}) lets waiting "
            "requests pin nearly all of DRAM, and new blocks find no room; set "
            f"{format_share(PINNED_SHARE_WISE)} or less"
        )
    has_write_back = any(_policy_of(node, tier) == "write_back" for tier in node.tiers)
    if has_write_back and dram.clean_tail >= dram.dirty_max:
        yield (
            f"node.dram.clean_tail ({format_share(dram.clean_tail)}) is not below "
            f"node.dram.dirty_max ({format_share(dram.dirty_max)}): write_back then writes nearly "
            "as much as write_through; lower clean_tail, or choose write_through"
        )
    if (
        size is not None
        and size // EXTENTS_WISE >= EXTENT_MIN < dram.extent_unit
        and (dram.extent_unit * EXTENTS_WISE > size)
    ):
        pieces = max(1, size // dram.extent_unit)
        yield (
            f"node.dram.extent_unit ({format_size(dram.extent_unit)}) divides DRAM "
            f"({approximate_size(size)}) into {pieces} piece{'s' if pieces > 1 else ''}: models "
            f"cannot share it well; set {approximate_size(size // EXTENTS_WISE)} or less"
        )
    kind = _file_system_of(dram.directory)
    if kind is not None and kind not in _IN_MEMORY:
        yield (
            f"node.dram.directory ({dram.directory}) lies on {kind}, which is no memory file "
            "system: the kernel writes the pool to that disk; name /dev/shm"
        )


def _of_sizes(node: NodeConfig, dram_bytes: int | None) -> Iterator[str]:
    """Each tier against the nearest one above it whose size is known."""
    above, above_bytes = "node.dram.capacity", dram_bytes
    for at, tier in enumerate(node.tiers):
        size = tier.capacity
        if not isinstance(size, int):
            continue
        key = f"node.tiers[{at}].capacity"
        if above_bytes is not None and size <= above_bytes:
            yield (
                f"{key} ({tier.type}, {approximate_size(size)}) is not above {above} "
                f"({approximate_size(above_bytes)}): it holds little that is not there already; "
                "give it several times as much"
            )
        above, above_bytes = key, size


def _of_tier(node: NodeConfig, tier: TierConfig, key: str) -> Iterator[str]:
    policy = _policy_of(node, tier)
    if tier.type == "memory":
        yield (
            f"{key}.type (memory) keeps blocks in DRAM a second time and loses them with its "
            "process; it is for tests: raise node.dram.capacity instead"
        )
    elif policy == "write_back" and node.service.flush_budget == 0:
        yield (
            f"node.service.flush_budget (0s) lets the daemon end without writing what write_back "
            f"owes to {key} ({tier.type}); give it some seconds, or choose write_through"
        )
    if policy == "write_through_selective" and tier.hits_min == 1:
        yield (
            f"{key}.hits_min (1) makes write_through_selective write every block at once, as "
            "write_through does; choose that, or set 2 or more"
        )
    kind = _file_system_of(tier.path) if tier.type == "fs" and tier.path is not None else None
    if kind in _IN_MEMORY:
        yield (
            f"{key}.path ({tier.path}) lies on {kind}, a memory file system: blocks take DRAM "
            "twice and are lost with the machine; name a directory on a disk"
        )


def _of_engine(config: TierKVConfig) -> Iterator[str]:
    engine, tiers = config.engine, config.node.tiers
    if engine.block_tokens is not None and 0 < engine.swap_in_threshold < engine.block_tokens:
        yield (
            f"engine.swap_in_threshold ({engine.swap_in_threshold}) is below engine.block_tokens "
            f"({engine.block_tokens}), and nearly every hit brings a whole block: it has hardly "
            "an effect; set 0 for always, or the tokens of some blocks"
        )
    wait = format_duration(engine.promote_wait_max)
    if tiers and engine.promote_wait_max == 0:
        yield (
            f"engine.promote_wait_max ({wait}) lets no request wait for a tier: what comes up "
            "serves later requests only; set for example 1s"
        )
    elif {tier.type for tier in tiers} == {"object"}:
        deadline_s = tiers[0].deadline_s
        if engine.promote_wait_max < deadline_s:
            yield (
                f"engine.promote_wait_max ({wait}) is below node.tiers[0].deadline "
                f"({format_duration(deadline_s)}), and an object store is the only tier: requests "
                "will often go on without what it is still sending; raise promote_wait_max, or put "
                "a tier of type fs before it"
            )


def _file_system_of(path: Path) -> str | None:
    """Type of the file system that a path lies on, or will; None if that cannot be told.

    The list of mounts alone is read, and no link followed: whoever looks at a path waits for ever
    where the server of a network file system is away.
    """
    try:
        lines = _MOUNTS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    place = Path(os.path.normpath(path))
    found, depth = None, 0
    for line in lines:
        mount, _, file_system = line.partition(" - ")
        point = Path(_OCTAL.sub(lambda match: chr(int(match[1], 8)), mount.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= depth:  # the last mount is on top
            found, depth = file_system.split()[0], len(point.parts)
    return found
