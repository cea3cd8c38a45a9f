"""Copies the offload tier's chunks from host memory, which is no segment, into a KV cache."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vcache_backend.offload.read import Staged
from vcache_backend.vram_pool.copies.copier import Completion, Copier, Mark
from vcache_backend.vram_pool.copies.planner import CopyPlan
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.slots import SlotView

if TYPE_CHECKING:
    from vcache_backend.vram_pool.copies.cuda_copier import CudaCompletion

BOUNCE_BYTES = 256 << 20
"""The most device memory for chunks on their way into the KV cache: as much as crosses the link to
the host in 5 ms."""
MAX_BOUNCE = 64
"""The most chunks of one call."""


class HostUploader:
    """Copies chunks into a KV cache that lies in host memory, too. In the worker's thread that
    launches kernels.

    most: the most chunks of one call."""

    def __init__(self, copier: Copier, chunk_bytes: int) -> None:
        self._copier, self._chunk_bytes = copier, chunk_bytes
        self.most = MAX_BOUNCE

    def scatter(
        self, kv: PagedKV, plan: CopyPlan, chunks: Sequence[Staged], after: Mark | None = None
    ) -> Completion:
        """Like `Copier.scatter`, with `chunks` instead of slots. The caller leaves them as they are
        until the copy is over."""
        return self._copier.scatter(
            kv, plan, [SlotView.over(self._decoded(chunk), local=True) for chunk in chunks], after
        )

    def _decoded(self, chunk: Staged) -> Tensor:
        if chunk.codec is None:
            return chunk.payload
        decoded = torch.empty(self._chunk_bytes, dtype=torch.uint8)
        chunk.write_to(decoded)
        return decoded


class CudaUploader:
    """Like `HostUploader`, for a KV cache on a GPU: the copy engine fills a bounce buffer there,
    then the copier scatters it.

    The copy engine's part runs on a stream of its own."""

    def __init__(self, copier: Copier, kv: PagedKV, chunk_bytes: int) -> None:
        """Raises torch.OutOfMemoryError if there is no memory for the bounce buffer."""
        self._copier, self._device = copier, kv.device
        self.most = max(1, min(BOUNCE_BYTES // chunk_bytes, MAX_BOUNCE))
        with torch.cuda.device(self._device):
            self._stream = torch.cuda.Stream()
            # From this stream's own pool: memory from the caller's stream may still be used by work
            # queued there.
            with torch.cuda.stream(self._stream):
                self._bounce = torch.empty(
                    self.most, chunk_bytes, dtype=torch.uint8, device=self._device
                )
        self._last: CudaCompletion | None = None

    def scatter(
        self, kv: PagedKV, plan: CopyPlan, chunks: Sequence[Staged], after: Mark | None = None
    ) -> Completion:
        from vcache_backend.vram_pool.copies.cuda_copier import CudaCompletion, CudaMark

        with torch.cuda.device(self._device):
            if self._last is not None:
                # The last scatter may still read the buffer.
                self._stream.wait_event(self._last.end)
            if isinstance(after, CudaMark):
                self._stream.wait_event(after.event)
            with torch.cuda.stream(self._stream):
                for place, chunk in zip(self._bounce, chunks, strict=False):
                    chunk.write_to(place)
                arrived = self._stream.record_event()
            if after is None:
                # The scatter then follows the current stream's earlier work and this upload, and
                # later work follows the scatter.
                torch.cuda.current_stream().wait_event(arrived)
            views = [SlotView.over(at, local=True) for at in self._bounce[: len(chunks)]]
            copy = self._copier.scatter(
                kv, plan, views, None if after is None else CudaMark(arrived)
            )
        self._last = copy if isinstance(copy, CudaCompletion) else None
        return copy


Uploader = HostUploader | CudaUploader


def make_uploader(copier: Copier, kv: PagedKV, chunk_bytes: int) -> Uploader:
    """The uploader for a KV cache: see `CudaUploader`, `HostUploader`."""
    if kv.device.type == "cuda":
        return CudaUploader(copier, kv, chunk_bytes)
    return HostUploader(copier, chunk_bytes)
