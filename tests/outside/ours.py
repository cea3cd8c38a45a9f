"""What a suite of others needs when it runs against vcache: a server of its own, and a record
of who took part.

A pytest plugin, loaded by vllm_ours.py. It imports nothing of ours before the
suite does."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 30.0
FOLDER = Path(tempfile.mkdtemp(prefix="vcache-outside-"))
SOCKET = FOLDER / "vcache.sock"

_said: dict[str, list[Any]] = {}
_server: list[subprocess.Popen[bytes]] = []
_made = 0


def took_part() -> None:
    """Called where vcache stands in for a part of the suite's own: this test is about ours."""
    global _made
    _made += 1


def _die_with_parent() -> None:
    """Also if the suite is killed, being too slow."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def pytest_configure(config: pytest.Config) -> None:
    log = FOLDER / "server.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "vcache_backend.metadata_server", "--socket", str(SOCKET)]
        _server.append(
            subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=_die_with_parent
            )
        )
    deadline = time.monotonic() + SECONDS
    while not SOCKET.exists():
        if _server[0].poll() is not None or time.monotonic() > deadline:
            pytest.exit(f"no metadata server: {log.read_text()}", 3)
        time.sleep(0.02)


def pytest_unconfigure(config: pytest.Config) -> None:
    for server in _server:
        server.kill()
        server.wait()
    shutil.rmtree(FOLDER, ignore_errors=True)
    Path(os.environ["VCACHE_OUTSIDE_RESULTS"]).write_text(json.dumps(_said))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = _made
    _said[item.nodeid] = ["passed", False, ""]
    try:
        return (yield)
    finally:
        _said[item.nodeid][1] = _made > before


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        said = report.longreprtext.strip().splitlines() if report.outcome == "failed" else []
        _said[report.nodeid][0] = report.outcome
        _said[report.nodeid][2] = next(
            (line for line in reversed(said) if line.startswith("E  ")), ""
        )[:300]
