"""The inside of `lmcache_cases.Engine`: a process with a real LMCacheEngine, and of vLLM what the
plugin reads. Its nursery imports this module, and LMCache with it, once.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest  # noqa: F401 (the test modules, whose functions are called here, import it)
import torch
from kv_cases import CHUNK, SMALL, Cache, places
from lmcache.utils import EngineType
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import load_engine_config_with_overrides
from lmcache.v1.gpu_connector import CreateGPUConnector
from lmcache.v1.lookup_client.factory import LookupClientFactory
from lmcache.v1.metadata import LMCacheMetadata
from lmcache_cases import TAGGED, Retrieved, Setup, kv_transfer
from processes import SECONDS
from vllm_objects import vllm_config

from vcache_backend.integration.lmcache.backend import VCacheBackend
from vcache_backend.integration.lmcache.scheduler import Word

# LMCache's token database imports it for its hashes, where it is installed.
with contextlib.suppress(ImportError):
    import vllm.v1.core.kv_cache_utils  # noqa: F401


class Inside:
    """The inside of a child: a KV cache, an engine of LMCache made from a YAML file, and the
    plugin's log lines.
    """

    def __init__(self, setup: Setup) -> None:
        torch.set_num_threads(1)
        self.setup, self.lines = setup, Lines()
        os.environ.update(LMCACHE_CONFIG_FILE=str(setup.yaml), PYTHONHASHSEED="0")
        if setup.before is not None:
            setup.before()
        self.cache = Cache(setup.arrangement)
        self.config = load_engine_config_with_overrides()
        self.metadata = metadata(setup)
        self.adapter = adapter(setup, self.cache.tensors)
        connector = CreateGPUConnector(self.config, self.metadata, EngineType.MOCK)
        self.engine: Any = LMCacheEngineBuilder.get_or_create(
            "engine", self.config, self.metadata, connector, print, print
        )
        if setup.service:
            self.server = LookupClientFactory.create_lookup_server(self.engine, self.metadata)
        self.engine.post_init()
        if setup.plant is not None:
            setup.plant(self)

    @property
    def manager(self) -> Any:
        return self.engine.storage_manager

    @property
    def backend(self) -> VCacheBackend:
        return self.manager.storage_backends["vcache"]

    @property
    def worker(self) -> Any:
        """The plugin's own worker."""
        return self.backend.worker

    # ---- what vLLM's adapter does

    def store(self, tokens: list[int], skip: int) -> bool:
        """Prefill, store all but the first `skip` tokens, and reuse the blocks at once. True when
        all is visible or given up: in the steps after it no load has failed.
        """
        self.begin_step()
        slots, mask = self.prefill(tokens), torch.arange(len(tokens)) >= skip
        where = {"kvcaches": self.cache.tensors, "slot_mapping": slots}
        self.engine.store(tokens, mask=mask, offset=skip, **where, **TAGGED)
        self.cache.poison()
        for _ in range(3):
            self.begin_step()
        return self.flush()

    def begin_step(self, *more: Any) -> None:
        """Plan a step, and have the worker hear of it. more: of `Word`, behind the number."""
        step = self.adapter._parent._connector_metadata
        step.vcache = Word(step.vcache.number + 1, *(more or (step.vcache.voided,)))
        self.adapter.get_block_ids_with_load_errors()

    def prefill(self, tokens: list[int]) -> torch.Tensor:
        slots = places(SMALL, len(tokens))
        self.cache.poison()
        self.cache.fill(self.shard(tokens), slots)
        return slots

    def flush(self) -> bool:
        worker = self.worker
        return worker is None or bool(worker.session.flush(SECONDS))

    def lookup(self, tokens: list[int], request: str) -> int:
        """As LMCache's look-up server asks. request: empty: of nobody, and over at once."""
        if not request:
            found = self.lookup(tokens, "nobody")
            self.unpin("nobody")
            return found
        chunks = list(self.engine.token_database.process_tokens(tokens, make_key=False))
        given: dict[str, Any] = {"hashes": [chunk_hash for _, _, chunk_hash in chunks]}
        given |= {"offsets": [end - start for start, end, _ in chunks], "lookup_id": request}
        return int(self.engine.lookup(pin=True, **given, **TAGGED))

    def unpin(self, request: str) -> None:
        self.engine.lookup_unpin(request)

    def retrieve(self, tokens: list[int], request: str, cached: int) -> Retrieved:
        """Into poisoned blocks, the first `cached` tokens of which vLLM has already: they hold
        something else, to be left alone but for a last block that is not whole. To the end of the
        step, when vLLM asks which blocks failed."""
        slots = places(SMALL, len(tokens), 1)
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[: cached // CHUNK * CHUNK] = False
        kept = cached // SMALL.block_size * SMALL.block_size
        theirs = torch.tensor(tokens[:cached], dtype=torch.int64) + 900_000_000
        self.cache.poison()
        self.cache.fill(theirs, slots[:cached])
        found = self.load(tokens, mask, slots, request, cached)
        failed = self.adapter.get_block_ids_with_load_errors()
        found = found & ~torch.isin(slots // SMALL.block_size, torch.tensor(list(failed)))
        new = found.clone()
        new[:kept] = False
        expected = Cache(self.setup.arrangement)
        expected.fill(theirs[:kept], slots[:kept])
        expected.fill(self.shard(tokens)[new], slots[new])
        pairs = zip(self.cache.memory, expected.memory, strict=True)
        right = all(torch.equal(mine, its) for mine, its in pairs)
        count, first = int(found.sum()), int(found.int().argmax())
        return Retrieved(first, count, right and bool(found[first : first + count].all()))

    def load(
        self, tokens: list[int], mask: Any, slots: torch.Tensor, request: str, cached: int = 0
    ) -> torch.Tensor:
        """Begin to retrieve, as in a step. Says which tokens will be there."""
        where = {"kvcaches": self.cache.tensors, "slot_mapping": slots}
        more = {"vllm_cached_tokens": cached, "req_id": request} | TAGGED
        found: torch.Tensor = self.engine.retrieve(tokens, mask, **where, **more)
        self.unpin(request)
        return found

    def ask(self, tokens: list[int], request: str) -> int:
        """What vLLM's scheduler does: ask all ranks through LMCache's own client, and again until
        they have answered.
        """
        client = self.scheduler
        deadline = time.monotonic() + SECONDS
        found = client.lookup_cache(request)
        if found == -1:
            found = client.lookup(tokens, request, TAGGED["request_configs"])
        while found is None:
            found = client.lookup_cache(request)
            assert time.monotonic() < deadline
        client.clear_lookup_status(request)
        return int(found)

    @functools.cached_property
    def scheduler(self) -> Any:
        return LookupClientFactory.create_lookup_client(self.config, self.metadata)

    # ---- looking inside

    def healthy(self) -> bool:
        return bool(self.engine.is_healthy())

    def logged(self, text: str) -> list[str]:
        return [line for line in self.lines.texts if text in line]

    def shard(self, tokens: list[int]) -> torch.Tensor:
        """What the KV of this rank is made from: each rank's is another, but with MLA."""
        different = 0 if self.metadata.use_mla else self.setup.rank
        return torch.tensor(tokens, dtype=torch.int64) + different * 500_000_000

    def keys(self, tokens: list[int]) -> list[Any]:
        keys = self.engine.token_database.process_tokens(tokens, **TAGGED)
        return [key for _, _, key in keys]


class Lines(logging.Handler):
    """The plugin's log lines, from warnings up; one with a traceback says so."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("vcache_backend").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        traced = " (with a traceback)" if record.exc_info else ""
        self.texts.append(f"{record.levelname} {record.getMessage()}{traced}")


def metadata(setup: Setup) -> LMCacheMetadata:
    mla = setup.arrangement.name == "mla"
    heads = 1 if mla else SMALL.heads
    given: dict[str, Any] = {"model_name": "test", "role": "worker", "chunk_size": CHUNK}
    given |= dict.fromkeys(("world_size", "local_world_size"), setup.ranks)
    given |= dict.fromkeys(("worker_id", "local_worker_id"), setup.rank)
    given |= {"kv_shape": (SMALL.layers, 1 if mla else 2, CHUNK, heads, SMALL.dim), "use_mla": mla}
    given |= {"kv_dtype": setup.arrangement.dtype, "engine_id": setup.service or None}
    return LMCacheMetadata(**given)


def adapter(setup: Setup, tensors: list[torch.Tensor]) -> Any:
    """LMCache's adapter in vLLM's connector of this process, as far as the plugin reads and replaces
    it.
    """
    sizes = {"tensor": setup.ranks, "pipeline": 1, "data": 1}
    parallel = {f"parallel_config__{name}_parallel_size": size for name, size in sizes.items()}
    of = {"cache_config__block_size": SMALL.block_size, "device_config__device_type": "cpu"}
    mla = setup.arrangement.name == "mla"
    config = vllm_config(**parallel, **of, model_config__use_mla=mla)
    made = SimpleNamespace(_vllm_config=config, _block_size=SMALL.block_size)
    step = SimpleNamespace(vcache=Word(0, 0))
    made._parent = SimpleNamespace(_connector_metadata=step)
    made.kv_caches = {f"layers.{number}": tensor for number, tensor in enumerate(tensors)}
    made.start_load_kv = lambda forward_context: None
    made.get_block_ids_with_load_errors = lambda: set[int]()
    kind = type("FullAttentionSpec", (), {})()
    sys.modules["vllm.distributed.kv_transfer"] = kv_transfer(made, kind, SMALL.blocks)
    return made
