"""Which requests share with whom through LMCache. What a hit is worth with that, test_real_hits shows."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from vllm_cases import missing, needs_vllm

from vcache_backend.integration.lmcache.scheduler import PLAIN, TAG, UNCACHED, give_scope, scope
from vcache_backend.integration.vllm.adapters import Adapters

if not missing(()):
    pytest.importorskip("vllm.v1.request")  # it lets the warnings pass that come with the import
    import torch
    from vllm import PoolingParams, SamplingParams
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
