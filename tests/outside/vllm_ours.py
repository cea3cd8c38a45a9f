"""vLLM's own tests of connectors, with VCacheConnector where they take one of vLLM's.

The connectors that its tests name without meaning them are `NixlConnector` (the default of their
helper) and `ExampleConnector`; whoever asks the factory for one of these gets ours, with settings
for a pool of its own. Nothing else of vLLM is changed. What a worker would say it holds is made up,
so that ours looks for chunks in a pool; it has none. The model is the configuration of
`facebook/opt-125m`, which lies where the tests run: no weights are needed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ours import (
    SOCKET,
    pytest_configure,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    pytest_unconfigure,
    took_part,
)

__all__ = [
    "pytest_configure",
    "pytest_runtest_logreport",
    "pytest_runtest_protocol",
    "pytest_unconfigure",
]

STAND_IN_FOR = ("NixlConnector", "ExampleConnector")
BLOCK = 16
SETTINGS: dict[str, Any] = {
    "server": {"socket": str(SOCKET)},
    "pool": {"device": "host", "segment_bytes": "16 MiB"},
    "engine": {"chunk_size": BLOCK},
    "connector": {"min_hit_tokens": BLOCK},
}
WORKER: dict[str, Any] = {
    "pp_rank": 0,
    "tp_rank": 0,
    "kv_layout": "none",
    "dtype": "float16",
    "layers": 1,
    "parts": 1,
    "page_bytes": 1024,
    "block_size": BLOCK,
    "chunk_bytes": 1024,
    "attention": "none",
    "layer_names": "none",
}
OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "model_type": "opt",
    "hidden_size": 768,
    "word_embed_proj_dim": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}


def pytest_sessionstart(session: pytest.Session) -> None:
    model = Path("facebook/opt-125m")
    model.mkdir(parents=True, exist_ok=True)
    (model / "config.json").write_text(json.dumps(OPT_125M))
    from vllm.distributed import parallel_state
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

    from vcache_backend.integration.vllm import settings
    from vcache_backend.integration.vllm.connector import VCacheConnector
    from vcache_backend.integration.vllm.metadata import Shard
    from vcache_backend.integration.vllm.model.spec import ShardSpec

    class Ours(VCacheConnector):  # type: ignore[misc]
        def __init__(self, *arguments: Any) -> None:
            took_part()
            super().__init__(*arguments)
            if self._scheduler is not None:
                # There is no worker in these tests to say what it holds; without one nothing would
                # be looked for.
                self._scheduler.instance.note({(0, 0): Shard(ShardSpec(**WORKER))}, {})

    read = settings.read
    settings.read = lambda extra_config: read(SETTINGS)
    for name in STAND_IN_FOR:
        KVConnectorFactory._registry[name] = lambda: Ours
    # Their recording connector wraps one that it imports by name.
    example_connector.ExampleConnector = Ours
    if parallel_state._PP is None:
        # A worker of vLLM has one; the tests make a tensor parallel group only.
        parallel_state._PP = SimpleNamespace(rank_in_group=0, world_size=1)
