"""The other end of the socket: typed calls with deadlines, a circuit breaker, and reconnection in the background."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

import msgspec

from vcache_backend.config import ClientConfig
from vcache_backend.errors import ProtocolError, Refused, ServerTimeout, ServerUnavailable, VCacheError
from vcache_backend.histogram import Histogram
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.link import Link, Unwelcome

log = logging.getLogger(__name__)

R = TypeVar("R", bound=m.Reply)
T = TypeVar("T")


class Sent(Generic[R]):
    """A request on its way, from `Client.send_lookup` or `send_acquire`. Its answer is read by `answer`, or before the next call's.

    An answer that nobody fetches is read with the next call's and forgotten: of a lease, fetch it, or it is held until it ends.
    """

    def __init__(self, client: Client, request: m.Request, kind: type[R]) -> None:
        self.request, self.kind, self._client = request, kind, client
        self.reply: m.AnyReply | None = None
        self.lost = ""

    @property
    def over(self) -> bool:
        """Whether the answer is here, or never comes."""
        return self.reply is not None or bool(self.lost)

    def answer(self) -> R:
        """The answer, waited for as long as for that of a call; raises as a call does."""
        self._client._collect(self)
        if isinstance(self.reply, self.kind):
            return self.reply
        if isinstance(self.reply, m.Error):
            raise Refused(self.reply.message)
        raise ServerUnavailable(self.lost)


class Client:
    """A connection to the metadata server that comes back by itself.

    Any thread may call any method; requests go one after the other. Every call answers or raises within its deadline
    (`client.request_seconds`; control calls: `client.control_seconds`): ServerTimeout when it passed, ServerUnavailable at once
    while there is no connection (the breaker is open), Refused when the server said no. After a failure a background thread
    connects again and offers again the segments in `offer`. Reservations do not survive a lost connection, leases do so for their
    grace only. Not to be used in a forked child: calls there raise ServerUnavailable.
    """

    def __init__(
        self,
        path: Path,
        config: ClientConfig,
        device: str = "host",
        medium: m.Medium = "host",
        layout: dict[str, str] | None = None,
        reconnect: bool = True,
    ) -> None:
        """Try to connect once, within `connect_seconds`; an absent server is no error here (`require` makes it one)."""
        self.latency: dict[str, Histogram] = {}
        self.on_segments: Callable[[list[m.SegmentInfo]], None] = lambda segments: None
        self._path, self._config = path, config
        token = secrets.randbits(m.TOKEN_BITS)
        self._hello = m.Hello(m.PROTOCOL_VERSION, device, medium, _shortened(layout or {}), token)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._unread: deque[Sent[Any]] = deque()
        self._offers: dict[m.SegmentId, tuple[m.SegmentInfo, int]] = {}
        self._avoided: set[m.SegmentId] = set()
        self._witness: int | None = None
        self._down = f"never connected to {path}"
        self._complained = ""
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.epoch = 0
        self.connections_lost = 0
        self._try_connect()
        self._keeper: threading.Thread | None = None
        if reconnect:
            self._keeper = threading.Thread(target=self._keep, name="vcache-client", daemon=True)
            self._keeper.start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the background thread; calls under way end as ServerUnavailable. Idempotent."""
        self._stop.set()
        self._wake.set()
        link, forked = self._link, os.getpid() != self._pid
        if link is not None and not forked:
            link.interrupt()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(self._config.connect_seconds + self._config.control_seconds)
        # In a forked child the lock may be held by a thread that is not there.
        if forked or self._lock.acquire(timeout=self._config.control_seconds):
            if self._link is not None:
                self._drop(self._link, "the client was closed")
            self._keep_witness([])
            if not forked:
                self._lock.release()

    @property
    def connected(self) -> bool:
        """Is the breaker closed?"""
        return self._link is not None and os.getpid() == self._pid

    @property
    def trouble(self) -> str:
        """Why there is no connection, and what to do about it; empty while there is one."""
        return "" if self.connected else self._down

    def require(self) -> None:
        """ServerUnavailable, with the reason, unless connected."""
        if not self.connected:
            raise ServerUnavailable(self._down)

    # ---- chunks

    def lookup(self, keys: list[m.ChunkKey], ranks: int = 1) -> int:
        """How many leading chunks all ranks have. More than `MAX_LOOKED_UP` keys times ranks are asked for in several requests."""
        most = max(1, min(m.MAX_KEYS, m.MAX_LOOKED_UP // ranks))
        found = 0
        for reply in self._in_parts(keys, lambda part: m.Lookup(part, ranks), m.Count, most):
            found += reply.count
            if reply.count < most:
                break
        return found

    def contains(self, keys: list[m.ChunkKey]) -> list[bool]:
        return self.present(keys).present

    def present(self, keys: list[m.ChunkKey]) -> m.Present:
        """`contains`, with the epoch in which to look below for those that are not there."""
        replies = list(self._in_parts(keys, m.Contains, m.Present))
        return msgspec.structs.replace(replies[0], present=[there for reply in replies for there in reply.present])

    def acquire(self, keys: list[m.ChunkKey]) -> m.Leased:
        """Lease the leading run, of at most `MAX_KEYS` chunks."""
        return self._call(m.Acquire(keys[: m.MAX_KEYS]), m.Leased)

    def send_lookup(self, keys: list[m.ChunkKey], ranks: int = 1) -> Sent[m.Count] | None:
        """`lookup` without waiting for the answer; None if one request cannot ask for so many."""
        most = min(m.MAX_KEYS, m.MAX_LOOKED_UP // ranks)
        return self._send(m.Lookup(keys, ranks), m.Count) if len(keys) <= most else None

    def send_acquire(self, keys: list[m.ChunkKey]) -> Sent[m.Leased]:
        """`acquire` without waiting for the answer."""
        return self._send(m.Acquire(keys[: m.MAX_KEYS]), m.Leased)

    def renew(self, lease: int) -> bool:
        return self._call(m.Renew(lease), m.Verdict).held

    def release(self, lease: int) -> bool:
        return self._call(m.Release(lease), m.Verdict).held

    def reserve(self, keys: list[m.ChunkKey], nbytes: int) -> m.Reserved:
        """A slot or a refusal for each key; FULL for those behind the first `MAX_SLOTS` that get one."""
        reserved = self._call(m.Reserve(keys[: m.MAX_KEYS], nbytes), m.Reserved)
        rest = len(keys) - m.MAX_KEYS
        if rest <= 0:
            return reserved
        return msgspec.structs.replace(reserved, slots=reserved.slots + [int(m.Refusal.FULL)] * rest)

    def commit(self, reservation: int, prefix: list[m.ChunkKey] | None = None) -> int:
        """Publish a reservation; only the last `MAX_KEYS` of `prefix` become as recent."""
        return self._call(m.Commit(reservation, (prefix or [])[-m.MAX_KEYS :]), m.Count).count

    def abort(self, reservation: int) -> int:
        return self._call(m.Abort(reservation), m.Count).count

    def touch(self, keys: list[m.ChunkKey]) -> int:
        return sum(reply.count for reply in self._in_parts(keys, m.Touch, m.Count, last_first=True))

    def remove(self, keys: list[m.ChunkKey], force: bool = True) -> int:
        return sum(reply.count for reply in self._in_parts(keys, lambda part: m.Remove(part, force), m.Count))

    def clear(self, namespace: bytes = b"", reset: bool = False) -> int:
        """Forget chunks of a namespace; how many. reset: nor is anything found again that was offloaded of it."""
        return self._call(m.Clear(namespace, reset), m.Count, self._config.control_seconds).count

    # ---- segments and the server

    def lend(self, nbytes: int) -> m.Lendable:
        """What of `nbytes` that the pool shall have on this client's device is to be made here and now."""
        return self._call(m.Lend(nbytes), m.Lendable)

    def add_segment(self, info: m.SegmentInfo, fd: int, claim: int = 0) -> None:
        """Register a new segment, made under `claim` if any, with a copy of `fd`."""
        self._add_segment(m.AddSegment(info.id, info.device, info.medium, info.nbytes, claim), fd)

    def _add_segment(self, request: m.AddSegment, fd: int) -> m.Added:
        return self._call(request, m.Added, self._config.control_seconds, fd)

    def offer(self, info: m.SegmentInfo, fd: int, claim: int = 0) -> None:
        """`add_segment` now, and again after every reconnection until `withdraw`, or until a server does not take its memory again.
        `fd` stays the caller's and open till then. If this raises, nothing is offered again, though the server may have it."""
        self.remember(info, fd)
        try:
            self.add_segment(info, fd, claim)
        except BaseException:
            self.withdraw(info.id)
            raise

    def remember(self, info: m.SegmentInfo, fd: int) -> None:
        """`offer` from the next reconnection on: for segments the server has now."""
        self._offers[info.id] = (info, fd)

    def withdraw(self, id_: m.SegmentId) -> None:
        """Do not offer this segment again."""
        self._offers.pop(id_, None)

    def open_segment(self, id_: m.SegmentId) -> tuple[m.SegmentInfo, int]:
        """A segment and its fd, the caller's to close."""
        fds: list[int] = []
        try:
            info = self._call(m.OpenSegment(id_), m.Opened, received=fds).segment
            if len(fds) != 1:
                raise ProtocolError(f"open_segment {id_}: {len(fds)} fds came along; exactly 1 was due")
        except VCacheError:
            wire.close_fds(fds)
            raise
        return info, fds[0]

    def avoid(self, id_: m.SegmentId) -> None:
        """This process cannot map the segment: no slot there, also after a reconnection."""
        self._avoided.add(id_)
        self._call(m.Unusable(id_), m.Count)

    def drop_segment(self, id_: m.SegmentId) -> m.Dropped:
        return self._call(m.DropSegment(id_), m.Dropped, self._config.control_seconds)

    def list_segments(self) -> list[m.SegmentInfo]:
        return self._call(m.ListSegments(), m.Segments).segments

    def stats(self) -> m.ServerStats:
        return self._call(m.Stats(), m.ServerStats)

    def report(self, level: m.Level, text: str) -> bool:
        """Tell whoever looks after the node one line (cut at `MAX_REPORT_CHARS`); False if this connection said it before.

        A control call. Refused by a server too old to know it, and if `text` is empty.
        """
        request = m.Report(level, text[: m.MAX_REPORT_CHARS])
        return bool(self._call(request, m.Count, self._config.control_seconds).count)

    # ---- one request

    def _in_parts(
        self,
        keys: list[m.ChunkKey],
        request: Callable[[list[m.ChunkKey]], m.Request],
        kind: type[R],
        most: int = m.MAX_KEYS,
        last_first: bool = False,
    ) -> Iterator[R]:
        """The replies to as many requests of at most `most` keys as it takes, nearly always one; all by one deadline."""
        deadline = time.perf_counter() + self._config.request_seconds
        starts = range(0, max(len(keys), 1), most)
        for start in reversed(starts) if last_first else starts:
            seconds = deadline - time.perf_counter() if len(starts) > 1 else self._config.request_seconds
            yield self._call(request(keys[start : start + most]), kind, seconds)

    def _call(
        self,
        request: m.Request,
        kind: type[R],
        seconds: float | None = None,
        fd: int | None = None,
        received: list[int] | None = None,
    ) -> R:
        started = time.perf_counter()
        deadline = started + (self._config.request_seconds if seconds is None else seconds)
        self.require()
        data = wire.frame(request)
        if not self._lock.acquire(timeout=max(0.0, deadline - started)):
            raise ServerTimeout(self._late(request, deadline - started, "waiting for other calls"))
        try:
            return self._exchange(request, kind, data, started, deadline, fd, received)
        finally:
            self._lock.release()

    def _send(self, request: m.Request, kind: type[R]) -> Sent[R]:
        """Ask now; the answer is read later."""
        deadline = time.perf_counter() + self._config.request_seconds
        self.require()
        data, sent = wire.frame(request), Sent(self, request, kind)
        if not self._lock.acquire(timeout=self._config.request_seconds):
            raise ServerTimeout(self._late(request, self._config.request_seconds, "waiting for other calls"))
        try:
            self._use(request, self._config.request_seconds, lambda link: link.send(data, deadline))
            self._unread.append(sent)
        finally:
            self._lock.release()
        return sent

    def _collect(self, sent: Sent[Any]) -> None:
        """See that the answer is there, if it ever comes."""
        if sent.over:
            return
        seconds = self._config.request_seconds
        deadline = time.perf_counter() + seconds
        if not self._lock.acquire(timeout=seconds):
            raise ServerTimeout(self._late(sent.request, seconds, "waiting for other calls"))
        try:
            if not sent.over:
                self._use(sent.request, seconds, lambda link: self._read_unread(link, deadline, sent))
        finally:
            self._lock.release()

    def _read_unread(self, link: Link, deadline: float, last: Sent[Any] | None = None) -> None:
        """Read the answers to what was sent before, up to that to `last`. Under the lock."""
        while self._unread and (last is None or not last.over):
            sent, reply = self._unread[0], link.read(deadline)
            if not isinstance(reply, sent.kind | m.Error):
                raise ProtocolError(f"{type(sent.request).__name__} was answered with {type(reply).__name__}")
            self._unread.popleft().reply = reply

    def _exchange(
        self,
        request: m.Request,
        kind: type[R],
        data: bytes,
        started: float,
        deadline: float,
        fd: int | None,
        received: list[int] | None,
    ) -> R:
        """Ask on the present connection, which ends if the answer is late or wrong. Under the lock."""

        def exchange(link: Link) -> m.AnyReply:
            if self._unread:
                if fd is not None:
                    # With the answer to one request the server closes what came along with the next one.
                    self._read_unread(link, deadline)
                link.send(data, deadline, () if fd is None else [fd])
                self._read_unread(link, deadline)
                return link.read(deadline, received)
            return link.exchange(data, deadline, () if fd is None else [fd], received)

        reply = self._use(request, deadline - started, exchange)
        self._note(request, started)
        if isinstance(reply, m.Error):
            if reply.fatal:
                self._drop(self._link, f"the metadata server at {self._path} closed the connection: {reply.message}")
            raise Refused(reply.message)
        if not isinstance(reply, kind):
            self._drop(self._link, f"the metadata server answered {type(request).__name__} with {type(reply).__name__}")
            raise ServerUnavailable(self._down)
        return reply

    def _use(self, request: m.Request, seconds: float, work: Callable[[Link], T]) -> T:
        """Do this with the present connection, which ends if it fails: `request` had that many seconds. Under the lock."""
        link = self._link
        if link is None:
            raise ServerUnavailable(self._down)
        try:
            return work(link)
        except TimeoutError as error:
            self._drop(link, self._late(request, seconds, "no answer"))
            raise ServerTimeout(self._down) from error
        except (OSError, ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._drop(link, f"connection to the metadata server at {self._path} lost: {error}")
            raise ServerUnavailable(self._down) from error
        except BaseException:
            # A signal handler raised: the answer is still to come, and must not be taken for the next call's.
            self._drop(link, f"a call to the metadata server at {self._path} was interrupted")
            raise

    def _note(self, request: m.Request, started: float) -> None:
        """Remember how long the call took, waiting included. Under the lock."""
        name = type(request).__name__
        if name not in self.latency:
            self.latency[name] = Histogram()
        self.latency[name].add((time.perf_counter() - started) * 1e6)

    def _late(self, request: m.Request, seconds: float, why: str) -> str:
        keys = getattr(request, "keys", None)
        what = type(request).__name__ + (f"({len(keys)} keys)" if keys is not None else "")
        return f"metadata server at {self._path} did not answer {what} in {seconds:g} s ({why})"

    # ---- connection

    def _try_connect(self) -> bool:
        """Connect and say hello, within `connect_seconds`. Nobody sees the new connection before the server's welcome."""
        deadline = time.perf_counter() + self._config.connect_seconds
        link = Link(self._config.spin_seconds, self._config.server_uid)
        received: list[int] = []
        try:
            welcome = link.open(self._path, self._hello, deadline, self._witness, received)
        except (OSError, ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            link.close()
            wire.close_fds(received)
            self._down = self._no_connection(error)
            return False
        self._keep_witness(received)
        self._link = link
        self._greet(welcome)
        return True

    def _keep_witness(self, fds: list[int]) -> None:
        """Of the server that has just welcomed this client, in place of its predecessor's."""
        wire.close_fds(([] if self._witness is None else [self._witness]) + fds[1:])
        self._witness = fds[0] if fds else None

    def _no_connection(self, error: Exception) -> str:
        """Why there is none, and what to do about it: not more than is known."""
        match error:
            case FileNotFoundError() | ConnectionRefusedError() | NotADirectoryError():
                return f"no metadata server at {self._path}: {error}; start one with `vcache serve`"
            case TimeoutError() | BlockingIOError():
                seconds = self._config.connect_seconds
                return (
                    f"the metadata server at {self._path} did not answer in {seconds:g} s: it is stopped, or has too much to do"
                )
            case Unwelcome() | PermissionError():
                return f"no connection to the metadata server at {self._path}: {error}"
            case _:
                return f"no connection to the metadata server at {self._path}: {error}; its log may say why"

    def _greet(self, welcome: m.Welcome) -> None:
        for line in welcome.mismatches:
            log.warning("vcache: %s", line)
        restarted, self.epoch = self.epoch not in (0, welcome.epoch), welcome.epoch
        for info, fd in list(self._offers.values()):
            try:
                added = self._add_segment(m.AddSegment(info.id, info.device, info.medium, info.nbytes, again=True), fd)
            except VCacheError as error:
                log.warning("segment %s could not be offered again: %s", info.id, error)
                continue
            if added.taken:
                log.info("segment %s offered again: %d chunks are back", info.id, added.chunks)
            else:
                self.withdraw(info.id)
                log.warning("segment %s is not taken again: the server does not know what lies in it", info.id)
        for id_ in list(self._avoided):
            with suppress(VCacheError):
                self.avoid(id_)
        if restarted or self._complained:
            log.info("connected to the metadata server at %s", self._path)
        self._complained = ""

    def _drop(self, link: Link | None, reason: str) -> None:
        """Open the breaker: close the socket, remember why, wake the background thread. Under the lock, so that nobody uses it."""
        if link is None:
            return
        link.close()
        if self._link is link:
            self._link, self._down = None, reason
            while self._unread:
                self._unread.popleft().lost = reason
            self.connections_lost += 1
            self._wake.set()

    def _keep(self) -> None:
        """The background thread: heartbeats while connected, reconnection with growing pauses while not."""
        pause = self._config.retry_seconds
        while not self._stop.is_set():
            if self._link is not None:
                pause = self._config.retry_seconds
                self._wake.wait(self._config.heartbeat_seconds)
                self._wake.clear()
                self._heartbeat()
                continue
            self._complain()
            self._stop.wait(pause)
            pause = min(2 * pause, self._config.retry_max_seconds)
            if not self._stop.is_set():
                self._try_connect()

    def _heartbeat(self) -> None:
        if self._link is None or self._stop.is_set():
            return
        try:
            infos = self.list_segments()
            self._avoided.intersection_update({info.id for info in infos})
            self.on_segments(infos)
        except VCacheError as error:
            log.debug("heartbeat: %s", error)

    def _complain(self) -> None:
        """One line when the server is lost, not one a second."""
        if not self._complained and not self._stop.is_set():
            self._complained = self._down
            log.warning("%s; KV is computed, not shared, until it is back", self._down)


def _shortened(layout: dict[str, str]) -> dict[str, str]:
    """What the protocol has room for: a longer value keeps its start and gets a digest, so that different ones stay different."""
    first = sorted(layout, key=lambda name: (name not in ("namespace", "model"), name))[: m.MAX_FIELDS]
    return {name[: m.MAX_FIELD_CHARS]: _short(layout[name]) for name in first}


def _short(value: str) -> str:
    if len(value) <= m.MAX_VALUE_CHARS:
        return value
    digest = hashlib.blake2b(value.encode(errors="surrogatepass"), digest_size=8).hexdigest()
    return f"{value[: m.MAX_VALUE_CHARS - len(digest) - 4]}... {digest}"
