"""What the two halves of the connector tell each other, in every step: plain, picklable values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vcache_backend.metadata_server.messages import ChunkKey, SegmentId
from vcache_backend.vram_pool.devices import Where

from .model_spec import ShardSpec
from .replicas import Run


class Link(msgspec.Struct, frozen=True):
    """How a worker reaches the offload tier. bandwidth: bytes a second of its recent reads; None
    before the first.
    """

    usable: bool = True
    bandwidth: float | None = None


class _Spec(msgspec.Struct, frozen=True):
    """Pickled as MessagePack, which takes the scheduler a tenth of pickle's time: a spec has many
    numbers and locations.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (type(self), msgspec.msgpack.encode(self))


def _unpacked(kind: type[_Spec], data: bytes) -> _Spec:
    return msgspec.msgpack.decode(data, type=kind)


class LoadSpec(_Spec, frozen=True):
    """Blocks of one request to be filled from consecutive chunks of the pool.

    keys: rank 0's. blocks: vLLM's numbers, from the first block of the first chunk on; -1: not
    wanted. skip, stop: fill `blocks[skip:stop]`; vLLM's own cache has those before. wait_seconds:
    how long to wait for chunks that are not there yet; 0: all are there. offload: chunks that the
    pool lacks may be in the offload tier. promote: store in the pool again what comes from there.
    prefix: the keys of all earlier chunks, if `offload`. residents: the chunks that lie in other
    instances' KV caches, numbered within the load. lost: the scheduler could not describe the load;
    load nothing and report that it failed."""

    request_id: str
    keys: list[ChunkKey] = []
    blocks: list[int] = []
    skip: int = 0
    stop: int = 0
    wait_seconds: float = 0.0
    offload: bool = False
    promote: bool = False
    prefix: list[ChunkKey] = []
    residents: list[Run] = []
    lost: bool = False


class StoreSpec(_Spec, frozen=True):
    """Consecutive chunks of a request that this step completes, to be stored.

    keys: rank 0's. blocks: vLLM's numbers, those of all chunks in order. prefix: the keys of all
    earlier chunks."""

    request_id: str
    keys: list[ChunkKey]
    blocks: list[int]
    prefix: list[ChunkKey]


class PublicationSpec(_Spec, frozen=True):
    """Chunks of a request that others may read out of this instance's KV cache once the step is
    over.

    keys: rank 0's. blocks, generations: those of all chunks in order (vLLM's numbers), packed as in
    `Publish`. sequence, epoch: see `Publish`. loaded: the request loaded or hit all of these
    chunks, so that nobody waits for them."""

    request_id: str
    keys: list[ChunkKey]
    blocks: bytes
    generations: bytes
    sequence: int
    epoch: int = 0
    loaded: bool = False


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """What the scheduler tells the workers in each step.

    loads, stores, publications: those of this step. fresh: lists of blocks that get a new owner in
    this step. cancelled: requests that ended while they were being loaded. flush: report this
    number when the stores of earlier steps have begun; 0: none. idle: no model runs in this step.
    opaque: it is not known which blocks get a new owner. introduce: report what you hold. instance:
    the name under which to show the KV cache to others, in a step that introduces; empty: do not
    show it. found: more `LoadSpec.residents`, by request, for loads that wait for chunks; an empty
    entry: no more will come. victims: chunks to save in the pool before their blocks are used
    again. echo: report this number once this step's model run is over; 0: none."""

    loads: list[LoadSpec] = field(default_factory=list)
    stores: list[StoreSpec] = field(default_factory=list)
    fresh: list[list[int]] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    flush: int = 0
    idle: bool = False
    opaque: bool = False
    introduce: bool = False
    instance: bytes = b""
    publications: list[PublicationSpec] = field(default_factory=list)
    found: dict[str, list[Run]] = field(default_factory=dict)
    victims: PublicationSpec | None = None
    echo: int = 0


class _Uncached(StepMetadata):
    """The metadata of an instance that is refused. `REFUSED` is its only object, also after
    unpickling in another process.
    """

    def __reduce__(self) -> str:
        return "REFUSED"


REFUSED = _Uncached()


class Shard(msgspec.Struct, frozen=True):
    """What a worker holds of a chunk, and whether it has the packages and settings to read the
    offload tier.
    """

    spec: ShardSpec
    offload: bool = False


class LoadSpan(NamedTuple):
    """One worker's part of a request's load that is over.

    began, ended: nanoseconds of the wall clock. nbytes: by where the bytes lay. metadata_seconds,
    data_seconds: see `LoadStats`. failure: why it failed; empty if it did not."""

    request_id: str
    worker: int
    began: int
    ended: int
    nbytes: dict[str, int]
    metadata_seconds: float
    data_seconds: float
    failure: str


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What the workers tell the scheduler after a step. It works under MultiConnector, too.

    failed: requests whose loads failed. flushed: the step's `flush`: every store so far has its
    reservation, so that a reset voids it. segments: by worker's number, the segments that it can
    read and where they lie for it, if that changed or the step introduces. echoes: the step's
    `echo`; all workers report it in the same step. links: how workers reach the offload tier, if
    that changed. shards: by (pipeline rank, tensor rank), what they hold, if the step asked.
    stored: by rank, the keys (rank 0's) of what it has stored, if somebody wants KV events. spans:
    of every load that is over."""

    failed: set[str] = field(default_factory=set)
    flushed: int = 0
    segments: dict[int, dict[SegmentId, Where]] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    stored: dict[int, list[ChunkKey]] = field(default_factory=dict)
    echoes: set[int] = field(default_factory=set)
    spans: list[LoadSpan] = field(default_factory=list)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """This report and another worker's as one: a load that failed at one of them has failed."""
        if not isinstance(other, WorkerReport):
            return self
        stored = {
            rank: self.stored.get(rank, []) + other.stored.get(rank, [])
            for rank in self.stored.keys() | other.stored.keys()
        }
        return WorkerReport(
            self.failed | other.failed,
            max(self.flushed, other.flushed),
            self.segments | other.segments,
            self.links | other.links,
            self.shards | other.shards,
            stored,
            self.echoes | other.echoes,
            self.spans + other.spans,
        )
