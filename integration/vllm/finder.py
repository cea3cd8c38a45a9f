"""What the pool, and the offload tier it, have of a request's chunks: the scheduler's connections, names, look-ups and leases."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic, perf_counter
from typing import Any

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, SegmentId
from vcache_backend.transfer.courier import Courier
from vcache_backend.transfer.keys import BlockHashKeys, adapter_digest
from vcache_backend.transfer.layout import checked_layout

from . import compat, model_spec, request_params
from .adapters import Adapters
from .metadata import Granted, Link, Shard
from .offload import Below
from .stats import Meter

log = logging.getLogger("vllm.vcache")

NEVER = float("-inf")
INTRODUCTION_SECONDS = 10.0
"""How long the first request waits for the workers to say what they hold; they do in the first step, which runs no model."""
FRESH_SECONDS = 0.5
"""How long the answer of a look-up counts for a request that vLLM could not schedule at once."""


@dataclass(slots=True)
class Tracked:
    """One request. stored: chunks from its start that are in the pool or on their way. hits: how many leading chunks there were at
    the time `looked_at`, `pooled` of them in the pool, and `below` if not all. granted: the lease on those after the first
    `granted_from`. local: its tokens in vLLM's own cache when it was matched. spent: seconds this module took for it."""

    request: Any
    params: request_params.RequestParams
    keys: list[ChunkKey] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    stored: int = 0
    hits: int = 0
    looked_at: float = NEVER
    pooled: int = 0
    below: bool = False
    granted: Granted | None = None
    granted_from: int = 0
    local: int = 0
    failed: bool = False
    loading: bool = False
    spent: float = 0.0


class Finder:
    """Finds chunks, from the scheduler's thread. Nothing waits longer than a call of the client and one of the store's may.

    refused: why nothing is cached, empty if something is. ranks: shards of a chunk. readable: the segments that the worker can
    read, of an instance that has one.
    """

    def __init__(self, config: Config, model: model_spec.ModelSpec, hash_block: int, refused: str | None, meter: Meter) -> None:
        """hash_block: tokens that one of vLLM's block hashes stands for."""
        self._config, self._model, self._meter = config, model, meter
        self._size, self._hash_block = config.engine.chunk_size, hash_block
        self._shards: dict[tuple[int, int], model_spec.ShardSpec] = {}
        self._introduced_by = 0.0
        self._client: Client | None = None
        self._namer: BlockHashKeys | None = None
        self._releaser: Courier | None = None
        self._adapters = Adapters()
        self._prefix = b""
        self._workers = model.pp_size * model.tp_size
        self.ranks = model.pp_size * (1 if model.use_mla else model.tp_size)
        self._below: Below | None = None
        if not refused:
            try:
                # Now, since it takes a moment in the background until it is there.
                self._below = Below(config.offload, self.ranks, model.device_type != "cpu")
            except Exception:  # the door to vLLM
                log.exception("vcache: nothing is read from the offload tier")
        self.readable: frozenset[SegmentId] = frozenset()
        self.refused = ""
        if refused:
            self._refuse(refused)

    @property
    def introduced(self) -> bool:
        """Is it known what every worker holds, or that nothing is cached?"""
        return bool(self.refused) or len(self._shards) == self._workers

    def wait(self) -> bool:
        """Is a request to wait until everything is `introduced`? Not for longer than `INTRODUCTION_SECONDS`."""
        if self.introduced:
            return False
        self._introduced_by = self._introduced_by or monotonic() + INTRODUCTION_SECONDS
        if monotonic() > self._introduced_by:
            self._refuse(f"{len(self._shards)} of {self._workers} workers said what they hold")
        return not self.refused

    def meet(self, shards: Mapping[tuple[int, int], Shard]) -> None:
        """What workers hold, by (pipeline rank, tensor rank)."""
        if not shards or self.introduced:
            return
        self._shards |= {rank: shard.spec for rank, shard in shards.items()}
        problems = sorted({shard.problem for shard in self._shards.values() if shard.problem})
        if problems:
            self._refuse("; ".join(problems))
        if self._below is not None and (problems or not all(shard.below for shard in shards.values())):
            self._below.close()
            self._below = None

    def open(self) -> bool:
        """Connect, once everything that names depend on is known: the engine runs, and every worker has said what it holds. Can chunks
        be named?"""
        if self._namer is not None or self.refused:
            return not self.refused
        if not self.introduced:
            return False
        shards = [self._shards[rank] for rank in sorted(self._shards)]
        layout = checked_layout(self._config, model_spec.layout(self._model, shards, self._size, compat.hash_root()))
        namespace = layout.namespace()
        self._client = Client(
            self._config.server.path, self._config.client, layout=layout.fields() | {"namespace": str(namespace)}
        )
        self._prefix = namespace.prefix
        self._releaser = Courier(self._client)
        self._namer = BlockHashKeys(namespace, self._size // self._hash_block)
        if trouble := self._client.trouble:
            log.warning("vcache: %s; everything is computed until then", trouble)
        log.info("vcache: namespace %s, chunks of %d tokens, %d shards", namespace, self._size, self.ranks)
        return True

    def whole(self, request: Any) -> int:
        """How many whole chunks the tokens of vLLM's `request` are, as far as they are hashed."""
        return self._namer.whole(request.block_hashes) if self._namer is not None else 0

    def name(self, tracked: Tracked, whole: int) -> bool:
        """Make the keys of the first `whole` chunks known; False if nothing of the request may be cached, now or later."""
        request, adapter = tracked.request, b""
        if request.lora_request is not None:
            content = self._adapters.content(request.lora_request)
            if not content:
                tracked.params = request_params.NOTHING
                return False
            adapter = adapter_digest(request.lora_request, content)
        if self._namer is not None and len(tracked.keys) < whole:
            tracked.keys += self._namer.keys(request.block_hashes, len(tracked.keys), whole, adapter)
        return True

    def look_up(self, tracked: Tracked, first: int, whole: int) -> int:
        """How many leading chunks all workers can load, given that the first `first` are not needed."""
        if self._fresh(tracked, first):
            return min(tracked.hits, whole)
        client = self._client
        if client is None or not client.connected:
            return first
        started = perf_counter()
        try:
            found = client.lookup(tracked.keys[first:whole], self.ranks)
        except VCacheError as error:
            log.debug("look-up: %s", error)
            self._meter.failed("server")
            return first
        return self._found(client, tracked, first, whole, found, started)

    def lease(self, tracked: Tracked, first: int, whole: int) -> int:
        """`look_up` for a load that is part of the step: under a lease from here on, since vLLM counts on it.

        Without one, where the worker cannot read all of it at once.
        """
        client, now = self._client, monotonic()
        granted = tracked.granted
        if granted is not None:
            if tracked.granted_from == first and granted.deadline - now > granted.seconds / 2:
                return min(first + len(granted.locations), whole)
            self.let_go(tracked)
        if tracked.below and self._fresh(tracked, first):
            return min(tracked.hits, whole)
        if client is None or not client.connected:
            return first
        started = perf_counter()
        try:
            leased = client.acquire(tracked.keys[first:whole])
        except VCacheError as error:
            log.debug("look-up: %s", error)
            self._meter.failed("server")
            return first
        found = len(leased.locations)
        if leased.lease:
            tracked.granted = Granted(leased.lease, leased.locations, now + leased.seconds, leased.seconds)
            tracked.granted_from = first
        hits = self._found(client, tracked, first, whole, found, started)
        if tracked.below or not {location.segment for location in leased.locations} <= self.readable:
            self.let_go(tracked)
        return hits

    def let_go(self, tracked: Tracked) -> None:
        """End a lease that nobody reads under, in the background."""
        if tracked.granted is not None and self._releaser is not None:
            self._releaser.release(tracked.granted.lease)
        tracked.granted = None

    @property
    def reads_below(self) -> bool:
        """May a chunk that is not in the pool lie below it?"""
        return self._below is not None and self._below.usable

    def hear(self, links: Mapping[int, Link]) -> None:
        """How workers reach the offload tier."""
        if self._below is not None and links:
            self._below.hear(links)

    def clear(self) -> bool:
        """Have no chunk of the namespace found again, in the pool or below; False if the server did not answer, or before the first step,
        when nobody knows which namespace that is."""
        if not self.open():
            return bool(self.refused)
        try:
            if self._client is not None:
                self._client.clear(self._prefix, reset=True)
        except VCacheError as error:
            log.warning("the pool was not cleared, so nothing is read from it: %s", error)
            return False
        return True

    def close(self) -> None:
        if self._releaser is not None:
            self._releaser.close()
        if self._client is not None:
            self._client.close()
        if self._below is not None:
            self._below.close()

    def _fresh(self, tracked: Tracked, first: int) -> bool:
        """Does the last look-up still count?"""
        return tracked.looked_at + FRESH_SECONDS > monotonic() and tracked.hits >= first

    def _found(self, client: Client, tracked: Tracked, first: int, whole: int, pooled: int, started: float) -> int:
        """A look-up that began at `started` has found `pooled` chunks in the pool: with what lies below, how many leading ones?"""
        asked, found = whole - first, pooled
        if self._below is not None and pooled < asked:
            found = self._below.continued(client, tracked.keys[first:whole], pooled)
        self._looked_up(tracked, asked, pooled, found, perf_counter() - started)
        tracked.hits, tracked.pooled, tracked.below = first + found, first + pooled, found > pooled
        tracked.looked_at = monotonic()
        return first + found

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.error("vcache caches nothing: %s. vLLM serves all the same", reason)

    def _looked_up(self, tracked: Tracked, asked: int, pooled: int, found: int, seconds: float) -> None:
        self._meter.looked_up(asked * self._size, found * self._size, seconds)
        if log.isEnabledFor(logging.DEBUG):
            lie = f", {found - pooled} of them below" if found > pooled else ""
            log.debug("look-up %s: %d of %d chunks%s, %.0f us", tracked.request.request_id, found, asked, lie, 1e6 * seconds)
