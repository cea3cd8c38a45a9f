"""A kernel that is launched as a CUDA graph of one node."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool.cuda_driver import Driver, DriverError


class KernelGraph:
    """Launches a kernel of two parameters, an address and a 32-bit number, on one stream, since
    launches of one graph wait for each other. Any thread may launch; the device's context must be
    current. The graph is never destroyed.

    Why a graph: after some five direct launches on each of two streams all kernels of a process
    begin 0.2 to 0.5 µs later, also those in vLLM's graphs, until the GPU runs another process: 3 %
    of a decode step. Launches of graphs do not count. See
    docs/adr/0035-copies-are-launched-as-graphs.md.

    capture: launches the kernel on the stream with this handle. Called once, and kept with all that
    the kernel needs. What it passes behind the two parameters must be null. stream: the handle of
    the stream for all launches."""

    def __init__(self, driver: Driver, capture: Callable[[int], None], stream: int) -> None:
        self._driver, self._capture, self._stream = driver, capture, stream
        self._lock = threading.Lock()
        self._address, self._number = ctypes.c_uint64(), ctypes.c_int32()
        graph = driver.captured(capture)
        nodes, count = driver.call("cuGraphGetNodes", graph, 2)
        if count != 1:
            raise SegmentError(f"a copy's kernel was captured as {count} nodes of a graph, not one")
        self._node = nodes[0]
        self._given = driver.call("cuGraphKernelNodeGetParams", self._node)
        self._parameters = self._ours(self._given)
        self._given.kernelParams = ctypes.addressof(self._parameters)
        self._executable = driver.call("cuGraphInstantiate", graph, 0)

    def launch(self, address: int, number: int, *, thread_blocks: int) -> None:
        """Launch the kernel. Returns at once. Raises DriverError."""
        with self._lock:
            self._address.value, self._number.value = address, number
            self._given.gridDimX = thread_blocks
            # It changes later launches only.
            self._driver.call(
                "cuGraphExecKernelNodeSetParams", self._executable, self._node, self._given
            )
            self._driver.call("cuGraphLaunch", self._executable, self._stream)

    def _ours(self, given: Any) -> Any:
        """Pointers to all parameters: to our two, and to the captured ones behind them."""
        count = 0
        while self._has(given.func, count):
            count += 1
        every = (ctypes.c_size_t * count).from_address(int(given.kernelParams))[:]
        if any(ctypes.c_uint64.from_address(pointer).value for pointer in every[2:]):
            raise SegmentError(
                "Triton gives a copy's kernel memory of its own at each launch, which a graph "
                "cannot have: unset TRITON_INSTRUMENTATION_MODE"
            )
        mine = ctypes.addressof(self._address), ctypes.addressof(self._number)
        return (ctypes.c_size_t * count)(*mine, *every[2:])

    def _has(self, function: Any, parameter: int) -> bool:
        try:
            self._driver.call("cuFuncGetParamInfo", function, parameter)
        except DriverError as error:
            if error.code != "CUDA_ERROR_INVALID_VALUE":
                raise
            return False
        return True
