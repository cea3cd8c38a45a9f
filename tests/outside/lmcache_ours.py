"""LMCache's own tests of its engine and its storage backends, with vcache where they take one of
LMCache's.

- test_cache_engine.py, which asks for a GPU: its engines get our storage plugin from their
  configuration, whichever tiers a test
  configures, look-ups ask it, and a store has ended when it returns. KV caches are smaller, so that
  they fit a machine without a GPU;
  and the worker is the only one, not one of three: a chunk is found once all have stored their
  part.
- test_local_cpu_backend.py: `LocalCPUBackend` is our backend, and what is put is memory that it
  allocated.
- test_storage_plugin.py: the plugin is ours, and writes down which of its methods LMCache calls.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
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

LAYERS, HEADS, HEAD = 2, 8, 16
BLOCK = 16
TYPE = torch.bfloat16
EXTRA: dict[str, Any] = {
    "storage_plugin.vcache.module_path": "lmcache_ours",
    "storage_plugin.vcache.class_name": "Plugin",
    "save_only_first_rank": False,
    "vcache.server.socket": str(SOCKET),
    "vcache.pool.device": "host",
    "vcache.pool.segment_bytes": "16 MiB",
    "vcache.block_size": BLOCK,
}

ROOMY = {"vcache.pool.segment_bytes": "64 MiB"}
"""The tests of single backends have larger chunks. Those of the engine want to see an eviction."""


def __getattr__(name: str) -> Any:
    """`Plugin`, for LMCache, which imports it by its name; made late, since LMCache must not be
    imported before its tests do.
    """
    if name == "Plugin":
        return _classes().Plugin
    raise AttributeError(name)


@functools.cache
def _classes() -> Any:
    from vcache_backend.integration.lmcache.backend import VCacheBackend

    class Plugin(VCacheBackend):  # type: ignore[misc]
        def __init__(self, **given: Any) -> None:
            took_part()
            super().__init__(**given)

        def wait(self) -> None:
            """Until what was put is there: LMCache's host tier has it at once, and the tests count
            on that.
            """
            if self.worker is not None:
                self.worker.session.flush()

    class Alone(Plugin):
        """One without an engine, with KV caches of its own that its chunks are stored from."""

        def __init__(self, config: Any, metadata: Any, block: int) -> None:
            config.extra_config = {
                **(config.extra_config or {}),
                **EXTRA,
                **ROOMY,
                "vcache.block_size": block,
            }
            config.store_location = "vcache"
            super().__init__(config=config, metadata=metadata)
            layers, _, tokens, heads, head = metadata.kv_shape
            self.caches = [
                torch.rand([2, 64 * tokens // block, block, heads, head], dtype=TYPE)
                for _ in range(layers)
            ]
            self._next, self._tokens = 0, tokens
            assert self.bind(self.caches) is not None, self.reason

        def chunk(self) -> Any:
            """Memory of ours with a chunk in it, as a store has it."""
            obj = self.allocate(self.metadata.get_shapes(self._tokens), self.metadata.get_dtypes())
            slots = torch.arange(self._tokens) + self._next % 64 * self._tokens
            self._next += 1
            self.note_sources([obj], [0], {"kvcaches": self.caches, "slot_mapping": slots})
            return obj

        def put(self, keys: list[Any], objs: list[Any]) -> None:
            self.batched_submit_put_task(keys, objs)
            self.wait()

    class HostTier(Alone):
        """What test_local_cpu_backend.py asks of a `LocalCPUBackend`."""

        last: Any = None

        def __init__(
            self,
            config: Any,
            memory_allocator: Any = None,
            metadata: Any = None,
            lmcache_worker: Any = None,
        ) -> None:
            from lmcache.v1.metadata import LMCacheMetadata

            # A chunk of the shape that these tests allocate: 16 layers of 8 tokens.
            config.chunk_size = 8
            own = LMCacheMetadata("test_model", 1, 1, 0, 0, TYPE, (16, 2, 8, 1, 128), chunk_size=8)
            super().__init__(config, own, 8)
            self.memory_allocator, HostTier.last = memory_allocator, self

        def submit_put_task(self, key: Any, obj: Any) -> None:
            self.put([key], [obj])

        @property
        def hot_cache(self) -> Any:
            return self

        def __contains__(self, key: Any) -> bool:
            return self.contains(key)

        def __getitem__(self, key: Any) -> Any:
            return self.get_blocking(key)

    class MockStoragePlugin(Alone):
        """What test_storage_plugin.py asks of its own plugin."""

        def __init__(self, config: Any, metadata: Any, **_: Any) -> None:
            super().__init__(config, metadata, BLOCK)
            self.call_history: list[str] = []

        @property
        def storage(self) -> Any:
            return self

        def _key(self, chunk_hash: int) -> Any:
            from lmcache.utils import CacheEngineKey

            return CacheEngineKey("test_model", 1, 0, chunk_hash, TYPE)

        def __setitem__(self, chunk_hash: int, obj: Any) -> None:
            self.put([self._key(chunk_hash)], [self.chunk()])

        def __contains__(self, chunk_hash: int) -> bool:
            return super().batched_contains([self._key(chunk_hash)]) == 1

    def told(name: str) -> Any:
        theirs = getattr(Alone, name)

        def method(self: Any, keys: Any, *more: Any, **named: Any) -> Any:
            for key in keys if isinstance(keys, list) else [keys]:
                self.call_history.append(f"{name.removeprefix('batched_')}:{key.chunk_hash}")
            return theirs(self, keys, *more, **named)

        return method

    for name in ("contains", "batched_contains", "get_blocking", "remove", "batched_remove"):
        setattr(MockStoragePlugin, name, told(name))
    return SimpleNamespace(Plugin=Plugin, HostTier=HostTier, MockStoragePlugin=MockStoragePlugin)


def pytest_sessionstart(session: pytest.Session) -> None:
    from lmcache.observability import LMCStatsMonitor
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector.mock_gpu_connector import MockGPUConnector
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.token_database import ChunkedTokenDatabase

    from vcache_backend.integration.lmcache import patches

    utils = importlib.import_module("tests.v1.utils")
    utils.generate_kv_cache_paged_list_tensors = functools.partial(
        _kv_caches, utils.generate_kv_cache_paged_list_tensors
    )
    utils.check_paged_kv_cache_equal = functools.partial(
        utils.check_paged_kv_cache_equal, num_heads=HEADS, head_size=HEAD
    )
    utils.create_gpu_connector = lambda hidden, layers: MockGPUConnector(
        (LAYERS, 2, 256, HEADS, HEAD)
    )

    def metadata(kv_shape: Any = (32, 2, 256, 8, 128)) -> Any:
        """Of one worker: a chunk is found once all have stored their part, and here the others
        never do.
        """
        return LMCacheMetadata(
            "test_model",
            1,
            1,
            0,
            0,
            TYPE,
            (LAYERS, 2, kv_shape[2], HEADS, HEAD),
            chunk_size=kv_shape[2],
        )

    utils.dumb_metadata = metadata

    legacy = LMCacheEngineConfig.from_legacy

    def from_legacy(chunk_size: int = 256, **given: Any) -> Any:
        kept = {name: value for name, value in given.items() if name == "save_unfull_chunk"}
        made = legacy(chunk_size=chunk_size, backend="cpu", **kept)
        made.local_cpu, made.max_local_cpu_size, made.storage_plugins, made.extra_config = (
            False,
            0,
            ["vcache"],
            dict(EXTRA),
        )
        return made

    LMCacheEngineConfig.from_legacy = from_legacy
    lookup, store = LMCacheEngine.lookup, LMCacheEngine.store

    @functools.wraps(store)
    def store_and_wait(self: Any, *given: Any, **more: Any) -> None:
        store(self, *given, **more)
        for backend in self.storage_manager.storage_backends.values():
            if isinstance(backend, _classes().Plugin):
                backend.wait()

    LMCacheEngine.store = store_and_wait

    # The plugin looks at the signature.
    @functools.wraps(lookup)
    def look_up(self: Any, *given: Any, search_range: Any = None, **more: Any) -> Any:
        return lookup(self, *given, search_range=["vcache"] if search_range else None, **more)

    LMCacheEngine.lookup = look_up
    engine_of = patches.engine_of

    def engine_or_stand_in(metadata: Any) -> Any:
        """Of a backend that is made without an engine: where the plugin puts itself, and the
        database that names chunks.
        """
        engine = engine_of(metadata)
        if engine is not None:
            return engine
        config = LMCacheEngineConfig.from_defaults(chunk_size=metadata.kv_shape[2])
        database = ChunkedTokenDatabase(config, metadata)
        engine = SimpleNamespace(
            gpu_connector=None,
            storage_manager=None,
            token_database=database,
            lookup_pins={},
            retrieve_locations=None,
        )
        for name in (
            "lookup",
            "lookup_unpin",
            "retrieve",
        ):
            setattr(engine, name, functools.partial(getattr(LMCacheEngine, name), engine))
        engine.is_healthy, engine.mark_init_failed = lambda: True, lambda reason: None
        engine.stats_monitor = LMCStatsMonitor.GetOrCreate()
        return engine

    patches.engine_of = engine_or_stand_in


def _kv_caches(
    make: Any, num_blocks: int, device: str, block_size: int = BLOCK, dtype: Any = TYPE, **_: Any
) -> Any:
    return [
        torch.rand([2, num_blocks, block_size, HEADS, HEAD], dtype=dtype, device=device)
        for _ in range(LAYERS)
    ]


def pytest_collection_modifyitems(items: Iterable[pytest.Item]) -> None:
    modules = {module for item in items if (module := item.getparent(pytest.Module)) is not None}
    for module in modules:
        _stand_in(module.obj, module)


def _stand_in(there: ModuleType, module: pytest.Module) -> None:
    if there.__name__.endswith("test_cache_engine"):
        # "Requires CUDA": their GPU connectors do, ours does not.
        module.own_markers[:] = [mark for mark in module.own_markers if mark.name != "skipif"]
    elif there.__name__.endswith("test_local_cpu_backend"):
        there.LocalCPUBackend = _classes().HostTier  # type: ignore[attr-defined]
        there.create_test_memory_obj = lambda **_: _classes().HostTier.last.chunk()  # type: ignore[attr-defined]
    elif there.__name__.endswith("test_storage_plugin"):
        there.MockStoragePlugin = _classes().MockStoragePlugin  # type: ignore[attr-defined]
