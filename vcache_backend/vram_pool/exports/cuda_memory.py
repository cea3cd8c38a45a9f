"""GPU memory for vLLM's KV cache, readable by other processes: a memory pool of torch with our
allocator, which exports POSIX fds.

torch calls `_allocate` and `_free` from C and holds the lock of torch's allocator meanwhile. So
both functions must not raise, and neither they nor the garbage collector may make or drop tensors
meanwhile. Both functions take the interpreter's lock. So while vLLM makes its KV cache, no other
thread may drop a CUDA tensor: that thread would hold the interpreter's lock and wait for torch's
lock. vLLM's sleep mode allocates in the same way."""

# torch.cuda's pools have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import gc
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool import cuda_driver
from vcache_backend.vram_pool.cuda_driver import Driver
from vcache_backend.vram_pool.exports.memory import Region

log = logging.getLogger(__name__)

_ALLOCATE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
_FREE = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)


class _MappedRegion(NamedTuple):
    """undo: unmaps and frees the allocation; to be closed in the device's context."""

    allocation: Region
    undo: ExitStack


class CudaExportable:
    """Like `HostExportable`, in GPU memory. The object must live as long as the process, since
    torch may free the memory at any time."""

    def __init__(self, ordinal: int) -> None:
        """Raises SegmentError if GPU `ordinal` cannot export memory."""
        driver = cuda_driver.load()
        if not driver.shares_memory(ordinal):
            lacks = "no virtual memory management with POSIX fds, so no other process can read it"
            raise SegmentError(f"cuda:{ordinal} has {lacks}")
        self._driver, self._live, self.problem = driver, dict[int, _MappedRegion](), ""
        self._callbacks = _ALLOCATE(self._allocate), _FREE(self._free)
        # Never freed: torch may call the callbacks until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._callbacks))

    @contextmanager
    def context(self) -> Iterator[None]:
        """A context in which this thread's allocations on the current device are exportable."""
        # If memory runs out while a pool is in use, torch fails instead of giving back cached
        # memory.
        torch.cuda.empty_cache()
        allocate, free = (
            ctypes.cast(callback, ctypes.c_void_p).value for callback in self._callbacks
        )
        pool = torch.cuda.MemPool(_torch_allocator(allocate, free))
        with torch.cuda.use_mem_pool(pool):
            yield
        # The pool is dropped here: the GPU gets the memory back once the tensors are gone and torch
        # empties its cache.

    def allocations(self) -> list[Region]:
        return [piece.allocation for piece in list(self._live.values())]

    def _allocate(self, nbytes: int, ordinal: int, stream: int | None) -> int:
        """Called by torch: the address of at least `nbytes` bytes; 0 for a failure, which makes
        torch raise an out-of-memory error."""
        try:
            with _no_garbage(), self._driver.on(ordinal):
                piece = _make(self._driver, ordinal, nbytes)
            self._live[piece.allocation.address] = piece
            return piece.allocation.address
        except BaseException as error:  # noqa: BLE001 - it would go on into C
            why = str(error) or type(error).__name__
            self.problem = f"{nbytes:,} B on cuda:{ordinal} for the KV cache: {why}"
            log.warning("vcache: %s", self.problem)
            return 0

    def _free(self, address: int, nbytes: int, ordinal: int, stream: int | None) -> None:
        """Called by torch: free an allocation. Queued work may still use the memory, so the call
        waits for the device."""
        try:
            piece = self._live.pop(address)
            os.close(piece.allocation.fd)
            with _no_garbage(), self._driver.on(ordinal):
                # Unlike cudaFree, unmapping does not wait for queued work.
                self._driver.synchronize()
                piece.undo.close()
        except BaseException as error:  # noqa: BLE001 - it would go on into C
            stay = f"{nbytes:,} B of KV cache on cuda:{ordinal} stay until the process ends"
            log.warning("vcache: %s: %s", stay, error)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """A context in which the garbage collector runs in no thread."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _torch_allocator(allocate: Any, free: Any) -> Any:
    made = torch._C._cuda_customAllocator(allocate, free)
    # Never freed: in older releases torch's pools hold the allocator by a plain pointer, and free
    # memory through this pointer until the end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


def _make(driver: Driver, ordinal: int, nbytes: int) -> _MappedRegion:
    """Allocate and map `nbytes`, rounded up, on the GPU of the current context. Raises DriverError,
    and then leaves nothing behind."""
    rounded = driver.rounded(ordinal, nbytes)
    with ExitStack() as undo:
        handle = driver.create(ordinal, rounded, undo)
        address = driver.map(ordinal, rounded, handle, undo)
        return _MappedRegion(Region(driver.export(handle), rounded, address), undo.pop_all())
