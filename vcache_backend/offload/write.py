"""Writes chunks to the store in background threads: from pool slot to staging buffer to object. No
request waits for a write."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from itertools import islice

import numpy as np
import torch

from vcache_backend import threads
from vcache_backend.errors import VCacheError
from vcache_backend.offload import objects
from vcache_backend.offload.objects import Format
from vcache_backend.offload.staging import Buffer
from vcache_backend.offload.store import Store
from vcache_backend.offload.verbs import STORED, Place
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey, Pinned, SlotRun
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.pool import Pool

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05
"""How often an unreachable store or server is checked again."""
MAX_WAITING = 4096
"""The most chunks that wait to be written. Further chunks are dropped and counted."""
ATTEMPTS = 6
RETRY_SECONDS = 0.05
"""The first pause before a chunk is put again; pauses double. Meanwhile a full store evicts chunks,
and a dead provider or process is replaced."""
PIN_SECONDS = 5.0
"""How long the server keeps chunks from eviction while they are copied."""
DROPPED = ("backlog", "down", "gone", "full", "failed")
"""The reasons why a chunk was not written."""


class Writer:
    """Writes offered chunks. A thread takes chunks, copies them out of the pool, and puts them into
    the store."""

    def __init__(
        self,
        store: Store,
        stats: EngineStats,
        form: Format,
        buffers: Sequence[Buffer],
        client: Client,
        pool: Pool,
    ) -> None:
        """client: `close` closes it. pool: maps the segments."""
        self._store, self._stats, self._format = store, stats, form
        self._buffers, self._client, self._pool = buffers, client, pool
        self._waiting: deque[ChunkKey] = deque()
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        self._thread = threads.start(self._turn, "vcache-offload-write", stats.failed)

    def offer(self, keys: Sequence[ChunkKey]) -> None:
        """Queue chunks that are in the pool. Never blocks: a full queue drops and counts chunks.
        Does nothing after `close`."""
        if self._stop.is_set():
            return
        with self._changed:
            room = max(MAX_WAITING - len(self._waiting), 0)
            self._waiting += keys[:room]
            self._changed.notify_all()
        self._dropped("backlog", len(keys) - room)

    def flush(self, seconds: float) -> bool:
        """Wait until all offered chunks are written or dropped; False after `seconds`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting, seconds)

    def close(self, seconds: float) -> None:
        """Drop the queue, and let running writes end, within `seconds`. Idempotent."""
        with self._changed:
            self._stop.set()
            self._changed.notify_all()
        self._thread.join(seconds)
        self._dropped("down", self._take(len(self._waiting)))
        self._client.close()

    # ---- the thread

    def _turn(self) -> bool:
        """A turn of the thread: copy and put chunks. A failure is only counted, and an unwritten
        chunk is a later miss. Returns whether the thread is to end."""
        keys = self._next()
        try:
            self._put(self._copied(keys))
        except VCacheError as error:
            # The chunks wait for the server.
            log.debug("writing to the store: %s", error)
            self._stats.failed("offload_server")
            self._stop.wait(POLL_SECONDS)
        except BaseException:
            # They may raise again and again.
            self._dropped("failed", self._take(len(keys)))
            raise
        else:
            self._take(len(keys))
        return self._stop.is_set()

    def _next(self) -> list[ChunkKey]:
        """The next chunks, once there are some and the store is usable. Empty after `close`."""
        with self._changed:
            while not self._stop.is_set():
                if self._waiting and self._store.usable:
                    return list(islice(self._waiting, len(self._buffers)))
                self._changed.wait(POLL_SECONDS if self._waiting else None)
        return []

    def _take(self, count: int) -> int:
        """Take at most `count` chunks off the queue. Returns how many."""
        with self._changed:
            count = min(count, len(self._waiting))
            for _ in range(count):
                self._waiting.popleft()
            self._changed.notify_all()
        return count

    def _copied(self, keys: list[ChunkKey]) -> list[tuple[str, Place]]:
        """Copy chunks that the store lacks from the pool into buffers. Returns the objects' names
        and places, of the chunks that did not change meanwhile. VCacheError if the server does not
        answer."""
        if not keys:
            return []
        pool = self._client.present(keys)
        stored = self._store.there([objects.name(key, pool.epoch) for key in keys])
        found = zip(keys, pool.present, stored, strict=True)
        wanted = [key for key, here, there in found if here and not there]
        sealed = list[tuple[str, Place]]()
        pinned = self._client.pin(wanted, PIN_SECONDS) if wanted else Pinned([])
        names = [objects.name(key, pinned.epoch) for key in wanted]
        for run in pinned.runs:
            sealed += self._copied_run(run, names)
        self._dropped("gone", stored.count(False) - len(sealed))
        return sealed

    def _copied_run(self, run: SlotRun, names: Sequence[str]) -> list[tuple[str, Place]]:
        """Copy chunks into the buffers of their numbers. Returns those that did not change."""
        nbytes, segment = self._format.chunk_bytes, self._pool.segment(run.segment)
        slots = None if segment is None else segment.slot_offsets(run, nbytes)
        if segment is None or slots is None:
            return []
        whole, sealed = segment.mapped.whole, list[tuple[str, Place]]()
        for number, begin in zip(range(run.first, run.stop), slots.tolist(), strict=True):
            buffer = self._buffers[number]
            self._copy(whole[begin : begin + nbytes], buffer.chunk.tensor)
            self._format.seal(buffer.memory.numpy(), names[number])
            sealed.append((names[number], buffer.place))
        return sealed[: segment.right(run)]

    def _copy(self, chunk: torch.Tensor, target: torch.Tensor) -> None:
        """Copy a chunk into host memory, and wait for the copy."""
        if chunk.device.type != "cuda":
            # In one piece: torch's pieces would each wait 5 ms for the interpreter.
            np.copyto(target.numpy(), chunk.numpy())
            return
        # Beside the work of all other streams.
        self._stream = self._stream or torch.cuda.Stream(chunk.device)
        with torch.cuda.stream(self._stream):
            target.copy_(chunk, non_blocking=True)
        self._stream.synchronize()

    def _put(self, sealed: Sequence[tuple[str, Place]]) -> None:
        outcomes: Sequence[str] = []
        for attempt in range(ATTEMPTS):
            if not sealed or (attempt and self._stop.wait(RETRY_SECONDS * 2 ** (attempt - 1))):
                break
            with self._stats.timed("offload_put"):
                answers = self._store.put([name for name, _ in sealed], [at for _, at in sealed])
            nbytes = answers.count(STORED) * self._format.object_bytes
            self._stats.count(offload_written=answers.count(STORED), bytes_offload_written=nbytes)
            outcomes = [outcome for outcome in answers if outcome != STORED]
            pairs = zip(sealed, answers, strict=True)
            sealed = [one for one, outcome in pairs if outcome != STORED]
        for outcome in outcomes:
            self._dropped(outcome, 1)

    def _dropped(self, reason: str, chunks: int) -> None:
        if chunks > 0:
            self._stats.count(**{f"offload_dropped_{reason}": chunks})
