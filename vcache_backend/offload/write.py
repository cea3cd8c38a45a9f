"""Writes chunks to the store in background threads: from pool slot to staging buffer to object. No
request waits for a write."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch

from vcache_backend import threads
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, Leased, Location
from vcache_backend.offload import objects
from vcache_backend.offload.codecs import CodecError
from vcache_backend.offload.objects import HEADER_BYTES
from vcache_backend.offload.read import Bound
from vcache_backend.offload.staging import Buffer
from vcache_backend.offload.verbs import STORED, Place
from vcache_backend.offload.workers import Workers
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

FIRST_PART = 4
"""While no chunk is being written, a batch is this many times smaller, to begin early."""
POLL_SECONDS = 0.05
"""How often an unreachable store or server is checked again."""
WRITERS = 2
"""Threads: one thread puts chunks while the other thread copies the next chunks."""
MAX_WAITING = 4096
"""The most chunks that wait to be written. Further chunks are dropped and counted."""
ATTEMPTS = 6
RETRY_SECONDS = 0.05
"""The first pause before a chunk is tried again; pauses double. Meanwhile a full store evicts
chunks, and a dead provider or process is replaced."""
DROPPED = ("backlog", "down", "gone", "full", "failed", "codec")
"""The reasons why a chunk was not written."""
Sealed = list[tuple[str, Place]]
"""Objects that are ready to be put: names and places."""


class Writer:
    """Writes offered chunks. Each thread takes chunks, copies them out of the pool, and puts them
    into the store. At most one thread copies, while another thread puts."""

    def __init__(
        self,
        bound: Bound,
        shares: Sequence[Sequence[Buffer]],
        client: Client,
        views: Callable[[Sequence[Location]], list[SlotView]],
        ordinal: int | None,
    ) -> None:
        """shares: the buffers of each thread. client: `close` closes it. views: returns the
        addresses of slots. ordinal: of the GPU that copies, if any."""
        self._bound = bound
        self._client, self._views, self._ordinal = client, views, ordinal
        self._waiting: deque[ChunkKey] = deque()
        self._changed = threading.Condition()
        self._copying = False
        self._busy = 0
        """The number of threads that have chunks."""
        self._puts = threading.Lock()
        self._stop = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        self._workers = Workers("vcache-offload-write", len(shares))
        for buffers in shares:
            turn = partial(self._turn, buffers)
            failed = bound.stats.failed
            self._workers.submit(partial(threads.repeat, turn, "vcache-offload-write", failed))

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
            return self._changed.wait_for(lambda: not (self._waiting or self._busy), seconds)

    def close(self, seconds: float) -> None:
        """Drop the queue, and let running writes end, within `seconds`. Idempotent."""
        with self._changed:
            self._stop.set()
            waiting = len(self._waiting)
            self._waiting = deque()
            self._changed.notify_all()
        self._dropped("down", waiting)
        self._workers.close(seconds)
        self._client.close()

    # ---- the threads

    def _turn(self, buffers: Sequence[Buffer]) -> bool:
        """A turn of a thread: take, copy and put chunks. A failure is only counted, and an
        unwritten chunk is a later miss. Returns whether the thread is to end."""
        keys = self._take(len(buffers))
        if not keys:
            return True
        try:
            sealed = self._copy_out(keys, buffers)
            with self._puts:
                self._put(sealed)
        except VCacheError as error:
            log.debug("writing to the store: %s", error)
            self._bound.stats.failed("offload_server")
            self._stop.wait(POLL_SECONDS)
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()
        return False

    def _take(self, most: int) -> list[ChunkKey]:
        """Take chunks once the store is usable and no other thread copies. Empty after `close`."""
        with self._changed:
            while not self._stop.is_set():
                if self._waiting and not self._copying and self._bound.store.usable:
                    most = most if self._busy else max(most // FIRST_PART, 1)
                    count = min(len(self._waiting), most)
                    self._copying = True
                    self._busy += 1
                    return [self._waiting.popleft() for _ in range(count)]
                self._changed.wait(POLL_SECONDS if self._waiting else None)
        return []

    def _copy_out(self, keys: list[ChunkKey], buffers: Sequence[Buffer]) -> Sealed:
        """Copy chunks that the store lacks from the pool into buffers. If the pool has lost a
        chunk, the chunks after it are queued again."""
        later = keys
        try:
            epoch = self._client.present(keys).epoch
            stored = self._bound.store.there([objects.name(key, epoch) for key in keys])
            keys = [key for key, held in zip(keys, stored, strict=True) if not held]
            later = keys
            if not keys:
                return []
            leased = self._client.acquire(keys)
            run = len(leased.locations)
            self._dropped("gone", len(keys[run : run + 1]))
            later = keys[run + 1 :]
            if not leased.lease:
                return []
            sealed = self._sealed(keys[:run], leased, buffers)
            if self._client.release(leased.lease):
                return sealed
            self._dropped("gone", len(sealed))
            return []
        except Exception as error:
            if not isinstance(error, VCacheError):
                # They may raise again and again.
                self._dropped("failed", len(later))
                later = []
            raise
        finally:
            with self._changed:
                self._copying = False
                self._waiting.extendleft(reversed(later))
                self._changed.notify_all()

    def _sealed(
        self, keys: Sequence[ChunkKey], leased: Leased, buffers: Sequence[Buffer]
    ) -> Sealed:
        """Make objects of leased chunks, in buffers. A chunk that cannot be copied is dropped."""
        bound, sealed = self._bound, Sealed()
        views = self._views(leased.locations)
        self._dropped("gone", len(keys) - len(views))
        for key, view, buffer in zip(keys, views, buffers, strict=False):
            try:
                chunk = view.tensor[: bound.format.chunk_bytes]
                self._copy(chunk, buffer.memory[HEADER_BYTES:])
                bound.format.seal(buffer.memory.numpy(), key, leased.epoch)
                sealed.append((objects.name(key, leased.epoch), buffer.place))
            except (CodecError, RuntimeError) as error:
                if bound.stats.failed("offload_codec") == 1:
                    log.warning("chunk %s is not written to the store: %s", key.hex(), error)
                self._dropped("codec", 1)
        return sealed

    def _copy(self, chunk: torch.Tensor, payload: torch.Tensor) -> None:
        """Encode a chunk on its device, and wait until it is in host memory."""
        codec = self._bound.codec
        if chunk.device.type != "cuda":
            if codec is None:
                # In one piece: each piece would wait 5 ms for the interpreter.
                np.copyto(payload.numpy(), chunk.numpy())
            else:
                codec.encode(chunk, payload)
            return
        # Use the writer's own stream: one thread copies at a time.
        with torch.cuda.device(self._ordinal):
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                encoded = chunk
                if codec is not None:
                    device = f"cuda:{self._ordinal}"
                    encoded = torch.empty(len(payload), dtype=torch.uint8, device=device)
                    codec.encode(chunk.to(encoded.device, non_blocking=True), encoded)
                payload.copy_(encoded, non_blocking=True)
            self._stream.synchronize()

    def _put(self, sealed: Sealed) -> None:
        stats, object_bytes, put = self._bound.stats, self._bound.format.object_bytes, list[str]()
        for attempt in range(ATTEMPTS if sealed else 0):
            pause = RETRY_SECONDS * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
            if attempt and self._stop.wait(pause):
                break
            names, places = [name for name, _ in sealed], [place for _, place in sealed]
            with stats.timed("offload_put"):
                put = self._bound.store.put(names, places)
            stored = put.count(STORED)
            stats.count(offload_written=stored, bytes_offload_written=stored * object_bytes)
            sealed = [pair for pair, outcome in zip(sealed, put, strict=True) if outcome != STORED]
            put = [outcome for outcome in put if outcome != STORED]
            if not sealed:
                break
        for outcome in put:
            self._dropped(outcome, 1)

    def _dropped(self, reason: str, chunks: int) -> None:
        if chunks > 0:
            self._bound.stats.count(**{f"offload_dropped_{reason}": chunks})
