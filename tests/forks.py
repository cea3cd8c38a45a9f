"""`pytest --forks N`: N processes run the tests, a file at a time. They are forked once all tests
are collected, so vLLM, torch and LMCache are imported once, not N times. Not for tests with GPUs:
CUDA does not survive a fork."""

from __future__ import annotations

import ctypes
import itertools
import os
import signal
import struct
import traceback
from collections.abc import Iterator
from multiprocessing import Pipe, connection
from typing import Any

import pytest

_PR_SET_PDEATHSIG = 1
_INDEX = struct.Struct("<H")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, default=0, help="how many processes run the tests")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Fork, and report here what the forks report. None: pytest runs the tests itself."""
    config = session.config
    if not config.option.forks or config.option.collectonly or session.testsfailed:
        return None
    files = [list(items) for _, items in itertools.groupby(session.items, lambda item: item.path)]
    queue, filled = os.pipe()
    os.write(filled, b"".join(map(_INDEX.pack, range(len(files)))))
    os.close(filled)
    forks = [_fork(session, files, queue, number) for number in range(config.option.forks)]
    running, ended = dict(forks), list[int]()
    while running:
        for ready in connection.wait(running):
            assert isinstance(ready, connection.Connection)
            try:
                data = ready.recv()
            except EOFError:
                ended.append(os.waitpid(running.pop(ready), 0)[1])
                continue
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            config.hook.pytest_runtest_logreport(report=report)
            if session.shouldfail:
                # No fork begins another file.
                os.read(queue, 1 << 16)
    os.close(queue)
    if any(ended):
        raise session.Interrupted(f"processes that ran tests ended with statuses {ended}")
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def _fork(
    session: pytest.Session, files: list[list[pytest.Item]], queue: int, number: int
) -> tuple[connection.Connection, int]:
    ours, theirs = Pipe(duplex=False)
    if pid := os.fork():
        theirs.close()
        return ours, pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        ours.close()
        _become(session.config, theirs, number)
        _run(session.config, _taken(files, queue))
        status = 0
    except BaseException:  # noqa: BLE001 - the process's outermost loop
        traceback.print_exc()
    finally:
        os._exit(status)


def _become(config: pytest.Config, pipe: connection.Connection, number: int) -> None:
    """A process with its own folder and captured output, whose reports go through the pipe."""
    # As a process of pytest-xdist, so that all processes share what they may.
    os.environ["PYTEST_XDIST_WORKER"] = f"gw{number}"
    folders: Any = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"gw{number}"
    folders._basetemp.mkdir()
    plugins = config.pluginmanager
    capture: Any = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    plugins.unregister(name="terminalreporter")
    plugins.register(_Reporter(config, pipe))


class _Reporter:
    def __init__(self, config: pytest.Config, pipe: connection.Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._pipe.send(hook.pytest_report_to_serializable(config=self._config, report=report))


def _taken(files: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    """The tests of one file after the other; no other process gets the same file."""
    while index := os.read(queue, _INDEX.size):
        yield from files[_INDEX.unpack(index)[0]]


def _run(config: pytest.Config, items: Iterator[pytest.Item]) -> None:
    item = next(items, None)
    while item is not None:
        # What fixtures a test leaves to the next depends on which that is.
        following = next(items, None)
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
