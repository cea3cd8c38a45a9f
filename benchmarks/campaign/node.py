"""The metadata server of a campaign: a real process, started on one socket again and again."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec

from ..processes import Program, until

START_SECONDS = 20.0
_LAUNCHER = """
import sys, time
clock, offset = time.time_ns, int(sys.argv.pop(1))
time.time_ns = lambda: clock() + offset
time.time = lambda: time.time_ns() / 1e9
from vcache_backend.cli import main
sys.argv.insert(1, "serve")
main()
"""
"""A program that runs the server's `main` with a wall clock that is so many ns ahead."""
TIMES: dict[str, Any] = {
    "lease_seconds": 0.6,
    "reservation_seconds": 0.5,
    "recover_seconds": 2.0,
    "spin_seconds": 0.0,
}
"""Short, so that processes that are stopped for a second or two exceed them."""


class Node:
    """A folder with a socket, and the server on it. One thread."""

    def __init__(self, folder: Path, log: Path) -> None:
        """folder: that of the socket. log: the server's."""
        self.path = folder / "vcache.sock"
        self._log, self._config = log, log.with_suffix(".yaml")
        self._config.write_bytes(msgspec.yaml.encode({"server": TIMES}))
        self._server: Program | None = None
        self.clock = 0
        """By how many ns the next server's wall clock is ahead."""
        self.ended = 0
        """How many servers ended by themselves."""

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def restart(self) -> None:
        """End the server if there is one, and start a new one. ChildFailed if it does not answer
        within START_SECONDS, or ends.
        """
        self.kill()
        options = ["--socket", str(self.path), "--config", str(self._config)]
        command = [sys.executable, "-c", _LAUNCHER, str(self.clock), *options]
        server = Program("metadata server", command, self._log)
        server.until(lambda: _answers(self.path), START_SECONDS)
        self._server = server

    def kill(self) -> None:
        """SIGKILL, reaped. Idempotent."""
        if self._server is not None:
            self._server.kill()
            self._server = None

    def terminate(self) -> None:
        """SIGTERM, then SIGKILL if the server does not end."""
        if (server := self._server) is not None:
            server.signal(signal.SIGTERM)
            until(lambda: not server.alive, START_SECONDS)
        self.kill()

    def look(self) -> None:
        """If the server has ended by itself, count that, and start another one."""
        if self._server is not None and not self._server.alive:
            self.ended += 1
            print(f"the metadata server ended; {self._server.tail()}", file=sys.stderr, flush=True)
            self.restart()


def _answers(path: Path) -> bool:
    """Whether somebody listens on the socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.settimeout(0.2)
        return not probe.connect_ex(str(path))
