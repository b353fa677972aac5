"""The vLLM adapter.

Name it in ``--kv-transfer-config``: ``kv_connector: TierKVConnector``,
``kv_connector_module_path: tierkv.connectors.vllm``. vLLM is loaded when the class is asked for, so
that layouts can be described without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tierkv.connectors.vllm.connector import TierKVConnector

__all__ = ["TierKVConnector"]


def __getattr__(name: str) -> object:
    if name != "TierKVConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from tierkv.connectors.vllm.connector import TierKVConnector

    return TierKVConnector
