"""Copies the offload tier's chunks from host memory, which is no segment, into a KV cache."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch

from vcache_backend.offload.read import Staged
from vcache_backend.vram_pool.copies.copier import Completion, Copier, Mark
from vcache_backend.vram_pool.copies.planner import CopyPlan
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.slots import SlotView

if TYPE_CHECKING:
    from vcache_backend.vram_pool.copies.cuda_copier import CudaCompletion

BOUNCE_BYTES = 256 << 20
"""The most device memory for chunks on their way into the KV cache: the bytes that cross the link
to the host in 5 ms."""
MAX_BOUNCE = 64
"""The most chunks of one call."""


class Uploader:
    """Copies chunks into a KV cache, in the worker's thread that launches kernels: writes the
    chunks into a bounce buffer on the device, from which the copier scatters them.

    On a GPU the copy engine fills the buffer, on a separate stream. most: the most chunks of one
    call."""

    def __init__(self, copier: Copier, kv: PagedKV, chunk_bytes: int) -> None:
        """Raises torch.OutOfMemoryError if there is no memory for the bounce buffer."""
        self._copier, self._device = copier, kv.device
        self.most = max(1, min(BOUNCE_BYTES // chunk_bytes, MAX_BOUNCE))
        self._stream = torch.cuda.Stream(kv.device) if kv.device.type == "cuda" else None
        # From this stream's pool: queued work of the caller's stream may still use memory of that
        # stream.
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            self._bounce = torch.empty(
                self.most, chunk_bytes, dtype=torch.uint8, device=self._device
            )
        self._last: CudaCompletion | None = None

    def scatter(
        self, kv: PagedKV, plan: CopyPlan, chunks: Sequence[Staged], after: Mark | None = None
    ) -> Completion:
        """Like `Copier.scatter`, with `chunks` instead of slots. The caller must not change the
        chunks until the copy is over."""
        if self._stream is not None:
            return self._scatter_beside(self._stream, kv, plan, chunks, after)
        return self._copier.scatter(kv, plan, self._bounced(chunks), after)

    def _bounced(self, chunks: Sequence[Staged]) -> list[SlotView]:
        """Write the chunks into the bounce buffer, on the current stream."""
        for place, chunk in zip(self._bounce, chunks, strict=False):
            chunk.write_to(place)
        return [SlotView.over(place, local=True) for place in self._bounce[: len(chunks)]]

    def _scatter_beside(
        self,
        stream: torch.cuda.Stream,
        kv: PagedKV,
        plan: CopyPlan,
        chunks: Sequence[Staged],
        after: Mark | None,
    ) -> Completion:
        from vcache_backend.vram_pool.copies.cuda_copier import CudaCompletion, CudaMark

        with torch.cuda.device(self._device):
            if self._last is not None:
                # The last scatter may still read the buffer.
                stream.wait_event(self._last.end)
            if isinstance(after, CudaMark):
                stream.wait_event(after.event)
            with torch.cuda.stream(stream):
                views = self._bounced(chunks)
                arrived = stream.record_event()
            if after is None:
                # The scatter then follows the current stream's earlier work and this upload, and
                # later work follows the scatter.
                torch.cuda.current_stream().wait_event(arrived)
            copy = self._copier.scatter(
                kv, plan, views, None if after is None else CudaMark(arrived)
            )
        self._last = copy if isinstance(copy, CudaCompletion) else None
        return copy
