"""The monitor's HTTP server: metrics, health, statistics as JSON, and a page."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from vcache_backend.monitor.samples import Samples
from vcache_backend.status import summary

MOST_AT_ONCE, MOST_OF_ONE = 64, 16
ANSWER_SECONDS = 10.0
"""The most connections served at a time, in all and from one address, and the seconds that each may take: so no client can keep the others
away."""


class Web(ThreadingHTTPServer):
    """Answers each connection in a thread of its own. Listens from construction on. Raises OSError if it cannot."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, samples: Samples, registry: CollectorRegistry, hosts: Sequence[str] = ()) -> None:
        """hosts: names by which it may be reached, besides `host`, `localhost` and the machine's own."""
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.samples, self.registry = samples, registry
        self.page = files("vcache_backend.monitor").joinpath("page.html").read_bytes()
        self.policy = _policy(self.page)
        self._names = {name.lower().removesuffix(".") for name in ("localhost", socket.gethostname(), host, *hosts)}
        self.held = Counter[str]()
        """By address, the connections that are being served."""
        self._holding = threading.Lock()
        super().__init__((host, port), _Handler)

    def is_named(self, host: str) -> bool:
        """Whether a `Host` header has one of our names, or an IP address. Other names are refused: a foreign page whose name resolves to us
        (DNS rebinding) could read our answers."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            return name in self._names or ip_address(name) is not None
        except ValueError:
            return False

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start a thread for a connection, or close it if there are too many. Called by `serve_forever`."""
        address = str(client_address[0])
        with self._holding:
            full = self.held.total() >= MOST_AT_ONCE or self.held[address] >= MOST_OF_ONE
            if not full:
                self.held[address] += 1
        if full:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started; the caller closes the connection
            self._release(address)
            raise

    def _release(self, address: str) -> None:
        with self._holding:
            self.held[address] -= 1
            self.held += Counter()  # drops addresses with no connection

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, for `ANSWER_SECONDS` at most, in its thread."""
        ends = threading.Timer(ANSWER_SECONDS, lambda: _cut(request))
        ends.daemon = True
        try:
            with suppress(RuntimeError):  # no thread could be started
                ends.start()
            super().process_request_thread(request, client_address)
        finally:
            ends.cancel()
            self._release(str(client_address[0]))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print nothing: clients may go away at any time."""


def _cut(request: socket.socket) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: Web
    server_version, sys_version = "vcache", ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        host = self.headers.get("Host", "")
        if host and not self.server.is_named(host):
            said = f"{host[:256]!r} is no name of this server's; add it to server.metrics_hosts, or ask by its address\n"
            return self._send(HTTPStatus.MISDIRECTED_REQUEST, "text/plain; charset=utf-8", said.encode())
        answer = {"/": self._page, "/metrics": self._metrics, "/stats.json": self._stats}.get(path)
        if answer is not None:
            answer()
        elif path in ("/healthz", "/readyz"):
            self._health(path)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"here are /, /metrics, /stats.json, /healthz and /readyz\n")

    do_HEAD = do_GET

    def _page(self) -> None:
        self._send(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page)

    def _metrics(self) -> None:
        encode, kind = choose_encoder(self.headers.get("Accept", ""))
        self._send(HTTPStatus.OK, kind, encode(self.server.registry))

    def _stats(self) -> None:
        samples = self.server.samples
        told = {
            "problem": samples.problem,
            "late_seconds": samples.late_seconds,
            "stats": summary(samples.stats) if samples.stats is not None else None,
            "points": [(point.at, point.epoch, point.asked, point.found) for point in samples.points()],
            "hit_rate_1m": samples.hit_rate(),
            "hits_1m": samples.hits(),
            "saved_1h": samples.saved(),
        }
        self._send(HTTPStatus.OK, "application/json", json.dumps(told).encode())

    def _health(self, path: str) -> None:
        """`/healthz` is for `Samples.healthy`, `/readyz` for whether the last question was answered."""
        samples = self.server.samples
        well = samples.healthy if path == "/healthz" else not samples.problem
        said = "ok" if well else samples.problem or f"the metadata server has not answered for {samples.late_seconds:.0f} s"
        self._send(HTTPStatus.OK if well else HTTPStatus.SERVICE_UNAVAILABLE, "text/plain; charset=utf-8", f"{said}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", self.server.policy)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log no requests."""


def _policy(page: bytes) -> str:
    """The Content-Security-Policy: only the page's own script and style, by their hashes, and requests to this server."""
    allowed = []
    for name in (b"script", b"style"):
        (inside,) = re.findall(b"<" + name + b">(.*?)</" + name + b">", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        allowed.append(f"{name.decode()}-src 'sha256-{digest}'")
    return "; ".join(["default-src 'none'", "connect-src 'self'", "img-src data:", *allowed, "frame-ancestors 'none'"])
