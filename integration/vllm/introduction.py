"""What the workers of an instance hold, by their own word, and what follows: which chunks are its own, and its scheduler's connection."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from time import monotonic

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import SegmentId
from vcache_backend.resident.pins import Pinning
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer.courier import Courier
from vcache_backend.transfer.keys import BlockHashKeys
from vcache_backend.transfer.layout import checked_layout
from vcache_backend.vram_pool.devices import Where

from . import compat, model_spec
from .events import Announcer
from .metadata import Link, Shard
from .offload import OffloadLookup
from .publications import Publications

log = logging.getLogger("vllm.vcache")

INTRODUCTION_SECONDS = 10.0
"""How long the first request waits for the workers to say what they hold; they do in the first step, which runs no model."""


class Introduction:
    """In the scheduler's thread. Nothing waits longer than a call of the client may.

    refused: why nothing is cached, empty if something is. ranks: shards of a chunk. readable: the segments that all workers can
    read, places: where segments lie for the first one, and mapped: the instances whose KV caches all can read. keys, client, courier:
    once it is open, of the instance's namespace. announcer: what it has published, where somebody wants KV events. shared: what this
    instance shares in place, tables: the generations of others, and pinning: what keeps their blocks, where KV caches are shared so.
    """

    def __init__(
        self,
        config: Config,
        model: model_spec.ModelSpec,
        hash_block: int,
        refused: str | None,
        publications: Publications | None = None,
    ) -> None:
        """hash_block: tokens that one of vLLM's block hashes stands for. publications: what is shared in place, if that is how."""
        self._config, self._model, self._hash_block = config, model, hash_block
        self._shards: dict[tuple[int, int], model_spec.ShardSpec] = {}
        self._wait_until = 0.0
        self._prefix = b""
        self._not_joined = ""
        """Why the server has not our generations, if it said so."""
        self.shared = publications
        self.announcer: Announcer | None = None
        self.tables: Tables | None = None
        self.keys: BlockHashKeys | None = None
        self.client: Client | None = None
        self.courier: Courier | None = None
        self.readable: frozenset[SegmentId] = frozenset()
        self.places: Mapping[SegmentId, Where] = {}
        self.mapped: frozenset[bytes] = frozenset()
        self.pinning: Pinning | None = None
        self.ranks = model.pp_size * (1 if model.use_mla else model.tp_size)
        self.workers = model.pp_size * model.tp_size
        self._segments: dict[int, Mapping[SegmentId, Where]] = {}
        self._mapped: dict[int, frozenset[bytes]] = {}
        self.offload: OffloadLookup | None = None
        self.refused = ""
        if refused:
            self._refuse(refused)
            return
        try:
            # Now, since it takes a moment in the background until it is there.
            self.offload = OffloadLookup(config.offload, self.ranks, model.device_type != "cpu")
        except Exception:  # the integration's outermost line: vLLM serves without
            log.exception("vcache: nothing is read from the offload tier")

    @property
    def over(self) -> bool:
        """Whether it is known what every worker holds, or that nothing is cached."""
        return bool(self.refused) or len(self._shards) == self.workers

    def waits(self) -> bool:
        """Whether a request is to wait until all workers have said what they hold, for `INTRODUCTION_SECONDS` at most."""
        if self.keys is not None or self.over:
            return False
        self._wait_until = self._wait_until or monotonic() + INTRODUCTION_SECONDS
        if monotonic() > self._wait_until:
            self._refuse(f"of all workers only {sorted(self._shards)} (pipeline rank, tensor rank) said what they hold")
        return not self.refused

    def note(self, shards: Mapping[tuple[int, int], Shard], links: Mapping[int, Link]) -> None:
        """shards: what workers hold, by (pipeline rank, tensor rank), or that one caches nothing any more. links: how they reach the
        offload tier, by their numbers."""
        if shards and not self.refused:
            self._shards |= {rank: shard.spec for rank, shard in shards.items()}
            problems = sorted({shard.problem for shard in self._shards.values() if shard.problem})
            if problems:
                self._refuse("; ".join(problems))
            if self.offload is not None and (problems or not all(shard.offload for shard in shards.values())):
                self.offload.close()
                self.offload = None
        if links and self.offload is not None:
            self.offload.note(links)

    def reads(self, segments: Mapping[int, Mapping[SegmentId, Where]], mapped: Mapping[int, frozenset[bytes]]) -> None:
        """What workers can read, by their numbers, where that changed."""
        self._segments |= segments
        self._mapped |= mapped
        if len(self._segments) == self.workers:
            self.readable = frozenset.intersection(*map(frozenset, self._segments.values()))
            self.places = self._segments[0]
        if len(self._mapped) == self.workers:
            self.mapped = frozenset.intersection(*self._mapped.values())

    def open(self) -> bool:
        """Connect, once everything that names depend on is known: the engine runs, and every worker has said what it holds. Whether
        chunks can be named."""
        if self.keys is not None or self.refused or not self.over:
            return not self.refused and self.keys is not None
        if self.shared is not None and not self.shared.watches:
            self._refuse(
                "this vLLM has not shown the blocks of its KV cache, so they cannot be shared in place; set connector.share: pool"
            )
            return False
        config, shards = self._config, [self._shards[rank] for rank in sorted(self._shards)]
        layout = checked_layout(config, model_spec.layout(self._model, shards, config.engine.chunk_size, compat.hash_root()))
        namespace = layout.namespace()
        self.client = Client(config.server.path, config.client, layout=layout.fields() | {"namespace": str(namespace)})
        self.courier = Courier(self.client)
        self._prefix = namespace.prefix
        self.keys = BlockHashKeys(namespace, config.engine.chunk_size // self._hash_block)
        if self.announcer is not None:
            self.client.on_beat.append(self._check)
        if self.shared is not None:
            self.tables = Tables(self.client)
            self.pinning = Pinning(self.client, self.tables)
            self.shared.view = self.tables.view
            self.shared.retract = partial(self.courier.retract, self.shared.instance)
            self.client.on_return.append(self._join)
            self.client.on_beat.append(self._beat)
            self._join()
        if trouble := self.client.trouble:
            log.warning("vcache: %s; everything is computed until then", trouble)
        log.info("vcache: namespace %s, chunks of %d tokens, %d shards", namespace, config.engine.chunk_size, self.ranks)
        return True

    def _join(self) -> None:
        """Show the server our generations: now, to every server that comes after it, and with every heartbeat until it takes them. Also
        in the client's background thread."""
        here, client = self.shared, self.client
        if here is None or client is None or not client.connected:
            return
        try:
            client.join(here.instance, self._prefix, here.blocks, self.ranks, here.each, here.generations.fd, here.lead)
            if here.pins is not None:
                client.show_pins(here.instance, here.pins.fd)
        except VCacheError as error:
            if str(error) != self._not_joined:
                log.warning("vcache: others cannot read this instance's KV cache: %s", error)
            self._not_joined = str(error)
            return
        self._not_joined = ""
        self._listen()

    def _beat(self) -> None:
        if self._not_joined:
            self._join()
        else:
            self._listen()

    def _listen(self) -> None:
        """Hear of resets that others have made, and of chunks that they have read. Also in the client's background thread."""
        here, client = self.shared, self.client
        if here is None or client is None:
            return
        try:
            here.hear(client.listen(here.instance))
        except VCacheError as error:
            log.debug("listen: %s", error)

    def _check(self) -> None:
        """Hear which of the chunks published are gone. In the client's background thread."""
        if self.announcer is not None and self.client is not None:
            with suppress(VCacheError):
                self.announcer.check(self.client.contains)

    def clear(self) -> bool:
        """Have no chunk of the namespace found again, in the pool or the offload tier; False if the server did not answer, or before the
        first step, when nobody knows which namespace that is."""
        if not self.open() or self.client is None:
            return bool(self.refused)
        try:
            self.client.clear(self._prefix, reset=True)
        except VCacheError as error:
            log.warning("the pool was not cleared, so nothing is read from it: %s", error)
            return False
        self._listen()
        return True

    def close(self) -> None:
        """Idempotent."""
        if self.client is not None:
            with suppress(VCacheError):  # with what is still to be told
                self.client.list_segments()
        for part in (self.courier, self.client, self.offload):
            if part is not None:
                part.close()

    def _refuse(self, reason: str) -> None:
        self.refused = reason
        log.error("vcache caches nothing: %s. vLLM serves all the same", reason)
