"""The hooks into vLLM for LMCache: who shares with whom.

What a hit is worth with them, `test_integrations` shows with the real ones.
"""

from __future__ import annotations

import importlib.metadata
import sys
import types
from typing import Any

import pytest
from vllm_cases import missing, needs_vllm

from vcache_backend.integration import plugin
from vcache_backend.integration.lmcache import patches
from vcache_backend.integration.lmcache import scope as scopes
from vcache_backend.integration.lmcache.boundary import LMCacheBoundary
from vcache_backend.integration.lmcache.scope import TAG, give_scope, scope
from vcache_backend.integration.vllm.scheduler.adapters import Adapters

if not missing(()):
    pytest.importorskip("vllm.v1.request")  # it lets the warnings pass that come with the import
    import torch
    from vllm import PoolingParams, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request


def test_every_difference_of_salt_or_adapter_is_a_scope_of_its_own() -> None:
    adapters = None, ("a", "/x"), ("b", "/x"), ("a", "/y"), ("a/x", ""), ("", ""), ("", "/x")
    salts = None, "", "a", "-", "a\0b", "é", "\ud800"
    scopes = [scope(salt, adapter) for salt in salts for adapter in adapters]
    assert len(set(scopes)) == len(salts) * len(adapters)
    # Instances of two versions share a pool; a change here must be meant.
    assert scope("tenant", ("sql", "/adapters/sql")) == "d76006b8c18f95f5029f03826d95891e"


def request(params: Any = None, **more: Any) -> Request:
    """params: its `kv_transfer_params`."""
    given = SamplingParams(extra_args={"kv_transfer_params": params or {}})
    return Request("r", [1, 2, 3], given, None, **more)


def tags(of: Request) -> dict[str, Any]:
    return dict(of.sampling_params.extra_args["kv_transfer_params"])


@needs_vllm
def test_requests_that_no_key_tells_apart_are_not_cached_however_often_they_are_scheduled() -> None:
    """LMCache hashes token ids, and those of embeddings are all zero. Nobody can see what lies at
    the path of an adapter that is not there."""
    unseen = LoRARequest("sql", 1, "/sql")
    for one in (
        request(prompt_embeds=torch.zeros(3, 8)),
        request(lora_request=unseen),
        request({TAG: "ours is no user's"}, lora_request=unseen),
    ):
        for _ in ("new", "preempted"):
            assert not give_scope(one, Adapters())
            assert tags(one) == {scopes.SKIP_SAVE: True, scopes.REFUSED: True}
    assert not give_scope(Request("r", [1, 2, 3], None, PoolingParams()), Adapters())


@needs_vllm
def test_requests_that_share_their_parameters_keep_their_own_scopes() -> None:
    plain = request({"lmcache.tag.team": "red"})
    shared = plain.sampling_params
    salted = Request("2", [1, 2, 3], shared, None, cache_salt="a")
    for one, wanted in ((plain, scopes.PLAIN), (salted, scope("a", None))):
        assert give_scope(one, Adapters())
        assert list(tags(one).items()) == [(TAG, wanted), ("lmcache.tag.team", "red")]
    assert shared.extra_args == {"kv_transfer_params": {"lmcache.tag.team": "red"}}


@needs_vllm
def test_a_tag_that_cannot_be_hashed_is_named_in_one_short_line() -> None:
    """Clients write it, and it goes to the log."""
    for name in ("lmcache.tag.a\nERROR forged", f"lmcache.tag.{'x' * 100_000}"):
        with pytest.raises(ValueError, match="'lmcache.tag.* is a list; a tag is text") as raised:
            give_scope(request({name: ["red"]}), Adapters())
        line = str(raised.value)
        assert line.isprintable()
        assert len(line) < 200


# ---- the entry point


def test_vllm_finds_the_hook_under_the_name_vcache() -> None:
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="vcache")
    assert entry.load() is plugin.register


def test_registering_never_raises(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = types.ModuleType("a vLLM without that class")
    monkeypatch.setitem(sys.modules, patches.CONNECTOR_MODULE, without)
    monkeypatch.setattr(patches, "SCHEDULER", LMCacheBoundary("scheduler"))
    patches.register()
    assert "LMCache's scheduler shares nothing any more" in caplog.text
