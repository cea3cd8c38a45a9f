"""Memory that torch allocates and other processes map: sealed memfds, the GPU's against a driver
that counts and can fail, and the GPU's on real GPUs. In real vLLM: test_real_in_place.py."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fake_cuda import MIB, NOTHING, FakeCuda, cuda
from processes import IMPORT_SECONDS, SECONDS, Worker, ran, script, with_torch

from vcache_backend.vram_pool import devices, exports, host_memory
from vcache_backend.vram_pool.exports import CudaExportable, HostExportable, Region

__all__ = ["cuda"]

SIZE = 64 * MIB


def kv(nbytes: int = MIB + 100, device: str = "cpu") -> torch.Tensor:
    """As vLLM makes its KV cache."""
    return torch.zeros(nbytes, dtype=torch.int8, device=torch.device(device))


def holder(tensor: torch.Tensor, found: Sequence[Region]) -> Region | None:
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    around = (it for it in found if it.address <= first and end <= it.address + it.nbytes)
    return next(around, None)


def gone(region: Region) -> bool:
    try:
        os.fstat(region.fd)
    except OSError:
        return True
    return False


# ---- host memory


def test_only_zeros_of_int8_in_host_memory_become_exportable() -> None:
    memory = HostExportable()
    with memory.context():
        taken = [kv(), torch.zeros((3, 5), dtype=torch.int8)]
        left = [torch.zeros(MIB), torch.empty(MIB, dtype=torch.int8), kv(device="meta"), kv(0)]
    found = memory.allocations()
    assert len(found) == 2
    assert all(holder(tensor, found) for tensor in taken)
    assert not any(holder(tensor, found) for tensor in [*left, kv()])
    assert [tuple(tensor.shape) for tensor in taken] == [(MIB + 100,), (3, 5)]
    assert not any(tensor.any() for tensor in taken)


def test_another_process_reads_what_is_written_and_can_write_nothing() -> None:
    memory = HostExportable()
    with memory.context():
        cache = kv().view(torch.bfloat16).view(-1, 2)
    (found,) = memory.allocations()
    assert found.nbytes % mmap.PAGESIZE == 0
    cache.copy_(torch.arange(cache.numel()).view(-1, 2))
    child = """
import hashlib, mmap, os, sys
fd, nbytes = os.open(sys.argv[1], os.O_RDWR), int(sys.argv[2])
for call in (lambda: mmap.mmap(fd, nbytes), lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 0),
             lambda: os.ftruncate(fd, 2 * nbytes)):
    try:
        call()
        print("changed")
    except PermissionError:
        pass
print(hashlib.sha256(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ)[:]).hexdigest())
"""
    whole = bytes((ctypes.c_char * found.nbytes).from_address(found.address))
    with script(child, f"/proc/{os.getpid()}/fd/{found.fd}", str(found.nbytes)) as reader:
        assert reader.wait() == (0, f"{hashlib.sha256(whole).hexdigest()}\n")
    assert whole[: cache.nbytes] == cache.contiguous().view(torch.uint8).numpy().tobytes()


def _written_by_a_child(_: object) -> tuple[int, int]:
    """The exit status of a forked child that writes to the memory, and what the memory holds."""
    memory = HostExportable()
    with memory.context():
        cache = torch.zeros(4096, dtype=torch.int8)
    child = os.fork()
    if child == 0:
        cache.fill_(1)
        os._exit(0)
    return os.waitpid(child, 0)[1], int(cache.sum())


def test_a_forked_child_cannot_write_vllms_memory() -> None:
    with Worker(with_torch(), object) as parent:
        assert parent.ask(_written_by_a_child) == (signal.SIGSEGV.value, 0)


@pytest.mark.parametrize("asked", [True, False], ids=["", "where the kernel cannot be asked"])
def test_pages_are_taken_before_they_are_used(monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
    if not asked:
        monkeypatch.setattr(host_memory, "_MADV_POPULATE_WRITE", 12345)
    memory = HostExportable()
    with memory.context():
        cache = kv(8 * MIB)
    (found,) = memory.allocations()
    assert os.fstat(found.fd).st_blocks * 512 == cache.nbytes


def test_descriptor_and_mapping_live_as_long_as_a_view_of_the_tensor() -> None:
    memory = HostExportable()
    with memory.context():
        view = kv().view(torch.bfloat16)[:100]
    gc.collect()
    (found,) = memory.allocations()
    assert os.fstat(found.fd).st_size == found.nbytes
    view.fill_(1)
    del view
    assert (memory.allocations(), gone(found)) == ([], True)


# ---- the GPU's, as torch calls it: it has two C functions


def functions(ordinal: int = 0) -> tuple[CudaExportable, Any, Any]:
    memory = CudaExportable(ordinal)
    return memory, *memory._callbacks


def test_torch_gets_whole_granules_whose_descriptor_lives_until_it_frees(cuda: FakeCuda) -> None:
    memory, allocate, free = functions(1)
    first, second = allocate(3 * MIB, 1, None), allocate(2 * MIB, 1, None)
    found = memory.allocations()
    assert [(one.address, one.nbytes) for one in found] == [(first, 4 * MIB), (second, 2 * MIB)]
    assert cuda.allowed[first] == 1
    assert [os.get_inheritable(one.fd) for one in found] == [False, False]
    free(first, 3 * MIB, 1, None)
    assert (memory.allocations(), gone(found[0])) == (found[1:], True)
    cuda.calls.clear()
    free(second, 2 * MIB, 1, None)
    assert (memory.allocations(), cuda.holds()) == ([], NOTHING)
    order = ["cuCtxSynchronize", "cuMemUnmap", "cuMemRelease"]
    assert sorted(order, key=cuda.calls.index) == order


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemExportToShareableHandle"])
def test_a_driver_call_that_fails_is_no_memory_and_leaves_none(cuda: FakeCuda, call: str) -> None:
    memory, allocate, _ = functions()
    cuda.broken = call
    assert allocate(2 * MIB, 0, None) is None
    said = f"2,097,152 B on cuda:0 for the KV cache: {call}: CUDA_ERROR_INVALID_VALUE"
    assert memory.problem.startswith(said)
    cuda.broken = ""
    assert (memory.allocations(), cuda.holds()) == ([], NOTHING)


def test_freeing_never_raises_through_c(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    memory, allocate, free = functions()
    address = allocate(2 * MIB, 0, None)
    cuda.broken = "cuDevicePrimaryCtxRetain"
    free(address, 2 * MIB, 0, None)
    free(address, 2 * MIB, 0, None)
    assert memory.allocations() == []
    said = "vcache: 2,097,152 B of KV cache on cuda:0 stay until the process ends"
    assert caplog.messages[0].startswith(said)


def test_no_garbage_is_collected_in_torch(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []
    create = cuda.cuMemCreate
    monkeypatch.setattr(
        cuda, "cuMemCreate", lambda *given: (collects.append(gc.isenabled()), create(*given))[1]
    )
    _, allocate, free = functions()
    free(allocate(2 * MIB, 0, None), 2 * MIB, 0, None)
    assert (collects, gc.isenabled()) == ([False], True)


def test_callbacks_outlive_everybody_who_knows_them(cuda: FakeCuda) -> None:
    memory = CudaExportable(0)
    addresses = [ctypes.cast(callback, ctypes.c_void_p).value for callback in memory._callbacks]
    del memory
    gc.collect()
    allocate, free = exports._ALLOCATE(addresses[0]), exports._FREE(addresses[1])
    free(allocate(2 * MIB, 0, None), 2 * MIB, 0, None)
    assert cuda.holds() == NOTHING


# ---- on real GPUs

READER = """
import sys, torch
from vcache_backend.vram_pool import regions, devices
fd, nbytes, at, size, owner, gpu = *map(int, sys.argv[1:5]), *sys.argv[5:]
whole = regions.map_gpu_memory(fd, nbytes, owner, devices.resolve(gpu))
assert torch.equal(whole[at : at + size], (torch.arange(size, device=gpu) % 251).to(torch.uint8))
print("the same")
"""


def fill(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).copy_(
        (torch.arange(tensor.nbytes, device=tensor.device) % 251).to(torch.uint8)
    )
    torch.cuda.synchronize()


def on_gpu(nbytes: int = SIZE) -> torch.Tensor:
    return kv(nbytes, "cuda:0")


@pytest.fixture
def memory() -> CudaExportable:
    torch.cuda.set_device(0)
    return CudaExportable(0)


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param("cuda:0", marks=pytest.mark.gpu),
        pytest.param("cuda:1", marks=pytest.mark.gpu(count=2)),
    ],
)
@pytest.mark.timeout(240)
def test_another_process_reads_the_kv_cache_where_it_lies(memory: CudaExportable, gpu: str) -> None:
    with memory.context():
        cache = on_gpu()
    assert not cache.any()
    fill(cache)
    (one,) = memory.allocations()
    assert holder(cache, [one]) == one
    where = [one.fd, one.nbytes, cache.data_ptr() - one.address, cache.nbytes]
    where += [devices.resolve("cuda:0").name, gpu]
    program = [sys.executable, "-c", READER, *map(str, where)]
    child = ran(*program, pass_fds=[one.fd], timeout=IMPORT_SECONDS)
    assert child.stdout == "the same\n", child.stderr
    assert holder(on_gpu(), [one]) is None


@pytest.mark.gpu
def test_memory_and_descriptor_are_gone_once_torch_gives_them_back(memory: CudaExportable) -> None:
    with memory.context():
        view = on_gpu().view(torch.bfloat16)[100:]
    gc.collect()
    torch.cuda.empty_cache()
    (one,) = memory.allocations()
    fill(view.view(torch.int8))
    assert not gone(one)
    del view
    torch.cuda.empty_cache()
    assert (memory.allocations(), gone(one)) == ([], True)


@pytest.mark.gpu
def test_too_little_memory_is_torchs_error_and_the_process_goes_on(memory: CudaExportable) -> None:
    with memory.context():
        with pytest.raises(torch.OutOfMemoryError):
            on_gpu(4 << 40)
        small = on_gpu(3 * MIB)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in memory.problem
    assert holder(small, memory.allocations()) is not None
    assert int(on_gpu().sum()) == 0


@pytest.mark.gpu
def test_only_the_thread_of_the_kv_cache_gets_exportable_memory(memory: CudaExportable) -> None:
    found: list[torch.Tensor] = []
    with memory.context():
        thread = threading.Thread(target=lambda: found.append(on_gpu()))
        thread.start()
        thread.join(SECONDS)
    assert holder(found[0], memory.allocations()) is None


@pytest.mark.gpu
def test_cuda_graphs_that_are_captured_later_use_the_kv_cache(memory: CudaExportable) -> None:
    with memory.context():
        cache = on_gpu()
    source = torch.ones(SIZE, dtype=torch.int8, device="cuda:0")
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cache.copy_(source)
    stream.synchronize()
    with torch.cuda.graph(graph):
        cache.add_(source)
    cache.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert int(cache.sum(dtype=torch.int64)) == SIZE
