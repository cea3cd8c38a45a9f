"""Runs the process that serves the statistics over HTTP (`server.metrics`) beside the server."""

from __future__ import annotations

import logging
import subprocess
import sys
import time

from vcache_backend.backoff import Backoff
from vcache_backend.config import ServerConfig

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0
LONGEST_SECONDS = 320.0


class MonitorProcess:
    """Restarts a process that has ended, `AGAIN_SECONDS` after the last start. These pauses double
    up to `LONGEST_SECONDS`: it may be unable to listen, for example at a port in use."""

    def __init__(self, config: ServerConfig) -> None:
        # `-P`: the current folder is nobody's package here.
        self._command = [sys.executable, "-P", "-m", "vcache_backend.monitor"]
        self._command += [str(config.path), config.metrics]
        self._process: subprocess.Popen[bytes] | None = None
        self._pauses, self._again_at = Backoff(AGAIN_SECONDS, LONGEST_SECONDS), 0.0

    def tick(self) -> None:
        """Start the process if it does not run. Called in every tick of the server."""
        if time.monotonic() < self._again_at:
            return
        status = None if self._process is None else self._process.poll()
        if self._process is not None and status is None:
            return
        pause = self._pauses.next()
        if self._process is not None:
            said = (
                "server.metrics: its process ended with %d; it is started again now, and after %g s"
            )
            log.error(said, status, pause)
            self.close()
        self._again_at = time.monotonic() + pause
        try:
            # The monitor ends when this pipe closes, and so when this process ends in any way.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        except OSError as error:
            log.error("server.metrics: the process cannot be started: %s", error)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
