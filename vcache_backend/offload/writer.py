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

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ChunkKey, Location
from vcache_backend.offload import objects
from vcache_backend.offload.access import Access
from vcache_backend.offload.codecs import Codec, CodecError
from vcache_backend.offload.index import Index
from vcache_backend.offload.objects import HEADER_BYTES
from vcache_backend.offload.staging import Buffer, Ring
from vcache_backend.offload.store import Put
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

BATCH_BYTES = 128 << 20
BATCH_MOST = 16
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
DROPPED = ("backlog", "down", "gone", "full", "too_large", "failed", "codec")
"""Why a chunk was not written."""


@dataclass
class Sink:
    """What all writes of one worker share. views: addresses of pool slots. index: knows what is
    in the store already, and is told what is there from now on."""

    access: Access
    ring: Ring
    codec: Codec
    fingerprint: bytes
    chunk_bytes: int
    client: Client
    views: Callable[[Sequence[Location]], list[SlotView]]
    device: int | None
    stats: EngineStats
    index: Index

    @property
    def batch(self) -> int:
        return max(1, min(BATCH_BYTES // self.chunk_bytes, BATCH_MOST, self.ring.count // 2))


@dataclass
class _Batch:
    """Sealed objects of one epoch on their way."""

    epoch: int
    keys: list[ChunkKey] = field(default_factory=list)
    buffers: list[Buffer] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


class Writer:
    """Writes what it is offered.

    One thread copies out of the pool, `putters` threads write: a copy goes on beside the call of the store's.
    """

    def __init__(self, sink: Sink, putters: int, most: int) -> None:
        """most: chunks that may wait."""
        self._sink, self._most = sink, most
        self._waiting: deque[ChunkKey] = deque()
        self._copied: deque[_Batch] = deque()
        self._changed = threading.Condition()
        self._copying = False
        self._writing = 0
        self._step = 1
        """Chunks of the next batch: few at first, so that writing begins early, then twice as many each time."""
        self._stopping = False
        self._stream: torch.cuda.Stream | None = None
        self._threads = [threading.Thread(target=self._guarded, args=(self._copy_out,), name="vcache-offload-copy", daemon=True)]
        self._threads += [
            threading.Thread(target=self._guarded, args=(self._put,), name=f"vcache-offload-put-{i}", daemon=True)
            for i in range(putters)
        ]
        for thread in self._threads:
            thread.start()

    def offer(self, keys: Sequence[ChunkKey]) -> None:
        """These are in the pool: write them, soon. Never blocks: what is too much is dropped, and counted."""
        fresh = [key for key in keys if key not in self._sink.index.below]
        with self._changed:
            room = max(self._most - len(self._waiting), 0)
            self._waiting += fresh[:room]
            self._changed.notify_all()
        self._dropped("backlog", len(fresh) - min(room, len(fresh)))

    def flush(self, seconds: float) -> bool:
        """Wait until what was offered so far is written or dropped; False if it is not after so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._waiting or self._copying or self._copied or self._writing), seconds)

    def close(self, seconds: float) -> bool:
        """Drop what waits, and let the writes under way end; False if one goes on after so many seconds. Idempotent."""
        with self._changed:
            self._stopping = True
            waiting, self._waiting = len(self._waiting), deque()
            self._changed.notify_all()
        self._dropped("down", waiting)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    # ---- copying out of the pool

    def _copy_out(self) -> None:
        batch = self._take()
        if batch:
            try:
                self._stage(batch)
            finally:
                with self._changed:
                    self._copying = False
                    self._changed.notify_all()

    def _take(self) -> list[ChunkKey]:
        """What waits, once there is a store for it: a chunk may stay in the pool for longer than a master takes to come back."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            if self._waiting and not self._sink.access.usable:
                self._changed.wait(POLL_SECONDS)
                return []
            most, busy = self._sink.batch, self._copied or self._writing
            self._step = min(2 * self._step, most) if busy else max(most // FIRST_PART, 1)
            count = min(len(self._waiting), self._step)
            self._copying = bool(count)
            return [self._waiting.popleft() for _ in range(count)]

    def _stage(self, keys: list[ChunkKey]) -> None:
        sink = self._sink
        while keys:
            try:
                leased = sink.client.acquire(keys)
            except VCacheError:
                # They stay in the pool meanwhile, and may in the queue.
                with self._changed:
                    self._waiting.extendleft(reversed(keys))
                raise
            sink.index.hear(leased.epoch)
            run = len(leased.locations)
            if leased.lease:
                batch = self._copied_out(keys[:run], leased.locations, leased.epoch)
                if self._held(leased.lease):
                    self._hand_over(batch)
                else:
                    self._give_up(batch, "gone")
            if run < len(keys):
                self._dropped("gone", 1)
            keys = keys[run + 1 :]

    def _copied_out(self, keys: Sequence[ChunkKey], locations: Sequence[Location], epoch: int) -> _Batch:
        """The chunks, stored in `epoch`, as sealed objects in buffers; what has no buffer or no address is dropped."""
        sink, batch = self._sink, _Batch(epoch)
        fingerprint = objects.in_epoch(sink.fingerprint, epoch)
        views = sink.views(locations)
        self._dropped("gone", len(keys) - len(views))
        # Buffers come back as earlier batches are written, which takes as long as the link does.
        buffers: list[Buffer] = []
        while not buffers and views and sink.access.usable and not self._stopping:
            buffers = sink.ring.take(len(views), BUFFER_SECONDS)
        if not buffers:
            self._dropped("down", len(views))
            return batch
        for key, view, buffer in zip(keys, views, buffers, strict=False):
            try:
                size = self._seal(key, fingerprint, view, buffer)
            except (CodecError, RuntimeError) as error:
                if sink.stats.failed("offload_codec") == 1:
                    log.warning("chunk %s is not written to the store: %s", key.hex(), error)
                self._dropped("codec", 1)
                sink.ring.give([buffer])
                continue
            batch.keys.append(key)
            batch.buffers.append(buffer)
            batch.sizes.append(size)
        return batch

    def _seal(self, key: ChunkKey, fingerprint: bytes, view: SlotView, buffer: Buffer) -> int:
        sink, memory = self._sink, buffer.memory
        chunk, need, digest = view.tensor[: sink.chunk_bytes], sink.chunk_bytes, None
        if sink.codec.name != "raw":
            if chunk.device.type == "cuda":
                landing = memory[len(memory) - need :]
                self._from_device(landing, chunk)
                chunk = landing
            need = sink.codec.encode(chunk, memory[HEADER_BYTES : HEADER_BYTES + sink.codec.bound(need)])
        elif chunk.device.type == "cuda":
            self._from_device(memory[HEADER_BYTES : HEADER_BYTES + need], chunk)
        else:
            digest = objects.copy_and_hash(memory[HEADER_BYTES : HEADER_BYTES + need].numpy(), chunk.numpy())
        return objects.seal(memory.numpy(), key, fingerprint, sink.codec.id, sink.chunk_bytes, need, digest)

    def _from_device(self, target: torch.Tensor, chunk: torch.Tensor) -> None:
        """Wait for the copy of a chunk into pinned memory, on a stream of this thread's."""
        with torch.cuda.device(self._sink.device):
            if self._stream is None:
                self._stream = torch.cuda.Stream()
            with torch.cuda.stream(self._stream):
                target.copy_(chunk, non_blocking=True)
            self._stream.synchronize()

    def _held(self, lease: int) -> bool:
        """End a lease: did it hold until now?"""
        try:
            return self._sink.client.release(lease)
        except VCacheError as error:
            log.debug("release: %s", error)
            return False

    def _hand_over(self, batch: _Batch) -> None:
        if batch.keys:
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
            self._sink.ring.give(batch.buffers)
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()

    def _write(self, batch: _Batch) -> None:
        sink, store = self._sink, self._sink.access.store
        keys, buffers, sizes = batch.keys, batch.buffers, batch.sizes
        for attempt in range(FULL_RETRIES + 1):
            names = [objects.name(key, batch.epoch) for key in keys]
            spans = [buffer.span(size) for buffer, size in zip(buffers, sizes, strict=True)]
            started = time.perf_counter()
            put = sink.access.call("put", lambda n=names, s=spans: store.put(n, s), [Put.FAILED] * len(names))  # type: ignore[misc]
            sink.stats.add_time("offload_put", time.perf_counter() - started)
            if put.count(Put.FAILED) == len(put) and attempt < FULL_RETRIES and self._back_again():
                continue
            stored = [i for i, outcome in enumerate(put) if outcome is Put.STORED]
            sink.stats.count(offload_written=len(stored), bytes_offload_written=sum(sizes[i] for i in stored))
            there = [keys[i] for i in stored]
            if batch.epoch == sink.index.epoch:
                sink.index.written(there)
            for outcome in (Put.TOO_LARGE, Put.FAILED):
                self._dropped(outcome.value, put.count(outcome))
            full = [i for i, outcome in enumerate(put) if outcome is Put.FULL]
            if not full or attempt == FULL_RETRIES or self._stopping:
                self._dropped("full", len(full))
                return
            time.sleep(FULL_SECONDS * 2**attempt * random.uniform(0.75, 1.25))
            keys, buffers, sizes = ([part[i] for i in full] for part in (keys, buffers, sizes))  # type: ignore[assignment]

    def _back_again(self) -> bool:
        """After a call that failed: was it the store that failed, and is it back within a few seconds?"""
        deadline = time.monotonic() + DOWN_SECONDS
        while not self._sink.access.usable and not self._stopping:
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
                self._sink.stats.failed("offload_server")
                time.sleep(POLL_SECONDS)
            except Exception:  # the thread's last line of defence: a chunk that is not written is a miss later
                log.exception("writing to the offload tier failed")
                self._sink.stats.failed("offload_write_error")
                time.sleep(POLL_SECONDS)

    def _give_up(self, batch: _Batch, reason: str) -> None:
        self._dropped(reason, len(batch.keys))
        self._sink.ring.give(batch.buffers)

    def _dropped(self, reason: str, chunks: int) -> None:
        if chunks > 0:
            self._sink.stats.count(**{f"offload_dropped_{reason}": chunks})
