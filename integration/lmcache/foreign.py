"""The bytes of chunks for LMCache's other tiers, and from them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lmcache.v1.memory_management import MemoryObj

from vcache_backend.transfer.chunk_io import ChunkIO
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import plan_chunks
from vcache_backend.vram_pool.slots import SlotView

from .memory import DeferredObj, LeasedObj, SharedLease
from .plans import Slots, is_whole, planned

AT_ONCE = 8
"""Chunks of another tier that are staged on the device for one launch: 256 MiB for an 8B model."""
COPY_SECONDS = 10.0
LEASE = "vcache_lease"
"""Of an object's metadata: the lease under which its bytes were cloned."""


class Foreign:
    """What memory objects hand out as bytes, and what comes in as such. In the worker's main thread."""

    def __init__(self, io: ChunkIO, paged: Callable[[], PagedKV]) -> None:
        """paged: the KV caches that the worker works with."""
        self.io, self._paged = io, paged
        self._scratch: torch.Tensor | None = None

    def share(self) -> None:
        """Other tiers will want bytes: make the memory they are handed out in."""
        kv = self._paged()
        self._scratch = torch.empty(kv.chunk_bytes(self.io.chunk_size), dtype=torch.uint8, device=kv.device)

    def load(self, kv: PagedKV, part: list[tuple[Any, int]], slots: Slots, skip: int) -> int | None:
        """Chunks that another tier kept for us, or that the first rank broadcast: opaque bytes as `ChunkObj.bytes` gave them.

        Ask `clones_held` afterwards.
        """
        need, views = kv.chunk_bytes(self.io.chunk_size), []
        for obj, _ in part:
            there = obj.raw_tensor if obj.raw_tensor is not None else obj.tensor
            flat = there.contiguous().view(-1).view(torch.uint8)
            if flat.numel() < need:
                break
            views.append(SlotView.over(flat[:need].to(kv.device, non_blocking=True), local=True))
        starts = [start for _, start in part[: len(views)]]
        copy = planned(self.io, kv, starts, slots, skip)
        loaded = bool(views) and is_whole(self.io, kv, copy, starts, skip) and self.io.load(kv, views, copy, COPY_SECONDS)
        if not loaded or len(views) < len(part):
            self.io.stats.failed("foreign")
        if not loaded:
            return part[0][1]
        return part[len(views)][1] if len(views) < len(part) else None

    def clone(self, obj: LeasedObj) -> torch.Tensor:
        """The bytes of a leased chunk in memory of their own. Any thread.

        LMCache broadcasts them and loads what it broadcast, as an object of its own with our object's metadata: by that `clones_held`
        knows the lease. Bytes that are not loaded are their reader's, who has them at once.
        """
        setattr(obj.meta, LEASE, obj.shared)
        views = self.io.views([obj.location])
        if views:
            return views[0].tensor[: self._paged().chunk_bytes(self.io.chunk_size)].clone()
        # LMCache dies of an exception here. Without its lease the chunk counts as lost.
        lease = obj.shared.take()
        if lease is not None:
            self.io.let_go(lease)
        return torch.zeros(obj.form.nbytes, dtype=torch.uint8, device=self._paged().device)

    def clones_held(self, objs: Sequence[MemoryObj]) -> bool:
        """Did the leases of those that are clones hold until now? Ends them."""
        leases = [getattr(obj.metadata, LEASE, None) for obj in objs]
        shared: list[SharedLease] = [lease for lease in dict.fromkeys(leases) if lease is not None]
        if not shared:
            return True
        if self.io.device.ordinal is not None:
            torch.cuda.synchronize(self.io.device.ordinal)
        # Every lease is ended, also after one that did not hold.
        held = [lease is not None and self.io.end(lease) for lease in (one.take() for one in shared)]
        return all(held)

    def copy_out(self, written: torch.cuda.Event | None) -> Callable[[DeferredObj], torch.Tensor]:
        def copy_out(obj: DeferredObj) -> torch.Tensor:
            """For a tier that wants the bytes now, on its own stream, which is the current one."""
            assert obj.source is not None
            kvcaches, slots, start = obj.source
            kv, size = self.io.bind(kvcaches), self.io.chunk_size
            if written is not None:
                torch.cuda.current_stream().wait_event(written)
            # Made once: there may be no memory left later, and LMCache dies of an exception here. It uses the bytes before it
            # asks for the next, on one stream.
            if self._scratch is None:
                self._scratch = torch.empty(kv.chunk_bytes(size), dtype=torch.uint8, device=kv.device)
            self.io.copier.gather(kv, plan_chunks(kv, size, slots, start, 1), [SlotView.over(self._scratch, local=True)])
            return self._scratch

        return copy_out
