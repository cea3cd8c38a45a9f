"""The monitor's HTTP server: metrics, health, statistics as JSON, and a page. Each connection has a
thread and gets one answer."""

from __future__ import annotations

import json
import logging
import socket
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from importlib.resources import files
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest

from vcache_backend.monitor.samples import Samples
from vcache_backend.status import state, summary, trouble

log = logging.getLogger(__name__)

_METRICS = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format, which every scraper reads."""


class _Response(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes


class _Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Web
    timeout = 10.0
    """Seconds after which a connection ends if no byte can be read or sent."""

    def do_GET(self) -> None:
        answer = self.server.answer(self.path.partition("?")[0])
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        self.wfile.write(answer.body)

    def log_message(self, *_: object) -> None:
        """Log no requests."""


class Web(ThreadingTCPServer):
    """Listens from construction on, or raises OSError. Answers while `serve_forever` runs."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, host: str, port: int, samples: Samples, registry: CollectorRegistry) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self._samples, self._registry = samples, registry
        self._page = files("vcache_backend.monitor").joinpath("page.html").read_bytes()
        host, port = self.socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, but not a client's: clients may go away or be slow."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a request of %s failed", client_address)

    def answer(self, path: str) -> _Response:
        """The answer to a request for `path`. In any thread."""
        match path:
            case "/":
                return _Response(HTTPStatus.OK, "text/html; charset=utf-8", self._page)
            case "/metrics":
                return _Response(HTTPStatus.OK, _METRICS, generate_latest(self._registry))
            case "/stats.json":
                return _Response(HTTPStatus.OK, "application/json", self._stats())
            case "/healthz":
                return self._health(self._samples.healthy)
            case "/readyz":
                return self._health(not self._samples.problem)
        return _said(HTTPStatus.NOT_FOUND, "here are /, /metrics, /stats.json, /healthz, /readyz")

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

    def _health(self, good: bool) -> _Response:
        if good:
            return _said(HTTPStatus.OK, "ok")
        samples = self._samples
        late = f"the metadata server has not answered for {samples.late_seconds:.0f} s"
        return _said(HTTPStatus.SERVICE_UNAVAILABLE, samples.problem or late)


def _said(status: HTTPStatus, line: str) -> _Response:
    return _Response(status, "text/plain; charset=utf-8", f"{line}\n".encode())
