"""What a kernel launched as a graph is given, and what cannot be one. On a GPU: test_kernel and
test_cuda_copier."""

from __future__ import annotations

import ctypes
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import OK, Code, FakeCuda

from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool.copies.kernel_graph import KernelGraph
from vcache_backend.vram_pool.cuda_driver import Driver, DriverError

STREAM = 7


class Graphs(FakeCuda):
    """Graphs of kernels with two parameters and two pointers behind them, of which it reads what
    `kernelParams` points to, as the driver does."""

    CUstream_flags = FakeCuda.CUstreamCaptureMode

    def __init__(self, *, nodes: int = 1, pointer: int = 0) -> None:
        super().__init__()
        self.nodes, self.streams, self.ends = nodes, 0, Code.CUDA_ERROR_INVALID_VALUE
        self.captured = [ctypes.c_uint64(1), ctypes.c_int32(2), *(ctypes.c_uint64(pointer),) * 2]
        self.pointers = (ctypes.c_void_p * 4)(*map(ctypes.addressof, self.captured))
        self.set: tuple[int, ...] = ()
        self.launched: list[tuple[int, ...]] = []

    def cuStreamCreate(self, flags: str) -> Any:
        self.streams += 1
        return OK, STREAM + self.streams

    def cuStreamDestroy(self, stream: int) -> Any:
        self.streams -= 1
        return (OK,)

    def cuStreamBeginCapture(self, stream: int, mode: str) -> Any:
        assert mode == "CU_STREAM_CAPTURE_MODE_RELAXED"
        return (OK,)

    def cuStreamEndCapture(self, stream: int) -> Any:
        return OK, "graph"

    def cuGraphGetNodes(self, graph: str, most: int) -> Any:
        return OK, ["node"] * min(most, self.nodes), min(most, self.nodes)

    def cuGraphKernelNodeGetParams(self, node: str) -> Any:
        return OK, SimpleNamespace(func=1, kernelParams=ctypes.addressof(self.pointers), gridDimX=1)

    def cuFuncGetParamInfo(self, function: int, parameter: int) -> Any:
        return (OK, 8 * parameter, 8) if parameter < 4 else (self.ends,)

    def cuGraphInstantiate(self, graph: str, flags: int) -> Any:
        return OK, "executable"

    def cuGraphExecKernelNodeSetParams(self, executable: str, node: str, given: Any) -> Any:
        address, number, *hidden = (ctypes.c_void_p * 4).from_address(given.kernelParams)
        behind = (ctypes.c_uint64.from_address(pointer or 0).value for pointer in hidden)
        first = ctypes.c_uint64.from_address(address or 0).value
        self.set = first, ctypes.c_int32.from_address(number or 0).value, *behind, given.gridDimX
        return (OK,)

    def cuGraphLaunch(self, executable: str, stream: int) -> Any:
        self.launched.append((*self.set, stream))
        return (OK,)


def test_each_launch_has_its_own_parameters() -> None:
    cuda, captured = Graphs(), list[int]()
    graph = KernelGraph(Driver(cuda), captured.append, STREAM)
    assert captured == [STREAM + 1]
    assert not cuda.streams
    graph.launch(1 << 40, 5, thread_blocks=64)
    graph.launch(1 << 41, 6, thread_blocks=1)
    assert cuda.launched == [(1 << 40, 5, 0, 0, 64, STREAM), (1 << 41, 6, 0, 0, 1, STREAM)]


def test_a_graph_keeps_the_kernel() -> None:
    """Triton 3.7 and later unload a kernel that nobody holds."""

    class Kernel:
        def __call__(self, stream: int) -> None:
            pass

    kernel = Kernel()
    alive = weakref.ref(kernel)
    graph = KernelGraph(Driver(Graphs()), kernel, STREAM)
    del kernel
    gc.collect()
    assert alive() is not None
    del graph
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    ("cuda", "said"),
    [
        (Graphs(nodes=2), "captured as 2 nodes of a graph, not one"),
        (Graphs(pointer=1 << 40), "unset TRITON_INSTRUMENTATION_MODE"),
    ],
)
def test_a_kernel_with_memory_of_its_own_at_each_launch_is_refused(cuda: Graphs, said: str) -> None:
    with pytest.raises(SegmentError, match=said):
        KernelGraph(Driver(cuda), lambda stream: None, STREAM)


def test_a_failure_is_not_the_end_of_the_parameters() -> None:
    cuda = Graphs()
    cuda.ends = Code.CUDA_ERROR_INVALID_CONTEXT
    with pytest.raises(DriverError, match="cuFuncGetParamInfo: CUDA_ERROR_INVALID_CONTEXT"):
        KernelGraph(Driver(cuda), lambda stream: None, STREAM)


def test_a_capture_that_raises_leaves_no_stream() -> None:
    cuda = Graphs()

    def fails(stream: int) -> None:
        raise RuntimeError("no kernel")

    with pytest.raises(RuntimeError, match="no kernel"):
        KernelGraph(Driver(cuda), fails, STREAM)
    assert not cuda.streams
