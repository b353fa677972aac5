"""A child process with one engine, as the parent sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

STOP_WAIT_S = 60


class Engine:
    """A child process with one engine."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        reader, writer = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tierkv.bench.demo.engine", str(writer)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                pass_fds=[writer],
                text=True,
            )
        os.close(writer)
        self._answers = os.fdopen(reader)
        self._log = log
        self._send(options)
        self._receive()

    def _send(self, command: dict[str, Any]) -> None:
        assert self._process.stdin is not None, "a pipe was asked for"
        print(json.dumps(command), file=self._process.stdin, flush=True)

    def _receive(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            tail = self._log.read_text(errors="replace")[-2000:]
            raise SystemExit(f"the engine ended unexpectedly; end of {self._log}:\n{tail}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def generate(self, tokens: list[int], new: int) -> dict[str, Any]:
        """Run one request to its end; see `engine.generate`."""
        self._send({"op": "generate", "tokens": tokens, "new": new})
        return self._receive()

    def reset_device_cache(self) -> None:
        """Empty vLLM's own prefix cache."""
        self._send({"op": "reset"})
        if not self._receive()["ok"]:
            raise SystemExit("vLLM did not reset its prefix cache")

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Let the engine shut down."""
        self._send({"op": "stop"})
        self._process.wait(STOP_WAIT_S)
