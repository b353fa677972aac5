"""TierKV: a node-level, multi-tier cache for the KV cache of LLM inference.

Importing this package loads neither torch nor zmq nor vllm, so that the command line starts fast
and a front-end process that only reads metrics pays nothing.
"""

import importlib
from typing import TYPE_CHECKING

from tierkv.errors import (
    ConfigError,
    DaemonUnavailableError,
    LayoutMismatchError,
    LoadFailedError,
    PoolError,
    ProtocolError,
    RefusedError,
    TierKVError,
    UsageError,
)

if TYPE_CHECKING:
    from tierkv.sdk import AsyncCache, Cache, Copy, Hit

__version__ = "0.1.0"

_SDK = ("AsyncCache", "Cache", "Copy", "Hit")

__all__ = [
    "AsyncCache",
    "Cache",
    "ConfigError",
    "Copy",
    "DaemonUnavailableError",
    "Hit",
    "LayoutMismatchError",
    "LoadFailedError",
    "PoolError",
    "ProtocolError",
    "RefusedError",
    "TierKVError",
    "UsageError",
    "__version__",
]


def __getattr__(name: str) -> object:
    """The SDK's names, loaded at their first use."""
    if name in _SDK:
        return getattr(importlib.import_module("tierkv.sdk"), name)
    raise AttributeError(f"module 'tierkv' has no attribute '{name}'")
