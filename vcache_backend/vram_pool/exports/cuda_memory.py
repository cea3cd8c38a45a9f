"""GPU memory for vLLM's KV cache that other processes can read: a memory pool of torch whose
allocator is ours, and exports POSIX fds.

torch calls `_allocate` and `_free` from C, holding its allocator's lock. So they must not raise,
and must not make or drop tensors; nor may the garbage collector within them. They take the
interpreter's lock. So while vLLM makes its KV cache no other thread may drop a CUDA tensor: it
would hold the interpreter's lock and wait for torch's. vLLM's own sleep mode allocates in the same
way."""

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
    """undo: unmaps and frees it; to be closed in its device's context."""

    allocation: Region
    undo: ExitStack


class CudaExportable:
    """Like `HostExportable`, in GPU memory. It must live as long as the process, since torch may
    free its memory at any time."""

    def __init__(self, ordinal: int) -> None:
        """Raises SegmentError if GPU `ordinal` cannot export memory."""
        driver = cuda_driver.load()
        if not driver.shares_memory(ordinal):
            lacks = "no virtual memory management with POSIX fds, so no other process can read it"
            raise SegmentError(f"cuda:{ordinal} has {lacks}")
        self._driver, self._live, self.problem = driver, dict[int, _MappedRegion](), ""
        self._callbacks = _ALLOCATE(self._allocate), _FREE(self._free)
        # Never freed: torch may call them until the process ends.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._callbacks))

    @contextmanager
    def context(self) -> Iterator[None]:
        """A context in which this thread's allocations on the current device are exportable.
        SegmentError if torch takes no allocator."""
        # While a pool is in use and memory runs out, torch fails instead of giving back what it has
        # cached.
        torch.cuda.empty_cache()
        allocate, free = (
            ctypes.cast(callback, ctypes.c_void_p).value for callback in self._callbacks
        )
        pool = torch.cuda.MemPool(_torch_allocator(allocate, free))
        with torch.cuda.use_mem_pool(pool):
            yield
        # The pool is dropped here: its memory goes back to the GPU once the tensors are gone and
        # torch empties its cache.

    def allocations(self) -> list[Region]:
        return [piece.allocation for piece in list(self._live.values())]

    def _allocate(self, nbytes: int, ordinal: int, stream: int | None) -> int:
        """Called by torch: the address of at least `nbytes` bytes; 0 if that fails, and torch then
        raises that there is no memory."""
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
        """Called by torch: free an allocation. Work that still uses it may be queued, so this waits
        for the device."""
        try:
            piece = self._live.pop(address)
            os.close(piece.allocation.fd)
            with _no_garbage(), self._driver.on(ordinal):
                # Unlike cudaFree, unmapping waits for nobody.
                self._driver.synchronize()
                piece.undo.close()
        except BaseException as error:  # noqa: BLE001 - it would go on into C
            stay = f"{nbytes:,} B of KV cache on cuda:{ordinal} stay until the process ends"
            log.warning("vcache: %s: %s", stay, error)


@contextmanager
def _no_garbage() -> Iterator[None]:
    """A context in which the garbage collector does not run, in any thread."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _torch_allocator(allocate: int | None, free: int | None) -> Any:
    make = getattr(torch._C, "_cuda_customAllocator", None)
    if make is None:
        raise SegmentError(f"torch {torch.__version__} takes no memory from others")
    made = make(allocate, free)
    # Never freed: in older releases torch's pools hold it by a plain pointer, and free memory
    # through it until the end.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))
    return made


def _make(driver: Driver, ordinal: int, nbytes: int) -> _MappedRegion:
    """Allocate and map `nbytes`, rounded up, on the GPU whose context is current. Raises
    DriverError, and leaves nothing behind then."""
    rounded = driver.rounded(ordinal, nbytes)
    with ExitStack() as undo:
        handle = driver.create(ordinal, rounded, undo)
        address = driver.map(ordinal, rounded, handle, undo)
        return _MappedRegion(Region(driver.export(handle), rounded, address), undo.pop_all())
