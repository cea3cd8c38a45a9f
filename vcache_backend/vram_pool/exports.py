"""Memory for vLLM's KV cache that other processes can map: GPU memory or sealed memfds, from which
torch allocates within a context. torch uses the memory as always. A descriptor of every allocation
lives as long as the allocation.

On a GPU: a memory pool of torch with our allocator. torch calls `_allocate` and `_free` from C and
holds the lock of torch's allocator meanwhile. So both functions must not raise, and neither they
nor the garbage collector may make or drop tensors meanwhile. Both functions take the interpreter's
lock. So while vLLM makes its KV cache, no other thread may drop a CUDA tensor: that thread would
hold the interpreter's lock and wait for torch's lock. vLLM's sleep mode allocates in the same way.

On the host only `torch.zeros` of int8 is replaced, since every known vLLM allocates its KV cache
with that call. The alternative was to map a memfd over pages from malloc, but such a page may begin
within a tensor or also hold other objects, and `free` may hand it on."""

# torch's modes and torch.cuda's pools have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from vcache_backend.errors import SegmentError
from vcache_backend.seals import FUTURE_WRITE, RESIZING, sealed
from vcache_backend.vram_pool import cuda_driver, host_memory
from vcache_backend.vram_pool.cuda_driver import Driver

log = logging.getLogger(__name__)


class Region(NamedTuple):
    """One exported allocation. Readers map all of it."""

    fd: int
    """Open for as long as the memory lives; the caller must not close it."""
    nbytes: int
    address: int
    """Of this process."""


# ---- host memory


class HostExportable:
    """Host memory that other processes can map. Within `context`, torch allocates from this
    memory."""

    def __init__(self) -> None:
        self._live: dict[int, Region] = {}
        self.problem = ""
        """Why an allocation did not become exportable; empty if all allocations did."""

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
        weakref.finalize(memory, self._gone, region).atexit = False
        return tensor

    def _gone(self, region: Region) -> None:
        self._live.pop(region.address, None)
        with suppress(OSError):
            os.close(region.fd)


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
        # Take all pages now, near this thread, as zeroing would: a lack of memory then fails here
        # and not in a later write.
        address = host_memory.address_of(memory)
        if not host_memory.populate(address, size):
            ctypes.memset(address, 0, size)
        undo.pop_all()
        return fd, memory


# ---- GPU memory

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
