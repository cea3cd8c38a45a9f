"""Holds requests back that wait for chunks being computed or loaded.

A waiting request stays in vLLM's queue and holds no blocks. vLLM asks for hits again in every step.
`decide` says which requests wait, and for how long. See docs/adr/0022."""

from __future__ import annotations

import logging
from time import monotonic

from vcache_backend.protocol.messages import ChunkKey

from ..telemetry.stats import Meter
from .decide import LookupDecision, LookupResult, is_past
from .introduction import Introduction
from .lookups import Lookups
from .tracked import Tracked

log = logging.getLogger("vllm.vcache")

AGAIN_SECONDS = 0.005
"""The time between two look-ups of a waiting request."""
MOST_WAITING = 256
"""How many requests wait at once; further requests are computed. vLLM looks at every waiting
request in every step, which takes some 0.05 ms."""


class Waits:
    """The waits of this instance's requests. Runs in the scheduler's thread, and waits at most for
    one server call."""

    def __init__(
        self, instance: Introduction, lookups: Lookups, chunk_size: int, meter: Meter
    ) -> None:
        self._instance, self._lookups = instance, lookups
        self._size, self._meter = chunk_size, meter
        self._leaders: dict[ChunkKey, Tracked] = {}
        """The requests of this instance that load or wait, by the first chunk. Announced requests
        only while they load."""
        self._waiting: set[str] = set()
        """The ids of waiting requests."""

    def follows(self, tracked: Tracked, first: int) -> bool:
        """Whether another request of this instance brings the request's chunks from `first` on into
        vLLM's cache."""
        keys = tracked.lookup.keys
        leader = self._leaders.get(keys[first]) if self._leaders and first < len(keys) else None
        if leader is None or leader is tracked:
            return False
        if leader.wait.load_started:
            return True
        wait = leader.wait.present
        if wait is None or is_past(wait, monotonic()):
            # With priorities vLLM may not come to the leader for long, so the leader ends its wait
            # late.
            return False
        # A leader that waits may wait for more chunks than this request needs.
        last = wait.target - 1
        return first <= last < len(keys) and leader.lookup.keys[last] == keys[last]

    def pauses(self, tracked: Tracked, first: int, chunks: int) -> bool:
        """Whether the request waits, and the next answer from the server is not due yet. Asks for
        the answer, which the next step reads."""
        state, now = tracked.wait, monotonic()
        if state.present is None or tracked.lookup.question is not None:
            return False
        if now >= state.asked + AGAIN_SECONDS:
            state.asked = now
            self._lookups.forget(tracked)
            self._lookups.send(tracked, first, chunks)
            # Without a server no question is sent, and the look-up ends the wait.
            return tracked.lookup.question is not None
        return True

    def may_begin(self, tracked: Tracked) -> bool:
        """Whether the request may begin to wait."""
        return tracked.wait.wait is None and len(self._waiting) < MOST_WAITING

    def note(self, tracked: Tracked, decision: LookupDecision, hits: int) -> None:
        """Note what was decided about a request: begins its wait, goes on, or ends it. hits: how
        many leading chunks exist."""
        state = tracked.wait
        if decision.end:
            self.over(tracked, decision.end, hits)
        elif decision.result is LookupResult.WAIT:
            if state.wait is None:
                self._waiting.add(tracked.request.request_id)
                state.asked = monotonic()
                if not tracked.params.announced:
                    # No request follows an announced request, which may wait for long.
                    self._lead(tracked)
            state.wait = decision.wait

    def on_load(self, tracked: Tracked) -> None:
        """Note that the request loads the chunks behind vLLM's cached blocks."""
        # In place of a leader that only waits.
        self._leaders[self._lead(tracked)] = tracked
        tracked.wait.load_started = True

    def over(self, tracked: Tracked, why: str = "aborted", reached: int = 0) -> None:
        """End the request's wait, if any, and its lead. reached: how many leading chunks exist."""
        state = tracked.wait
        if (wait := state.present) is not None:
            state.over = True
            self._waiting.discard(tracked.request.request_id)
            state.end = why
            state.seconds = monotonic() - wait.since
            state.tokens = max(0, reached - wait.began) * self._size
            self._meter.waited(why, state.tokens, state.seconds)
            if self._instance.client is not None:
                ms = int(state.seconds * 1e3)
                self._instance.client.count(awaited=state.tokens, waited_ms=ms)
            log.debug(
                "request %s waited %.3f s for %d chunks: %s",
                *(tracked.request.request_id, state.seconds, state.tokens // self._size, why),
            )
        self._leave(tracked)

    # ---- inside

    def _lead(self, tracked: Tracked) -> ChunkKey:
        self._leave(tracked)
        key = tracked.wait.leads = tracked.lookup.keys[tracked.local // self._size]
        self._leaders.setdefault(key, tracked)
        return key

    def _leave(self, tracked: Tracked) -> None:
        state = tracked.wait
        if state.leads is not None and self._leaders.get(state.leads) is tracked:
            del self._leaders[state.leads]
        state.leads, state.load_started = None, False
