"""What the hits of this instance have saved, by its own estimate: seconds of prefill. docs/operations.md says what it leaves out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from statistics import median
from time import monotonic
from typing import Any

from .introduction import Introduction
from .metadata import LoadSpan, StepMetadata

LEAST_TOKENS = 1024
"""Of prompts that begin in a step which is measured: one of few tokens takes about as long as one of many."""
SHARE = 0.9
"""Of its tokens that are theirs."""
KEPT, ENOUGH = 48, 3
"""Steps that count, the latest ones, and how many it takes: kernels may be compiled in the first."""
MOST_STEPS, MOST_LOADS = 64, 4096
"""Under way."""


class Savings:
    """In the scheduler's thread. A load that is over, and failed at no worker, has saved the time in which its tokens would have been
    computed, less its own.

    What a token takes is the median of the steps in which prompts begin of which no cache had anything. A step's time begins when it is
    scheduled or, with asynchronous scheduling, when the step before it is over."""

    def __init__(self, instance: Introduction) -> None:
        """instance: whose client tells the server."""
        self._instance = instance
        self._steps: deque[tuple[float, int]] = deque(maxlen=MOST_STEPS)
        """When each was scheduled, and the tokens of those that are measured."""
        self._over = 0.0
        self._measured: deque[float] = deque(maxlen=KEPT)
        self._loads: dict[str, tuple[int, list[float]]] = {}
        """By request: tokens, and the seconds of the workers that are done."""

    @property
    def token_seconds(self) -> float | None:
        """What a token takes that is computed; None as long as too few steps were measured."""
        return median(self._measured) if len(self._measured) >= ENOUGH else None

    def scheduled(self, output: Any, meta: StepMetadata) -> None:
        """A step that vLLM has planned. Less than a microsecond where no prompt begins."""
        began, whole, total = monotonic(), 0, output.total_num_scheduled_tokens
        for new in output.scheduled_new_reqs:
            whole += output.num_scheduled_tokens[new.req_id] if not new.num_computed_tokens else 0
        measured = whole >= max(LEAST_TOKENS, SHARE * total) and not meta.echo
        measured = measured and not any(load.synchronous for load in meta.loads)
        self._steps.append((began, total if measured else 0))

    def over(self) -> None:
        """The first of these that was not over yet is: vLLM has its output."""
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
        """Workers are over with these loads."""
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
