"""Scopes: requests share cached prefixes only within a scope.

LMCache's keys contain neither vLLM's `cache_salt` nor the LoRA adapter. So the scheduler writes
each request's scope into its `kv_transfer_params`, as LMCache's tag `vcache`, and the worker caches
nothing of a request without the tag. Imports neither vLLM nor LMCache."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any

from ..vllm.scheduler.adapters import Adapters

TAG_PREFIX = "lmcache.tag."
TAG_NAME = "vcache"
TAG = TAG_PREFIX + TAG_NAME
PLAIN = "-"
"""The scope of a request with neither salt, adapter nor tags."""
UNCACHED = ""
"""In place of a scope: nothing of the request is cached."""
_PARAMS = "kv_transfer_params"


def scope(salt: str | None, adapter: tuple[str, ...] = (), tags: Mapping[str, Any] = {}) -> str:
    """Make a request's scope: `-`, or the hex BLAKE2b-128 of salt, adapter and tags. TypeError,
    ValueError or RecursionError for tags that JSON does not know."""
    if salt is None and not adapter and not tags:
        return PLAIN
    text = json.dumps([salt, adapter, tags], sort_keys=True)
    return blake2b(text.encode(), digest_size=16, person=b"vcache-scope-2").hexdigest()


def give_scope(request: Any, adapters: Adapters) -> str:
    """Write a vLLM request's scope into its sampling parameters, and return it. Idempotent.

    `UNCACHED`: a request without sampling parameters (pooling); with prompt embeddings (LMCache's
    key has only token ids); with a LoRA adapter whose weights cannot be identified (see
    `Adapters`); with tags that JSON does not know; that was refused before. The parameters are
    copied, since other requests may hold the same object."""
    if request.sampling_params is None:
        return UNCACHED
    params = copy.copy(request.sampling_params)
    given = (params.extra_args or {}).get(_PARAMS) or {}
    own = given if isinstance(given, Mapping) else {}
    refused = own is not given or own.get(TAG) == UNCACHED
    value = UNCACHED if refused else _scope_of(request, own, adapters)
    params.extra_args = {**(params.extra_args or {}), _PARAMS: {**own, TAG: value}}
    request.sampling_params = params
    return value


def _scope_of(request: Any, given: Mapping[Any, Any], adapters: Adapters) -> str:
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_path, adapters.content(lora)) if lora is not None else ()
    names = [name for name in given if isinstance(name, str) and name.startswith(TAG_PREFIX)]
    tags = {name: given[name] for name in names if name != TAG}
    known = getattr(request, "prompt_embeds", None) is None and (not adapter or adapter[-1])
    with suppress(TypeError, ValueError, RecursionError):
        return scope(request.cache_salt, adapter, tags) if known else UNCACHED
    return UNCACHED
