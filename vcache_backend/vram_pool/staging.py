"""Large scatters from a peer: the copy engine brings whole chunks over NVLink, a small kernel spreads them locally.

Kernels read a peer in packets of 128 bytes, the copy engine in larger ones, so it is some 5 % faster on the link; and it needs
no SM. Chunks are contiguous in their slots, so they go as few large copies into a ring of local buffers, on two streams in turn
that hide each other's gaps; the kernel that spreads one group of chunks runs, at a multiple of the link's speed, while the next
ones are under way. What remains beside the copy engine's own time is the last group's kernel, and that group is small.
"""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from vcache_backend.vram_pool import cuda_driver, kernels
from vcache_backend.vram_pool.cuda_driver import Driver
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Int64s
from vcache_backend.vram_pool.slots import SlotView

BUFFERS = 3
GROUP_BYTES = 32 << 20
"""Chunks are brought over in groups of at least this much: smaller copies do not reach the link's speed."""
LEAST_BYTES = 64 << 20
"""Smaller scatters go through the kernel alone: there is nothing to overlap with."""
LEAST_WANTED = 0.75
"""Scatters that want less of their chunks' bytes than this go through the kernel alone, which reads no more than is wanted."""


class _Group(NamedTuple):
    """Some consecutive slots of a request: [first, stop), and their bytes."""

    first: int
    stop: int
    nbytes: int


class _Buffer:
    """One local buffer. `brought`: its last group has arrived; `free`: that group was spread, it may be written again."""

    def __init__(self, nbytes: int, device: torch.device, driver: Driver) -> None:
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.address = self.bytes.data_ptr()
        self.brought, self.free = driver.event(), driver.event()


class Staging:
    """The ring of buffers and the copy streams of one GPU. Any thread; one scatter is queued at a time.

    It talks to the driver itself: torch's stream contexts and copies cost the host more than a group's time on the link.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._buffers: list[_Buffer] = []
        self._streams = [torch.cuda.Stream(device), torch.cuda.Stream(device)]

    def suits(self, plan: CopyPlan, slots: Sequence[SlotView]) -> bool:
        """Is this scatter better staged?"""
        return plan.nbytes >= max(LEAST_BYTES, LEAST_WANTED * sum(slot.nbytes for slot in slots))

    def scatter(
        self,
        kv: PagedKV,
        plan: CopyPlan,
        slots: Sequence[SlotView],
        side: torch.cuda.Stream,
        current: torch.cuda.Stream,
        table: kernels.Table,
        tuning: kernels.Tuning,
        start: torch.cuda.Event,
    ) -> None:
        """Queue the copies and, on `side`, the kernels; blocks are written after what `current` holds now.

        The current device is the KV cache's. The plan's rows are in the order of `slots`. `start` is recorded where the first
        bytes set out.
        """
        driver, groups = cuda_driver.load(), _groups(slots)
        with self._lock:
            ring = self._ring(max(group.nbytes for group in groups), driver)
            start.record(self._streams[0])
            for at in range(min(BUFFERS, len(groups))):
                self._bring(driver, at, groups[at], slots, ring)
            addresses = _addresses(slots, groups, ring)
            rows = kernels.table_rows(kv, plan)
            aligned = kernels.fill_table(kv, plan, addresses, table.array[:rows])
            stream = side.cuda_stream
            driver.copy_async(table.there.data_ptr(), table.pinned.data_ptr(), rows * table.there.stride(0) * 8, stream)
            side.wait_stream(current)
            for at, part in enumerate(_parts(plan, groups)):
                buffer = ring[at % BUFFERS]
                driver.wait(stream, buffer.brought)
                kernels.launch(kv, plan, table.there, to_slot=False, tuning=tuning, aligned=aligned, part=part, stream=stream)
                driver.record(buffer.free, stream)
                if at + BUFFERS < len(groups):
                    self._bring(driver, at + BUFFERS, groups[at + BUFFERS], slots, ring)

    def _ring(self, nbytes: int, driver: Driver) -> list[_Buffer]:
        """Buffers of at least `nbytes`, made at the first use."""
        if not self._buffers or self._buffers[0].bytes.numel() < nbytes:
            torch.cuda.synchronize(self._device)  # nothing may still use the smaller ones
            self._buffers = [_Buffer(nbytes, self._device, driver) for _ in range(BUFFERS)]
        return self._buffers

    def _bring(self, driver: Driver, at: int, group: _Group, slots: Sequence[SlotView], ring: list[_Buffer]) -> None:
        """Queue the copies of one group into its buffer; slots that lie side by side go as one."""
        buffer, stream = ring[at % BUFFERS], self._streams[at % 2].cuda_stream
        driver.wait(stream, buffer.free)
        target = buffer.address
        for source, nbytes in _merged(slots[group.first : group.stop]):
            driver.copy_async(target, source, nbytes, stream)
            target += nbytes
        driver.record(buffer.brought, stream)


def _groups(slots: Sequence[SlotView]) -> list[_Group]:
    """Consecutive slots in groups of at least GROUP_BYTES, the last one as small as it comes."""
    groups, first, nbytes = [], 0, 0
    for at, slot in enumerate(slots):
        nbytes += slot.nbytes
        if nbytes >= GROUP_BYTES or at == len(slots) - 1:
            groups.append(_Group(first, at + 1, nbytes))
            first, nbytes = at + 1, 0
    return groups


def _merged(slots: Sequence[SlotView]) -> list[tuple[int, int]]:
    """The slots' bytes as few contiguous runs (address, bytes), in order."""
    runs: list[tuple[int, int]] = []
    for address, nbytes, *_ in slots:
        if runs and sum(runs[-1]) == address:
            runs[-1] = runs[-1][0], runs[-1][1] + nbytes
        else:
            runs.append((address, nbytes))
    return runs


def _addresses(slots: Sequence[SlotView], groups: list[_Group], ring: list[_Buffer]) -> Int64s:
    """Where each slot's bytes are brought to."""
    addresses: Int64s = np.empty(len(slots), dtype=np.int64)
    for at, group in enumerate(groups):
        address = ring[at % BUFFERS].address
        for index in range(group.first, group.stop):
            addresses[index] = address
            address += slots[index].nbytes
    return addresses


def _parts(plan: CopyPlan, groups: list[_Group]) -> list[kernels.Part]:
    """The rows of the plan that belong to each group."""
    stops = [group.stop for group in groups]
    blocks = np.searchsorted(plan.blocks[:, 0], stops).tolist()
    tokens = np.searchsorted(plan.tokens[:, 0], stops).tolist()
    starts = zip([0, *blocks], [0, *tokens], strict=True)
    return [kernels.Part(b, b_stop, t, t_stop) for (b, t), b_stop, t_stop in zip(starts, blocks, tokens, strict=False)]
