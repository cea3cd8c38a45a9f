"""The demo: real processes share KV, a changed byte is found, and nothing is left running."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path

import pytest
from processes import ROOT, Child, eventually

# A machine that runs other tests needs a minute to import torch, as two of the demo's processes do.
# These limits only end what hangs.
ENDED = 400
pytestmark = pytest.mark.timeout(900)


def start_demo(temporary: Path, folder: Path = ROOT) -> Child:
    """In this folder."""
    command = shlex.join([sys.executable, "-P", "-m", "vcache_backend", "demo", "--json"])
    return Child(["bash", "-c", f"cd {folder} && exec {command}"], TMPDIR=str(temporary))


def children_of(pid: int) -> list[Path]:
    """The process's children, each as its folder in /proc."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [Path(f"/proc/{child}") for child in pids]


def test_what_one_worker_stores_the_other_retrieves_and_a_changed_byte_is_found(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """And a module that lies in the working folder is not taken for torch."""
    working = tmp_path_factory.mktemp("working")
    (working / "torch.py").write_text("raise RuntimeError('taken from the working folder')")
    with start_demo(tmp_path, working) as child:
        status, said = child.wait(ENDED)
    assert status == 0, said
    result = json.loads(said[said.index("{") :])
    found = result["wrong_bytes"], result["changed_byte_found"]
    assert (result["ok"], *found) == (True, 0, True)
    assert result["chunks_retrieved"] == result["chunks_stored"] == 64
    chunk_bytes = 1 << 20 if result["devices"] == ["host:0", "host:1"] else 8 << 20
    assert result["bytes_checked"] == 64 * chunk_bytes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_an_ended_demo_leaves_no_process(how: int, tmp_path: Path) -> None:
    """While its first worker starts."""
    with start_demo(tmp_path) as child:
        eventually(lambda: children_of(child.pid), ENDED)
        children = children_of(child.pid)
        child.signal(how)
        status, said = child.wait(ENDED)
    assert status == (-signal.SIGKILL if how is signal.SIGKILL else 130), said
    assert "Traceback" not in said
    eventually(lambda: not any(path.exists() for path in children), ENDED)
    assert how is signal.SIGKILL or not list(tmp_path.iterdir())
