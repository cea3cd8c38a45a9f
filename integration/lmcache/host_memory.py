"""Host memory for chunks that wait to be loaded, used again and again.

New memory is given by the kernel page by page as it is first written: a chunk of 32 MiB took 15 ms to copy into new memory and 3 ms into
memory that was written before (2-core CPU machine; on an H200's host the first writes came at 0.6 GB/s).
"""

from __future__ import annotations

import ctypes
import threading
import weakref

import torch


class HostMemory:
    """Tensors of one size. `most`: bytes that may be out at once. `spare`: bytes that are kept for next time. Any thread.

    A tensor's memory comes back by itself once nothing refers to its storage any more, be it a view or an array over it.
    """

    def __init__(self, most: int, spare: int) -> None:
        self.out = 0
        """Bytes that somebody has."""
        self._most, self._spare = most, spare
        self._kept: list[torch.Tensor] = []
        # A tensor may end in the middle of anything, also of what is done here.
        self._lock = threading.RLock()

    def take(self, nbytes: int) -> torch.Tensor | None:
        """1-D uint8, contents undefined; None if too much is out. Raises RuntimeError where there is no memory."""
        with self._lock:
            if self.out + nbytes > self._most:
                return None
            self.out += nbytes
            memory = self._kept.pop() if self._kept else None
        try:
            if memory is None or memory.numel() != nbytes:
                memory = torch.empty(nbytes, dtype=torch.uint8)
            # The storage refers to this object, and nobody else does.
            lent = (ctypes.c_uint8 * nbytes).from_address(memory.data_ptr())
            tensor = torch.frombuffer(lent, dtype=torch.uint8)
        except BaseException:
            with self._lock:
                self.out -= nbytes
            raise
        weakref.finalize(lent, self._back, memory).atexit = False
        return tensor

    def _back(self, memory: torch.Tensor) -> None:
        with self._lock:
            self.out -= memory.numel()
            if (len(self._kept) + 1) * memory.numel() <= self._spare:
                self._kept.append(memory)
