"""The bytes of chunks for LMCache's other tiers, and from them; and those that were read ahead of the answer to a look-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.memory_management import MemoryObj

from vcache_backend.errors import LayoutError, VCacheError
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import plan_chunks
from vcache_backend.vram_pool.slots import SlotView

from .memory import DeferredObj, FetchedObj, Form, HostMemory, LeasedObj, SharedLease

if TYPE_CHECKING:
    from vcache_backend.offload.read import Fetch

AT_ONCE = 8
"""Chunks of another tier that are staged on the device for one launch: 256 MiB for an 8B model."""
COPY_SECONDS = 10.0
LEASE = "vcache_lease"
"""Of an object's metadata: the lease under which its bytes were cloned."""
_WAIT_SECONDS = 0.05
_LEFT: list[Any] = []
"""Copies that did not end, and what they may still read."""


class Foreign:
    """What memory objects hand out as bytes, and what comes in as such. In the worker's main thread, but for `fetched` and `clone`."""

    def __init__(self, session: Session, paged: Callable[[], PagedKV]) -> None:
        """paged: the KV caches that the worker works with."""
        self._session, self._paged = session, paged
        self._scratch: torch.Tensor | None = None

    # ---- in

    def fetched(self, form: Form, memory: HostMemory, fetch: Fetch) -> list[FetchedObj]:
        """Wait for what comes from the offload tier, as long as that takes: chunks in memory of their own, as far as there is some."""
        taken: list[FetchedObj] = []
        while not fetch.over:
            staged = fetch.ready(1)
            if not staged:
                fetch.wait(_WAIT_SECONDS)
                continue
            try:
                there = memory.take(form.nbytes)
                if there is None:
                    break
                obj = FetchedObj(form, staged[0].key, staged[0].epoch, there, memory.give)
                staged[0].write_to(there)
            finally:
                fetch.give_back(staged)
            taken.append(obj)
        return taken

    def load(self, places: SlotPlaces, objs: Sequence[MemoryObj]) -> int:
        """Bring chunks into the KV cache that are bytes as `ChunkObj.bytes` gave them: what another tier kept for us, the first rank
        broadcast, or was `fetched`. How many leading ones are in place and right; `places` are theirs."""
        loaded = 0
        while loaded < len(objs):
            part = objs[loaded : loaded + AT_ONCE]
            count = self._load(places, loaded, part)
            loaded += count
            if count < len(part):
                self._session.stats.failed("foreign")
                break
        # Many may have been cloned under one lease: it is ended once.
        if not self._clones_held(objs):
            self._session.stats.failed("lease_lost")
            return 0
        return loaded

    def _load(self, places: SlotPlaces, first: int, objs: Sequence[MemoryObj]) -> int:
        """One launch, waited for."""
        kv, views = places.kv, list[SlotView]()
        need = kv.chunk_bytes(self._session.chunk_size)
        for obj in objs:
            if isinstance(obj, FetchedObj) and obj.memory is None:
                break
            raw = obj.raw_tensor
            there = raw if raw is not None else obj.tensor
            flat = there.contiguous().view(-1).view(torch.uint8)
            if flat.numel() < need:
                break
            views.append(SlotView.over(flat[:need].to(kv.device, non_blocking=True), local=True))
        try:
            copy = self._session.copier.scatter(kv, places.load_plan(first, len(views)), views) if views else None
        except LayoutError as error:
            self._session.miss("load", error)
            return 0
        if copy is None or copy.wait(COPY_SECONDS):
            return len(views)
        _LEFT.append((copy, views, objs))
        return 0

    def keep(self, places: SlotPlaces, objs: Sequence[FetchedObj], tokens: int) -> None:
        """Those that came from the offload tier are in the KV cache, `tokens` of them: count them, and store in the pool again those that
        are there as a whole."""
        session, names, epochs = self._session, [obj.key for obj in objs], {obj.epoch for obj in objs}
        nbytes = tokens * places.kv.chunk_bytes(session.chunk_size) // session.chunk_size
        session.stats.count(chunks_offload=len(objs), tokens_retrieved=tokens, bytes_offload=nbytes)
        if session.tier is None or not session.tier.promotes or len(epochs) > 1:
            return
        try:
            store(session, places, names, [i for i in range(len(objs)) if places.holds(i)], fetched_in=epochs.pop())
        except (VCacheError, RuntimeError) as error:
            session.miss("promote", error)

    # ---- out

    def share(self) -> None:
        """Other tiers will want bytes: make the memory they are handed out in."""
        kv = self._paged()
        self._scratch = torch.empty(kv.chunk_bytes(self._session.chunk_size), dtype=torch.uint8, device=kv.device)

    def clone(self, obj: LeasedObj) -> torch.Tensor:
        """The bytes of a leased chunk in memory of their own. Any thread.

        LMCache broadcasts them and loads what it broadcast, as an object of its own with our object's metadata, by which the lease is
        found again. Bytes that are not loaded are their reader's, who has them at once.
        """
        setattr(obj.meta, LEASE, obj.shared)
        views = self._session.views([obj.location])
        if views:
            return views[0].tensor[: self._paged().chunk_bytes(self._session.chunk_size)].clone()
        # LMCache dies of an exception here. Without its lease the chunk counts as lost.
        lease = obj.shared.take()
        if lease is not None:
            self._session.leases.release(lease)
        return torch.zeros(obj.form.nbytes, dtype=torch.uint8, device=self._paged().device)

    def _clones_held(self, objs: Sequence[MemoryObj]) -> bool:
        """Whether the leases of those that are clones held until now. Ends them."""
        leases = [getattr(obj.metadata, LEASE, None) for obj in objs]
        shared: list[SharedLease] = [lease for lease in dict.fromkeys(leases) if lease is not None]
        if shared and self._session.device.ordinal is not None:
            torch.cuda.synchronize(self._session.device.ordinal)
        # Every lease is ended, also after one that did not hold.
        held = [lease is not None and self._session.leases.verdict(lease) for lease in (one.take() for one in shared)]
        return all(held)

    def copy_out(self, written: torch.cuda.Event | None) -> Callable[[DeferredObj], torch.Tensor]:
        def copy_out(obj: DeferredObj) -> torch.Tensor:
            """For a tier that wants the bytes now, on its own stream, which is the current one."""
            assert obj.source is not None
            kvcaches, slots, start = obj.source
            kv, size = self._session.bind(kvcaches), self._session.chunk_size
            if written is not None:
                torch.cuda.current_stream().wait_event(written)
            # Made once: there may be no memory left later, and LMCache dies of an exception here. It uses the bytes before it
            # asks for the next, on one stream.
            if self._scratch is None:
                self._scratch = torch.empty(kv.chunk_bytes(size), dtype=torch.uint8, device=kv.device)
            view = SlotView.over(self._scratch, local=True)
            self._session.copier.gather(kv, plan_chunks(kv, size, slots, [start]), [view])
            return self._scratch

        return copy_out
