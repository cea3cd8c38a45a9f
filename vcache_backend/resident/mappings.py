"""Other instances as this process opens them, each until one of its processes ends: the generation
table, and the KV cache of one rank.

A KV cache stays mapped as long as anything refers to its `Neighbour`, as a running copy does: to
unmap memory under a copy would kill this process's CUDA context. When an owner ends, a thread drops
its reference, so that the memory becomes free soon; otherwise the owner's restart would fail."""

from __future__ import annotations

import logging
import os
import select
import threading
import time

import numpy as np

from vcache_backend import threads
from vcache_backend.errors import LayoutError, SegmentError, ServerTimeout, VCacheError
from vcache_backend.protocol import sockets
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import CacheShape, ResidentRun
from vcache_backend.resident.own_cache import check_shape
from vcache_backend.vram_pool import host_memory, regions
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.generations import GenerationView

log = logging.getLogger(__name__)

RETRY_SECONDS = 1.0
"""The pause before an instance is tried again that the server refused. After a failure of this
process or a timeout it is 30 times as long."""


class Refusals:
    """Instances that must not be opened, for some time or for good. Any thread."""

    def __init__(self, most: int = 4096) -> None:
        """most: instances to remember; older ones are forgotten. Each restart of an owner is a new
        instance."""
        self._lock, self._most = threading.Lock(), most
        self._until: dict[bytes, float] = {}

    def __contains__(self, instance: bytes) -> bool:
        return time.monotonic() < self._until.get(instance, 0.0)

    def add(self, instance: bytes, seconds: float = float("inf")) -> None:
        """Refuse `instance` for `seconds`; for good by default: names are never reused."""
        with self._lock:
            self._until.pop(instance, None)
            self._until[instance] = time.monotonic() + seconds
            if len(self._until) > self._most:
                del self._until[next(iter(self._until))]

    def failed(self, instance: bytes, error: Exception) -> None:
        """Refuse `instance`, which could not be opened, until trying again may help. Failures of
        the server are logged at debug level only."""
        ours = isinstance(error, LayoutError | SegmentError | OSError)
        pause = RETRY_SECONDS
        if isinstance(error, LayoutError):
            pause = float("inf")
        elif ours or isinstance(error, ServerTimeout):  # a step may have waited for it
            pause = 30 * RETRY_SECONDS
        self.add(instance, pause)
        level = logging.WARNING if ours else logging.DEBUG
        log.log(level, "instance %s cannot be read in place: %s", instance.hex(), error)


class Tables:
    """The generation tables of other instances. Any thread. A table is forgotten once a process of
    its instance has ended.

    refused: the instances that are not opened now."""

    def __init__(self, client: Client) -> None:
        self.refused = Refusals()
        self._client = client
        self._lock = threading.Lock()
        self._views: dict[bytes, tuple[GenerationView, list[int]]] = {}
        """Each table, with a pidfd of each of the instance's processes."""
        self._ends = select.poll()
        """Waits for the ends of these processes."""
        self._looked = 0.0
        self._closed = False

    def view(self, instance: bytes) -> GenerationView | None:
        """Return the table of `instance`; None while the table cannot be opened, once it is dead,
        and at the latest 50 ms after the end of one of the instance's processes. Never raises.

        Takes some microseconds for an open table. A new table takes requests to the server, with a
        deadline each."""
        with self._lock:
            self._forget_ended()
            if instance not in self._views:
                if instance in self.refused or self._closed:
                    return None
                try:
                    self._open(instance)
                except (VCacheError, OSError) as error:
                    self.refused.failed(instance, error)
                    return None
            view, _ = self._views[instance]
            if view.dead:
                self._forget(instance)
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

    # ---- inside, under the lock

    def _open(self, instance: bytes) -> None:
        """Open the table. SegmentError if it belongs to another instance. The server checked the
        pidfds when it got them from their processes."""
        joined, (table, *pidfds) = self._client.open_instance(instance)
        try:
            self._views[instance] = GenerationView(table, instance, joined.blocks), pidfds
        except BaseException:
            sockets.close_fds(pidfds)
            raise
        finally:
            os.close(table)
        for pidfd in pidfds:
            self._ends.register(pidfd, select.POLLIN)

    def _forget_ended(self, pause: float = 0.05) -> None:
        """Forget the tables of ended instances. Looks with one system call, every `pause` s."""
        now = time.monotonic()
        if now < self._looked + pause:
            return
        self._looked = now
        ended = {pidfd for pidfd, _ in self._ends.poll(0)}
        for instance, (_, pidfds) in list(self._views.items()) if ended else ():
            if ended.intersection(pidfds):
                self._forget(instance)

    def _forget(self, instance: bytes) -> None:
        """Forget a table for good."""
        self.refused.add(instance)
        _, pidfds = self._views.pop(instance)
        for pidfd in pidfds:
            self._ends.unregister(pidfd)
        sockets.close_fds(pidfds)


# ---- KV caches


class Neighbour:
    """The KV cache of one rank of another instance, mapped until the last reference to this object
    is dropped. Any thread. Never write to the memory.

    bases: the address of each plane's block 0 in this process. split: the tensors' blocks in a
    block of vLLM. Generations count vLLM's blocks."""

    def __init__(self, shape: CacheShape, view: GenerationView, fd: int, device: Device) -> None:
        """Map the memory behind `fd` for `device`. Raises SegmentError, OSError."""
        self.shape, self.view = shape, view
        self.split = shape.num_blocks // view.blocks
        self._memory: object
        if device.medium == "cuda":
            self._memory = tensor = regions.map_gpu_memory(fd, shape.nbytes, shape.device, device)
            start = tensor.data_ptr()
        else:
            self._memory = array = host_memory.readable(fd, shape.nbytes)
            start = array.ctypes.data
        self.bases: Int64s = start + np.array(shape.planes, dtype=np.int64)
        self.bases.flags.writeable = False


class Neighbours:
    """The KV caches that a worker on `device` can copy into `kv`. Any thread; nothing raises.

    rank: this worker's rank; the worker reads only from the same rank."""

    def __init__(self, client: Client, device: Device, kv: PagedKV, rank: int) -> None:
        self._client, self._device, self._kv, self._rank = client, device, kv, rank
        self._tables = Tables(client)
        self._mapped: dict[bytes, Neighbour] = {}
        self._coming: dict[bytes, float] = {}
        """Instances to be mapped, and until when (time.monotonic) loads wait for them."""
        self._wake, self._closed = threading.Event(), False
        self._thread = threads.start(self._turn, "vcache-neighbours")

    def expects(self, instance: bytes, patience: float = 10.0) -> bool:
        """Whether the KV cache of `instance` is being mapped in another thread, which takes a few
        seconds at most. The first call for an instance starts the mapping; False after `patience`
        seconds."""
        until = self._coming.get(instance)
        if until is None:
            refused = self._closed or instance in self._tables.refused
            if instance in self._mapped or refused:
                return False
            until = self._coming[instance] = time.monotonic() + patience
            self._wake.set()
        return time.monotonic() < until

    def get(self, instance: bytes) -> Neighbour | None:
        """Return the KV cache of `instance`; None while it is being mapped or cannot be read, and
        for good once the owner has ended. Starts the mapping as `expects` does."""
        self.expects(instance)
        return self._mapped.get(instance)

    def close(self, patience: float = 5.0) -> None:
        """Unmap each KV cache after its last copy. Waits `patience` seconds at most for a mapping
        under way. Idempotent."""
        self._closed = True
        self._wake.set()
        self._thread.join(patience)

    # ---- the thread

    def _turn(self) -> bool:
        """Map new KV caches, and drop those of ended owners. Returns whether to end."""
        self._wake.wait(0.1 if self._mapped or self._coming else None)
        self._wake.clear()
        if self._closed:
            self._mapped.clear()
            self._tables.close()
            return True
        for instance in list(self._mapped):
            # Also if that is not known: an owner's restart would fail while it is mapped.
            lives = False
            try:
                lives = self._tables.view(instance) is not None
            finally:
                if not lives:
                    del self._mapped[instance]
                    log.info("instance %s has ended: it is unmapped here", instance.hex())
        for instance in list(self._coming):
            # Also after an error: a load waits while the instance is in `_coming`.
            try:
                self._map(instance)
            except Exception as error:
                self._tables.refused.failed(instance, error)
                if not isinstance(error, VCacheError | OSError):
                    raise
            finally:
                del self._coming[instance]
        return False

    def _map(self, instance: bytes) -> None:
        """Map a KV cache: two requests to the server, then some 10 ms for 40 GiB of a GPU."""
        started = time.perf_counter()
        if (view := self._tables.view(instance)) is None:
            return
        shape, fd = self._client.open_cache(instance, self._rank)
        try:
            check_shape(shape, view.blocks, self._kv, self._device)
            self._mapped[instance] = Neighbour(shape, view, fd, self._device)
        finally:
            # The mapping keeps the memory.
            os.close(fd)
        ms, where = (time.perf_counter() - started) * 1e3, f"{instance.hex()} on {shape.device}"
        log.info("mapped the KV cache of instance %s, in %.1f ms", where, ms)
