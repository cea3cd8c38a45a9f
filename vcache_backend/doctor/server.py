"""Checks the metadata server: the server's answers, and its instances."""

from __future__ import annotations

import time
from collections.abc import Iterator

from vcache_backend.config import ClientConfig, Config, whole
from vcache_backend.doctor.finding import Finding, fail, ok, warn
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import PROTOCOL_VERSION, Reported
from vcache_backend.status import verdict

SERVER_SECONDS = 1.0
REPORT_SECONDS = 3600.0
"""Older reports are no findings; `vcache status` still shows them."""


def check_server(config: Config) -> Iterator[Finding]:
    """Check that the server answers and that instances share, and look for reports."""
    within = ClientConfig(
        connect_seconds=SERVER_SECONDS,
        request_seconds=SERVER_SECONDS,
        server_uid=config.client.server_uid,
    )
    with Client(config.server.path, within, reconnect=False) as client:
        if not client.connected:
            # An absent server may only have to be started: a warning. A server that does not answer
            # is a failure.
            absent = client.trouble.startswith("no metadata server at")
            detail, _, advice = client.trouble.rpartition("; ")
            if not detail:
                detail = client.trouble
                advice = "see its log; `kill -CONT` it, or restart it with this version"
            yield (warn if absent else fail)("server", detail, advice)
            return
        try:
            stats = client.stats()
        except VCacheError as error:
            detail = f"it accepts connections, but did not answer `stats`: {error}"
            yield fail("server", detail, "see its log")
            return
    detail = f"answers, protocol {PROTOCOL_VERSION}, epoch {stats.epoch}"
    yield ok("server", f"{whole(config.server.path)} {detail}")
    good, said = verdict(stats)
    if not good:
        yield warn("sharing", said, "see `vcache status`")
    since = time.time() - REPORT_SECONDS
    recent = [report for report in stats.reports if report.time >= since]
    yield from (_reported(report) for report in reversed(recent) if report.level != "info")


def _reported(report: Reported) -> Finding:
    check = f"report of pid {report.pid}" if report.pid else "report"
    detail = f"{time.strftime('%H:%M:%S', time.localtime(report.time))}, {report.text}"
    advice = "correct that and restart the instance, unless that was done since; its log says more"
    return (fail if report.level == "error" else warn)(check, detail, advice)
