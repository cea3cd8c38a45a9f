"""Chunks on their way to and from the store: buffers in host memory, threads that read, and a
thread that writes. A GPU's kernels read the buffers where they lie, like a pool in host memory."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import fcntl
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from vcache_backend import threads
from vcache_backend.offload import objects
from vcache_backend.offload.objects import HEADER_BYTES, BadObject, Format
from vcache_backend.offload.process import STORED, Place
from vcache_backend.offload.store import Store
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ChunkKey, Pinned, SlotRun
from vcache_backend.seals import RESIZING
from vcache_backend.transfer.outbox import Outbox
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.vram_pool import host_memory
from vcache_backend.vram_pool.pool import Pool

log = logging.getLogger(__name__)

MAX_WAITING = 4096
"""The most chunks that wait to be written. Further chunks are dropped and counted."""
DROPPED = ("backlog", "down", "gone", "full", "failed")
"""The reasons why a chunk was not written."""


# ---- buffers


class Buffer(NamedTuple):
    """The place of one object in the shared memory."""

    place: Place
    memory: torch.Tensor
    """The same bytes, 1-D uint8, on the host."""

    @property
    def chunk(self) -> torch.Tensor:
        """The bytes of the chunk in the object."""
        return self.memory[HEADER_BYTES:]


def staging(fd: int, nbytes: int, count: int, ordinal: int | None) -> list[Buffer]:
    """Make `count` buffers of `nbytes` bytes each in the memfd, whose size this sets. The buffers
    keep the memory.

    ordinal: of the GPU that copies, for which the pages are locked. SegmentError, OSError."""
    stride = -(-nbytes // 4096) * 4096
    size = stride * count
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, RESIZING)
    # In one step: the driver's own copies, which write objects, may not cross steps.
    whole = host_memory.map_fd(fd, size, ordinal, step=size)
    if ordinal is None:
        # Take the pages now, not during a request.
        whole.zero_()
    return [Buffer((at, nbytes), whole[at : at + nbytes]) for at in range(0, size, stride)]


class Ring:
    """Buffers that callers take in turn, and give back once nobody reads or writes them. Any
    thread."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.count, self._closed = len(buffers), False
        self._free, self._changed = list(buffers), threading.Condition()

    def take(self, count: int, seconds: float) -> list[Buffer]:
        """Take `count` buffers; empty if too few become free within `seconds`, or after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._free) >= count, seconds)
            if self._closed or len(self._free) < count:
                return []
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give(self, buffers: Sequence[Buffer]) -> None:
        with self._changed:
            self._free += buffers
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody wait any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()


# ---- reads


@dataclass
class _Batch:
    """Objects that one call of the store reads."""

    names: list[str]
    done: Future[None] = field(init=False)
    """Over once all objects are checked."""
    right: list[Buffer] = field(default_factory=list)
    """Of the leading objects that are right."""
    cause: str = "store"
    """Why the next object is not."""
    called: float = 0.0
    """When the call began."""
    ended: float = 0.0
    """When all was checked."""


@dataclass
class Reader:
    """Reads for one worker, in three threads: one checks what has arrived while the others call the
    store."""

    store: Store
    stats: EngineStats
    form: Format
    ring: Ring
    seconds: float
    """How long a load waits for its next chunk."""
    measured: Callable[[int, float], None] = lambda nbytes, seconds: None
    """Called with the bytes and the seconds of a load."""
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.batch = max(1, min(batch_chunks(self.form.chunk_bytes), self.ring.count // 4))
        self.threads = ThreadPoolExecutor(3, "vcache-offload-read")

    def close(self) -> None:
        """End the threads, after the store is closed: their calls then fail at once. A thread that
        frees tensors while the interpreter ends would abort the process."""
        self.ring.close()
        self.threads.shutdown(cancel_futures=True)

    def read(self, batch: _Batch) -> None:
        """Read the batch in one call, and check it. A thread."""
        with threads.survives("vcache-offload-read", self.stats.failed):
            # Buffers become free when their chunks are copied.
            buffers = self.ring.take(len(batch.names), 10.0)
            if not buffers:
                batch.cause = "timeout"
                return
            try:
                batch.called = self.now()
                sizes = self.store.get(batch.names, [buffer.place for buffer in buffers])
                for name, buffer, nbytes in zip(batch.names, buffers, sizes, strict=True):
                    if not self._is_right(batch, name, buffer, nbytes):
                        break
                    batch.right.append(buffer)
            finally:
                self.ring.give(buffers[len(batch.right) :])
                batch.ended = self.now()

    def _is_right(self, batch: _Batch, name: str, buffer: Buffer, nbytes: int) -> bool:
        if nbytes <= 0:
            batch.cause = "absent" if nbytes == 0 else "store"
            return False
        try:
            self.form.check(buffer.memory.numpy(), nbytes, name)
        except BadObject as error:
            if self.stats.failed("offload_bad") == 1:
                log.error("a damaged or foreign object is removed from the store: %s", error)
            self.store.forget(name)
            batch.cause = "bad"
            return False
        return True


class Fetch:
    """Reads the chunks of one request, stored in `epoch`, from the store.

    `ready` never waits; `wait` waits for the next chunks. One thread uses a fetch, and gives every
    buffer back. The fetch ends with the first chunk that is absent, damaged or late."""

    def __init__(self, reader: Reader, keys: Sequence[ChunkKey], epoch: int) -> None:
        self.keys, self.epoch = list(keys), epoch
        self.cause = ""
        """Why the fetch ended early: `absent`, `bad`, `timeout` or `store`."""
        self._reader, self._moved, self._began = reader, reader.now(), 0.0
        names, most = [objects.name(key, epoch) for key in keys], reader.batch
        self._batches = deque(_Batch(names[at : at + most]) for at in range(0, len(names), most))
        for batch in self._batches:
            batch.done = reader.threads.submit(reader.read, batch)

    def ready(self) -> list[Buffer]:
        """The next objects that have arrived, in order."""
        chunks = list[Buffer]()
        self._look_at_clock()
        while self._batches and self._batches[0].done.done():
            batch = self._batches.popleft()
            chunks += batch.right
            self._moved, self._began = self._reader.now(), self._began or batch.called
            if len(batch.right) < len(batch.names):
                self.cancel(batch.cause)
            elif not self._batches:
                nbytes = len(self.keys) * self._reader.form.chunk_bytes
                self._reader.measured(nbytes, batch.ended - self._began)
        return chunks

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until `ready` has a chunk or the fetch is over."""
        if self._batches:
            wait([self._batches[0].done], seconds)

    @property
    def over(self) -> bool:
        """Whether the fetch is over and `ready` is empty. Ends a late fetch."""
        self._look_at_clock()
        return not self._batches

    def give_back(self, chunks: Sequence[Buffer]) -> None:
        """Return the buffers of chunks that are no longer used."""
        self._reader.ring.give(chunks)

    def cancel(self, cause: str = "") -> None:
        """Drop all further chunks. Their buffers are returned when they arrive. Idempotent."""
        self.cause = cause or self.cause
        while self._batches:
            batch = self._batches.popleft()
            if not batch.done.cancel():
                batch.done.add_done_callback(partial(self._returned, batch))

    def _returned(self, batch: _Batch, _: object) -> None:
        self.give_back(batch.right)

    def _look_at_clock(self) -> None:
        """End the fetch if no chunk came for `seconds`.

        The end counts as a failure of the store only if the call took most of the time. Waits for a
        thread or for buffers do not count."""
        reader, now = self._reader, self._reader.now()
        if not self._batches or now - self._moved < reader.seconds:
            return
        batch = self._batches[0]
        if not batch.done.done():
            if batch.called and now - batch.called > reader.seconds / 2:
                reader.stats.count(offload_late=1)
                reader.store.failed("get", f"nothing came in {reader.seconds:g} s")
            self.cancel("timeout")


def batch_chunks(chunk_bytes: int) -> int:
    """Chunks of a call of the store: enough to make fixed costs small, few enough to copy arrived
    chunks beside the next call."""
    return max(1, min((128 << 20) // chunk_bytes, 16))


# ---- writes


class Writer:
    """Writes offered chunks, from pool slot to buffer to object, in a background thread. No request
    waits for a write."""

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
        self._stop = threading.Event()
        self._stream: torch.cuda.Stream | None = None
        self._outbox = Outbox(stats.failed)

    def offer(self, keys: Sequence[ChunkKey]) -> None:
        """Queue chunks that are in the pool. Never blocks: a full queue drops and counts chunks.
        Does nothing after `close`."""
        if self._stop.is_set():
            return
        room = max(MAX_WAITING - len(self._waiting), 0)
        self._waiting += keys[:room]
        self._outbox.after(self._ready, self._write)
        self._dropped("backlog", len(keys) - room)

    def flush(self, seconds: float) -> bool:
        """Wait until all offered chunks are written or dropped; False after `seconds`."""
        return self._outbox.flush(seconds)

    def close(self, seconds: float) -> None:
        """Drop the queue, and let running writes end, within `seconds`. Idempotent."""
        self._stop.set()
        self._outbox.close(seconds)
        self._client.close()

    # ---- the thread

    def _ready(self, seconds: float) -> bool:
        """Wait until store and server can be used, or `close`."""
        usable = self._store.usable and self._client.connected
        return usable or self._stop.wait(seconds)

    def _write(self) -> None:
        """Copy and put the next chunks. A failure is only counted: the chunks are later misses."""
        count = len(self._waiting) if self._stop.is_set() else len(self._buffers)
        keys = [self._waiting.popleft() for _ in range(min(count, len(self._waiting)))]
        if self._stop.is_set():
            self._dropped("down", len(keys))
            return
        try:
            self._put(self._copied(keys))
        except BaseException:
            self._dropped("failed", len(keys))
            raise
        finally:
            if self._waiting:
                self._outbox.after(self._ready, self._write)

    def _copied(self, keys: list[ChunkKey]) -> list[tuple[str, Place]]:
        """Copy chunks that the store lacks from the pool into buffers. Returns the objects' names
        and places, of the chunks that did not change meanwhile. VCacheError if the server does not
        answer."""
        if not keys:
            return []
        pool = self._client.present(keys)
        stored = self._store.exist([objects.name(key, pool.epoch) for key in keys])
        found = zip(keys, pool.present, stored, strict=True)
        wanted = [key for key, here, there in found if here and not there]
        sealed = list[tuple[str, Place]]()
        # Recent, but not kept from eviction: nobody ends a pin once the chunks are copied.
        pinned = self._client.pin(wanted, 0.0) if wanted else Pinned([])
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
        whole, sealed = segment.whole, list[tuple[str, Place]]()
        for number, begin in zip(range(run.first, run.stop), slots.tolist(), strict=True):
            buffer = self._buffers[number]
            self._copy(whole[begin : begin + nbytes], buffer.chunk)
            self._format.seal(buffer.memory.numpy(), names[number])
            sealed.append((names[number], buffer.place))
        return sealed[: segment.view.leading(run.slots, run.generations)]

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
        """Put objects, six times at most: meanwhile a full store evicts, and a dead provider or
        process is replaced."""
        outcomes: Sequence[str] = []
        for attempt in range(6):
            if not sealed or (attempt and self._stop.wait(0.05 * 2 ** (attempt - 1))):
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
