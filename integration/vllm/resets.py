"""Resets of the namespace, by vLLM and by other instances."""

from __future__ import annotations

import logging
from collections.abc import Callable

from .introduction import Introduction
from .metadata import WorkerReport

log = logging.getLogger("vllm.vcache")


class Resets:
    """In the scheduler's thread. clearing: a reset is under way; nothing is looked up until it is
    over.
    """

    def __init__(
        self, instance: Introduction, drop: Callable[[], None], outdate: Callable[[], None]
    ) -> None:
        """drop: called on a reset to forget what look-ups found. outdate: called on a reset to mark
        KV that requests have already.
        """
        self._instance, self._drop, self._outdate = instance, drop, outdate
        self.clearing = False
        self._number = 0
        """The last reset's. What workers report for an earlier one says nothing about the steps
        since.
        """

    def reset(self) -> bool:
        """Forget every chunk of the namespace, including those on their way. For vLLM's
        `reset_cache`. False if the server did not answer.

        Before the first step the namespace is not known. The reset is then done before the first
        look-up, and the answer is True, since vLLM, when paused for new weights, would end on a
        False."""
        # Look up nothing until the steps under way are over, and their stores cleared, too.
        self.clearing = True
        self._number += 1
        self._drop()
        self._outdate()
        if self._instance.publications is not None:
            self._instance.publications.reset()
        cleared = self._instance.clear()
        if self._instance.publications is not None and cleared:
            # No need to wait: what the steps under way publish, or save in the pool, carries the
            # old epoch.
            self.clearing = False
        return cleared or not self._instance.over

    def learn(self) -> None:
        """Act on reads and resets by other instances of which the server has told."""
        if self._instance.publications is not None and self._instance.publications.learn():
            self._drop()

    def flushes(self) -> int:
        """`StepMetadata.flush` of the step being planned. It is repeated in each step until the
        workers have answered, since they do not in a step while vLLM sleeps, or one whose stores
        raise."""
        return self._number if self.clearing else 0

    def note(self, report: WorkerReport) -> None:
        """Act on what workers report about their stores."""
        if self.clearing and report.flushed == self._number:
            # Clear again: steps from before the reset may have stored since. What they have not
            # committed yet is void by then.
            self.clearing = not self._instance.clear()
