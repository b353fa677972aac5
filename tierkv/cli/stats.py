"""``tierkv stats``."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from tierkv.cli.session import (
    ANSWER_WAIT_S,
    CONNECT_WAIT_S,
    admin_client,
    daemon_options,
    json_option,
)

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from tierkv.service.client import Client

WATCH_PERIOD_S = 2.0

_MISSES = {
    "miss_absent": "not stored",
    "miss_pending": "on their way, did not come",
    "miss_leases_max": "too many leases",
}
_SKIPS = {
    "skipped_present": "already stored",
    "skipped_no_room": "no room",
    "skipped_orphan": "predecessor gone",
    "skipped_not_granting": "no grants",
    "commit_failed": "copy failed",
    "commit_orphaned": "predecessor evicted",
}
_NOT_PROMOTED = {
    "promote_no_room": "no room",
    "promote_too_short": "too few tokens",
    "promote_missing": "not there",
    "promote_corrupt": "damaged",
    "promote_failed": "read failed",
    "promote_late": "too late",
    "promote_orphaned": "predecessor gone",
}
_NOT_DEMOTED = {
    "demote_full": "tier full",
    "demote_failed": "write failed",
    "writeback_shed": "evicted unwritten",
    "backlog_shed": "backlog full",
}
_TITLES = {"dram": "DRAM"}  # others are shown by their key


@click.command()
@daemon_options
@json_option
@click.option(
    "--watch",
    "period",
    is_flag=False,
    flag_value=WATCH_PERIOD_S,
    type=click.FloatRange(min=0.05),
    metavar="[SECONDS]",
    help=f"Repeat until interrupted. Default: every {WATCH_PERIOD_S:g} seconds.",
)
def stats(socket: Path, as_json: bool, period: float | None) -> None:
    """Show what the daemon holds and how often it hits.

    With --json and --watch, one JSON object per line.
    """
    with admin_client(socket) as client:
        if period is None:
            _print_once(client, as_json)
            return
        try:
            _watch(client, as_json, period)
        except KeyboardInterrupt:
            return


def _fetch(client: Client) -> str:
    from tierkv.service import wire

    reply = client.ask(wire.Stats, ANSWER_WAIT_S)
    assert isinstance(reply, wire.StatsReply), "the daemon answers Stats with StatsReply"
    return reply.body


def _print_once(client: Client, as_json: bool) -> None:
    body = _fetch(client)
    if as_json:
        click.echo(body)
        return
    from rich.console import Console

    Console().print(render(json.loads(body)))


def _watch(client: Client, as_json: bool, period: float) -> None:
    from rich.console import Console
    from rich.live import Live

    if as_json:
        while True:
            click.echo(_fetch(client))
            _pause(client, period)
    with Live(console=Console(), auto_refresh=False, screen=False) as live:
        while True:
            live.update(render(json.loads(_fetch(client))), refresh=True)
            _pause(client, period)


def _pause(client: Client, period: float) -> None:
    """Wait; then find the daemon again if it was restarted meanwhile."""
    time.sleep(period)
    client.poll()
    client.connect(CONNECT_WAIT_S)


def render(tree: dict[str, Any]) -> Group:
    """The daemon's numbers as tables for people."""
    from rich.console import Group

    tiers = [_tiers(tree["tiers"])] if tree["tiers"] else []
    return Group(_totals(tree), *tiers, _tokens(tree), _namespaces(tree))


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        justify: Literal["left", "right"] = "left" if number == 0 else "right"
        table.add_column(column, justify=justify, no_wrap=number == 0)
    return table


def _reasons(counters: dict[str, int], names: dict[str, str]) -> str:
    told = [f"{counters[name]:,} {text}" for name, text in names.items() if counters[name]]
    return ", ".join(told) or "none"


def _totals(tree: dict[str, Any]) -> Table:
    table = _table("daemon", "")
    table.columns[1].justify = "left"
    traffic = _tier_traffic(tree["counters"]) if tree["tiers"] else []
    for name, text in (*_contents(tree), *_traffic(tree["counters"]), *traffic):
        table.add_row(name, text)
    return table


def _contents(tree: dict[str, Any]) -> list[tuple[str, str]]:
    from tierkv.numa import Placement
    from tierkv.units import approximate_size

    share = tree["used"] / tree["capacity"] if tree["capacity"] else 0.0
    grants = "" if tree["is_granting"] else " (no grants: an older engine still maps the pool)"
    dirty = f", {tree['dirty_blocks']:,} dirty" if tree["tiers"] else ""
    return [
        ("pool", f"{tree['pool']}, generation {tree['generation']}{grants}"),
        ("capacity", approximate_size(tree["capacity"])),
        ("placement", Placement.from_tree(tree["placement"]).text()),
        ("used", f"{approximate_size(tree['used'])} ({share:.1%})"),
        ("blocks", f"{tree['blocks']:,}, {tree['pinned_blocks']:,} pinned{dirty}"),
        ("sessions", f"{tree['sessions']:,}, {tree['engines']:,} engines known"),
        ("leases", f"{tree['leases']:,}"),
        *((f"copies of {d['device']}", copies_text(d)) for d in tree["devices"]),
    ]


def copies_text(device: dict[str, Any]) -> str:
    """How one rank of an engine copies, in one line."""
    from tierkv.units import approximate_size

    text = f"engine {device['engine'][:8]} rank {device['rank']}: {device['rung']}"
    if device["pool"]:
        known, pool = approximate_size(device["registered"]), approximate_size(device["pool"])
        text += f", {known} of {pool} registered"
    if device["staging"]:
        text += f", {approximate_size(device['staging'])} of staging"
    return text + (f"; {device['problem']}" if device["problem"] else "")


def _traffic(counters: dict[str, int]) -> list[tuple[str, str]]:
    from tierkv.units import approximate_size

    return [
        ("lookups", f"{counters['lookups']:,} for {counters['blocks_asked']:,} blocks"),
        ("blocks hit", f"{counters['blocks_hit']:,}"),
        ("blocks missed", _reasons(counters, _MISSES)),
        ("blocks stored", f"{counters['blocks_stored']:,}"),
        ("not stored", _reasons(counters, _SKIPS)),
        ("evicted", f"{counters['evicted']:,}, {counters['purged']:,} purged"),
        ("bytes in", approximate_size(counters["bytes_stored"])),
        ("bytes out", approximate_size(counters["bytes_hit"])),
        ("repaired", f"{counters['abandoned']:,} abandoned, {counters['unknown_leases']:,} unknown "
                     f"leases, {counters['duplicate_messages']:,} duplicates, "
                     f"{counters['protocol_errors']:,} protocol errors"),
    ]  # fmt: skip


def _tier_traffic(counters: dict[str, int]) -> list[tuple[str, str]]:
    """Between DRAM and the tiers below, all of them together."""
    promoted, promoting = counters["blocks_promoted"], counters["blocks_promoting"]
    demoted, demoting = counters["blocks_demoted"], counters["blocks_demoting"]
    late, unknown = counters["late_operations"], counters["unknown_jobs"]
    return [
        ("blocks promoted", f"{promoted:,} of {promoting:,} begun"),
        ("not promoted", _reasons(counters, _NOT_PROMOTED)),
        ("blocks demoted", f"{demoted:,} of {demoting:,} begun"),
        ("not demoted", _reasons(counters, _NOT_DEMOTED)),
        ("tiers late", f"{late:,} operations, {unknown:,} unknown answers"),
    ]


def _tiers(tiers: list[dict[str, Any]]) -> Table:
    """A column per tier, fastest first."""
    table = _table("tier", *(tier["tier"] for tier in tiers))
    for name, show in (
        ("state", _state),
        ("write policy", lambda tier: tier["write_policy"]),
        ("blocks known", lambda tier: f"{tier['blocks_known']:,}"),
        ("promoted", lambda tier: f"{tier['blocks_promoted']:,}"),
        ("demoted", lambda tier: f"{tier['blocks_demoted']:,}"),
        ("stored", _stored),
        ("jobs", lambda tier: f"{tier['jobs']:,}"),
        ("processes lost", lambda tier: f"{tier['process']:,}"),
    ):
        table.add_row(name, *(show(tier) for tier in tiers))
    return table


def _state(tier: dict[str, Any]) -> str:
    if not tier["is_up"]:
        return "down"
    parts = ["up"]
    if tier["is_indexed"]:
        parts.append("scanned" if tier["is_scanned"] else "scanning")
    parts += [] if tier["is_reading"] else ["reading paused"]
    parts += [] if tier["is_writing"] else ["writing paused"]
    return ", ".join(parts)


def _stored(tier: dict[str, Any]) -> str:
    """Bytes by the store's own numbers, which it tells if it knows them."""
    from tierkv.units import approximate_size

    store = tier["store"]
    if "bytes" not in store:
        return "unknown"
    share = f" of {approximate_size(store['capacity'])}" if store.get("capacity") else ""
    return f"{approximate_size(store['bytes'])}{share}"


def _tokens(tree: dict[str, Any]) -> Table:
    """A row per source: device, DRAM, the tiers from above, computed."""
    parts = {"last 1,000 requests": tree["tokens_recent"], "since start": tree["tokens_total"]}
    table = _table("tokens by source", *parts)
    for source in tree["tokens_total"]["tokens"]:
        counts = [(part["tokens"][source], part["ratio"][source]) for part in parts.values()]
        cells = [f"{count:,} ({ratio:.1%})" for count, ratio in counts]
        table.add_row(_TITLES.get(source, source), *cells)
    table.add_row("requests", *(f"{part['requests']:,}" for part in parts.values()))
    return table


def _namespaces(tree: dict[str, Any]) -> Table:
    from tierkv.units import approximate_size

    numbers = {"blocks": "blocks", "slots": "slots", "extents": "extents"}
    numbers["pinned"] = "pinned_blocks"
    if tree["tiers"]:
        numbers["dirty"] = "dirty_blocks"
    table = _table("namespace", "label", "slot", *numbers)
    for space in tree["namespaces"]:
        label = space["label"] + (" (private)" if space["is_private"] else "")
        table.add_row(
            space["namespace"][:12],
            label,
            approximate_size(space["slot_bytes"]),
            *(f"{space[key]:,}" for key in numbers.values()),
        )
    return table
