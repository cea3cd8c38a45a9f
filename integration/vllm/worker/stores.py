"""Launches a worker's stores. Steps that would overwrite blocks wait for stores that read them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.transfer.stats import EngineStats
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool.copies.copier import Completion

from ..metadata import StepMetadata, StoreSpec
from ..telemetry.stats import Meter
from .loading import Attached, Loading

log = logging.getLogger("vllm.vcache")


COUNTED = {
    "tokens_stored": "stored_tokens",
    "bytes_stored": "stored_bytes",
    "chunks_published": "published_chunks",
    "offload_written": "offload_written_chunks",
    "bytes_offload_written": "offload_written_bytes",
}
"""Counts of the session, and the metric of each."""


class _Gather(NamedTuple):
    """A store under way. blocks: the blocks that the store reads, vLLM's numbers."""

    copy: Completion
    blocks: frozenset[int]


class Stores:
    """Runs in the worker's main thread. Only `fence` may raise."""

    def __init__(self, meter: Meter, at_once: bool = False) -> None:
        """at_once: make the model's stream wait for every store. Needed if vLLM clears blocks
        (`compat.clears`): vLLM clears and copies a step's blocks before it tells us of the step."""
        self._meter, self._at_once = meter, at_once
        self._under_way: list[_Gather] = []
        self._counted: dict[tuple[str, str], float] = {}
        self._updates = 0

    def fence(self, worker: Attached, meta: StepMetadata) -> None:
        """Make this step's work wait, on the device, for stores that read a block with a new
        owner."""
        self._under_way = [gather for gather in self._under_way if not self._over(gather)]
        for gather in self._under_way:
            if any(not gather.blocks.isdisjoint(blocks) for blocks in meta.fresh):
                worker.session.copier.fence(gather.copy)

    def start(self, worker: Attached, stores: Sequence[StoreSpec]) -> None:
        """Store the chunks that the step completes. The step's whole model run must be queued."""
        for spec in stores:
            keys, prefix = worker.session.own(spec.keys), worker.session.own(spec.prefix)
            self._store("store", worker, keys, spec.blocks, prefix)

    def promote(self, load: Loading) -> None:
        """Store chunks that a load has brought from the offload tier in the pool again."""
        worker, spec = load.worker, load.spec
        if chunks := load.to_promote():
            prefix, blocks = worker.session.own(spec.prefix), spec.blocks
            keys, epoch = load.keys, load.epoch
            self._store("promote", worker, keys, blocks, prefix, chunks, fetched_in=epoch)

    def save(
        self,
        worker: Attached,
        keys: list[ChunkKey],
        blocks: list[int],
        epoch: int,
        holds: Callable[[], bool],
    ) -> None:
        """Store chunks out of `blocks`, which no request holds and vLLM may hand out at any time.

        blocks: of all chunks, in order. epoch: of the chunks. holds: asked after the copy; False
        drops the chunks because a block was handed out meanwhile."""
        self._store("save", worker, keys, blocks, fetched_in=epoch, holds=holds)

    def measure(self, stats: EngineStats) -> None:
        """Give the meter the session's counts since the last call."""
        if stats.updates == self._updates:
            return
        self._updates = stats.updates
        counted = stats.counted("")
        counts: dict[tuple[str, str], float] = {
            (f"{lost}_chunks", name.removeprefix(f"{lost}_")): count
            for lost in ("not_stored", "offload_dropped")
            for name, count in counted.items()
            if name.startswith(f"{lost}_")
        }
        counts |= {(counter, ""): counted.get(name, 0) for name, counter in COUNTED.items()}
        counts["store_time_seconds", "metadata"] = stats.seconds("reserve", "commit")
        counts["store_time_seconds", "data"] = stats.seconds("store_copy")
        for (counter, label), count in counts.items():
            self._meter.count(counter, count - self._counted.get((counter, label), 0), label)
        self._counted = counts

    # ---- inside

    def _store(
        self,
        what: str,
        worker: Attached,
        keys: list[ChunkKey],
        blocks: list[int],
        prefix: Sequence[ChunkKey] = (),
        chunks: Sequence[int] | None = None,
        **how: Any,
    ) -> None:
        """Store chunks out of `blocks`, vLLM's numbers. `fence` makes the blocks' next owners wait
        for the copy. what: for the log. chunks: None: all. prefix, how: see `transfer.store`."""
        session, chunks = worker.session, range(len(keys)) if chunks is None else chunks
        try:
            places = worker.places(blocks)
            pending = store(session, places, keys, chunks, prefix, beside=True, **how)
        except Exception as error:  # noqa: BLE001 - a failed store counts as no store
            session.miss(what, error)
            self._meter.count("failures", 1, getattr(error, "cause", "other"))
            return
        if pending is not None:
            if self._at_once:
                session.copier.fence(pending.completion)
            self._under_way.append(_Gather(pending.completion, frozenset(blocks)))

    def _over(self, gather: _Gather) -> bool:
        """Whether the store has stopped reading its blocks. A failed store has stopped, too, and is
        not committed."""
        try:
            return gather.copy.done()
        except VCacheError as error:
            log.debug("a store failed: %s", error)
            return True
