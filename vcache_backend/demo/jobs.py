"""What the demo and its workers say to each other, one MessagePack message a frame, over a pipe of their own."""

from __future__ import annotations

from typing import Any

import msgspec

from vcache_backend.demo.cache import Fault
from vcache_backend.demo.content import Shape
from vcache_backend.demo.trace import Request


class Setup(msgspec.Struct, frozen=True, tag="setup"):
    """First message to a worker → `Ready`. `device` and `segment_bytes` are its part of the pool;
    the rest of the configuration is what `VCACHE_CONFIG` names."""

    worker: int
    device: str
    segment_bytes: int
    shape: Shape
    cache_blocks: int
    chunk_size: int


class Job(msgspec.Struct, frozen=True, tag="job"):
    """Serve request number `index` → `Done`."""

    index: int
    request: Request


class Finish(msgspec.Struct, frozen=True, tag="finish"):
    """Nothing more comes: say what the engine counted and end → `Report`."""


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine runs and its segment is in the pool. `fingerprint` is its namespace's."""

    fingerprint: bytes


class Done(msgspec.Struct, frozen=True, tag="done"):
    """`found` and `retrieved` in tokens: what `lookup` answered, and the leading tokens that `retrieve` put into the cache.
    `problems`: whatever is wrong without being a wrong byte, one line each."""

    index: int
    found: int
    retrieved: int
    faults: list[Fault] = []
    problems: list[str] = []


class Report(msgspec.Struct, frozen=True, tag="report"):
    """`VCacheEngine.get_stats()` of one worker."""

    stats: dict[str, Any]


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The worker ends: an exception reached its outermost loop."""

    traceback: str


ToWorker = Setup | Job | Finish
FromWorker = Ready | Done | Report | Failed
