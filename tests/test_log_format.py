"""The log of the server's processes: bounded, and one printable line a message."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import ran

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


def test_the_log_of_such_a_server_is_bounded_and_keeps_what_it_said_last(tmp_path: Path) -> None:
    code = """
import logging, sys
from pathlib import Path
from vcache_backend import log_format
log_format.LOG_BYTES = 10_000
log_format.begin(Path(sys.argv[1]))
for number in range(1000):
    logging.info("line %d", number)
    if number == 300:
        Path(sys.argv[1]).unlink(missing_ok=True)  # as who makes room on a disk
logging.shutdown()
sys.stderr.write("its last words")
"""
    path = tmp_path / "vcache.log"
    assert ran(sys.executable, "-c", code, str(path), stderr=None).returncode == 0
    assert {one.name for one in path.parent.iterdir()} == {path.name, f"{path.name}.1"}
    sizes = [one.stat().st_size for one in path.parent.iterdir()]
    assert max(sizes) <= 10_000 + len("its last words")
    assert path.read_text().endswith("line 999\nits last words")


def test_who_logs_does_not_wait_for_a_pipe_that_nobody_reads() -> None:
    """Nor for a terminal after Ctrl-S. The server would answer nobody."""
    code = """
import logging, os
from vcache_backend import log_format
reading, writing = os.pipe()
os.dup2(writing, 2)
log_format.begin()
for number in range(5000):
    logging.info("line %d %s", number, "x" * 100)
unread = open(reading)
for number in range(300):
    assert f"line {number} " in unread.readline()
logging.info("and then")
while "and then" not in (line := unread.readline()):
    assert "line 4999" not in line
print(line)
"""
    assert "and then" in ran(sys.executable, "-c", code).stdout


def test_a_log_that_a_shell_opened_is_not_written_over(tmp_path: Path) -> None:
    """By what else goes to stderr."""
    code = "import logging, sys; from vcache_backend import log_format as one; one.begin();"
    code += "logging.warning('first'); sys.stderr.write('second'); logging.warning('third')"
    with (tmp_path / "log").open("w") as log:
        ran(sys.executable, "-c", code, stdout=log, stderr=log)
    told = (tmp_path / "log").read_text()
    assert [one in told for one in ("first", "second", "third")] == [True] * 3
