"""The log of the server's processes is bounded and delays nobody."""

from __future__ import annotations

import sys
from pathlib import Path

from processes import ran


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
