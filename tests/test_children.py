"""What starts the child processes of `vcache prove` and the examples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from processes import PATIENT, python_path

from vcache_backend import children
from vcache_backend.children import MetadataServer, Program, module
from vcache_backend.protocol.client import Client


def test_an_interrupt_in_the_middle_of_a_fork_is_not_lost(tmp_path: Path) -> None:
    """Python ignores what is raised there."""
    pending = [signal.SIGINT]

    def interrupt() -> None:
        if pending:
            signal.raise_signal(pending.pop())

    os.register_at_fork(before=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            Program("sleeps", module("time"), tmp_path / "log")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert not pending


def test_an_interrupt_before_a_fork_is_an_interrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(children, "_uninterrupted", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Program("sleeps", module("time"), tmp_path / "log")


LATE = """import socket, time
listen = socket.socket.listen
socket.socket.listen = lambda self, *most: (time.sleep(0.3), listen(self, *most))
"""


def test_a_metadata_server_that_was_started_serves(tmp_path: Path) -> None:
    """Its socket's path is there before it listens, on a machine that is slow then long before."""
    (tmp_path / "sitecustomize.py").write_text(LATE)
    given = os.environ | {"PYTHONPATH": f"{tmp_path}:{python_path()}"}
    path = tmp_path / "vcache.sock"
    with (
        MetadataServer(path, tmp_path / "log", given),
        Client(path, PATIENT, reconnect=False) as client,
    ):
        assert client.connected
