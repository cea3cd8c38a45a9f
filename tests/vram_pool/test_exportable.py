"""Memory that torch allocates and other processes map: sealed memfds here, and the GPU's against a
driver that counts and can fail.

On real GPUs: test_gpu_exportable.py. In real vLLM: test_vllm_in_place.py.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import mmap
import os
import re
import signal
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from fake_cuda import MIB, NOTHING, FakeCuda
from processes import Worker, script, with_torch
from test_cuda_segments import cuda as cuda
from torch import overrides
from torch.overrides import TorchFunctionMode

from vcache_backend.errors import LayoutError, SegmentError
from vcache_backend.integration.vllm.in_place.exporter import Exporter
from vcache_backend.vram_pool import exports as cuda_exportable
from vcache_backend.vram_pool import host_memory
from vcache_backend.vram_pool.exports import CudaExportable, HostExportable, Region


def kv(nbytes: int = MIB + 100, **more: Any) -> torch.Tensor:
    """As vLLM makes its KV cache."""
    return torch.zeros(nbytes, **{"dtype": torch.int8, "device": torch.device("cpu"), **more})


def holds(tensor: torch.Tensor, found: Sequence[Region]) -> bool:
    return any(one.address == tensor.data_ptr() and tensor.nbytes <= one.nbytes for one in found)


# ---- host memory


def test_only_zeros_of_int8_in_host_memory_become_exportable() -> None:
    memory = HostExportable()
    with memory.context():
        taken = [kv(), torch.zeros((3, 5), dtype=torch.int8)]
        left = [torch.zeros(MIB), torch.empty(MIB, dtype=torch.int8), kv(device="meta"), kv(0)]
    found = memory.allocations()
    assert [holds(tensor, found) for tensor in taken] == [True] * 2
    assert [holds(tensor, found) for tensor in [*left, kv()]] == [False] * 5
    assert len(found) == 2
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
try:
    mmap.mmap(fd, nbytes)
    print("mapped writable")
except PermissionError:
    pass
for call in (lambda: os.write(fd, b"x"), lambda: os.ftruncate(fd, 0), lambda: os.ftruncate(fd, 2 * nbytes)):
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
    assert memory.allocations() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(found.fd)


# ---- around vLLM's KV cache


def test_vllm_is_given_a_context_for_its_kv_cache_and_for_nothing_else() -> None:
    exporter = Exporter("cpu")
    before = kv()
    context = exporter.context()
    with context:
        other, whole = kv(), kv()
        layers = {"a": whole[100:], "b": whole}
    after = kv()
    found = [exporter.region(layers)]
    exported = [holds(tensor, found) for tensor in (before, other, whole, after)]
    assert exported == [False, False, True, False]


def test_a_kv_cache_that_lies_elsewhere_is_named() -> None:
    exporter = Exporter("cpu")
    message = "1,048,676 B on cpu lie in none of the 0 exportable allocations (another "
    message += "connector or allocator has made it); or set connector.share: pool"
    with pytest.raises(LayoutError, match=re.escape(message)):
        exporter.region({"layers.0": kv()})


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_a_context_that_fails_raises_nothing(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("torch says no")

    monkeypatch.setattr(TorchFunctionMode, place, fail)
    exporter = Exporter("cpu")
    with exporter.context() or nullcontext():
        layer = kv()
    said = "cannot be shared in place: RuntimeError: torch says no"
    with pytest.raises(SegmentError, match=said):
        exporter.region({"layers.0": layer})
    while torch._C._len_torch_function_stack():
        overrides._pop_mode()


def test_what_vllm_raises_within_its_context_is_vllms() -> None:
    exporter = Exporter("cpu")
    context = exporter.context()
    with pytest.raises(MemoryError), context:
        raise MemoryError
    assert torch._C._len_torch_function_stack() == 0


# ---- the GPU's, as torch calls it: it has two C functions


def test_torch_gets_whole_granules_whose_descriptor_lives_until_it_frees(cuda: FakeCuda) -> None:
    memory = CudaExportable(1)
    allocate, free = memory._callbacks
    first, second = allocate(3 * MIB, 1, None), allocate(2 * MIB, 1, None)
    assert [one.nbytes for one in memory.allocations()] == [4 * MIB, 2 * MIB]
    assert [one.address for one in memory.allocations()] == [first, second]
    assert cuda.allowed[first] == 1
    fds = [one.fd for one in memory.allocations()]
    assert [os.get_inheritable(fd) for fd in fds] == [False, False]
    free(first, 3 * MIB, 1, None)
    assert [one.address for one in memory.allocations()] == [second]
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fds[0])
    cuda.calls.clear()
    free(second, 2 * MIB, 1, None)
    assert (memory.allocations(), cuda.holds()) == ([], NOTHING)
    order = ["cuCtxSynchronize", "cuMemUnmap", "cuMemRelease"]
    assert sorted(order, key=cuda.calls.index) == order


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemExportToShareableHandle"])
def test_a_driver_call_that_fails_is_no_memory_and_leaves_none(cuda: FakeCuda, call: str) -> None:
    memory = CudaExportable(0)
    allocate, _ = memory._callbacks
    cuda.broken = call
    assert allocate(2 * MIB, 0, None) is None
    said = f"2,097,152 B on cuda:0 for the KV cache: {call}: CUDA_ERROR_INVALID_VALUE"
    assert memory.problem.startswith(said)
    cuda.broken = ""
    assert (memory.allocations(), cuda.holds()) == ([], NOTHING)


def test_freeing_never_raises_through_c(cuda: FakeCuda, caplog: pytest.LogCaptureFixture) -> None:
    memory = CudaExportable(0)
    allocate, free = memory._callbacks
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
    allocate, free = CudaExportable(0)._callbacks
    free(allocate(2 * MIB, 0, None), 2 * MIB, 0, None)
    assert (collects, gc.isenabled()) == ([False], True)


def test_callbacks_outlive_everybody_who_knows_them(cuda: FakeCuda) -> None:
    memory = CudaExportable(0)
    addresses = [ctypes.cast(callback, ctypes.c_void_p).value for callback in memory._callbacks]
    del memory
    gc.collect()
    allocate = cuda_exportable._ALLOCATE(addresses[0])
    free = cuda_exportable._FREE(addresses[1])
    free(allocate(2 * MIB, 0, None), 2 * MIB, 0, None)
    assert cuda.holds() == NOTHING
