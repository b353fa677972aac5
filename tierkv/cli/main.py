"""Entry point of the ``tierkv`` command.

Rule 1: a user's mistake or an operating error is one line on standard error, never a traceback;
exit code 2 for wrong usage, 1 for everything else.
Rule 2: a command's module is imported when the command runs, so that ``tierkv --help`` is quick
and only `bench copy` and `bench device` ever load torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from tierkv import TierKVError, __version__

_COMMANDS = {
    "serve": ("tierkv.cli.serve", "Run the daemon in the foreground."),
    "stats": ("tierkv.cli.stats", "Show what the daemon holds and how often it hits."),
    "check": ("tierkv.cli.administer", "Let the daemon and its tiers audit their books."),
    "purge": ("tierkv.cli.administer", "Drop cached blocks."),
    "doctor": ("tierkv.cli.administer", "Show what of this machine decides how fast blocks move."),
    "config": ("tierkv.cli.config", "Check, show and describe the configuration."),
    "vllm-config": ("tierkv.cli.vllm_config", "Print what vLLM needs to use TierKV."),
    "bench": ("tierkv.cli.bench", "Measure this machine; every run verifies its results."),
}  # module and one line of help; the function is named like the command


class LazyGroup(click.Group):
    """A group that imports a command's module only when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(_COMMANDS[cmd_name][0])
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command), "a command is named like its function"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _COMMANDS.items()])


@click.command(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="tierkv")
@click.pass_context
def tierkv(context: click.Context) -> None:
    """TierKV: a node-level cache for the KV cache of LLM inference."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    try:
        code = tierkv.main(arguments, prog_name="tierkv", standalone_mode=False)
    except click.Abort:
        _fail("stopped", 1)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "tierkv"
        message = error.format_message()
        stop = "" if message.endswith((".", "?")) else "."
        _fail(f"{message}{stop} See `{path} --help`.", error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except TierKVError as error:
        _fail(str(error), 1)
    except OSError as error:  # of a file or directory that the user named
        _fail(f"{error.filename or 'system'}: {error.strerror or error}", 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    click.echo("error: " + " ".join(message.split()), err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
