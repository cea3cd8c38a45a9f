"""What the two halves of the connector tell each other, in every step: plain, picklable values."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from vcache_backend.metadata_server.messages import ChunkKey

from .facts import ShardFacts


@dataclass(frozen=True)
class Load:
    """Blocks of one request to be filled from consecutive chunks of the pool.

    keys: of rank 0. blocks: vLLM's numbers, from the first block of the first chunk on. skip, stop: the blocks wanted are
    `blocks[skip:stop]`, what is before is in vLLM's own cache. wait_seconds: how long chunks that are not there yet may take to
    come; 0: they are all there. consume: remove the chunks once they are loaded. sync: the step that brings this needs them.
    """

    request_id: str
    keys: list[ChunkKey]
    blocks: list[int]
    skip: int
    stop: int
    wait_seconds: float = 0.0
    consume: bool = False
    sync: bool = False


@dataclass(frozen=True)
class Store:
    """Consecutive chunks that this step completes. keys: of rank 0. blocks: vLLM's numbers, those of all chunks in order.

    prefix: the keys of all chunks before them.
    """

    keys: list[ChunkKey]
    blocks: list[int]
    prefix: list[ChunkKey]


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, one a step.

    fresh: blocks that get a new owner in this step, in lists. cancelled: requests that ended while their load was under way.
    clear: see to it that nothing stored before this step is in the pool after it. idle: no model runs in this step.
    """

    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    fresh: list[list[int]] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    clear: bool = False
    idle: bool = False


@dataclass
class Failures(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Workers to scheduler: requests whose loads did not hold. cleared: the pool was cleared behind the stores under way."""

    requests: set[str]
    cleared: bool = False

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Failures:
        """Of several workers: one that failed is enough."""
        return Failures(self.requests | other.requests, self.cleared or other.cleared) if isinstance(other, Failures) else self


@dataclass(frozen=True)
class Shard(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Workers to scheduler, once: what each of them holds of a chunk."""

    facts: ShardFacts
