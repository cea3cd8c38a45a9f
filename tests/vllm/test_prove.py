"""`vcache prove`: a real one on the CPU, and what ends it early."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from processes import Worker, children_of, eventually, script, with_words
from vllm_cases import home

from vcache_backend import cli, prove
from vcache_backend.errors import VCacheError
from vcache_backend.prove import Settings

needs_vllm = vllm_cases.needs_vllm

START_SECONDS = 240.0
"""It imports vLLM first."""


def proved(_: object, settings: Settings) -> Any:
    """In a process from which vLLM's are forked."""
    from forked_programs import Popen

    subprocess.Popen = Popen  # type: ignore[misc]
    return prove.run(settings, print)


@needs_vllm
def test_the_installed_vllm_is_proved(tmp_path: Path) -> None:
    with Worker(home(), object, name="prove", log=tmp_path / "log") as worker:
        proof, shown = worker.ask(proved, Settings(share="in_place", seconds=0.5), seconds=300.0)
    assert [one for one in shown if one.status != "ok"] == []
    assert [int(one.detail.split(" ")[0]) > 1 for one in shown] == [True] * 6
    assert (proof.combination.share, proof.combination.device) == ("in_place", "cpu")


@contextmanager
def temporary() -> Iterator[tuple[Path, dict[str, str]]]:
    """A folder that the command takes for this machine's temporary one, and its environment. Behind
    a long path it would work in another folder, for its sockets."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as folder:
        yield Path(folder), {"TMPDIR": folder, "XDG_STATE_HOME": f"{folder}/state"}


@needs_vllm
def test_a_killed_one_leaves_no_process_behind() -> None:
    program = "from vcache_backend.cli import main; main()"
    with temporary() as (folder, places), script(program, "prove", **places) as command:
        eventually(lambda: len(with_words("prove.instance", folder)) == 2, START_SECONDS, 0.1)
        command.kill()
        eventually(lambda: not with_words(folder), every=0.1)


def prove_forked(_: object) -> Any:
    """The command, whose instances are forked; its exit status."""
    from forked_programs import Popen

    subprocess.Popen, sys.argv[1:], tempfile.tempdir = Popen, ["prove"], None  # type: ignore[misc]
    try:
        cli.main()
    except SystemExit as ended:
        return ended.code


@needs_vllm
@pytest.mark.parametrize(
    ("who", "how", "status", "said"),
    [
        ("itself", signal.SIGINT, 130, ""),
        ("an instance", signal.SIGKILL, 1, "vcache: reader: ended with code -9"),
    ],
)
def test_what_ends_it_leaves_nothing_behind(
    tmp_path: Path, who: str, how: signal.Signals, status: int, said: str
) -> None:
    with (
        temporary() as (folder, places),
        Worker(
            home(), object, log=tmp_path / "log", environment=vllm_cases.changed(places)
        ) as command,
    ):
        command.tell(prove_forked)
        eventually(lambda: "writer starts" in command.log, START_SECONDS)
        _, _, reader = started = children_of(command.pid)
        os.kill(command.pid if who == "itself" else reader, how)
        assert command.answer() == status
        assert command.log.splitlines()[-1].startswith(said)
        assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
        assert not [*folder.glob("vcache-prove-*")]


def test_without_vllm_or_disk_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with pytest.raises(VCacheError, match="it cannot be tried: .*No space left on device"):
        prove.run(Settings(), print)
    monkeypatch.setattr(prove, "find_spec", lambda _: None)
    with pytest.raises(VCacheError, match="vLLM is not installed"):
        prove.run(Settings(), print)
