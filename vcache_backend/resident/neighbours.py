"""Maps other instances' KV caches into this process as long as their owners live.

When an owner ends, the owner's memory must become free soon, or its restart fails. But unmapping
memory under a running copy would kill this process's CUDA context. So copies are counted: `enter`
before the launch, `leave` after the end. This process has a thread for each owner. When the owner
ends, the thread forbids new copies, and unmaps the memory after the last `leave`."""

from __future__ import annotations

import logging
import mmap
import select
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import NamedTuple

import numpy as np
import torch

from vcache_backend import threads
from vcache_backend.errors import VCacheError
from vcache_backend.protocol import sockets
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import CacheShape
from vcache_backend.resident.own_cache import check_shape
from vcache_backend.resident.tables import RETRY_SECONDS, Refusals, open_instance
from vcache_backend.vram_pool import host_memory, regions
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.generations import GenerationView

log = logging.getLogger(__name__)

MAP_SECONDS = 10.0
"""How long a load waits for a mapping, which takes a few seconds at most."""
CLOSE_SECONDS = 5.0
"""How long `Neighbours.close` waits for running copies."""
LOOK_SECONDS = 0.1
"""How often a thread checks whether a living owner gave its memory up, whether a copy is over, and
for `close`. A thread notices the end of a process at once."""


class Neighbour:
    """The KV cache of one rank of another instance. Any thread.

    bases: the address of each plane's block 0 in this process. Read this memory only between
    `enter` and `leave`, and never write to it. each: vLLM's blocks in a chunk. split: the tensors'
    blocks in a block of vLLM. Generations count vLLM's blocks."""

    def __init__(self, instance: bytes, shape: CacheShape, view: GenerationView, each: int) -> None:
        self.instance, self.shape, self.view, self.each = instance, shape, view, each
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
        """Count the leading chunks whose blocks still have these generations. Both packed as in the
        protocol."""
        return self.view.leading(blocks, generations, self.each)

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
            neighbour = Neighbour(instance, shape, view, joined.each)
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
