"""Our connector in engines that do otherwise than the vLLM at hand with one GPU, by the name of its class. vLLM loads this file."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from vllm.v1.engine.core import EngineCore

from vcache_backend.integration.vllm import compat
from vcache_backend.integration.vllm_connector import VCacheConnector


class Throttled(VCacheConnector):
    """As with data parallelism in steps that compute no prompts, which are all here."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        with patch.object(compat, "throttles_prefills", lambda vllm_config: True):
            super().__init__(vllm_config, role, kv_cache_config)


EngineCore._should_throttle_prefills = lambda self: isinstance(self.scheduler.connector, Throttled)


class Sparing(VCacheConnector):
    """As in vLLM 0.26, which does not ask a step without a model run to save anything."""

    def wait_for_save(self) -> None:
        if not self._get_connector_metadata().idle:
            super().wait_for_save()
