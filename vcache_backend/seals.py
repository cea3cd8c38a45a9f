"""Checks the seals of a memfd that several processes map."""

from __future__ import annotations

import fcntl
import os
import stat

FUTURE_WRITE = 0x10
"""`F_SEAL_FUTURE_WRITE`: only earlier mappings can write. In Python's fcntl from 3.13 on."""
RESIZING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The seals of all shared memory: reading past the end of a shrunk file raises SIGBUS."""


def lacking(fd: int, needed: int = RESIZING) -> str:
    """Why `fd` is no memfd with the `needed` seals; empty if it is one. Raises OSError if `fd` is
    not open."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return f"fd {fd} is no memfd but {stat.filemode(status.st_mode)}"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        return f"fd {fd} is no memfd but a plain file of {status.st_size:,} B ({error.strerror})"
    if seals & needed != needed:
        against = "shrinking, growing, other seals" + (
            " and others' writing" if needed & FUTURE_WRITE else ""
        )
        return f"fd {fd} is not sealed against {against} (it has {seals:#x}, needs {needed:#x})"
    return ""
