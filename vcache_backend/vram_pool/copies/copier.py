"""The interface of copiers, which run copy plans, and the copier for host memory. The GPU's copier
is in cuda_copier.py."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, of_kinds


class Completion(Protocol):
    """A copy under way. Any thread, any number of calls."""

    def done(self) -> bool:
        """Whether all bytes are in place. Never waits. Raises VCacheError if the device failed."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until all bytes are in place; False once `timeout_s` seconds have passed. Raises
        VCacheError like `done`."""
        ...

    @property
    def seconds(self) -> float | None:
        """Seconds that the bytes took, without tables and queues; None while the copy runs, or if
        the time is not known."""
        ...


class Mark(Protocol):
    """A point in a stream's work, behind everything queued so far. Any thread."""

    def reached(self) -> bool:
        """Whether all work before the mark is done. Never waits. VCacheError: the device failed."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is, without the interpreter; perhaps longer than `timeout_s`. Raises
        VCacheError like `reached`."""
        ...


class CopyJob(NamedTuple):
    """Pages to copy in one launch, between a KV cache and addresses that this process can reach."""

    kv: PagedKV
    rows: Int64s
    """(n, 3): number of an origin, offset in bytes, KV block. If the KV cache has several kinds of
    layers, each further kind has a column of offsets behind the block."""
    origins: Int64s
    """(k, planes), for the planes of all kinds: the page of plane p of row r begins at address
    `origins[r's origin, p] + r's offset`. Addresses are not checked."""
    keep: object = None
    """Held until the copy is over: keeps the pages mapped."""
    local: bool = False
    """Whether all pages of the origins are on the KV cache's device."""
    host: bool = False
    """Whether some are in host memory."""
    to_origin: bool = False
    """Out of the KV cache, otherwise into it."""


class Copier(ABC):
    """Moves bytes into and out of one KV cache. One worker uses it, in any thread."""

    @abstractmethod
    def copy(self, job: CopyJob, after: Mark | None = None) -> Completion:
        """Copy the pages. Work queued before this call sees the bytes before the copy, work queued
        afterwards the bytes after it.

        after: the copy starts once the work before this mark is done, and the caller's stream goes
        on beside the copy. The caller must let no other work touch the blocks until the copy is
        over, or queue a `fence`.

        Rows name blocks and origins that exist: see `geometry.placed`. Raises LayoutError, and
        moves nothing, if the device does not match. After a VCacheError no part of the copy runs.
        After another error (torch's RuntimeError, a Triton error) the copy may be running, and the
        memory must not be used again."""

    def prepare(self, kv: PagedKV) -> None:  # noqa: B027 - optional
        """Prepare copies of `kv`, so that no request waits for compilation. Optional; before the
        first copy."""

    def mark(self) -> Mark:
        """A mark after all work that is queued on the current stream now."""
        return NOTHING

    def fence(self, copy: Completion) -> None:  # noqa: B027 - nothing runs on in host memory
        """Make the current stream wait for `copy`, made by this copier, before later work. The host
        never waits."""

    def drain(self) -> None:  # noqa: B027 - nothing runs on in host memory
        """Wait for the copies under way, with a deadline. Idempotent."""


@dataclass(frozen=True)
class Finished:
    """The completion of a copy that ended before its call returned."""

    seconds: float

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def reached(self) -> bool:
        """True: used as a Mark, it stands for finished work."""
        return True


NOTHING = Finished(0.0)
"""As a Mark: a copy that waits for no work."""


class HostCopier(Copier):
    """Copies in the caller's thread: for KV caches in host memory."""

    def copy(self, job: CopyJob, after: Mark | None = None) -> Finished:
        if job.kv.device.type != "cpu":
            raise LayoutError(
                f"the KV cache is on {job.kv.device}, and this copier only knows host memory"
            )
        started = time.perf_counter()
        copy_pages(job)
        return Finished(time.perf_counter() - started)


def copy_pages(job: CopyJob) -> None:
    """The copy in plain numpy, in host memory: for `HostCopier`, and as the kernel's reference."""
    for kind, rows, bases in of_kinds(job.kv, job.rows, job.origins):
        for origin in np.unique(rows[:, 0]).tolist():
            of_it = rows[rows[:, 0] == origin]
            first = int(of_it[:, 1].min())
            step = int(np.gcd.reduce(of_it[:, 1] - first)) or kind.page_bytes
            places, count = (
                (of_it[:, 1] - first) // step,
                int(of_it[:, 1].max() - first) // step + 1,
            )
            at, blocks = _as_slice(places), _as_slice(of_it[:, 2])
            for base, (start, stride) in zip(bases[origin], kind.planes.tolist(), strict=True):
                there = _pages(int(base) + first, count, step, kind.page_bytes)
                here = _pages(start, kind.num_blocks, stride, kind.page_bytes)
                if job.to_origin:
                    there[at] = here[blocks]
                else:
                    here[blocks] = there[at]


def _pages(address: int, count: int, step: int, nbytes: int) -> npt.NDArray[np.void]:
    """`count` pages of `nbytes` bytes at raw addresses, `step` bytes apart; pages may overlap.
    Memory is only touched when a page is read or written.

    Numpy copies each page with one memcpy, in this thread. torch's own copies start threads that
    wait for each other: beside a busy core a copy takes a hundred times as long."""
    memory = {
        "data": (address, False),
        "shape": (count,),
        "strides": (step,),
        "typestr": f"|V{nbytes}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=memory))


def _as_slice(numbers: Int64s) -> Int64s | slice:
    """A slice if the numbers are consecutive: numpy then copies the pages once instead of twice."""
    consecutive = bool((np.diff(numbers) == 1).all())
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if consecutive else numbers
