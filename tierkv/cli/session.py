"""What the commands share: options, and an administrator's session with the daemon."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from tierkv.config import TierKVConfig
    from tierkv.service.client import Client

CONNECT_WAIT_S = 5.0
ANSWER_WAIT_S = 10.0

Function = TypeVar("Function", bound=Callable[..., Any])


def file_option(function: Function) -> Function:
    """Add ``--config FILE``."""
    return click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Configuration file.",
    )(function)


def socket_option(function: Function) -> Function:
    """Add ``--socket PATH``."""
    return click.option(
        "--socket",
        type=click.Path(path_type=Path),
        metavar="PATH",
        help="Socket of the daemon; overrides node.service.socket.",
    )(function)


def json_option(function: Function) -> Function:
    """Add ``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def parse_seconds(
    _context: click.Context, _option: click.Parameter, text: str | None
) -> float | None:
    """Callback of an option that takes a duration; the function gets seconds."""
    from tierkv.units import parse_duration

    if text is None:
        return None
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} {error}") from error
    assert isinstance(value, float), "text gives a number of seconds"
    return value


def read_config(file: Path | None) -> TierKVConfig:
    """The configuration file, or the defaults; environment overrides applied.

    Raises:
        ConfigError: see `load_config`.
    """
    from tierkv.config import load_config, parse_config

    return load_config(file) if file is not None else parse_config({})


def daemon_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--socket PATH`` and ``--config FILE``; the function gets the `socket` they lead to."""

    @functools.wraps(function)
    def call(*, socket: Path | None, file: Path | None, **rest: Any) -> Any:
        found = socket.absolute() if socket is not None else None
        return function(socket=found or read_config(file).node.service.socket_path, **rest)

    return socket_option(file_option(call))


@contextlib.contextmanager
def admin_client(socket: Path) -> Iterator[Client]:
    """An administrator's session. Waits at most `CONNECT_WAIT_S`.

    Raises:
        DaemonUnavailableError: no daemon is there, or it does not answer.
    """
    from tierkv.errors import DaemonUnavailableError
    from tierkv.pool import DaemonLock
    from tierkv.service.client import Client

    logging.getLogger("tierkv").addHandler(logging.NullHandler())  # the error line says it all
    lock = DaemonLock(socket)
    if not lock.is_held():
        raise DaemonUnavailableError(
            f"{socket}: no daemon serves this socket; start one with `tierkv serve`"
        )
    client = Client(socket, None)
    try:
        try:
            client.connect(CONNECT_WAIT_S)
        except DaemonUnavailableError as error:
            if client.refusal is None and lock.is_held():
                text = f"{socket}: the daemon did not answer within {CONNECT_WAIT_S:g} s"
                raise DaemonUnavailableError(text + "; is it stopped or busy?") from error
            raise
        yield client
    finally:
        client.close()
