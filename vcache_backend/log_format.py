"""The log of the server's processes, on stderr: lines of text, or JSON for log collectors."""

from __future__ import annotations

import json
import logging
import os
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal

LOG_BYTES = 4 << 20
LogFormat = Literal["text", "json"]


class _JsonLine(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, pid, message, and a traceback as
    `error`.
    """

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        return json.dumps(
            said | ({"error": self.formatException(record.exc_info)} if record.exc_info else {})
        )


class _RotatedLog(RotatingFileHandler):
    """A log of at most `LOG_BYTES`, and the one before it as `.1`. Whatever else goes to stderr,
    such as a traceback, stands in it, too.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=1)
        self._take_stderr()

    def doRollover(self) -> None:
        super().doRollover()
        self._take_stderr()

    def _take_stderr(self) -> None:
        if self.stream is not None:
            os.dup2(self.stream.fileno(), 2)


def begin(kind: LogFormat, path: Path | None = None) -> None:
    """Set up logging in this process, from INFO on. path: of a log of bounded size; None:
    stderr.
    """
    handlers = None if path is None else [_RotatedLog(path)]
    form = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers)
    if kind == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(_JsonLine())
