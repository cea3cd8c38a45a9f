"""A source of a load: chunks that the caller already has in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from vcache_backend.errors import VCacheError
from vcache_backend.transfer.sources import LoadContext, Part, Settled, Source


@dataclass
class HeldChunk:
    """One chunk's bytes (1-D uint8, host memory), valid until `give_back` is called, which happens once. epoch: the one in which the
    offload tier had stored the chunk."""

    payload: Tensor
    give_back: Callable[[], None]
    epoch: int

    @property
    def codec(self) -> None:
        """None: the payload is not encoded."""

    def write_to(self, chunk: Tensor) -> None:
        chunk.copy_(self.payload, non_blocking=True)


@dataclass
class _HeldPart(Part):
    chunks: list[HeldChunk]

    def settle(self) -> Settled:
        seconds = self.seconds
        self.drop()
        self.context.settled_offloaded(self, {chunk.epoch for chunk in self.chunks}, seconds)
        return Settled(self.count)

    def drop(self) -> None:
        for chunk in self.chunks:
            chunk.give_back()


class HeldSource(Source):
    """Chunks by number, which come from no other source. Each is given back once it is in place, or not needed any more."""

    def __init__(self, context: LoadContext, held: Mapping[int, HeldChunk]) -> None:
        self._context, self._held = context, dict(held)

    def expects(self, chunk: int) -> bool:
        return chunk in self._held

    def prepare(self, chunk: int) -> bool:
        return self.expects(chunk)

    def launch(self, chunk: int) -> Part | None:
        if chunk not in self._held:
            return None
        context, count = self._context, 1
        uploader = context.session.uploads(context.places.kv)
        while count < uploader.most and chunk + count in self._held:
            count += 1
        plan, started = context.plan(chunk, count), perf_counter()
        chunks = [self._held.pop(chunk + i) for i in range(count)]
        try:
            moving = uploader.scatter(context.places.kv, plan, chunks, context.mark)
        except VCacheError:
            # After any other error something may still be reading them, so they are never given back.
            for held in chunks:
                held.give_back()
            raise
        return _HeldPart(context, chunk, count, plan, moving, started, chunks)

    def cancel(self) -> None:
        while self._held:
            self._held.popitem()[1].give_back()
