"""TierKV: a node-level, multi-tier cache for the KV cache of LLM inference.

Importing this package loads neither torch nor zmq nor vllm, so that the command line starts fast
and a front-end process that only reads metrics pays nothing.
"""

from tierkv.errors import (
    ConfigError,
    DaemonUnavailableError,
    LayoutMismatchError,
    PoolError,
    ProtocolError,
    RefusedError,
    TierKVError,
)

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DaemonUnavailableError",
    "LayoutMismatchError",
    "PoolError",
    "ProtocolError",
    "RefusedError",
    "TierKVError",
    "__version__",
]
