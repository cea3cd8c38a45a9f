"""Memory of segments in host memory: sealed memfds. If a GPU of this process reads them in place,
their pages are allocated and locked.

Locked memory is registered with the driver in steps. A kernel may cross from one step's memory to
the next, but the driver's own copies may not, so only kernels copy slots."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vcache_backend.errors import SegmentError
from vcache_backend.seals import lacking, sealed
from vcache_backend.vram_pool import cuda_driver, devices
from vcache_backend.vram_pool.cuda_driver import Driver, DriverError

SPARE_BYTES = 1 << 30
"""The bytes of host memory that stay free beside a new segment."""
_STEP_BYTES = 256 << 20
"""Bytes that are allocated and locked at a time. Locking takes some 50 ms, in which the driver lets
no thread launch work."""
_MADV_POPULATE_WRITE = 23
"""In Linux since 5.14; not in Python's mmap."""
_libc = ctypes.CDLL(None, use_errno=True)


def allocate(name: str, nbytes: int, *, populated: bool = False) -> int:
    """A sealed memfd of `nbytes` zero bytes, closed on exec. The caller closes the memfd. OSError.

    The first write to a page allocates the page, so a segment larger than the machine's memory
    fails in use, not here (`vcache doctor` compares both sizes). populated: allocate all pages now,
    in some 0.3 s a GiB, while other threads go on; SegmentError if less than `SPARE_BYTES` would be
    left after 20 s."""
    with ExitStack() as undo:
        fd, memory = sealed(name, nbytes)
        undo.callback(os.close, fd)
        with memory:
            for at in range(0, nbytes if populated else 0, _STEP_BYTES):
                size = min(_STEP_BYTES, nbytes - at)
                _wait_for_room(size)
                _populate_large(address_of(memory) + at, size)
        undo.pop_all()
        return fd


def check(fd: int, nbytes: int) -> None:
    """Raise SegmentError unless `fd` is a sealed memfd of at least `nbytes`."""
    if reason := lacking(fd):
        raise SegmentError(reason)
    if (held := os.fstat(fd).st_size) < nbytes:
        raise SegmentError(f"fd {fd} holds {held:,} B but the segment is said to have {nbytes:,} B")


def readable(fd: int, nbytes: int) -> npt.NDArray[np.uint8]:
    """Map `nbytes` of `fd` for reading only. The mapping lasts as long as the array. SegmentError
    like `check`: memory that cannot shrink raises no SIGBUS. OSError."""
    check(fd, nbytes)
    return np.frombuffer(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ), dtype=np.uint8)


def map_fd(fd: int, nbytes: int, ordinal: int | None = None, step: int = 0) -> torch.Tensor:
    """Map `nbytes` of `fd`, shared, as a 1-D uint8 tensor. The mapping lasts as long as the tensor
    or a view of the tensor.

    ordinal: of a GPU that uses the memory, at the same address: the pages are locked, in some 0.2 s
    a GiB, in steps of `step` bytes, or of `_STEP_BYTES`. A thread that launches work on a GPU waits
    for one step at most; other threads do not wait. Unmapping then waits for the GPU's work.

    SegmentError, which says what to change: no memfd, too small, not sealed, cannot be locked;
    OSError."""
    check(fd, nbytes)
    if ordinal is not None:
        unallocated = nbytes - 512 * os.fstat(fd).st_blocks
        if unallocated > 0 and (available := devices.host_available()) < SPARE_BYTES + unallocated:
            free = f"{available:,} B of host memory are available"
            raise SegmentError(f"{unallocated:,} B of it are not allocated yet, and {free}")
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    held = np.frombuffer(memory, dtype=np.uint8)
    if ordinal is not None:
        _lock(held, ordinal, step or _STEP_BYTES)
    return torch.from_numpy(held)


def _lock(held: npt.NDArray[np.uint8], ordinal: int, step: int) -> None:
    """Register the array's memory with the driver, until the array is dropped: the array keeps the
    mapping, so the registration ends first."""
    driver = cuda_driver.load()
    with driver.until_dropped(held, ordinal, "host memory stays locked") as used:
        for at in range(0, len(held), step):
            address, size = held.ctypes.data + at, min(step, len(held) - at)
            # Allocate first, so that the driver holds its own lock only while it locks the pages.
            _populate_large(address, size)
            _register(driver, address, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            used.callback(driver.unregister, address)


def _register(driver: Driver, address: int, nbytes: int) -> None:
    try:
        driver.register(address, nbytes)
    except DriverError as error:
        soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        limit = f"raise the limit of locked memory (ulimit -l, here {soft >> 10:,} KiB), or "
        limit = "" if soft == resource.RLIM_INFINITY else limit
        advice = f"{limit}set pool.segment_bytes or offload.staging_bytes lower"
        raise SegmentError(
            f"the driver cannot lock {nbytes:,} B of host memory: {error}; {advice}"
        ) from error


def _wait_for_room(nbytes: int, patience: float = 20.0) -> None:
    """Wait until there is more host memory: a virtual machine may grow only as memory is used."""
    until = time.monotonic() + patience
    while (available := devices.host_available()) < nbytes + SPARE_BYTES:
        if time.monotonic() > until:
            free = f"{available:,} B of host memory are available"
            stay = f"{SPARE_BYTES:,} of them stay free"
            raise SegmentError(f"{free}, and {stay}; set pool.segment_bytes lower")
        time.sleep(0.1)


def address_of(memory: mmap.mmap) -> int:
    """The address of a writable mapping. The caller keeps the mapping."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def populate(address: int, nbytes: int) -> bool:
    """Allocate all pages of a mapping; False if the system cannot (Linux before 5.14). OSError.

    Calls C's `madvise`, since Python's would hold the interpreter's lock."""
    code = _advise(address, nbytes, _MADV_POPULATE_WRITE)
    if code not in (0, errno.EINVAL):
        raise OSError(code, f"{nbytes:,} B of host memory: {os.strerror(code)}")
    return code == 0


def _populate_large(address: int, nbytes: int) -> None:
    """Like `populate`. If the system gives large pages on request (`shmem_enabled: advise`), the
    pages are large, and locking is faster."""
    _advise(address, nbytes, mmap.MADV_HUGEPAGE)
    populate(address, nbytes)


def _advise(address: int, nbytes: int, advice: int) -> int:
    """Returns 0 or an errno."""
    failed = _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), advice)
    return ctypes.get_errno() if failed else 0


def move_near(ordinal: int) -> None:
    """Move this thread to the CPUs near the GPU, if the process may use them: pages that the thread
    allocates then lie on the GPU's NUMA node."""
    with suppress(OSError, ValueError, SegmentError):
        bus = Path("/sys/bus/pci/devices") / cuda_driver.load().bus(ordinal)
        near = set[int]()
        for part in (bus / "local_cpulist").read_text().strip().split(","):
            first, _, last = part.partition("-")
            near.update(range(int(first), int(last or first) + 1))
        if allowed := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, allowed)
