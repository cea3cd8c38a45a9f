"""As much of the CUDA driver as segments and the doctor use: it counts what it gave out, and can
fail anywhere. Import the fixture `cuda`."""

from __future__ import annotations

import ctypes
import enum
import os
import threading
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vcache_backend.vram_pool import cuda_driver, devices, regions
from vcache_backend.vram_pool.cuda_driver import Driver
from vcache_backend.vram_pool.devices import Device

MIB = 1 << 20
TABLES = ("stack", "handles", "ranges", "mapped", "registered")


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


OK = Code.CUDA_SUCCESS


ALWAYS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("cuInit", "cuCtxSynchronize"), ()),
    **dict.fromkeys(("cuDeviceGetAttribute", "cuDeviceGetP2PAttribute"), (1,)),
    "cuDriverGetVersion": (13000,),
    "cuDeviceGetName": (b"Fake H200\0",),
    "cuDeviceGetPCIBusId": (b"FFFF:FF:1F.7\0",),
    "cuMemGetInfo": (5 * MIB, 64 * MIB),
    "cuMemGetAllocationGranularity": (2 * MIB,),
}
"""What these calls answer whenever they succeed."""


class _Names:
    """Any attribute is its own name: stands for the driver's enumerations."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeCuda:
    """As much of `cuda.bindings.driver` as segments use, for GPUs of 64 MiB. What it gave out it
    holds in its tables.

    `broken`: the call that fails. `calls`: names of the calls so far. An exported fd is an eventfd
    whose count is the handle."""

    CUresult = Code
    CUdevice_attribute = CUdevice_P2PAttribute = CUmemAllocationGranularity_flags = _Names()
    CUstreamCaptureMode = _Names()
    CUmemAllocationHandleType = CUmemLocationType = CUmemAccess_flags = CUmemAllocationType = (
        _Names()
    )

    def __init__(self) -> None:
        self.gpus, self.peers = 2, True
        self.broken = ""
        self.calls: list[str] = []
        self.contexts = [0] * self.gpus
        self.stack: list[int] = []
        self.sizes: dict[int, int] = {}
        self.handles: list[int] = []
        self.ranges: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.allowed: dict[int, int] = {}
        self.registered: dict[int, int] = {}
        self.most_registered = 1 << 40
        """Bytes of host memory that it locks."""
        self.register_waits: Callable[[], None] = lambda: None
        self.relaxed: set[int] = set()
        """Threads that may call what a capture forbids."""

    def holds(self) -> dict[str, int]:
        """What a clean process has none of."""
        tables = {name: len(getattr(self, name)) for name in TABLES}
        return {"contexts": sum(self.contexts)} | tables

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and not name.startswith("cuGetError"):
            self.calls.append(name)
            if name == self.broken:
                return lambda *_: (Code.CUDA_ERROR_INVALID_VALUE,)
            if name.startswith("cuMem") and not self.stack and "Granularity" not in name:
                return lambda *_: (Code.CUDA_ERROR_INVALID_CONTEXT,)
            if name in ALWAYS:
                return lambda *_: (OK, *ALWAYS[name])
        return object.__getattribute__(self, name)

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuGetErrorString(self, code: Code) -> Any:
        return OK, code.name.lower().encode()

    def cuDeviceGetCount(self) -> Any:
        return OK, self.gpus

    def cuDeviceGet(self, ordinal: int) -> Any:
        return (OK, ordinal) if ordinal < self.gpus else (Code.CUDA_ERROR_INVALID_VALUE, None)

    def cuDeviceGetUuid(self, device: int) -> Any:
        return OK, SimpleNamespace(bytes=uuid.UUID(int=0xABC0 + device).bytes)

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> Any:
        return OK, int(self.peers)

    def cuDevicePrimaryCtxRetain(self, device: int) -> Any:
        self.contexts[device] += 1
        return OK, device

    def cuDevicePrimaryCtxRelease(self, device: int) -> Any:
        self.contexts[device] -= 1
        return (OK,)

    def cuCtxPushCurrent(self, context: int) -> Any:
        self.stack.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> Any:
        return OK, self.stack.pop()

    def cuMemCreate(self, nbytes: int, wanted: Any, flags: int) -> Any:
        assert wanted.type == "CU_MEM_ALLOCATION_TYPE_PINNED"
        assert wanted.requestedHandleTypes == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        if nbytes > 64 * MIB:
            return (Code.CUDA_ERROR_OUT_OF_MEMORY, None)
        handle = len(self.sizes) + 1
        self.sizes[handle] = nbytes
        self.handles.append(handle)
        return OK, handle

    def cuMemExportToShareableHandle(self, handle: int, kind: str, flags: int) -> Any:
        return OK, os.eventfd(handle, 0)

    def cuMemImportFromShareableHandle(self, fd: int, kind: str) -> Any:
        with open(f"/proc/self/fdinfo/{fd}") as lines:
            counts = (line.split()[1] for line in lines if line.startswith("eventfd-count"))
            count = next(counts, None)
        if count is None:
            return (Code.CUDA_ERROR_INVALID_VALUE, None)
        self.handles.append(int(count, 16))
        return OK, int(count, 16)

    def cuMemRelease(self, handle: int) -> Any:
        self.handles.remove(handle)
        return (OK,)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> Any:
        memory = (ctypes.c_char * nbytes)()
        self.ranges[ctypes.addressof(memory)] = memory
        return OK, ctypes.addressof(memory)

    def cuMemAddressFree(self, address: int, nbytes: int) -> Any:
        assert address not in self.mapped, "an address range is freed under a mapping"
        del self.ranges[address]
        return (OK,)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> Any:
        if nbytes > self.sizes[handle]:
            return (Code.CUDA_ERROR_INVALID_VALUE,)
        self.mapped[address] = handle
        return (OK,)

    def cuMemUnmap(self, address: int, nbytes: int) -> Any:
        del self.mapped[address]
        return (OK,)

    def cuThreadExchangeStreamCaptureMode(self, mode: str) -> Any:
        if mode == "CU_STREAM_CAPTURE_MODE_RELAXED":
            self.relaxed.add(threading.get_ident())
        return OK, "CU_STREAM_CAPTURE_MODE_GLOBAL"

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        assert (address % 4096, nbytes % 4096, flags) == (0, 0, 0x03)
        self.register_waits()
        if sum(self.registered.values()) + nbytes > self.most_registered:
            return (Code.CUDA_ERROR_OUT_OF_MEMORY,)
        self.registered[address] = nbytes
        return (OK,)

    def cuMemHostUnregister(self, address: int) -> Any:
        del self.registered[address]
        return (OK,)

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> Any:
        assert (len(access), access[0].flags) == (count, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
        self.allowed[address] = access[0].location.id
        return (OK,)


NOTHING = dict.fromkeys(("contexts", *TABLES), 0)
UUIDS = [f"GPU-{uuid.UUID(int=0xABC0 + ordinal)}" for ordinal in range(2)]
GPU0, GPU1 = (Device(name, "cuda", ordinal) for ordinal, name in enumerate(UUIDS))


def cpu_view(mapping: Any, ordinal: int) -> torch.Tensor:
    """What torch makes of a mapping, where there is no GPU: host memory that keeps `mapping`
    alive.
    """
    described = mapping.__cuda_array_interface__
    held = SimpleNamespace(__array_interface__=described, mapping=mapping)
    return torch.from_numpy(np.asarray(held))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine of two fake GPUs; torch is on the first."""
    fake = FakeCuda()
    driver = Driver(fake)
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(devices, "current_gpu", lambda: 0)
    monkeypatch.setattr(regions, "view", cpu_view)
    return fake
