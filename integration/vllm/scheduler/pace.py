"""Measures how long this instance takes for a chunk and for a step, and decides from that whether a
short hit is loaded or computed."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from math import inf
from time import monotonic

from .tracked import Tracked

LEAST_MEASURED = 4
"""The fewest chunks of a request whose prefill is measured."""
LONGEST_SECONDS = 60.0
"""The longest time for a chunk or a step. It takes longer only if the process was stopped."""
CHUNK_WEIGHT, STEP_WEIGHT = 0.3, 0.1
"""The weight of the newest measurement."""
WEIGHTY = 32
"""The fewest chunks of a measurement that has its whole weight if a chunk took longer than usual.
Of few chunks it says mostly how long the steps of other requests are."""
RECENT = 8
"""How many of the newest measurements `slowest` looks at."""
BUSY_CHUNKS = 8
"""An instance is busy if one request of the newest step computes more chunks than this. Then it
loads every hit: computing a short one would hold up all prompts behind it."""
LOAD_STEPS = 1
"""How many steps later the first token comes if its request loads: the step beside which it loads.
With asynchronous scheduling a load that waits for the steps under way ends after the next step is
planned, so there is a second."""
LONGEST_STEP_SECONDS = 1.0
"""A step that decodes takes longer only if the process was stopped, or other work came between."""
MOST_DECODED = 8
"""A step in which a request has more tokens computes a prompt. A decoding request has one token,
and those that a draft guesses."""


class Pace:
    """How long this instance takes for a chunk, from the beginning of a request's first step to its
    first token, and for a step while requests decode. Runs in the scheduler's thread.

    For a chunk, other requests of the same steps are included: they would slow the next prefill
    down, too. Steps that compute prompts are not: they are long when an instance has much to
    compute, and then it must not compute even more.

    chunk_seconds: the mean; 0.0 before the first measurement. recent: the newest measurements of
    it."""

    def __init__(
        self, live: Mapping[str, Tracked], size: int, ahead: bool, loads_wait: bool
    ) -> None:
        """live: the requests that have not ended. size: tokens of a chunk. ahead: vLLM plans a step
        when the last one begins, not when it is over. loads_wait: a load waits for the steps under
        way, so a step that is planned ahead does not know of it yet."""
        self.chunk_seconds = 0.0
        self.recent = deque[float](maxlen=RECENT)
        self._size, self._ahead = size, ahead
        self._measured: Tracked | None = None
        self._chunks, self._tokens, self._since = 0, 0, 0.0
        self._live, self._load_steps = live, LOAD_STEPS + (ahead and loads_wait)
        self._step_seconds = self._planned_at = 0.0
        self._scheduled: Mapping[str, int] = {}
        self._most = 0
        """The tokens of each request of the last step, and the most of one of them."""

    def begun(self, tracked: Tracked, chunks: int) -> None:
        """Note that a request's first step computes the first of `chunks` chunks. One request at a
        time is measured."""
        if self._measured is None and chunks >= LEAST_MEASURED:
            self._measured = tracked
            self._chunks = chunks
            self._tokens = tracked.request.num_output_tokens
            # A step that is planned ahead begins when the next one is planned.
            self._since = inf if self._ahead else monotonic()

    def planned(self, scheduled: Mapping[str, int], most: int, goes_on: bool) -> None:
        """Note that a step is planned. scheduled: the tokens of its requests. most: the most of
        these numbers; 0 without requests. goes_on: some of the requests ran before."""
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
        """Finish the measurement of a chunk if its request has its first token, or the next one
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
        """The longest time for a chunk of the newest measurements; 0.0 before the first. The mean
        follows a short time sooner than a long one, so a prompt often takes longer than the mean
        says."""
        return max(self.recent, default=0.0)

    def under_way(self) -> float:
        """How long the last planned step takes; 0.0 if vLLM plans a step when that is over."""
        tokens = sum(self._scheduled.values()) if self._ahead else 0
        return tokens / self._size * self.chunk_seconds

    def ended(self, tracked: Tracked) -> None:
        """Note that a request has ended or lost its blocks."""
        if tracked is self._measured:
            self.look()
            self._measured = None

    def computes(self, chunks: int) -> bool:
        """Whether a request has its first token sooner if it computes a hit of `chunks` chunks.

        A load does not take long, but its request waits for more steps: see `LOAD_STEPS`. While
        other requests run, these take some milliseconds each, in which a chunk or two are computed:

            chunks * chunk_seconds < these steps * mean time of a step

        On an idle instance the steps of a load run no model and are short, so every hit is loaded,
        and so it is before both times are measured, and on a busy one (`BUSY_CHUNKS`)."""
        seconds = chunks * self.chunk_seconds
        sooner = 0.0 < seconds < self._load_steps * self._step_seconds
        busy = self._most > BUSY_CHUNKS * self._size
        # Does a request of the last step still run?
        return sooner and not busy and not self._live.keys().isdisjoint(self._scheduled)
