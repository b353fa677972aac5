"""``tierkv check``, ``tierkv doctor`` and ``tierkv purge``."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierkv.cli.session import (
    ANSWER_WAIT_S,
    admin_client,
    daemon_options,
    file_option,
    json_option,
    parse_seconds,
    read_config,
    socket_option,
)
from tierkv.cli.stats import copies_text

if TYPE_CHECKING:
    from tierkv.config import NodeConfig
    from tierkv.host_facts import HostFacts
    from tierkv.numa import Node, Placement
    from tierkv.service.client import Client

TASK_WAIT_S = 120.0  # tiers walk their stores; the daemon gives up on one that is down long before


@click.command()
@daemon_options
@json_option
def check(socket: Path, as_json: bool) -> int:
    """Let the daemon and its tiers audit their books; exit code 1 if they are wrong.

    While DRAM's books are recomputed the daemon answers nobody, seconds per 100,000 blocks; engines
    compute instead. Tiers are audited beside their work.
    """
    from tierkv.errors import DaemonUnavailableError
    from tierkv.service import wire

    with admin_client(socket) as client:
        try:
            with _waiting("the daemon and its tiers audit their books"):
                reply = client.ask(wire.Check, TASK_WAIT_S)
        except DaemonUnavailableError as error:
            raise DaemonUnavailableError(f"check failed: {error}") from error
        assert isinstance(reply, wire.CheckedReply), "the daemon answers Check with CheckedReply"
    if as_json:
        click.echo(json.dumps({"blocks": reply.blocks, "problems": reply.problems}))
    elif not reply.problems:
        click.echo(f"ok: {_blocks(reply.blocks)}")
    return _tell_problems(reply.problems)


@click.command()
@socket_option
@file_option
@json_option
def doctor(socket: Path | None, file: Path | None, as_json: bool) -> None:
    """Show what of this machine decides how fast blocks move, and what takes the place of what.

    Starts and changes nothing. Without a daemon it tells where the pool of one that is started from
    here would lie.
    """
    from tierkv.host_facts import read_host_facts, what_falls_back, what_is_far
    from tierkv.numa import read_nodes

    config = read_config(file).node
    path = socket.absolute() if socket is not None else config.service.socket_path
    facts, nodes = read_host_facts(), read_nodes()
    pool = _running_pool(path) or _planned_pool(config, path, nodes)
    placement = pool.placement
    lies_on = [node for node, _ in placement.pages] or list(placement.nodes)
    warnings = [
        *pool.warnings,
        *what_falls_back(facts, pool.capacity),
        *what_is_far(facts.accelerators, placement.in_force or placement.asked, lies_on),
    ]
    if as_json:
        machine = _machine_tree(facts, nodes)
        click.echo(json.dumps({**machine, "pool": pool.tree(), "warnings": warnings}))
        return
    for name, text in (*_machine_rows(facts, nodes), ("pool", pool.text()), *pool.copies()):
        click.echo(f"{name:<16}{text}")
    for text in warnings:
        click.echo(f"warning: {text}", err=True)


@dataclass(frozen=True, slots=True)
class _PoolHere:
    """The pool of the daemon, or of one that were started from here. `capacity`: in bytes."""

    capacity: int | None
    placement: Placement
    is_running: bool
    warnings: Sequence[str] = ()
    devices: Sequence[dict[str, Any]] = ()

    def tree(self) -> dict[str, object]:
        return {
            "capacity": self.capacity,
            "is_running": self.is_running,
            "placement": self.placement.tree(),
            "devices": list(self.devices),
        }

    def copies(self) -> list[tuple[str, str]]:
        """How the engines that are connected copy, a row per rank."""
        return [("copies", f"{d['device']}, {copies_text(d)}") for d in self.devices]

    def text(self) -> str:
        if self.is_running:
            return self.placement.text()
        nodes = ", ".join(map(str, self.placement.nodes)) or "unknown"
        return f"no daemon answers; {self.placement.asked} from here means numa node {nodes}"


def _running_pool(socket: Path) -> _PoolHere | None:
    from tierkv.errors import DaemonUnavailableError
    from tierkv.numa import Placement

    try:
        with admin_client(socket) as client:
            tree = _stats_of(client)
    except DaemonUnavailableError:
        return None
    placement = Placement.from_tree(tree["placement"])
    devices = tree["devices"]
    problems = [
        placement.problem,
        *(f"{d['device']}: {d['problem']}" for d in devices if d["problem"]),
    ]
    return _PoolHere(tree["capacity"], placement, True, list(filter(None, problems)), devices)


def _planned_pool(config: NodeConfig, socket: Path, nodes: Sequence[Node]) -> _PoolHere:
    from tierkv.errors import ConfigError
    from tierkv.numa import Placement, nodes_for
    from tierkv.pool import pool_path
    from tierkv.sizing import read_memory_facts, resolve_capacity

    dram = config.dram
    # Without a policy the kernel takes memory next to the CPU that asks for it.
    mode = "bind" if dram.numa == "local" else dram.numa
    chosen = nodes_for(mode, nodes, os.sched_getaffinity(0))
    placement = Placement(dram.numa, nodes=tuple(node.number for node in chosen))
    warnings = []
    if dram.numa == "bind" and config.service.mode == "auto" and len(nodes) > 1:
        warnings.append(
            "node.dram.numa is bind, and a daemon that an engine starts may run on all CPUs, so "
            "that bind means all nodes; start it by `tierkv serve` on the CPUs that you mean, and "
            "set node.service.mode to external"
        )
    try:
        facts = read_memory_facts(dram.directory, pool_path(dram.directory, socket))
        capacity = resolve_capacity(dram.capacity, facts)
    except ConfigError as error:
        return _PoolHere(None, placement, False, [*warnings, str(error)])
    return _PoolHere(capacity, placement, False, warnings)


def _machine_tree(facts: HostFacts, nodes: Sequence[Node]) -> dict[str, object]:
    return {
        "kernel": facts.kernel,
        "memlock_bytes": facts.memlock_bytes,
        "may_lock_all": facts.may_lock_all,
        "ascend_driver": facts.ascend_driver,
        "nvidia_driver": facts.nvidia_driver,
        "numa_nodes": [
            {"node": n.number, "cpus": len(n.cpus), "bytes": n.total, "available": n.available}
            for n in nodes
        ],
        "accelerators": [
            {"address": device.address, "kind": device.kind, "numa_node": device.node}
            for device in facts.accelerators
        ],
    }


def _machine_rows(facts: HostFacts, nodes: Sequence[Node]) -> list[tuple[str, str]]:
    from tierkv.units import approximate_size

    limit = "unlimited" if facts.memlock_bytes is None else approximate_size(facts.memlock_bytes)
    lock = f"{limit}, lifted by CAP_IPC_LOCK" if facts.may_lock_all else limit
    rows = [
        ("kernel", facts.kernel or "unknown"),
        ("memlock", lock),
        ("ascend driver", facts.ascend_driver or "none found"),
        ("nvidia driver", facts.nvidia_driver or "none found"),
    ]
    rows += [
        (
            f"numa node {node.number}",
            f"{approximate_size(node.total)}, {approximate_size(node.available)} available, "
            f"{len(node.cpus)} CPUs",
        )
        for node in nodes
    ] or [("numa nodes", "the system shows none")]
    rows += [
        (
            "accelerator",
            f"{device.kind} {device.address}, numa node "
            f"{'unknown' if device.node is None else device.node}",
        )
        for device in facts.accelerators
    ] or [("accelerators", "none on the PCI bus")]
    return rows


def _hex(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    if text is not None and re.fullmatch("[0-9a-f]{1,64}", text.lower()) is None:
        raise click.BadParameter(f"{text!r} are not 1 to 64 hexadecimal digits")
    return text.lower() if text is not None else None


def _tiers(
    _context: click.Context, _option: click.Parameter, names: tuple[str, ...]
) -> tuple[str, ...]:
    from tierkv.plugins import known_tiers

    known = ["dram", *known_tiers()] if names else []
    for name in names:
        if name not in known:
            raise click.BadParameter(f"'{name}' is not one of {', '.join(known)}")
    return names


@click.command()
@daemon_options
@click.option(
    "--namespace",
    metavar="HEX",
    callback=_hex,
    help="Leading digits of one namespace, as `tierkv stats` shows them.",
)
@click.option("--all", "is_all", is_flag=True, help="All namespaces.")
@click.option(
    "--tier",
    "tiers",
    metavar="NAME",
    callback=_tiers,
    multiple=True,
    help="Only in this tier; may be repeated. Default: in all.",
)
@click.option(
    "--older-than",
    "age_s",
    metavar="DURATION",
    callback=parse_seconds,
    help="Only blocks that were not used for this time, for example 12h.",
)
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@json_option
def purge(
    *,
    socket: Path,
    namespace: str | None,
    is_all: bool,
    tiers: tuple[str, ...],
    age_s: float | None,
    is_sure: bool,
    as_json: bool,
) -> int:
    """Drop blocks of one namespace, or of all, in DRAM and in the tiers below.

    Requests that are reading blocks now still read the right bytes.
    """
    from tierkv.service import wire

    if (namespace is None) != is_all:
        raise click.UsageError("Give either --namespace or --all.")
    prefix, names, age_s = namespace or "", list(dict.fromkeys(tiers)), age_s or 0.0
    with admin_client(socket) as client:
        if not is_sure:
            _ask_user(_question(_stats_of(client), prefix, names, age_s > 0))
        with _waiting("blocks are dropped; older work of the tiers ends first"):
            reply = client.ask(lambda seq: wire.Purge(seq, prefix, names, age_s), TASK_WAIT_S)
        assert isinstance(reply, wire.PurgedReply), "the daemon answers Purge with PurgedReply"
    if as_json:
        click.echo(json.dumps({"dropped": reply.dropped, "problems": reply.problems}))
    else:
        parts = ", ".join(f"{name} {count}" for name, count in reply.dropped.items())
        total = _blocks(sum(reply.dropped.values()))
        click.echo(f"dropped {total}: {parts}" if parts else f"dropped {total}")
    return _tell_problems(reply.problems)


@contextlib.contextmanager
def _waiting(text: str) -> Iterator[None]:
    """Show on a terminal that the daemon is still at it; elsewhere show nothing."""
    from rich.console import Console

    with Console(stderr=True).status(f"still waiting: {text}"):
        yield


def _tell_problems(problems: Sequence[str]) -> int:
    """One line each on standard error; the exit code."""
    for problem in problems:
        click.echo("error: " + " ".join(problem.split()), err=True)
    return 1 if problems else 0


def _blocks(count: int) -> str:
    return f"{count} block{'' if count == 1 else 's'}"


def _stats_of(client: Client) -> dict[str, Any]:
    from tierkv.service import wire

    reply = client.ask(wire.Stats, ANSWER_WAIT_S)
    assert isinstance(reply, wire.StatsReply), "the daemon answers Stats with StatsReply"
    tree: dict[str, Any] = json.loads(reply.body)
    return tree


def _question(tree: dict[str, Any], prefix: str, names: Sequence[str], is_aged: bool) -> str:
    """What would go, as far as the daemon knows; a tier does not tell how old its blocks are."""
    parts = []
    if not names or "dram" in names:
        hit = [s for s in tree["namespaces"] if s["namespace"].startswith(prefix)]
        bound = "at most " if is_aged else ""
        spaces = f"{len(hit)} namespace{'' if len(hit) == 1 else 's'}"
        parts.append(f"{bound}{_blocks(sum(s['blocks'] for s in hit))} of {spaces} in DRAM")
    for tier in tree["tiers"]:
        name, known = tier["tier"], tier["blocks_known"]
        if names and name not in names:
            continue
        if tier["is_scanned"]:
            bound = "at most " if is_aged or prefix else ""
            parts.append(f"{bound}{_blocks(known)} in {name}")
        else:
            parts.append(f"an unknown number in {name} ({known} known)")
    return f"Drop {', '.join(parts) or 'nothing'}?"


def _ask_user(question: str) -> None:
    """Stop unless the user agrees."""
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort:
        click.echo(err=True)
        raise click.ClickException("nothing was dropped; answer y, or give --yes") from None
