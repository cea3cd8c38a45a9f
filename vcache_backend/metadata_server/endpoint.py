"""The server's socket: the folder, files beside the socket, rights, and who owns the path."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server.resets import ResetsFile
from vcache_backend.protocol.sockets import advice, folder_fault, listener


def beside(path: Path, suffix: str) -> Path:
    """The path of a socket's lock or log: no two sockets share a file."""
    return path.with_name(path.name + suffix)


def make_folder(path: Path) -> None:
    """Make the folder of a socket, for this user alone. ConfigError if another user could put a
    file there. OSError."""
    for folder in (path.parent.parent, path.parent):
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700, parents=True)
    if fault := folder_fault(path, {os.getuid(), 0}):
        raise ConfigError(f"server.socket: {fault}")


class Endpoint:
    """A listening socket, and a lock that keeps other servers away, whose file has the resets of
    all servers at this path. ConfigError if either fails.

    Only this user can reach the socket. With `open_to_others` every user can, and `Clients`
    checks who connects."""

    def __init__(self, path: Path, open_to_others: bool = False) -> None:
        self._path, self._open_to_others = path, open_to_others
        with ExitStack() as undo:
            try:
                self._make_folder()
                self._lock(undo)
                self._make_way()
                self.listener = undo.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                )
                self._bind(undo)
            except OSError as error:
                said = f"server.socket: cannot use {path}: {error}{advice(error)}"
                raise ConfigError(said) from error
            self._undo = undo.pop_all()
        self._fresh_until = 0.0

    def close(self) -> None:
        """Remove the socket, and give up the lock."""
        self._undo.close()

    def lost(self) -> str:
        """Why the path no longer leads to this server; empty while it does."""
        try:
            current = self._path.lstat()
        except FileNotFoundError:
            return "it was removed"
        except OSError as error:
            return str(error)
        return "" if os.path.samestat(current, self._own) else "another socket is there"

    def keep_fresh(self) -> None:
        """Touch the files every hour: cleaners of /tmp remove files that nobody touches."""
        if time.monotonic() < self._fresh_until:
            return
        self._fresh_until = time.monotonic() + 3600.0
        for path in (self._path, beside(self._path, ".lock")):
            with suppress(OSError):  # a socket that is gone is `lost`
                os.utime(path, follow_symlinks=False)

    def _make_folder(self) -> None:
        make_folder(self._path)
        folder = self._path.parent
        status = folder.stat()
        if self._open_to_others and status.st_uid == os.getuid():
            folder.chmod(status.st_mode | 0o11)

    def _lock(self, undo: ExitStack) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(beside(self._path, ".lock"), flags, 0o600)
        undo.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            whose = f" (pid {pid})" if (pid := listener(self._path)) else ""
            what = f"another server already serves {self._path}{whose}"
            how = "end it, continue it if it is stopped, or name another path"
            raise ConfigError(f"server.socket: {what}; {how}") from None
        self.resets = ResetsFile(lock)

    def _make_way(self) -> None:
        """Remove the socket of a server that is gone, and nothing else: no other file, and no
        socket of another kind on which a program listens. A server that still listens on the socket
        without a lock notices the removal, and ends."""
        try:
            mode = self._path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"server.socket: {self._path} exists and is not a socket, so it stays; remove it, "
                "or name another path"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as asking:
            asking.setblocking(False)
            if asking.connect_ex(str(self._path)) == errno.EPROTOTYPE:
                raise ConfigError(
                    f"server.socket: another program, no metadata server, listens at {self._path}, "
                    "so it stays; name another path"
                )
        self._path.unlink()

    def _bind(self, undo: ExitStack) -> None:
        umask = os.umask(0o177)
        try:
            self.listener.bind(str(self._path))
        finally:
            os.umask(umask)
        self._own = self._path.lstat()
        undo.callback(self._remove)
        if self._open_to_others:
            self._path.chmod(0o666)
        self.listener.listen(256)
        self.listener.setblocking(False)

    def _remove(self) -> None:
        if not self.lost():
            self._path.unlink(missing_ok=True)
