"""Limits the log lines that clients cause, and makes each a single printable line."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import msgspec

log = logging.getLogger(__name__)

MAX_CALLERS = 1024
"""The most processes and users whose lines are counted separately."""
MAX_LINE_CHARS = 1500
MAX_SHOWN_CHARS = 64
"""The most characters shown of a name or value."""


class Caller(NamedTuple):
    """A connected process, or all of a user's processes that are not visible here (`pid` 0)."""

    uid: int
    pid: int


class Limit(NamedTuple):
    """`lines` at once, and after that one line every `seconds`."""

    lines: int
    seconds: float


OF_PROCESS, OF_USER = Limit(60, 10.0), Limit(600, 1.0)
_OTHERS = Caller(-1, 0)
"""All processes and users that exceed `MAX_CALLERS`."""

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
    """The number of lines `left` at the time `at`, and the number left out since the last written
    line."""

    limit: Limit
    left: float
    at: float
    left_out: int = 0

    def refill(self, now: float) -> None:
        self.left, self.at = (
            min(self.limit.lines, self.left + (now - self.at) / self.limit.seconds),
            now,
        )


class ClientLines(logging.Filter):
    """Drops lines beyond the limit of a client's process or user. Add it to the log's handler.

    A client that reconnects counts as the same client."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._now = now
        self._buckets: dict[Caller, _Bucket] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to write the line. A written line says how many before it were dropped."""
        if (caller := CALLER.get()) is None:
            return True
        user, process = (
            self._bucket(Caller(caller.uid, 0), OF_USER),
            self._bucket(caller, OF_PROCESS),
        )
        if min(user.left, process.left) < 1:
            process.left_out += 1
            return False
        for bucket in {id(user): user, id(process): process}.values():
            bucket.left -= 1
        line, out, process.left_out = (
            printable(record.getMessage(), MAX_LINE_CHARS),
            process.left_out,
            0,
        )
        more = f" (lines of this client left out before this one: {out:,})" if out else ""
        record.msg, record.args = line + more, None
        return True

    def tell(self) -> None:
        """Log how many lines were dropped of clients that are quiet now. Call this now and then."""
        now = self._now()
        for caller, bucket in list(self._buckets.items()):
            bucket.refill(now)
            if bucket.left_out and bucket.left >= 1:
                with caused_by(caller):
                    log.info("pid %d of uid %d is quiet again", caller.pid, caller.uid)
            elif bucket.left == bucket.limit.lines:
                del self._buckets[caller]

    def _bucket(self, caller: Caller, limit: Limit) -> _Bucket:
        now = self._now()
        if caller not in self._buckets and len(self._buckets) >= MAX_CALLERS:
            caller, limit = _OTHERS, OF_USER
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = _Bucket(limit, limit.lines, now)
        bucket.refill(now)
        return bucket


def printable(text: str, most: int = MAX_SHOWN_CHARS) -> str:
    """Cut `text` to `most` characters, and escape every character that a terminal would act on."""
    short = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in short
    )
