"""Our connector in an engine as those of data parallelism are while they do not compute prompts, which is all the time here.

vLLM is told so when it loads this file as the connector's module.
"""

from __future__ import annotations

from vllm.v1.engine.core import EngineCore

from vcache_backend.integration.vllm import compat
from vcache_backend.integration.vllm_connector import VCacheConnector as VCacheConnector

EngineCore._should_throttle_prefills = lambda self: True
compat.throttles_prefills = lambda vllm_config: True
