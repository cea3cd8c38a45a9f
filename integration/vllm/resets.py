"""Resets of the namespace: vLLM's, those of others, and those that a sleep of vLLM's puts off until it is known what it left."""

from __future__ import annotations

import logging
from collections.abc import Callable

from . import sleeping
from .introduction import Introduction
from .metadata import WorkerReport

log = logging.getLogger("vllm.vcache")


class Resets:
    """In the scheduler's thread. clearing: a reset is under way, and nothing is looked up until it is over; nor while a nap is due."""

    def __init__(self, instance: Introduction, drop: Callable[[], None], outdate: Callable[[], None]) -> None:
        """drop: what was found for requests, and nothing was loaded of, is of before. outdate: and so is what they have."""
        self._instance, self._drop, self._outdate = instance, drop, outdate
        self.clearing = False
        self._number = 0
        """Of the last reset: what workers say of earlier ones says nothing of the steps between."""
        self.nap = sleeping.Nap(instance.workers)

    def reset(self) -> bool:
        """Forget every chunk of the namespace, those on their way included; False if the server did not answer. Before the first step
        nobody knows which namespace that is: then it is done before anything is looked up (where vLLM is paused for new weights, it ends
        on a False)."""
        if sleeping.keeps_weights():
            self._drop()
            self.nap.begin()
            return True
        return self._forget()

    def waits(self) -> bool:
        """Whether a request is to wait until it is known what vLLM's sleep has left of the weights."""
        if self.nap.due and not self._instance.refused and self.nap.gives_up():
            self._new_weights()
        return bool(self.nap.due) and not self._instance.refused

    def learn(self) -> None:
        """Others may have read here, or reset the namespace."""
        if self._instance.shared is not None and self._instance.shared.learn():
            self._drop()

    def flushes(self) -> int:
        """A step is planned: the number of the reset for which workers are to say when the stores of earlier steps have begun; 0: none.
        They are asked in each until they have: of a step while vLLM sleeps, or one whose stores raise, they say nothing."""
        return self._number if self.clearing else 0

    def note(self, report: WorkerReport) -> None:
        """What workers say of their weights, and of stores."""
        same = self.nap.note(report.same)
        if same:
            log.info("vcache: since vLLM slept its weights are as they were, and what the pool has is found again")
        elif same is False:
            self._new_weights()
        if self.clearing and report.flushed == self._number:
            # Steps of before the reset may have stored since; what they have not committed yet never comes.
            self.clearing = not self._instance.clear()

    # ---- inside

    def _new_weights(self) -> None:
        log.warning("vcache: since vLLM slept its weights may be others, so what the pool has of this namespace is forgotten")
        self._forget()

    def _forget(self) -> bool:
        # Until the steps under way are over, and what they store is cleared too, nothing is looked up.
        self.clearing = True
        self._number += 1
        self._drop()
        self._outdate()
        if self._instance.shared is not None:
            self._instance.shared.reset()
        cleared = self._instance.clear()
        if self._instance.shared is not None and cleared:
            # What steps under way publish, or save in the pool, is of an epoch that is over.
            self.clearing = False
        return cleared or not self._instance.over
