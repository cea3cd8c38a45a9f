"""The log of the server's processes: bounded, and one printable line a message."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vcache_backend.errors import MAX_LINE_CHARS
from vcache_backend.log_format import LineLimit

LINES, SECONDS = LineLimit.LINES, LineLimit.SECONDS


@pytest.fixture
def lines() -> Iterator[tuple[Callable[[str], None], list[str], list[float]]]:
    """A log with a clock, to which a line can be written."""
    said, now = list[str](), [0.0]
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(LineLimit(lambda: now[0]))
    log = logging.getLogger("vcache_backend.metadata_server.line_limit")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield lambda text: log.warning("%s", text), said, now
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


def test_the_log_has_many_lines_and_then_now_and_then_one_that_counts_others(lines: Any) -> None:
    say, said, now = lines
    for _ in range(LINES + 7):
        say("a line")
    assert said == ["a line"] * LINES
    for dropped in (7, 1):
        now[0] += SECONDS
        say("a line")
        say("a line")
        assert said[-1] == f"a line (lines dropped before this one: {dropped})"
    now[0] += LINES * SECONDS
    for _ in range(LINES + 1):
        say("another")
    assert said[-LINES:] == ["another (lines dropped before this one: 1)"] + ["another"] * (
        LINES - 1
    )


def test_what_a_client_says_is_one_printable_line(lines: Any) -> None:
    say, said, _ = lines
    say("one\n2026 INFO forged\x1b[2J\u202e" + "x" * 5000)
    assert said[0].startswith(r"one\n2026 INFO forged\x1b[2J\u202exxx")
    assert len(said[0]) < MAX_LINE_CHARS + 100
