"""``tierkv bench rpc|copy|device|fs|replay``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import cast

import click

from tierkv.cli.session import json_option
from tierkv.errors import ConfigError, TierKVError


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
    run = cast(Callable[[bool], int], _import_with_torch("copy").run)
    return run(as_json)


@bench.command()
@json_option
@click.option(
    "--device",
    "kind",
    type=click.Choice(["cuda", "npu", "cpu"]),
    help="Kind of device; default: the accelerator that torch has, else the CPU.",
)
@click.option(
    "--seconds-max",
    type=click.FloatRange(min=0, min_open=True),
    default=330,
    show_default=True,
    help="Time for the whole run; what it cuts is told.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the JSON there, too.",
)
def device(as_json: bool, kind: str | None, seconds_max: float, output: Path | None) -> int:
    """Measure copies between an accelerator, or a CPU "device", and a pool. Needs torch.

    Speed by page size beside the peak, overlap with compute, the host's time per step, and a small
    model whose prefix is computed or loaded.
    """
    module = _import_with_torch("device")
    run = cast(Callable[[bool, str | None, float, Path | None], int], module.run)
    return run(as_json, kind, seconds_max, output)


def _import_with_torch(name: str) -> ModuleType:
    """The module of a bench that needs torch."""
    try:
        return importlib.import_module(f"tierkv.bench.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise TierKVError(
            f"bench {name} needs torch; install it with `pip install 'tierkv-sdk[torch]'`"
        ) from error


def _parse_size(_context: click.Context, _option: click.Parameter, text: str) -> int:
    """Callback of an option that takes a size; the function gets bytes."""
    from tierkv.units import parse_size

    try:
        value = parse_size(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from error
    if not isinstance(value, int) or value <= 0:
        raise click.BadParameter(f"{text!r} is no size; write for example 64GiB or 512MiB")
    return value


def _check_policy(_context: click.Context, _option: click.Parameter, name: str) -> str:
    """Callback of an option that names an eviction policy."""
    from tierkv.plugins import check_policy

    try:
        check_policy(name)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return name


def _parse_share(_context: click.Context, _option: click.Parameter, text: str) -> float:
    """Callback of an option that takes a share; the function gets a number from 0 to 1."""
    from tierkv.units import parse_share

    try:
        value = parse_share(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from error
    assert isinstance(value, float), "text gives a share"
    if not 0 <= value <= 1:
        raise click.BadParameter(f"{text!r} is not between 0 and 100%")
    return value


@bench.command()
@json_option
@click.option(
    "--path",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="A directory on the disk to measure; default: the one for temporary files.",
)
@click.option(
    "--block", "block_bytes", default="2MiB", show_default=True, metavar="SIZE",
    callback=_parse_size, help="Payload of a block.",
)  # fmt: skip
@click.option(
    "--bytes", "sample_bytes", default="1GiB", show_default=True, metavar="SIZE",
    callback=_parse_size,
    help="Payload of a sample; needs three times as much room, and twice as much memory.",
)  # fmt: skip
@click.option(
    "--pairs",
    type=click.IntRange(1, 1_000),
    default=9,
    show_default=True,
    help="Pairs of samples per figure. With fewer than 9 the run is void.",
)
def fs(as_json: bool, path: Path | None, block_bytes: int, sample_bytes: int, pairs: int) -> int:
    """Measure the fs tier on a disk against plain calls: write, write new files, read."""
    import tempfile

    from tierkv.bench.fs import run
    from tierkv.bench.fs_stage import Plan

    if sample_bytes < block_bytes:
        raise click.BadParameter("is less than one --block", param_hint="--bytes")
    folder = path if path is not None else Path(tempfile.gettempdir())
    return run(as_json, Plan(folder, block_bytes, sample_bytes, pairs))


@bench.command()
@json_option
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--policy",
    callback=_check_policy,
    metavar="NAME",
    default="slru",
    show_default=True,
    help="Order of eviction in DRAM: slru, lru, arc, or that of an installed package.",
)
@click.option(
    "--dram", default="5%", show_default=True, metavar="SHARE", callback=_parse_share,
    help="DRAM, as a share of the trace's different blocks.",
)  # fmt: skip
@click.option(
    "--tier", default="25%", show_default=True, metavar="SHARE", callback=_parse_share,
    help="The tier below, likewise; 0 for none.",
)  # fmt: skip
@click.option(
    "--write-policy",
    type=click.Choice(["write_back", "write_through", "write_through_selective"]),
    default="write_back",
    show_default=True,
    help="When the tier gets a block.",
)
@click.option(
    "--commits", type=click.IntRange(1, 64), default=1, show_default=True,
    help="Into how many commits each request's new blocks are divided, as by chunked prefill.",
)  # fmt: skip
@click.option("--compare", is_flag=True, help="Replay under every write policy.")
def replay(
    *,
    as_json: bool,
    trace: Path,
    policy: str,
    commits: int,
    dram: float,
    tier: float,
    write_policy: str,
    compare: bool,
) -> int:
    """Replay a request trace through the directory and count hits and writes; no bytes move."""
    from tierkv.bench.replay import WRITE_POLICIES, run

    chosen = WRITE_POLICIES if compare else (write_policy,)
    return run(
        as_json,
        trace,
        dram_share=dram,
        tier_share=tier,
        write_policies=chosen,
        policy=policy,
        commits=commits,
    )
