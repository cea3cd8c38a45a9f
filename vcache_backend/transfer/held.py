"""A source of a load: chunks that the caller already has in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from vcache_backend.transfer.sources import LoadContext, Part, Source, upload


@dataclass
class HeldChunk:
    """One chunk's bytes (1-D uint8, host memory), valid until `give_back` is called, which happens
    once. epoch: the one in which the offload tier had stored the chunk."""

    payload: Tensor
    give_back: Callable[[], None]
    epoch: int

    @property
    def codec(self) -> None:
        """None: the payload is not encoded."""

    def write_to(self, chunk: Tensor) -> None:
        chunk.copy_(self.payload, non_blocking=True)


class HeldSource(Source):
    """Chunks by number, which come from no other source. Each is given back once it is in place, or
    not needed any more.
    """

    def __init__(self, context: LoadContext, held: Mapping[int, HeldChunk]) -> None:
        self._context, self._held = context, dict(held)

    def expects(self, chunk: int) -> bool:
        return chunk in self._held

    def prepare(self, chunk: int) -> bool:
        return self.expects(chunk)

    def launch(self, chunk: int) -> list[Part]:
        if chunk not in self._held:
            return []
        context, count = self._context, 1
        uploader = context.session.uploads(context.places.kv)
        while count < uploader.most and chunk + count in self._held:
            count += 1
        context.plan(chunk, count)  # what raises here leaves them to `cancel`
        chunks = [self._held.pop(chunk + i) for i in range(count)]

        def give_back() -> None:
            for held in chunks:
                held.give_back()

        return upload(context, uploader, chunk, chunks, give_back)

    def cancel(self) -> None:
        while self._held:
            self._held.popitem()[1].give_back()
