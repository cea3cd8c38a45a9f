"""vLLM's door to the pool, under the name that `kv_connector_module_path` wants.

vllm serve MODEL --kv-transfer-config '{"kv_connector": "VCacheConnector", "kv_role": "kv_both",
    "kv_connector_module_path": "vcache_backend.integration.vllm_connector", "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"config": "/etc/vcache.yaml"}}'
"""

from __future__ import annotations

from .vllm.connector import VCacheConnector

__all__ = ["VCacheConnector"]
