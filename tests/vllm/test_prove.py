"""`vcache prove`: a real one on the CPU, and what ends it early."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from processes import Child, Worker, eventually, script, with_words
from vllm_cases import home

from vcache_backend import prove
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
    assert [one for one in shown if not one.ok] == []
    assert [one.of > 1 for one in shown] == [True] * 6
    assert (proof.combination.share, proof.combination.device) == ("in_place", "cpu")


@contextmanager
def begun() -> Iterator[tuple[Child, list[int], Path]]:
    """The command, once both of its instances have begun, their processes, and their folder."""
    program = "from vcache_backend.cli import main; main()"
    # Behind a long path it would work in another folder, for its sockets.
    with ExitStack() as undo:
        folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="t-", dir="/tmp")))
        places = {"TMPDIR": str(folder), "XDG_STATE_HOME": str(folder / "state")}
        command = undo.enter_context(script(program, "prove", **places))
        found = lambda: with_words("prove.instance", folder)  # noqa: E731
        yield command, eventually(lambda: len(found()) == 2 and found(), START_SECONDS, 0.1), folder


@needs_vllm
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_what_ends_it_leaves_no_process_behind(how: signal.Signals) -> None:
    with begun() as (command, _, folder):
        os.kill(command.process.pid, how)
        status, _ = command.wait()
        eventually(lambda: not with_words(folder), every=0.1)
        if how == signal.SIGINT:
            assert (status, [*folder.glob("vcache-prove-*")]) == (130, [])


@needs_vllm
def test_a_killed_instance_is_named_in_one_line() -> None:
    with begun() as (command, (_, reader), folder):
        os.kill(reader, signal.SIGKILL)
        status, _ = command.wait()
        said = command.said().splitlines()[-1]
        assert (status, said) == (1, "vcache: reader: ended with code -9")
        assert not with_words(folder)
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
