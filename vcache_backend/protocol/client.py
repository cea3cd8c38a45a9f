"""Typed calls to the metadata server, for the workers and schedulers of a node."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from vcache_backend.config import ClientConfig
from vcache_backend.errors import ServerUnavailable, VCacheError
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import sockets
from vcache_backend.protocol.channel import Channel, R, Sent

log = logging.getLogger(__name__)


class Client(Channel):
    """A connection to the metadata server that reconnects by itself.

    Any thread may call any method; requests take turns. Every call returns or raises within its
    deadline (`client.request_seconds`; control calls: `client.control_seconds`). ServerTimeout: the
    deadline passed. ServerUnavailable, at once: not connected (the breaker is open). Refused: the
    server refused. After a failure a background thread reconnects. When a connection is lost, the
    server voids the connection's reservations at once. In a forked child every call raises
    ServerUnavailable."""

    def __init__(
        self,
        path: Path,
        config: ClientConfig,
        device: str = "host",
        medium: m.Medium = "host",
        layout: dict[str, str] | None = None,
        reconnect: bool = True,
        name: str = "",
    ) -> None:
        """Try to connect once, within `connect_seconds`. An absent server raises nothing; call
        `require` to make it an error.

        layout, name: the instance's, for the hello."""
        self.on_segments: Callable[[list[m.SegmentInfo]], None] = lambda segments: None
        """Called with the server's segments every `heartbeat_seconds` and after a reconnection."""
        self.reads: Callable[[], list[m.Reads]] = list
        """Called with every heartbeat: how much this process has read from other instances."""
        self.unmappable: set[m.SegmentId] = set()
        """Segments that this process cannot map. The server hears of them with every heartbeat."""
        self._untold = Counter[str]()
        """The counts of the next `ListSegments`."""
        self._telling = threading.Lock()
        self._in_parts = True
        """Whether a look-up of too many hashes goes on behind what was found."""
        token = secrets.randbits(63)
        hello = m.Hello(m.PROTOCOL_VERSION, device, medium, layout or {}, token, name)
        super().__init__(path, config, hello, reconnect)
        self.on_beat.append(self._list)

    # ---- chunks

    def lookup(self, keys: list[m.ChunkKey], ranks: int = 1) -> int:
        """Count the leading chunks that the pool has for all ranks. keys: of rank 0, and of one
        namespace."""
        if not keys:
            return 0
        hashes = b"".join([key[m.NAMESPACE_BYTES : -m.RANK_BYTES] for key in keys])
        namespace = keys[0][: m.NAMESPACE_BYTES]
        return self.find(m.Find(namespace, hashes, 1, 0, ranks, pool_only=True)).found

    def contains(self, keys: list[m.ChunkKey]) -> list[bool]:
        return self.present(keys).present

    def present(self, keys: list[m.ChunkKey]) -> m.Present:
        """Like `contains`, with the epoch in which to ask the offload tier for missing chunks."""
        replies = list(self._calls(map(m.Contains, _parts(keys)), m.Present))
        return msgspec.structs.replace(
            replies[0], present=[held for reply in replies for held in reply.present]
        )

    def pin(self, keys: list[m.ChunkKey], seconds: float) -> m.Pinned:
        """Where the leading chunks are in the pool, at most `MAX_KEYS`; see `Pin`."""
        return self._call(m.Pin(keys[: m.MAX_KEYS], min(seconds, m.MAX_PIN_SECONDS)), m.Pinned)

    def reserve(self, keys: list[m.ChunkKey], nbytes: int) -> m.Reserved:
        """Reserve a slot for each key, or a refusal: FULL after the first `MAX_SLOTS` slots."""
        reserved = self._call(m.Reserve(keys[: m.MAX_KEYS], nbytes), m.Reserved)
        rest = len(keys) - m.MAX_KEYS
        if rest <= 0:
            return reserved
        return msgspec.structs.replace(
            reserved, slots=reserved.slots + [int(m.Refusal.FULL)] * rest
        )

    def commit(self, reservation: int, prefix: list[m.ChunkKey] | None = None) -> int:
        """Publish a reservation, then make the last `MAX_KEYS` chunks of `prefix` more recent."""
        return self._call(m.Commit(reservation, (prefix or [])[-m.MAX_KEYS :]), m.Count).count

    def abort(self, reservation: int) -> int:
        return self._call(m.Abort(reservation), m.Count).count

    def remove(self, keys: list[m.ChunkKey]) -> int:
        return self._sum(map(m.Remove, _parts(keys)))

    def clear(self, namespace: bytes = b"", reset: bool = False) -> int:
        """Forget a namespace's chunks. Returns how many. reset: also void the offloaded chunks."""
        return self._call(m.Clear(namespace, reset), m.Count, self._config.control_seconds).count

    # ---- segments and the server

    def lend(self, nbytes: int) -> int:
        """Ask how many bytes to allocate now if the pool is to have `nbytes` on this device."""
        return self._call(m.Lend(nbytes), m.Count).count

    def add_segment(
        self, info: m.SegmentInfo, fd: int, table: int | None = None
    ) -> tuple[int, int]:
        """Register a segment by a copy of `fd`. table: a copy of the table's fd, if an earlier
        server had the segment. Returns how many chunks are back, and the fd of the table, which the
        caller closes."""
        request = m.AddSegment(info.id, info.device, info.medium, info.nbytes, table is not None)
        fds = [fd] if table is None else [fd, table]
        seconds = self._config.control_seconds
        added, got = self._open(request, m.Count, lambda added: 1, seconds, fds)
        return added.count, got[0]

    def open_segment(self, id_: m.SegmentId) -> tuple[m.SegmentInfo, int, int]:
        """Open a segment. Returns its fd and its table's fd, which the caller closes."""
        opened, fds = self._open(m.OpenSegment(id_), m.Opened, lambda opened: 2)
        return opened.segment, fds[0], fds[1]

    def drop_segment(self, id_: m.SegmentId) -> int:
        """Stop using a segment. Returns how many chunks it had."""
        return self._call(m.DropSegment(id_), m.Count, self._config.control_seconds).count

    def list_segments(self) -> list[m.SegmentInfo]:
        return self.heartbeat().segments

    def heartbeat(self) -> m.Segments:
        """Send the counts from `count`, `reads` and `unmappable`. Returns all segments, and news
        for the scheduler that joined on this connection."""
        with self._telling:
            counts = self._untold
            self._untold = Counter()
        most = {name: min(count, m.MAX_TOKENS) for name, count in counts.items()}
        try:
            request = m.ListSegments(**most, reads=self.reads(), unmappable=list(self.unmappable))
            return self._call(request, m.Segments)
        except VCacheError:
            self.count(**counts)
            raise

    def count(self, **counts: int) -> None:
        """Count look-ups, waits and loads for the server's statistics: see `ListSegments`. The next
        heartbeat sends the counts, to this server or the next. If the heartbeat's answer is late,
        the counts are sent twice."""
        with self._telling:
            # A fifth of the time of `update`.
            for name, count in counts.items():
                self._untold[name] += count

    def stats(self) -> m.ServerStats:
        return self._call(m.Stats(), m.ServerStats)

    def report(self, level: m.Level, text: str) -> bool:
        """Send one line to the node's operator, cut at `MAX_REPORT_CHARS`. False if this connection
        has sent the line before.

        A control call. Servers refuse an empty `text`."""
        request = m.Report(level, text[: m.MAX_REPORT_CHARS])
        return bool(self._call(request, m.Count, self._config.control_seconds).count)

    # ---- instances that share in place

    # The caller keeps the fds that it passes, and closes the fds that it gets.

    def join(self, request: m.Join, fd: int) -> None:
        """Register a generation table as its scheduler. Repeat after each reconnection."""
        self._in_parts = [table.kind for table in request.tables] == ["full"]
        self._call(request, m.Count, self._config.control_seconds, [fd])

    def show_cache(self, instance: bytes, rank: int, shape: m.CacheShape, fd: int) -> None:
        """Register a worker's KV cache. Repeat after each reconnection."""
        request = m.ShowCache(m.InstanceId(instance), rank, shape)
        self._call(request, m.Count, self._config.control_seconds, [fd])

    def publish(self, whole: m.Publish) -> int:
        """Publish blocks of one rank, in several requests if necessary. Returns how many count."""
        return self._sum(_publications(whole))

    def find(self, whole: m.Find) -> m.Found:
        """Find blocks and chunks; see `Find`. Sends several requests for many hashes, unless the
        instance has joined with several tables: then only the first `MAX_HASHES` count."""
        deadline = time.perf_counter() + self._config.request_seconds
        answer, size = m.Found(0, 0), m.HASH_BYTES
        most = _most_found(whole) * size
        while True:
            hashes = whole.hashes[answer.found * size :][:most]
            limit = max(0, whole.limit - answer.found)
            request = msgspec.structs.replace(whole, hashes=hashes, limit=min(limit, m.MAX_HASHES))
            more = self._call(request, m.Found, deadline - time.perf_counter())
            answer = _joined(answer, more, whole.each) if answer.found else more
            ends = more.found * size < len(hashes) and not more.cut
            if (
                ends
                or not self._in_parts
                or not more.found
                or answer.found * size == len(whole.hashes)
            ):
                return msgspec.structs.replace(answer, cut=False) if answer.cut else answer

    def send_find(self, request: m.Find, seconds: float) -> Sent[m.Found] | None:
        """Send a look-up within `seconds`, whose answer may be `cut`. None if the hashes exceed one
        request. Of an instance with several tables, see `find`."""
        most = _most_found(request) * m.HASH_BYTES
        if len(request.hashes) > most:
            if self._in_parts:
                return None
            leading, limit = request.hashes[:most], min(request.limit, m.MAX_HASHES)
            request = msgspec.structs.replace(request, hashes=leading, limit=limit)
        sent = Sent(self, request, m.Found)
        self._exchange(sent, seconds, drops=False, data=sockets.encode(request), reads=False)
        return sent

    def promise(self, request: m.Promise) -> m.Promised:
        """Promise the leading chunks, as many as fit into a request. See `Promise`."""
        leading = msgspec.structs.replace(request, keys=request.keys[: m.MAX_KEYS])
        return self._call(leading, m.Promised)

    def open_instance(self, instance: bytes) -> tuple[m.Joined, list[int]]:
        """Open an instance. Fds: its generation table, pidfds of the scheduler and each rank."""
        request = m.OpenInstance(m.InstanceId(instance))
        return self._open(request, m.Joined, lambda joined: 2 + joined.ranks)

    def open_cache(self, instance: bytes, rank: int) -> tuple[m.CacheShape, int]:
        """Open a worker's KV cache. Returns the description and the fd."""
        request = m.OpenCache(m.InstanceId(instance), rank)
        cache, (fd,) = self._open(request, m.Cache, lambda cache: 1)
        return cache.shape, fd

    # ---- inside

    def _calls(self, requests: Iterable[m.Request], kind: type[R]) -> Iterator[R]:
        """Make several calls within the deadline of one call."""
        deadline = time.perf_counter() + self._config.request_seconds
        for request in requests:
            yield self._call(request, kind, deadline - time.perf_counter())

    def _sum(self, requests: Iterable[m.Request]) -> int:
        return sum(reply.count for reply in self._calls(requests, m.Count))

    def _list(self) -> None:
        with suppress(VCacheError):
            self.on_segments(self.list_segments())


class Standing:
    """Tells the server a fact until `close`: at once, in the caller's thread; after every
    reconnection, and with every heartbeat while the server refuses it, in the client's thread.

    trouble: why the server does not know the fact now, or empty. Each new refusal is logged."""

    def __init__(self, client: Client, tell: Callable[[], object], refused: str) -> None:
        """tell: sends one or several requests. refused: the meaning of a refusal, for the log."""
        self._client, self._tell, self._refused = client, tell, refused
        self._lock = threading.Lock()
        self._closed = False
        self.trouble = ""
        client.on_return.append(self._now)
        client.on_beat.append(self._mend)
        self._now()

    def close(self) -> None:
        """Stop telling. The server forgets the fact when the connection closes. Idempotent."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._client.on_return.remove(self._now)
                self._client.on_beat.remove(self._mend)

    def _mend(self) -> None:
        if self.trouble:
            self._now()

    def _now(self) -> None:
        with self._lock:
            if self._closed:
                return
            try:
                self._tell()
                self.trouble = ""
            except VCacheError as error:
                if str(error) != self.trouble and not isinstance(error, ServerUnavailable):
                    log.warning("%s: %s", self._refused, error)
                self.trouble = str(error)


def _parts(keys: list[m.ChunkKey]) -> list[list[m.ChunkKey]]:
    """Split keys for requests. No keys make one request without keys."""
    starts = range(0, max(len(keys), 1), m.MAX_KEYS)
    return [keys[start : start + m.MAX_KEYS] for start in starts]


def _publications(whole: m.Publish) -> Iterator[m.Publish]:
    """Split a publication for requests. A long run is cut where it is cut on all ranks."""
    runs, count, most = list[m.BlockRun](), 0, m.MAX_PUBLISHED
    for run in whole.runs:
        for first in range(run.first, run.stop, most):
            part = run.cut(first, min(first + most, run.stop))
            if count + part.count > most:
                yield msgspec.structs.replace(whole, runs=runs)
                runs, count = [], 0
            runs.append(part)
            count += part.count
    if runs:
        yield msgspec.structs.replace(whole, runs=runs)


def _most_found(request: m.Find) -> int:
    """How many hashes of a look-up fit into one request: whole chunks."""
    return m.MAX_HASHES // request.each * request.each


def _joined(first: m.Found, then: m.Found, each: int) -> m.Found:
    """Join two answers. `then` is about the hashes after `first.found`, a multiple of `each`."""
    moved = [run.numbered(run.first + first.found) for run in then.residents]
    return msgspec.structs.replace(
        then,
        found=first.found + then.found,
        end=first.end + then.end,
        pooled=first.pooled + then.pooled,
        residents=first.residents + moved,
        copies=first.copies + then.copies,
    )
