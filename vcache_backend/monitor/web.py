"""The monitor's HTTP server: metrics, health, statistics as JSON, and a page.

Each connection has a thread and gets one answer. When all places are taken, the oldest connection
makes room for the newest, so a client that sends or reads nothing keeps no scraper out. Costly
answers are made at most once a second."""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import re
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from ipaddress import ip_address
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, generate_latest

from vcache_backend.monitor.samples import Samples
from vcache_backend.status import state, summary, trouble

log = logging.getLogger(__name__)

MAX_AT_ONCE = 256
BACKLOG = 64
"""The most connections that wait to be accepted."""
ANSWER_SECONDS = 10.0
"""The most seconds between two bytes of a request, and for a whole answer."""
SAME_SECONDS = 1.0
"""How long all clients get the same metrics and statistics."""
EXHAUSTED_SECONDS = 0.5
"""How long to accept no connection when no descriptors or threads are left."""
QUIET_SECONDS = 60.0
"""How long the log has no second line about this."""
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format, which every scraper reads."""


class _Response(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Web
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        answer = self.server.answer(self.path, self.headers.get("Host", ""))
        self.send_response(answer.status)
        for name, value in (
            ("Content-Type", answer.kind),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", self.server.policy),
            ("Connection", "close"),
        ):
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Log no requests."""


class Web(ThreadingTCPServer):
    """Listens from construction on, or raises OSError. Answers while `serve_forever` runs."""

    daemon_threads = allow_reuse_address = True
    request_queue_size = BACKLOG

    def __init__(
        self,
        host: str,
        port: int,
        samples: Samples,
        registry: CollectorRegistry,
        hosts: Sequence[str] = (),
    ) -> None:
        """hosts: further host names that clients may use."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self._samples, self._registry = samples, registry
        self._page = files("vcache_backend.monitor").joinpath("page.html").read_bytes()
        self.policy = _policy(self._page)
        self._names = {
            name.lower().removesuffix(".")
            for name in ("localhost", socket.gethostname(), host, *hosts)
        }
        self._making = threading.Lock()
        self._quiet_until = 0.0
        self._made: dict[str, tuple[float, _Response]] = {}
        """By path, the last costly answer, and its time."""
        self.served: dict[socket.socket, None] = {}
        """The connections that have a thread, oldest first."""
        host, port = self.socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    # ---- connections, as socketserver calls these methods

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            if not isinstance(error, ConnectionError):  # else the client has gone away
                self._relieve("ulimit -n", error)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(ANSWER_SECONDS)
        self.served[request] = None
        self._end_oldest(MAX_AT_ONCE)
        try:
            super().process_request(request, client_address)
        except RuntimeError as error:  # no thread can be started
            self.shutdown_request(request)
            self._relieve("ulimit -u, pids of a container", error)

    def _relieve(self, limit: str, error: Exception) -> None:
        """A connection failed for lack of descriptors or threads: log that now and then, end the
        oldest connection, and pause, so that this is no busy loop."""
        now = time.monotonic()
        if now > self._quiet_until:
            self._quiet_until = now + QUIET_SECONDS
            log.warning("no client can connect for now (%s): %s", limit, error)
        self._end_oldest(len(self.served) - 1)
        time.sleep(EXHAUSTED_SECONDS)

    def _end_oldest(self, most: int) -> None:
        """Hang up on the oldest connections if more than `most` have a thread."""
        served = list(self.served)
        for oldest in served[: max(0, len(served) - most)]:
            self.served.pop(oldest, None)
            with suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        self.served.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, but not a client's: clients may go away, be slow, or make room."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a request of %s failed", client_address)

    # ---- answers

    def is_named(self, host: str) -> bool:
        """Whether a `Host` header is one of our names, or an IP address. With other names a foreign
        page could read our answers (DNS rebinding)."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            return name in self._names or ip_address(name) is not None
        except ValueError:
            return False

    def answer(self, target: str, host: str) -> _Response:
        """The answer to a request for `target` with this `Host` header."""
        if host and not self.is_named(host):
            add = "add it to server.metrics_hosts, or ask by its address"
            unknown = f"{host[:256]!r} is not a name of this server; {add}"
            return _said(HTTPStatus.MISDIRECTED_REQUEST, unknown)
        path = target.partition("?")[0]
        if path == "/":
            return _Response(HTTPStatus.OK, "text/html; charset=utf-8", self._page)
        if path in ("/metrics", "/stats.json"):
            return self._lately(path)
        if path in ("/healthz", "/readyz"):
            return self._health(path)
        return _said(HTTPStatus.NOT_FOUND, "here are /, /metrics, /stats.json, /healthz, /readyz")

    def _lately(self, path: str) -> _Response:
        """The answer of the last second, or a new answer."""
        with self._making:
            at, answer = self._made.get(path, (0.0, None))
            if answer is None or time.monotonic() - at > SAME_SECONDS:
                if path == "/metrics":
                    answer = _Response(HTTPStatus.OK, _METRICS, generate_latest(self._registry))
                else:
                    answer = _Response(HTTPStatus.OK, "application/json", self._stats())
                self._made[path] = time.monotonic(), answer
            return answer

    def _stats(self) -> bytes:
        samples, stats = self._samples, self._samples.stats
        told = {
            "host": socket.gethostname(),
            "socket": str(samples.path),
            "problem": samples.problem,
            "late_seconds": samples.late_seconds,
            "stats": None if stats is None else summary(stats),
            "states": [(state(one), trouble(one)) for one in stats.instances] if stats else [],
            "points": samples.points(),
        }
        return json.dumps(told).encode()

    def _health(self, path: str) -> _Response:
        """`/healthz`: `Samples.healthy`. `/readyz`: the server answered the last question."""
        samples = self._samples
        if samples.healthy if path == "/healthz" else not samples.problem:
            return _said(HTTPStatus.OK, "ok")
        late = f"the metadata server has not answered for {samples.late_seconds:.0f} s"
        return _said(HTTPStatus.SERVICE_UNAVAILABLE, samples.problem or late)


def _said(status: HTTPStatus, line: str) -> _Response:
    return _Response(status, "text/plain; charset=utf-8", f"{line}\n".encode())


def _policy(page: bytes) -> str:
    """The Content-Security-Policy: only the page's own script and style, by hash, and requests to
    this server."""
    allowed = []
    for name in (b"script", b"style"):
        (inside,) = re.findall(b"<" + name + b">(.*?)</" + name + b">", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        allowed.append(f"{name.decode()}-src 'sha256-{digest}'")
    others = "default-src 'none'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
    return "; ".join([others, *allowed])
