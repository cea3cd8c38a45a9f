"""What most modules of tests import, for the processes of pytest-xdist: they are forked from one that
has (`processes.nursery`), since it takes each of them seconds.

As a program it stands in Python's place, and takes its arguments."""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module

if __name__ != "__main__":
    # Of vLLM all that schedulers need; without vLLM, torch.
    for name in ("torch", "soak.scheduling"):
        with suppress(ImportError):
            import_module(name)


def main() -> None:
    """Live as long as the fork does, which has these standard streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest ends its processes itself
    setting = {"environment": dict(os.environ), "program": sys.argv[-1]}
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as home:
        home.connect(f"\0{os.environ['VCACHE_TESTS_WARM']}")
        home.recv(64)
        socket.send_fds(home, [pickle.dumps(setting)], [0, 1, 2])
        pid = int(home.recv(64))
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(pid)], [], [])


if __name__ == "__main__":
    main()
