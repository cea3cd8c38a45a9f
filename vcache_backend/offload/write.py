"""Writing chunks to the store, in threads of its own: pool slot, staging buffer, object. Nothing on a request's way waits for it."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from vcache_backend.config import OffloadConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, Location
from vcache_backend.offload import objects
from vcache_backend.offload.codecs import CodecError
from vcache_backend.offload.objects import HEADER_BYTES
from vcache_backend.offload.process import FAILED, FULL, STORED
from vcache_backend.offload.read import BATCH_BYTES, BATCH_MOST, Bound
from vcache_backend.offload.staging import Buffer, Ring
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

FIRST_PART = 4
"""While nothing is being written, a batch is so many times smaller."""
POLL_SECONDS = 0.02
"""How often a store that is down is looked at again."""
FULL_RETRIES = 4
FULL_SECONDS = 0.05
"""A full store evicts in the background: it is tried again after about so long, doubling."""
BUFFER_SECONDS = 1.0
DOWN_SECONDS = 5.0
"""How long chunks on their way wait for a store that failed under them."""
DROPPED = ("backlog", "down", "gone", "full", "failed", "codec")
"""Why a chunk was not written."""


@dataclass
class _Batch:
    """Sealed objects of one epoch on their way."""

    epoch: int
    keys: list[ChunkKey] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)

    def only(self, chosen: Sequence[int]) -> _Batch:
        return _Batch(self.epoch, [self.keys[i] for i in chosen], [self.buffers[i] for i in chosen])


class Writer:
    """Writes what it is offered. One thread copies out of the pool, others write: a copy goes on beside the call of the store's."""

    def __init__(
        self,
        bound: Bound,
        ring: Ring,
        config: OffloadConfig,
        client: Client,
        views: Callable[[Sequence[Location]], list[SlotView]],
        ordinal: int | None,
    ) -> None:
        """client: closed by `close`; of its own, since what happens here must not make a request wait. views: addresses of pool slots.
        ordinal: of the GPU that copies, if any."""
        self._bound, self._ring, self._most = bound, ring, config.queue_chunks
        self._client, self._views, self._ordinal = client, views, ordinal
        self._batch = max(1, min(BATCH_BYTES // bound.format.chunk_bytes, BATCH_MOST, ring.count // 2))
        self._waiting: deque[ChunkKey] = deque()
        self._copied: deque[_Batch] = deque()
        self._changed = threading.Condition()
        self._copying = False
        self._writing = 0
        self._step = 1
        """Chunks of the next batch: few at first, so that writing begins early, then twice as many each time."""
        self._stopping = False
        self._stream: torch.cuda.Stream | None = None
        works = [("copy", self._copy_out), *((f"put-{number}", self._put) for number in range(config.writers))]
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=f"vcache-offload-{name}", daemon=True)
            for name, work in works
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, keys: Sequence[ChunkKey]) -> None:
        """These are in the pool: write them, soon. Never blocks: what is too much is dropped, and counted."""
        fresh = [key for key in keys if key not in self._bound.index.recent]
        with self._changed:
            room = max(self._most - len(self._waiting), 0)
            self._waiting += fresh[:room]
            self._changed.notify_all()
        self._dropped("backlog", len(fresh) - room)

    def flush(self, seconds: float) -> bool:
        """Wait until what was offered so far is written or dropped; False if it is not after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._copying or self._copied or self._writing), seconds)

    def close(self, seconds: float) -> None:
        """Drop what waits, and let the writes under way end, within so many seconds. Idempotent."""
        with self._changed:
            self._stopping = True
            waiting, self._waiting = len(self._waiting), deque()
            self._changed.notify_all()
        self._dropped("down", waiting)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._client.close()

    # ---- copying out of the pool

    def _copy_out(self) -> None:
        keys = self._take()
        try:
            self._stage(keys)
        finally:
            with self._changed:
                self._copying = False
                self._changed.notify_all()

    def _take(self) -> list[ChunkKey]:
        """What waits, once there is a store for it: a chunk may stay in the pool for longer than a master takes to come back."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._waiting and not self._bound.store.usable:
                self._changed.wait(POLL_SECONDS)
                return []
            busy = self._copied or self._writing
            self._step = min(2 * self._step, self._batch) if busy else max(self._batch // FIRST_PART, 1)
            count = min(len(self._waiting), self._step)
            self._copying = bool(count)
            return [self._waiting.popleft() for _ in range(count)]

    def _stage(self, keys: list[ChunkKey]) -> None:
        while keys:
            try:
                leased = self._client.acquire(keys)
            except VCacheError:
                # They stay in the pool meanwhile, and may in the queue.
                with self._changed:
                    self._waiting.extendleft(reversed(keys))
                raise
            self._bound.index.note_epoch(leased.epoch)
            run = len(leased.locations)
            if leased.lease:
                batch = self._copied_out(keys[:run], leased.locations, leased.epoch)
                self._hand_over(batch, held=self._held(leased.lease))
            if run < len(keys):
                self._dropped("gone", 1)
            keys = keys[run + 1 :]

    def _copied_out(self, keys: Sequence[ChunkKey], locations: Sequence[Location], epoch: int) -> _Batch:
        """The chunks, stored in `epoch`, as sealed objects in buffers; what has no buffer or no address is dropped."""
        bound, batch = self._bound, _Batch(epoch)
        views = self._views(locations)
        self._dropped("gone", len(keys) - len(views))
        # Buffers come back as earlier batches are written, which takes as long as the link does.
        buffers = self._ring.take(len(views), BUFFER_SECONDS) if views else []
        while not buffers and views and bound.store.usable and not self._stopping:
            buffers = self._ring.take(len(views), BUFFER_SECONDS)
        if not buffers:
            self._dropped("down", len(views))
            return batch
        for key, view, buffer in zip(keys, views, buffers, strict=False):
            try:
                digest = self._copy(view.tensor[: bound.format.chunk_bytes], buffer.memory[HEADER_BYTES:])
                bound.format.seal(buffer.memory.numpy(), key, epoch, digest)
            except (CodecError, RuntimeError) as error:
                if bound.stats.failed("offload_codec") == 1:
                    log.warning("chunk %s is not written to the store: %s", key.hex(), error)
                self._dropped("codec", 1)
                self._ring.give([buffer])
                continue
            batch.keys.append(key)
            batch.buffers.append(buffer)
        return batch

    def _copy(self, chunk: torch.Tensor, payload: torch.Tensor) -> int | None:
        """Encode a chunk where it is, and wait until it is in host memory: its digest, where that is known."""
        codec = self._bound.codec
        if chunk.device.type != "cuda":
            if codec is None:
                return objects.copy_and_hash(payload.numpy(), chunk.numpy())
            codec.encode(chunk, payload)
            return None
        # On a stream of this thread's.
        with torch.cuda.device(self._ordinal):
            self._stream = self._stream or torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                encoded = chunk
                if codec is not None:
                    encoded = torch.empty(len(payload), dtype=torch.uint8, device=f"cuda:{self._ordinal}")
                    codec.encode(chunk.to(encoded.device, non_blocking=True), encoded)
                payload.copy_(encoded, non_blocking=True)
            self._stream.synchronize()
        return None

    def _held(self, lease: int) -> bool:
        """End a lease: whether it held until now."""
        try:
            return self._client.release(lease)
        except VCacheError as error:
            log.debug("release: %s", error)
            return False

    def _hand_over(self, batch: _Batch, held: bool) -> None:
        if not held:
            self._dropped("gone", len(batch.keys))
            self._ring.give(batch.buffers)
        elif batch.keys:
            with self._changed:
                self._copied.append(batch)
                self._changed.notify_all()

    # ---- writing

    def _put(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._copied or self._stopping)
            if not self._copied:
                return
            batch = self._copied.popleft()
            self._writing += 1
        try:
            self._write(batch)
        finally:
            # Only now: until the call has returned it may read them.
            self._ring.give(batch.buffers)
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def _write(self, batch: _Batch) -> None:
        bound, index = self._bound, self._bound.index
        for attempt in range(FULL_RETRIES + 1):
            started = time.perf_counter()
            put = bound.store.put([objects.name(key, batch.epoch) for key in batch.keys], self._ring.places(batch.buffers))
            bound.stats.add_time("offload_put", time.perf_counter() - started)
            if put.count(FAILED) == len(put) and attempt < FULL_RETRIES and self._back_again():
                continue
            stored = [key for key, outcome in zip(batch.keys, put, strict=True) if outcome == STORED]
            bound.stats.count(offload_written=len(stored), bytes_offload_written=len(stored) * bound.format.object_bytes)
            if batch.epoch == index.epoch:
                index.known(stored)
            self._dropped("failed", put.count(FAILED))
            full = [number for number, outcome in enumerate(put) if outcome == FULL]
            if not full or attempt == FULL_RETRIES or self._stopping:
                self._dropped("full", len(full))
                return
            time.sleep(FULL_SECONDS * 2**attempt * random.uniform(0.75, 1.25))
            batch = batch.only(full)

    def _back_again(self) -> bool:
        """After a call that failed: whether it was the store that failed, and it is back within a few seconds."""
        deadline = time.monotonic() + DOWN_SECONDS
        while not self._bound.store.usable and not self._stopping:
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return not self._stopping

    # ---- the rest

    def _guarded(self, work: Callable[[], None]) -> None:
        """The body of a thread: `work`, again and again. What fails is counted, and nothing more."""
        while not self._stopping:
            try:
                work()
            except VCacheError as error:
                log.debug("writing to the store: %s", error)
                self._bound.stats.failed("offload_server")
                time.sleep(POLL_SECONDS)
            except Exception:  # the thread's last line of defence: a chunk that is not written is a miss later
                log.exception("writing to the offload tier failed")
                self._bound.stats.failed("offload_write_error")
                time.sleep(POLL_SECONDS)

    def _dropped(self, reason: str, chunks: int) -> None:
        if chunks > 0:
            self._bound.stats.count(**{f"offload_dropped_{reason}": chunks})
