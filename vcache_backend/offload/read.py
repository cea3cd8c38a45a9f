"""Reads chunks from the store: threads read batches, and pass arrived chunks on in order."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from vcache_backend.config import OffloadConfig
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.offload import objects
from vcache_backend.offload.codecs import Codec
from vcache_backend.offload.objects import HEADER_BYTES, BadObject, Format
from vcache_backend.offload.staging import Buffer, Ring
from vcache_backend.offload.store import Store
from vcache_backend.offload.verbs import StoreDown
from vcache_backend.offload.workers import Workers
from vcache_backend.transfer.stats import EngineStats

log = logging.getLogger(__name__)

BATCH_BYTES = 128 << 20
"""Bytes of a store call: enough to make fixed costs small, few enough to copy arrived chunks beside
the next call."""
MAX_BATCH = 16
BUFFER_SECONDS = 10.0
"""How long a thread waits for buffers, which become free when their chunks are copied."""
READERS = 2
"""How many threads call the store to read."""
CHECKERS = 4
"""The most threads that hash arrived chunks beside the calls: one for every four cores.

A thread hashes 10 GB/s on an H200's host, where 4 GB/s came over loopback. On two cores, busy with
the transfer, a second thread slowed reading (0.72 of the library's speed instead of 0.80, medians
of six runs)."""


@dataclass(frozen=True)
class Bound:
    """The common parts of a worker's reads and writes. measured: called with the bytes and the
    seconds of a load. codec: None for raw."""

    store: Store
    measured: Callable[[int, float], None]
    stats: EngineStats
    format: Format
    codec: Codec | None


class Staged(NamedTuple):
    """A chunk that has arrived. payload: 1-D uint8 on the host, in the codec's form; valid until
    `give_back`."""

    payload: torch.Tensor
    codec: Codec | None
    buffer: Buffer

    def write_to(self, chunk: torch.Tensor) -> None:
        """Write the chunk's bytes into `chunk`, on the host, or on a GPU on the current stream."""
        if self.codec is None:
            chunk.copy_(self.payload, non_blocking=True)
        else:
            self.codec.decode(self.payload.to(chunk.device, non_blocking=True), chunk)


class Reader:
    """Starts the reads of one worker. now: a monotonic clock in seconds."""

    def __init__(
        self,
        bound: Bound,
        ring: Ring,
        config: OffloadConfig,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.bound, self.ring, self.seconds, self.now = bound, ring, config.get_seconds, now
        self.batch = max(1, min(batch_chunks(bound.format.chunk_bytes), ring.count // 4))
        self.calls = Workers("vcache-offload-read", READERS)
        checkers = max(1, min(CHECKERS, len(os.sched_getaffinity(0)) // 4))
        self.checks = Workers("vcache-offload-check", checkers)

    def try_again(self, name: str) -> None:
        """Read a late object again. Its absence counts as an answer. Raises StoreDown."""
        buffers = self.ring.take(1, 0.1)
        if not buffers:
            raise StoreDown("all staging buffers wait for calls of the store's")
        try:
            self.bound.store.try_get(name, buffers[0].place)
        finally:
            self.ring.give(buffers)

    def close(self, seconds: float) -> None:
        self.calls.close(seconds)
        self.checks.close(seconds)


class Fetch:
    """Reads the chunks of one request, stored in `epoch`, from the store.

    `ready` never waits; `wait` waits for the next chunk. One thread uses a fetch, and gives every
    `Staged` back. The fetch ends with the first chunk that is absent, damaged or late."""

    def __init__(self, reader: Reader, keys: Sequence[ChunkKey], epoch: int) -> None:
        self.keys, self.epoch = list(keys), epoch
        self._reader, self._bound = reader, reader.bound
        self._arrived = threading.Condition()
        self._staged: dict[int, Staged] = {}
        self._given = 0
        self._end = len(self.keys)
        self._started = self._moved = reader.now()
        """`_started` moves on while threads wait for buffers, `_moved` with each chunk."""
        self._called: dict[int, float] = {}
        """The start of each batch's call, by the batch's first chunk."""
        self.cause = ""
        """Why the fetch ended early: `absent`, `bad`, `timeout` or `store`."""
        self._parts = parts(len(self.keys), reader.batch)
        for part in self._parts:
            reader.calls.submit(partial(self._read, part))

    def ready(self, most: int) -> list[Staged]:
        """Return the next `most` chunks at most that have arrived, in order."""
        self._look_at_clock()
        with self._arrived:
            chunks = list[Staged]()
            stop = min(self._given + most, self._end)
            while self._given < stop and self._given in self._staged:
                chunks.append(self._staged.pop(self._given))
                self._given += 1
            self._moved = self._reader.now() if chunks else self._moved
        return chunks

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` until `ready` has a chunk or the fetch is over. False if neither."""
        with self._arrived:
            return self._arrived.wait_for(
                lambda: self._given in self._staged or self._given >= self._end, seconds
            )

    @property
    def over(self) -> bool:
        """Whether the fetch is over and `ready` is empty. Ends a late fetch."""
        self._look_at_clock()
        return self._given >= self._end

    def give_back(self, chunks: Sequence[Staged]) -> None:
        """Return the buffers of chunks that are no longer used."""
        self._reader.ring.give([chunk.buffer for chunk in chunks])

    def cancel(self) -> None:
        """Drop all further chunks. Their buffers are returned when they arrive. Idempotent."""
        self._stop(0, self.cause)

    # ---- inside

    def _look_at_clock(self) -> None:
        """End the fetch if no chunk came for `get_seconds`.

        The end counts as a failure of the store only if the call took most of the time. Waits for a
        thread or for buffers do not count."""
        reader, now = self._reader, self._reader.now()
        if self._given >= self._end or now - self._moved < reader.seconds:
            return
        with self._arrived:
            if self._given in self._staged:
                self._moved = now
                return
            name = objects.name(self.keys[self._given], self.epoch)
            (part,) = (part for part in self._parts if self._given in part)
            called = self._called.get(part.start, now)
        if now - called > reader.seconds / 2:
            self._bound.stats.count(offload_late=1)
            why = f"nothing came in {reader.seconds:g} s"
            self._bound.store.failed("get", why, lambda: reader.try_again(name))
        self._stop(self._given, "timeout")

    def _stop(self, at: int, cause: str) -> None:
        """Pass on no chunk from number `at` on."""
        with self._arrived:
            if at < self._end:
                self._end = at
                self.cause = cause
            late = [index for index in self._staged if index >= self._end]
            dropped = [self._staged.pop(index) for index in late]
            self._arrived.notify_all()
        self.give_back(dropped)

    def _read(self, part: range) -> None:
        """Read the chunks of `part` in one call. Runs in a reader thread. Checker threads check the
        result, so that the next call begins at once."""
        reader, keys = self._reader, self.keys[part.start : part.stop]
        if part.start >= self._end:
            return
        asked = reader.now()
        buffers = reader.ring.take(len(keys), BUFFER_SECONDS)
        self._started += reader.now() - asked
        if not buffers or part.start >= self._end:
            reader.ring.give(buffers)
            self._stop(part.start, "timeout")
            return
        with self._arrived:
            self._called[part.start] = reader.now()
        names = [objects.name(key, self.epoch) for key in keys]
        sizes = self._bound.store.get(names, [buffer.place for buffer in buffers])
        for index, buffer, nbytes in zip(part, buffers, sizes, strict=True):
            reader.checks.submit(partial(self._look_at, index, buffer, nbytes))

    def _look_at(self, index: int, buffer: Buffer, nbytes: int) -> None:
        """Pass on a right object of `nbytes` bytes. Runs in a checker thread."""
        good, bound = index < self._end and self._is_right(index, buffer, nbytes), self._bound
        with self._arrived:
            good = good and index < self._end
            if good:
                payload = buffer.memory[HEADER_BYTES:]
                self._staged[index] = Staged(payload, bound.codec, buffer)
                self._moved = self._reader.now()
                self._arrived.notify_all()
            last = good and self._given + len(self._staged) == len(self.keys)
        if not good:
            self._reader.ring.give([buffer])
        elif last:
            nbytes = len(self.keys) * bound.format.chunk_bytes
            bound.measured(nbytes, self._moved - self._started)

    def _is_right(self, index: int, buffer: Buffer, nbytes: int) -> bool:
        bound, key = self._bound, self.keys[index]
        if nbytes <= 0:
            self._stop(index, "absent" if nbytes == 0 else "store")
            return False
        try:
            bound.format.check(buffer.memory.numpy(), nbytes, key, self.epoch)
        except BadObject as error:
            if bound.stats.failed("offload_bad") == 1:
                log.error("a damaged or foreign object is removed from the store: %s", error)
            bound.store.forget(objects.name(key, self.epoch))
            self._stop(index, "bad")
            return False
        return True


def batch_chunks(chunk_bytes: int) -> int:
    return max(1, min(BATCH_BYTES // chunk_bytes, MAX_BATCH))


def parts(count: int, most: int) -> list[range]:
    """Split `count` chunks into calls of `most` chunks.

    The first call gets half as many chunks, so that concurrent calls do not end together. The last
    call gets half as many, because its check delays the end."""
    half, made, at = max(1, most // 2), list[range](), 0
    while at < count:
        left = count - at
        size = min(left, half) if not made or left <= half else min(left - half, most)
        made.append(range(at, at + size))
        at += size
    return made
