"""Typed calls for instances that share their KV caches in place."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.calls.channel import Channel, Sent

_PUBLISHED_BYTES = m.MAX_MESSAGE_BYTES - 256
_KEY_BYTES = m.KEY_BYTES + 2
"""Bytes of a key in a message that publishes chunks."""


class InstanceCalls(Channel):
    """The part of `Client` about instances. The client's contract holds here: deadlines, errors,
    threads.

    The caller keeps the fds that it passes, and closes the fds that it gets."""

    # ---- an owner's

    def join(
        self, instance: bytes, namespace: bytes, blocks: int, ranks: int, each: int, fd: int
    ) -> None:
        """Register a generation table as its scheduler. Repeat after each reconnection."""
        request = m.Join(m.InstanceId(instance), namespace, blocks, ranks, each)
        self._call(request, m.Count, self._config.control_seconds, [fd])

    def show_cache(
        self, instance: bytes, rank: int, shape: m.CacheShape, fds: Sequence[int]
    ) -> None:
        """Register a worker's KV cache, an fd a region. Repeat after each reconnection."""
        request = m.ShowCache(m.InstanceId(instance), rank, shape)
        self._call(request, m.Count, self._config.control_seconds, fds)

    def publish(self, whole: m.Publish) -> int:
        """Publish chunks of one rank, in several requests if many. Returns how many were taken."""
        count = len(whole.keys)
        packed_bytes = (len(whole.blocks) + len(whole.generations)) // max(1, count)
        most = max(1, min(m.MAX_PUBLISHED, _PUBLISHED_BYTES // (_KEY_BYTES + packed_bytes)))
        deadline, taken = time.perf_counter() + self._config.request_seconds, 0
        for start in range(0, count, most):
            part = whole.cut(start, start + most)
            taken += self._call(part, m.Count, deadline - time.perf_counter()).count
        return taken

    def retract(self, instance: bytes, sequence: int) -> int:
        """Void earlier publications, also those that arrive later. Returns how many chunks."""
        return self._call(m.Retract(m.InstanceId(instance), sequence), m.Count).count

    def listen(self, instance: bytes) -> m.Heard:
        """Fetch the news for the scheduler that joined on this connection."""
        return self._call(m.Listen(m.InstanceId(instance)), m.Heard)

    # ---- a reader's

    def find(self, whole: m.Find) -> m.Found:
        """Find chunks; see `Find`. Sends several requests for many keys."""
        deadline = time.perf_counter() + self._config.request_seconds
        answer = m.Found(b"")
        while True:
            part = whole.keys[len(answer.pooled) :][: max(1, _most_found(whole))]
            request = msgspec.structs.replace(whole, keys=part)
            more = self._call(request, m.Found, deadline - time.perf_counter())
            answer = _joined(answer, more) if answer.pooled else more
            if (
                len(answer.pooled) == len(whole.keys)
                or not more.pooled
                or (len(more.pooled) < len(part) and not more.cut)
            ):
                return msgspec.structs.replace(answer, cut=False) if answer.cut else answer

    def send_find(self, request: m.Find, seconds: float) -> Sent[m.Found] | None:
        """Send a look-up, whose answer may be `cut`. None if the keys exceed one request."""
        fits = len(request.keys) <= _most_found(request)
        return self._send(request, m.Found, seconds) if fits else None

    def promise(self, request: m.Promise) -> m.Promised:
        """Say that a request has begun to compute chunks: as many of them as one request may have.
        See `Promise`."""
        some = request.keys[: _most_found(request)]
        return self._call(msgspec.structs.replace(request, keys=some), m.Promised)

    def open_instance(self, instance: bytes) -> tuple[m.Joined, list[int]]:
        """Open an instance. Fds: its generation table, pidfds of the scheduler and each rank."""
        request = m.OpenInstance(m.InstanceId(instance))
        return self._open(request, m.Joined, lambda joined: 2 + joined.ranks)

    def open_cache(self, instance: bytes, rank: int) -> tuple[m.CacheShape, list[int]]:
        """Open a worker's KV cache: its description, and an fd for each of its regions."""
        request = m.OpenCache(m.InstanceId(instance), rank)
        cache, fds = self._open(request, m.Cache, lambda cache: len(cache.shape.regions))
        return cache.shape, fds

    def close_instance(self, instance: bytes) -> None:
        """Say that this process no longer maps any region of the instance."""
        self._call(m.CloseInstance(m.InstanceId(instance)), m.Count)


def _most_found(request: m.Find | m.Promise) -> int:
    """How many keys of a look-up or a promise fit into one request."""
    return min(m.MAX_KEYS, m.MAX_LOOKED_UP // request.ranks)


def _joined(first: m.Found, then: m.Found) -> m.Found:
    """Join two answers. `then` is about the keys after those of `first`."""
    moved = [run.numbered(run.first + len(first.pooled)) for run in then.residents]
    return m.Found(
        first.pooled + then.pooled,
        first.residents + moved,
        then.epoch,
        then.cut,
        then.coming,
    )
