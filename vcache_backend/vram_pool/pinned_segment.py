"""Segments in host memory whose pages are allocated and locked, so that a GPU of this process can
read and write them in place.

Each segment is registered with the driver in steps. A kernel may cross from one step's memory to
the next, but the driver's own copies may not, so only kernels copy slots. The registration ends
with the mapping."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import time
import weakref
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import torch

from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import cuda_driver, devices, host_segment
from vcache_backend.vram_pool.cuda_driver import Driver, DriverError

SPARE_BYTES = 1 << 30
"""The bytes of host memory that stay free beside a new segment."""
GROW_SECONDS = 20.0
"""How long to wait for more host memory: a virtual machine may grow only as memory is used."""
_STEP_BYTES = 256 << 20
"""Bytes that are allocated and locked at a time. Locking takes some 50 ms, in which the driver lets
no thread launch work."""
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def allocate(name: str, nbytes: int) -> int:
    """Like `host_segment.allocate`, with all pages allocated, in some 0.3 s a GiB. Other threads go
    on.

    SegmentError if less than `SPARE_BYTES` would be left after `GROW_SECONDS`; OSError."""
    with ExitStack() as undo:
        fd = host_segment.allocate(name, nbytes)
        undo.callback(os.close, fd)
        for at in range(0, nbytes, _STEP_BYTES):
            size = min(_STEP_BYTES, nbytes - at)
            _wait_for_room(size)
            with mmap.mmap(fd, size, offset=at) as part:
                _populate(np.frombuffer(part, dtype=np.uint8).ctypes.data, size)
        undo.pop_all()
        return fd


def _wait_for_room(nbytes: int) -> None:
    until = time.monotonic() + GROW_SECONDS
    while (available := devices.host_available()) < nbytes + SPARE_BYTES:
        if time.monotonic() > until:
            free = f"{available:,} B of host memory are available"
            stay = f"{SPARE_BYTES:,} of them stay free"
            raise SegmentError(f"{free}, and {stay}; set pool.segment_bytes lower")
        time.sleep(0.1)


def map_fd(fd: int, nbytes: int, ordinal: int, step: int = 0) -> torch.Tensor:
    """Like `host_segment.map_fd`, and registers the memory with the driver: GPU `ordinal` uses the
    same address.

    Takes some 0.2 s a GiB, in steps of `step` bytes, or of `_STEP_BYTES`. A thread that launches
    work on a GPU waits for one step at most; other threads do not wait. The mapping lasts as long
    as the tensor or a view of the tensor; unmapping waits for the GPU's work. Raises SegmentError,
    which says what to change."""
    host_segment.check(fd, nbytes)
    unallocated = nbytes - 512 * os.fstat(fd).st_blocks
    if unallocated > 0 and (available := devices.host_available()) < SPARE_BYTES + unallocated:
        free = f"{available:,} B of host memory are available"
        raise SegmentError(f"{unallocated:,} B of it are not allocated yet, and {free}")
    driver, step = cuda_driver.load(), step or _STEP_BYTES
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    held = np.frombuffer(memory, dtype=np.uint8)
    with ExitStack() as undo:
        context = driver.retain(ordinal)
        undo.callback(driver.release_context, ordinal)
        with driver.current(context), ExitStack() as registered:
            for at in range(0, nbytes, step):
                address, size = held.ctypes.data + at, min(step, nbytes - at)
                # Allocate first, so that the driver holds its own lock only while it locks the
                # pages.
                _populate(address, size)
                _register(driver, ordinal, address, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
                registered.callback(driver.unregister, address)
            undo.callback(driver.end, context, registered.pop_all(), "host memory stays locked")
        # The array keeps the mapping, so the finalizer runs before the memory is unmapped. At exit
        # the driver frees all memory by itself.
        weakref.finalize(held, undo.pop_all().close).atexit = False
    return torch.from_numpy(held)


def _register(driver: Driver, ordinal: int, address: int, nbytes: int) -> None:
    try:
        driver.register(address, nbytes)
    except DriverError as error:
        raise SegmentError(
            f"the driver cannot lock {nbytes:,} B of host memory: {error}; {_advice()}"
        ) from error
    with ExitStack() as undo:
        undo.callback(driver.unregister, address)
        if driver.on_device(address) != address:
            raise SegmentError(f"GPU {ordinal} has host memory elsewhere; set pool.device: auto")
        undo.pop_all()


def move_near(ordinal: int) -> None:
    """Move this thread to the CPUs near the GPU, if the process may use them: pages that the thread
    allocates then lie on the GPU's NUMA node."""
    with suppress(OSError, ValueError, SegmentError):
        cpus = (
            Path("/sys/bus/pci/devices") / cuda_driver.load().bus(ordinal) / "local_cpulist"
        ).read_text()
        ranges = [part.partition("-") for part in cpus.strip().split(",")]
        near = {
            cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)
        }
        if allowed := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, allowed)


def _populate(address: int, nbytes: int) -> None:
    """Allocate all pages of a mapping. If the system gives large pages on request (`shmem_enabled:
    advise`), the pages are large, and locking is faster.

    Calls C's `madvise`, since Python's would hold the interpreter's lock. OSError."""
    where, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    _libc.madvise(where, size, mmap.MADV_HUGEPAGE)
    if _libc.madvise(where, size, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:  # Linux before 5.14, where pages are allocated as they are used
        raise OSError(code, f"{nbytes:,} B of host memory: {os.strerror(code)}")


def _advice() -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = f"raise the limit of locked memory (ulimit -l, here {soft >> 10:,} KiB), or "
    limit = "" if soft == resource.RLIM_INFINITY else limit
    return f"{limit}set pool.segment_bytes or offload.staging_bytes lower"
