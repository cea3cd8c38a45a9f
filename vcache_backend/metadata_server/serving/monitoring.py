"""Runs the process that serves the statistics over HTTP (`server.metrics`), as long as the server
runs."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading

from vcache_backend.config import ServerConfig

log = logging.getLogger(__name__)

AGAIN_SECONDS = 5.0


class MonitorProcess:
    """Restarts the process `AGAIN_SECONDS` after each end. The server runs on without it."""

    def __init__(self, config: ServerConfig) -> None:
        # `-P`: the current folder is nobody's package here.
        self._command = [sys.executable, "-P", "-m", "vcache_backend.monitor", "--until-eof"]
        self._command += [
            "--socket",
            str(config.path),
            "--listen",
            config.metrics,
        ]
        self._command += [
            f"--hosts={','.join(config.metrics_hosts)}",
        ]
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._run, name="vcache-monitor", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent."""
        self._closing.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                # The monitor ends when this pipe closes, which any end of this process causes.
                with self._lock:
                    if self._closing.is_set():
                        return
                    self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
                status = self._process.wait()
            except OSError as error:
                log.error("server.metrics: their process cannot be started: %s", error)
            else:
                assert self._process.stdin is not None
                self._process.stdin.close()
                if not self._closing.is_set():
                    log.error(
                        "server.metrics: their process ended with status %d and is started again",
                        status,
                    )
            self._closing.wait(AGAIN_SECONDS)
