"""Segments: allocations behind fds, which outlive the process that made them.

An `OwnedSegment` is an allocation that this process has made and not handed over yet; it has an fd
and no address. A `MappedSegment` is an allocation, own or foreign, at an address of this process,
for one reader device.

>>> with create(Device("host", "host"), 1 << 20) as owned:
...     mapped = map_segment(owned.info, owned.fd, Device("host", "host"))"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from typing import Self

import torch

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.protocol.messages import MAX_SEGMENT_BYTES, SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_segment, host_segment, pinned_segment
from vcache_backend.vram_pool.devices import Device


class _WithDescriptor:
    """A segment's fd and the resources that `undo` gives back, once. Close it from one thread at a
    time; the destructor closes it, too."""

    def __init__(self, info: SegmentInfo, fd: int, undo: ExitStack) -> None:
        self.info, self.id, self.device, self.nbytes = info, info.id, info.device, info.nbytes
        self._fd, self._undo, self._closed = fd, undo, False

    @property
    def fd(self) -> int:
        """The fd, to be sent with SCM_RIGHTS; this object keeps it. Raises SegmentError once
        closed: another file may have the number."""
        if self._closed:
            raise SegmentError(f"segment {self.id} is closed")
        return self._fd

    def close(self) -> None:
        """Give back the object's resources. Idempotent."""
        self._closed = True
        self._undo.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            self.close()


class OwnedSegment(_WithDescriptor):
    """An allocation made by this process. The memory lives as long as any process holds an fd or a
    mapping, so after `close()` it belongs to the processes that got the fd. `nbytes` may be more
    than was asked for (a GPU's granularity)."""


class MappedSegment(_WithDescriptor):
    """An allocation at an address of this process, for one reader device. Any thread.

    The object has its own fd, to offer the segment again if the metadata server has lost the
    server's fd. `close()` gives back the fd and the reference to the mapping; the mapping ends with
    the last tensor over it, so no tensor ever dangles. Raw addresses are not counted: wait for work
    on raw addresses before `close()`. On a GPU, unmapping waits for the reader device's work."""

    def __init__(self, info: SegmentInfo, fd: int, whole: torch.Tensor, undo: ExitStack) -> None:
        super().__init__(info, fd, undo)
        self._whole: torch.Tensor | None = whole

    @property
    def whole(self) -> torch.Tensor:
        """The segment's bytes, perhaps with padding, as 1-D uint8. Raises SegmentError once
        closed."""
        if self._whole is None:
            raise SegmentError(f"segment {self.id} is closed")
        return self._whole

    def close(self) -> None:
        """See the class. Idempotent; live tensors stay usable."""
        self._whole = None
        super().close()


def create(device: Device, nbytes: int) -> OwnedSegment:
    """Allocate a segment of at least `nbytes` on `device`, with a random id.

    SegmentError, with nothing left behind: impossible size, no memory or fds, no driver."""
    id = SegmentId(secrets.token_hex(6))
    _check_size(id, nbytes)
    with (
        raising_as(SegmentError, f"segment of {nbytes:,} B on {device}", OSError),
        ExitStack() as undo,
    ):
        if device.medium == "cuda":
            fd, nbytes = cuda_segment.allocate(device, nbytes)
        elif device.ordinal is not None:
            fd = pinned_segment.allocate(id, nbytes)
        else:
            fd = host_segment.allocate(id, nbytes)
        undo.callback(os.close, fd)
        return OwnedSegment(SegmentInfo(id, device.name, device.medium, nbytes), fd, undo.pop_all())


def map_segment(info: SegmentInfo, fd: int, reader: Device) -> MappedSegment:
    """Map a segment for `reader`, readable and writable. `fd` stays the caller's.

    `info` and `fd` may come from a peer, so sizes and the kind of fd are checked before the kernel
    or the driver gets them. Raises SegmentError, and leaves nothing behind: other medium, no peer
    access, forged fd, out of memory."""
    _check_size(info.id, nbytes := info.nbytes)
    if info.medium != reader.medium:
        kind = f"{info.medium} memory of {info.device}"
        raise SegmentError(f"segment {info.id} is {kind}: {reader.name} cannot map that")
    what = f"segment {info.id} of {info.device}"
    with raising_as(SegmentError, what, OSError, SegmentError), ExitStack() as undo:
        own = os.dup(fd)
        undo.callback(os.close, own)
        if info.medium == "cuda":
            whole = cuda_segment.map_fd(own, nbytes, info.device, reader)
        elif reader.ordinal is not None:
            whole = pinned_segment.map_fd(own, nbytes, reader.ordinal)
        else:
            whole = host_segment.map_fd(own, nbytes)
        return MappedSegment(info, own, whole, undo.pop_all())


def _check_size(id: SegmentId, nbytes: int) -> None:
    if not 1 <= nbytes <= MAX_SEGMENT_BYTES:
        raise SegmentError(f"segment {id} of {nbytes:,} B: expected 1 to {MAX_SEGMENT_BYTES:,}")
