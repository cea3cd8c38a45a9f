"""Reads chunks from the store: threads read and check batches, and pass them on in order."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

from vcache_backend import threads
from vcache_backend.offload import objects
from vcache_backend.offload.objects import BadObject, Format
from vcache_backend.offload.staging import Buffer, Ring
from vcache_backend.offload.store import Store
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.transfer.stats import EngineStats

log = logging.getLogger(__name__)

BATCH_BYTES = 128 << 20
"""Bytes of a store call: enough to make fixed costs small, few enough to copy arrived chunks beside
the next call."""
MAX_BATCH = 16
BUFFER_SECONDS = 10.0
"""How long a thread waits for buffers, which become free when their chunks are copied."""
CLOSE_SECONDS = 1.0
READERS = 3
"""How many threads read: one checks what has arrived while the others call the store."""


@dataclass
class _Batch:
    """Objects of one call. done: set once all is checked. right: the buffers of the leading chunks
    that are right. cause: why the next chunk is not. called, ended: when the call began and when
    all was checked."""

    names: list[str]
    done: Future[None] = field(default_factory=Future)
    right: list[Buffer] = field(default_factory=list)
    cause: str = "store"
    called: float = 0.0
    ended: float = 0.0


@dataclass
class Reader:
    """Reads for one worker. seconds: how long a load waits for its next chunk. measured: called
    with the bytes and the seconds of a load. now: a monotonic clock in seconds."""

    store: Store
    stats: EngineStats
    form: Format
    ring: Ring
    seconds: float
    measured: Callable[[int, float], None] = lambda nbytes, seconds: None
    now: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.batch = max(1, min(batch_chunks(self.form.chunk_bytes), self.ring.count // 4))
        self.batches = SimpleQueue[_Batch | None]()
        # Not an executor's threads: the end of the process would wait for their calls.
        self.readers = [
            threads.start(self._turn, f"vcache-offload-read-{number}", self.stats.failed)
            for number in range(READERS)
        ]

    def close(self) -> None:
        """End the threads after the batches that wait, within `CLOSE_SECONDS`: a thread that frees
        tensors while the interpreter ends would abort the process."""
        for _ in self.readers:
            self.batches.put(None)
        until = time.monotonic() + CLOSE_SECONDS
        for reader in self.readers:
            reader.join(max(until - time.monotonic(), 0.0))

    def _turn(self) -> bool:
        batch = self.batches.get()
        if batch is not None and batch.done.set_running_or_notify_cancel():
            try:
                self._read(batch)
            finally:
                batch.done.set_result(None)
        return batch is None

    def _read(self, batch: _Batch) -> None:
        """Read the batch in one call, and check it."""
        buffers = self.ring.take(len(batch.names), BUFFER_SECONDS)
        if not buffers:
            batch.cause = "timeout"
            return
        batch.called = self.now()
        sizes = self.store.get(batch.names, [buffer.place for buffer in buffers])
        for name, buffer, nbytes in zip(batch.names, buffers, sizes, strict=True):
            if not self._is_right(batch, name, buffer, nbytes):
                break
            batch.right.append(buffer)
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
            reader.batches.put(batch)

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
    return max(1, min(BATCH_BYTES // chunk_bytes, MAX_BATCH))
