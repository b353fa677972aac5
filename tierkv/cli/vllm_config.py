"""``tierkv vllm-config``: the ``--kv-transfer-config`` of vLLM."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import click

from tierkv.cli.session import file_option, read_config, socket_option


@click.command("vllm-config")
@click.option("--dram", metavar="SIZE", help="Capacity of the pool: 10GiB, or auto.")
@file_option
@click.option("--threshold", type=click.IntRange(min=0), help="engine.swap_in_threshold in tokens.")
@socket_option
@click.option(
    "--format",
    "form",
    type=click.Choice(["json", "yaml"]),
    help="Print only the JSON value, or only the YAML file for `vllm serve --config`.",
)
def vllm_config(
    dram: str | None,
    file: Path | None,
    threshold: int | None,
    socket: Path | None,
    form: str | None,
) -> None:
    """Print the complete --kv-transfer-config value for vLLM.

    Give --dram, with or without --threshold and --socket, or a whole configuration with --config.
    """
    keys = {"--dram": dram, "--threshold": threshold, "--socket": socket}
    extra = _tree(dram, threshold, socket)
    if file is not None:
        given = [name for name, value in keys.items() if value is not None]
        if given:
            raise click.UsageError(f"{given[0]} belongs into the file that --config names.")
        read_config(file)
        extra = {"config": str(file.absolute())}
    elif dram is None:
        raise click.UsageError("Give --dram SIZE or --config FILE.")
    else:
        from tierkv.config import parse_config

        parse_config(extra, "vllm-config")
    _print(_transfer_config(extra), form)


def _tree(dram: str | None, threshold: int | None, socket: Path | None) -> dict[str, Any]:
    node: dict[str, Any] = {"dram": {"capacity": dram}}
    if socket is not None:
        node["service"] = {"socket": str(socket.absolute())}
    tree: dict[str, Any] = {"node": node}
    if threshold is not None:
        tree["engine"] = {"swap_in_threshold": threshold}
    return tree


def _transfer_config(extra: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "TierKVConnector",
        "kv_connector_module_path": "tierkv.connectors.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _print(value: dict[str, Any], form: str | None) -> None:
    import yaml

    inline = json.dumps(value)
    file = yaml.safe_dump({"kv-transfer-config": value}, sort_keys=False)
    if form == "json":
        click.echo(inline)
    elif form == "yaml":
        click.echo(file, nl=False)
    else:
        click.echo("# On the command line:")
        click.echo(f"vllm serve MODEL --kv-transfer-config {shlex.quote(inline)}")
        click.echo("\n# Or in the file of `vllm serve MODEL --config FILE.yaml`:")
        click.echo(file, nl=False)
