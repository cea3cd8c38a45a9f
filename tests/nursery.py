"""The inside of `processes.Nursery` and `processes.Worker`."""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from processes import Failure

_REQUEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
_pipe: Connection | None = None


def say(value: Any) -> None:
    """Of a worker: send something that the test did not ask for; its `answer` returns it."""
    assert _pipe is not None
    _pipe.send_bytes(pickle.dumps(value))


def listen(seconds: float) -> Any:
    """Of a worker: what the test says, by `Worker.say`."""
    assert _pipe is not None
    assert _pipe.poll(seconds), f"the test said nothing for {seconds:g} s"
    return pickle.loads(_pipe.recv_bytes())


def main() -> None:
    """Import modules, then fork a process for each request; it obeys until the test hangs up."""
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    with socket.socket(fileno=int(sys.argv[1])) as tests:
        while True:
            message, fds, _, _ = socket.recv_fds(tests, _REQUEST_BYTES, 3)
            if not message:
                return
            sys.stdout.flush()
            sys.stderr.flush()
            pid = os.fork()
            if pid == 0:
                tests.close()
                try:
                    _become(pickle.loads(message), fds)
                    _obey(Connection(fds[0]))
                except BaseException:  # noqa: BLE001 - the process's outermost loop
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(1)  # threads of others would keep it from ending by itself
            for each in fds:
                os.close(each)
            tests.send(str(pid).encode())


def _become(setting: dict[str, Any], fds: list[int]) -> None:
    """The leader of a session, which dies with the nursery."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if len(fds) > 1:
        os.dup2(fds[1], 1)
        os.dup2(fds[1], 2)
        os.close(fds[1])
    if setting["folder"] is not None:
        os.chdir(setting["folder"])
    if setting["environment"] is not None:
        os.environ.clear()
        os.environ.update(setting["environment"])


def _obey(pipe: Connection) -> None:
    """The first call makes the object that all others are for."""
    global _pipe
    _pipe, made = pipe, False
    served: Any = None
    while True:
        try:
            message = pipe.recv_bytes()
        except EOFError:
            return
        try:
            what, arguments, more = pickle.loads(message)
            if not made:
                served, answer, made = what(*arguments, **more), None, True
            elif isinstance(what, str):
                answer = getattr(served, what)(*arguments, **more)
            else:
                answer = what(served, *arguments, **more)
            data = pickle.dumps(answer)
        except Exception:  # noqa: BLE001 - the test fails with it
            data = pickle.dumps(Failure(traceback.format_exc()))
        with suppress(BrokenPipeError):
            pipe.send_bytes(data)
