"""Makes memory that several processes map, a sealed memfd, and checks its seals."""

from __future__ import annotations

import fcntl
import mmap
import os
import stat
from contextlib import ExitStack

FUTURE_WRITE = 0x10
"""`F_SEAL_FUTURE_WRITE`: only earlier mappings can write. In Python's fcntl from 3.13 on."""
RESIZING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The seals of all shared memory: reading past the end of a shrunk file raises SIGBUS."""


def sealed(name: str, nbytes: int, seals: int = RESIZING) -> tuple[int, mmap.mmap]:
    """A memfd of `nbytes` zero bytes with these seals, closed on exec, and a mapping that can write
    even if the seals forbid other writers. The caller closes both. OSError.

    Pages are allocated when first written."""
    with ExitStack() as undo:
        fd = os.memfd_create(f"vcache-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        undo.callback(os.close, fd)
        os.ftruncate(fd, nbytes)
        memory = undo.enter_context(mmap.mmap(fd, nbytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        undo.pop_all()
        return fd, memory


def lacking(fd: int, needed: int = RESIZING) -> str:
    """Why `fd` is no memfd with the `needed` seals; empty if it is. OSError for a closed `fd`."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return f"fd {fd} is not a memfd but {stat.filemode(status.st_mode)}"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        return f"fd {fd} is not a memfd but a plain file of {status.st_size:,} B ({error.strerror})"
    if seals & needed != needed:
        against = "shrinking, growing, other seals" + (
            " and others' writing" if needed & FUTURE_WRITE else ""
        )
        return f"fd {fd} is not sealed against {against} (it has {seals:#x}, needs {needed:#x})"
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        return f"fd {fd} is of huge pages: reading one that is not to be had raises SIGBUS"
    return ""
