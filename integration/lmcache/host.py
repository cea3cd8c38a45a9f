"""Bytes of chunks outside of the pool: what came from the offload tier ahead of its load, and what LMCache's other tiers take and give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lmcache.v1.memory_management import MemoryObj

from vcache_backend.transfer.held import HeldChunk
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.slots import SlotView

from .memory import HostMemory, NotedSlots

if TYPE_CHECKING:
    from vcache_backend.offload.read import Fetch, Staged

HELD_SHARE = 8
"""Chunks that were read ahead hold so many times `offload.staging_bytes` of host memory, at most; that much once is kept for next time."""
_WAIT_SECONDS = 0.05


class Host:
    """Of one worker. Any thread, but for `copy_out`."""

    def __init__(self, session: Session, staging_bytes: int) -> None:
        self.memory = HostMemory(HELD_SHARE * staging_bytes, staging_bytes)
        self._session = session
        self._scratch: torch.Tensor | None = None

    def fetched(self, fetch: Fetch) -> list[HeldChunk]:
        """Wait for what comes from the offload tier, as long as that takes: chunks in memory of their own, as far as there is some."""
        taken: list[HeldChunk] = []
        try:
            while not fetch.over:
                staged = fetch.ready(1)
                if not staged:
                    fetch.wait(_WAIT_SECONDS)
                elif not self._taken(fetch, staged[0], taken):
                    break
        except Exception as error:  # noqa: BLE001 - what came so far is good
            self._session.miss("fetch", error)
        fetch.cancel()
        return taken

    def _taken(self, fetch: Fetch, staged: Staged, taken: list[HeldChunk]) -> bool:
        """Copy one chunk out of its buffer; False if there is no memory."""
        memory = self.memory.take(self._session.chunk_bytes)
        try:
            if memory is not None:
                staged.write_to(memory)
                taken.append(HeldChunk(memory, functools.partial(self.memory.give, memory), staged.epoch))
        except BaseException:
            if memory is not None:
                self.memory.give(memory)
            raise
        finally:
            fetch.give_back([staged])
        return memory is not None

    def lent(self, obj: MemoryObj) -> HeldChunk | None:
        """A chunk that another tier of LMCache's had kept for us, as `copy_out` gave it; None if there are too few bytes."""
        raw, need = obj.raw_tensor, self._session.chunk_bytes
        flat = (raw if raw is not None else obj.tensor).contiguous().view(-1).view(torch.uint8)
        return HeldChunk(flat[:need], obj.ref_count_down) if flat.numel() >= need else None

    def share(self, kvcaches: Any) -> None:
        """Other tiers will want bytes: make the memory they are handed out in. There may be none left later, and LMCache dies of an
        exception then."""
        if self._scratch is None:
            kv = self._session.bind(kvcaches)
            self._scratch = torch.empty(kv.chunk_bytes(self._session.chunk_size), dtype=torch.uint8, device=kv.device)

    def copy_out(self, written: torch.cuda.Event | None) -> Callable[[NotedSlots], torch.Tensor]:
        """Copies a chunk out of the KV cache for a tier that wants the bytes now, on its own stream, which is the current one. It uses them
        before it asks for the next. written: comes after what fills the KV cache."""

        def copy_out(source: NotedSlots) -> torch.Tensor:
            self.share(source.kvcaches)
            assert self._scratch is not None
            kv, size = self._session.bind(source.kvcaches), self._session.chunk_size
            if written is not None:
                torch.cuda.current_stream().wait_event(written)
            view = SlotView.over(self._scratch, local=True)
            self._session.copier.gather(kv, SlotPlaces(kv, size, source.slots, [source.start]).store_plan([0]), [view])
            return self._scratch

        return copy_out
