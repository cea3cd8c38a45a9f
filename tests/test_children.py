"""What starts the child processes of `vcache prove` and the examples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from vcache_backend.children import Program, module


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
