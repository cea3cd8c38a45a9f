"""Memory that several processes map: what a memfd is sealed against before anybody trusts it."""

from __future__ import annotations

import fcntl
import os
import stat

FUTURE_WRITE = 0x10
"""`F_SEAL_FUTURE_WRITE`: who mapped it before writes it, and nobody else. Linux 5.1; in Python's fcntl from 3.13."""
RESIZING = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""What all such memory has: a file that shrinks under a mapping is a SIGBUS."""


def lacking(fd: int, needed: int = RESIZING) -> str:
    """Why `fd` is no memfd with these seals; empty if it is one. Raises OSError for what is no open file."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return f"fd {fd} is no memfd but {stat.filemode(status.st_mode)}"
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        return f"fd {fd} is no memfd but a plain file of {status.st_size:,} B ({error.strerror})"
    if seals & needed != needed:
        against = "shrinking, growing, other seals" + (" and others' writing" if needed & FUTURE_WRITE else "")
        return f"fd {fd} is not sealed against {against} (it has {seals:#x}, needs {needed:#x})"
    return ""
