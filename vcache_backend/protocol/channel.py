"""A connection that reconnects by itself: deadlines, a breaker, a background thread."""

from __future__ import annotations

import errno
import logging
import math
import os
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec

from vcache_backend import threads
from vcache_backend.backoff import Backoff
from vcache_backend.config import ClientConfig, default_socket
from vcache_backend.errors import (
    ProtocolError,
    Refused,
    ServerTimeout,
    ServerUnavailable,
    VCacheError,
)
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import sockets
from vcache_backend.protocol.sockets import ServerLink

log = logging.getLogger(__name__)


R = TypeVar("R", bound=m.Reply)


class Sent(Generic[R]):
    """A request whose answer will be read by `answer` or by the next call on the channel.

    The next call reads the answer into this object. received: gets the answer's fds, unless
    None."""

    def __init__(self, channel: Channel, request: m.Request, kind: type[R]) -> None:
        self.request, self.kind, self._channel = request, kind, channel
        self.received: list[int] | None = None
        self.reply: m.Reply | None = None
        self.lost = ""
        self.over = False
        """The answer has arrived, or will never arrive."""
        self.at = time.perf_counter()

    def arrives(self, seconds: float) -> bool:
        """Wait for the answer for `seconds`. A late answer does not end the connection."""
        if not self.over:
            try:
                self._channel._exchange(self, seconds, drops=False)
            except ServerUnavailable:  # `suppress` takes a scheduler 13 us more
                return self.over
        return True

    def answer(self, seconds: float | None = None) -> R:
        """Wait for the answer for `seconds`; None: for the time of a call."""
        if not self.over:
            try:
                self._channel._exchange(self, seconds)
            except ServerUnavailable:
                if self.reply is None:
                    raise
        if isinstance(self.reply, self.kind):
            return self.reply
        if isinstance(self.reply, m.Error):
            raise Refused(self.reply.message)
        raise ServerUnavailable(self.lost or self._channel.trouble)


class Channel:
    """The current connection to the server. Any thread may call any method; requests take turns."""

    KILLED_SECONDS = 3.0
    """How long a killed server must stay away before this client starts another."""

    def __init__(self, path: Path, config: ClientConfig, hello: m.Hello, reconnect: bool) -> None:
        """Try to connect once. An absent server raises nothing; call `require` for an error."""
        self._path, self._config, self._hello = path, config, hello
        self.request_seconds = config.request_seconds
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._link: ServerLink | None = None
        self._unread: deque[Sent[Any]] = deque()
        self._down = f"never connected to {path}"
        self._complained, self._late_at = False, -math.inf
        self.on_killed: Callable[[], None] = lambda: None
        """Called in the background thread to start another server, after a killed server has stayed
        away. A server that was stopped removed its socket, and is not replaced."""
        self.on_return: list[Callable[[], None]] = []
        """Called after each reconnection, to register the client's state again. Runs in the
        background thread; hooks may make calls. Their errors are logged."""
        self.on_beat: list[Callable[[], None]] = []
        """Called every `heartbeat_seconds`, like `on_return`."""
        self.on_reply: Callable[[m.Reply], None] = lambda reply: None
        """Called with each answer, in any thread; must neither raise nor make calls."""
        self._killed_at = math.inf
        """Since when a killed server has been away; infinite if no server was killed."""
        self._start_after = 0.0
        self._wake = threading.Event()
        self._stop = threading.Event()
        self.run_id = 0
        self.connections_lost = 0
        self._try_connect()
        self._keeper: threading.Thread | None = None
        if reconnect:
            self._pauses = Backoff(config.retry_seconds, 20 * config.retry_seconds)
            self._keeper = threads.start(self._keep, "vcache-client")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection and end the thread. Calls end as ServerUnavailable. Idempotent."""
        self._stop.set()
        self._wake.set()
        link, forked = self._link, os.getpid() != self._pid
        if link is not None and not forked:
            link.interrupt()
        if self._keeper is not None and self._keeper is not threading.current_thread():
            self._keeper.join(self._config.connect_seconds + self._config.control_seconds)
        # In a forked child, a thread of the parent may hold the lock for ever.
        if forked or self._lock.acquire(timeout=self._config.control_seconds):
            if self._link is not None:
                self._drop(self._link, "the client was closed")
            if not forked:
                self._lock.release()

    @property
    def connected(self) -> bool:
        return self._link is not None and os.getpid() == self._pid

    @property
    def trouble(self) -> str:
        """Why the client is not connected, and what to do about it; empty while connected."""
        return "" if self.connected else self._down

    def require(self) -> None:
        """Raise ServerUnavailable, with the reason, unless the client is connected."""
        if not self.connected:
            raise ServerUnavailable(self._down)

    # ---- one request

    def _call(
        self,
        request: m.Request,
        kind: type[R],
        seconds: float | None = None,
        fds: Sequence[int] = (),
    ) -> R:
        """Send a request with `fds`, and wait for the answer."""
        sent = Sent(self, request, kind)
        self._exchange(sent, seconds, data=sockets.encode(request), fds=fds)
        return sent.answer()

    def _open(
        self,
        request: m.Request,
        kind: type[R],
        due: Callable[[R], int],
        seconds: float | None = None,
        sends: Sequence[int] = (),
    ) -> tuple[R, list[int]]:
        """Send a request, with the fds `sends`, whose answer brings fds, which the caller closes.
        due: the number of fds that a reply should bring. ProtocolError if the number is wrong."""
        sent, fds = Sent(self, request, kind), list[int]()
        sent.received = fds
        try:
            self._exchange(sent, seconds, data=sockets.encode(request), fds=sends)
            reply = sent.answer()
            if len(fds) != due(reply):
                raise ProtocolError(
                    f"{len(fds)} fds came along, {due(reply)} were due; if fewer came, this "
                    "process has reached its limit of descriptors (ulimit -n)"
                )
        except VCacheError:
            sockets.close_fds(fds)
            raise
        return reply, fds

    def _read_unread(self, link: ServerLink, deadline: float, last: Sent[Any]) -> None:
        """Read answers to earlier requests, up to the answer to `last`. Called under the lock."""
        while not last.over:
            sent = self._unread[0]
            reply = link.read(deadline, sent.received)
            if not isinstance(reply, (sent.kind, m.Error)):
                raise ProtocolError(
                    f"{type(sent.request).__name__} was answered with {type(reply).__name__}"
                )
            sent.reply, sent.over = reply, True
            self._unread.popleft()
            self.on_reply(reply)
            if isinstance(reply, m.Error) and reply.fatal:
                self._drop(link, f"server at {self._path} closed the connection: {reply.message}")

    def _exchange(
        self,
        sent: Sent[Any],
        seconds: float | None,
        drops: bool = True,
        data: bytes = b"",
        fds: Sequence[int] = (),
        reads: bool = True,
    ) -> None:
        """Send `data` with `fds`, unless empty, and read answers up to the answer to `sent`
        (`reads`): under the lock, by a deadline. A failure drops the connection; with `drops`,
        lateness does, too."""
        seconds = self.request_seconds if seconds is None else seconds
        deadline = time.perf_counter() + seconds
        if self._link is None or os.getpid() != self._pid:
            raise ServerUnavailable(self._down)
        if not self._lock.acquire(timeout=max(0.0, seconds)):
            others = f"for other calls to the metadata server at {self._path}"
            raise ServerTimeout(f"{_named(sent.request)} waited {seconds:.3g} s {others}")
        try:
            link = self._link
            if link is None:
                raise ServerUnavailable(self._down)
            try:
                if data:
                    while not link.send(data, fds):
                        if not self._unread:
                            raise TimeoutError
                        self._read_unread(link, deadline, self._unread[0])
                    self._unread.append(sent)
                if reads:
                    self._read_unread(link, deadline, sent)
            except (OSError, ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._failure(link, sent, error, drops) from error
            except BaseException:
                # A signal handler raised: the answer will still come, and must not be taken for the
                # next call's answer.
                self._drop(link, f"a call to the metadata server at {self._path} was interrupted")
                raise
        finally:
            self._lock.release()

    def _failure(
        self, link: ServerLink, sent: Sent[Any], error: Exception, drops: bool
    ) -> VCacheError:
        """What a call raises after this error, which may drop the connection. See `_exchange`."""
        if not isinstance(error, TimeoutError):
            self._drop(link, f"connection to the metadata server at {self._path} lost: {error}")
            return ServerUnavailable(self._down)
        call = f"{_named(sent.request)} in {time.perf_counter() - sent.at:.2g} s"
        late = f"metadata server at {self._path} did not answer {call}"
        if drops:
            self._drop(link, late)
            if time.monotonic() >= self._late_at + 60:
                self._late_at = time.monotonic()
                log.warning("vcache: %s", late)
        return ServerTimeout(late)

    # ---- connection

    def _try_connect(self) -> bool:
        """Connect and say hello. Other threads see the connection only after the welcome."""
        deadline = time.perf_counter() + self._config.connect_seconds
        link: ServerLink | None = None
        try:
            link = ServerLink(self._config.server_uid)
            welcome = link.open(self._path, self._hello, deadline)
        except (OSError, ProtocolError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if link is not None:
                link.close()
            self._down = self._no_connection(error)
            killed = isinstance(error, ConnectionRefusedError) and self._path.is_socket()
            self._killed_at = min(self._killed_at, time.monotonic()) if killed else math.inf
            return False
        self._killed_at, self._link = math.inf, link
        self._greet(welcome)
        return True

    def _no_connection(self, error: Exception) -> str:
        """Why the client is not connected, and what to do about it, as far as known."""
        at = self._path
        match error:
            case ConnectionRefusedError() if not self._path.is_socket():
                return f"{at} is not a socket; set server.socket to that of a metadata server"
            case FileNotFoundError() | ConnectionRefusedError() | NotADirectoryError():
                where = "" if at == default_socket() else f" --socket {shlex.quote(str(at))}"
                why = f"{error.strerror}; start one with `vcache serve{where}`"
                return f"no metadata server at {at}: {why}"
            case TimeoutError() | BlockingIOError():
                why = f"did not answer in {self._config.connect_seconds:g} s"
                whom = f" {pid}`" if (pid := sockets.listener(at)) else "` it"
                why += f": it is stopped or overloaded; `kill -CONT{whom}, or see its log"
                return f"the metadata server at {at} {why}"
            case msgspec.DecodeError() | UnicodeDecodeError() | OSError(errno=errno.EPROTOTYPE):
                why = f"is not a metadata server of this version ({error})"
                return f"what listens at {at} {why}; set server.socket to that of a metadata server"
            case PermissionError():
                why = f"{error.strerror}; its user lets others in by server.allow_uids"
            case OSError(errno=errno.ELOOP):
                why = f"{error.strerror}; look at that path, and at server.socket"
            case _:
                why = str(error)
        return f"no connection to the metadata server at {at}: {why}"

    def _greet(self, welcome: m.Welcome) -> None:
        for line in welcome.mismatches:
            log.warning("vcache: %s", line)
        restarted = self.run_id not in (0, welcome.run_id)
        self.run_id = welcome.run_id
        _call_all(self.on_return, "after a reconnection")
        if restarted or self._complained:
            log.warning("vcache: connected to the metadata server at %s again", self._path)
        self._complained = False

    def _drop(self, link: ServerLink, reason: str) -> None:
        """Open the breaker: close the socket, keep the reason, wake the thread. Under the lock."""
        link.close()
        if self._link is link:
            self._link = None
            self._down = reason
            while self._unread:
                sent = self._unread.popleft()
                sent.lost, sent.over = reason, True
            self.connections_lost += 1
            self._wake.set()

    def _keep(self) -> bool:
        """A turn of the thread: a heartbeat while connected, otherwise an attempt after a pause
        that grows. Returns whether the thread is to end."""
        if self._link is not None:
            self._pauses.reset()
            self._wake.wait(self._config.heartbeat_seconds)
            self._wake.clear()
            if self.connected and not self._stop.is_set():
                _call_all(self.on_beat, "heartbeat")
            return self._stop.is_set()
        if self._stop.wait(self._pauses.next()):
            return True
        if self._try_connect():
            self._wake.set()
            return False
        if not self._complained:
            self._complained = True
            log.warning("vcache: %s; KV is computed, not shared, until it is back", self._down)
        if time.monotonic() >= max(self._killed_at + self.KILLED_SECONDS, self._start_after):
            self._killed_at = math.inf
            self._start_after = time.monotonic() + 60  # in case the servers do not last
            self.on_killed()
        return False


def _named(request: m.Request) -> str:
    keys = getattr(request, "keys", None)
    return type(request).__name__ + (f"({len(keys)} keys)" if keys is not None else "")


def _call_all(hooks: list[Callable[[], None]], when: str) -> None:
    for hook in list(hooks):
        with threads.survives(when):
            try:
                hook()
            except VCacheError as error:
                log.warning("%s: %s", when, error)
