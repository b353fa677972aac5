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

    return Group(_totals(tree), _tokens(tree), _namespaces(tree["namespaces"]))


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
    from tierkv.units import approximate_size

    counters = tree["counters"]
    share = tree["used"] / tree["capacity"] if tree["capacity"] else 0.0
    grants = "" if tree["is_granting"] else " (no grants: an older engine still maps the pool)"
    table = _table("daemon", "")
    table.columns[1].justify = "left"
    for name, text in (
        ("pool", f"{tree['pool']}, generation {tree['generation']}{grants}"),
        ("capacity", approximate_size(tree["capacity"])),
        ("used", f"{approximate_size(tree['used'])} ({share:.1%})"),
        ("blocks", f"{tree['blocks']:,}, {tree['pinned_blocks']:,} pinned"),
        ("sessions", f"{tree['sessions']:,}, {tree['engines']:,} engines known"),
        ("leases", f"{tree['leases']:,}"),
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
    ):  # fmt: skip
        table.add_row(name, text)
    return table


def _tokens(tree: dict[str, Any]) -> Table:
    table = _table("tokens by source", "device", "DRAM", "computed", "requests")
    for name, key in (("last 1,000 requests", "tokens_recent"), ("since start", "tokens_total")):
        part = tree[key]
        cells = [
            f"{part['tokens'][source]:,} ({part['ratio'][source]:.1%})"
            for source in ("device", "dram", "computed")
        ]
        table.add_row(name, *cells, f"{part['requests']:,}")
    return table


def _namespaces(spaces: list[dict[str, Any]]) -> Table:
    from tierkv.units import approximate_size

    table = _table("namespace", "label", "slot", "blocks", "slots", "extents", "pinned")
    for space in spaces:
        label = space["label"] + (" (private)" if space["is_private"] else "")
        table.add_row(
            space["namespace"][:12],
            label,
            approximate_size(space["slot_bytes"]),
            *(f"{space[name]:,}" for name in ("blocks", "slots", "extents", "pinned_blocks")),
        )
    return table
