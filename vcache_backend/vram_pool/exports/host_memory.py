"""Host memory for vLLM's KV cache, readable by other processes: sealed memfds.

Only `torch.zeros` of int8 is replaced, since every known vLLM allocates its KV cache with that
call. The alternative was to map a memfd over pages from malloc, but such a page may begin within a
tensor or also hold other objects, and `free` may hand it on."""

# torch's modes have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import errno
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from vcache_backend.seals import FUTURE_WRITE, RESIZING, sealed
from vcache_backend.vram_pool.exports.memory import Region

_MADV_POPULATE_WRITE = 23
"""In Linux since 5.14; not in Python's mmap."""


class HostExportable:
    """Host memory that other processes can map. Within `context`, torch allocates from this memory.
    problem: why an allocation did not become exportable; empty if all allocations did."""

    def __init__(self) -> None:
        self._live: dict[int, Region] = {}
        self.problem = ""

    @contextmanager
    def context(self) -> Iterator[None]:
        """A context in which this thread's `torch.zeros` of int8 on the CPU are exportable;
        ordinary memory if that fails."""
        with _Zeros(self._zeros):
            yield

    def allocations(self) -> list[Region]:
        return list(self._live.values())

    def _zeros(self, nbytes: int) -> torch.Tensor | None:
        try:
            fd, memory = _sealed(nbytes)
        except OSError as error:
            self.problem = f"a memfd of {nbytes:,} B for the KV cache: {error}"
            return None
        tensor = torch.frombuffer(memory, dtype=torch.int8, count=nbytes)
        region = Region(fd, len(memory), tensor.data_ptr())
        self._live[region.address] = region
        # torch holds the last reference to the mapping, through the tensor's storage.
        weakref.finalize(memory, _gone, self._live, region).atexit = False
        return tensor


class _Zeros(TorchFunctionMode):
    """Replaces `torch.zeros` of int8 in host memory by `make(bytes)`; if `make` returns None, torch
    makes the tensor."""

    def __init__(self, make: Callable[[int], torch.Tensor | None]) -> None:
        super().__init__()
        self._make = make

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        plain = given.get("dtype") is torch.int8 and given.keys() <= {"dtype", "device"}
        if func is torch.zeros and plain:
            shape = torch.Size(args[0] if len(args) == 1 and not isinstance(args[0], int) else args)
            device = given.get("device")
            place = torch.get_default_device() if device is None else torch.device(device)
            if place.type == "cpu" and shape.numel() > 0:
                made = self._make(shape.numel())
                if made is not None:
                    return made.view(shape)
        return func(*args, **given)


def _sealed(nbytes: int) -> tuple[int, mmap.mmap]:
    """A memfd of allocated, zeroed, whole pages, and the only writable mapping of the memfd. Raises
    OSError."""
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    with ExitStack() as undo:
        fd, memory = sealed("kv", size, RESIZING | FUTURE_WRITE)
        undo.callback(os.close, fd)
        undo.callback(memory.close)
        # A forked child has a copy of malloc's memory, but would write into this process's memfd.
        memory.madvise(mmap.MADV_DONTFORK)
        _take(memory)
        undo.pop_all()
        return fd, memory


def _take(memory: mmap.mmap) -> None:
    """Allocate every page now, near this thread, as zeroing would. A lack of memory then fails here
    and not in a later write."""
    try:
        memory.madvise(_MADV_POPULATE_WRITE)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        for page in range(0, len(memory), mmap.PAGESIZE):
            memory[page] = 0


def _gone(live: dict[int, Region], allocation: Region) -> None:
    live.pop(allocation.address, None)
    with suppress(OSError):
        os.close(allocation.fd)
