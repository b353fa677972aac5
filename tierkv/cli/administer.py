"""``tierkv check`` and ``tierkv purge``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from tierkv.cli.session import (
    ANSWER_WAIT_S,
    admin_client,
    daemon_options,
    json_option,
)

if TYPE_CHECKING:
    from tierkv.service.client import Client

CHECK_WAIT_S = 300.0  # the whole index is recomputed; other clients wait as long


@click.command()
@daemon_options
@json_option
def check(socket: Path, as_json: bool) -> None:
    """Let the daemon recompute its books; exit code 1 if they are wrong.

    The daemon answers nobody meanwhile, seconds per 100,000 blocks; engines compute instead.
    """
    from tierkv.errors import DaemonUnavailableError
    from tierkv.service import wire

    with admin_client(socket) as client:
        try:
            reply = client.ask(wire.Check, CHECK_WAIT_S)
        except DaemonUnavailableError as error:
            raise DaemonUnavailableError(f"check failed: {error}") from error
        assert isinstance(reply, wire.Done), "the daemon answers Check with Done"
        click.echo(json.dumps({"blocks": reply.count}) if as_json else f"ok: {reply.count} blocks")


def _hex(_context: click.Context, _option: click.Parameter, text: str | None) -> str | None:
    if text is not None and re.fullmatch("[0-9a-f]{1,64}", text.lower()) is None:
        raise click.BadParameter(f"{text!r} are not 1 to 64 hexadecimal digits")
    return text.lower() if text is not None else None


@click.command()
@daemon_options
@click.option(
    "--namespace",
    metavar="HEX",
    callback=_hex,
    help="Leading digits of one namespace, as `tierkv stats` shows them.",
)
@click.option("--all", "is_all", is_flag=True, help="All namespaces.")
@click.option("--yes", "is_sure", is_flag=True, help="Do not ask.")
@json_option
def purge(
    socket: Path,
    namespace: str | None,
    is_all: bool,
    is_sure: bool,
    as_json: bool,
) -> None:
    """Drop all blocks of one namespace, or of all.

    Requests that are reading blocks now still read the right bytes.
    """
    from tierkv.service import wire

    if (namespace is None) != is_all:
        raise click.UsageError("Give either --namespace or --all.")
    with admin_client(socket) as client:
        if not is_sure:
            _ask_user(client, namespace or "")
        reply = client.ask(lambda seq: wire.Purge(seq, namespace or ""), ANSWER_WAIT_S)
        assert isinstance(reply, wire.Done), "the daemon answers Purge with Done"
    click.echo(json.dumps({"dropped": reply.count}) if as_json else f"dropped {reply.count} blocks")


def _ask_user(client: Client, prefix: str) -> None:
    """Say what would go, and stop unless the user agrees."""
    from tierkv.service import wire

    reply = client.ask(wire.Stats, ANSWER_WAIT_S)
    assert isinstance(reply, wire.StatsReply), "the daemon answers Stats with StatsReply"
    spaces = json.loads(reply.body)["namespaces"]
    hit = [space for space in spaces if space["namespace"].startswith(prefix)]
    blocks = sum(space["blocks"] for space in hit)
    question = f"Drop {blocks} blocks of {len(hit)} namespace{'' if len(hit) == 1 else 's'}?"
    try:
        click.confirm(question, abort=True, err=True)
    except click.Abort:
        click.echo(err=True)
        raise click.ClickException("nothing was dropped; answer y, or give --yes") from None
