"""Segments: allocations behind fds, which outlive the process that made them. They lie in GPU
memory (CUDA's virtual memory management, passed on as POSIX fds) or in host memory
(host_memory.py).

The fd alone keeps the memory alive: the maker keeps no handle, and maps the segment like every
other process. A GPU gets its memory back once the last fd and mapping are closed.

>>> with create(Device("host", "host"), 1 << 20) as owned:
...     whole = map_segment(owned.info, owned.fd, Device("host", "host"))"""

from __future__ import annotations

import os
import secrets
import stat
import weakref
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.protocol.messages import SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_driver, devices, host_memory
from vcache_backend.vram_pool.cuda_driver import Driver, DriverError
from vcache_backend.vram_pool.devices import Device


class OwnedSegment:
    """An allocation made by this process, with an fd and no address. Close it from one thread.

    The memory lives as long as any process holds an fd or a mapping, so after `close` it belongs to
    the processes that got the fd. `info.nbytes` may be more than was asked for (a GPU's
    granularity)."""

    def __init__(self, info: SegmentInfo, fd: int) -> None:
        """fd: this object closes it, at the latest when it is dropped."""
        self.info, self.id, self.device, self.nbytes = info, info.id, info.device, info.nbytes
        self._fd, self._close = fd, weakref.finalize(self, os.close, fd)

    @property
    def fd(self) -> int:
        """The fd, to be sent with SCM_RIGHTS; this object keeps it. Raises SegmentError once
        closed: another file may have the number."""
        if not self._close.alive:
            raise SegmentError(f"segment {self.id} is closed")
        return self._fd

    def close(self) -> None:
        """Close the fd. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def create(device: Device, nbytes: int) -> OwnedSegment:
    """Allocate a segment of at least `nbytes` on `device`, with a random id.

    SegmentError, with nothing left behind: impossible size, no memory or fds, no driver."""
    id = SegmentId(secrets.token_hex(6))
    with raising_as(SegmentError, f"segment of {nbytes:,} B on {device}", OSError):
        if device.medium == "cuda":
            fd, nbytes = _allocate_on_gpu(device, nbytes)
        else:
            fd = host_memory.allocate(id, nbytes, populated=device.ordinal is not None)
        return OwnedSegment(SegmentInfo(id, device.name, device.medium, nbytes), fd)


def map_segment(info: SegmentInfo, fd: int, reader: Device) -> Tensor:
    """Map a segment, own or foreign, for `reader`: its bytes, perhaps with padding, as 1-D uint8,
    readable and writable. `fd` stays the caller's.

    The mapping ends with the last tensor over it, so no tensor ever dangles. On a GPU, unmapping
    waits for the reader device's work; raw addresses are not counted. `info` and `fd` may come from
    a peer, so sizes and the kind of fd are checked before the kernel or the driver gets them.
    Raises SegmentError, and leaves nothing behind: other medium, no peer access, forged fd, out of
    memory."""
    if info.medium != reader.medium:
        kind = f"{info.medium} memory of {info.device}"
        raise SegmentError(f"segment {info.id} is {kind}: {reader.name} cannot map that")
    what = f"segment {info.id} of {info.device}"
    with raising_as(SegmentError, what, OSError, SegmentError):
        if info.medium == "cuda":
            return map_gpu_memory(fd, info.nbytes, info.device, reader)
        return host_memory.map_fd(fd, info.nbytes, reader.ordinal)


# ---- GPU memory


def _allocate_on_gpu(device: Device, nbytes: int) -> tuple[int, int]:
    """Allocate at least `nbytes`. Returns the fd, which the caller closes, and the bytes, rounded
    up to the granularity.

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
            free, total = driver.memory(ordinal)
            lacks = f"{device}: a segment needs {rounded:,} B but {free:,} of {total:,} B are free"
            fits = free - free % driver.granularity(ordinal)
            less = f"set pool.segment_bytes <= {fits} or give vLLM less (gpu_memory_utilization)"
            raise SegmentError(f"{lacks}; {less}") from error


def map_gpu_memory(fd: int, nbytes: int, owner: str, reader: Device) -> Tensor:
    """Map the allocation behind `fd`, which lies on GPU `owner`, as a 1-D uint8 tensor on `reader`,
    readable and writable there.

    The mapping lasts as long as the tensor or a view of the tensor. Takes some 10 ms for 8 GiB. Any
    thread; the thread's current device stays the same. Raises SegmentError: no peer access, `fd` is
    no GPU memory, or not `nbytes` large; OSError for a bad fd."""
    driver, ordinal = cuda_driver.load(), _ordinal(reader)
    # Refuse what cannot be an exported allocation before the driver gets it.
    mode, granule = os.fstat(fd).st_mode, driver.granularity(ordinal)
    if stat.S_IFMT(mode) not in (0, stat.S_IFCHR):
        raise SegmentError(f"fd {fd} is {stat.filemode(mode)}, not exported GPU memory")
    if nbytes % granule:
        raise SegmentError(f"a GPU segment of {nbytes:,} B is not a multiple of {granule:,} B")
    seen = devices.visible_ordinal(owner)
    if seen is not None and not driver.can_access_peer(ordinal, seen):
        raise SegmentError(f"GPU {reader.name} has no peer access to GPU {owner}")
    try:
        return view(_GpuMapping(driver, ordinal, fd, nbytes), ordinal)
    except DriverError as error:
        unseen = f"; {owner} is not visible here, so nobody asked whether there is peer access"
        hidden = unseen if seen is None else ""
        raise SegmentError(
            f"GPU {reader.name} cannot map {nbytes:,} B of GPU {owner}: {error}{hidden}"
        ) from error


class _GpuMapping:
    """An imported allocation, mapped at one address of this process until the last reference to
    this object is dropped.

    torch holds a reference for each storage, so no tensor ever points at unmapped memory."""

    def __init__(self, driver: Driver, ordinal: int, fd: int, nbytes: int) -> None:
        with driver.until_dropped(self, ordinal, "a GPU mapping stays") as used:
            self.address = driver.map(ordinal, nbytes, driver.import_fd(fd, used), used)
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        data = self.address, False
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": data, "version": 3}


def view(mapping: _GpuMapping, ordinal: int) -> Tensor:
    """`mapping` as a tensor on GPU `ordinal`, which reads the memory; another GPU may hold the
    memory. Raises SegmentError."""
    with raising_as(SegmentError, f"torch {torch.__version__}", RuntimeError, AssertionError):
        tensor = torch.as_tensor(mapping, device=f"cuda:{ordinal}")
    if tensor.data_ptr() != mapping.address:
        raise SegmentError(f"torch {torch.__version__} copied a segment instead of viewing it")
    return tensor


def _ordinal(device: Device) -> int:
    if device.ordinal is None:
        raise SegmentError(f"{device.name} is not a GPU of this process")
    return device.ordinal
