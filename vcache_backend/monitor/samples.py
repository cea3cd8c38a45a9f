"""Asks the server for statistics every few seconds, and keeps an hour of samples."""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from vcache_backend.config import ClientConfig
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import ServerStats
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
    """Asks the server with every heartbeat of a client, until `close`. Any thread may call the
    methods.

    path: the server's socket. stats: the last answer; None before the first."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stats: ServerStats | None = None
        self.answered_at = time.monotonic()
        self._failed = ""
        self._points: deque[Point] = deque(maxlen=int(KEPT_SECONDS / EVERY_SECONDS))
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
        return time.monotonic() - self.answered_at

    @property
    def healthy(self) -> bool:
        """Whether the server has answered within the time of three questions."""
        return self.late_seconds < 3 * (EVERY_SECONDS + ANSWER_SECONDS)

    def points(self) -> list[Point]:
        """The points of the last hour, oldest first."""
        return list(self._points)

    def close(self) -> None:
        self._client.close()

    def _ask(self) -> None:
        try:
            stats = self._client.stats()
        except VCacheError as error:
            self._failed = str(error)
            return
        asked, found = tokens(stats)
        self._points.append(Point(time.monotonic(), stats.epoch, asked, found))
        self.stats = stats
        self._failed = ""
        self.answered_at = time.monotonic()
