"""Opens each generation table of another instance once, and remembers unreadable tables."""

from __future__ import annotations

import logging
import os
import select
import threading
import time

from vcache_backend.errors import LayoutError, SegmentError, ServerTimeout, VCacheError
from vcache_backend.protocol import sockets
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import Found, Joined, ResidentRun
from vcache_backend.vram_pool.generations import GenerationView

log = logging.getLogger(__name__)

ENDS_SECONDS = 0.05
"""How often to look for ended schedulers, with one system call for all tables."""
RETRY_SECONDS, LONGEST_SECONDS = 1.0, 300.0
"""The first and the longest pause before an instance is tried again. After a failure of this
process or a timeout, each pause is twice as long as the last pause."""
MAX_REFUSED = 4096
"""The most instances remembered as unusable; older instances are forgotten. Each restart of an
owner is a new instance."""


class Refusals:
    """Instances that must not be opened, for some time or for good. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._until: dict[bytes, tuple[float, float]] = {}
        """For each instance the end of the pause, and the pause's seconds."""

    def __contains__(self, instance: bytes) -> bool:
        until, _ = self._until.get(instance, (0.0, 0.0))
        return time.monotonic() < until

    def add(self, instance: bytes, seconds: float = float("inf")) -> None:
        """Refuse `instance` for `seconds`; for good by default: names are never reused."""
        with self._lock:
            self._until.pop(instance, None)
            self._until[instance] = time.monotonic() + seconds, seconds
            if len(self._until) > MAX_REFUSED:
                del self._until[next(iter(self._until))]

    def failed(self, instance: bytes, error: Exception) -> None:
        """Refuse `instance`, which could not be opened, until trying again may help. Failures of
        the server are logged at debug level only."""
        _, before = self._until.get(instance, (0.0, 0.0))
        ours = isinstance(error, LayoutError | SegmentError | OSError)
        pause = RETRY_SECONDS
        if isinstance(error, LayoutError):
            pause = float("inf")
        elif ours or isinstance(error, ServerTimeout):  # a step may have waited for it
            pause = max(RETRY_SECONDS, min(2 * before, LONGEST_SECONDS))
        self.add(instance, pause)
        level = logging.WARNING if ours else logging.DEBUG
        log.log(level, "instance %s cannot be read in place: %s", instance.hex(), error)


class Tables:
    """The generation tables of other instances. Any thread. A table is forgotten once the
    scheduler's process has ended."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._views: dict[bytes, tuple[GenerationView, int]] = {}
        """Each table, with a pidfd of its scheduler."""
        self._refused = Refusals()
        self._ends = select.poll()
        """Waits for the ends of the schedulers."""
        self._looked = 0.0
        self._closed = False

    def view(self, instance: bytes) -> GenerationView | None:
        """Return the table of `instance`; None while the table cannot be opened, once it is dead,
        and at the latest `ENDS_SECONDS` after the scheduler's end. Never raises.

        Takes some microseconds for an open table. A new table takes requests to the server, with a
        deadline each."""
        with self._lock:
            self._forget_ended()
            if instance not in self._views:
                if instance in self._refused or self._closed:
                    return None
                try:
                    _, view, (pidfd, *others) = open_instance(self._client, instance)
                except (VCacheError, OSError) as error:
                    self._refused.failed(instance, error)
                    return None
                sockets.close_fds(others)
                self._views[instance] = view, pidfd
                self._ends.register(pidfd, select.POLLIN)
            view, _ = self._views[instance]
            return None if view.dead else view

    def unchanged(self, found: Found, each: int, first: int) -> tuple[int, list[ResidentRun]]:
        """Choose the chunks to load from an answer's copies, whose order is random. Returns the
        number of leading chunks, and the runs to read in place. each: blocks of a chunk. first: the
        number of the answer's first chunk.

        Takes a chunk that no copy has unchanged from the pool. Checks only a chunk's last block,
        which vLLM frees first: the load checks all blocks."""
        runs, chunk = list[ResidentRun](), 0
        while chunk < len(found.pooled):
            for run in found.residents:
                if run.first <= chunk < run.stop and run.fits(each):
                    view, packs = self.view(run.instance), (run.blocks, run.generations)
                    if view and (count := view.leading_ends(*packs, each, chunk - run.first)):
                        runs.append(run.cut(chunk, chunk + count).numbered(first + chunk))
                        chunk += count
                        break
            else:
                if not found.pooled[chunk]:
                    break
                chunk += 1
        return chunk, runs

    def close(self) -> None:
        """Forget all tables. Views that callers hold stay usable. Idempotent."""
        with self._lock:
            self._closed = True
            while self._views:
                self._forget(next(iter(self._views)))

    def _forget_ended(self) -> None:
        """Forget the tables of schedulers that have ended. Called under the lock."""
        now = time.monotonic()
        if now < self._looked + ENDS_SECONDS:
            return
        self._looked = now
        for ended, _ in self._ends.poll(0):
            instance = next(name for name, (_, pidfd) in self._views.items() if pidfd == ended)
            self._forget(instance)
            self._refused.add(instance)

    def _forget(self, instance: bytes) -> None:
        """Called under the lock."""
        _, pidfd = self._views.pop(instance)
        self._ends.unregister(pidfd)
        os.close(pidfd)


def open_instance(client: Client, instance: bytes) -> tuple[Joined, GenerationView, list[int]]:
    """Open `instance`: return the server's description, the generation table, and pidfds of the
    scheduler and of each rank. The caller closes the pidfds.

    Raises SegmentError if the table belongs to another instance, OSError, and the client's errors.
    The server checked the pidfds when it got them from their processes."""
    joined, (table, *pidfds) = client.open_instance(instance)
    try:
        return joined, GenerationView.open(table, instance, joined.blocks), pidfds
    except BaseException:
        sockets.close_fds(pidfds)
        raise
    finally:
        os.close(table)
