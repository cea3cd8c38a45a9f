"""Checks the metadata server: its socket, whether it answers, what it knows of the instances."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator

from vcache_backend.config import ClientConfig, Config, whole
from vcache_backend.doctor.finding import Finding, fail, ok, warn
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import folder_fault
from vcache_backend.metadata_server.messages import PROTOCOL_VERSION, Reported
from vcache_backend.status import verdict

SERVER_SECONDS = 1.0
REPORT_SECONDS = 3600.0
"""Older reports are no findings; `vcache status` still shows them."""


def check_socket(config: Config) -> Iterator[Finding]:
    """Check that the socket's folder exists, is a trusted user's, and is closed to others."""
    named, path = config.client.server_uid, whole(config.server.path)
    try:
        fault = folder_fault(path, {os.getuid(), 0} | ({named} if named is not None else set()))
        folder = path.parent.lstat()
    except FileNotFoundError:
        yield warn("socket", f"{path.parent} does not exist yet", "`vcache serve` makes it")
        return
    except OSError as error:
        advice = "set server.socket to a folder of this user"
        yield fail("socket", f"{path.parent}: {error}", advice)
        return
    mode = stat.S_IMODE(folder.st_mode)
    detail = f"{path} (folder of uid {folder.st_uid}, mode {mode:04o})"
    if fault:
        yield fail("socket", f"{detail}: {fault}", "see docs/operations.md")
    elif not os.access(path.parent, os.X_OK):
        advice = "ask its user to add your uid to server.allow_uids"
        yield fail("socket", f"{detail}: uid {os.getuid()} may not enter", advice)
    elif mode & 0o077 and not config.server.allow_uids:
        yield warn("socket", f"{detail}: other users can reach it", f"chmod 700 {path.parent}")
    else:
        yield ok("socket", detail)


def check_server(config: Config) -> Iterator[Finding]:
    """Check that the server answers and that instances share, and look for reports."""
    within = ClientConfig(
        connect_seconds=SERVER_SECONDS,
        request_seconds=SERVER_SECONDS,
        server_uid=config.client.server_uid,
    )
    with Client(config.server.path, within, reconnect=False) as client:
        if not client.connected:
            # An absent server may only have to be started: a warning. One that is there and does
            # not answer is a failure.
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
