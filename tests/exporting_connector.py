"""A connector that does nothing but have vLLM's KV cache made where other processes can read it."""

from __future__ import annotations

from typing import Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from vcache_backend.integration.vllm import exportable, model_spec
from vcache_backend.resident.exported import cache_shape
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.exportable import Region
from vcache_backend.vram_pool.paged import PagedKV


class Nothing(KVConnectorMetadata):
    pass


class ExportingConnector(KVConnectorBase_V1):
    """`version` in its settings: the release of vLLM it takes this one for."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        version = vllm_config.kv_transfer_config.kv_connector_extra_config.get("version", vllm.__version__)
        self.regions: list[Region] = []
        self.asked = 0
        if role == KVConnectorRole.WORKER:
            self.exporter = exportable.begin(vllm_config.device_config.device_type, version)
            self.refused = exportable.refusal(vllm_config, kv_cache_config, model_spec.read_model(vllm_config))

    def get_mem_pool_context(self) -> Any:
        self.asked += 1
        return self.exporter.context()

    def register_kv_caches(self, kv_caches: Any) -> None:
        kv = PagedKV.describe(kv_caches, self._vllm_config.cache_config.block_size)
        self.regions = self.exporter.regions(kv_caches)
        self.shape = cache_shape(kv, self.regions, Device("host", "host"))

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return Nothing()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
