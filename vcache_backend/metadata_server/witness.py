"""How far a server's journal had come, in memory that outlives the server and that no damage to its file can reach.

Every client holds the witness of the server it is connected to and hands it to the next one. So a restarted server knows whether
the journal it found is the whole last word of its predecessor, or was cut, given up, or put back from a copy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

NEVER = (1 << 64) - 1
"""The count of a server whose journal proves nothing: it keeps none, it could not go on with it, or a successor has taken over."""
_LAYOUT = struct.Struct("=QQ")
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Witness:
    """A server's own: two numbers in a memfd, its epoch and the number of the last journal frame that an answer may rest on."""

    def __init__(self, epoch: int) -> None:
        """`fd` is to be handed to clients; it stays this object's."""
        self.fd = os.memfd_create("vcache-witness", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, mmap.PAGESIZE)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        self._cells = memoryview(mmap.mmap(self.fd, mmap.PAGESIZE)).cast("Q")
        self._cells[0], self._cells[1] = epoch, NEVER

    def reached(self, frame: int) -> None:
        """The journal holds everything up to `frame`. One aligned 8-byte store: a killed server leaves the old number or the new."""
        self._cells[1] = frame

    def close(self) -> None:
        os.close(self.fd)


def read(fd: int) -> tuple[int, int]:
    """(epoch, frame) of a witness that a client brought. OSError, struct.error if it is none."""
    if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise OSError("it can shrink")
    epoch, frame = _LAYOUT.unpack(os.pread(fd, _LAYOUT.size, 0))
    return epoch, frame


def end(fd: int) -> None:
    """Its memory belongs to this server's life now, and a copy of the journal, put back later, cannot be proven with it again."""
    os.pwrite(fd, NEVER.to_bytes(8, "little"), 8)
