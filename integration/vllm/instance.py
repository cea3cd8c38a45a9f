"""What all parts of the scheduler half share: the instance's settings, its namespace, and its
connection to the server."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server import start
from vcache_backend.protocol.client import Client, Standing
from vcache_backend.protocol.messages import Join
from vcache_backend.resident.mappings import Tables
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.session import make_tier
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.generations import GenerationView

from ..around_vllm import served_at
from .blocks import KVBlocks
from .model import compat, groups, versions
from .model import spec as model_spec
from .model.sharing import Plan
from .news import ServerNews
from .publications import Publications
from .requests import Tracked
from .telemetry.events import Announcer

log = logging.getLogger("vllm.vcache")

INTRODUCTION_SECONDS = 10.0
"""How long the first request waits for the workers' shards. The shards arrive with the first step,
which runs no model."""


class InstanceContext:
    """The instance as its scheduler knows it. Runs in the scheduler's thread. Each method waits at
    most for one server call."""

    blocks: KVBlocks | None = None
    """vLLM's block pool; None until vLLM has shown it, before the first request."""
    refused = ""
    """Why nothing is cached; empty if the instance caches."""
    prefix = b""
    """Of the namespace's keys. This and the next three are empty or None before `open`."""
    client: Client | None = None
    outbox: Outbox | None = None
    tables: Tables | None = None
    """Other instances' generations; None unless KV caches are shared in place."""
    publications: Publications | None = None
    """This instance's publications; None unless KV caches are shared in place."""
    announcer: Announcer | None = None
    """None unless KV events are wanted. Chunks shared in place need no events of ours: vLLM
    announces its own KV cache."""
    _wait_until: float | None = None
    _not_cleared = ""
    """Why the last reset was not made; empty if it was."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, decision: Plan, loads: bool, stores: bool
    ) -> None:
        """decision: to cache. loads, stores: the instance's role allows loads, stores. SegmentError
        if memory is lacking."""
        self._model, self.config, _, self._standing = decision
        model, config, weights = self._model, self.config, self.config.connector.weights
        self.loads, self.stores = loads, stores
        in_place, lends = config.connector.share == "in_place", config.pool.lent > 0
        self.copies = stores and (not in_place or lends)
        """Blocks are copied into a pool: their next owners wait for that."""
        self.prompts_only = config.connector.store == "prompt"
        """Only chunks of prompts are stored."""
        self.ranks = model.pp_size * (1 if model.use_mla else model.tp_size)
        """Shards of a chunk."""
        self._shards: dict[tuple[int, int], model_spec.ShardSpec] = {}
        self._workers = model.pp_size * model.tp_size
        self._root, self._name = compat.hash_root(vllm_config), served_at(vllm_config)
        self.versions = bool(weights)
        """The user names versions of the weights."""
        self.version = versions.digest(weights) if weights else b""
        """The present version, hashed into every key (see `versions`). Empty without versions,
        until the weights change."""
        self._measure(vllm_config, kv_cache_config, in_place)
        self.news = ServerNews(copies=in_place and loads and not self.by_ends)
        if in_place:
            tables = {group.number: group.table(self.hash_block) for group in self.groups.all}
            self.publications = Publications(kv_cache_config.num_blocks, tables)
        if compat.publishes_events(vllm_config) and (not in_place or lends):
            self.announcer = Announcer(self.ranks)
        # Early: connecting takes a moment, in the background.
        self.offload = make_tier(config.offload, EngineStats(), model.device_type != "cpu")
        self.reads_tails = self.tails and not (stores or lends or self.offload is not None)
        """This is a decode server that loads prompts to their last token. What a server with a pool
        or an offload tier loads, or one that publishes, ends with a block."""

    def _measure(self, vllm_config: Any, kv_cache_config: Any, in_place: bool) -> None:
        """The units in which keys are made, and hits end."""
        self.chunk_size = self.config.engine.chunk_size
        self.hash_block = compat.hash_block_size(vllm_config, kv_cache_config)
        """Tokens of a hash in vLLM's `block_hashes`."""
        self.hashes = self.chunk_size // self.hash_block
        """vLLM's hashes of a chunk."""
        self.unit = 1 if in_place else self.hashes
        """vLLM's hashes of what requests name: in place blocks, in a pool chunks."""
        self.names = self.hashes // self.unit
        """Names of a chunk."""
        self.groups = groups.read(kv_cache_config, self.chunk_size, in_place)
        self.whole = self.groups.block if in_place else self.groups.whole
        """Hits end at multiples of this many tokens."""
        self.by_ends = in_place and not self.groups.plain
        """A hit in place ends only where all block tables have what it needs."""
        self.tails = in_place and self.groups.plain and self.hash_block == self.groups.block
        """A prefill server publishes the tokens behind a prompt's last whole block, too, and a
        decode server loads all but the prompt's last token: the step that computes this token alone
        runs as one CUDA graph, as steps that only decode do."""

    def watch(self, blocks: KVBlocks) -> None:
        """Note vLLM's pool. ValueError if pool and KV cache differ in size."""
        self.blocks = blocks
        if self.publications is not None:
            self.publications.pool.watch(blocks)
            if self.stores:
                blocks.on_cached.append(self.publications.on_cached)

    def measure(self, tracked: Tracked) -> int:
        """Note how many of the request's tokens could be loaded, and how many chunks hold them.
        Returns the tokens. vLLM always computes the last token."""
        request, lookup = tracked.request, tracked.lookup
        whole, hashes = self.whole, len(request.block_hashes)
        tokens = (request.num_tokens - 1) // whole * whole
        lookup.chunks = min(hashes // self.hashes, -(-tokens // self.chunk_size))
        held = lookup.chunks * self.hashes if self.publications is None else hashes
        lookup.most = min(tokens, held * self.hash_block // whole * whole)
        if self.reads_tails and self.has_tail(request):
            lookup.most = request.num_tokens - 1
        return lookup.most

    def has_tail(self, request: Any) -> bool:
        """Whether the tokens behind the request's last whole block have a name (`tail_hash`)."""
        whole = bool(request.block_hashes) and request.prompt_embeds is None
        return whole and not request.mm_features

    # ---- the workers' shards

    @property
    def introduced(self) -> bool:
        """Whether all workers have introduced themselves, or the instance is refused."""
        return bool(self.refused) or len(self._shards) == self._workers

    def waits(self) -> bool:
        """Whether requests must wait for the workers' shards. After `INTRODUCTION_SECONDS` the
        instance is refused."""
        if self.prefix or self.introduced:
            return False
        self._wait_until = self._wait_until or monotonic() + INTRODUCTION_SECONDS
        if monotonic() > self._wait_until:
            self.refused = (
                f"only {len(self._shards)} of {self._workers} workers have described their KV "
                f"caches within {INTRODUCTION_SECONDS:g} s: see the log of the others"
            )
        return not self.refused

    def note(
        self,
        shards: Mapping[tuple[int, int], model_spec.ShardSpec],
        links: Mapping[int, tuple[bool, float | None]],
    ) -> None:
        """Note the workers' reports. shards: by (pipeline rank, tensor rank), a shard, or why the
        worker stopped caching. links: by worker number, see `OffloadTier.link`."""
        if shards and not self.refused:
            self._shards |= shards
            problems = sorted({shard.problem for shard in self._shards.values() if shard.problem})
            if problems:
                self.refused = "; ".join(problems)
                if self.offload is not None:
                    self.offload.close()
                    self.offload = None
        if links and self.offload is not None:
            self.offload.note(links, self.ranks)

    # ---- the server

    def open(self) -> bool:
        """Connect to the server once the namespace is known: every worker has sent its shard.

        Returns whether chunks can be named now."""
        if self.prefix or self.refused or not self.introduced:
            return not self.refused and bool(self.prefix)
        if self.blocks is None:
            self.refused = "this vLLM has not passed its block pool to the connector"
            return False
        config, shards = self.config, [self._shards[rank] for rank in sorted(self._shards)]
        layout = model_spec.layout(self._model, shards, self.chunk_size, self._root)
        namespace = layout.namespace()
        fields = layout.fields() | {"namespace": str(namespace), "vllm": self._standing}
        self.client = client = Client(
            config.server.path, config.client, layout=fields, name=self._name
        )
        if config.connector.start_server:
            client.on_killed = partial(start.try_ensure, config)
        self.outbox = Outbox()
        self.prefix = namespace.prefix
        if self.announcer is not None:
            client.on_beat.append(self._check_announced)
        # Answers bring news even if no request waits for them any more.
        client.on_reply = self.news.hear
        if self.publications is not None:
            self.tables = Tables(client)
            Standing(client, self._join, "vcache: others cannot read this instance's KV cache")
        client.on_return.append(self._hear)
        self._hear()
        if trouble := client.trouble:
            log.warning("vcache: %s; until it answers nothing is cached", trouble)
        told = "vcache: namespace %s, chunks of %d tokens, ranks: %d"
        log.info(told, namespace, self.chunk_size, self.ranks)
        return True

    @property
    def connected(self) -> bool:
        """Whether the server can be asked where chunks are."""
        return self.client is not None and self.client.connected

    def view(self, instance: bytes) -> GenerationView | None:
        """Another instance's generations; None if the instance is gone, or without a server."""
        return self.tables.view(instance) if self.tables is not None else None

    def clear(self) -> bool:
        """Reset the namespace: no chunk, pooled or offloaded, is found again. Also True for a
        refused instance. Asked again in each step, it logs a cause once.

        False if the server did not answer, or before the first step, when the namespace is unknown.
        """
        if not self.open() or self.client is None:
            return bool(self.refused)
        try:
            self.client.clear(self.prefix, reset=True)
        except VCacheError as error:
            if str(error) != self._not_cleared:
                log.warning("the pool was not cleared, so nothing is read from it: %s", error)
            self._not_cleared = str(error)
            return False
        self._not_cleared = ""
        self._hear()
        return True

    def close(self) -> None:
        """Idempotent."""
        self._hear()  # any call also sends the queued reports
        for part in (self.publications, self.outbox, self.client, self.offload):
            if part is not None:
                part.close()

    # ---- inside; in the scheduler's thread or the client's background thread

    def _join(self) -> None:
        """Show the server our generation table."""
        own, client = self.publications, self.client
        if own is not None and client is not None:
            shape = own.generations.blocks, self.ranks, self.hashes, list(own.tables)
            client.join(Join(own.instance, self.prefix, *shape), own.generations.fd)

    def _hear(self) -> None:
        """Hear of the epoch, if the server answers."""
        if self.client is not None:
            with suppress(VCacheError):
                self.client.heartbeat()

    def _check_announced(self) -> None:
        """Ask which announced chunks are gone."""
        if self.announcer is not None and self.client is not None:
            with suppress(VCacheError):
                self.announcer.check(self.client.contains)
