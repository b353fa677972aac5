"""The configuration: one YAML file, a ``node:`` part and an ``engine:`` part.

``node:`` belongs to the daemon (the engine that starts it rules), ``engine:`` to each engine.
The same tree is accepted inline in vLLM's ``kv_connector_extra_config``. Environment variables
``TIERKV_NODE__DRAM__CAPACITY=4GiB`` override single keys (two underscores between levels).
This is the only room that reads the environment for settings.
"""

from tierkv.config.advice import node_warnings, warnings_of
from tierkv.config.environment import default_run_directory, python_hash_seed
from tierkv.config.load import (
    ENV_PREFIX,
    FILE_BYTES_MAX,
    block_tokens_of,
    differing_keys,
    from_extra_config,
    known_keys,
    load_config,
    parse_config,
)
from tierkv.config.models import (
    DramConfig,
    EngineConfig,
    NodeConfig,
    ServiceConfig,
    TierConfig,
    TierKVConfig,
)

__all__ = [
    "ENV_PREFIX",
    "FILE_BYTES_MAX",
    "DramConfig",
    "EngineConfig",
    "NodeConfig",
    "ServiceConfig",
    "TierConfig",
    "TierKVConfig",
    "block_tokens_of",
    "default_run_directory",
    "differing_keys",
    "from_extra_config",
    "known_keys",
    "load_config",
    "node_warnings",
    "parse_config",
    "python_hash_seed",
    "warnings_of",
]
