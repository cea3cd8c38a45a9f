"""The fds that the server keeps for others. Only who maps one checks that it can be mapped."""

from __future__ import annotations

import os
import socket
import struct
import threading
from contextlib import suppress
from functools import cache
from queue import SimpleQueue


@cache
def closing() -> SimpleQueue[int]:
    """Fds that a thread closes for the server's loop; their numbers stay taken until then.

    Closing the last fd of a memory frees the memory, which takes a quarter of a second a GiB of
    host memory."""
    fds = SimpleQueue[int]()

    def close_all() -> None:
        while True:
            fd = fds.get()
            with suppress(OSError):
                _let_go(socket.socket(fileno=fd))  # OSError: it is none, as most
            os.close(fd)

    threading.Thread(target=close_all, name="vcache-closer", daemon=True).start()
    return fds


def _let_go(sock: socket.socket) -> None:
    """Have the close of a client's socket wait for nobody, whatever the client has set. Detaches
    the object from its fd."""
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    finally:
        sock.detach()


class Descriptor:
    """An open file, closed soon after its last user drops it: a table, or an unsent answer."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = closing()

    def __del__(self) -> None:
        self._closing.put(self.fd)
