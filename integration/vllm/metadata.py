"""What the two halves of the connector tell each other, in every step: plain, picklable values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vcache_backend.metadata_server.messages import ChunkKey, Location, SegmentId
from vcache_backend.vram_pool.devices import Where

from .model_spec import ShardSpec


class HeldLease(msgspec.Struct, frozen=True):
    """A lease of the scheduler's for all workers, which it ends. locations: of all `ranks` parts of a chunk, chunk by chunk; parts of
    one more may follow. deadline: of time.monotonic, the same clock in all processes of a node; `seconds` after it was asked for."""

    id: int
    locations: list[Location]
    deadline: float
    seconds: float
    ranks: int = 1


class Link(msgspec.Struct, frozen=True):
    """How a worker reaches the offload tier. bandwidth: bytes of its shards a second that came lately; None before the first."""

    usable: bool = True
    bandwidth: float | None = None


class _Spec(msgspec.Struct, frozen=True):
    """Pickled as MessagePack, which takes the scheduler a tenth of the time: many numbers and locations."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (type(self), msgspec.msgpack.encode(self))


def _unpacked(kind: type[_Spec], data: bytes) -> _Spec:
    return msgspec.msgpack.decode(data, type=kind)


class LoadSpec(_Spec, frozen=True, kw_only=True):
    """Blocks of one request to be filled from consecutive chunks of the pool.

    keys: of rank 0. blocks: vLLM's numbers, from the first block of the first chunk on. skip, stop: the blocks wanted are
    `blocks[skip:stop]`, what is before is in vLLM's own cache. wait_seconds: how long chunks that are not there yet may take to
    come; 0: they are all there. consume: remove the chunks once they are loaded. lease: of a synchronous load, whose step needs it:
    the scheduler holds this one. pinned: a synchronous one, too, whose blocks their owners keep. offload: what the pool has not may lie in
    the offload tier. promote: what comes from there is to be stored in the pool again. prefix: the keys of all chunks before them,
    where there is an offload tier. residents: by number, the chunks that lie in another instance's KV cache: whose, and its blocks with
    their generations, as they were published. lost: the scheduler could not say more; nothing is to be loaded. number: of a synchronous
    load, which workers say when it is over.
    """

    request_id: str
    keys: list[ChunkKey]
    blocks: list[int]
    skip: int
    stop: int
    wait_seconds: float = 0.0
    consume: bool = False
    lease: HeldLease | None = None
    pinned: bool = False
    offload: bool = False
    promote: bool = False
    prefix: list[ChunkKey] = []
    residents: dict[int, tuple[bytes, bytes, bytes]] = {}
    lost: bool = False
    number: int = 0

    @property
    def synchronous(self) -> bool:
        """Whether the model run of its step needs it."""
        return self.pinned or self.lease is not None

    @property
    def wanted(self) -> list[int]:
        """The blocks to be filled."""
        return [block for block in self.blocks[self.skip : self.stop] if block >= 0]


class StoreSpec(_Spec, frozen=True):
    """Consecutive chunks of a request that this step completes. keys: of rank 0. blocks: vLLM's numbers, those of all chunks in order.

    prefix: the keys of all chunks before them. before: the blocks of those, in a step that also loads.
    """

    request_id: str
    keys: list[ChunkKey]
    blocks: list[int]
    prefix: list[ChunkKey]
    before: list[int] = []


class PublicationSpec(_Spec, frozen=True):
    """Chunks of a request that others may read out of this instance's KV cache once the step is over. keys: of rank 0. blocks: those
    of all chunks in order, vLLM's numbers, and generations: theirs, packed as `Publish` has them.

    sequence, epoch: see `Publish`. before: the blocks of all chunks up to the last one, in a step that also loads. loaded: the request has
    found them all, so that nobody waits for them.
    """

    request_id: str
    keys: list[ChunkKey]
    blocks: bytes
    generations: bytes
    sequence: int
    before: list[int] = []
    epoch: int = 0
    loaded: bool = False


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, one a step.

    fresh: blocks that get a new owner in this step, in lists. cancelled: requests that ended while their load was under way.
    flush: a number to be told when the stores of earlier steps have begun; 0: none. idle: no model runs in this step. opaque: nobody
    knows which blocks get a new owner. introduce: say what you hold. instance: under which name to show the KV cache to others, in a
    step that introduces; empty if it is not to be shown. found: more of `LoadSpec.residents`, by request, for loads that wait for
    chunks; none: no more will come. meet: instances whose KV caches are to be mapped for later loads. echo: a number to be told as that
    of a load which is over with this step. nap: the number of a sleep of vLLM's of which nobody has said how it left the weights; 0: of
    none. compare: say it.
    """

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
    found: dict[str, dict[int, tuple[bytes, bytes, bytes]]] = field(default_factory=dict)
    victims: PublicationSpec | None = None
    meet: set[bytes] = field(default_factory=set)
    echo: int = 0
    nap: int = 0
    compare: bool = False


class _Uncached(StepMetadata):
    """Of an instance that caches nothing, now and later. There is one, also behind a process border."""

    def __reduce__(self) -> str:
        return "REFUSED"


REFUSED = _Uncached()


class Shard(msgspec.Struct, frozen=True):
    """What a worker holds of a chunk, and whether it has what it takes to read the offload tier."""

    spec: ShardSpec
    offload: bool = False


class LoadSpan(NamedTuple):
    """One worker's part of a request's load, once it is over. began, ended: nanoseconds of the wall clock. nbytes: by where they lay, see
    `LoadStats`; metadata_seconds, data_seconds: likewise. failure: its cause, if it did not hold."""

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
    """Workers to scheduler, after a step. failed: requests whose loads did not hold, or that built on blocks of one whose did not.
    flushed: the number with which the step asked: every store so far has its reservation, so that a reset ends it. segments: those that
    workers can read, and where they lie for them, by workers' numbers, where that changed, or nobody knew. mapped: the instances whose
    KV caches they can read, likewise. read: the numbers of the synchronous loads that are over, all workers' in the same step. links:
    how workers reach the offload tier, where that changed. shards: what they hold, by (pipeline rank, tensor rank), where the step
    asked. stored: keys, of rank 0, of what each rank has stored, where somebody wants KV events. spans: of every load that is over.
    same: for which nap workers were asked, and whether their weights are as they were before vLLM slept, by their numbers, where the
    step asked.

    Of vLLM's ways up this is the one that connectors beside ours share."""

    failed: set[str] = field(default_factory=set)
    flushed: int = 0
    segments: dict[int, dict[SegmentId, Where]] = field(default_factory=dict)
    links: dict[int, Link] = field(default_factory=dict)
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)
    stored: dict[int, list[ChunkKey]] = field(default_factory=dict)
    mapped: dict[int, frozenset[bytes]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    spans: list[LoadSpan] = field(default_factory=list)
    same: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Of several workers: a load that one of them lost is lost."""
        if not isinstance(other, WorkerReport):
            return self
        stored = {
            rank: self.stored.get(rank, []) + other.stored.get(rank, []) for rank in self.stored.keys() | other.stored.keys()
        }
        return WorkerReport(
            self.failed | other.failed,
            max(self.flushed, other.flushed),
            self.segments | other.segments,
            self.links | other.links,
            self.shards | other.shards,
            stored,
            self.mapped | other.mapped,
            self.read | other.read,
            self.spans + other.spans,
            self.same | other.same,
        )
