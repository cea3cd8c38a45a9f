"""Limits the log lines that clients cause, and makes each a single printable line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

from vcache_backend.errors import MAX_LINE_CHARS, printable

MAX_CALLERS = 1024
"""The most clients whose lines are counted separately."""


class Caller(NamedTuple):
    """A connected process, or all of a user's processes that are not visible here (`pid` 0)."""

    uid: int
    pid: int


LINES, SECONDS = 60, 10.0
"""A client may write `LINES` lines at once, and then a line every `SECONDS`."""
_OTHERS = Caller(-1, 0)
"""All clients beyond `MAX_CALLERS`."""

CALLER: ContextVar[Caller | None] = ContextVar("CALLER", default=None)
"""The client that causes the present work; None if no client does."""


@contextmanager
def caused_by(caller: Caller) -> Iterator[None]:
    """Count lines logged in this context as lines of this client."""
    token = CALLER.set(caller)
    try:
        yield
    finally:
        CALLER.reset(token)


class ClientLines(logging.Filter):
    """Drops lines beyond the limit of a client. Add it to the log's handler.

    A client that reconnects counts as the same client."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._kept: dict[Caller, tuple[float, int]] = {}
        """By client, when the client may write `LINES` lines again, and how many lines were left
        out since the last written line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line. A written line says how many earlier lines were dropped."""
        if (caller := CALLER.get()) is None:
            return True
        now = self._now()
        if caller not in self._kept and len(self._kept) >= MAX_CALLERS:
            self._kept = {key: kept for key, kept in self._kept.items() if kept[0] > now}
            caller = _OTHERS if len(self._kept) >= MAX_CALLERS else caller
        free_at, out = self._kept.get(caller, (now, 0))
        free_at = max(free_at, now) + SECONDS
        if free_at > now + LINES * SECONDS:
            self._kept[caller] = free_at - SECONDS, out + 1
            return False
        self._kept[caller] = free_at, 0
        record.msg = printable(record.getMessage(), MAX_LINE_CHARS)
        if out:
            record.msg += f" (lines of this client left out before this one: {out:,})"
        record.args = None
        return True
