"""Asks the server for statistics every few seconds, and keeps an hour of samples."""

from __future__ import annotations

import threading
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from vcache_backend.config import ClientConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import ServerStats
from vcache_backend.status import tokens

EVERY_SECONDS = 5.0
KEPT_SECONDS = 3600.0
ANSWER_SECONDS = 2.0


class Point(NamedTuple):
    """A sample of the statistics. Counts are since the server's start.

    at: monotonic seconds. asked, found: prompt tokens that all instances looked up, and found."""

    at: float
    epoch: int
    asked: int
    found: int


class Samples:
    """Asks the server in a background thread until `close`. Any thread may call the methods.

    path: the server's socket. stats: the last answer; None before the first. problem: why the last
    question failed; empty after an answer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stats: ServerStats | None = None
        self.problem = "the server was not asked yet"
        self.answered_at = time.monotonic()
        self._points: deque[Point] = deque(maxlen=int(KEPT_SECONDS / EVERY_SECONDS))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="vcache-samples", daemon=True)
        self._thread.start()

    @property
    def late_seconds(self) -> float:
        """Seconds since the server's last answer; before the first, since construction."""
        return time.monotonic() - self.answered_at

    @property
    def healthy(self) -> bool:
        """Whether the server has answered within the time of three questions."""
        return self.late_seconds < 3 * (EVERY_SECONDS + ANSWER_SECONDS)

    def points(self) -> list[Point]:
        """The points of the last hour, oldest first."""
        return list(self._points)

    def close(self) -> None:
        self._over.set()
        self._thread.join(EVERY_SECONDS + 2 * ANSWER_SECONDS)

    def _run(self) -> None:
        with Client(self.path, ClientConfig(request_seconds=ANSWER_SECONDS)) as client:
            while True:
                self._ask(client)
                if self._over.wait(EVERY_SECONDS):
                    return

    def _ask(self, client: Client) -> None:
        try:
            stats = client.stats()
        except VCacheError as error:
            self.problem = str(error)
            return
        asked, found = tokens(stats)
        self._points.append(Point(time.monotonic(), stats.epoch, asked, found))
        self.stats = stats
        self.problem = ""
        self.answered_at = time.monotonic()
