"""The background of a worker that shares in place: which chunks lie in its KV cache, told once they do, and again to a new server."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import NUMBER_BYTES, ChunkKey, InstanceId
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer import courier
from vcache_backend.transfer.courier import Courier
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copier import Mark

log = logging.getLogger(__name__)

_SLICE_SECONDS = 0.05
"""How long a step's end is waited for before the rest of the work is looked at again."""
_POLL_SECONDS = 0.0005
MOST_WAITING = 1024
"""Publications of steps that are not over. Those after them are dropped: what is not published is a miss."""
TOGETHER = 16
"""Chunks that are saved together: if one of them changes hands before they are read, none is."""
SLOWEST_SECONDS = 60.0
"""The longest pause before a server that does not know what was published is told again, until the scheduler has shown it the
generations; the first is `courier.RETRY_SECONDS`, and each is twice the one before."""


class Publication(NamedTuple):
    """Chunks of one rank, the blocks they lie in and those blocks' generations, packed as in `Publish`, which says what the rest is."""

    keys: list[ChunkKey]
    blocks: bytes
    generations: bytes
    sequence: int
    epoch: int = 0


class _Waiting(NamedTuple):
    """What can be read once `written` is reached. soon: it is told as soon as that."""

    publication: Publication
    written: Mark
    soon: bool


class Publisher(Courier):
    """Tells the server of one worker's chunks, in the order they were submitted: each only after the step that wrote it.

    What was published is kept, one chunk for each block that chunks begin with, and told again to a server that lost it, as far as
    the blocks still hold it.
    """

    def __init__(self, client: Client, stats: EngineStats, instance: InstanceId, each: int, lead: int = 0) -> None:
        """each: blocks of a chunk. lead: of those the first ones, without which it is of no use to anybody; 0: all."""
        self._stats, self._instance, self._each, self._lead = stats, instance, each, lead or each
        self._queue: deque[_Waiting] = deque()
        self._kept: dict[bytes, Publication] = {}
        """Of one chunk each, by the first of its blocks."""
        self._tables = Tables(client)
        self._servers = self._knows = 0
        """How many there were, in a row, and which of them knows what is kept."""
        self._again_at, self._pause = 0.0, courier.RETRY_SECONDS
        super().__init__(client)
        client.on_return.append(self._returned)

    def submit(self, publication: Publication, written: Mark, soon: bool = True) -> None:
        """Hand over what can be read once `written` is reached. Never blocks. soon: others may look for it at once; else it is told after
        `courier.LATER_SECONDS`, or with what is behind it: the step that the thread would take the interpreter from is over then."""
        with self._changed:
            if len(self._queue) >= MOST_WAITING:
                self._stats.failed("publication_dropped")
                return
            self._queue.append(_Waiting(publication, written, soon))
            self._changed.notify_all()

    def known(self, publication: Publication) -> list[Publication]:
        """Those of these chunks that were told as they are named here, in whatever sequence, `TOGETHER` at a time, the last ones first.
        What a step spoiled was not. Any thread."""
        ones = [(one, self._kept.get(one.blocks[:NUMBER_BYTES])) for one in _single(publication)]
        same = [one for one, kept in ones if kept is not None and kept._replace(sequence=one.sequence) == one]
        return [_joined(same[max(0, at - TOGETHER) : at]) for at in range(len(same), 0, -TOGETHER)]

    def holds(self, publication: Publication) -> bool:
        """Whether all of these chunks still lie where they were published. Any thread; asks the server the first time."""
        view = self._tables.view(self._instance)
        blocks, generations = np.frombuffer(publication.blocks, dtype="<u4"), np.frombuffer(publication.generations, dtype="<u8")
        return view is not None and view.leading(blocks, generations, self._each) == len(publication.keys)

    def close(self, timeout: float = 5.0) -> None:
        super().close(timeout)
        if self._returned in self._client.on_return:
            self._client.on_return.remove(self._returned)
        self._tables.close()

    # ---- inside

    def _returned(self) -> None:
        """There is a server again, maybe another one. In the client's thread."""
        with self._changed:
            self._servers, self._again_at, self._pause = self._servers + 1, 0.0, courier.RETRY_SECONDS
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue) or self._is_due() or super()._has_work()

    def _hurries(self) -> bool:
        """Whoever is asked after this instance has answered looks for what it has computed at once."""
        return any(one.soon for one in self._queue) or super()._hurries()

    def _work(self) -> None:
        super()._work()
        if self._is_due():
            self._wait()
            self._tell_again()
        for _ in range(len(self._queue)):
            # A step that failed is taken out by this.
            if self._stopping or not self._over(self._queue[0].written):
                return
            publication = self._queue.popleft().publication
            self._keep(publication)
            if not self._tell(publication) and self._knows == self._servers:
                # Its scheduler may not have shown the generations yet, or the server is gone.
                self._knows, self._pause = -1, courier.RETRY_SECONDS
                self._wait()

    def _is_due(self) -> bool:
        return self._knows != self._servers and time.monotonic() >= self._again_at

    def _wait(self) -> None:
        self._again_at, self._pause = time.monotonic() + self._pause, min(2 * self._pause, SLOWEST_SECONDS)

    def _over(self, written: Mark) -> bool:
        """Whether the step is over, or failed, in which case nothing reads its blocks: their tokens never come."""
        until = time.monotonic() + _SLICE_SECONDS
        try:
            while not written.reached():
                if time.monotonic() > until:
                    return False
                time.sleep(_POLL_SECONDS)
        except VCacheError as error:
            log.debug("a step failed: %s", error)
            self._queue.popleft()
            return False
        return True

    def _keep(self, publication: Publication) -> None:
        for one in _single(publication):
            self._kept.pop(one.blocks[:NUMBER_BYTES], None)
            self._kept[one.blocks[:NUMBER_BYTES]] = one

    def _tell(self, publication: Publication) -> int | None:
        """How many of the chunks the server took; None if it did not say."""
        try:
            keys, blocks, generations, sequence, epoch = publication
            taken = self._client.publish(self._instance, sequence, keys, blocks, generations, epoch)
        except VCacheError as error:
            log.debug("publish: %s", error)
            self._stats.failed("publish")
            return None if isinstance(error, ServerUnavailable) else 0
        self._stats.count(chunks_published=taken)
        return taken

    def _tell_again(self) -> None:
        """All that is kept and still there, in its old order, to a server that may not know it. Until it knows this instance and has
        heard the last of it."""
        server = self._servers
        view = self._tables.view(self._instance)
        if view is None or not self._client.connected:
            return
        for first, one in list(self._kept.items()):
            blocks, generations = np.frombuffer(one.blocks, dtype="<u4"), np.frombuffer(one.generations, dtype="<u8")
            if not view.leading(blocks[: self._lead], generations[: self._lead], self._lead):
                del self._kept[first]
        total = 0
        for _, same in groupby(self._kept.values(), key=lambda one: one[3:]):
            if self._stopping or (taken := self._tell(_joined(list(same)))) is None:
                return
            total += taken
        if total or not self._kept:
            self._knows = server


def _single(publication: Publication) -> list[Publication]:
    """Each of its chunks by itself."""
    keys, count = publication.keys, max(1, len(publication.keys))
    number, generation = len(publication.blocks) // count, len(publication.generations) // count
    return [
        publication._replace(
            keys=[key],
            blocks=publication.blocks[at * number : (at + 1) * number],
            generations=publication.generations[at * generation : (at + 1) * generation],
        )
        for at, key in enumerate(keys)
    ]


def _joined(ones: Sequence[Publication]) -> Publication:
    """All of their chunks, in order, as one publication: some, of one sequence and one epoch."""
    blocks, generations = b"".join(one.blocks for one in ones), b"".join(one.generations for one in ones)
    return ones[0]._replace(keys=[key for one in ones for key in one.keys], blocks=blocks, generations=generations)
