"""Starts the embedded daemon so that it outlives the engine.

vLLM kills every descendant of an engine at its end, so the daemon must be nobody's child: a small
launcher process forks and exits, and the daemon starts in a session of its own, with the CPU
affinity, memory policy, niceness and OpenMP settings of the engine undone.

Run as ``python -m tierkv.service.launcher``; the configuration comes as JSON on standard input.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from tierkv.config import NodeConfig
from tierkv.errors import TierKVError
from tierkv.numa import drop_own_policy
from tierkv.pool import make_private

logger = logging.getLogger(__name__)

LOG_BYTES_MAX = 8 << 20
_KEPT_ENVIRONMENT = (
    "HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "LOGNAME", "PATH", "PYTHONPATH", "TMPDIR", "USER",
    "VIRTUAL_ENV", "XDG_RUNTIME_DIR",
)  # fmt: skip
_KEPT_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")  # credentials of object stores


def start_daemon(config: NodeConfig) -> subprocess.Popen[bytes]:
    """Start a daemon for this node. Does not wait; whoever holds the lock already wins.

    Returns:
        The launcher's process, to be reaped with `poll`; the daemon is not its child for long.
    Raises:
        PoolError: the run directory cannot be made.
    """
    run_directory = make_private(config.service.socket_path.parent)
    log = _open_log(run_directory / "daemon.log")
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in _KEPT_ENVIRONMENT or name.startswith(_KEPT_PREFIXES)
    }
    environment["OPENBLAS_NUM_THREADS"] = "1"  # numpy is used for bookkeeping only
    command = [sys.executable, "-m", "tierkv.service.launcher"]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            close_fds=True,
            env=environment,
            cwd="/",
        )
    finally:
        os.close(log)
    assert process.stdin is not None, "a pipe was asked for"
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(config.model_dump_json().encode())
        process.stdin.close()
    return process


def _open_log(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    if path.exists() and path.stat().st_size > LOG_BYTES_MAX:
        flags |= os.O_TRUNC
    return os.open(path, flags, 0o600)


def _leave_the_engine() -> None:
    """Undo what an engine does to its children: affinity, memory policy and niceness."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    drop_own_policy()
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, 0)
    os.umask(0o077)


def main() -> None:
    """Fork, let the parent end, and serve."""
    config = NodeConfig.model_validate(json.load(sys.stdin))
    if os.fork():
        os._exit(0)
    os.setsid()
    _leave_the_engine()
    from tierkv.service.daemon import serve

    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s tierkv[%(process)d] %(levelname)s %(message)s",
    )
    try:
        serve(config, linger_s=config.service.linger)
    except TierKVError as error:
        logger.error("%s", error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
