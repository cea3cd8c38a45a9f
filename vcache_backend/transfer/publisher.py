"""The background thread of a worker that shares in place: publishes the chunks in its KV cache, and
publishes them again to a new server."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from msgspec import structs

from vcache_backend.backoff import Backoff
from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import NUMBER_BYTES, InstanceId, Publish
from vcache_backend.resident.generations import GenerationView
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer import outbox
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.copies.copier import Mark

log = logging.getLogger(__name__)

_SLICE_SECONDS = 0.05
"""How long to wait for a step's end before other work gets its turn."""
_POLL_SECONDS = 0.002
"""Each look at a step takes the interpreter from the thread that launches the next step."""
MAX_WAITING = 1024
"""The most publications that wait for the end of their step. Further publications are dropped:
other instances miss the chunks."""
TOGETHER = 16
"""How many chunks are saved together. If a block is handed out before the copy, the whole group is
not saved."""
SLOWEST_SECONDS = 60.0
"""The longest pause between two attempts to publish everything again. The server refuses until the
scheduler has shown its generations. The first pause is `outbox.RETRY_SECONDS`; each further pause
is twice as long."""


class _Waiting(NamedTuple):
    """A publication to be sent after `written` is reached. soon: without a delay."""

    publication: Publish
    written: Mark
    soon: bool


class Publisher(Outbox):
    """Publishes one worker's chunks in the order of submission, each chunk after the step that
    wrote it.

    Keeps the last chunk that begins at each block. If the server loses chunks, kept chunks with
    unchanged blocks are published again."""

    def __init__(self, client: Client, stats: EngineStats, instance: InstanceId, each: int) -> None:
        """each: blocks of a chunk."""
        self._stats, self._instance, self._each = stats, instance, each
        self._queue: deque[_Waiting] = deque()
        self._kept: dict[bytes, Publish] = {}
        """Publications of single chunks, by the bytes of the first block's number."""
        self._tables = Tables(client)
        self._due = math.inf
        """When to publish all kept chunks again; infinite while the server has them."""
        self._pauses = Backoff(outbox.RETRY_SECONDS, SLOWEST_SECONDS)
        super().__init__(client, stats.failed)
        client.on_return.append(self._returned)

    def submit(self, publication: Publish, written: Mark, soon: bool = True) -> None:
        """Queue chunks that can be read once `written` is reached. Any thread; never blocks.

        soon: publish without a delay, since other instances may look for the chunks. Otherwise
        publish after `outbox.LATER_SECONDS`, or with later chunks, so that the thread does not take
        the interpreter from the present step."""
        with self._changed:
            if len(self._queue) >= MAX_WAITING:
                self._stats.failed("publication_dropped")
                return
            self._queue.append(_Waiting(publication, written, soon))
            self._changed.notify_all()

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
        super().close(timeout)
        if self._returned in self._client.on_return:
            self._client.on_return.remove(self._returned)
        self._tables.close()

    # ---- inside

    def _returned(self) -> None:
        """Publish everything again: the server may be new. Runs in the client's thread."""
        with self._changed:
            self._due = 0.0
            self._pauses.reset()
            self._changed.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue) or self._is_due() or super()._has_work()

    def _hurries(self) -> bool:
        """Whether a publication is urgent: another instance may look for the chunks at once."""
        return any(waiting.soon for waiting in self._queue) or super()._hurries()

    def _work(self) -> None:
        super()._work()
        if self._is_due():
            # Before the first request: the client may reach another server meanwhile.
            self._due, again = math.inf, False
            try:
                again = self._tell_again()
            finally:
                if not again:
                    self._wait()
        for _ in range(len(self._queue)):
            # `_over` removes the publication of a step that failed.
            if self._stopping or not self._over(self._queue[0].written):
                return
            publication = self._queue.popleft().publication
            self._keep(publication)
            if bool(self._tell(publication)) != (self._due == math.inf):
                # The server is gone, or the scheduler has not shown the generations yet. Or the
                # server takes chunks now, and the pause may have grown long.
                self._pauses.reset()
                self._wait()

    def _is_due(self) -> bool:
        return time.monotonic() >= self._due

    def _wait(self) -> None:
        self._due = min(self._due, time.monotonic() + self._pauses.next())

    def _over(self, written: Mark) -> bool:
        """Whether the step is over. After a failed step, remove the queue's head."""
        until = time.monotonic() + _SLICE_SECONDS
        try:
            while not written.reached():
                if time.monotonic() > until:
                    return False
                time.sleep(_POLL_SECONDS)
        except Exception as error:
            self._queue.popleft()
            if not isinstance(error, VCacheError):
                raise
            log.debug("a step failed: %s", error)
            return False
        return True

    def _keep(self, publication: Publish) -> None:
        for chunk in _single(publication):
            self._kept.pop(chunk.blocks[:NUMBER_BYTES], None)
            self._kept[chunk.blocks[:NUMBER_BYTES]] = chunk

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

    def _tell_again(self) -> bool:
        """Publish all unchanged kept chunks, in their old order. Returns whether the server has
        them: it took some, or none are kept."""
        view = self._tables.view(self._instance)
        if view is None or not self._client.connected:
            return False
        for first, chunk in list(self._kept.items()):
            if not self._unchanged(chunk, view):
                del self._kept[first]
        total = 0
        for _, group in groupby(self._kept.values(), key=attrgetter("sequence", "epoch")):
            if self._stopping or (taken := self._tell(_joined(list(group)))) is None:
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
