"""Other instances as this process opens them, each until its processes end: the generation table,
and the KV cache of one rank.

When an owner ends, the owner's memory must become free soon, or its restart fails. But unmapping
memory under a running copy would kill this process's CUDA context. So copies are counted: `enter`
before the launch, `leave` after the end. This process has a thread for each owner. When the owner
ends, the thread forbids new copies, and unmaps the memory after the last `leave`."""

from __future__ import annotations

import logging
import mmap
import os
import select
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import numpy as np
import torch

from vcache_backend import threads
from vcache_backend.errors import LayoutError, SegmentError, ServerTimeout, VCacheError
from vcache_backend.protocol import sockets
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import CacheShape, Joined, ResidentRun
from vcache_backend.resident.own_cache import check_shape
from vcache_backend.vram_pool import host_memory, regions
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.devices import Device
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
MAP_SECONDS = 10.0
"""How long a load waits for a mapping, which takes a few seconds at most."""
CLOSE_SECONDS = 5.0
"""How long `Neighbours.close` waits for running copies."""
LOOK_SECONDS = 0.1
"""How often a thread checks whether a living owner gave its memory up, whether a copy is over, and
for `close`. A thread notices the end of a process at once."""


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

    def leading(self, run: ResidentRun) -> int:
        """Count the leading blocks of the run that are unchanged now; 0 while the table cannot be
        opened. See `view`."""
        view = self.view(run.instance) if run.fits() else None
        return 0 if view is None else view.leading(run.blocks, run.generations)

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


# ---- KV caches


class Neighbour:
    """The KV cache of one rank of another instance. Any thread.

    bases: the address of each plane's block 0 in this process. Read this memory only between
    `enter` and `leave`, and never write to it. split: the tensors' blocks in a block of vLLM.
    Generations count vLLM's blocks."""

    def __init__(self, instance: bytes, shape: CacheShape, view: GenerationView) -> None:
        self.instance, self.shape, self.view = instance, shape, view
        self.split = shape.num_blocks // view.blocks
        self.bases: Int64s = np.zeros(0, dtype=np.int64)
        self._lock = threading.Lock()
        self._launches, self._forbidden = 0, False
        self._mapped: list[mmap.mmap | torch.Tensor] = []

    def enter(self) -> bool:
        """Announce a copy out of this KV cache, which then stays mapped until `leave`. False if the
        owner has ended: do not launch the copy."""
        with self._lock:
            self._launches += not self._forbidden
            return not self._forbidden

    def right(self, blocks: bytes, generations: bytes) -> int:
        """Count the leading blocks that still have these generations. Both packed as in the
        protocol."""
        return self.view.leading(blocks, generations)

    def leave(self) -> None:
        """Report that a copy is over and its generations were checked: once for each `enter` that
        returned True. Never waits for the device."""
        with self._lock:
            self._launches -= 1

    # ---- of the owner's thread

    def map(self, fds: Sequence[int], device: Device) -> None:
        """Map the regions for `device`, and compute `bases`. Raises SegmentError, OSError."""
        for fd, nbytes in zip(fds, self.shape.regions, strict=True):
            if device.medium == "cuda":
                self._mapped.append(regions.map_gpu_memory(fd, nbytes, self.shape.device, device))
            else:
                # The check proves the size, and the memory cannot shrink, so no read raises SIGBUS.
                host_memory.check(fd, nbytes)
                mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self._mapped.append(mapping)
        addresses = [_address(held) for held in self._mapped]
        self.bases = np.array(
            [addresses[region] + offset for region, offset in self.shape.planes], dtype=np.int64
        )
        self.bases.flags.writeable = False

    def unmap(self) -> bool:
        """Forbid new copies, and unmap the memory. While a copy runs, unmaps nothing and returns
        False. May wait for the device."""
        with self._lock:
            self._forbidden = True
            idle = not self._launches
        if idle:
            self._mapped.clear()
        return idle


class _BeingMapped(NamedTuple):
    """An instance that is being mapped. until: loads do not wait longer for it."""

    thread: threading.Thread
    until: float


class Neighbours:
    """The KV caches that a worker on `device` can copy into `kv`. Any thread; nothing raises.

    rank: this worker's rank; the worker reads only from the same rank."""

    def __init__(self, client: Client, device: Device, kv: PagedKV, rank: int) -> None:
        self._client, self._device, self._kv, self._rank = client, device, kv, rank
        self._here: dict[bytes, Neighbour] = {}
        self._coming: dict[bytes, _BeingMapped] = {}
        self._refused = Refusals()
        self._threads: list[threading.Thread] = []
        self._closed = False

    def expects(self, instance: bytes) -> bool:
        """Whether the KV cache of `instance` is being mapped in another thread. The first call for
        an instance starts the mapping.

        Mapping takes a few seconds at most."""
        if instance in self._here:
            return False
        if (coming := self._coming.get(instance)) is not None:
            if coming.thread.ident is None or coming.thread.is_alive():
                return time.monotonic() < coming.until
            # Its thread has ended without a word.
            self._refused.add(instance, RETRY_SECONDS)
            self._coming.pop(instance, None)
        if instance in self._refused or self._closed:
            return False
        name = "vcache-neighbours"
        thread = threading.Thread(target=self._run, args=(instance,), name=name, daemon=True)
        self._coming[instance] = _BeingMapped(thread, time.monotonic() + MAP_SECONDS)
        with suppress(RuntimeError):  # there are too many threads
            thread.start()
            self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
            return True
        self._coming.pop(instance, None)
        return False

    def get(self, instance: bytes) -> Neighbour | None:
        """Return the KV cache of `instance`; None while it is being mapped or cannot be read, and
        for good once the owner has ended. Starts the mapping as `expects` does."""
        self.expects(instance)
        return self._here.get(instance)

    def close(self) -> None:
        """Unmap each KV cache after its last copy. Waits at most `CLOSE_SECONDS`. Idempotent."""
        self._closed = True
        until = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            log.warning("other instances' KV caches stay mapped until their last copy is over")

    # ---- the thread of one owner

    def _run(self, instance: bytes) -> None:
        """Map a KV cache: two requests to the server, then some 10 ms for 40 GiB of a GPU. Unmap it
        when the owner has ended, or at `close`.

        After a failure `expects` tries again later; never if the KV cache has another layout."""
        what = "mapping another instance's KV cache, which is tried again later"
        with threads.survives(what):
            try:
                with ExitStack() as undo:
                    self._serve(instance, undo)
            except (VCacheError, OSError) as error:
                self._refused.failed(instance, error)
            except BaseException:
                self._refused.add(instance, RETRY_SECONDS)
                raise
        # A load waits while the instance is in `_coming`.
        self._coming.pop(instance, None)

    def _serve(self, instance: bytes, undo: ExitStack) -> None:
        started = time.perf_counter()
        joined, view, pidfds = open_instance(self._client, instance)
        undo.callback(sockets.close_fds, pidfds)
        shape, fds = self._client.open_cache(instance, self._rank)
        try:
            check_shape(shape, joined.blocks, self._kv, self._device)
            neighbour = Neighbour(instance, shape, view)
            undo.callback(_unmap, neighbour)
            neighbour.map(fds, self._device)
        finally:
            # Mappings keep the memory.
            sockets.close_fds(fds)
        undo.callback(self._forget, instance)
        self._here[instance] = neighbour
        self._coming.pop(instance, None)
        ms, where = (time.perf_counter() - started) * 1e3, f"{instance.hex()} on {shape.device}"
        log.info("mapped the KV cache of instance %s, in %.1f ms", where, ms)
        ends = select.poll()
        for pidfd in pidfds:
            ends.register(pidfd, select.POLLIN)
        while not (self._closed or view.dead or ends.poll(LOOK_SECONDS * 1000)):
            pass

    def _forget(self, instance: bytes) -> None:
        self._refused.add(instance)
        self._here.pop(instance, None)
        if not self._closed:
            log.info("instance %s has ended: it is unmapped here", instance.hex())


def _unmap(neighbour: Neighbour) -> None:
    def turn() -> bool:
        if neighbour.unmap():
            return True
        time.sleep(LOOK_SECONDS)
        return False

    threads.repeat(turn, "unmapping another instance's KV cache")


def _address(held: mmap.mmap | torch.Tensor) -> int:
    if isinstance(held, torch.Tensor):
        return held.data_ptr()
    return int(np.frombuffer(held, dtype=np.uint8).ctypes.data)
