"""Limits the lines of the server's log, most of which clients cause."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from vcache_backend.errors import MAX_LINE_CHARS, printable

LINES, SECONDS = 300, 2.0


class LineLimit(logging.Filter):
    """Drops lines beyond `LINES` at once, and then more than a line every `SECONDS`. Makes each
    message one printable line. Add it to the log's handler."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._free_at, self._dropped = 0.0, 0
        """When `LINES` lines are allowed again, and the lines dropped since the last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line. A written line says how many earlier lines were dropped."""
        now = self._now()
        free_at = max(self._free_at, now) + SECONDS
        if free_at > now + LINES * SECONDS:
            self._dropped += 1
            return False
        self._free_at = free_at
        record.msg, record.args = printable(record.getMessage(), MAX_LINE_CHARS), None
        if self._dropped:
            record.msg += f" (lines dropped before this one: {self._dropped:,})"
            self._dropped = 0
        return True
