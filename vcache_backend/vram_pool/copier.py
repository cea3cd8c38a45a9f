"""Runs a plan: what every copier promises, and the one for host memory. See cuda_copier.py for GPUs."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool import reference
from vcache_backend.vram_pool.paged import Int64s, PagedKV
from vcache_backend.vram_pool.planner import CopyPlan
from vcache_backend.vram_pool.slots import SlotView

_Move = Callable[[PagedKV, CopyPlan, Sequence[Tensor]], None]


class Completion(Protocol):
    """A copy under way. May be asked from any thread, any number of times."""

    def done(self) -> bool:
        """Whether all bytes are in place. Never waits. Raises VCacheError if the device failed."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Wait until all bytes are in place; False once `timeout_s` seconds have passed. Raises VCacheError like `done`."""
        ...

    @property
    def seconds(self) -> float | None:
        """How long the bytes took, tables and queues not included; None while it is not known."""
        ...


class Mark(Protocol):
    """A point in the work of a stream: what was queued when it was made."""

    def reached(self) -> bool:
        """Whether all of that is done. Never waits. Any thread. Raises VCacheError if the device failed."""
        ...


class Copier(Protocol):
    """Moves bytes between one KV cache and slots. Used by one worker; may be called from several of its threads.

    `slots` are the request's, in the order of the plan's slot indices. Both calls raise LayoutError, and move nothing, where a
    slot is missing or smaller than a chunk, or the plan or the device is not the KV cache's. After any VCacheError nothing of
    the copy runs. Whatever else they raise (torch's RuntimeError, a Triton error) leaves that open: the slots are not to be reused.

    `after`: let the caller's stream go on beside the copy, which starts once the work before this mark is done. The caller then
    sees to it that nothing else touches the blocks until the copy is complete, or queues a `fence`.
    """

    def prepare(self, kv: PagedKV) -> None:
        """Make ready for copies of `kv`, so that no request waits for it. Optional, before the first copy."""
        ...

    def gather(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None) -> Completion:
        """Copy KV blocks into slots. Work queued before this call is read; work queued after it may overwrite the blocks."""
        ...

    def scatter(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None) -> Completion:
        """Copy slots into KV blocks. Work queued before this call reads the old bytes, work queued after it the new ones."""
        ...

    def pull(
        self,
        kv: PagedKV,
        rows: Int64s,
        origins: Int64s,
        after: Mark | None = None,
        keep: object = None,
        *,
        local: bool = False,
    ) -> Completion:
        """Copy blocks from anywhere into KV blocks, in one launch, ordered as `scatter` is.

        rows: (n, 3) int64: number of an origin, offset in bytes, KV block. origins: (k, planes) int64: the page of plane p of row r is
        the bytes from address `origins[r's origin, p] + r's offset` on. Nobody here can tell what lies there: the caller answers for
        it until the copy is over, until when this holds on to `keep`. local: all of it is on the KV cache's device.
        Raises LayoutError, and moves nothing, where rows name a block or an origin that there is not.
        """
        ...

    def mark(self) -> Mark:
        """Now, in the work of the current stream."""
        ...

    def fence(self, copy: Completion) -> None:
        """Let what is queued on the current stream from now on come after `copy`, one of this copier's. The host never waits."""
        ...

    def close(self) -> None:
        """Wait for the copies under way, with a deadline. May be called again."""
        ...


@dataclass(frozen=True)
class Finished:
    """The completion of a copy that ended before its call returned."""

    seconds: float

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> bool:
        return True

    def reached(self) -> bool:
        """As the mark of work that was done before it was made."""
        return True


class HostCopier:
    """Copies with torch, in the caller's thread: for KV caches in host memory, and for host segments."""

    def prepare(self, kv: PagedKV) -> None:
        """Nothing is compiled."""

    def gather(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None) -> Finished:
        return self._run(reference.gather, kv, plan, slots)

    def scatter(self, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView], after: Mark | None = None) -> Finished:
        return self._run(reference.scatter, kv, plan, slots)

    def pull(
        self,
        kv: PagedKV,
        rows: Int64s,
        origins: Int64s,
        after: Mark | None = None,
        keep: object = None,
        *,
        local: bool = False,
    ) -> Finished:
        check_rows(kv, rows, origins)
        if kv.device.type != "cpu":
            raise LayoutError(f"the KV cache is on {kv.device}, and this copier knows addresses of host memory only")
        started = time.perf_counter()
        reference.pull(kv, rows, origins)
        return Finished(time.perf_counter() - started)

    def mark(self) -> Mark:
        return Finished(0.0)

    def fence(self, copy: Completion) -> None:
        """Every copy ended before its call returned."""

    def close(self) -> None:
        """Nothing is ever under way."""

    def _run(self, move: _Move, kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> Finished:
        check(kv, plan, slots)
        started = time.perf_counter()
        move(kv, plan, [slot.tensor for slot in slots])
        if kv.device.type == "cuda":
            # The slots' lease may end once we return, and torch may still be reading them.
            torch.cuda.current_stream(kv.device).synchronize()
        return Finished(time.perf_counter() - started)


def check(kv: PagedKV, plan: CopyPlan, slots: Sequence[SlotView]) -> None:
    """LayoutError unless every byte of the plan lies inside of its slot."""
    if plan.block_size != kv.block_size:
        raise LayoutError(f"the plan is for blocks of {plan.block_size} tokens, the KV cache has {kv.block_size}")
    need = kv.chunk_bytes(plan.chunk_size)
    last = int(np.maximum.reduce(plan.blocks[:, 0], initial=-1))
    if last >= len(slots):
        raise LayoutError(f"the plan names slot {last} but {len(slots)} slots were given")
    for number, slot in enumerate(slots):
        if slot.nbytes < need:
            raise LayoutError(f"a chunk needs {need:,} B but slot {number} has {slot.nbytes:,} B")


def check_rows(kv: PagedKV, rows: Int64s, origins: Int64s) -> None:
    """LayoutError unless every row has its origin and its place in the KV cache."""
    planes = len(kv.planes)
    if rows.ndim != 2 or rows.shape[1] != 3 or origins.ndim != 2 or origins.shape[1] != planes:
        raise LayoutError(f"rows of 3 and origins of {planes} planes are needed; given are {rows.shape} and {origins.shape}")
    for column, name, count in ((0, "origin", len(origins)), (2, "block", kv.num_blocks)):
        low, high = int(rows[:, column].min(initial=0)), int(rows[:, column].max(initial=-1))
        if low < 0 or high >= count:
            raise LayoutError(f"a copy names {name}s {low} to {high}, but there are {count}")
