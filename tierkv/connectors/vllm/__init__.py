"""The vLLM adapter.

Name it in ``--kv-transfer-config``: ``kv_connector: TierKVConnector``,
``kv_connector_module_path: tierkv.connectors.vllm``.
"""

from tierkv.connectors.vllm.connector import TierKVConnector

__all__ = ["TierKVConnector"]
