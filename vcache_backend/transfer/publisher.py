"""Publishes the chunks in a worker's KV cache that is shared in place, and publishes them again to
a new server."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from msgspec import structs

from vcache_backend.backoff import Backoff
from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import NUMBER_BYTES, InstanceId, Publish
from vcache_backend.resident.mappings import Tables
from vcache_backend.transfer.outbox import Outbox, polled
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copies.copier import Mark
from vcache_backend.vram_pool.generations import GenerationView

log = logging.getLogger(__name__)

_POLL_SECONDS = 0.002
"""Each look at a step takes the interpreter from the thread that launches the next step."""
MAX_WAITING = 1024
"""The most publications that wait for the end of their step. Further publications are dropped:
other instances miss the chunks."""
TOGETHER = 16
"""How many chunks are saved together. If a block is handed out before the copy, the whole group is
not saved."""
RETRY_SECONDS, SLOWEST_SECONDS = 1.0, 60.0
"""The first and the longest pause between two attempts to publish everything again; each pause is
twice as long as the last one. The server refuses until the scheduler has shown its generations."""


class Publisher:
    """Publishes one worker's chunks in the order of submission, each chunk after the step that
    wrote it.

    Keeps the last chunk that begins at each block. If the server loses chunks, kept chunks with
    unchanged blocks are published again."""

    def __init__(self, client: Client, stats: EngineStats, instance: InstanceId, each: int) -> None:
        """each: blocks of a chunk."""
        self._client, self._stats, self._instance, self._each = client, stats, instance, each
        self._kept: dict[bytes, Publish] = {}
        """Publications of single chunks, by the bytes of the first block's number."""
        self._tables = Tables(client)
        self._due = math.inf
        """When to publish all kept chunks again; infinite while the server has them."""
        self._pauses = Backoff(RETRY_SECONDS, SLOWEST_SECONDS)
        self.outbox = Outbox(client, stats.failed)
        client.on_return.append(self._returned)
        client.on_beat.append(self._beat)

    def submit(self, publication: Publish, written: Mark, soon: bool = True) -> None:
        """Queue chunks that can be read once `written` is reached. Any thread; never blocks. soon:
        other instances may look for the chunks, see `Outbox.after`."""
        if len(self.outbox) >= MAX_WAITING:
            self._stats.failed("publication_dropped")
            return
        reached = polled(written.reached, _POLL_SECONDS)
        self.outbox.after(reached, partial(self._publish, publication), soon)

    def known(self, publication: Publish) -> list[Publish]:
        """Return the chunks of `publication` that were published with the same fields, in any
        sequence: `TOGETHER` at a time, the last chunks first. Any thread.

        Leaves out chunks of failed steps, which were never published."""
        same = list[Publish]()
        for chunk in _single(publication):
            kept = self._kept.get(chunk.blocks[:NUMBER_BYTES])
            if kept is not None and structs.replace(kept, sequence=chunk.sequence) == chunk:
                same.append(chunk)
        return [_joined(same[max(0, at - TOGETHER) : at]) for at in range(len(same), 0, -TOGETHER)]

    def holds(self, publication: Publish) -> bool:
        """Whether all blocks of these chunks still have the published generations. Any thread; the
        first call asks the server."""
        view = self._tables.view(self._instance)
        return view is not None and self._unchanged(publication, view) == len(publication.keys)

    def _unchanged(self, publication: Publish, view: GenerationView) -> int:
        """Count the leading chunks whose blocks still have the published generations."""
        return view.leading(publication.blocks, publication.generations, self._each)

    def close(self, timeout: float = 5.0) -> None:
        """See `Outbox.close`."""
        self.outbox.close(timeout)
        for hooks, hook in (
            (self._client.on_return, self._returned),
            (self._client.on_beat, self._beat),
        ):
            if hook in hooks:
                hooks.remove(hook)
        self._tables.close()

    # ---- the client's thread

    def _returned(self) -> None:
        """Publish everything again: the server may be new."""
        self._pauses.reset()
        self._due = 0.0
        self._beat()

    def _beat(self) -> None:
        if time.monotonic() >= self._due:
            self._due = math.inf
            self.outbox.after(lambda seconds: True, self._publish_again)

    # ---- the outbox's thread

    def _publish(self, publication: Publish) -> None:
        for chunk in _single(publication):
            self._kept.pop(chunk.blocks[:NUMBER_BYTES], None)
            self._kept[chunk.blocks[:NUMBER_BYTES]] = chunk
        if bool(self._tell(publication)) != (self._due == math.inf):
            # The server is gone, or the scheduler has not shown the generations yet. Or the server
            # takes chunks now, and the pause may have grown long.
            self._pauses.reset()
            self._pause()

    def _publish_again(self) -> None:
        """Publish all unchanged kept chunks, in their old order."""
        taken = False
        try:
            taken = self._tell_all()
        finally:
            if not taken:
                self._pause()

    def _pause(self) -> None:
        self._due = min(self._due, time.monotonic() + self._pauses.next())

    def _tell(self, publication: Publish) -> int | None:
        """Publish chunks. Returns how many the server took, 0 after a refusal; None if the server
        is unavailable."""
        try:
            taken = self._client.publish(publication)
        except VCacheError as error:
            log.debug("publish: %s", error)
            self._stats.failed("publish")
            return None if isinstance(error, ServerUnavailable) else 0
        self._stats.count(chunks_published=taken)
        return taken

    def _tell_all(self) -> bool:
        """Returns whether the server has the chunks: it took some, or none are kept."""
        view = self._tables.view(self._instance)
        if view is None or not self._client.connected:
            return False
        for first, chunk in list(self._kept.items()):
            if not self._unchanged(chunk, view):
                del self._kept[first]
        total = 0
        for _, group in groupby(self._kept.values(), key=attrgetter("sequence", "epoch")):
            if self.outbox.stopping or (taken := self._tell(_joined(list(group)))) is None:
                return False
            total += taken
        return bool(total) or not self._kept


def _single(publication: Publish) -> list[Publish]:
    return [publication.cut(at, at + 1) for at in range(len(publication.keys))]


def _joined(publications: Sequence[Publish]) -> Publish:
    """Join publications of the same sequence and epoch, at least one. Keeps the order of chunks."""
    blocks = b"".join(publication.blocks for publication in publications)
    generations = b"".join(publication.generations for publication in publications)
    keys = [key for publication in publications for key in publication.keys]
    return structs.replace(publications[0], keys=keys, blocks=blocks, generations=generations)
