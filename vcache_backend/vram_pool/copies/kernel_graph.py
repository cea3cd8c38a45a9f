"""A kernel that is launched as a CUDA graph of one node."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from typing import Any

from vcache_backend.vram_pool.cuda_driver import Driver, DriverError


class KernelGraph:
    """Launches a kernel whose first parameters are an address and a 32-bit number. Any thread may
    launch; the device's context must be current.

    Why a graph: after some five direct launches on each of two streams all kernels of a process
    begin 0.2 to 0.5 µs later, also those in vLLM's graphs, until the GPU runs another process: 3 %
    of a decode step. Launches of graphs do not count. See
    docs/adr/0035-copies-are-launched-as-graphs.md.

    capture: launches the kernel on the stream with this handle; called once."""

    def __init__(self, driver: Driver, capture: Callable[[int], None]) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self._address, self._number = ctypes.c_uint64(), ctypes.c_int32()
        # It lives as long as this object does: the other parameters are in it.
        graph = driver.captured(capture)
        (self._node,), _ = driver.call("cuGraphGetNodes", graph, 1)
        self._given = driver.call("cuGraphKernelNodeGetParams", self._node)
        self._parameters = self._ours(self._given)
        self._given.kernelParams = ctypes.addressof(self._parameters)
        self._executable = driver.call("cuGraphInstantiate", graph, 0)

    def launch(self, address: int, number: int, *, thread_blocks: int, stream: int) -> None:
        """Launch on the stream with this handle, behind this object's earlier launches on any
        stream. Returns at once. Raises DriverError."""
        with self._lock:
            self._address.value, self._number.value = address, number
            self._given.gridDimX = thread_blocks
            # It changes later launches only.
            self._driver.call(
                "cuGraphExecKernelNodeSetParams", self._executable, self._node, self._given
            )
            self._driver.call("cuGraphLaunch", self._executable, stream)

    def _ours(self, given: Any) -> Any:
        """Pointers to all parameters: the first two are ours."""
        count = next(i for i in itertools.count() if not self._has(given.func, i))
        every = (ctypes.c_void_p * count).from_address(int(given.kernelParams))
        mine = ctypes.addressof(self._address), ctypes.addressof(self._number)
        return (ctypes.c_void_p * count)(*mine, *every[2:])

    def _has(self, function: Any, parameter: int) -> bool:
        try:
            self._driver.call("cuFuncGetParamInfo", function, parameter)
        except DriverError:
            return False
        return True
