"""Decides from the time of vLLM's steps whether a short hit is loaded or computed."""

from __future__ import annotations

from collections.abc import Container, Mapping
from time import monotonic

LOAD_STEPS = 2
"""How many steps later the first token comes if its request loads: the step that begins the load,
and the step that reports its end. With asynchronous scheduling the next step is planned before that
report, so there is a third."""
LONGEST_SECONDS = 1.0
"""A step takes longer only if the process was stopped, or other work came between."""
WEIGHT = 0.1
"""The weight of the newest step in the mean."""
MOST_DECODED = 8
"""A step in which a request has more tokens computes a prompt. A decoding request has one token,
and those that a draft guesses."""


class Steps:
    """Measures the mean time of a step while requests decode. Runs in the scheduler's thread.

    Steps that compute prompts do not count: they are long when an instance has much to compute, and
    then it must not compute even more."""

    def __init__(self, live: Container[str], asynchronous: bool) -> None:
        """live: the requests that have not ended. asynchronous: vLLM plans a step before the last
        step is over."""
        self._live, self._load_steps = live, LOAD_STEPS + asynchronous
        self._seconds = self._planned_at = 0.0
        self._scheduled: Mapping[str, int] = {}

    def planned(self, scheduled: Mapping[str, int]) -> None:
        """Note that a step is planned. scheduled: its requests."""
        now = monotonic()
        if self._busy and max(self._scheduled.values()) <= MOST_DECODED:
            seconds = min(now - self._planned_at, LONGEST_SECONDS)
            self._seconds += (seconds - self._seconds) * (WEIGHT if self._seconds else 1.0)
        self._planned_at, self._scheduled = now, scheduled

    def compute(self, chunks: int, chunk_seconds: float) -> bool:
        """Whether a request has its first token sooner if it computes a hit of `chunks` chunks.

        A load does not take long, but its request waits for `LOAD_STEPS` more steps. While other
        requests run, these take some milliseconds each, in which a chunk or two are computed:

            chunks * chunk_seconds < LOAD_STEPS * mean time of a step

        On an idle instance the steps of a load run no model and are short, so every hit is loaded.
        chunk_seconds: the measured time for a chunk; 0.0: not known, load."""
        seconds = chunks * chunk_seconds
        return 0.0 < seconds < self._load_steps * self._seconds and self._busy

    @property
    def _busy(self) -> bool:
        """Whether a request of the last step is still running."""
        return any(name in self._live for name in self._scheduled)
