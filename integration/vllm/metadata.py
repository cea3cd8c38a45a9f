"""What the two halves of the connector tell each other, in every step: plain, picklable values."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from vcache_backend.metadata_server.messages import ChunkKey, Location, SegmentId

from .events import StoredBlocks
from .model_spec import ShardSpec


@dataclass(frozen=True)
class Granted:
    """A lease of the scheduler's for the one worker there is. deadline: of time.monotonic, the same clock in all processes of a
    node; `seconds` after it was asked for."""

    lease: int
    locations: list[Location]
    deadline: float
    seconds: float


@dataclass(frozen=True)
class Link:
    """How a worker reaches the offload tier. bandwidth: bytes of its shards a second that came lately; None before the first."""

    usable: bool = True
    bandwidth: float | None = None


@dataclass(frozen=True)
class Load:
    """Blocks of one request to be filled from consecutive chunks of the pool.

    keys: of rank 0. blocks: vLLM's numbers, from the first block of the first chunk on. skip, stop: the blocks wanted are
    `blocks[skip:stop]`, what is before is in vLLM's own cache. wait_seconds: how long chunks that are not there yet may take to
    come; 0: they are all there. consume: remove the chunks once they are loaded. said: vLLM's hashes of each chunk's blocks, where
    routers are to be told of that. granted: the step that brings this needs them,
    and the scheduler holds this lease on them. below: what the pool has not may lie in the offload tier it. promote: what comes from
    there is to be stored in the pool again. prefix: the keys of all chunks before them, where there is a offload tier. lost: the
    scheduler could not say more; nothing is to be loaded.
    """

    request_id: str
    keys: list[ChunkKey]
    blocks: list[int]
    skip: int
    stop: int
    wait_seconds: float = 0.0
    consume: bool = False
    said: list[list[bytes]] = field(default_factory=list)
    granted: Granted | None = None
    below: bool = False
    promote: bool = False
    prefix: list[ChunkKey] = field(default_factory=list)
    lost: bool = False


@dataclass(frozen=True)
class Store:
    """Consecutive chunks of a request that this step completes. keys: of rank 0. blocks: vLLM's numbers, those of all chunks in order.

    prefix: the keys of all chunks before them. before: the blocks of those, in a step that also loads. said: what to tell routers of
    each chunk, where anybody listens.
    """

    request_id: str
    keys: list[ChunkKey]
    blocks: list[int]
    prefix: list[ChunkKey]
    before: list[int] = field(default_factory=list)
    said: list[StoredBlocks] = field(default_factory=list)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, one a step.

    fresh: blocks that get a new owner in this step, in lists. cancelled: requests that ended while their load was under way.
    flush: say when the stores of earlier steps have begun. idle: no model runs in this step. opaque: nobody knows which blocks get
    a new owner. introduce: say what you hold.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    fresh: list[list[int]] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    flush: bool = False
    idle: bool = False
    opaque: bool = False
    introduce: bool = False


@dataclass(frozen=True)
class Shard:
    """What a worker holds of a chunk, and whether it has what it takes to read the offload tier."""

    spec: ShardSpec
    below: bool = False


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler, after a step. failed: requests whose loads did not hold, or that built on blocks of one whose did not.
    flushed: every store of the steps so far has its reservation, so that a reset ends it. segments: those this worker can read, where
    that changed, or nobody knew. links: how workers reach the offload tier, by their numbers, where that changed. shards: what they
    hold, by (pipeline rank, tensor rank), where the step asked. Of vLLM's ways up this is the one that connectors beside ours share."""

    failed: set[str]
    flushed: bool = False
    segments: frozenset[SegmentId] | None = None
    links: dict[int, Link] = field(default_factory=dict)
    shards: dict[tuple[int, int], Shard] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Of several workers: a load that one of them lost is lost. What one can read is of interest only where there is one."""
        if not isinstance(other, WorkerReport):
            return self
        links, shards = self.links | other.links, self.shards | other.shards
        return WorkerReport(self.failed | other.failed, self.flushed or other.flushed, None, links, shards)
