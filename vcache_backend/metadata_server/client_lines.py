"""Limits the log lines that clients cause, and makes each a single printable line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import msgspec

from vcache_backend.errors import MAX_LINE_CHARS, printable

MAX_CALLERS = 1024
"""The most clients whose lines are counted separately."""


class Caller(NamedTuple):
    """A connected process, or all of a user's processes that are not visible here (`pid` 0)."""

    uid: int
    pid: int


LINES, SECONDS = 60, 10.0
"""A client may write so many lines at once, and after that one every `SECONDS`."""
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


class _Bucket(msgspec.Struct):
    """`left`: lines left at the time `at`. `left_out`: since the last written line."""

    left: float
    at: float
    left_out: int = 0


class ClientLines(logging.Filter):
    """Drops lines beyond the limit of a client. Add it to the log's handler.

    A client that reconnects counts as the same client."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._buckets: dict[Caller, _Bucket] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line. A written line says how many before it were dropped."""
        if (caller := CALLER.get()) is None:
            return True
        bucket = self._bucket(caller)
        if bucket.left < 1:
            bucket.left_out += 1
            return False
        line, out = printable(record.getMessage(), MAX_LINE_CHARS), bucket.left_out
        if out:
            line += f" (lines of this client left out before this one: {out:,})"
        bucket.left_out = 0
        bucket.left -= 1
        record.msg = line
        record.args = None
        return True

    def _bucket(self, caller: Caller) -> _Bucket:
        now = self._now()
        if caller not in self._buckets and len(self._buckets) >= MAX_CALLERS:
            quiet = now - LINES * SECONDS
            self._buckets = {key: old for key, old in self._buckets.items() if old.at > quiet}
            if len(self._buckets) >= MAX_CALLERS:
                caller = _OTHERS
        bucket = self._buckets.setdefault(caller, _Bucket(LINES, now))
        bucket.left = min(LINES, bucket.left + (now - bucket.at) / SECONDS)
        bucket.at = now
        return bucket
