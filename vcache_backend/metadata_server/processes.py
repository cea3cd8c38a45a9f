"""The clients' processes: who they are, when they end, and the fds that the server keeps."""

from __future__ import annotations

import errno
import logging
import os
import resource
import secrets
import select
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue

import msgspec

from vcache_backend import threads
from vcache_backend.protocol.messages import Medium, Reads, Reply, SegmentId

log = logging.getLogger(__name__)


class ProcessId(msgspec.Struct, frozen=True):
    """Identifies a process although pids are reused: its pid and start time in ticks since boot
    (field 22 of /proc/PID/stat). In another pid namespace: 0 and a random number."""

    pid: int
    started: int


class Peer(msgspec.Struct):
    """A client's connection, `id` by number.

    From the hello: the client's process, the process's parent and `processes.spawner`, the
    preferred device, the instance's name and layout (empty for tools). From later messages:
    segments that the client cannot map, its reads, whether it has looked tokens up, its
    `Promise.chunk_seconds`; the bytes that it is about to allocate for the pool, and until when it
    may; `heard`: when its last message came (monotonic clock)."""

    id: int
    process: ProcessId
    device: str
    medium: Medium
    name: str = ""
    parent: int = 0
    spawner: int = 0
    layout: dict[str, str] = {}
    avoids: set[SegmentId] = msgspec.field(default_factory=set)
    reads: list[Reads] = []
    asked: bool = False
    chunk_seconds: float = 0.0
    claimed: int = 0
    claims_until: float = 0.0
    heard: float = msgspec.field(default_factory=time.monotonic)

    @property
    def namespace(self) -> str:
        return self.layout.get("namespace", "")

    @property
    def prefix(self) -> bytes:
        """Of the namespace's keys; empty for tools."""
        try:
            return bytes.fromhex(self.namespace)
        except ValueError:
            return b""


@cache
def closing() -> SimpleQueue[int]:
    """Fds that a thread closes for the server's loop: closing the last fd of a memory frees it, in
    a quarter of a second a GiB of host memory. RuntimeError if there are too many threads."""
    fds = SimpleQueue[int]()

    def turn() -> None:
        with suppress(OSError):  # of the file's own flush: the fd is closed all the same
            os.close(fds.get())

    threads.start(turn, "vcache-closer")
    return fds


class Descriptor:
    """An open file, closed soon after the last user, a table or an unsent answer, drops it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._closing = closing()

    def __del__(self) -> None:
        self._closing.put(self.fd)


Answer = tuple[Reply, Sequence[Descriptor]]
"""A reply, and the owners of its fds."""


def _fields(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on (see `man proc_pid_stat`); empty if the
    process is gone or hidden. OSError if unreadable now."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def started(pid: int) -> int:
    """When `pid` began, in ticks since boot; 0 if gone or hidden. OSError if unreadable now."""
    fields = _fields(pid)
    return int(fields[19]) if fields else 0


def stopped(process: ProcessId) -> bool:
    """Whether a signal or a debugger has stopped the process; False if unknown."""
    return _fields_of(process)[:1] in ([b"T"], [b"t"])


def parent(process: ProcessId) -> int:
    fields = _fields_of(process)
    return int(fields[1]) if fields else 0


def spawner(process: ProcessId) -> int:
    """The parent, if it runs the same executable: the Python that started this Python, as vLLM's
    API server starts its engine. 0 for other parents, such as a shell, and if unknown."""
    pid = parent(process)
    with suppress(OSError):
        if os.path.samefile(f"/proc/{pid}/exe", f"/proc/{process.pid}/exe"):
            return pid
    return 0


def _fields_of(process: ProcessId) -> list[bytes]:
    """`_fields` of this very process; empty if unknown."""
    try:
        fields = _fields(process.pid)
    except OSError:
        return []
    return fields if fields and int(fields[19]) == process.started else []


def identity(pid: int, token: int = 0) -> ProcessId:
    """Identify process `pid` for good. An invisible process (pid 0) is identified by the token that
    it sent, or by a new token."""
    return ProcessId(pid, started(pid)) if pid else ProcessId(0, token or secrets.randbits(63))


def lives(process: ProcessId) -> bool:
    """Whether the process runs; a zombie does not. False if unknown."""
    return _fields_of(process)[:1] not in ([], [b"Z"], [b"X"])


def namespaces() -> bytes:
    """The scope of this process's pids and start times: pid and time namespaces, and the boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    scope = [os.readlink("/proc/self/ns/pid")]
    with suppress(FileNotFoundError):  # Linux before 5.6
        scope.append(os.readlink("/proc/self/ns/time"))
    return f"{' '.join(scope)} of boot {boot}\n".encode()


def raise_descriptor_limit() -> int:
    """Raise this process's limit of descriptors as far as allowed. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft != resource.RLIM_INFINITY else sys.maxsize


def is_exhausted(error: OSError) -> bool:
    """Whether the error says that no descriptors are left, in this process or on this machine."""
    return error.errno in (errno.EMFILE, errno.ENFILE)


class Watch:
    """The pidfds of connected processes, and of processes whose end the server awaits."""

    def __init__(self) -> None:
        self._pidfds: dict[ProcessId, Descriptor] = {}

    def keep(self, process: ProcessId, pidfd: Descriptor) -> None:
        """Keep the pidfd that a process has sent, as long as calls of `ended` name the process."""
        self._pidfds.setdefault(process, pidfd)

    def pidfd(self, process: ProcessId) -> Descriptor | None:
        """A pidfd of the process; None if the process has ended, or sent none and is not visible.
        OSError: descriptors are exhausted."""
        pidfd = self._pidfds.get(process)
        if pidfd is None and process.pid:
            with suppress(ProcessLookupError):
                opened = Descriptor(os.pidfd_open(process.pid))
                if started(process.pid) == process.started:  # else the pid was given to another one
                    pidfd = self._pidfds[process] = opened
        return pidfd

    def ended(self, wanted: set[ProcessId], connected: set[ProcessId]) -> list[ProcessId]:
        """Which of the `wanted` processes have ended. Forgets all other unconnected processes."""
        for process in self._pidfds.keys() - connected - wanted:
            del self._pidfds[process]
        gone, watched, poll = list[ProcessId](), dict[int, ProcessId](), select.poll()
        for process in wanted:
            try:
                pidfd = self.pidfd(process)
            except OSError as error:
                log.debug("pid %d cannot be watched now: %s", process.pid, error)
                continue
            if pidfd is not None:
                watched[pidfd.fd] = process
                poll.register(pidfd.fd, select.POLLIN)
            elif process.pid:
                gone.append(process)
        return gone + [watched[fd] for fd, _ in poll.poll(0)]
