"""Promises of chunks that instances are computing, for which other instances may wait. Pure.

A look-up makes a promise. The promise is confirmed when the request's load begins, or the request's
first step is planned. A promise is only a reason to wait: after a broken promise, the waiting
request computes the chunks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress

import msgspec

from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.processes import Peer
from vcache_backend.protocol import messages as m


class OpenPromise(msgspec.Struct, gc=False, eq=False):
    """The promise of one request of `client`. left: the chunks that have not arrived (keys of rank
    0). at: when the promise was made or confirmed, or its last chunk arrived. chunk_seconds: see
    `Promise`. confirmed: no look-up takes the promise over. begun: a step computes the chunks, or a
    chunk has arrived."""

    client: Peer
    number: int
    ranks: int
    at: float
    chunk_seconds: float
    left: dict[m.ChunkKey, None]
    confirmed: bool = False
    begun: bool = False


class Promises:
    """All promises. Called from the server's loop; `now` is a monotonic clock in seconds."""

    MAX_PROMISED = 1 << 16
    """The most promised chunks of all clients, some 250 B each, which a reset drops in one turn. A
    promise has `MAX_KEYS` at most."""
    QUIET_SECONDS = 120.0
    """A promise is dropped after this time without a chunk: longer than any step takes."""

    def __init__(self, counters: Counter[str], now: Callable[[], float]) -> None:
        self._counters, self._now = counters, now
        self._of: dict[tuple[int, int], OpenPromise] = {}
        """By connection and number."""
        self._by_key: dict[m.ChunkKey, OpenPromise] = {}

    def __len__(self) -> int:
        """The number of promised chunks."""
        return len(self._by_key)

    # ---- asked

    def coming(
        self, client: Peer, keys: Sequence[m.ChunkKey], begins: bool = False
    ) -> m.Coming | None:
        """The leading chunks of `keys` that another client has promised; None if the first chunk is
        not promised, or by this client. begins: ignore promises of queued requests."""
        promised = self._holder(keys[0], begins) if keys else None
        if promised is None or promised.client.id == client.id:
            return None
        others = (at for at, key in enumerate(keys) if self._by_key.get(key) is not promised)
        return m.Coming(
            next(others, len(keys)),
            promised.begun,
            max(0.0, self._now() - promised.at),
            promised.chunk_seconds,
        )

    # ---- made

    def intend(
        self, client: Peer, number: int, lacking: Sequence[m.ChunkKey], ranks: int, begins: bool
    ) -> None:
        """Note that a request of the client will compute the unpromised chunks of `lacking`.
        lacking: see `Service._lacking`. begins: see `coming`."""
        held = {key for key in self._by_key.keys() & lacking if self._holder(key, begins)}
        free = [key for key in lacking if key not in held]
        self._promise(client, number, free, ranks)

    def begin(self, client: Peer, request: m.Promise, lacking: Sequence[m.ChunkKey]) -> int:
        """Replace the promise of this number by the chunks `lacking`, which the request computes or
        will compute. Takes chunks over from other promises. Returns how many are promised."""
        if not (request.number or request.keys):
            self.drop_client(client)
            return 0
        promised = self._of.get((client.id, request.number))
        if promised is not None and not lacking:
            self._drop([promised])
        elif promised is not None:
            self._remove(promised, promised.left.keys() - set(lacking))
        taken = self._promise(client, request.number, lacking, request.ranks)
        if taken is None:
            return 0
        taken.confirmed = True
        taken.begun = request.begun
        taken.chunk_seconds = client.chunk_seconds = request.chunk_seconds
        return len(taken.left)

    # ---- kept

    def arrived(self, keys: Iterable[m.ChunkKey]) -> None:
        """Chunks (keys of rank 0) can be read now, by all ranks."""
        for key in keys if self._by_key else ():
            if (promised := self._by_key.get(key)) is not None:
                self._counters["promised_chunks_arrived"] += 1
                promised.confirmed = promised.begun = True
                promised.at = self._now()
                self._remove(promised, [key])

    def stored(self, keys: Iterable[m.ChunkKey], pooled: Directory) -> None:
        """Chunks of single ranks can be read now in the pool."""
        stored = defaultdict[int, dict[m.ChunkKey, None]](dict)
        for key in keys if self._by_key else ():
            first, rank = _first(key), int.from_bytes(key[-m.RANK_BYTES :], "big")
            promised = self._by_key.get(first)
            if promised is not None and rank < promised.ranks:
                promised.at = self._now()
                stored[promised.ranks][first] = None
        # All chunks at once: a look-up for each chunk and rank would take a long turn.
        for ranks, chunks in stored.items():
            self.arrived(compress(chunks, pooled.of_all(list(chunks), ranks)))

    # ---- broken

    def refused(self, keys: Iterable[m.ChunkKey]) -> None:
        """Remove chunks that got no slot from the promises: the chunks will not arrive."""
        for key in map(_first, keys) if self._by_key else ():
            if (promised := self._by_key.get(key)) is not None:
                self._counters["promised_chunks_broken"] += 1
                self._remove(promised, [key])

    def drop_client(self, client: Peer) -> None:
        self._drop([one for one in self._of.values() if one.client.id == client.id])

    def clear(self, namespace: bytes) -> None:
        """Drop the promises of a namespace; all with b""."""
        every = self._of.values()
        self._drop([one for one in every if next(iter(one.left)).startswith(namespace)])

    def tick(self) -> None:
        quiet_since = self._now() - self.QUIET_SECONDS
        self._drop([one for one in self._of.values() if one.at < quiet_since])

    # ---- inside

    def _holder(self, key: m.ChunkKey, begins: bool) -> OpenPromise | None:
        promised = self._by_key.get(key)
        if promised is None or promised.confirmed or not begins:
            return promised
        return None if promised.at + m.QUEUED_SECONDS < self._now() else promised

    def _promise(
        self, client: Peer, number: int, lacking: Sequence[m.ChunkKey], ranks: int
    ) -> OpenPromise | None:
        """Add chunks to a promise, up to the limits. None if the promise has no chunk."""
        promised = self._of.get((client.id, number))
        if promised is None:
            promised = OpenPromise(client, number, ranks, 0.0, client.chunk_seconds, {})
        room = min(self.MAX_PROMISED - len(self._by_key), m.MAX_KEYS - len(promised.left))
        new = [key for key in lacking if key not in promised.left][: max(0, room)]
        for key in self._by_key.keys() & new:
            self._remove(self._by_key[key], [key])
        self._by_key.update(dict.fromkeys(new, promised))
        promised.left.update(dict.fromkeys(new))
        if not promised.left:
            return None
        self._counters["promised_chunks"] += len(new)
        self._of[client.id, number] = promised
        promised.at = self._now()
        return promised

    def _remove(self, promised: OpenPromise, keys: Iterable[m.ChunkKey]) -> None:
        for key in keys:
            del self._by_key[key], promised.left[key]
        if not promised.left:
            del self._of[promised.client.id, promised.number]

    def _drop(self, promises: Sequence[OpenPromise]) -> None:
        for promised in promises:
            self._counters["promised_chunks_broken"] += len(promised.left) * promised.begun
            self._remove(promised, list(promised.left))


def _first(key: m.ChunkKey) -> m.ChunkKey:
    return m.ChunkKey(key[: -m.RANK_BYTES] + bytes(m.RANK_BYTES))
