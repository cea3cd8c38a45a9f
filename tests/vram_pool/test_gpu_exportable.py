"""GPU memory that torch allocates and other processes map, on real GPUs. Against a driver that
fails: test_exportable.py.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
from processes import IMPORT_SECONDS, SECONDS, ran

from vcache_backend.integration.vllm.in_place.exporter import Exporter
from vcache_backend.vram_pool import devices
from vcache_backend.vram_pool.exports import CudaExportable, Region

MIB = 1 << 20
SIZE = 64 * MIB
READER = """
import sys, torch
from vcache_backend.vram_pool import devices, regions
fd, nbytes, at, size, owner, gpu = *map(int, sys.argv[1:5]), *sys.argv[5:]
whole = regions.map_gpu_memory(fd, nbytes, owner, devices.resolve(gpu))
assert torch.equal(whole[at : at + size], (torch.arange(size, device=gpu) % 251).to(torch.uint8))
print("the same")
"""


def kv(nbytes: int = SIZE) -> torch.Tensor:
    """As vLLM makes its KV cache."""
    return torch.zeros(nbytes, dtype=torch.int8, device="cuda:0")


def fill(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8).copy_(
        (torch.arange(tensor.nbytes, device=tensor.device) % 251).to(torch.uint8)
    )
    torch.cuda.synchronize()


def holder(tensor: torch.Tensor, found: Sequence[Region]) -> Region | None:
    first, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    around = (it for it in found if it.address <= first and end <= it.address + it.nbytes)
    return next(around, None)


def read_elsewhere(one: Region, tensor: torch.Tensor, gpu: str) -> None:
    """Another process maps the allocation on `gpu`, and finds what `fill` has written."""
    where = [one.fd, one.nbytes, tensor.data_ptr() - one.address, tensor.nbytes]
    where += [devices.resolve("cuda:0").name, gpu]
    program = [sys.executable, "-c", READER, *map(str, where)]
    child = ran(*program, pass_fds=[one.fd], timeout=IMPORT_SECONDS)
    assert child.stdout == "the same\n", child.stderr


@pytest.fixture
def memory() -> CudaExportable:
    torch.cuda.set_device(0)
    return CudaExportable(0)


def made() -> tuple[Exporter, torch.Tensor]:
    torch.cuda.set_device(0)
    exporter = Exporter("cuda")
    with exporter.context() or nullcontext():
        return exporter, kv()


@pytest.mark.parametrize(
    "gpu",
    [
        pytest.param("cuda:0", marks=pytest.mark.gpu),
        pytest.param("cuda:1", marks=pytest.mark.gpu(count=2)),
    ],
)
@pytest.mark.timeout(240)
def test_another_process_reads_the_kv_cache_where_it_lies(gpu: str) -> None:
    exporter, cache = made()
    assert not cache.any()
    fill(cache)
    one = exporter.region({"layers.0": cache})
    assert holder(cache, [one]) == one
    read_elsewhere(one, cache, gpu)
    assert holder(kv(), [one]) is None


@pytest.mark.gpu
def test_tensors_that_share_an_allocation_are_found_in_it(memory: CudaExportable) -> None:
    with memory.context():
        small = [kv(3 * MIB) for _ in range(4)]
        tiny = [kv(1000) for _ in range(4)]
    found = memory.allocations()
    assert all(holder(tensor, found) for tensor in [*small, *tiny])
    for number, tensor in enumerate([*small, *tiny]):
        tensor.fill_(number)
    assert [
        int(tensor.sum(dtype=torch.int64)) // tensor.nbytes for tensor in [*small, *tiny]
    ] == list(range(8))


@pytest.mark.gpu
def test_memory_and_descriptor_are_gone_once_torch_gives_them_back(memory: CudaExportable) -> None:
    with memory.context():
        view = kv().view(torch.bfloat16)[100:]
    gc.collect()
    torch.cuda.empty_cache()
    (one,) = memory.allocations()
    fill(view.view(torch.int8))
    assert os.fstat(one.fd)
    del view
    torch.cuda.empty_cache()
    assert memory.allocations() == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(one.fd)


@pytest.mark.gpu
def test_too_little_memory_is_torchs_error_and_the_process_goes_on(memory: CudaExportable) -> None:
    with memory.context():
        with pytest.raises(torch.OutOfMemoryError):
            kv(4 << 40)
        small = kv(3 * MIB)
    assert "CUDA_ERROR_OUT_OF_MEMORY" in memory.problem
    assert holder(small, memory.allocations()) is not None
    assert int(kv().sum()) == 0


@pytest.mark.gpu
def test_only_the_thread_of_the_kv_cache_gets_exportable_memory(memory: CudaExportable) -> None:
    found: list[torch.Tensor] = []
    with memory.context():
        thread = threading.Thread(target=lambda: found.append(kv()))
        thread.start()
        thread.join(SECONDS)
    assert holder(found[0], memory.allocations()) is None


@pytest.mark.gpu
def test_cuda_graphs_that_are_captured_later_use_the_kv_cache(memory: CudaExportable) -> None:
    with memory.context():
        cache = kv()
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
