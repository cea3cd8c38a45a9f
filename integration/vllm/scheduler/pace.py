"""Measures how long this instance takes for a chunk and for a step, and decides whether a request
loads or computes a short hit."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from time import monotonic

from .tracked import Tracked

LEAST_MEASURED = 4
"""The fewest chunks of a request whose prefill is measured."""
LONGEST_SECONDS = 60.0
"""The longest time for a chunk or a step: only a stopped process takes longer."""
CHUNK_WEIGHT, STEP_WEIGHT = 0.3, 0.1
"""The weight of the newest measurement."""
WEIGHTY = 32
"""The fewest chunks of a measurement with full weight, if a chunk took longer than usual. A
measurement of few chunks mostly shows how long the steps of other requests are."""
RECENT = 8
"""How many of the newest measurements `slowest` considers."""
BUSY_CHUNKS = 8
"""An instance is busy if a request of the newest step computes more chunks than this. A busy
instance loads every hit: computing a short hit would delay all prompts behind it."""
LOAD_STEPS = 1
"""How many steps later the first token comes if the request loads: the step beside the load. With
asynchronous scheduling, a load that waits for the steps under way ends after the next step is
planned: a second step."""
LONGEST_STEP_SECONDS = 1.0
"""A decoding step takes longer only if the process was stopped, or did other work meanwhile."""
MOST_DECODED = 8
"""If a request has more tokens in a step, the step computes a prompt. A decoding request has one
token, and the tokens of a draft."""


class Pace:
    """How long this instance takes for a chunk, from the beginning of a request's first step to its
    first token, and for a step while requests decode. Runs in the scheduler's thread.

    The time for a chunk includes other requests of the same steps, which would slow down the next
    prefill, too. The time for a step leaves out steps that compute prompts: they are long when an
    instance has much to compute, and then it must not compute even more.

    chunk_seconds: the mean; 0.0 before the first measurement. recent: the newest measurements."""

    def __init__(
        self, live: Mapping[str, Tracked], size: int, ahead: bool, loads_wait: bool
    ) -> None:
        """live: the requests that have not ended. size: tokens of a chunk. ahead: vLLM plans a step
        when the last step begins, not when it ends. loads_wait: a load waits for the steps under
        way, so a step that is planned ahead comes before the load's end."""
        self.chunk_seconds = 0.0
        self.recent = deque[float](maxlen=RECENT)
        self._size, self._ahead = size, ahead
        self._measured: Tracked | None = None
        self._chunks, self._tokens, self._since = 0, 0, 0.0
        self._live, self._load_steps = live, LOAD_STEPS + (ahead and loads_wait)
        self._step_seconds = self._planned_at = 0.0
        self._scheduled: Mapping[str, int] = {}
        self._most = 0
        """The last step's tokens by request, and the largest of these numbers."""

    def begun(self, tracked: Tracked, chunks: int) -> None:
        """Note that a request's first step begins to compute `chunks` chunks. Measures one request
        at a time."""
        if self._measured is None and chunks >= LEAST_MEASURED:
            self._measured = tracked
            self._chunks = chunks
            self._tokens = tracked.request.num_output_tokens
            # A step that is planned ahead begins when the next step is planned.
            self._since = inf if self._ahead else monotonic()

    def planned(self, scheduled: Mapping[str, int], most: int, goes_on: bool) -> None:
        """Note that a step is planned. scheduled: the step's tokens by request. most: the largest
        number; 0 without requests. goes_on: some of the requests ran before."""
        now = monotonic()
        if self._measured is not None:
            self.look()
            self._since = min(self._since, now)
        if goes_on and 0 < self._most <= MOST_DECODED:
            new = min(now - self._planned_at, LONGEST_STEP_SECONDS)
            old = self._step_seconds or new
            self._step_seconds = old + STEP_WEIGHT * (new - old)
        self._planned_at = now
        self._scheduled = scheduled
        self._most = most

    def look(self) -> None:
        """Finish the measurement of a chunk if the request has its first token, or its next token
        after a preemption."""
        measured = self._measured
        if measured is None or self._since == inf:
            return
        if measured.request.num_output_tokens > self._tokens:
            new = min((monotonic() - self._since) / self._chunks, LONGEST_SECONDS)
            old = self.chunk_seconds or new
            weight = CHUNK_WEIGHT * (1.0 if new < old else min(1.0, self._chunks / WEIGHTY))
            self.chunk_seconds = old + weight * (new - old)
            self._measured = None
            self.recent.append(new)

    @property
    def slowest(self) -> float:
        """The longest time for a chunk in the newest measurements; 0.0 without any. The mean
        follows short times sooner than long times, so a prompt often takes longer than the mean."""
        return max(self.recent, default=0.0)

    def under_way(self) -> float:
        """How long the last planned step takes; 0.0 if vLLM plans a step after the last step."""
        tokens = sum(self._scheduled.values()) if self._ahead else 0
        return tokens / self._size * self.chunk_seconds

    def ended(self, tracked: Tracked) -> None:
        """Note that a request has ended or lost its blocks."""
        if tracked is self._measured:
            self.look()
            self._measured = None

    def computes(self, chunks: int) -> bool:
        """Whether a request has its first token sooner by computing a hit of `chunks` chunks.

        A load does not take long, but its request waits for more steps: see `LOAD_STEPS`. While
        other requests run, these take some milliseconds each, in which a chunk or two are computed:

            chunks * chunk_seconds < these steps * mean time of a step

        On an idle instance the steps of a load run no model and are short, so every hit is loaded,
        and so it is before both times are measured, and on a busy one (`BUSY_CHUNKS`)."""
        seconds = chunks * self.chunk_seconds
        sooner = 0.0 < seconds < self._load_steps * self._step_seconds
        busy = self._most > BUSY_CHUNKS * self._size
        # Whether a request of the last step still runs.
        return sooner and not busy and not self._live.keys().isdisjoint(self._scheduled)
