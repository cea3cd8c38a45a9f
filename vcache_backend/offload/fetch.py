"""Reading chunks from the store: batches on their way in reader threads, handed over in order as they arrive."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.offload import objects
from vcache_backend.offload.access import Access
from vcache_backend.offload.codecs import Codec
from vcache_backend.offload.jobs import Workers
from vcache_backend.offload.objects import HEADER_BYTES, BadObject
from vcache_backend.offload.staging import Buffer, Ring
from vcache_backend.offload.store import StoreDown
from vcache_backend.transfer.stats import EngineStats

log = logging.getLogger(__name__)

BATCH_BYTES = 128 << 20
"""Bytes of one call of the store's: enough that its fixed costs do not count, few enough that the copy of what came goes on beside."""
BATCH_MOST = 16
BUFFER_SECONDS = 10.0
"""How long a thread waits for buffers, which come back as the chunks in them are copied: in vLLM once a step. The load that wants them
looks at the clock itself."""
MEASURED_BYTES = 1 << 20
"""A load of fewer says nothing about the bandwidth."""


class Staged(NamedTuple):
    """One chunk that came. epoch: the one it was stored in. chunk: its bytes, 1-D uint8 on the host, valid until it is given back."""

    key: ChunkKey
    epoch: int
    chunk: torch.Tensor
    buffer: Buffer


class Bandwidth:
    """Bytes of KV a second that came lately, over all loads; None before the first. Any thread."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, nbytes: int, seconds: float) -> None:
        if nbytes >= MEASURED_BYTES and seconds > 0:
            rate = nbytes / seconds
            self.value = rate if self.value is None else 0.5 * self.value + 0.5 * rate


@dataclass
class Source:
    """What all reads of one worker share. workers: make the calls. checkers: look at what came. chunk_bytes: of a chunk in the KV
    cache. seconds: how long a load waits for its next chunk. absent: told which are not there. now: a monotonic clock."""

    access: Access
    workers: Workers
    checkers: Workers
    ring: Ring
    codec: Codec
    fingerprint: bytes
    chunk_bytes: int
    seconds: float
    stats: EngineStats
    absent: Callable[[Sequence[ChunkKey]], None]
    bandwidth: Bandwidth = field(default_factory=Bandwidth)
    now: Callable[[], float] = time.monotonic

    @property
    def batch(self) -> int:
        """Chunks of one call."""
        return max(1, min(BATCH_BYTES // self.chunk_bytes, BATCH_MOST, self.ring.count // 4))


class Fetch:
    """Chunks of one request on their way from the store.

    `ready` never waits; `wait` does, for the next chunk. Each is used from one thread. Every `Staged` is to be given back. Ends with
    the first chunk that is not there, not right, or late.
    """

    def __init__(self, source: Source, keys: Sequence[ChunkKey], epoch: int) -> None:
        """epoch: the one in which the chunks were stored that are wanted."""
        self.keys, self.epoch = list(keys), epoch
        self._fingerprint = objects.in_epoch(source.fingerprint, epoch)
        self._source = source
        self._arrived = threading.Condition()
        self._staged: dict[int, Staged] = {}
        self._given = 0
        self._came = 0
        self._end = len(self.keys)
        self._started = self._moved = source.now()
        self._calls: dict[int, float] = {}
        """When the call of a batch began, by its first chunk."""
        self._waited = 0.0
        self.cause = ""
        """Why it ended early: `absent`, `bad`, `timeout` or `store`."""
        self._parts = parts(len(self.keys), source.batch)
        for part in self._parts:
            if source.workers.submit(lambda part=part: self._read(part)) is None:  # type: ignore[misc]
                self._stop(part.start, "store")
                break

    def ready(self, most: int) -> list[Staged]:
        """The next chunks, in order, that are here: `most` at most."""
        self._look_at_clock()
        with self._arrived:
            count = 0
            while count < most and self._given + count < self._end and self._given + count in self._staged:
                count += 1
            chunks = [self._staged.pop(index) for index in range(self._given, self._given + count)]
            self._given += count
            self._moved = self._source.now() if count else self._moved
        return chunks

    def wait(self, seconds: float) -> bool:
        """Wait, at most so long, until `ready` has something or the fetch is over; False if neither."""
        with self._arrived:
            return self._arrived.wait_for(lambda: self._given in self._staged or self._given >= self._end, seconds)

    @property
    def over(self) -> bool:
        """Nothing more will come, and nothing is ready. Says so late chunks, too."""
        self._look_at_clock()
        return self._given >= self._end

    def give_back(self, chunks: Sequence[Staged]) -> None:
        """Their bytes are not used any more."""
        self._source.ring.give([chunk.buffer for chunk in chunks])

    def cancel(self) -> None:
        """Nobody wants the rest. What is on its way is given back when it comes. Idempotent."""
        self._stop(0, self.cause)

    # ---- inside

    def _look_at_clock(self) -> None:
        """End what waits too long. That is a failure of the store where its call has taken as long; waiting for a thread or for buffers,
        behind other loads, is not."""
        source, now = self._source, self._source.now()
        if self._given >= self._end or now - self._moved < source.seconds:
            return
        with self._arrived:
            if self._given in self._staged:
                self._moved = now
                return
            key = self.keys[self._given]
            called = [self._calls.get(part.start, now) for part in self._parts if self._given in part]
        if now - called[0] >= source.seconds:
            source.stats.count(offload_late=1)
            source.access.failed("get", f"nothing came in {source.seconds:g} s", lambda: _try_again(source, self._name(key)))
        self._stop(self._given, "timeout")

    def _stop(self, at: int, cause: str) -> None:
        """Nothing from chunk `at` on is handed over."""
        with self._arrived:
            if at < self._end:
                self._end, self.cause = at, cause
            dropped = [self._staged.pop(index) for index in list(self._staged) if index >= self._end]
            self._arrived.notify_all()
        self._source.ring.give([chunk.buffer for chunk in dropped])

    def _read(self, part: range) -> None:
        """In a reader thread: one call of the store's. Others look at what it brought, so that the next call begins at once."""
        source, keys = self._source, self.keys[part.start : part.stop]
        if part.start >= self._end:
            return
        asked = source.now()
        buffers = source.ring.take(len(keys), BUFFER_SECONDS)
        self._waited += source.now() - asked
        if not buffers or part.start >= self._end:
            source.ring.give(buffers)
            self._stop(part.start, "timeout")
            return
        with self._arrived:
            self._calls[part.start] = source.now()
        names = [self._name(key) for key in keys]
        spans = [buffer.span(source.ring.nbytes) for buffer in buffers]
        got = source.access.call("get", lambda: source.access.store.get_into(names, spans), [-1] * len(keys))
        for index, buffer, nbytes in zip(part, buffers, got, strict=True):
            if source.checkers.submit(lambda i=index, b=buffer, n=nbytes: self._look_at(i, b, n)) is None:  # type: ignore[misc]
                source.ring.give([buffer])
                self._stop(index, "store")

    def _look_at(self, index: int, buffer: Buffer, nbytes: int) -> None:
        """In a checker thread: hand over one object of `nbytes` bytes, if it is what it should be."""
        key, came = self.keys[index], 0
        chunk = self._checked(index, key, buffer, nbytes) if index < self._end else None
        with self._arrived:
            if chunk is not None and index < self._end:
                self._staged[index], self._moved = Staged(key, self.epoch, chunk, buffer), self._source.now()
                self._came = came = self._came + 1
                self._arrived.notify_all()
        if not came:
            self._source.ring.give([buffer])
        elif came == len(self.keys):
            seconds = self._source.now() - self._started - self._waited
            self._source.bandwidth.add(came * self._source.chunk_bytes, seconds)

    def _name(self, key: ChunkKey) -> str:
        return objects.name(key, self.epoch)

    def _checked(self, index: int, key: ChunkKey, buffer: Buffer, nbytes: int) -> torch.Tensor | None:
        """The chunk of an object, if it is what it should be."""
        source = self._source
        if nbytes <= 0:
            if nbytes == 0:
                source.absent([key])
            self._stop(index, "absent" if nbytes == 0 else "store")
            return None
        try:
            return opened(source, self._fingerprint, key, buffer, nbytes)
        except VCacheError as error:
            reason = error.reason if isinstance(error, BadObject) else "codec"
            if source.stats.failed(f"offload_bad_{reason}") == 1:
                log.error("object %s of the store is not what it should be, and is removed: %s", self._name(key), error)
            source.access.forget([self._name(key)])
            source.absent([key])
            self._stop(index, "bad")
            return None


def parts(count: int, most: int) -> list[range]:
    """What each call reads of `count` chunks: `most` each; half as many the first, so that calls beside each other do not end at the same
    time, and the last, which nothing hides the checking of."""
    half, made, at = max(1, most // 2), list[range](), 0
    while at < count:
        left = count - at
        size = min(left, half) if not made or left <= half else min(left - half, most)
        made.append(range(at, at + size))
        at += size
    return made


def opened(source: Source, fingerprint: bytes, key: ChunkKey, buffer: Buffer, nbytes: int) -> torch.Tensor:
    """The chunk in a buffer that an object of `nbytes` bytes was read into. Raises BadObject, CodecError."""
    codec = source.codec
    length = objects.check(buffer.memory.numpy(), nbytes, key, fingerprint, codec.id, source.chunk_bytes)
    payload = buffer.memory[HEADER_BYTES : HEADER_BYTES + length]
    if codec.name == "raw":
        return payload
    # Behind the payload: see `buffer_bytes`.
    chunk = buffer.memory[source.ring.nbytes - source.chunk_bytes :]
    codec.decode(payload, chunk)
    return chunk


def buffer_bytes(codec: Codec, chunk_bytes: int) -> int:
    """Bytes of a buffer that holds an object and, where it has to be decoded, its chunk."""
    if codec.name == "raw":
        return HEADER_BYTES + chunk_bytes
    return -(-(HEADER_BYTES + codec.bound(chunk_bytes)) // 64) * 64 + chunk_bytes


def _try_again(source: Source, name: str) -> None:
    """Read what was late once more: is the store to be trusted again? Its absence is an answer, too."""
    buffers = source.ring.take(1, 0.1)
    if not buffers:
        raise StoreDown("all staging buffers wait for calls of the store's")
    try:
        span = buffers[0].span(source.ring.nbytes)
        source.access.store.get_into([name], [span])
    finally:
        source.ring.give(buffers)
