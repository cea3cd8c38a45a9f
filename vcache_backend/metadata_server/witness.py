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


class Proof:
    """Is the journal that a server started from the last word of the server before it? Clients' witnesses tell."""

    def __init__(self, epoch: int, frame: int, ours: int = 0) -> None:
        """`epoch` is the journal's, 0 without one; `frame` is its last. `ours`: this server's epoch."""
        self._epoch, self._frame, self._ours = epoch, frame, ours
        self.proven = False
        self.forgetful = False
        """Has a client known a server of which the journal does not say all?"""

    def refuted_by(self, fd: int) -> str:
        """Look at the witness a client brought: why it refutes the journal, or "". OSError, struct.error if it is none.

        The first one that proves the journal is ended: its memory belongs to this server's life now, and a copy of the journal,
        put back later, cannot be proven with it again. One of another epoch says nothing.
        """
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise OSError("it can shrink")
        epoch, frame = _LAYOUT.unpack(os.pread(fd, _LAYOUT.size, 0))
        self.forgetful |= epoch not in (self._epoch, self._ours)
        if self.proven or epoch != self._epoch:
            return ""
        if frame > self._frame:
            self.forgetful = True
            came = "given up, or taken over by another server since" if frame == NEVER else f"at frame {frame}"
            return f"it ends at frame {self._frame}, but was {came}"
        os.pwrite(fd, NEVER.to_bytes(8, "little"), 8)
        self.proven = True
        return ""
