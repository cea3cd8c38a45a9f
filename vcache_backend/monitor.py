"""The process that `server.metrics` starts: the metadata server's statistics as Prometheus metrics,
health, JSON, and a page. `python -m vcache_backend.monitor SOCKET HOST:PORT`.

It is an ordinary client that asks the server every few seconds, so HTTP requests take no time from
the server's loop. Each connection has a thread and gets one answer. The process ends with its
standard input, and so with the server."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any, NamedTuple, get_args

from prometheus_client import CollectorRegistry, MetricsHandler
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vcache_backend import log_format
from vcache_backend.config import ClientConfig, split_address
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import Level, ServerStats
from vcache_backend.status import SILENT_SECONDS, edges, saved, state, summary, tokens, trouble

log = logging.getLogger("vcache_backend.monitor")

EVERY_SECONDS = 5.0
ANSWER_SECONDS = 2.0


class Point(NamedTuple):
    """A sample of the statistics. Counts are since the server's start.

    at: monotonic seconds. asked, found: prompt tokens that all instances looked up, and found."""

    at: float
    run_id: int
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
        self.points.append(Point(self._answered_at, stats.run_id, *tokens(stats)))


# ---- metrics

_GAUGES = {
    "uptime_seconds": "Time since the start of the server.",
    "clients": "Processes that are connected: vLLM's scheduler and each worker, and tools.",
    "chunks": "Chunks in the pool.",
    "reservations": "Requests to write into the pool that are under way.",
    "rss_bytes": "Resident memory of the server, without the pool's.",
}
"""By the field of `ServerStats`."""
_COUNTERS = {
    "lookup_chunks": "Chunks that look-ups asked for.",
    "lookup_hits": "Chunks that look-ups found, in the pool or in another instance's KV cache.",
    "resident_hits": "Chunks that look-ups found in another instance's KV cache.",
    "loaded_tokens": "Tokens that instances loaded and did not compute.",
    "pin_chunks": "Chunks of the pool that loads asked for.",
    "pin_hits": "Chunks of the pool that loads found.",
}
"""The server's counters, which start at 0, so that a scraper sees the first increase."""
Row = tuple[Sequence[str], float]


class ServerMetrics(Collector):
    """The metrics of `latest()`, a server's statistics; None: the server does not answer."""

    def __init__(self, latest: Callable[[], ServerStats | None]) -> None:
        self._latest = latest
        self._models: dict[str, str] = {}
        """The model of each namespace with hits. The entry stays when the last instance goes: a
        changed label would begin another series."""

    def collect(self) -> Iterator[Metric]:
        """All metrics; only `vcache_server_up` if the server did not answer the last question."""
        stats = self._latest()
        what = "1 if the server answered the last question, asked every few seconds."
        yield _gauge("server_up", what, [((), stats is not None)])
        if stats is None:
            return
        self._models = {
            name: stats.namespaces.get(name) or self._models.get(name, "") for name in stats.hits
        }
        yield from _server(stats)
        yield _requests(stats)
        yield from _hits(stats, self._models)
        yield from _segments(stats)
        yield from _instances(stats)
        yield from _reads(stats)


def _server(stats: ServerStats) -> Iterator[Metric]:
    for name, what in _GAUGES.items():
        yield _gauge(f"server_{name}", what, [((), getattr(stats, name))])
    what = "Slots that are out of use until their writer ends or answers."
    yield _gauge("server_quarantined_slots", what, [((), sum(stats.quarantined_slots.values()))])
    what = "Fields in which connected instances of one model differ, so that they do not share."
    yield _gauge("server_not_shared", what, [((), len(stats.mismatches))])
    since = time.time() - 600
    levels = Counter(report.level for report in stats.reports if report.time >= since)
    what = "What clients reported in the last 10 minutes, of the newest reports."
    rows = [((level,), levels[level]) for level in get_args(Level)]
    yield _gauge("server_reports_10m", what, rows, "level")
    for name, what in _COUNTERS.items():
        yield _counter(f"server_{name}", what, [((), stats.counters.get(name, 0))])


def _requests(stats: ServerStats) -> Metric:
    """A summary with quantiles, for which prometheus_client has no family."""
    what = "Time of requests inside the server; quantiles since its start."
    made = Metric("vcache_server_request_seconds", what, "summary")
    for name, latency in stats.latency.items():
        for quantile, us in (("0.5", latency.p50_us), ("0.99", latency.p99_us)):
            made.add_sample(made.name, {"request": name, "quantile": quantile}, us / 1e6)
        made.add_sample(f"{made.name}_count", {"request": name}, latency.count)
        made.add_sample(f"{made.name}_sum", {"request": name}, latency.total_us / 1e6)
    return made


def _hits(stats: ServerStats, models: dict[str, str]) -> Iterator[Metric]:
    for at, (name, did) in enumerate((("asked", "asked for"), ("found", "asked for and found"))):
        rows = [((space, models[space]), counts[at]) for space, counts in stats.hits.items()]
        what = f"Prompt tokens that instances {did}."
        yield _counter(f"namespace_{name}_tokens", what, rows, "namespace model")


def _segments(stats: ServerStats) -> Iterator[Metric]:
    def rows(value: Callable[[Any], float]) -> list[Row]:
        return [((one.id, one.device, one.medium), value(one)) for one in stats.segments]

    labels = "segment device medium"
    sizes = rows(lambda one: one.nbytes)
    yield _gauge("segment_bytes", "Size of a segment.", sizes, labels)
    used = rows(lambda one: one.used)
    yield _gauge("segment_used_bytes", "Bytes of a segment that hold chunks.", used, labels)
    evictions = rows(lambda one: one.evictions)
    what = "Chunks of a segment that made room for others."
    yield _counter("segment_evictions", what, evictions, labels)


def _instances(stats: ServerStats) -> Iterator[Metric]:
    def rows(value: Callable[[Any], float], pooled: bool = False) -> list[Row]:
        those = [one for one in stats.instances if one.id or pooled]
        return [((one.id, one.device, str(one.pid)), value(one)) for one in those]

    labels = "instance_id device pid"
    stopped = rows(lambda one: bool(one.stopped) or one.silent > SILENT_SECONDS, True)
    what = "1 if a process of an instance is stopped, or nothing was heard of it for 10 s."
    yield _gauge("instance_stopped", what, stopped, labels)
    what = "Blocks that others find in an instance's KV cache."
    yield _gauge("instance_resident_blocks", what, rows(lambda one: one.resident), labels)
    what = "0 if an instance that gets requests lacks a part, so that others cannot read its KV."
    shared = rows(lambda one: one.early or not one.missing)
    yield _gauge("instance_shared", what, shared, labels)
    what = "1, with the version of an instance's vLLM: listed, proved here on a day, or unproved."
    known = [((str(one.pid), one.vllm), 1.0) for one in stats.instances if one.vllm]
    yield _gauge("instance_vllm", what, known, "pid vllm")


def _reads(stats: ServerStats) -> Iterator[Metric]:
    rows = [((str(one.pid), one.device, one.instance), one) for one in stats.reads]
    labels, what = (
        "pid device instance_id",
        "Bytes that a process read out of an instance's KV cache, or the pool.",
    )
    yield _counter("read_bytes", what, [(key, one.nbytes) for key, one in rows], labels)
    what = "Chunks that their owner used again while a process read them."
    yield _counter("read_refused_chunks", what, [(key, one.refused) for key, one in rows], labels)


def _gauge(name: str, what: str, rows: Iterable[Row], labels: str = "") -> Metric:
    return _filled(GaugeMetricFamily(f"vcache_{name}", what, labels=labels.split()), rows)


def _counter(name: str, what: str, rows: Iterable[Row], labels: str = "") -> Metric:
    return _filled(CounterMetricFamily(f"vcache_{name}", what, labels=labels.split()), rows)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, rows: Iterable[Row]) -> Metric:
    """Fill a metric. Rows with equal labels are added up: processes without a visible pid cannot be
    told apart."""
    totals = defaultdict[Sequence[str], float](float)
    for values, value in rows:
        totals[values] += value
    for values, total in totals.items():
        family.add_metric(values, total)
    return family


# ---- HTTP


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
            page = files("vcache_backend").joinpath("page.html").read_bytes()
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
