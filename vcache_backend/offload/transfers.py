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


# ---- reads


class _Arrived(NamedTuple):
    """What one call of the store has read."""

    right: list[Buffer]
    """Of the leading objects that are right."""
    cause: str = ""
    """Why the next object is not; empty if all are."""


class Reader:
    """Reads for one worker, in three threads: one checks what has arrived while the others call the
    store."""

    def __init__(
        self,
        store: Store,
        stats: EngineStats,
        form: Format,
        buffers: Sequence[Buffer],
        seconds: float,
        measured: Callable[[int, float], None] = lambda nbytes, seconds: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """seconds: how long a load waits for its next chunk. measured: called with the bytes and
        the seconds of a load."""
        self.stats, self.form, self.seconds = stats, form, seconds
        self.measured, self.now = measured, now
        self.batch = max(1, min(batch_chunks(form.chunk_bytes), len(buffers) // 4))
        self._store, self._closed = store, False
        self._free, self._changed = list(buffers), threading.Condition()
        self._threads = ThreadPoolExecutor(3, "vcache-offload-read")

    def read(self, names: list[str]) -> Future[_Arrived]:
        """Begin to read objects in one call."""
        return self._threads.submit(self._read, names)

    def take(self, count: int, seconds: float) -> list[Buffer]:
        """Take `count` buffers; empty if too few become free within `seconds`, or after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or len(self._free) >= count, seconds)
            if self._closed or len(self._free) < count:
                return []
            taken, self._free = self._free[:count], self._free[count:]
            return taken

    def give_back(self, buffers: Sequence[Buffer]) -> None:
        """Return buffers that nobody reads or writes."""
        with self._changed:
            self._free += buffers
            self._changed.notify_all()

    def close(self) -> None:
        """End the threads, after the store is closed: their calls then fail at once. A thread that
        frees tensors while the interpreter ends would abort the process."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._threads.shutdown(cancel_futures=True)

    # ---- a thread

    def _read(self, names: list[str]) -> _Arrived:
        arrived = _Arrived([], "store")
        with threads.survives("vcache-offload-read", self.stats.failed):
            arrived = self._checked(names)
        return arrived

    def _checked(self, names: list[str]) -> _Arrived:
        # Buffers become free when their chunks are copied.
        buffers, right, cause = self.take(len(names), 10.0), 0, ""
        if not buffers:
            return _Arrived([], "timeout")
        try:
            sizes = self._store.get(names, [buffer.place for buffer in buffers])
            for name, buffer, nbytes in zip(names, buffers, sizes, strict=True):
                if cause := self._wrong(name, buffer, nbytes):
                    break
                right += 1
        except BaseException:
            right = 0
            raise
        finally:
            self.give_back(buffers[right:])
        return _Arrived(buffers[:right], cause)

    def _wrong(self, name: str, buffer: Buffer, nbytes: int) -> str:
        """Why the object is not right; empty if it is."""
        if nbytes <= 0:
            return "absent" if nbytes == 0 else "store"
        try:
            self.form.check(buffer.memory.numpy(), nbytes, name)
        except BadObject as error:
            if self.stats.failed("offload_bad") == 1:
                log.error("a damaged or foreign object is removed from the store: %s", error)
            self._store.forget(name)
            return "bad"
        return ""


class Fetch:
    """Reads the chunks of one request, stored in `epoch`, from the store.

    `ready` never waits; `wait` waits for the next chunks. One thread uses a fetch, and gives every
    buffer back. The fetch ends with the first chunk that is absent, damaged or late."""

    def __init__(self, reader: Reader, keys: Sequence[ChunkKey], epoch: int) -> None:
        self.keys, self.epoch = list(keys), epoch
        self.cause = ""
        """Why the fetch ended early: `absent`, `bad`, `timeout` or `store`."""
        self._reader = reader
        self._began = self._moved = reader.now()
        names, most = [objects.name(key, epoch) for key in keys], reader.batch
        self._batches = deque(
            reader.read(names[at : at + most]) for at in range(0, len(names), most)
        )

    def ready(self) -> list[Buffer]:
        """The next objects that have arrived, in order."""
        chunks = list[Buffer]()
        self._end_if_late()
        while self._batches and self._batches[0].done():
            right, cause = self._batches.popleft().result()
            chunks += right
            self._moved = self._reader.now()
            if cause:
                self.cancel(cause)
            elif not self._batches:
                nbytes = len(self.keys) * self._reader.form.chunk_bytes
                self._reader.measured(nbytes, self._moved - self._began)
        return chunks

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` until `ready` has a chunk or the fetch is over."""
        if self._batches:
            wait([self._batches[0]], seconds)

    @property
    def over(self) -> bool:
        """Whether the fetch is over and `ready` is empty. Ends a late fetch."""
        self._end_if_late()
        return not self._batches

    def give_back(self, chunks: Sequence[Buffer]) -> None:
        """Return the buffers of chunks that are no longer used."""
        self._reader.give_back(chunks)

    def cancel(self, cause: str = "") -> None:
        """Drop all further chunks. Their buffers are returned when they arrive. Idempotent."""
        self.cause = cause or self.cause
        while self._batches:
            batch = self._batches.popleft()
            if not batch.cancel():
                batch.add_done_callback(lambda done: self.give_back(done.result().right))

    def _end_if_late(self) -> None:
        """End the fetch if no chunk came for `seconds`. A call of the store that hangs fails after
        its own deadline."""
        reader = self._reader
        late = reader.now() - self._moved >= reader.seconds
        if late and self._batches and not self._batches[0].done():
            reader.stats.count(offload_late=1)
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

    def offer(self, keys: Sequence[ChunkKey], most: int = 4096) -> None:
        """Queue chunks that are in the pool. Never blocks: if `most` chunks wait, further ones are
        dropped and counted. Does nothing after `close`."""
        if self._stop.is_set():
            return
        room = max(most - len(self._waiting), 0)
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
            if keys:
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
        present = self._client.present(keys).present
        here = [key for key, there in zip(keys, present, strict=True) if there]
        # Recent, but not kept from eviction: nobody ends a pin once the chunks are copied.
        pinned = self._client.pin(here, 0.0) if here else Pinned([])
        names = [objects.name(key, pinned.epoch) for key in here]
        stored = self._store.exist(names)
        sealed = [one for run in pinned.runs for one in self._copied_run(run, names, stored)]
        self._dropped("gone", len(keys) - stored.count(True) - len(sealed))
        return sealed

    def _copied_run(
        self, run: SlotRun, names: Sequence[str], stored: Sequence[bool]
    ) -> list[tuple[str, Place]]:
        """Copy chunks into the buffers of their numbers. Returns those that did not change."""
        nbytes, segment = self._format.chunk_bytes, self._pool.segment(run.segment)
        slots = None if segment is None else segment.slot_offsets(run, nbytes)
        if segment is None or slots is None:
            return []
        lacking = [number for number in range(run.first, run.stop) if not stored[number]]
        for number in lacking:
            begin, buffer = int(slots[number - run.first]), self._buffers[number]
            self._copy(segment.whole[begin : begin + nbytes], buffer.chunk)
            self._format.seal(buffer.memory.numpy(), names[number])
        stop = run.first + segment.view.leading(run.blocks, run.generations)
        return [(names[number], self._buffers[number].place) for number in lacking if number < stop]

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
