"""``tierkv bench rpc|copy``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import cast

import click

from tierkv.cli.session import json_option
from tierkv.errors import TierKVError


@click.group(no_args_is_help=False)
def bench() -> None:
    """Measure this machine; every run verifies its results."""


@bench.command()
@json_option
@click.option(
    "--blocks-max",
    type=click.IntRange(4_000, 10_000_000),
    default=1_000_000,
    show_default=True,
    help="Blocks of the large index.",
)
@click.option(
    "--samples",
    type=click.IntRange(1, 1_000),
    default=25,
    show_default=True,
    help="Samples per figure; the median counts. With fewer than 9 the run is void.",
)
def rpc(as_json: bool, blocks_max: int, samples: int) -> int:
    """Measure the daemon's answers from another process: lookup, release, reserve, commit."""
    from tierkv.bench.rpc import run

    return run(as_json, blocks_max, samples)


@bench.command()
@json_option
def copy(as_json: bool) -> int:
    """Measure copies between a CPU "device" tensor and slots. Needs torch."""
    try:
        module = importlib.import_module("tierkv.bench.copy")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TierKVError(
            "bench copy needs torch; install it with `pip install 'tierkv-sdk[torch]'`"
        ) from error
    run = cast(Callable[[bool], int], module.run)
    return run(as_json)
