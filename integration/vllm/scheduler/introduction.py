"""Collects the workers' shards, derives the namespace from them, and opens the scheduler's
connection."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from time import monotonic

from vcache_backend.config import Config
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server import start
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import Found, Heard
from vcache_backend.protocol.standing import Standing
from vcache_backend.resident.mappings import Tables
from vcache_backend.transfer.keys import BlockHashKeys
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.session import make_tier
from vcache_backend.transfer.stats import EngineStats

from ..in_place.publications import Publications
from ..metadata import Link
from ..model import spec as model_spec
from ..model import versions
from ..telemetry.events import Announcer
from .offload import OffloadLookup

log = logging.getLogger("vllm.vcache")

INTRODUCTION_SECONDS = 10.0
"""How long the first request waits for the workers' shards. The shards arrive with the first step,
which runs no model."""


class Introduction:
    """Runs in the scheduler's thread. Each method waits at most for one server call.

    prefix: of the namespace's keys; empty before `open`. refused: why nothing is cached; empty if
    the instance caches. ranks: shards of a chunk. keys, client, outbox: None before `open`.
    announcer: None unless KV events are wanted. publications, tables: this instance's publications
    and other instances' generations; None unless KV caches are shared in place. versions: the user
    names versions of the weights. version: the present version, hashed into every key (see
    `versions.py`); empty without versions, until the weights change."""

    def __init__(
        self,
        config: Config,
        model: model_spec.ModelSpec,
        hash_block: int,
        hash_root: bytes,
        publications: Publications | None,
        name: str,
    ) -> None:
        """hash_block: tokens of a vLLM block hash. hash_root: see `compat`. publications: None
        unless KV caches are shared in place. name: for the server's status."""
        self._config, self._model, self._hash_block = config, model, hash_block
        self._shards: dict[tuple[int, int], model_spec.ShardSpec] = {}
        self._wait_until, self._root = 0.0, hash_root
        self.prefix, self._name = b"", name
        self.publications = publications
        weights = config.connector.weights
        self.versions = bool(weights)
        self.version = versions.digest(weights) if weights else b""
        self.announcer: Announcer | None = None
        self.tables: Tables | None = None
        self.keys: BlockHashKeys | None = None
        self.client: Client | None = None
        self.outbox: Outbox | None = None
        self.ranks = model.pp_size * (1 if model.use_mla else model.tp_size)
        self.workers = model.pp_size * model.tp_size
        self.offload: OffloadLookup | None = None
        self.refused = ""
        try:
            # Early: connecting takes a moment, in the background.
            tier = make_tier(config.offload, EngineStats(), model.device_type != "cpu")
            self.offload = OffloadLookup(tier, self.ranks) if tier is not None else None
        except Exception:  # the integration's outermost line: vLLM serves without
            log.exception("vcache: nothing is read from the offload tier")

    @property
    def over(self) -> bool:
        """Whether all workers have introduced themselves, or the instance is refused."""
        return bool(self.refused) or len(self._shards) == self.workers

    def waits(self) -> bool:
        """Whether requests must wait for the workers' shards. After `INTRODUCTION_SECONDS` the
        instance is refused."""
        if self.keys is not None or self.over:
            return False
        self._wait_until = self._wait_until or monotonic() + INTRODUCTION_SECONDS
        if monotonic() > self._wait_until:
            self._refuse(
                f"only {len(self._shards)} of {self.workers} workers have described their KV "
                f"caches within {INTRODUCTION_SECONDS:g} s: see the log of the others"
            )
        return not self.refused

    def note(
        self, shards: Mapping[tuple[int, int], model_spec.ShardSpec], links: Mapping[int, Link]
    ) -> None:
        """Note the workers' reports. shards: by (pipeline rank, tensor rank), a shard, or why the
        worker stopped caching. links: by worker number, the connection to the offload tier."""
        if shards and not self.refused:
            self._shards |= shards
            problems = sorted({shard.problem for shard in self._shards.values() if shard.problem})
            if problems:
                self._refuse("; ".join(problems))
                if self.offload is not None:
                    self.offload.close()
                    self.offload = None
        if links and self.offload is not None:
            self.offload.note(links)

    def open(self) -> bool:
        """Connect to the server once the namespace is known: every worker has sent its shard.

        Returns whether chunks can be named now."""
        if self.keys is not None or self.refused or not self.over:
            return not self.refused and self.keys is not None
        if self.publications is not None and not self.publications.watches:
            self._refuse(
                "this vLLM has not passed its block pool to the connector, so nothing can be "
                "shared in place; set connector.share: pool"
            )
            return False
        config, shards = self._config, [self._shards[rank] for rank in sorted(self._shards)]
        size = config.engine.chunk_size
        layout = model_spec.layout(self._model, shards, size, self._root)
        namespace = layout.namespace()
        fields = layout.fields() | {"namespace": str(namespace)}
        self.client = Client(config.server.path, config.client, layout=fields, name=self._name)
        if config.connector.start_server:
            self.client.on_killed = partial(start.try_ensure, config)
        self.outbox = Outbox(self.client)
        self.prefix = namespace.prefix
        self.keys = BlockHashKeys(namespace, size // self._hash_block)
        if self.announcer is not None:
            self.client.on_beat.append(self._check)
        if self.publications is not None:
            self._share(self.client, self.outbox, self.publications)
        if trouble := self.client.trouble:
            log.warning("vcache: %s; until it answers nothing is cached", trouble)
        said = "vcache: namespace %s, chunks of %d tokens, ranks: %d"
        log.info(said, namespace, size, self.ranks)
        return True

    def _share(self, client: Client, outbox: Outbox, publications: Publications) -> None:
        """Begin to read other instances' KV caches, and to show this instance's KV cache."""
        self.tables = Tables(client)
        publications.view = self.tables.view
        publications.reachable = lambda: client.connected
        publications.retract = lambda sequence: outbox.send(
            partial(client.retract, publications.instance, sequence)
        )
        # Answers bring news even if no request waits for them any more.
        client.on_reply = lambda reply: (
            publications.hear(reply) if isinstance(reply, Found | Heard) else None
        )
        join = partial(self._join, client, publications)
        Standing(client, join, "vcache: others cannot read this instance's KV cache")
        client.on_beat.append(self._listen)

    def _join(self, client: Client, publications: Publications) -> None:
        """Show the server our generation table, and listen. Runs in the scheduler's thread or the
        client's background thread."""
        shape = publications.blocks, self.ranks, publications.each
        client.join(publications.instance, self.prefix, *shape, publications.generations.fd)
        self._listen()

    def _listen(self) -> None:
        """Ask for resets by other instances, and for chunks in several KV caches. Runs in either
        thread."""
        publications, client = self.publications, self.client
        if publications is None or client is None:
            return
        try:
            client.listen(publications.instance)
        except VCacheError as error:
            log.debug("listen: %s", error)

    def _check(self) -> None:
        """Ask which announced chunks are gone. Runs in the client's background thread."""
        if self.announcer is not None and self.client is not None:
            with suppress(VCacheError):
                self.announcer.check(self.client.contains)

    def clear(self) -> bool:
        """Reset the namespace: no chunk, pooled or offloaded, is found again. Also True for a
        refused instance.

        False if the server did not answer, or before the first step, when the namespace is unknown.
        """
        if not self.open() or self.client is None:
            return bool(self.refused)
        try:
            self.client.clear(self.prefix, reset=True)
        except VCacheError as error:
            log.warning("the pool was not cleared, so nothing is read from it: %s", error)
            return False
        self._listen()
        return True

    def close(self) -> None:
        """Idempotent."""
        if self.client is not None:
            with suppress(VCacheError):  # any call also sends the queued reports
                self.client.list_segments()
        for part in (self.outbox, self.client, self.offload):
            if part is not None:
                part.close()

    def _refuse(self, reason: str) -> None:
        self.refused = reason
