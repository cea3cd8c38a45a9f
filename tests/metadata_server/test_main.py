"""The server as a whole: what it needs to start, and when it ends."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from processes import Stage, ran

from vcache_backend.metadata_server.endpoint import beside


def test_a_server_whose_path_leads_to_another_one_ends(alone: Stage) -> None:
    """Stopped while lock and socket were taken from under it."""
    first = alone.server()
    with first.stopped():
        beside(alone.path, ".lock").unlink()
        alone.path.unlink()
        second = alone.server()
    status, said = first.wait()
    assert status == 1
    assert f"{alone.path} does not lead to this server any more (another socket is there)" in said
    assert "Traceback" not in said
    assert second.alive
    assert alone.raw().ask("list_segments") == ["segments", [], 0, []]


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ("-f 1", "server.socket: cannot use {}: [Errno 27] File too large"),
        (
            "-s 4000000 -v 4000000",
            "can't start new thread: raise ulimit -u, or pids.max of the cgroup",
        ),
    ],
    ids=["disk", "threads"],
)
def test_what_a_server_lacks_is_told_in_one_line(limits: str, said: str, tmp_path: Path) -> None:
    """Room for resets, as on a full disk: here files have 1 KiB at most.
    Threads: here a stack is as large as the address space."""
    # -B: Python 3.11 would leave compiled modules of 1 KiB, which nobody can import.
    command = shlex.join([sys.executable, "-B", "-m", "vcache_backend", "serve"])
    path = tmp_path / "run" / "v.sock"
    done = ran("bash", "-c", f"ulimit {limits}; {command} --socket {path}")
    assert (done.returncode, done.stderr) == (1, f"vcache: {said.format(path)}\n")
