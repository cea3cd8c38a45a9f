"""The log of the server's processes, on stderr or in a file."""

from __future__ import annotations

import logging
import os
from logging.handlers import RotatingFileHandler
from pathlib import Path

LOG_BYTES = 4 << 20


class _RotatedLog(RotatingFileHandler):
    """A log of at most `LOG_BYTES`, and the one before it as `.1`. Whatever else goes to stderr,
    such as a traceback, stands in it, too."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, maxBytes=LOG_BYTES, backupCount=1)
        self._take_stderr()

    def doRollover(self) -> None:
        super().doRollover()
        self._take_stderr()

    def _take_stderr(self) -> None:
        if self.stream is not None:
            os.dup2(self.stream.fileno(), 2)


def begin(path: Path | None = None) -> None:
    """Set up logging in this process, from INFO on. path: a log of bounded size; None: stderr."""
    handlers = None if path is None else [_RotatedLog(path)]
    form = "%(asctime)s %(process)d %(levelname)-7s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, handlers=handlers)
