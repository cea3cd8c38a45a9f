"""The monitor's HTTP server: metrics, health, statistics as JSON, and a page.

It reads HTTP with h11, a small package that vLLM's server needs anyway. One thread serves all
connections, and each gets one answer. When all places are taken, the oldest connection makes room
for the newest, so a client that sends nothing or reads nothing keeps no scraper out. Costly answers
are made at most once a second."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from importlib.resources import files
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import h11
from prometheus_client import CollectorRegistry, generate_latest

from vcache_backend.metadata_server import processes
from vcache_backend.monitor.samples import Samples
from vcache_backend.status import summary, trouble

log = logging.getLogger(__name__)

MAX_AT_ONCE = 256
BACKLOG = 64
"""Connections that are accepted at a time. Far fewer than `MAX_AT_ONCE`, so that a burst does not
push out a client that has just asked."""
ANSWER_SECONDS = 10.0
"""The most seconds that a connection may take, from its start to the last byte of its answer."""
PIECE_BYTES = 64 << 10
"""Answers are sent in such pieces, so that unread ones do not fill the memory."""
SAME_SECONDS = 1.0
"""For so long the same metrics and statistics are sent to all who ask."""
COMPLAINT_SECONDS = 60.0
"""How often to log that no descriptors are left."""
_METRICS = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format, which every scraper reads."""


class _Response(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes


class Web:
    """Listens from construction on; raises OSError if it cannot. Answers while `serve` runs, in its
    thread."""

    def __init__(
        self,
        host: str,
        port: int,
        samples: Samples,
        registry: CollectorRegistry,
        hosts: Sequence[str] = (),
    ) -> None:
        """hosts: further names by which clients may reach it."""
        self._samples, self._registry = samples, registry
        self._page = files("vcache_backend.monitor").joinpath("page.html").read_bytes()
        self._policy = _policy(self._page)
        self._names = {
            name.lower().removesuffix(".")
            for name in ("localhost", socket.gethostname(), host, *hosts)
        }
        self._made: dict[str, tuple[float, _Response]] = {}
        """By path, the last costly answer, and when it was made."""
        self._complains_from = 0.0
        self.served: dict[asyncio.Task[Any], None] = {}
        """The connections that wait for a request, or for their client to read, oldest first."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=":" in host
        )
        host, port = self._socket.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def is_named(self, host: str) -> bool:
        """Whether a `Host` header is one of our names, or an IP address. With other names a foreign
        page could read our answers (DNS rebinding)."""
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
            return name in self._names or ip_address(name) is not None
        except ValueError:
            return False

    async def serve(self) -> None:
        """Serve until cancelled. Connections that are open then end with the loop."""
        asyncio.get_running_loop().set_exception_handler(self._failed)
        server = await asyncio.start_server(self._serve_one, sock=self._socket, backlog=BACKLOG)
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            server.close()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log an error of the loop; a lack of descriptors, with which asyncio calls this 64 times a
        second, in one line a minute. asyncio then accepts again by itself."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and processes.is_exhausted(error)):
            loop.default_exception_handler(context)
        elif time.monotonic() > self._complains_from:
            self._complains_from = time.monotonic() + COMPLAINT_SECONDS
            log.warning("no client can connect for now (ulimit -n): %s", error)

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.served[task] = None
        if len(self.served) > MAX_AT_ONCE:
            oldest = next(iter(self.served))
            del self.served[oldest]
            oldest.cancel()
        try:
            # The client went away or was too slow, or makes room. An asyncio of 3.11 would log each
            # cancelled connection.
            with suppress(OSError, asyncio.CancelledError):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._converse(reader, writer)
        finally:
            self.served.pop(task, None)
            # what was written lies in the kernel by now, which still sends it
            writer.transport.abort()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        http, method = h11.Connection(h11.SERVER), b""
        try:
            while (asked := http.next_event()) is h11.NEED_DATA:
                http.receive_data(await reader.read(PIECE_BYTES))
            if not isinstance(asked, h11.Request):
                return
            method, answer = asked.method, self._answer(asked)
        except h11.RemoteProtocolError as error:
            answer = _said(HTTPStatus(error.error_status_hint), str(error))
        headers = [
            ("Content-Type", answer.kind),
            ("Content-Length", str(len(answer.body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Content-Security-Policy", self._policy),
            ("Connection", "close"),
        ]
        status = answer.status
        said = h11.Response(status_code=status, reason=status.phrase, headers=headers)
        whole = (http.send(said) or b"") + (b"" if method == b"HEAD" else answer.body)
        writer.transport.set_write_buffer_limits(0)  # `drain` then waits until the kernel has all
        for at in range(0, len(whole), PIECE_BYTES):
            writer.write(whole[at : at + PIECE_BYTES])
            await writer.drain()

    def _answer(self, request: h11.Request) -> _Response:
        host = dict(request.headers).get(b"host", b"").decode("latin-1")
        if request.method not in (b"GET", b"HEAD"):
            return _said(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are answered")
        if host and not self.is_named(host):
            add = "add it to server.metrics_hosts, or ask by its address"
            unknown = f"{host[:256]!r} is not a name of this server; {add}"
            return _said(HTTPStatus.MISDIRECTED_REQUEST, unknown)
        path = request.target.partition(b"?")[0].decode("latin-1")
        if path == "/":
            return _Response(HTTPStatus.OK, "text/html; charset=utf-8", self._page)
        if path in ("/metrics", "/stats.json"):
            return self._lately(path)
        if path in ("/healthz", "/readyz"):
            return self._health(path)
        return _said(HTTPStatus.NOT_FOUND, "here are /, /metrics, /stats.json, /healthz, /readyz")

    def _lately(self, path: str) -> _Response:
        """The answer of the last second, or a new one."""
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
            "troubles": [] if stats is None else list(map(trouble, stats.instances)),
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
    """The Content-Security-Policy: only the page's own script and style, by their hashes, and
    requests to this server."""
    allowed = []
    for name in (b"script", b"style"):
        (inside,) = re.findall(b"<" + name + b">(.*?)</" + name + b">", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        allowed.append(f"{name.decode()}-src 'sha256-{digest}'")
    others = "default-src 'none'; connect-src 'self'; img-src data:; frame-ancestors 'none'"
    return "; ".join([others, *allowed])
