"""Runs the loops of threads that must outlive any exception in them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Thread

log = logging.getLogger(__name__)

Count = Callable[[str], object]
_said: set[tuple[object, ...]] = set()


@contextmanager
def survives(what: str, failed: Count | None = None) -> Iterator[None]:
    """Log any exception of the block: once for each kind and place with its traceback, then for
    debugging. failed: counts it, by a cause such as "thread: vcache-outbox"."""
    try:
        yield
    except Exception as error:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        kind = what, type(error), at and at.tb_frame.f_code, at and at.tb_lineno
        new = kind not in _said and len(_said) < 256
        if new:
            _said.add(kind)
        level = logging.ERROR if new else logging.DEBUG
        log.log(level, "an error of vcache's own in %s; it goes on", what, exc_info=error)
        with suppress(Exception):
            if failed is not None:
                failed(f"thread: {what}")


def repeat(turn: Callable[[], object], what: str, failed: Count | None = None) -> None:
    """Call `turn` until it returns a true value. After an exception (see `survives`) pause, and
    call it again: a turn takes its work off the queue even if it raises."""
    over: object = False
    while not over:
        over = None
        with survives(what, failed):
            over = turn() or False
        if over is None:
            time.sleep(0.1)


def start(turn: Callable[[], object], name: str, failed: Count | None = None) -> Thread:
    """Start a daemon thread that runs `repeat`. RuntimeError if there are too many threads."""
    thread = Thread(target=repeat, args=(turn, name, failed), name=name, daemon=True)
    thread.start()
    return thread
