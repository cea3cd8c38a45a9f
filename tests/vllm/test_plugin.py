"""The entry point by which vLLM finds the connector and the hooks for LMCache."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
import types

import pytest
from vllm_cases import missing, needs_vllm

from vcache_backend.integration import plugin
from vcache_backend.integration.lmcache import hooks as lmcache_hooks
from vcache_backend.integration.lmcache.boundary import LMCacheBoundary

if not missing(()):
    pytest.importorskip("vllm.v1.request")  # it lets the warnings pass that come with the import
    from vllm.config import KVTransferConfig


def test_vllm_finds_the_hook_under_the_name_vcache() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="vcache")
    assert entry.load() is plugin.register


def test_registering_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = types.ModuleType("a vLLM without that class")
    monkeypatch.setitem(sys.modules, plugin.LMCACHE, without)
    monkeypatch.setattr(lmcache_hooks, "SCHEDULER", LMCacheBoundary("scheduler"))
    plugin.register()
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
