"""The log of the server's processes, on stderr or in a file."""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from vcache_backend.errors import MAX_LINE_CHARS, printable

LOG_BYTES = 4 << 20


class _File(RotatingFileHandler):
    """A log of at most `LOG_BYTES`, with the earlier log as `.1`. It also holds all other output to
    stderr, such as tracebacks. OSError."""

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 2)
        return open(fd, "a", errors="replace")


def _stderr() -> logging.Handler:
    """Writes to stderr and never waits: lines that a terminal which is stopped (Ctrl-S), or a pipe
    without a reader, does not take are left out."""
    fd = 2
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        # Opened anew: other processes may share fd 2, and would not wait, either. Impossible for a
        # socket, such as that of systemd's journal, and for another user's pipe.
        with suppress(OSError):
            fd = os.open("/proc/self/fd/2", os.O_WRONLY)
    os.set_blocking(fd, False)
    return logging.StreamHandler(open(fd, "w", errors="replace", closefd=False))


def begin(path: Path | None = None) -> None:
    """Set up logging in this process, from INFO on. path: a log of bounded size; None: stderr."""
    form = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"
    handler = _File(path, maxBytes=LOG_BYTES, backupCount=1) if path is not None else _stderr()
    logging.raiseExceptions = False  # A line that cannot be written is no error.
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler])


class LineLimit(logging.Filter):
    """Drops lines beyond `LINES` at once, and then more than a line every `SECONDS`. Makes each
    message one printable line. Add it to the log's handler."""

    LINES, SECONDS = 300, 2.0

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._free_at, self._dropped = 0.0, 0
        """When `LINES` lines are allowed again, and the lines dropped since the last line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line. A written line says how many earlier lines were dropped."""
        now = self._now()
        free_at = max(self._free_at, now) + self.SECONDS
        if free_at > now + self.LINES * self.SECONDS:
            self._dropped += 1
            return False
        self._free_at = free_at
        record.msg, record.args = printable(record.getMessage(), MAX_LINE_CHARS), None
        if self._dropped:
            record.msg += f" (lines dropped before this one: {self._dropped:,})"
            self._dropped = 0
        return True
