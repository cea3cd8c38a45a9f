"""Segments of GPU memory. First against a driver that counts what it gave out and can fail anywhere, then on real GPUs."""

from __future__ import annotations

import ctypes
import enum
import gc
import importlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest
import torch
from test_segments import HOLDER, forged, left_behind, open_fds, receive_fd

from vcache_backend.errors import ConfigError, SegmentError
from vcache_backend.metadata_server.messages import SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_driver, cuda_segment, devices
from vcache_backend.vram_pool.cuda_driver import Driver
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.segment import MappedSegment, OwnedSegment, create, map_segment

MIB = 1 << 20
CHILD_SECONDS = 50


class Code(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_CONTEXT = 201


OK = Code.CUDA_SUCCESS


class _Names:
    """Any attribute is its own name: stands for the driver's enumerations."""

    def __getattr__(self, name: str) -> str:
        return name


class FakeCuda:
    """As much of `cuda.bindings.driver` as segments use, for GPUs of 64 MiB. What it gave out it holds in its tables.

    `broken`: the call that fails. `calls`: names of the calls so far. An exported fd is an eventfd whose count is the handle.
    """

    CUresult = Code
    CUdevice_attribute = CUdevice_P2PAttribute = CUmemAllocationGranularity_flags = _Names()
    CUmemAllocationHandleType = CUmemLocationType = CUmemAccess_flags = CUmemAllocationType = _Names()

    def __init__(self, gpus: int = 2, peers: bool = True) -> None:
        self.gpus, self.peers = gpus, peers
        self.broken = ""
        self.calls: list[str] = []
        self.contexts = [0] * gpus
        self.stack: list[int] = []
        self.sizes: dict[int, int] = {}
        self.handles: list[int] = []
        self.ranges: dict[int, Any] = {}
        self.mapped: dict[int, int] = {}
        self.allowed: dict[int, int] = {}

    def holds(self) -> dict[str, int]:
        """What a clean process has none of."""
        held = {"contexts": sum(self.contexts), "stack": len(self.stack), "handles": len(self.handles)}
        return held | {"ranges": len(self.ranges), "mapped": len(self.mapped)}

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and not name.startswith("cuGetError"):
            self.calls.append(name)
            if name == self.broken:
                return lambda *_: (Code.CUDA_ERROR_INVALID_VALUE,)
            if name.startswith("cuMem") and not self.stack and "Granularity" not in name:
                return lambda *_: (Code.CUDA_ERROR_INVALID_CONTEXT,)
        return object.__getattribute__(self, name)

    def CUmemAllocationProp(self) -> Any:
        return SimpleNamespace(location=SimpleNamespace())

    CUmemAccessDesc = CUmemAllocationProp

    def cuGetErrorString(self, code: Code) -> Any:
        return OK, code.name.lower().encode()

    def cuInit(self, flags: int) -> Any:
        return (OK,)

    def cuDriverGetVersion(self) -> Any:
        return OK, 13000

    def cuDeviceGetCount(self) -> Any:
        return OK, self.gpus

    def cuDeviceGet(self, ordinal: int) -> Any:
        return (OK, ordinal) if ordinal < self.gpus else (Code.CUDA_ERROR_INVALID_VALUE, None)

    def cuDeviceGetUuid(self, device: int) -> Any:
        return OK, SimpleNamespace(bytes=uuid.UUID(int=0xABC0 + device).bytes)

    def cuDeviceGetName(self, length: int, device: int) -> Any:
        return OK, b"Fake H200".ljust(length, b"\0")

    def cuDeviceGetAttribute(self, attribute: str, device: int) -> Any:
        return OK, 1

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> Any:
        return OK, int(self.peers)

    def cuDeviceGetP2PAttribute(self, attribute: str, source: int, target: int) -> Any:
        return OK, 1

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

    def cuCtxSynchronize(self) -> Any:
        return (OK,)

    def cuMemGetInfo(self) -> Any:
        return OK, 5 * MIB, 64 * MIB

    def cuMemGetAllocationGranularity(self, wanted: Any, flag: str) -> Any:
        return OK, 2 * MIB

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
            count = next((line.split()[1] for line in lines if line.startswith("eventfd-count")), None)
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

    def cuMemSetAccess(self, address: int, nbytes: int, access: list[Any], count: int) -> Any:
        assert (len(access), access[0].flags) == (count, "CU_MEM_ACCESS_FLAGS_PROT_READWRITE")
        self.allowed[address] = access[0].location.id
        return (OK,)


NOTHING = {"contexts": 0, "stack": 0, "handles": 0, "ranges": 0, "mapped": 0}
UUIDS = [f"GPU-{uuid.UUID(int=0xABC0 + ordinal)}" for ordinal in range(2)]
GPU0, GPU1 = (Device(name, "cuda", ordinal) for ordinal, name in enumerate(UUIDS))


def cpu_view(whole: Any, ordinal: int) -> torch.Tensor:
    """What torch makes of a mapping, where there is no GPU: host memory that keeps `whole` alive."""
    described = whole.__cuda_array_interface__
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=described, whole=whole)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """A machine of two fake GPUs; torch is on the first."""
    fake = FakeCuda()
    driver = Driver(fake)
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(devices, "current_gpu", lambda: 0)
    monkeypatch.setattr(cuda_segment, "view", cpu_view)
    return fake


@pytest.fixture
def owned(cuda: FakeCuda) -> Iterator[OwnedSegment]:
    with create(GPU0, 4 * MIB) as segment:
        yield segment


# ---- names of devices


def test_a_gpu_is_named_by_its_uuid_however_it_is_asked_for(cuda: FakeCuda) -> None:
    assert devices.resolve("auto") == devices.resolve("cuda") == devices.resolve("cuda:0") == GPU0
    assert devices.resolve("cuda:1") == devices.resolve(UUIDS[1]) == devices.resolve("GPU-" + UUIDS[1][4:].upper()) == GPU1
    assert str(GPU1) == "GPU-00000000-0000-0000-0000-00000000abc1 (cuda:1)"


def test_a_gpu_that_is_not_there_is_a_configuration_error_that_says_which_are(cuda: FakeCuda) -> None:
    with pytest.raises(ConfigError, match="cuda:2 means GPU 2, but this process sees 2"):
        devices.resolve("cuda:2")
    hidden = f"GPU-{uuid.UUID(int=7)}"
    with pytest.raises(ConfigError, match=rf"{hidden} is not visible .*CUDA_VISIBLE_DEVICES\); visible: {UUIDS[0]}, {UUIDS[1]}"):
        devices.resolve(hidden)


def test_cuda_without_a_gpu_in_torch_is_a_configuration_error(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "current_gpu", lambda: None)
    with pytest.raises(ConfigError, match="torch sees no GPU here"):
        devices.resolve("cuda")


def test_the_gpus_of_a_machine_come_with_memory_and_links(cuda: FakeCuda) -> None:
    first, second = devices.gpus()
    assert (first.uuid, first.name, first.free_bytes, first.total_bytes) == (UUIDS[0], "Fake H200", 5 * MIB, 64 * MIB)
    assert (first.links, second.links) == ({UUIDS[1]: "nvlink"}, {UUIDS[0]: "nvlink"})
    assert cuda.holds() == NOTHING


def test_a_gpu_reads_itself_its_peers_and_no_host_memory(cuda: FakeCuda) -> None:
    assert devices.can_read(GPU0, GPU0)
    assert devices.can_read(GPU0, UUIDS[1])
    assert not devices.can_read(GPU0, "host")
    assert not devices.can_read(Device("host", "host"), GPU0)
    cuda.peers = False
    assert devices.can_read(GPU0, GPU0)
    assert not devices.can_read(GPU0, GPU1)


def test_missing_bindings_are_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    monkeypatch.setattr(devices, "current_gpu", lambda: 0)
    monkeypatch.setattr(cuda_driver, "load", cuda_driver.load.__wrapped__)
    for ask in (lambda: create(GPU0, MIB), devices.gpus, lambda: devices.resolve("auto")):
        with pytest.raises((SegmentError, ConfigError), match=r"pip install 'cuda-bindings==13\.\*'") as caught:
            cast(Callable[[], object], ask)()
        assert "\n" not in str(caught.value)


def test_a_missing_driver_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoLibrary(FakeCuda):
        def cuInit(self, flags: int) -> Any:
            raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(importlib, "import_module", lambda name: NoLibrary())
    with pytest.raises(SegmentError, match=r"NVIDIA driver cannot be used: libcuda.so.1 not found; .*pool.device: host"):
        cuda_driver.load.__wrapped__()


# ---- against the counting driver


def test_a_gpu_segment_is_rounded_up_and_only_its_fd_remains(cuda: FakeCuda) -> None:
    before = open_fds()
    with create(GPU1, 3 * MIB) as owned:
        assert owned.info == SegmentInfo(owned.id, UUIDS[1], "cuda", 4 * MIB)
        assert not os.get_inheritable(owned.fd)
        assert cuda.holds() == NOTHING
    assert open_fds() == before


def test_out_of_memory_says_what_was_asked_what_is_free_and_what_to_set(cuda: FakeCuda) -> None:
    with pytest.raises(SegmentError, match=r"needs 104,857,600 B but 5,242,880 of 67,108,864 B are free") as caught:
        create(GPU0, 100 * MIB)
    assert "set pool.segment_bytes <= 4194304 " in str(caught.value)
    assert UUIDS[0] in str(caught.value)
    assert cuda.holds() == NOTHING


@pytest.mark.parametrize("reader", [GPU0, GPU1])
def test_a_mapping_is_readable_on_its_reader_and_gone_after_close(cuda: FakeCuda, owned: OwnedSegment, reader: Device) -> None:
    with map_segment(owned.info, owned.fd, reader) as mapped:
        assert cuda.allowed[mapped.address(0, 1)] == reader.ordinal
        assert mapped.tensor(10, 4).data_ptr() == mapped.address(10, 4)
        assert cuda.holds() == NOTHING | {"contexts": 1, "handles": 1, "ranges": 1, "mapped": 1}
    assert cuda.holds() == NOTHING


def test_unmapping_waits_for_the_devices_work_and_runs_backwards(cuda: FakeCuda, owned: OwnedSegment) -> None:
    mapped = map_segment(owned.info, owned.fd, GPU1)
    cuda.calls.clear()
    mapped.close()
    mapped.close()
    assert [name for name in cuda.calls if name != "cuDeviceGet"] == [
        "cuCtxPushCurrent",
        "cuCtxSynchronize",
        "cuMemUnmap",
        "cuMemAddressFree",
        "cuMemRelease",
        "cuCtxPopCurrent",
        "cuDevicePrimaryCtxRelease",
    ]


def test_a_live_tensor_keeps_the_gpu_mapping(cuda: FakeCuda, owned: OwnedSegment) -> None:
    mapped = map_segment(owned.info, owned.fd, GPU0)
    part = mapped.tensor(0, 64)[8:16]
    mapped.close()
    del mapped
    assert cuda.holds()["mapped"] == 1
    del part
    assert cuda.holds() == NOTHING


SETUP = [
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
]


@pytest.mark.parametrize("call", SETUP)
def test_a_mapping_that_fails_at_any_step_leaves_nothing(cuda: FakeCuda, owned: OwnedSegment, call: str) -> None:
    before = open_fds()
    cuda.broken = call
    message = f"segment {owned.id} of {UUIDS[0]}: GPU {UUIDS[1]} cannot map 4,194,304 B of GPU {UUIDS[0]}: {call}: CUDA_ERROR"
    with pytest.raises(SegmentError, match=message):
        map_segment(owned.info, owned.fd, GPU1)
    assert (cuda.holds(), open_fds()) == (NOTHING, before)


@pytest.mark.parametrize("call", ["cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuMemCreate", "cuMemExportToShareableHandle"])
def test_a_creation_that_fails_at_any_step_leaves_nothing(cuda: FakeCuda, call: str) -> None:
    before = open_fds()
    cuda.broken = call
    with pytest.raises(SegmentError, match=f"{call}: CUDA_ERROR_INVALID_VALUE"):
        create(GPU0, MIB)
    assert (cuda.holds(), open_fds()) == (NOTHING, before)


def test_a_torch_that_cannot_view_the_mapping_leaves_nothing(
    cuda: FakeCuda, owned: OwnedSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(whole: Any, ordinal: int) -> torch.Tensor:
        raise SegmentError("torch has no CUDA")

    monkeypatch.setattr(cuda_segment, "view", refuse)
    message = ""
    try:  # not `pytest.raises`: it may keep the traceback, and with it the mapping
        map_segment(owned.info, owned.fd, GPU0)
    except SegmentError as error:
        message = str(error)
    assert "torch has no CUDA" in message
    gc.collect()  # Python 3.12 keeps the traceback in a cycle
    assert cuda.holds() == NOTHING


def test_a_clean_up_that_fails_is_logged_and_goes_on(
    cuda: FakeCuda, owned: OwnedSegment, caplog: pytest.LogCaptureFixture
) -> None:
    mapped = map_segment(owned.info, owned.fd, GPU0)
    cuda.broken = "cuCtxSynchronize"
    with caplog.at_level(logging.WARNING):
        mapped.close()
    assert cuda.holds() == NOTHING
    assert "clean-up of a GPU segment: cuCtxSynchronize: CUDA_ERROR_INVALID_VALUE" in caplog.text


def test_no_peer_access_is_refused_by_both_names_before_anything_is_mapped(cuda: FakeCuda, owned: OwnedSegment) -> None:
    cuda.peers = False
    cuda.calls.clear()
    with pytest.raises(SegmentError, match=f"GPU {UUIDS[1]} has no peer access to GPU {UUIDS[0]}"):
        map_segment(owned.info, owned.fd, GPU1)
    assert "cuMemImportFromShareableHandle" not in cuda.calls
    with map_segment(owned.info, owned.fd, GPU0):
        assert cuda.holds()["mapped"] == 1


def test_an_owner_that_is_not_visible_is_tried_and_named_when_it_fails(cuda: FakeCuda, owned: OwnedSegment) -> None:
    hidden = msgspec.structs.replace(owned.info, device=f"GPU-{uuid.UUID(int=7)}")
    assert devices.can_read(GPU0, hidden.device)
    map_segment(hidden, owned.fd, GPU0).close()
    cuda.broken = "cuMemSetAccess"
    with pytest.raises(SegmentError, match=f"{hidden.device} is not visible here, so nobody asked whether there is peer access"):
        map_segment(hidden, owned.fd, GPU0)


@pytest.mark.parametrize(("kind", "what"), [("plain", "a file or memfd"), ("small", "a file or memfd"), ("socket", "a socket")])
def test_an_fd_that_cannot_be_gpu_memory_never_reaches_the_driver(cuda: FakeCuda, kind: str, what: str) -> None:
    info = SegmentInfo(SegmentId("0123456789ab"), UUIDS[0], "cuda", 4 * MIB)
    with socket.socket() as other, forged("plain" if kind == "socket" else kind) as file:
        fd = other.fileno() if kind == "socket" else file
        with pytest.raises(SegmentError, match=f"is {what}, not exported GPU memory"):
            map_segment(info, fd, GPU0)
    assert "cuMemImportFromShareableHandle" not in cuda.calls


def test_a_claimed_size_that_the_memory_does_not_have_is_refused(cuda: FakeCuda, owned: OwnedSegment) -> None:
    with pytest.raises(SegmentError, match="4,194,305 B is no multiple of the granularity of 2,097,152 B"):
        map_segment(msgspec.structs.replace(owned.info, nbytes=4 * MIB + 1), owned.fd, GPU0)
    with pytest.raises(SegmentError, match="cannot map 8,388,608 B .*cuMemMap: CUDA_ERROR_INVALID_VALUE"):
        map_segment(msgspec.structs.replace(owned.info, nbytes=8 * MIB), owned.fd, GPU0)
    assert cuda.holds() == NOTHING


# ---- on real GPUs

SIZE = 64 * MIB

# argv: the number of a connected Unix socket, the reader's or owner's device.
GPU_CREATOR = """
import signal, socket, sys
import msgspec, torch
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.segment import create, map_segment
channel, device = socket.socket(fileno=int(sys.argv[1])), devices.resolve(sys.argv[2])
with create(device, 64 << 20) as owned, map_segment(owned.info, owned.fd, device) as mapped:
    mapped.tensor(0, 64 << 20).copy_(torch.arange(64 << 20, device=mapped.tensor(0, 1).device) % 251)
    torch.cuda.synchronize(device.ordinal)
    socket.send_fds(channel, [msgspec.msgpack.encode(owned.info)], [owned.fd])
    signal.pause()
"""
GPU_READER = """
import socket, sys
import msgspec, torch
from vcache_backend.errors import SegmentError
from vcache_backend.metadata_server.messages import SegmentInfo
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.segment import map_segment
channel, device = socket.socket(fileno=int(sys.argv[1])), devices.resolve(sys.argv[2])
data, (fd,), _, _ = socket.recv_fds(channel, 4096, 1)
info = msgspec.msgpack.decode(data, type=SegmentInfo)
try:
    with map_segment(info, fd, device) as mapped:
        whole = mapped.tensor(0, info.nbytes)
        right = bool((whole == torch.arange(info.nbytes, device=whole.device) % 251).all())
        mapped.tensor(0, 1).fill_(253)
        torch.cuda.synchronize(device.ordinal)
        channel.sendall(f"{device.name} {'right' if right else 'WRONG'}".encode())
except SegmentError as error:
    channel.sendall(str(error).encode())
"""


@contextmanager
def gpu_child(
    script: str, device: str = "", visible: str | None = None
) -> Iterator[tuple[subprocess.Popen[bytes], socket.socket]]:
    """A child as in test_segments, with a device in argv and other visible GPUs if wanted."""
    ours, theirs = socket.socketpair()
    ours.settimeout(CHILD_SECONDS)
    environment = dict(os.environ) | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    with ours:
        with theirs:
            number = theirs.fileno()
            command = [sys.executable, "-c", script, str(number), device]
            process = subprocess.Popen(command, pass_fds=[number], env=environment)
        try:
            yield process, ours
        finally:
            process.kill()
            process.wait(CHILD_SECONDS)


def pattern(device: torch.device, nbytes: int = SIZE) -> torch.Tensor:
    return (torch.arange(nbytes, device=device) % 251).to(torch.uint8)


def receive_segment(channel: socket.socket) -> tuple[SegmentInfo, int]:
    data, fd = receive_fd(channel)
    return msgspec.msgpack.decode(data, type=SegmentInfo), fd


def free_bytes(ordinal: int) -> int:
    torch.cuda.synchronize(ordinal)
    return torch.cuda.mem_get_info(ordinal)[0]


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """The driver gives memory of a dead process back some time after its death."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def written(device: Device) -> Iterator[tuple[OwnedSegment, MappedSegment]]:
    with create(device, SIZE) as owned, map_segment(owned.info, owned.fd, device) as mapped:
        whole = mapped.tensor(0, SIZE)
        whole.copy_(pattern(whole.device))
        torch.cuda.synchronize(device.ordinal)
        yield owned, mapped


@pytest.mark.gpu
def test_a_gpu_segment_is_mapped_by_its_own_process() -> None:
    device = devices.resolve("cuda:0")
    with written(device) as (owned, mapped):
        view = mapped.tensor(4096, 8192)
        assert (view.device, view.dtype) == (torch.device("cuda:0"), torch.uint8)
        assert view.data_ptr() == mapped.address(4096, 8192)
        assert torch.equal(view, pattern(view.device)[4096 : 4096 + 8192])
        with map_segment(mapped.info, mapped.fd, device) as again:
            mapped.tensor(0, 1).fill_(99)
            assert again.tensor(0, 1).item() == 99
            assert again.address(0, 1) != mapped.address(0, 1)
        assert owned.nbytes == SIZE


@pytest.mark.gpu
@pytest.mark.timeout(120)
def test_a_real_child_reads_and_writes_the_segment_of_its_parent() -> None:
    device = devices.resolve("cuda:0")
    with written(device) as (owned, mapped), gpu_child(GPU_READER, device.name) as (_, channel):
        socket.send_fds(channel, [msgspec.msgpack.encode(owned.info)], [owned.fd])
        assert channel.recv(4096).decode() == f"{device.name} right"
        assert mapped.tensor(0, 1).item() == 253


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "reader",
    [pytest.param("cuda:0", marks=pytest.mark.gpu), pytest.param("cuda:1", marks=pytest.mark.gpu(count=2))],
)
def test_gpu_memory_outlives_its_creator_in_the_hands_of_a_plain_process(reader: str) -> None:
    with gpu_child(HOLDER) as (_, holder):
        with gpu_child(GPU_CREATOR, "cuda:0") as (creator, channel):
            info, fd = receive_segment(channel)
            socket.send_fds(holder, [b"segment"], [fd])
            os.close(fd)
            assert holder.recv(4) == b"held"
            creator.send_signal(signal.SIGKILL)
            assert creator.wait(CHILD_SECONDS) == -signal.SIGKILL
        holder.sendall(b"?")
        _, fd = receive_fd(holder)
    device = devices.resolve(reader)
    with map_segment(info, fd, device) as mapped:
        os.close(fd)
        whole = mapped.tensor(0, SIZE)
        assert whole.device == torch.device(reader)
        assert torch.equal(whole, pattern(whole.device))
        del whole
    assert info.device == devices.resolve("cuda:0").name


@pytest.mark.gpu
def test_closing_the_last_fd_gives_the_memory_back() -> None:
    device = devices.resolve("cuda:0")
    torch.zeros(1, device="cuda:0")
    before = free_bytes(0)
    owned = create(device, SIZE)
    kept = os.dup(owned.fd)
    owned.close()
    assert before - free_bytes(0) >= SIZE
    os.close(kept)
    assert eventually(lambda: before - free_bytes(0) < 2 * MIB)


@pytest.mark.gpu
def test_an_fd_of_something_else_is_refused_by_the_real_driver() -> None:
    device = devices.resolve("cuda:0")
    info = SegmentInfo(SegmentId("0123456789ab"), device.name, "cuda", SIZE)
    for kind in ("plain", "small", "device"):
        with forged(kind) as fd, pytest.raises(SegmentError, match=f"segment 0123456789ab of {device.name}"):
            map_segment(info, fd, device)


@pytest.mark.gpu
def test_more_memory_than_the_gpu_has_is_refused_with_the_figures() -> None:
    with pytest.raises(SegmentError, match=r"needs [\d,]+ B but [\d,]+ of [\d,]+ B are free; set pool.segment_bytes <= \d+"):
        create(devices.resolve("cuda:0"), 4 << 40)


@pytest.mark.gpu
@pytest.mark.timeout(180)
def test_200_lives_of_a_gpu_segment_leave_no_fd_and_no_memory() -> None:
    device = devices.resolve("cuda:0")

    def life() -> None:
        with create(device, 2 * MIB) as owned, map_segment(owned.info, owned.fd, device) as mapped:
            mapped.tensor(0, 1).fill_(1)

    life()
    before = free_bytes(0)
    assert left_behind(life) == (0, 0)
    assert eventually(lambda: before - free_bytes(0) < 8 * MIB), f"{before - free_bytes(0):,} B are gone"


@pytest.mark.gpu
def test_mapping_leaves_the_threads_device_as_it_was() -> None:
    last = torch.cuda.device_count() - 1
    torch.cuda.set_device(last)
    try:
        with written(devices.resolve("cuda:0")):
            assert torch.cuda.current_device() == last
            assert torch.zeros(1, device="cuda").device.index == last
    finally:
        torch.cuda.set_device(0)


@pytest.mark.gpu(count=2)
def test_a_peer_reads_and_writes_the_segment_of_the_other_gpu() -> None:
    with written(devices.resolve("cuda:0")) as (owned, mapped):
        with map_segment(owned.info, owned.fd, devices.resolve("cuda:1")) as peer:
            whole = peer.tensor(0, SIZE)
            assert whole.device == torch.device("cuda:1")
            assert torch.equal(whole, pattern(whole.device))
            peer.tensor(5, 1).fill_(254)
            torch.cuda.synchronize(1)
            del whole
        assert mapped.tensor(5, 1).item() == 254


@pytest.mark.gpu(count=2)
@pytest.mark.timeout(120)
def test_processes_that_number_the_gpus_differently_agree_by_uuid() -> None:
    owner, peer = devices.resolve("cuda:0"), devices.resolve("cuda:1")
    with written(owner) as (owned, _), gpu_child(GPU_READER, "cuda:0", f"{peer.name},{owner.name}") as (_, channel):
        socket.send_fds(channel, [msgspec.msgpack.encode(owned.info)], [owned.fd])
        assert channel.recv(4096).decode() == f"{peer.name} right"


@pytest.mark.gpu(count=2)
@pytest.mark.timeout(120)
@pytest.mark.parametrize("owner", [0, 1])
def test_a_process_that_sees_only_its_own_gpu_reads_and_writes_the_other(owner: int) -> None:
    own, other = devices.resolve(f"cuda:{owner}"), devices.resolve(f"cuda:{1 - owner}")
    with written(own) as (owned, mapped), gpu_child(GPU_READER, "cuda:0", other.name) as (_, channel):
        socket.send_fds(channel, [msgspec.msgpack.encode(owned.info)], [owned.fd])
        assert channel.recv(4096).decode() == f"{other.name} right"
        assert mapped.tensor(0, 1).item() == 253
