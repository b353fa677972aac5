"""What the environment says besides the keys of the configuration."""

from __future__ import annotations

import getpass
import os
import tempfile
from pathlib import Path


def default_run_directory() -> Path:
    """Per-user directory of socket and locks: below XDG_RUNTIME_DIR, else the temporary one."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and Path(base).is_dir():
        return Path(base) / "tierkv"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"tierkv-{user}"


def python_hash_seed() -> str | None:
    """PYTHONHASHSEED if it fixes anything: the root of an engine's block hashes."""
    seed = os.environ.get("PYTHONHASHSEED")
    return None if seed in (None, "", "random") else seed
