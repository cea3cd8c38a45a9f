"""Handles resets by vLLM and by other instances, and changes of the weights' version."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from ..metadata import WorkerReport
from ..model import versions
from .introduction import Introduction

log = logging.getLogger("vllm.vcache")


class Resets:
    """Runs in the scheduler's thread. clearing: a reset is under way, and look-ups must wait. last:
    a reset was made, and no request has begun since. begun: a step was planned, which may store."""

    def __init__(
        self,
        instance: Introduction,
        numbers: Iterator[int],
        drop: Callable[[], None],
        doubt: Callable[[], None],
        rename: Callable[[], None],
    ) -> None:
        """numbers: for echoes. drop: called on a reset to forget answers of look-ups. doubt: called
        on a reset to doubt vLLM's KV. rename: called when keys change, to forget the requests'
        keys."""
        self._instance, self._drop, self._doubt = instance, drop, doubt
        self._rename = rename
        self._numbers = numbers
        self.clearing = self.last = self.begun = False
        self.number = 0
        """The last reset's echo. While `clearing`, every step asks for the echo until the workers
        have answered. By then all stores from before the reset have reservations, which a second
        clear voids without waiting for their copies."""

    def reset(self) -> bool:
        """Reset the namespace: remove all chunks, including those still being stored. For vLLM's
        `reset_cache`. False if the server did not answer.

        Before the first step the namespace is unknown. Then the reset happens before the first
        look-up, and the answer is True: vLLM, paused for new weights, would end on a False.

        With versions, the instance leaves its version, whose chunks stay for other instances."""
        if self._instance.versions:
            log.info("vcache: nothing is shared until the version of the weights is named")
            self.change_version(versions.unknown())
            return True
        self.change_version(b"")
        self.last = True
        # Look nothing up until the running steps have ended and their stores are cleared, too.
        self.clearing = True
        self.number = next(self._numbers)
        self._drop()
        self._doubt()
        if self._instance.publications is not None:
            self._instance.publications.reset()
        cleared = self._instance.clear()
        if cleared and (self._instance.publications is not None or not self.begun):
            # Running steps publish and save under the old epoch, so there is no need to wait.
            self.clearing = False
        return cleared or not self._instance.over

    def leave_version(self) -> None:
        """Share nothing more, since the weights change: without versions until the next reset,
        unless a reset has just come, as with a pause."""
        if self._instance.versions or not self.last:
            if not self._instance.version:
                log.warning("vcache: vLLM's weights change: nothing is shared until the next reset")
            self.change_version(versions.unknown())

    def change_version(self, version: bytes) -> None:
        """Read and store chunks of this version from the next step on. See docs/adr/0024."""
        if version == self._instance.version:
            return
        # If a call below raises, the next steps store under keys that nobody finds.
        self._instance.version = versions.unknown()
        self._rename()
        self._doubt()
        if self._instance.publications is not None:
            self._instance.publications.reset()
        self._instance.version = version

    def learn(self) -> None:
        """Act on reads and resets by other instances, as the server reported them."""
        publications = self._instance.publications
        if publications is not None and publications.news and publications.learn():
            self._drop()

    def note(self, report: WorkerReport) -> None:
        """Act on the workers' reports about their stores."""
        if self.clearing and self.number in report.echoes:
            # Clear again: steps from before the reset may have stored chunks since.
            self.clearing = not self._instance.clear()
