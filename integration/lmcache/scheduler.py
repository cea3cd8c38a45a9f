"""Our part of LMCache's connector in vLLM's scheduler: gives requests their scopes, resets, and
keeps KV out of the pool that vLLM may have computed from wrong KV.

LMCache's keys contain neither vLLM's `cache_salt` nor the LoRA adapter. So the scheduler writes
each request's scope into its `kv_transfer_params`, as LMCache's tag `vcache`, and the worker caches
nothing of a request without the tag.

LMCache loads KV in the step that computes with it. When vLLM hears that a load has failed in a
worker, it may have computed with the unfilled blocks, in this step and in the steps planned since.
So after a failed load, as after a reset, nothing that exists is trusted: vLLM's prefix cache is
emptied, and the requests alive at that moment store nothing more and enter no more blocks into the
prefix cache. Whatever a later request begins with is then right. Imports neither vLLM nor
LMCache."""

from __future__ import annotations

import copy
import importlib
import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from ..vllm.adapters import Adapters
from .boundary import SCHEDULER, THEIRS

if TYPE_CHECKING:
    from ..vllm.blocks import KVBlocks

log = logging.getLogger(__name__)

TAG_PREFIX = "lmcache.tag."
TAG_NAME = "vcache"
TAG = TAG_PREFIX + TAG_NAME
PLAIN = "-"
"""The scope of a request with neither salt, adapter nor tags."""
UNCACHED = ""
"""In place of a scope: nothing of the request is cached."""
_PARAMS = "kv_transfer_params"
RESET = "vcache.reset"
"""The name of a look-up that asks the workers to reset, LMCache's only way to them, and of its
entry in `request_configs`: the next `Word.voided`."""
WAS_RESET = 1
"""A worker's answer. LMCache returns the least answer, and 0 if a worker gave none."""


class Word(NamedTuple):
    """The scheduler's message to the workers in each step, `vcache` in LMCache's metadata.

    number: of the step. voided: how many failed loads and resets are known; `inf`: nothing may be
    stored any more. distrusted: the requests of which nothing may be stored; None: all."""

    number: int
    voided: float
    distrusted: frozenset[str] | None = frozenset()


class LMCacheScheduler:
    """Wraps calls of LMCache's connector and adapter, through `SCHEDULER` (see `boundary`). Runs in
    the scheduler's thread.

    stopped: nothing is looked up or stored until the next reset."""

    def __init__(self, connector: Any) -> None:
        self._adapter = adapter = connector._lmcache_engine
        self._load_spec = importlib.import_module(type(adapter).__module__).LoadSpec
        self._adapters = Adapters()
        self._blocks: KVBlocks | None = None
        self.stopped, self._number, self._voided = False, 0, 0
        self._distrusted: frozenset[str] = frozenset()
        instead = SCHEDULER.instead
        instead(adapter, "get_num_new_matched_tokens", self._match, off=self._miss, nothing=0)
        instead(adapter, "request_finished", self._forget)
        instead(connector, "update_connector_output", self._hear, off=self._hear)
        SCHEDULER.behind(adapter, "build_connector_meta", self._tell, _stop_workers)
        connector.bind_gpu_block_pool = partial(SCHEDULER.run, self._watch)
        connector.reset_cache = partial(SCHEDULER.run, self._reset, nothing=False)
        connector.weights_change = partial(SCHEDULER.run, self._stop)
        connector.weights_are = lambda name: None

    # ---- requests

    def _match(self, request: Any, num_computed_tokens: int) -> Any:
        """Give the request its scope, before LMCache looks it up. No look-up if the request is not
        cached or must compute every token (for prompt log probabilities)."""
        cached = give_scope(request, self._adapters)
        computes = getattr(request, "skip_reading_prefix_cache", False) or self.stopped
        if self._adapter.lookup_client is None or (cached and not computes):
            return THEIRS
        return self._miss(request, num_computed_tokens)

    def _miss(self, request: Any, num_computed_tokens: int) -> int:
        """Answer that nothing was found."""
        # LMCache asserts that a preempted request has a load spec.
        self._adapter.load_specs[request.request_id] = self._load_spec(
            vllm_cached_tokens=num_computed_tokens, lmcache_cached_tokens=0, can_load=False
        )
        return 0

    def _forget(self, request: Any, *_: Any) -> Any:
        """Forget the look-up of a request that has not run. The name may come again, if vLLM does
        not make names unique (VLLM_DISABLE_REQUEST_ID_RANDOMIZATION)."""
        if self._adapter.lookup_client is not None:
            self._adapter.lookup_client.clear_lookup_status(request.request_id)
        return THEIRS

    # ---- what is distrusted

    def _watch(self, pool: Any) -> None:
        """Note vLLM's block pool, which vLLM shows before the first request."""
        from ..vllm.blocks import KVBlocks  # numpy, which few processes need

        self._blocks = KVBlocks(pool)

    def _distrust(self) -> None:
        """Distrust all KV that vLLM has, and that the requests alive now go on to compute."""
        self._voided += 1
        assert self._blocks is not None, "vLLM has not shown its block pool"
        self._distrusted = self._distrusted.union(self._adapter._request_trackers)
        self._blocks.kept_out = set(self._distrusted)
        self._blocks.evict(self._blocks.held)

    def _hear(self, connector_output: Any) -> Any:
        """Learn whether a load has failed. Also while nothing is shared."""
        if connector_output.invalid_block_ids:
            self._distrust()
        return THEIRS

    def _tell(self, meta: Any, _: Any) -> Any:
        """Add our message to the step's metadata."""
        self._distrusted = self._distrusted.intersection(self._adapter._request_trackers)
        if self._blocks is not None:
            self._blocks.kept_out = set(self._distrusted)
        meta.vcache = Word(self._number, self._voided, None if self.stopped else self._distrusted)
        self._number += 1
        return meta

    # ---- resets

    def _stop(self) -> None:
        """vLLM is about to change the weights, see `versions.watch`."""
        if not self.stopped:
            log.warning("vcache: vLLM's weights change: nothing is shared until the next reset")
        self.stopped = True

    def _reset(self) -> bool:
        """Reset the namespace in all workers. Unless all say so, nothing is shared."""
        self.stopped, client = True, self._adapter.lookup_client
        self._distrust()
        if client is None:
            return True
        for request_id in list(getattr(client, "reqs_status", ())):
            client.clear_lookup_status(request_id)
        try:
            chunk = [0] * self._adapter._lmcache_chunk_size
            self.stopped = client.lookup(chunk, RESET, {RESET: self._voided}) != WAS_RESET
            client.clear_lookup_status(RESET)
        except Exception:  # LMCache's
            log.exception("vcache: the pool was not reset, so nothing is shared")
        return not self.stopped


def _stop_workers(meta: Any, _: Any) -> Any:
    """Have the workers store nothing any more."""
    meta.vcache = Word(0, inf, None)
    return meta


# ---- scopes: requests share cached prefixes only within a scope


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
