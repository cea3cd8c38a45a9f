"""What starts the child processes of `vcache prove` and the examples."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SECONDS, eventually

from vcache_backend.children import Child, ChildFailed

PARENT = """
import sys, time
from pathlib import Path
from vcache_backend.children import Program
print(Program("sleeps", ["sleep", "60"], Path(sys.argv[1])).pid, flush=True)
time.sleep(60)
"""


def test_a_program_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    """However that one ends, also in the middle of the start."""
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        program = Path("/proc", parent.stdout.readline().strip(), "stat")
        assert program.exists()
        parent.send_signal(signal.SIGKILL)
    eventually(lambda: not program.exists() or program.read_text().split()[2] == "Z")


def test_a_child_that_is_late_is_killed_and_says_so(tmp_path: Path) -> None:
    """Its answer would be taken for the next one."""
    with Child("sleeps", ["sleep", "60"], tmp_path / "log", {"PATH": "/bin:/usr/bin"}) as child:
        child.send("anything")
        with pytest.raises(ChildFailed, match="sleeps: (did not answer|ended)"):
            child.answer(0.1)
        eventually(lambda: not child.alive)
    child = Child("ends", ["true"], tmp_path / "log", {"PATH": "/bin:/usr/bin"})
    with child, pytest.raises(ChildFailed, match="ends: ended with code 0"):
        child.answer(SECONDS)
