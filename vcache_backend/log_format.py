"""The log of the server's processes, on stderr: lines of text, or JSON for log collectors."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


class _JsonLine(logging.Formatter):
    """One JSON object a line: time (RFC 3339, UTC), level, logger, pid, message, and a traceback as `error`."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
        }
        return json.dumps(said | ({"error": self.formatException(record.exc_info)} if record.exc_info else {}))


def begin(kind: LogFormat) -> None:
    """Set up logging in this process, from INFO on."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s")
    if kind == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(_JsonLine())
