"""The log of the server's processes, on stderr or in a file."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from io import TextIOWrapper
from logging.handlers import QueueHandler, RotatingFileHandler
from pathlib import Path
from queue import SimpleQueue

from vcache_backend import threads

LOG_BYTES = 4 << 20
MAX_WAITING = 1024
"""The most lines that wait to be written. Further lines are left out."""
LAST_SECONDS = 1.0
"""How long the end of the process waits for the last lines."""


class _File(RotatingFileHandler):
    """A log of at most `LOG_BYTES`, with the earlier log as `.1`. It also holds all other output to
    stderr, such as tracebacks. OSError."""

    def _open(self) -> TextIOWrapper:
        fd = os.open(self.baseFilename, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(fd, 2)
        return open(fd, "a", errors="replace")


class _Stderr(QueueHandler):
    """Writes to stderr in a separate thread: a terminal that is stopped (Ctrl-S), or a pipe without
    a reader, delays no thread that logs. Uses neither QueueListener nor another handler: the end of
    the process would wait forever for a thread, or for the lock of a handler, that writes
    forever."""

    def __init__(self) -> None:
        self._lines, self._left_out = SimpleQueue[logging.LogRecord | None](), 0
        self._thread = threads.start(self._turn, "vcache-log")
        super().__init__(self._lines)  # from here on the end of the process calls `close`

    def enqueue(self, record: logging.LogRecord) -> None:
        if self._lines.qsize() >= MAX_WAITING:
            self._left_out += 1
            return
        if self._left_out:
            record.msg += f" (lines left out before this one, as nobody read: {self._left_out:,})"
            self._left_out = 0
        self._lines.put(record)

    def close(self) -> None:
        self._lines.put(None)
        self._thread.join(LAST_SECONDS)
        super().close()

    def _turn(self) -> bool:
        record = self._lines.get()
        if record is None:
            return True
        line = f"{record.msg}\n".encode(errors="replace")
        with suppress(OSError):
            while line:
                line = line[os.write(2, line) :]
        return False


def begin(path: Path | None = None) -> None:
    """Set up logging in this process, from INFO on. path: a log of bounded size; None: stderr."""
    form = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"
    handler = _Stderr() if path is None else _File(path, maxBytes=LOG_BYTES, backupCount=1)
    logging.basicConfig(level=logging.INFO, format=form, handlers=[handler])
