"""Whose request is answered next, so that no client waits for another one's; and how long the loop's turns are."""

from __future__ import annotations

import heapq
import time

from vcache_backend.metadata_server.connection import Connection


class Turns:
    """Connections with a whole request, the one that was given least work lately first (start-time fair queueing).

    A connection is charged for what its requests cost. One that was quiet starts level with those being served: it waits for one
    request of another's, however many they sent.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Connection]] = []
        self._now = 0

    def __len__(self) -> int:
        return len(self._heap)

    def enter(self, connection: Connection) -> None:
        """It may be served, once, if it has a whole request, room for the answer, and no answer to wait for."""
        if connection.queued or not connection.ready:
            return
        connection.queued = True
        connection.charged = max(connection.charged, self._now)
        heapq.heappush(self._heap, (connection.charged, connection.number, connection))

    def next(self) -> Connection | None:
        """Whose request comes now."""
        while self._heap:
            self._now, _, connection = heapq.heappop(self._heap)
            connection.queued = False
            if not connection.closed:
                return connection
        return None


class Longest:
    """The longest turn of the loop since the server's start: microseconds on the wall clock, and of the processor."""

    def __init__(self) -> None:
        self._wall = self._cpu = 0.0
        self._began = self._began_cpu = 0.0

    def begin(self) -> None:
        """The loop has something to do."""
        self._began, self._began_cpu = time.perf_counter(), time.thread_time()

    def end(self) -> None:
        """It waits again."""
        self._wall = max(self._wall, time.perf_counter() - self._began)
        self._cpu = max(self._cpu, time.thread_time() - self._began_cpu)

    def told(self) -> dict[str, int]:
        """As counters."""
        return {"longest_turn_us": round(self._wall * 1e6), "longest_turn_cpu_us": round(self._cpu * 1e6)}
