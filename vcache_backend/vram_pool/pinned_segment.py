"""Segments in host memory that a GPU of this process reads and writes where they lie: their pages are taken and locked.

Each is registered with the driver in steps, and a kernel crosses from one to the next; a copy by the driver does not, so there is none out
of slots or into them. The registration ends with the mapping.
"""

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
from typing import Any, NamedTuple

import numpy as np
import torch

from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import cuda_driver, cuda_segment, devices, host_segment
from vcache_backend.vram_pool.cuda_driver import Driver, DriverError
from vcache_backend.vram_pool.slots import SlotView

SPARE_BYTES = 1 << 30
"""Of the host's memory what a new segment leaves to others."""
GROW_SECONDS = 20.0
"""How long it is waited for more: a virtual machine may be given memory only as it uses it."""
_STEP_BYTES = 256 << 20
"""Taken and locked at a time. The driver keeps all that launch work waiting meanwhile: some 50 ms."""
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None, use_errno=True)


def allocate(name: str, nbytes: int) -> int:
    """As `host_segment.allocate`, with all of its pages taken: some 0.3 s a GiB, in which other threads go on. Raises SegmentError where
    there is too little memory, while there is some left."""
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
            raise SegmentError(
                f"{available:,} B of host memory are available, and {SPARE_BYTES:,} of them stay free; set pool.segment_bytes lower"
            )
        time.sleep(0.1)


def map_fd(fd: int, nbytes: int, ordinal: int) -> torch.Tensor:
    """As `host_segment.map_fd`, registered with the driver: GPU `ordinal` has it at the same address.

    Some 0.2 s a GiB, step by step: whoever launches work on a GPU meanwhile waits for one step at most, other threads for nothing. The
    mapping lasts as long as the tensor or a view of it; its end waits for the GPU's work. Raises SegmentError with what to change.
    """
    host_segment.check(fd, nbytes)
    driver = cuda_driver.load()
    memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    held = np.frombuffer(memory, dtype=np.uint8)
    with ExitStack() as undo:
        context = driver.retain(ordinal)
        undo.callback(driver.release_context, ordinal)
        with driver.current(context), ExitStack() as registered:
            for at in range(0, nbytes, _STEP_BYTES):
                address, size = held.ctypes.data + at, min(_STEP_BYTES, nbytes - at)
                # What the driver does in its own lock is then only the locking.
                _populate(address, size)
                _register(driver, ordinal, address, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
                registered.callback(driver.unregister, address)
            undo.callback(driver.end, context, registered.pop_all(), "host memory stays locked")
        # The array names the memory, so this comes before it is unmapped. At exit the driver lets go by itself.
        weakref.finalize(held, undo.pop_all().close).atexit = False
    return torch.from_numpy(held)


def _register(driver: Driver, ordinal: int, address: int, nbytes: int) -> None:
    try:
        driver.register(address, nbytes)
    except DriverError as error:
        raise SegmentError(f"the driver locks no {nbytes:,} B of host memory: {error}; {_advice()}") from error
    with ExitStack() as undo:
        undo.callback(driver.unregister, address)
        if (there := driver.on_device(address)) != address:
            where = f"{there:#x} for {address:#x}"
            raise SegmentError(f"GPU {ordinal} has host memory at other addresses ({where}); set pool.device: auto")
        undo.pop_all()


def on_gpu(slot: SlotView, ordinal: int) -> SlotView:
    """A slot of such a segment as torch's kernels on GPU `ordinal` take it; `slot` itself if it is on a GPU."""
    if slot.whole.device.type != "cpu":
        return slot
    return SlotView.over(cuda_segment.view(_Slot(slot.address, slot.nbytes, slot.whole), ordinal), local=False)


class _Slot(NamedTuple):
    address: int
    nbytes: int
    whole: torch.Tensor

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.address, False), "version": 3}


def move_near(ordinal: int) -> None:
    """Have this thread run beside the GPU from now on, as far as its process may: the pages it takes then lie on that NUMA node."""
    with suppress(OSError, ValueError, SegmentError):
        cpus = (Path("/sys/bus/pci/devices") / cuda_driver.load().bus(ordinal) / "local_cpulist").read_text()
        ranges = [part.partition("-") for part in cpus.strip().split(",")]
        near = {cpu for first, _, last in ranges for cpu in range(int(first), int(last or first) + 1)}
        if allowed := near & os.sched_getaffinity(0):
            os.sched_setaffinity(0, allowed)


def _populate(address: int, nbytes: int) -> None:
    """Have all pages of a mapping, large ones where the system gives them to who asks (`shmem_enabled: advise`): they are locked faster.
    Python's own call of this would keep all other threads waiting."""
    where, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
    _libc.madvise(where, size, mmap.MADV_HUGEPAGE)
    if _libc.madvise(where, size, _MADV_POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EINVAL:  # Linux before 5.14: they are taken as they are needed
        raise OSError(code, f"{nbytes:,} B of host memory: {os.strerror(code)}")


def _advice() -> str:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    limit = (
        "" if soft == resource.RLIM_INFINITY else f"raise the limit of locked memory (ulimit -l, here {soft >> 10:,} KiB), or "
    )
    return f"{limit}set pool.segment_bytes lower"
