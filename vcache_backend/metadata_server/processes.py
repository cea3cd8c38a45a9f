"""Identifies the process at the other end of a Unix socket, and notices its end."""

from __future__ import annotations

import logging
import os
import resource
import secrets
import select
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from vcache_backend.metadata_server.messages import TOKEN_BITS
from vcache_backend.metadata_server.records import ProcessId

log = logging.getLogger(__name__)

SPIN_CORES = 2
"""With fewer cores, a spinning process would take the core from the process it waits for. (Measured
on 2 cores: a look-up takes 24 µs at the median with spinning, 108 µs without.)"""
MANY_CORES = 16
"""With this many cores, spinning is worth a core: it saves each look-up the server's wake-up.
(Measured on a virtual machine of 32 cores with two H200s: 0.02 ms instead of 0.3.)"""


def spin(few: float, many: float) -> float:
    """How long to poll for the next message before sleeping: `few` seconds, `many` with many cores,
    0 with too few."""
    cores = len(os.sched_getaffinity(0))
    return 0.0 if cores < SPIN_CORES else many if cores >= MANY_CORES else few


_EXITING = 4
"""PF_EXITING, a flag in /proc/PID/stat."""


def peer(sock: socket.socket) -> tuple[int, int]:
    """(pid, uid) of the process that connected. pid 0: its pid namespace is not visible here."""
    pid, uid, _gid = struct.unpack(
        "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, uid


def _fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on (see `man proc_pid_stat`); empty if the
    process is gone or hidden. OSError if unreadable now."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def started(pid: int) -> int:
    """When process `pid` began, in ticks since boot; 0 if it is gone or hidden. OSError if
    unreadable now."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def stopped(process: ProcessId) -> bool:
    """Whether a signal or a debugger has stopped the process; False if unknown."""
    return _fields_of(process)[:1] in ([b"T"], [b"t"])


def parent(process: ProcessId) -> int:
    """The pid of the process's parent; 0 if unknown."""
    fields = _fields_of(process)
    return int(fields[1]) if fields else 0


def _fields_of(process: ProcessId) -> list[bytes]:
    """`_fields` of this very process; empty if unknown."""
    try:
        fields = _fields(process.pid)
    except OSError:
        return []
    return fields if fields and int(fields[19]) == process.started else []


def ending(process: ProcessId) -> bool:
    """Whether the process has ended or is about to: its sockets close before its end can be waited
    for. False if unknown."""
    try:
        fields = _fields(process.pid)
    except OSError:
        return False
    if not fields:
        return process.pid != 0 and process.started != 0
    return (
        int(fields[19]) != process.started
        or fields[0] in (b"Z", b"X")
        or bool(int(fields[6]) & _EXITING)
    )


def identity(pid: int, token: int = 0) -> ProcessId:
    """Identify process `pid` for good. A process that is not visible here (pid 0) is identified by
    the token it sent, or by a new one."""
    return (
        ProcessId(pid, started(pid)) if pid else ProcessId(0, token or secrets.randbits(TOKEN_BITS))
    )


def lives(process: ProcessId) -> bool:
    """Whether the process runs; a zombie does not. OSError if unknown."""
    if identity(process.pid) != process:
        return False
    pidfd = open_pidfd(process)
    if pidfd is None:
        return False
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)
    finally:
        os.close(pidfd)


def open_pidfd(process: ProcessId) -> int | None:
    """Open a pidfd, which becomes readable when the process ends; None if the process has ended
    already.

    OSError if the process is not visible, or descriptors are exhausted. It then counts as
    running."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return None
    try:
        same = started(process.pid) == process.started
    except BaseException:
        os.close(pidfd)
        raise
    if same:
        return pidfd
    os.close(pidfd)
    return None


def is_pidfd(fd: int, pid: int) -> bool:
    """Whether `fd` is a pidfd of process `pid`, as far as known (pid 0: not visible; -1: ended by
    now)."""
    for line in Path(f"/proc/self/fdinfo/{fd}").read_bytes().splitlines():
        if line.startswith(b"Pid:"):
            return pid == 0 or int(line.split()[1]) in (pid, -1)
    return False


def namespaces() -> bytes:
    """Identify the meaning of this process's pids and start times: its pid and time namespaces, and
    the boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    here = [os.readlink("/proc/self/ns/pid")]
    with suppress(FileNotFoundError):  # Linux before 5.6
        here.append(os.readlink("/proc/self/ns/time"))
    return f"{' '.join(here)} of boot {boot}\n".encode()


def own_pidfd() -> int | None:
    """A pidfd of this process, for a server in another pid namespace; None if the system has
    none."""
    try:
        return os.pidfd_open(os.getpid())
    except OSError:
        return None


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as allowed. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


class _Process(msgspec.Struct):
    pidfd: int | None
    connections: int = 0
    waited_for: bool = False


class Watch:
    """pidfds of the connected processes, and of processes whose end the server awaits; only the
    latter are in `epoll`."""

    def __init__(self, epoll: select.epoll) -> None:
        self._epoll = epoll
        self._processes: dict[ProcessId, _Process] = {}
        self._waited: dict[int, ProcessId] = {}

    def __contains__(self, fd: int) -> bool:
        """Whether this pidfd's process is awaited."""
        return fd in self._waited

    def joined(self, process: ProcessId, pidfd: int | None) -> None:
        """Count a connection of `process`. Takes over its `pidfd`, if any."""
        watched = self._processes.setdefault(process, _Process(None))
        watched.connections += 1
        if watched.pidfd is None:
            watched.pidfd = pidfd
        elif pidfd is not None:
            os.close(pidfd)

    def pidfd(self, process: ProcessId) -> int | None:
        """Open a new pidfd of a connected process for the caller; None if the process has ended, or
        sent none and is not visible. OSError: descriptors are exhausted."""
        watched = self._processes.get(process)
        if watched is not None and watched.pidfd is not None:
            return os.dup(watched.pidfd)
        return open_pidfd(process) if process.pid else None

    def left(self, process: ProcessId) -> None:
        """Count a closed connection of the process. Its pidfd is kept until the next `wait_for`."""
        self._processes[process].connections -= 1

    def wait_for(self, wanted: set[ProcessId]) -> list[ProcessId]:
        """Await the ends of these processes. Returns the ones that have ended already. Forgets
        other processes without connections."""
        for process in [
            p
            for p, watched in self._processes.items()
            if not watched.connections and p not in wanted
        ]:
            self._forget(process)
        gone = []
        for process in wanted:
            watched = self._processes.setdefault(process, _Process(None))
            if watched.pidfd is None and process.pid:
                try:
                    watched.pidfd = open_pidfd(process)
                except OSError as error:
                    log.debug("pid %d cannot be watched now: %s", process.pid, error)
                    continue
                if watched.pidfd is None:
                    gone.append(process)
            if watched.pidfd is not None and not watched.waited_for:
                self._epoll.register(watched.pidfd, select.EPOLLIN)
                self._waited[watched.pidfd], watched.waited_for = process, True
        return gone

    def ended(self, pidfd: int) -> ProcessId:
        """The process of a readable `pidfd`, which has ended."""
        process = self._waited.pop(pidfd)
        self._epoll.unregister(pidfd)
        self._processes[process].waited_for = False
        return process

    def close(self) -> None:
        """Close all pidfds."""
        for process in list(self._processes):
            self._forget(process)

    def _forget(self, process: ProcessId) -> None:
        pidfd = self._processes.pop(process).pidfd
        if pidfd is None:
            return
        if self._waited.pop(pidfd, None) is not None:
            # Closing does not unregister a pidfd, since its sender may hold the same open file.
            self._epoll.unregister(pidfd)
        os.close(pidfd)
