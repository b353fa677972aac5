"""``tierkv config check|show|schema``."""

from __future__ import annotations

import json
from pathlib import Path

import click

from tierkv.cli.session import json_option, read_config


@click.group(no_args_is_help=False)
def config() -> None:
    """Check, show and describe the configuration."""


@config.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--strict", "is_strict", is_flag=True, help="Fail if something in FILE is unwise.")
def check(file: Path, is_strict: bool) -> int:
    """Print `ok`, or what is wrong in FILE; what is allowed and unwise is a warning.

    Whether the pool fits this machine is checked when the daemon starts.
    """
    from tierkv.config import warnings_of

    warnings = warnings_of(read_config(file))
    for text in warnings:
        click.echo(f"warning: {text}", err=True)
    if warnings and is_strict:
        return 1
    click.echo("ok")
    return 0


@config.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@json_option
def show(file: Path | None, as_json: bool) -> None:
    """Print the effective configuration: defaults, FILE and TIERKV_... variables."""
    tree = read_config(file).model_dump(mode="json")
    if as_json:
        click.echo(json.dumps(tree, indent=2))
        return
    import yaml

    click.echo(yaml.safe_dump(tree, sort_keys=False), nl=False)


@config.command()
def schema() -> None:
    """Print the JSON schema of the configuration, for editors."""
    from tierkv.config import TierKVConfig

    # Sizes and durations as people write them, 64GiB or 500ms, not as the numbers they become.
    click.echo(json.dumps(TierKVConfig.model_json_schema(mode="serialization"), indent=2))
