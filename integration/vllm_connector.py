"""The module for vLLM's `kv_connector_module_path`. It exports `VCacheConnector`.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "VCacheConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
    "kv_connector_extra_config": {"config": "/etc/vcache.yaml"}}'"""

from __future__ import annotations

from contextlib import suppress

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from . import plugin
from .vllm.connector import VCacheConnector

plugin.left_out()

with suppress(ValueError):  # registered already
    # MultiConnector looks up the class that reads a connector's statistics by the registered name.
    KVConnectorFactory.register_connector(
        VCacheConnector.__name__, __name__, VCacheConnector.__name__
    )

__all__ = ["VCacheConnector"]
