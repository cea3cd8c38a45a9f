"""Collects a worker's report to the scheduler after each step."""

from __future__ import annotations

from collections import deque

from vcache_backend.protocol.messages import ChunkKey, of_rank
from vcache_backend.transfer.session import Session

from ..metadata import Link, WorkerReport
from ..model.spec import ShardSpec

NOTICEABLE = 0.1
"""Smaller relative changes of the bandwidth are not reported."""
MOST_STORED = 4096


class Reporter:
    """Runs in the worker's main thread. number: this worker's number among all workers.

    next: the next report, to which the worker adds. introduce: add `shard` to it. shard: this
    worker's part of a chunk."""

    def __init__(
        self,
        place: tuple[int, int],
        number: int,
        rank: int,
        *,
        events: bool = False,
        traces: bool = False,
    ) -> None:
        """place: pipeline and tensor rank. rank: of this worker's part of a chunk. events, traces:
        KV events, spans are wanted."""
        self._place = place
        self.number = number
        self._rank = rank
        self._events = events
        self.traces = traces
        self._session: Session | None = None
        self.shard = ShardSpec(
            pp_rank=place[0], tp_rank=place[1], problem="it was given no KV caches"
        )
        self.next, self.introduce = WorkerReport(), False
        self._link = Link()
        self._stored: deque[ChunkKey] = deque(maxlen=MOST_STORED)

    def open(self, session: Session, shard: ShardSpec) -> None:
        """Note that the worker has joined the pool."""
        self._session = session
        self.shard = shard
        if self._events:
            session.on_stored.append(lambda keys: self._stored.extend(of_rank(keys, 0)))

    def take(self) -> WorkerReport | None:
        """Return the report since the last call; None if it would be empty."""
        report, link = self.next, self._reached()
        if link != self._link:
            report.links = {self.number: link}
        if self.introduce:
            report.shards = {self._place: self.shard}
        if self._stored:
            report.stored = {self._rank: [self._stored.popleft() for _ in range(len(self._stored))]}
        self._link = link
        self.introduce = False
        if report == WorkerReport():
            return None
        self.next = WorkerReport()
        return report

    # ---- inside

    def _reached(self) -> Link:
        """This worker's connection to the offload tier. After a small change, the bandwidth stays
        as in the last report."""
        if self._session is None:
            return self._link
        tier = self._session.tier
        if tier is None:
            return Link(usable=False)
        rate, reported = tier.bandwidth, self._link.bandwidth
        if rate is not None and reported is not None:
            rate = reported if abs(rate - reported) < NOTICEABLE * reported else rate
        return Link(tier.usable, rate)
