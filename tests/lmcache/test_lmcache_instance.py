"""What the plugin finds out about its instance, which instances share, and what must be right
before it works.

What vLLM's configuration says is read by `integration.vllm.model.spec`, see test_spec.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from processes import Worker
from torch import Tensor
from vllm_cases import home, missing
from vllm_objects import BLOCK, BLOCKS, caches, vllm_config

from benchmarks.vllm.settings import lmcache as lmcache_settings
from vcache_backend.errors import ConfigError, LayoutError
from vcache_backend.integration.hooks import Changed
from vcache_backend.integration.lmcache import hooks
from vcache_backend.integration.lmcache.instance import Instance, discover, hash_probe, refusal

needs_lmcache = pytest.mark.skipif(bool(missing()), reason=missing() or "LMCache is here")
# LMCache's imports warn.
pytestmark = [needs_lmcache, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CHUNK = 16

FIELDS: dict[str, Any] = {"model_name": "org/model", "world_size": 2, "local_world_size": 2}
FIELDS |= {"worker_id": 1, "local_worker_id": 1, "kv_dtype": torch.bfloat16}
FIELDS |= {"kv_shape": (3, 2, CHUNK, 2, 8), "use_mla": False}


def lmcache_metadata(**changes: Any) -> Any:
    from lmcache.v1.metadata import LMCacheMetadata

    return LMCacheMetadata(**(FIELDS | changes))


# ---- under vLLM: its objects as far as they are read

Find = Callable[..., Instance]
FULL = type("FullAttentionSpec", (), {})()
WINDOW = type("SlidingWindowSpec", (), {"sliding_window": 8})()


@pytest.fixture
def under_vllm(monkeypatch: pytest.MonkeyPatch) -> Find:
    """Discover the instance of worker `worker_id` whose vLLM has these changes."""

    def find(
        worker_id: int = 1,
        kvcaches: dict[str, Tensor] | None = None,
        name: str = "",
        several: bool = False,
        kind: Any = FULL,
        use_mla: bool = False,
        **changes: Any,
    ) -> Instance:
        known = lmcache_metadata(world_size=4, worker_id=worker_id, use_mla=use_mla)
        tensors = caches() if kvcaches is None else kvcaches
        adapter = SimpleNamespace(_vllm_config=vllm_config(**changes), kv_caches=tensors)
        config = SimpleNamespace(
            num_blocks=BLOCKS, kv_cache_groups=[SimpleNamespace(kv_cache_spec=kind)]
        )
        group = SimpleNamespace(_lmcache_engine=adapter, _kv_cache_config=config)
        if several:
            both = [SimpleNamespace(), group]
            group = SimpleNamespace(_connectors=both, _kv_cache_config=config)
        module = SimpleNamespace(
            has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: group
        )
        monkeypatch.setitem(sys.modules, "vllm.distributed.kv_transfer", module)
        monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.31.0"))
        return discover(known, name)

    return find


def namespace(
    instance: Instance, chunk_size: int = CHUNK, probe: str = "7", how: str = "sha256_cbor"
) -> str:
    kv = instance.describe(chunk_size)
    return str(instance.layout(kv, chunk_size, probe, how).namespace())


def test_layers_whose_pages_have_several_sizes_are_refused(under_vllm: Find) -> None:
    first, *others = caches().items()
    wider = first[0], torch.cat([first[1], first[1]], dim=3)
    with pytest.raises(LayoutError, match="several sizes .* vcache's own connector"):
        namespace(under_vllm(kvcaches=dict([wider, *others])))


def test_under_vllm_its_configuration_says_it(under_vllm: Find) -> None:
    found = under_vllm(worker_id=3)
    assert (found.model.model, found.model.block_size) == ("org/model", BLOCK)
    expected = (1, 1, 2, BLOCKS)
    assert (found.pp_rank, found.rank, found.ranks, found.num_blocks) == expected
    assert found.kvcaches is found.adapter.kv_caches
    assert under_vllm(worker_id=3, several=True) == found
    mla = under_vllm(worker_id=3, use_mla=True)
    assert (mla.pp_rank, mla.rank, mla.ranks) == (1, 0, 1)
    with pytest.raises(ConfigError, match="no vLLM here with LMCacheConnectorV1"):
        under_vllm(kvcaches={})
    assert under_vllm(kind=WINDOW).several > found.several


# ---- who shares

# What else of vLLM's configuration matters: test_spec.
DIFFERENT: list[dict[str, Any]] = [{"model_config__model": "org/other"}, {"worker_id": 2}]
DIFFERENT += [{"parallel_config__tensor_parallel_size": 1}]
DIFFERENT += [{"kvcaches": dict(reversed(caches().items()))}]
DIFFERENT += [{"kvcaches": caches(2 * BLOCKS, BLOCK // 2)}]
SAME: list[dict[str, Any]] = [{"worker_id": 0}, {"several": True}]
SAME += [{"cache_config__gpu_memory_utilization": 0.5}]


def test_who_differs_in_anything_does_not_share_and_who_is_alike_does(under_vllm: Find) -> None:
    mine = namespace(under_vllm())
    found = [mine, *(namespace(under_vllm(**changes)) for changes in DIFFERENT)]
    assert [changes for i, changes in enumerate(DIFFERENT) if found.count(found[i + 1]) > 1] == []
    assert [changes for changes in SAME if namespace(under_vllm(**changes)) != mine] == []
    one = under_vllm()
    others = {namespace(one, probe="8"), namespace(one, how="builtin")}
    assert len({mine, *others, namespace(one, chunk_size=2 * CHUNK)}) == 4


# ---- real LMCache


def token_database(algorithm: str, chunk_size: int = CHUNK) -> Any:
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.token_database import ChunkedTokenDatabase

    given = {"chunk_size": chunk_size, "pre_caching_hash_algorithm": algorithm}
    config = LMCacheEngineConfig.from_defaults(**given)
    return ChunkedTokenDatabase(config, lmcache_metadata())


def probes(_: object, seed: str) -> list[str]:
    """In a process that has imported LMCache and vLLM."""
    os.environ["PYTHONHASHSEED"] = seed
    database = token_database("builtin")
    ((_, _, expected),) = database.process_tokens(torch.arange(1, CHUNK + 1), make_key=False)
    assert hash_probe(database) == str(expected)
    made = [("builtin", 2 * CHUNK), *((how, CHUNK) for how in ("builtin", "sha256_cbor", "sha256"))]
    return [hash_probe(token_database(*each)) for each in made]


def test_the_probe_tells_chunk_sizes_algorithms_and_seeds_apart() -> None:
    with Worker(home(), dict, name="LMCache") as there:
        first, second = there.ask(probes, "0"), there.ask(probes, "1")
        assert len({*first, *second}) == len(first) + len(second)
        assert there.ask(probes, "0") == first


# ---- versions, settings that cannot work


def lacking(_: object) -> None:
    """In a process of its own."""
    from lmcache.v1.cache_engine import LMCacheEngineBuilder
    from lmcache.v1.storage_backend.storage_manager import StorageManager

    engine = SimpleNamespace(retrieve=lambda tokens, **kwargs: None, stats_monitor=None)
    del LMCacheEngineBuilder._instances
    StorageManager._get_allocator_backend = lambda self: None

    def install() -> None:
        hooks.install(engine, SimpleNamespace(), SimpleNamespace(), None)

    for said, replaced in (
        ("StorageManager has no _get_allocator_backend with config", hooks.take_allocator_role),
        ("LMCacheEngineBuilder has no _instances", lambda: hooks.engine_of(None)),
        ("has no token_database, retrieve_locations", install),
    ):
        with pytest.raises(Changed, match=said):
            replaced()


def test_what_lmcache_lacks_is_seen_where_it_is_replaced() -> None:
    with Worker(home(), dict, name="LMCache") as there:
        there.ask(lacking)


def lm_config(**changes: Any) -> Any:
    """LMCache's configuration as our example sets it, with changes."""
    from lmcache.v1.config import LMCacheEngineConfig

    values = lmcache_settings({}, {"chunk_size": CHUNK} | changes)
    return LMCacheEngineConfig.from_defaults(**values)


def test_the_example_is_supported(under_vllm: Find) -> None:
    assert refusal(lm_config(), under_vllm()) == ""


RENAMED: dict[str, Any] = {"storage_plugins": ["other", "pool"], "store_location": "other"}
NAMED = {"storage_plugin.pool.module_path": "vcache_backend.integration.lmcache.backend"}
RENAMED |= {"extra_config": NAMED | {"save_only_first_rank": False}}
LOCAL = "LocalCPUBackend"
ELSEWHERE = {"lmcache": {"store_location": LOCAL}}
FIRST_RANK: dict[str, Any] = {"lmcache": {"extra_config": {}}}
FIRST_RANK |= {"vllm": {"model_config__use_mla": True}}
REFUSED: dict[str, dict[str, Any]] = {
    "remove use_layerwise": {"lmcache": {"use_layerwise": True}},
    "remove external_lookup_client": {"lmcache": {"external_lookup_client": "mooncakestore://x"}},
    "add vcache, or remove retrieve_locations": {"lmcache": {"retrieve_locations": [LOCAL]}},
    f"store_location is {LOCAL}, .* or remove store_location": ELSEWHERE,
    "add pool, or remove": {"lmcache": RENAMED},
    "context parallel": {"vllm": {"parallel_config__decode_context_parallel_size": 2}},
    "without --enable-fault-tolerance": {"vllm": {"parallel_config__enable_fault_tolerance": True}},
    "LMCache does not hear of new weights": {"vllm": {"weight_transfer_config": object()}},
    "set save_only_first_rank: false": FIRST_RANK,
    'with "kv_connector":"VCacheConnector"': {"vllm": {"kind": WINDOW}},
    "without --scheduling-policy priority": {"vllm": {"scheduler_config__policy": "priority"}},
}
"""What is said of which change, in LMCache's settings or in vLLM's."""


@pytest.mark.parametrize("said", REFUSED)
def test_what_cannot_work_is_named_with_what_to_set(under_vllm: Find, said: str) -> None:
    changes = REFUSED[said]
    instance = under_vllm(**changes.get("vllm", {}))
    assert re.search(said, refusal(lm_config(**changes.get("lmcache", {})), instance))
