"""The messages between the connector's two halves in every step: plain, picklable values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vcache_backend.protocol.messages import BlockRun, ChunkKey, ResidentRun, chunk_keys
from vcache_backend.transfer.keys import state_keys

from .model.spec import ShardSpec


class _Spec(msgspec.Struct, frozen=True):
    """A spec has many numbers and locations: pickled as MessagePack, in a tenth of pickle's
    time."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (type(self), msgspec.msgpack.encode(self))


def _unpacked(kind: type[_Spec], data: bytes) -> _Spec:
    return msgspec.msgpack.decode(data, type=kind)


class Chunks(_Spec, frozen=True):
    """Consecutive chunks of a request, whose keys (of rank 0) the worker makes.

    hashes: packed, of the request's blocks up to the last chunk's end. each: hashes of a chunk.
    first: the number of the first chunk; those before are the `prefix`. parts: also of the state
    behind the last chunk."""

    namespace: bytes = b""
    hashes: bytes = b""
    each: int = 1
    first: int = 0
    parts: int = 0

    @property
    def keys(self) -> list[ChunkKey]:
        made = chunk_keys(self.namespace, self.hashes, self.each)
        return made[self.first :] + (state_keys(made[-1:], self.parts) if self.parts else [])

    @property
    def prefix(self) -> list[ChunkKey]:
        return chunk_keys(self.namespace, self.hashes, self.each)[: self.first]


class PublicationSpec(_Spec, frozen=True):
    """A publication: blocks that other instances may read in this KV cache after the step, or once
    they are loaded.

    runs: perhaps more than a message holds. epoch: see `Publish`. later: no other instance
    waits for these blocks: they are of answers, or the request loaded or hit them."""

    runs: list[BlockRun]
    epoch: int = 0
    later: bool = False


class LoadSpec(_Spec, frozen=True):
    """A load: fill blocks of one request, from consecutive chunks or from other KV caches.

    chunks: none: all blocks are in `residents`. blocks: vLLM's block numbers, with chunks from the
    first block of the first one on; -1: leave out. tokens: how many leading
    blocks count as tokens; 0: all, of chunks with several block tables those of the first table.
    offload: also read from the offload tier. promote: store chunks from the offload tier in the
    pool again. residents: blocks in other instances' KV
    caches, numbered as in `blocks`. publication: of the blocks once all are loaded. number: of the
    load, never used again; 0: load nothing and report a failure. open: `MoreBlocks` may follow."""

    request_id: str
    chunks: Chunks = Chunks()
    blocks: list[int] = []
    tokens: int = 0
    offload: bool = False
    promote: bool = False
    residents: list[ResidentRun] = []
    publication: PublicationSpec | None = None
    number: int = 0
    open: bool = False


class MoreBlocks(_Spec, frozen=True):
    """Further blocks of an open load, in other instances' KV caches. last: nothing follows, so the
    load ends with the blocks that it has."""

    number: int
    residents: list[ResidentRun]
    last: bool


class StoreSpec(_Spec, frozen=True):
    """A store of chunks that this step completes. blocks: vLLM's block numbers of all chunks, in
    order. epoch: of the chunks."""

    chunks: Chunks
    blocks: list[int]
    epoch: int = 0


class SavedChunks(_Spec, frozen=True):
    """Published chunks to save in the pool before their blocks are used again.

    keys: of rank 0. blocks, generations: of all chunks, in order, packed as in the protocol. epoch:
    of the chunks."""

    keys: list[ChunkKey]
    blocks: bytes
    generations: bytes
    epoch: int = 0


@KVConnectorMetadata.register
class StepMetadata(msgspec.Struct):
    """The scheduler's message to the workers in each step. Not a dataclass: each step makes a
    message, and msgspec does so in C.

    fresh: lists of blocks that get a new owner in this step. cancelled: requests that ended during
    their load. idle: the step runs no model. stop: the scheduler's half is out of use, so end all
    loads. introduce: report your shard. instance: the name under which to show the KV cache, in the
    first step; empty: do not show it. echoes: numbers to report with this step, once its model run
    is over and all stores of earlier steps have begun. ends: see `LoadEnds.address`, in a step with
    loads."""

    loads: list[LoadSpec] = []
    more: list[MoreBlocks] = []
    stores: list[StoreSpec] = []
    fresh: list[list[int]] = []
    cancelled: set[str] = set()
    idle: bool = False
    stop: bool = False
    introduce: bool = False
    instance: bytes = b""
    publications: list[PublicationSpec] = []
    victims: SavedChunks | None = None
    echoes: set[int] = set()
    ends: tuple[str, str] = "", ""

    @property
    def only_publishes(self) -> bool:
        """Whether a worker has nothing to do but to publish."""
        begins = (
            self.loads or self.more or self.stores or self.fresh or self.cancelled or self.echoes
        )
        asks = self.idle or self.stop or self.introduce or self.instance
        return not (begins or asks or self.victims is not None)


class _Quiet(StepMetadata):
    """A single object, also after unpickling."""

    def __reduce__(self) -> str:
        return "QUIET"


QUIET = _Quiet()
"""The metadata of a step without work for the workers: most steps, and all steps of a refused
instance."""


class LoadSpan(NamedTuple):
    """A worker's part of a finished load. began, ended: nanoseconds of the wall clock. said: the
    span's attributes."""

    request_id: str
    began: int
    ended: int
    said: dict[str, Any]


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' report to the scheduler after a step, also under MultiConnector.

    failed: requests with failed loads. echoes: the step's echoes; all workers report them in the
    same step. links: by worker number, changed connections to the offload tier. shards: by
    (pipeline rank, tensor rank), if the step asked. stored: by rank, the keys (of rank 0) of stored
    chunks, if anybody listens to KV events. spans: a span for each finished load."""

    failed: set[str] = field(default_factory=set)
    links: dict[int, tuple[bool, float | None]] = field(default_factory=dict)
    shards: dict[tuple[int, int], ShardSpec] = field(default_factory=dict)
    stored: dict[int, list[ChunkKey]] = field(default_factory=dict)
    echoes: set[int] = field(default_factory=set)
    spans: list[LoadSpan] = field(default_factory=list)

    def aggregate(self, other: WorkerReport) -> WorkerReport:
        """Merge two workers' reports, for vLLM. If that fails, the result makes the scheduler stop
        caching."""
        try:
            stored = {
                rank: self.stored.get(rank, []) + other.stored.get(rank, [])
                for rank in self.stored.keys() | other.stored.keys()
            }
            return WorkerReport(
                # A load that failed in either worker has failed.
                self.failed | other.failed,
                self.links | other.links,
                self.shards | other.shards,
                stored,
                self.echoes | other.echoes,
                self.spans + other.spans,
            )
        except Exception as error:  # noqa: BLE001 - nothing of ours raises into vLLM
            reason = f"workers' reports could not be merged: {type(error).__name__}: {error}"
            nobody = ShardSpec(pp_rank=-1, tp_rank=-1, problem=reason)
            return WorkerReport(shards={(-1, -1): nobody})
