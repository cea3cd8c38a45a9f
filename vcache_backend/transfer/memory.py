"""A source of a load: memory of this node. All chunks that are available are read in one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from vcache_backend.errors import VCacheError
from vcache_backend.transfer.sources import LoadContext, Part, Settled, Source
from vcache_backend.vram_pool.copies.copier import Completion
from vcache_backend.vram_pool.copies.planner import CopyPlan
from vcache_backend.vram_pool.paged import Int64s
from vcache_backend.vram_pool.slots import SlotView

if TYPE_CHECKING:
    from vcache_backend.transfer.pooled import Pooled
    from vcache_backend.transfer.resident import ResidentChunks


@dataclass
class Piece(ABC):
    """`count` consecutive chunks from number `first` on, in one place. They stay readable until
    `settle` or `leave`, one of which is called once the copy is over. If that cannot be known,
    `lose` is called instead.

    views: of their slots, if they lie in slots. local: whether they are on the device of the KV
    cache."""

    context: LoadContext
    first: int
    count: int
    views: Sequence[SlotView]
    local: bool

    @abstractmethod
    def origin(self) -> tuple[object, Int64s]:
        """An object that identifies where it lies, and the bases of its planes, see `Copier.pull`.
        Pieces with one object share bases.
        """

    @abstractmethod
    def offsets(self, chunks: Int64s, inside: Int64s) -> Int64s:
        """Offsets of blocks in bytes. chunks: the blocks' chunks, counted from `first`. inside: the
        blocks' offsets in their chunks.
        """

    @abstractmethod
    def settle(self, tokens: Callable[[int], int], seconds: float) -> Settled:
        """The copy is over, and took `seconds`: return how much of it is right. tokens: how many
        tokens so many leading chunks bring.
        """

    @abstractmethod
    def leave(self) -> None:
        """The chunks are not needed: release them."""

    def lose(self) -> None:  # noqa: B027 - most stay as they are
        """The chunks are not needed, but something may still be reading them."""

    def keep(self) -> None:  # noqa: B027 - most need nothing
        """Called while the copy runs: make sure that the chunks stay readable."""


@dataclass
class _ReadPart(Part):
    pieces: list[Piece]

    def keep(self) -> None:
        for piece in self.pieces:
            piece.keep()

    def settle(self) -> Settled:
        right, pieces, number = 0, list(self.pieces), self.plan.blocks[:, 0]
        try:
            seconds, whole = self.seconds, max(self.tokens, 1)
            while pieces:
                start = pieces[0].first - self.first
                begin = int(np.searchsorted(number, start)) if start else 0

                def tokens(chunks: int, start: int = start, begin: int = begin) -> int:
                    if chunks == self.count:
                        return self.tokens
                    return (
                        int(np.searchsorted(number, start + chunks)) - begin
                    ) * self.plan.block_size

                piece = pieces.pop(0)
                settled = piece.settle(tokens, seconds * tokens(piece.count) / whole)
                right += settled.chunks
                if settled.cause:
                    return Settled(right, settled.cause)
            return Settled(right)
        finally:
            for piece in pieces:
                piece.leave()

    def drop(self) -> None:
        for piece in self.pieces:
            piece.leave()


def read(context: LoadContext, pieces: list[Piece]) -> Part:
    """Launch one copy of these consecutive pieces. After a VCacheError none of it runs; after
    another exception some of it may.
    """
    first, count = pieces[0].first, sum(piece.count for piece in pieces)
    try:
        plan, started = context.plan(first, count), perf_counter()
        moving = _launched(context, plan, pieces)
    except VCacheError:
        for piece in pieces:
            piece.leave()
        raise
    except BaseException:
        for piece in pieces:
            piece.lose()
        raise
    return _ReadPart(context, first, count, plan, moving, started, pieces)


def _launched(context: LoadContext, plan: CopyPlan, pieces: list[Piece]) -> Completion:
    session, kv = context.session, context.places.kv
    views = [view for piece in pieces for view in piece.views]
    if len(views) == pieces[-1].first + pieces[-1].count - pieces[0].first:
        return session.copier.scatter(kv, plan, views, context.mark)
    rows, origins = _rows(plan, pieces)
    local = all(piece.local for piece in pieces)
    return session.copier.pull(kv, rows, origins, context.mark, (pieces, views), local=local)


def _rows(plan: CopyPlan, pieces: list[Piece]) -> tuple[Int64s, Int64s]:
    """For `Copier.pull`."""
    rows = np.empty((len(plan.blocks), 3), dtype=np.int64)
    rows[:, 2] = plan.blocks[:, 2]
    numbers: dict[int, int] = {}
    bases: list[Int64s] = []
    chunks = list(accumulate((piece.count for piece in pieces), initial=0))
    bounds = np.searchsorted(plan.blocks[:, 0], chunks).tolist()
    for piece, start, begin, end in zip(pieces, chunks, bounds, bounds[1:], strict=False):
        lies_in, its = piece.origin()
        if id(lies_in) not in numbers:
            numbers[id(lies_in)] = len(bases)
            bases.append(its)
        rows[begin:end, 0] = numbers[id(lies_in)]
        rows[begin:end, 1] = piece.offsets(
            plan.blocks[begin:end, 0] - start, plan.blocks[begin:end, 1]
        )
    return rows, np.stack(bases)


class MemorySource(Source):
    """Chunks in other instances' KV caches and in the pool."""

    def __init__(
        self, context: LoadContext, pool: Pooled, residents: ResidentChunks | None
    ) -> None:
        self._context, self._pool, self._residents = context, pool, residents

    @property
    def cause(self) -> str:  # type: ignore[override]
        return self._pool.cause

    def expects(self, chunk: int) -> bool:
        return self._residents is not None and self._residents.expects(chunk)

    def has(self, chunk: int) -> bool:
        """Whether this chunk is known to be here."""
        return chunk in self._context.resident or self._pool.has(chunk)

    def launch(self, chunk: int) -> Part | None:
        """Only for the first piece is the server asked for a lease: the copy need not wait for what
        follows.
        """
        pieces: list[Piece] = []
        at, residents = chunk, self._residents
        try:
            while at < len(self._context.keys) and not self.expects(at):
                piece = residents.take(at) if residents is not None else None
                if piece is None and (not pieces or residents is not None):
                    piece = self._pool.take(at, ask=not pieces)
                if piece is None:
                    break
                pieces.append(piece)
                at += piece.count
        except BaseException:
            for piece in pieces:
                piece.leave()
            raise
        return read(self._context, pieces) if pieces else None

    def cancel(self) -> None:
        self._context.resident.clear()
        self._pool.cancel()
