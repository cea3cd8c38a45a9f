"""The replay itself: one request after the other, so that the order of operations is defined and the hit rate is exact."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from vcache_backend.config import ClientConfig, Config, EngineConfig, PoolConfig, ServerConfig, dump
from vcache_backend.demo.children import CONFIG, SOCKET, DemoError, WorkerChild, children
from vcache_backend.demo.corruption import flip_byte
from vcache_backend.demo.jobs import Done, Finish, Job, Ready, Report, Setup
from vcache_backend.demo.plan import Plan
from vcache_backend.demo.trace import LONGEST, tokens
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import SegmentInfo
from vcache_backend.transfer.layout import Namespace

START_SECONDS = 60.0
STEP_SECONDS = 30.0
TOTAL_SECONDS = 300.0
LONGEST_FOLDER = 70
"""A Unix socket's path has at most 107 bytes; where TMPDIR leaves no room for ours, /tmp does."""

T = TypeVar("T")


class Outcome(msgspec.Struct, frozen=True):
    """What happened: `done` by request, `stats` by worker, the segments at the end."""

    done: list[Done]
    stats: list[dict[str, Any]]
    segments: list[SegmentInfo]
    seconds: float


def demo_config(config: Config) -> Config:
    """The defaults but for `engine.chunk_size` and `pool.max_ctas` of `config`, with deadlines that no busy machine misses.

    So eviction makes room and does nothing else, which is the rule the simulation has.
    """
    return Config(
        server=ServerConfig(lease_seconds=60.0, reservation_seconds=60.0),
        client=ClientConfig(connect_seconds=5.0, request_seconds=10.0, control_seconds=30.0),
        pool=PoolConfig(max_ctas=config.pool.max_ctas),
        engine=EngineConfig(chunk_size=config.engine.chunk_size),
    )


def replay(plan: Plan, config: Config, progress: Callable[[int], None], corrupt: int | None = None) -> Outcome:
    """Start everything, serve the requests round-robin, stop everything. Raises DemoError; leaves no process and no file.

    `progress(n)` is called after each request. `corrupt`: before this request one byte of its first chunk is changed in
    the segment, behind everybody's back (a test of the demo).
    """
    short = tempfile.gettempdir() if len(tempfile.gettempdir()) < LONGEST_FOLDER else "/tmp"
    with tempfile.TemporaryDirectory(prefix="vcache-demo-", dir=short) as name:
        folder = Path(name)
        config = demo_config(config)
        values = dump(config)
        values["server"]["socket"] = str(folder / SOCKET)
        (folder / CONFIG).write_bytes(msgspec.yaml.encode(values))
        with children(len(plan.devices), folder, START_SECONDS) as workers:
            return _drive(plan, workers, folder / SOCKET, config, progress, corrupt)


def _drive(
    plan: Plan, workers: list[WorkerChild], path: Path, config: Config, progress: Callable[[int], None], corrupt: int | None
) -> Outcome:
    """The lock-step: a request is sent only after the one before it is served and committed."""
    until = time.monotonic() + TOTAL_SECONDS
    fingerprint = _start(plan, workers)
    done, begin = [], time.monotonic()
    for index, request in enumerate(plan.requests):
        if index == corrupt:
            flip_byte(path, config.client, Namespace(fingerprint), tokens(request), plan.chunk_size, plan.devices[0])
        if time.monotonic() > until:
            raise DemoError(
                f"only {index} of {len(plan.requests)} requests in {TOTAL_SECONDS:g} s: too slow a machine, or one that hangs"
            )
        worker = workers[index % len(workers)]
        worker.send(Job(index, request))
        done.append(_expect(Done, worker, STEP_SECONDS))
        progress(index + 1)
    seconds = time.monotonic() - begin
    with Client(path, config.client, reconnect=False) as client:
        segments = client.list_segments()
    for worker in workers:
        worker.send(Finish())
    return Outcome(done, [_expect(Report, worker, STEP_SECONDS).stats for worker in workers], segments, seconds)


def _start(plan: Plan, workers: list[WorkerChild]) -> bytes:
    """Bring the workers up, all at the same time; the fingerprint of the namespace they share."""
    for number, worker in enumerate(workers):
        worker.send(
            Setup(
                worker=number,
                device=plan.devices[number],
                segment_bytes=plan.segment_chunks * plan.chunk_bytes,
                shape=plan.shape,
                cache_blocks=2 * LONGEST // plan.shape.block_size,
                chunk_size=plan.chunk_size,
            )
        )
    fingerprints = {_expect(Ready, worker, START_SECONDS).fingerprint for worker in workers}
    if len(fingerprints) > 1:
        raise DemoError(f"the workers have {len(fingerprints)} namespaces, so they share nothing")
    return fingerprints.pop()


def _expect(kind: type[T], worker: WorkerChild, seconds: float) -> T:
    message = worker.receive(seconds)
    if not isinstance(message, kind):
        raise DemoError(f"{worker.name} answered {type(message).__name__} where {kind.__name__} was due")
    return message
