"""``tierkv serve``."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from tierkv.cli.session import file_option, parse_seconds, read_config, socket_option


@click.command()
@file_option
@socket_option
@click.option(
    "--linger",
    metavar="DURATION",
    callback=parse_seconds,
    help="End after this time without engines, for example 30s. Default: run until stopped.",
)
def serve(file: Path | None, socket: Path | None, linger: float | None) -> None:
    """Run the daemon in the foreground until SIGTERM or SIGINT.

    It prints its pool's path and capacity, its socket, and every engine that comes and goes.
    """
    node = read_config(file).node
    if socket is not None:
        service = node.service.model_copy(update={"socket": socket.absolute()})
        node = node.model_copy(update={"service": service})
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s tierkv[%(process)d] %(levelname)s %(message)s",
    )
    from tierkv.service.daemon import serve as run

    run(node, linger)
