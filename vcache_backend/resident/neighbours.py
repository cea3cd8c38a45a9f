"""Maps other instances' KV caches into this process as long as their owners live.

When an owner ends, its memory must become free soon, or the owner's restart fails. But unmapping
memory under a running copy would kill this process's CUDA context. So copies are counted: `enter`
before the launch, `leave` after the end. When an owner ends, new copies are forbidden, and a thread
unmaps the memory after the last `leave`."""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import numpy as np
import torch

from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server import wire
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import CacheShape
from vcache_backend.resident.generations import GenerationView
from vcache_backend.resident.own_cache import check_shape
from vcache_backend.resident.tables import Refusals, open_instance
from vcache_backend.resident.unmapper import Unmapper
from vcache_backend.vram_pool import cuda_segment, host_segment
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.paged import Int64s, PagedKV

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""How long `Neighbours.close` waits for running copies."""


class Neighbour:
    """The KV cache of one rank of another instance. Any thread.

    bases: the address of each plane's block 0 in this process. Read that memory only between
    `enter` and `leave`, and never write it. each: vLLM's blocks in a chunk. split: the tensors'
    blocks in a block of vLLM. Generations count vLLM's blocks."""

    def __init__(self, instance: bytes, shape: CacheShape, view: GenerationView, each: int) -> None:
        self.instance, self.shape, self.view, self.each = instance, shape, view, each
        self.split = shape.num_blocks // view.blocks
        self.bases: Int64s = np.zeros(0, dtype=np.int64)
        self._lock = threading.Lock()
        self._launches, self._forbidden = 0, False
        self._mapped: list[mmap.mmap | torch.Tensor] = []

    def enter(self) -> bool:
        """Announce a copy out of this KV cache, which stays mapped until `leave`. False if the
        owner has ended: do not launch the copy."""
        with self._lock:
            self._launches += not self._forbidden
            return not self._forbidden

    def leave(self) -> None:
        """Report that a copy is over and its generations were checked. Call it once for each
        `enter` that returned True. Never waits for the device."""
        with self._lock:
            self._launches -= 1

    # ---- of Neighbours and its thread

    def map(self, fds: Sequence[int], device: Device) -> None:
        """Map the regions for `device`, and compute `bases`. Raises SegmentError, OSError."""
        for fd, nbytes in zip(fds, self.shape.regions, strict=True):
            if device.medium == "cuda":
                self._mapped.append(cuda_segment.map_fd(fd, nbytes, self.shape.device, device))
            else:
                # The memory has this size and cannot shrink, so no read raises SIGBUS.
                host_segment.check(fd, nbytes)
                mapping = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
                self._mapped.append(mapping)
        addresses = [_address(held) for held in self._mapped]
        self.bases = np.array(
            [addresses[region] + offset for region, offset in self.shape.planes], dtype=np.int64
        )
        self.bases.flags.writeable = False

    def forbid(self) -> None:
        with self._lock:
            self._forbidden = True

    def unmap(self) -> bool:
        """Unmap the memory, after `forbid`. False, and nothing is unmapped, while a copy runs. May
        wait for the device."""
        with self._lock:
            idle = not self._launches
        if idle:
            self._mapped.clear()
        return idle


class Neighbours:
    """The KV caches that a worker on `device` can copy into `kv`. Any thread; nothing raises.

    rank: this worker's rank; the worker reads only from the same rank. A thread waits for the
    owners' processes to end."""

    def __init__(self, client: Client, device: Device, kv: PagedKV, rank: int) -> None:
        self._client, self._device, self._kv, self._rank = client, device, kv, rank
        self._here: dict[bytes, Neighbour] = {}
        self._coming: set[bytes] = set()
        self._refused = Refusals()
        self._unmapper = Unmapper(self._ended)
        self._mapper = ThreadPoolExecutor(1, "vcache-neighbours-mapper")

    def expects(self, instance: bytes) -> bool:
        """Whether the KV cache of `instance` is being mapped in another thread. The first call for
        an instance starts the mapping.

        Mapping takes a few seconds at most."""
        if instance in self._coming:
            return True
        if instance in self._here or instance in self._refused or self._unmapper.closed:
            return False
        self._coming.add(instance)
        with suppress(RuntimeError):  # closed
            self._mapper.submit(self._map, instance)
            return True
        self._coming.discard(instance)
        return False

    def get(self, instance: bytes) -> Neighbour | None:
        """Return the KV cache of `instance`; None while it is being mapped or cannot be read, and
        for good once its owner has ended. Starts the mapping as `expects` does."""
        self.expects(instance)
        return self._here.get(instance)

    def close(self) -> None:
        """Unmap each KV cache after its last copy. Waits at most `CLOSE_SECONDS`. Idempotent."""
        self._unmapper.close(CLOSE_SECONDS)
        self._mapper.shutdown(wait=False)

    # ---- inside

    def _map(self, instance: bytes) -> None:
        """Map a KV cache: two requests to the server, then some 10 ms for 40 GiB of a GPU. After a
        failure `expects` tries again later; never if the KV cache has another layout."""
        try:
            if instance not in self._here:
                self._open(instance)
        except (VCacheError, OSError) as error:
            self._refused.failed(instance, error)
        # the thread's last line of defence; a load waits until it is no longer in `_coming`
        except Exception:
            self._refused.add(instance)
            log.exception("the KV cache of instance %s is not read in place", instance.hex())
        finally:
            self._coming.discard(instance)

    def _open(self, instance: bytes) -> None:
        started = time.perf_counter()
        with ExitStack() as undo:
            joined, view, pidfds = open_instance(self._client, instance)
            undo.callback(wire.close_fds, pidfds)
            shape, fds = self._client.open_cache(instance, self._rank)
            try:
                check_shape(shape, joined.blocks, self._kv, self._device)
                neighbour = Neighbour(instance, shape, view, joined.each)
                # Added before `admit`, after which the owner's end may call `_ended`.
                undo.callback(self._forget, neighbour)
                neighbour.map(fds, self._device)
            finally:
                # Each mapping keeps its memory.
                wire.close_fds(fds)
            self._here[instance] = neighbour
            if not self._unmapper.admit(neighbour, pidfds):
                return
            undo.pop_all()
        ms, where = (time.perf_counter() - started) * 1e3, f"{instance.hex()} on {shape.device}"
        log.info("mapped the KV cache of instance %s, in %.1f ms", where, ms)

    def _forget(self, neighbour: Neighbour) -> None:
        self._here.pop(neighbour.instance, None)
        neighbour.forbid()
        neighbour.unmap()

    def _ended(self, neighbour: Neighbour) -> None:
        """Forget a neighbour whose owner has ended. The unmapper calls this in its thread."""
        self._refused.add(neighbour.instance)
        self._here.pop(neighbour.instance, None)
        if not self._unmapper.closed:
            log.info("instance %s has ended: it is unmapped here", neighbour.instance.hex())


def _address(held: mmap.mmap | torch.Tensor) -> int:
    if isinstance(held, torch.Tensor):
        return held.data_ptr()
    return int(np.frombuffer(held, dtype=np.uint8).ctypes.data)
