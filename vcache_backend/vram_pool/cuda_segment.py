"""Segments in GPU memory: allocations of CUDA's virtual memory management, passed on as POSIX fds.

The fd alone keeps the memory alive: the segment's maker keeps no handle, and maps the segment like
every other process. The GPU gets the memory back once the last fd and mapping are closed."""

from __future__ import annotations

import os
import stat
import weakref
from contextlib import ExitStack
from typing import Any

import torch

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.vram_pool import cuda_driver, devices
from vcache_backend.vram_pool.cuda_driver import Driver, DriverError
from vcache_backend.vram_pool.devices import Device


def allocate(device: Device, nbytes: int) -> tuple[int, int]:
    """Allocate at least `nbytes` on `device`. Returns the fd, which the caller closes, and the
    bytes, rounded up to the granularity.

    Takes about 1 ms for 8 GiB if torch already uses the device. Raises SegmentError, which says
    what to set if memory is lacking."""
    driver, ordinal = cuda_driver.load(), _ordinal(device)
    if not driver.shares_memory(ordinal):
        raise SegmentError(f"{device}: no memory management with fds; set pool.device: host")
    with driver.on(ordinal), ExitStack() as undo:
        rounded = driver.rounded(ordinal, nbytes)
        try:
            return driver.export(driver.create(ordinal, rounded, undo)), rounded
        except DriverError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            raise _out_of_memory(driver, device, rounded) from error


def map_fd(fd: int, nbytes: int, owner: str, reader: Device) -> torch.Tensor:
    """Map the segment behind `fd`, which lies on GPU `owner`, as a 1-D uint8 tensor on `reader`,
    readable and writable there.

    The mapping lasts as long as the tensor or a view of the tensor. Takes some 10 ms for 8 GiB. Any
    thread; the thread's current device stays the same. Raises SegmentError: no peer access, `fd` is
    no GPU memory, or not `nbytes` large."""
    driver, ordinal = cuda_driver.load(), _ordinal(reader)
    check(fd, nbytes, driver.granularity(ordinal))
    seen = devices.visible_ordinal(owner)
    if seen is not None and not driver.can_access_peer(ordinal, seen):
        raise SegmentError(f"GPU {reader.name} has no peer access to GPU {owner}")
    try:
        whole = _Whole(driver, ordinal, fd, nbytes)
    except DriverError as error:
        unseen = f"; {owner} is not visible here, so nobody asked whether there is peer access"
        hidden = unseen if seen is None else ""
        raise SegmentError(
            f"GPU {reader.name} cannot map {nbytes:,} B of GPU {owner}: {error}{hidden}"
        ) from error
    return view(whole, ordinal)


def check(fd: int, nbytes: int, granule: int) -> None:
    """Refuse an fd that cannot be an exported allocation of `nbytes`, before the driver gets the
    fd. Raises SegmentError; OSError for a bad fd."""
    mode = os.fstat(fd).st_mode
    if stat.S_IFMT(mode) not in (0, stat.S_IFCHR):
        raise SegmentError(f"fd {fd} is {stat.filemode(mode)}, not exported GPU memory")
    if nbytes % granule:
        raise SegmentError(f"a GPU segment of {nbytes:,} B is not a multiple of {granule:,} B")


class _Whole:
    """An imported allocation, mapped at one address of this process until the last reference to
    this object is dropped.

    torch holds a reference for each storage, so no tensor ever points at unmapped memory."""

    def __init__(self, driver: Driver, ordinal: int, fd: int, nbytes: int) -> None:
        with ExitStack() as undo:
            context = driver.retain(ordinal)
            undo.callback(driver.release_context, ordinal)
            with driver.current(context), ExitStack() as mapped:
                handle = driver.import_fd(fd, mapped)
                address = driver.map(ordinal, nbytes, handle, mapped)
                undo.callback(driver.end, context, mapped.pop_all(), "a GPU mapping stays")
            self.address = address
            self.nbytes = nbytes
            # Not at exit: the driver frees all memory by itself, and may be gone already.
            weakref.finalize(self, undo.pop_all().close).atexit = False

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self.address, False
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def view(whole: _Whole, ordinal: int) -> torch.Tensor:
    """`whole` as a tensor on GPU `ordinal`, which reads the memory; another GPU may hold the
    memory. Raises SegmentError."""
    with raising_as(SegmentError, f"torch {torch.__version__}", RuntimeError, AssertionError):
        tensor = torch.as_tensor(whole, device=f"cuda:{ordinal}")
    if tensor.data_ptr() != whole.address:
        raise SegmentError(f"torch {torch.__version__} copied a segment instead of viewing it")
    return tensor


def _ordinal(device: Device) -> int:
    if device.ordinal is None:
        raise SegmentError(f"{device.name} is not a GPU of this process")
    return device.ordinal


def _out_of_memory(driver: Driver, device: Device, nbytes: int) -> SegmentError:
    free, total = driver.memory(_ordinal(device))
    fits = free - free % driver.granularity(_ordinal(device))
    lacks = f"{device}: a segment needs {nbytes:,} B but {free:,} of {total:,} B are free"
    less = f"set pool.segment_bytes <= {fits} or give vLLM less (gpu_memory_utilization)"
    return SegmentError(f"{lacks}; {less}")
