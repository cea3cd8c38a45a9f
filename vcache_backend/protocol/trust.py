"""Whose socket it is: the user and process at the other end, and who could replace the socket."""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected. pid 0: its pid namespace is not visible here."""
    pid, uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, uid


def folder_fault(path: Path, trusted: Collection[int]) -> str:
    """Explain why a user outside of `trusted` could put a file at `path`, and what to do; or empty.

    OSError if the folder does not exist."""
    folder = path.parent
    status = folder.lstat()
    other = "set server.socket to a folder of your own"
    if not stat.S_ISDIR(status.st_mode):
        kind = "a link" if stat.S_ISLNK(status.st_mode) else "a file"
        return f"{folder} is not a folder but {kind}; {other}, or remove {folder}"
    if status.st_uid not in trusted:
        return (
            f"{folder} belongs to uid {status.st_uid}, not to uid {os.getuid()}; {other}, "
            f"or remove {folder}"
        )
    if status.st_mode & 0o022:
        shared = status.st_mode & stat.S_ISVTX  # such as /tmp, shared on purpose
        mend = other if shared else f"`chmod go-w {folder}`, or {other}, or remove {folder}"
        return f"others can write to {folder} (mode {stat.S_IMODE(status.st_mode):04o}); {mend}"
    return ""
