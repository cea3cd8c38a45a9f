"""The hooks into vLLM for LMCache: who shares with whom.

What a hit is worth with them, `test_integrations` shows with the real ones.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import itertools
import sys
import types
from typing import Any

import pytest
from vllm_cases import missing, needs_vllm

from vcache_backend.integration import plugin
from vcache_backend.integration.lmcache import hooks as lmcache_hooks
from vcache_backend.integration.lmcache.boundary import LMCacheBoundary
from vcache_backend.integration.lmcache.scheduler import PLAIN, TAG, UNCACHED, give_scope, scope
from vcache_backend.integration.vllm.adapters import Adapters

if not missing(()):
    pytest.importorskip("vllm.v1.request")  # it lets the warnings pass that come with the import
    import torch
    from vllm import PoolingParams, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


def test_every_difference_of_salt_adapter_or_tags_is_a_scope_of_its_own() -> None:
    adapters = (), ("a", "/x"), ("b", "/x"), ("a", "/y"), ("a/x", ""), ("", ""), ("", "/x")
    salts = None, "", "a", "-", "a\0b", "é", "\ud800"
    tags: list[Any] = [{}, {"a": "1"}, {"a": 1}, {"b": 1}, {"a": 1, "b": 1}, {"a": ["1"]}]
    scopes = [scope(*each) for each in itertools.product(salts, adapters, tags)]
    assert len(set(scopes)) == len(salts) * len(adapters) * len(tags)
    assert scope("a", tags={"b": 1, "a": 1}) == scope("a", tags={"a": 1, "b": 1})
    # Instances of two versions share a pool; a change here must be meant.
    assert scope("tenant", ("sql", "/adapters/sql")) == "55f9e7f7aa722cb763281e24e133f7cb"


def request(params: Any = None, **more: Any) -> Request:
    """params: its `kv_transfer_params`."""
    given = SamplingParams(extra_args={"kv_transfer_params": params or {}})
    return Request("r", [1, 2, 3], given, None, **more)


def tags(of: Request) -> dict[str, Any]:
    return dict(of.sampling_params.extra_args["kv_transfer_params"])


@needs_vllm
def test_requests_that_no_key_tells_apart_are_not_cached_however_often_they_are_scheduled() -> None:
    """LMCache hashes token ids, and those of embeddings are all zero. Nobody can see what lies at
    the path of an adapter that is not there. Tags that JSON does not know have no order."""
    unseen = LoRARequest("sql", 1, "/sql")
    for one in (
        request(prompt_embeds=torch.zeros(3, 8)),
        request(lora_request=unseen),
        request({TAG: "ours is no user's"}, lora_request=unseen),
        request({"lmcache.tag.team": {"red"}}),
        request("no mapping"),
    ):
        for _ in ("new", "preempted"):
            assert give_scope(one, Adapters()) == tags(one)[TAG] == UNCACHED
    assert give_scope(Request("r", [1, 2, 3], None, PoolingParams()), Adapters()) == UNCACHED


@needs_vllm
def test_requests_that_share_their_parameters_keep_their_own_scopes() -> None:
    team = {"lmcache.tag.team": "red"}
    plain, red = request({TAG: "forged"}), request(team)
    shared = red.sampling_params
    salted = Request("2", [1, 2, 3], shared, None, cache_salt="a")
    wanted = PLAIN, scope(None, tags=team), scope("a", tags=team)
    for _ in ("new", "preempted"):
        for one, its in zip((plain, red, salted), wanted, strict=True):
            assert give_scope(one, Adapters()) == tags(one)[TAG] == its
    assert shared.extra_args == {"kv_transfer_params": team}


# ---- the entry point


def test_vllm_finds_the_hook_under_the_name_vcache() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="vcache")
    assert entry.load() is plugin.register


def test_registering_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = types.ModuleType("a vLLM without that class")
    monkeypatch.setitem(sys.modules, lmcache_hooks.CONNECTOR_MODULE, without)
    monkeypatch.setattr(lmcache_hooks, "SCHEDULER", LMCacheBoundary("scheduler"))
    lmcache_hooks.register()
    assert "vcache failed in LMCache's scheduler" in caplog.text


def test_a_factory_that_takes_no_names_leaves_the_long_way_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, plugin.FACTORY, types.ModuleType("a vLLM without the class"))
    plugin.register_name()
    assert f"only by kv_connector_module_path ({plugin.CONNECTOR})" in caplog.text


@needs_vllm
def test_the_connectors_name_is_all_that_vllm_needs_once_our_plugin_was_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factory = importlib.import_module(plugin.FACTORY).KVConnectorFactory
    monkeypatch.setattr(factory, "_registry", {})
    told = KVTransferConfig(kv_connector="VCacheConnector", kv_role="kv_both")
    with pytest.raises(ValueError, match="Unsupported connector type: VCacheConnector"):
        factory.get_connector_class(told)
    for _ in range(2):
        plugin.register()
        found = factory.get_connector_class(told)
        assert found.__module__ == "vcache_backend.integration.vllm.connector"
