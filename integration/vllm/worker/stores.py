"""Launches a worker's stores. Steps that would overwrite blocks wait for stores that read them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.resident.mappings import Neighbours
from vcache_backend.transfer.places import BlockPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.copies.copier import Completion
from vcache_backend.vram_pool.copies.geometry import PagedKV

from ..metadata import LoadSpec, StepMetadata, StoreSpec
from ..telemetry.stats import Meter

log = logging.getLogger("vllm.vcache")


class Attached(NamedTuple):
    """The parts that all loads and stores of a worker share."""

    session: Session
    kv: PagedKV
    block_size: int
    """Tokens of the blocks that vLLM numbers; each may be several blocks of the tensors."""
    neighbours: Neighbours | None = None

    def places(self, blocks: list[int], counted: int = 0) -> BlockPlaces:
        """The places of blocks with these numbers in vLLM; of chunks, chunk by chunk. counted: see
        `BlockPlaces`."""
        size = self.session.chunk_size
        return BlockPlaces(self.kv, size, blocks, self.block_size, counted=counted)


class Stores:
    """Runs in the worker's main thread. Only `fence` may raise."""

    def __init__(self, meter: Meter, at_once: bool = False) -> None:
        """at_once: make the model's stream wait for every store. Needed if vLLM clears blocks
        (`compat.clears`): vLLM clears and copies a step's blocks before it tells us of the step."""
        self._meter, self._at_once = meter, at_once
        self._under_way: list[tuple[Completion, frozenset[int]]] = []
        """Copies under way, and the blocks that each reads (vLLM's numbers)."""

    @property
    def busy(self) -> bool:
        """Whether a copy was under way at the last `fence`, or has begun since."""
        return bool(self._under_way)

    def fence(self, worker: Attached, meta: StepMetadata) -> bool:
        """Make this step's work wait, on the device, for stores that read a block with a new
        owner. Whether there are such stores."""
        self._under_way = [store for store in self._under_way if not _over(store[0])]
        fenced = False
        for copy, read in self._under_way:
            if any(not read.isdisjoint(blocks) for blocks in meta.fresh):
                worker.session.copier.fence(copy)
                fenced = True
        return fenced

    def start(self, worker: Attached, stores: Sequence[StoreSpec]) -> None:
        """Store the chunks that the step completes. The step's whole model run must be queued."""
        for spec in stores:
            keys, prefix = spec.chunks.keys, worker.session.own(spec.chunks.prefix)
            more: dict[str, Any] = {"prefix": prefix, "computed_in": spec.epoch}
            self._store("store", worker, worker.session.own(keys), spec.blocks, **more)

    def promote(
        self,
        worker: Attached,
        load: LoadSpec,
        keys: Sequence[ChunkKey],
        chunks: Sequence[int],
        epoch: int,
    ) -> None:
        """Store these chunks of a load, which came from the offload tier, in the pool again. keys:
        of all chunks of the load. epoch: in which the tier had stored them."""
        prefix = worker.session.own(load.chunks.prefix)
        more: dict[str, Any] = {"chunks": chunks, "prefix": prefix, "computed_in": epoch}
        self._store("promote", worker, keys, load.blocks, **more)

    def save(
        self,
        worker: Attached,
        keys: list[ChunkKey],
        blocks: list[int],
        epoch: int,
        holds: Callable[[], bool],
    ) -> None:
        """Store published chunks out of `blocks`, which vLLM may hand out at any time.

        blocks: of all chunks, in order. epoch: of the chunks. holds: asked after the copy; False
        drops the chunks because a block was handed out meanwhile."""
        self._store("save", worker, keys, blocks, computed_in=epoch, holds=holds)

    def _store(
        self, what: str, worker: Attached, keys: Sequence[ChunkKey], blocks: list[int], **how: Any
    ) -> None:
        """Store chunks out of `blocks`, vLLM's numbers. `fence` makes the blocks' next owners wait
        for the copy. what: for the log. how: see `transfer.store`; by default all chunks."""
        session, how = worker.session, {"chunks": range(len(keys)), "prefix": ()} | how
        try:
            pending = store(session, worker.places(blocks), keys, beside=True, **how)
        except Exception as error:  # noqa: BLE001 - a failed store counts as no store
            session.miss(what, error)
            self._meter.count("failures", 1, getattr(error, "cause", "other"))
            return
        if pending is not None:
            if self._at_once:
                session.copier.fence(pending.completion)
            self._under_way.append((pending.completion, frozenset(blocks) - {-1}))


def _over(copy: Completion) -> bool:
    """Whether a store has stopped reading its blocks. A failed store has stopped, too, and is not
    committed."""
    try:
        return copy.done()
    except VCacheError as error:
        log.debug("a store failed: %s", error)
        return True
