"""The monitor's HTTP server: metrics, health, statistics as JSON, and a page. Each connection has a
thread and gets one answer. `python -m vcache_backend.monitor.web SOCKET HOST:PORT`.

The server starts this process if `server.metrics` is set. It ends with its standard input, and so
with the server."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, MetricsHandler

from vcache_backend import log_format
from vcache_backend.config import ClientConfig, split_address
from vcache_backend.errors import VCacheError
from vcache_backend.monitor.metrics import ServerMetrics
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ServerStats
from vcache_backend.status import edges, saved, state, summary, tokens, trouble

log = logging.getLogger("vcache_backend.monitor")

EVERY_SECONDS = 5.0
ANSWER_SECONDS = 2.0


class Point(NamedTuple):
    """A sample of the statistics. Counts are since the server's start.

    at: monotonic seconds. asked, found: prompt tokens that all instances looked up, and found."""

    at: float
    epoch: int
    asked: int
    found: int


class Samples:
    """Asks the server with every heartbeat of a client, until `close`, and keeps an hour of points.
    Any thread may call the methods.

    path: the server's socket. stats: the last answer; None before the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stats: ServerStats | None = None
        self.points = deque[Point](maxlen=int(3600 / EVERY_SECONDS))
        self._answered_at, self._failed = time.monotonic(), ""
        config = ClientConfig(request_seconds=ANSWER_SECONDS, heartbeat_seconds=EVERY_SECONDS)
        self._client = Client(path, config)
        self._client.on_return.append(self._ask)
        self._client.on_beat.append(self._ask)
        self._ask()

    @property
    def problem(self) -> str:
        """Why the last question failed, or none can be asked; empty if it did not."""
        return self._client.trouble or self._failed

    @property
    def late_seconds(self) -> float:
        """Seconds since the server's last answer; before the first, since construction."""
        return time.monotonic() - self._answered_at

    def latest(self) -> ServerStats | None:
        """The last answer; None if the last question failed."""
        return None if self.problem else self.stats

    def close(self) -> None:
        self._client.close()

    def _ask(self) -> None:
        try:
            self.stats = stats = self._client.stats()
        except VCacheError as error:
            self._failed = str(error)
            return
        self._failed, self._answered_at = "", time.monotonic()
        self.points.append(Point(self._answered_at, stats.epoch, *tokens(stats)))


class _Handler(MetricsHandler):
    """Answers one request."""

    server: Web
    timeout = 10.0
    """Seconds after which a connection ends if no byte can be read or sent."""

    def do_GET(self) -> None:
        path, samples = self.path.partition("?")[0], self.server.samples
        if path == "/metrics":
            self.registry = self.server.registry
            super().do_GET()
        elif path == "/":
            page = files("vcache_backend.monitor").joinpath("page.html").read_bytes()
            self._send(200, "text/html; charset=utf-8", page)
        elif path == "/stats.json":
            self._send(200, "application/json", json.dumps(_told(samples)).encode())
        elif path in ("/healthz", "/readyz"):
            # Healthy: the server has answered within the time of three questions.
            healthy = samples.late_seconds < 3 * (EVERY_SECONDS + ANSWER_SECONDS)
            late = f"the metadata server has not answered for {samples.late_seconds:.0f} s"
            good = healthy if path == "/healthz" else not samples.problem
            self._say(200 if good else 503, "ok" if good else samples.problem or late)
        else:
            self._say(404, "here are /, /metrics, /stats.json, /healthz, /readyz")

    def _say(self, status: int, line: str) -> None:
        self._send(status, "text/plain; charset=utf-8", f"{line}\n".encode())

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _told(samples: Samples) -> dict[str, Any]:
    """What the page shows."""
    stats = samples.stats
    return {
        "host": socket.gethostname(),
        "socket": str(samples.path),
        "problem": samples.problem,
        "late_seconds": samples.late_seconds,
        "stats": None if stats is None else summary(stats),
        "states": [(state(one), trouble(one)) for one in stats.instances] if stats else [],
        "saved": saved(stats) if stats else {},
        "edges": edges(stats)[:12] if stats else [],
        "points": list(samples.points),
    }


class Web(ThreadingTCPServer):
    """Listens at `listen`, HOST:PORT, from construction on. Answers while `serve_forever` runs.
    Raises OSError, and ValueError for the name of no host."""

    daemon_threads = allow_reuse_address = True

    def __init__(self, listen: str, samples: Samples) -> None:
        host, port = split_address(listen, "metrics")
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), _Handler)
        self.samples, self.registry = samples, CollectorRegistry()
        self.registry.register(ServerMetrics(samples.latest))
        host, port = self.socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error, but not a client's: clients may go away or be slow."""
        if not isinstance(sys.exc_info()[1], OSError):
            log.exception("a request of %s failed", client_address)


def main(path: str, listen: str) -> int:
    """Serve until standard input ends, or Ctrl-C. Returns the exit code: 1 if listening fails."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    log_format.begin()
    try:
        web = Web(listen, Samples(Path(path)))
    except (OSError, ValueError) as error:
        log.error("server.metrics: cannot listen at %s: %s", listen, error)
        return 1
    log.info("metrics and a page at http://%s", web.address)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    with suppress(KeyboardInterrupt):
        while os.read(0, 4096):
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
