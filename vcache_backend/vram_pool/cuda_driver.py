"""Checked calls of the CUDA driver API: every failure is a `DriverError` that names the call and
the driver's reason.

`cuda.bindings` is imported on the first `load()`, so that machines without a GPU need neither it
nor a driver. All contexts are the devices' primary contexts, which torch uses, too. Each thread has
a current context: `current()` pushes a context and pops it again, so the caller's thread stays on
its device."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

from vcache_backend.errors import SegmentError

log = logging.getLogger(__name__)

Link = Literal["nvlink", "pcie", "none"]


class DriverError(SegmentError):
    """A CUDA driver call failed. code: such as `CUDA_ERROR_OUT_OF_MEMORY`."""

    def __init__(self, call: str, code: str, reason: str) -> None:
        super().__init__(f"{call}: {code} ({reason})")
        self.code = code


@functools.cache
def load() -> Driver:
    """The driver of this process; the same object on every call, for every thread.

    Raises SegmentError if `cuda-bindings` or the NVIDIA driver is missing. A process that is forked
    after this call can use neither the driver nor CUDA."""
    try:
        bindings = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        raise SegmentError(
            f"GPU segments need cuda-bindings: pip install 'cuda-bindings==13.*' ({error})"
        ) from error
    try:
        return Driver(bindings)
    except SegmentError:
        raise
    except Exception as error:  # without libcuda the bindings raise types of their own
        raise SegmentError(
            f"the NVIDIA driver cannot be used: {error}; install it, or set pool.device: host"
        ) from error


class Driver:
    """The driver calls that segments and the doctor need. Devices are CUDA ordinals of this
    process, sizes are bytes.

    bindings: the module `cuda.bindings.driver`, or in tests an object with the same functions."""

    def __init__(self, bindings: Any) -> None:
        self._cuda = bindings
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: object) -> Any:
        """Call function `name`. Returns the function's result: None, a value, or a list of values.
        Raises DriverError."""
        code, *answers = getattr(self._cuda, name)(*arguments)
        if code != self._cuda.CUresult.CUDA_SUCCESS:
            raise DriverError(name, code.name, self._reason(code))
        return answers if len(answers) > 1 else next(iter(answers), None)

    def _reason(self, code: Any) -> str:
        status, text = self._cuda.cuGetErrorString(code)
        known = status == self._cuda.CUresult.CUDA_SUCCESS and text
        return text.decode() if known else "the driver gives no reason"

    def attempt(self, name: str, *arguments: object) -> None:
        """`call` for clean-up: a failure is logged, so that the rest of the clean-up goes on."""
        try:
            self.call(name, *arguments)
        except DriverError as error:
            # the process is ending and the driver has cleaned up
            if error.code != "CUDA_ERROR_DEINITIALIZED":
                log.warning("clean-up of a GPU segment: %s", error)

    # ---- devices

    def version(self) -> tuple[int, int]:
        """The CUDA version that the installed driver supports, as (13, 0)."""
        value = int(self.call("cuDriverGetVersion"))
        return value // 1000, value % 1000 // 10

    def uuids(self) -> list[str]:
        """The names of all GPUs that this process sees, by ordinal: the same in all processes, as
        nvidia-smi prints them, `GPU-xxxxxxxx-xxxx-…`. Empty where the driver finds none."""
        devices = map(self._device, range(int(self.call("cuDeviceGetCount"))))
        answers = [bytes(self.call("cuDeviceGetUuid", device).bytes) for device in devices]
        return [f"GPU-{uuid.UUID(bytes=answer[:16])}" for answer in answers]

    def model(self, ordinal: int) -> str:
        name: bytes = self.call("cuDeviceGetName", 128, self._device(ordinal))
        return name.split(b"\0", 1)[0].decode(errors="replace").strip()

    def shares_memory(self, ordinal: int) -> bool:
        """Whether the GPU has virtual memory management with POSIX fds, which segments need."""
        names = (
            "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
            "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
        )
        attributes = [getattr(self._cuda.CUdevice_attribute, name) for name in names]
        device = self._device(ordinal)
        return all(self.call("cuDeviceGetAttribute", attribute, device) for attribute in attributes)

    def can_access_peer(self, reader: int, owner: int) -> bool:
        """Whether kernels on `reader` can read `owner`'s memory. Any GPU can read its own."""
        return reader == owner or bool(
            self.call("cuDeviceCanAccessPeer", self._device(reader), self._device(owner))
        )

    def link(self, reader: int, owner: int) -> Link:
        """How `reader` reaches `owner`'s memory. NVLink is recognised by native atomics, which PCIe
        peers do not have."""
        if not self.can_access_peer(reader, owner):
            return "none"
        attribute = self._cuda.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
        atomics = self.call(
            "cuDeviceGetP2PAttribute", attribute, self._device(reader), self._device(owner)
        )
        return "nvlink" if atomics else "pcie"

    def bus(self, ordinal: int) -> str:
        """Where the GPU is on PCI, as in `/sys/bus/pci/devices`: `0000:3b:00.0`."""
        name: bytes = self.call("cuDeviceGetPCIBusId", 16, self._device(ordinal))
        return name.split(b"\0", 1)[0].decode().lower()

    def _device(self, ordinal: int) -> Any:
        return self.call("cuDeviceGet", ordinal)

    # ---- contexts

    def _retained(self, ordinal: int, undo: ExitStack) -> Any:
        """The device's primary context, made if necessary, until `undo` gives it back."""
        context = self.call("cuDevicePrimaryCtxRetain", self._device(ordinal))
        undo.callback(self._release, ordinal)
        return context

    def _release(self, ordinal: int) -> None:
        with suppress(DriverError):
            self.attempt("cuDevicePrimaryCtxRelease", self._device(ordinal))

    @contextmanager
    def _current(self, context: Any) -> Iterator[None]:
        self.call("cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self.attempt("cuCtxPopCurrent")

    @contextmanager
    def on(self, ordinal: int) -> Iterator[None]:
        """Makes the device's primary context this thread's current one within the block."""
        with ExitStack() as undo:
            undo.enter_context(self._current(self._retained(ordinal, undo)))
            yield

    @contextmanager
    def until_dropped(self, owner: object, ordinal: int, otherwise: str) -> Iterator[ExitStack]:
        """A stack for the device's resources, in whose context the block runs. They are given back
        when `owner` is dropped; at once if the block raises.

        Waits for all work of the device first: unmapping and unlocking do not wait by themselves.
        otherwise: the log's words for a failure. Not at exit: the driver then frees all memory by
        itself, and may be gone already."""
        with ExitStack() as undo:
            context = self._retained(ordinal, undo)
            with self._current(context), ExitStack() as used:
                yield used
                undo.callback(self._end, context, used.pop_all(), otherwise)
            weakref.finalize(owner, undo.pop_all().close).atexit = False

    def _end(self, context: Any, used: ExitStack, otherwise: str) -> None:
        try:
            with self._current(context):
                self.synchronize()
                used.close()
        except DriverError as error:
            log.warning("%s until the process ends: %s", otherwise, error)

    def beside_captures(self) -> None:
        """Let this thread allocate and map memory while another thread captures a CUDA graph.

        Otherwise, in vLLM's capture mode, such a call of any thread would fail and break the
        capture."""
        mode = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self.call("cuThreadExchangeStreamCaptureMode", mode)

    def memory(self, ordinal: int) -> tuple[int, int]:
        """(free, total) bytes. If the process has no context on the GPU, the call makes a context
        and releases it: some 0.3 s and 0.5 GB."""
        with self.on(ordinal):
            free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    # ---- memory

    def granularity(self, ordinal: int) -> int:
        """The unit of allocations and mappings in bytes (2 MiB on current GPUs)."""
        flag = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        return int(self.call("cuMemGetAllocationGranularity", self._allocation(ordinal), flag))

    def rounded(self, ordinal: int, nbytes: int) -> int:
        """`nbytes`, rounded up to whole granules."""
        granule = self.granularity(ordinal)
        return -(-nbytes // granule) * granule

    def create(self, ordinal: int, nbytes: int, undo: ExitStack) -> Any:
        """A handle to `nbytes` (whole granules) of device memory, exportable as an fd. `undo`
        releases the handle."""
        handle = self.call("cuMemCreate", nbytes, self._allocation(ordinal), 0)
        undo.callback(self.attempt, "cuMemRelease", handle)
        return handle

    def export(self, handle: Any) -> int:
        """A new fd, closed on exec, which keeps the memory alive. The caller closes the fd."""
        fd = int(self.call("cuMemExportToShareableHandle", handle, self._posix, 0))
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int, undo: ExitStack) -> Any:
        """A handle to the memory behind the caller's `fd`. `undo` releases the handle."""
        handle = self.call("cuMemImportFromShareableHandle", fd, self._posix)
        undo.callback(self.attempt, "cuMemRelease", handle)
        return handle

    def map(self, ordinal: int, nbytes: int, handle: Any, undo: ExitStack) -> int:
        """Map the whole of `handle` for the GPU, which may read and write it. Returns the address;
        `undo` unmaps the memory."""
        granule = self.granularity(ordinal)
        address = int(self.call("cuMemAddressReserve", nbytes, granule, 0, 0))
        undo.callback(self.attempt, "cuMemAddressFree", address, nbytes)
        self.call("cuMemMap", address, nbytes, 0, handle, 0)
        undo.callback(self.attempt, "cuMemUnmap", address, nbytes)
        access = self._cuda.CUmemAccessDesc()
        access.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = ordinal
        access.flags = self._cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self.call("cuMemSetAccess", address, nbytes, [access], 1)
        return address

    def register(self, address: int, nbytes: int) -> None:
        """Lock whole pages of host memory that are mapped here, and let all GPUs of this process
        read and write them, at the same addresses: so it is on x86-64 Linux."""
        portable, devicemap = 0x01, 0x02  # CU_MEMHOSTREGISTER_…
        self.call("cuMemHostRegister", address, nbytes, portable | devicemap)

    def unregister(self, address: int) -> None:
        self.attempt("cuMemHostUnregister", address)

    def event(self) -> Any:
        """A new event without timing, which is never destroyed."""
        return self.call("cuEventCreate", self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)

    def follow(self, stream: int, event: Any, leader: int) -> None:
        """Make `stream` wait for the work that is queued on stream `leader` now. Streams are
        handles; `event` is recorded again."""
        self.call("cuEventRecord", event, leader)
        self.call("cuStreamWaitEvent", stream, event, 0)

    def copy_async(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between any two addresses that the current context can reach."""
        self.call("cuMemcpyAsync", target, source, nbytes, stream)

    def captured(self, work: Callable[[int], None]) -> Any:
        """The graph of what `work` queues on the stream with the handle that it is given. Other
        threads may do anything meanwhile."""
        relaxed = self._cuda.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        # A stream of torch's may be in use elsewhere.
        stream = self.call("cuStreamCreate", self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
        try:
            self.call("cuStreamBeginCapture", stream, relaxed)
            try:
                work(int(stream))
            finally:
                graph = self.call("cuStreamEndCapture", stream)
        finally:
            self.attempt("cuStreamDestroy", stream)
        return graph

    def synchronize(self) -> None:
        """Wait for all work of the current context's device."""
        self.attempt("cuCtxSynchronize")

    @property
    def _posix(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _allocation(self, ordinal: int) -> Any:
        """The properties of every allocation: plain device memory (not managed, not multicast),
        exportable as an fd."""
        wanted = self._cuda.CUmemAllocationProp()
        wanted.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        wanted.location.id = ordinal
        wanted.requestedHandleTypes = self._posix
        return wanted
