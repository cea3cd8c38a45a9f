"""Counts an engine's hits and misses, bytes by source, latencies, and failures by cause; and a
load's tokens by place, and its time."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from vcache_backend.errors import ServerUnavailable
from vcache_backend.histogram import Histogram
from vcache_backend.protocol.messages import MAX_OWNERS, POOL, InstanceId, Reads

if TYPE_CHECKING:
    from vcache_backend.transfer.places import BlockPlaces
    from vcache_backend.transfer.session import Session
    from vcache_backend.vram_pool.copies.geometry import Int64s

log = logging.getLogger(__name__)

TIMES = (
    *("lookup", "retrieve", "store"),
    *("pin", "reserve", "commit", "plan", "retrieve_copy", "store_copy"),
    *("offload_lookup", "offload_put"),
)
"""Names of latencies: whole calls, their parts, the offload tier. A put is one batch."""
NOT_STORED = ("exists", "busy", "full", "no_slot", "backlog", "late", "changed", "outdated")
NOT_OFFLOADED = ("backlog", "down", "gone", "full", "failed")
"""The reasons why a chunk is not stored, or not written to the offload tier."""


class EngineStats:
    """Counters and latencies of one engine. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._times = {name: Histogram() for name in TIMES}
        self._counts: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._said: dict[str, int] = {}
        """By reason: the `Client.run_id` of the last log line."""
        self._owners: dict[bytes, tuple[int, int, int]] = {}
        """As in `Reads`. The instance read last comes last."""
        self.listeners: list[Callable[..., object]] = []
        """Called with what is counted, by name, and with durations in seconds. Any thread."""

    def timed(self, name: str) -> AbstractContextManager[None]:
        return _Timed(self, name)

    def add_time(self, name: str, seconds: float) -> None:
        """Add a duration to `name`, which is in `TIMES`."""
        with self._lock:
            self._times[name].add(seconds * 1e6)
        self._tell({name: seconds})

    def count(self, **amounts: int) -> None:
        with self._lock:
            self._counts.update(amounts)
        self._tell(amounts)

    def _tell(self, amounts: Mapping[str, float]) -> None:
        for listener in self.listeners:
            listener(**amounts)

    def read_from(self, owner: bytes, nbytes: int, refused: int, tokens: int) -> None:
        """Count bytes and tokens read in the KV cache of instance `owner`, and blocks `refused`
        because they changed after their publication."""
        with self._lock:
            before = self._owners.pop(owner, (0, 0, 0))
            self._owners[owner] = before[0] + nbytes, before[1] + refused, before[2] + tokens
            if len(self._owners) > MAX_OWNERS:
                # Forget the owner read longest ago. Each start of an instance is a new owner.
                del self._owners[next(iter(self._owners))]

    def reads(self) -> list[Reads]:
        """Report all reads by this process, by instance."""
        with self._lock:
            return [Reads(InstanceId(owner), *counts) for owner, counts in self._owners.items()]

    def failed(self, cause: str) -> int:
        """Count a failure. Returns the number of failures with this cause so far."""
        with self._lock:
            self._failures[cause] += 1
            return self._failures[cause]

    def unsaid(self, reason: str, run_id: int) -> bool:
        """Whether to log this reason now: once for each run of the server (`Client.run_id`)."""
        with self._lock:
            before = self._said.get(reason)
            self._said[reason] = run_id
            return before != run_id

    def miss(self, call: str, error: Exception) -> int:
        """Count a failure of `call`, and log the first failure of each cause. Returns 0.

        A ServerUnavailable is not logged here."""
        first = self.failed(f"{call}: {type(error).__name__}") == 1
        if first and not isinstance(error, ServerUnavailable):
            # Not the error itself: it refers to its frames, and so to mapped memory.
            log.warning("%s failed, which counts as a miss: %s", call, str(error))
        return 0

    def counted(self, prefix: str) -> dict[str, int]:
        """The counters whose names begin with `prefix`, by the rest of their names."""
        with self._lock:
            names = [name for name in self._counts if name.startswith(prefix)]
            return {name.removeprefix(prefix): self._counts[name] for name in names}

    def snapshot(self) -> dict[str, Any]:
        """Everything as plain values, times in microseconds."""
        with self._lock:
            counts = self._counts
            owners = {owner.hex(): row[0] for owner, row in self._owners.items() if owner != POOL}
            times = {name: histogram.summary() for name, histogram in self._times.items()}

            def of(kind: str, *names: str) -> dict[str, int]:
                return {name: counts[f"{kind}_{name}"] for name in names}

            resident = of("reads", "stale", "refused") | {
                "blocks": counts["blocks_resident"],
                "bytes": counts["bytes_resident"],
            }
            return {
                **times,
                "tokens": of("tokens", "asked", "hit", "retrieved", "stored"),
                "hits": {"vram": counts["chunks_retrieved"], "offload": counts["chunks_offload"]},
                "misses": counts["chunks_missed"],
                "bytes": of("bytes", "own", "peer", "offload", "stored", "offload_written"),
                "resident": resident | {"owners": owners},
                "not_stored": of("not_stored", *NOT_STORED),
                "failures": dict(self._failures),
            }


class _Timed:
    """A class takes half the time of a generator-based context manager."""

    def __init__(self, stats: EngineStats, name: str) -> None:
        self._stats, self._name, self._started = stats, name, perf_counter()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._stats.add_time(self._name, perf_counter() - self._started)


class Origin(NamedTuple):
    """Where loaded blocks come from."""

    tier: str
    """Of the load's tokens, see `LoadStats.tokens`."""
    counter: str
    """The counter of chunks, or of another KV cache's blocks."""
    nbytes: str
    """The counter of bytes."""
    name: str
    """For the log."""
    owner: bytes = b""
    """The instance in whose KV cache they are, or `POOL`; empty: the offload tier."""


class Read(NamedTuple):
    """Blocks of a load that a copy has brought."""

    origin: Origin
    bounds: tuple[int, int, int]
    """The blocks [first, stop) of the load, and the end of those that the copy was to bring."""
    items: int
    """Their chunks, or blocks of another KV cache."""
    numbers: Int64s
    """All blocks of the copy (`CopyPlan.numbers`)."""
    seconds: float
    """The duration of the copy."""
    waited: float | None = None
    """Since the load had no other work; None: as long as the copy."""


class LoadStats:
    """Counts for one load, and adds to the session's counters. One thread.

    `tell` counts what was `brought` after the load is over: a request waits for the load's end, and
    not for counts.

    tokens, nbytes: by tier: where the pool's memory lies, "own" GPU, "peer" or "host"; "resident"
    (another instance's KV cache), "store" (the offload tier). metadata_seconds: of questions to the
    server. data_seconds: of copies, and of waits for the offload tier."""

    def __init__(self, session: Session, name: str, places: BlockPlaces) -> None:
        """name: the request, for the log. places: of the whole load."""
        self._session, self._name, self._places = session, name, places
        self.tokens, self.nbytes = Counter[str](), Counter[str]()
        self.metadata_seconds = self.data_seconds = 0.0
        self.brought: list[Read] = []

    def tell(self) -> None:
        """Count the loaded blocks, and the load for the server's statistics."""
        for read in self.brought:
            self._count(read)
        self.brought.clear()
        if self._session.counts and (tokens := self.tokens.total()):
            self._session.client.count(loads=1, loaded=tokens)

    def _count(self, read: Read) -> None:
        stats, places, origin, numbers = (
            self._session.stats,
            self._places,
            read.origin,
            read.numbers,
        )
        bounds = np.array(read.bounds) * places.split
        first, stop, end = np.searchsorted(numbers, bounds).tolist()
        tokens = places.tokens(numbers[:stop]) - places.tokens(numbers[:first])
        nbytes = (stop - first) * places.kv.block_bytes
        # Its share.
        seconds = read.seconds * (end - first) / max(len(numbers), 1)
        self.tokens[origin.tier] += tokens
        self.nbytes[origin.tier] += nbytes
        self.data_seconds += seconds if read.waited is None else read.waited
        counts = {origin.counter: read.items, origin.nbytes: nbytes}
        stats.count(tokens_retrieved=tokens, **counts)
        stats.add_time("retrieve_copy", seconds)
        if origin.owner:
            stats.read_from(origin.owner, nbytes, 0, tokens)
        said = "hit %s: blocks %d to %d of %d from %s, copy %.2f ms, asking the server %.2f ms"
        times = 1e3 * seconds, 1e3 * self.metadata_seconds
        blocks = *read.bounds[:2], places.total
        log.debug(said, self._name, *blocks, origin.name, *times)

    def changed(self, origin: Origin, first: int, stop: int, items: int) -> None:
        """Count memory of the blocks [first, stop) that was used again during the copy. items:
        their chunks, or blocks of another KV cache."""
        self._session.stats.count(reads_refused=items)
        if origin.owner:
            self._session.stats.read_from(origin.owner, 0, items, 0)
        said = "hit %s: blocks %d to %d changed in %s while they were read"
        log.debug(said, self._name, first, stop, origin.name)
