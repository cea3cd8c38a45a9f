"""How the server's processes write their log, to stderr: lines for people, or JSON for what collects logs."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Literal

LogFormat = Literal["text", "json"]


class _JsonLine(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, pid, message, and the traceback as error where there is one."""

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
    """Log from INFO on, in this process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s")
    if kind == "json":
        for handler in logging.getLogger().handlers:
            handler.setFormatter(_JsonLine())
