"""Estimates how many seconds of prefill this instance's hits have saved. docs/operations.md says
what the estimate leaves out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from time import monotonic
from typing import Any

from .introduction import Introduction
from .metadata import LoadSpan, StepMetadata

LEAST_TOKENS = 1024
"""A step is measured if it computes at least so many tokens of new prompts: with fewer, its time
hardly depends on their number.
"""
SHARE = 0.9
"""And if these are at least this share of all its tokens."""
KEPT, ENOUGH = 48, 3
"""The median is taken over the latest KEPT measured steps, once there are ENOUGH: the first ones
may compile kernels.
"""
MOST_STEPS, MOST_LOADS = 64, 4096
"""Steps and loads under way that are remembered."""


class Savings:
    """In the scheduler's thread.

    A load that succeeded at all workers has saved the time in which its tokens would have been
    computed, less its own time. A token's time is the median over steps of new prompts of which no
    cache had anything. A step's time begins when it is scheduled or, with asynchronous scheduling,
    when the step before it is over."""

    def __init__(self, instance: Introduction) -> None:
        """instance: its client tells the server."""
        self._instance = instance
        self._steps: deque[tuple[float, int]] = deque(maxlen=MOST_STEPS)
        """Steps under way: when each was scheduled (time.monotonic), and its tokens; 0 if it is not
        measured.
        """
        self._over = 0.0
        self._measured: deque[float] = deque(maxlen=KEPT)
        self._loads: dict[str, tuple[int, list[float]]] = {}
        """By request: the load's tokens, and the seconds of each worker that is done."""

    @property
    def token_seconds(self) -> float | None:
        """Seconds to compute one token; None until `ENOUGH` steps were measured."""
        return median(self._measured) if len(self._measured) >= ENOUGH else None

    def scheduled(self, output: Any, meta: StepMetadata) -> None:
        """vLLM has planned a step. Takes less than a microsecond if no prompt begins in it."""
        began, whole, total = monotonic(), 0, output.total_num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            whole += output.num_scheduled_tokens[new.req_id] if not new.num_computed_tokens else 0
        measured = whole >= max(LEAST_TOKENS, SHARE * total) and not meta.echo
        measured = measured and not any(load.synchronous for load in meta.loads)
        self._steps.append((began, total if measured else 0))

    def over(self) -> None:
        """vLLM has the output of the oldest step under way."""
        began, tokens = self._steps.popleft() if self._steps else (0.0, 0)
        before, self._over = self._over, monotonic()
        if tokens:
            self._measured.append((self._over - max(began, before)) / tokens)
            if len(self._measured) == ENOUGH:
                self._tell(0.0)

    def loading(self, name: str, tokens: int) -> None:
        """A request's load of so many tokens begins."""
        if len(self._loads) == MOST_LOADS:
            del self._loads[next(iter(self._loads))]
        self._loads[name] = tokens, []

    def loaded(self, spans: Iterable[LoadSpan]) -> None:
        """Workers have ended these loads."""
        for one in spans:
            tokens, seconds = self._loads.get(one.request_id, (0, []))
            seconds.append(one.metadata_seconds + one.data_seconds)
            if one.failure or len(seconds) == self._instance.workers:
                self._loads.pop(one.request_id, None)
            if tokens and not one.failure and len(seconds) == self._instance.workers:
                each = self.token_seconds
                if each is not None:
                    self._tell(max(tokens * each - max(seconds), 0.0))

    def _tell(self, seconds: float) -> None:
        if self._instance.client is not None:
            self._instance.client.saves(seconds)
