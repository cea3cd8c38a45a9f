"""The inside of `processes.Nursery` and `processes.Worker`."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from processes import Apart, Failure

_REQUEST_BYTES = 1 << 20
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_KEEPCAPS = 1, 4, 8
_CAPABILITIES, _DAC_READ_SEARCH = 0x20080522, 1 << 2
_NAMESPACES = 0x00020000 | 0x08000000 | 0x20000000 | 0x40000000
_TIME_NAMESPACE = 0x80
"""Of mounts, IPC, pids and network; and of time: CLONE_NEW… of unshare(2)."""
_MS_REC_PRIVATE = 0x4000 | 0x40000
_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1
_pipe: Connection | None = None


def say(value: Any) -> None:
    """Of a worker: send something that the test did not ask for; its `answer` returns it."""
    _pipe.send_bytes(pickle.dumps(value))


def main(listening: int, over_with: int, modules: Sequence[str]) -> None:
    """Import modules, then fork a process for each request of whoever connects, until the tests are
    over: a process ends with them.
    """
    if os.fork():
        os._exit(0)  # who started it may end before other processes of the tests
    over = os.pidfd_open(over_with)
    for name in modules:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    listener = socket.socket(fileno=listening)
    tests = list[socket.socket]()
    while True:
        for ready in select.select([over, listener, *tests], [], [])[0]:
            if ready == over:
                return
            if ready is listener:
                tests.append(listener.accept()[0])
                socket.send_fds(tests[-1], [b"log"], [1])
                continue
            message, fds, _, _ = socket.recv_fds(ready, _REQUEST_BYTES, 4)
            if not message:
                tests.remove(ready)
                ready.close()
                continue
            ready.send(str(_fork(message, fds, [listener, *tests])).encode())
            for each in fds:
                os.close(each)


def _fork(message: bytes, fds: list[int], ours: list[socket.socket]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        for each in ours:
            each.close()
        try:
            setting = pickle.loads(message)
            _become(setting, fds)
            if program := setting.get("program"):
                exec(program, vars(sys.modules["__main__"]) | {"fds": fds})
            else:
                _obey(Connection(fds[0]))
        except BaseException:  # noqa: BLE001 - the process's outermost loop
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)  # threads of others would keep it from ending by itself
    return pid


def _become(setting: dict[str, Any], fds: list[int]) -> None:
    """The leader of a session, which dies with the nursery. fds: of a program its standard streams
    first; else a pipe to the test, and what both outputs go to, if not where the nursery's do."""
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if setting.get("apart") is not None:
        _isolate(setting["apart"])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    streams = fds[:3] if "program" in setting else [None, *fds[1:] * 2]
    for number, fd in enumerate(streams):
        if fd is not None:
            os.dup2(fd, number)
    for fd in {*streams} - {None}:
        os.close(fd)
    if setting.get("folder") is not None:
        os.chdir(setting["folder"])
    if setting["environment"] is not None:
        os.environ.clear()
        os.environ.update(setting["environment"])


def _isolate(apart: Apart) -> None:
    """As in a container of its own. The process that the test knows waits for it outside, and dies
    with it.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _try(libc.unshare, _NAMESPACES | (_TIME_NAMESPACE if apart.later else 0))
    if apart.later:
        later = f"monotonic {apart.later} 0\nboottime {apart.later} 0"
        Path("/proc/self/timens_offsets").write_text(later)
    pid = os.fork()
    if pid:
        os.waitpid(pid, 0)
        os._exit(0)
    _try(libc.mount, b"none", b"/", None, _MS_REC_PRIVATE, None)
    _try(libc.mount, b"proc", b"/proc", b"proc", 0, None)
    with socket.socket() as any_:
        fcntl.ioctl(any_, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", _IFF_UP))
    if apart.uid:
        libc.prctl(_PR_SET_KEEPCAPS, 1)
        os.setgroups([apart.gid])
        os.setgid(apart.uid)
        os.setuid(apart.uid)
        # Python and this repository may lie in a folder of root's. To connect to a socket takes the
        # right to write.
        _try(
            libc.capset,
            struct.pack("Ii", _CAPABILITIES, 0),
            struct.pack("6I", _DAC_READ_SEARCH, _DAC_READ_SEARCH, 0, 0, 0, 0),
        )
        libc.prctl(_PR_SET_DUMPABLE, 1)


def _try(call: Any, *arguments: Any) -> None:
    if call(*arguments):
        raise OSError(ctypes.get_errno(), call.__name__)


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
