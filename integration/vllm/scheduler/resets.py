"""Handles resets by vLLM and by other instances, and changes of the weights' version. Finds
requests that still use KV from before, because vLLM kept it: what they compute is not stored."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

from ..in_place.block_pool import KVBlocks
from ..metadata import WorkerReport
from ..model import versions
from ..model.groups import NULL
from .introduction import Introduction
from .tracked import Tracked

log = logging.getLogger("vllm.vcache")


class Resets:
    """Runs in the scheduler's thread. clearing: a reset is under way; look nothing up until it is
    over. last: a reset was made, and no request has begun since.
    """

    def __init__(
        self,
        instance: Introduction,
        numbers: Iterator[int],
        drop: Callable[[], None],
        outdate: Callable[[], None],
        rename: Callable[[], None],
    ) -> None:
        """numbers: for echoes. drop: called on a reset to forget answers of look-ups. outdate:
        called on a reset to mark the KV of running requests. rename: called when keys change, to
        forget those of requests.
        """
        self._instance, self._drop, self._outdate = instance, drop, outdate
        self._rename = rename
        self._numbers = numbers
        self.clearing = self.last = False
        self.number = 0
        """The last reset's echo. While it is `clearing`, every step asks for it until the workers
        have answered: then all stores from before the reset have reservations, which another
        clearing voids. Nobody waits for their copies."""

    def reset(self) -> bool:
        """Reset the namespace: remove all chunks, including those still being stored. For vLLM's
        `reset_cache`. False if the server did not answer.

        Before the first step the namespace is unknown. Then the reset happens before the first
        look-up, and the answer is True: vLLM, paused for new weights, would end on a False.

        Where weights have a version, the reset leaves it, and the others keep their chunks."""
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
        self._outdate()
        if self._instance.publications is not None:
            self._instance.publications.reset()
        cleared = self._instance.clear()
        if self._instance.publications is not None and cleared:
            # Running steps publish and save under the old epoch, so there is no need to wait.
            self.clearing = False
        return cleared or not self._instance.over

    def leave_version(self) -> None:
        """Read and store nothing that others have: the weights change. Without versions this holds
        until the next reset. The reset may also have come right before, as with a pause."""
        if self._instance.versions or not self.last:
            if not self._instance.version:
                log.warning("vcache: vLLM's weights change: nothing is shared until the next reset")
            self.change_version(versions.unknown())

    def change_version(self, version: bytes) -> None:
        """Read and store chunks of this version from the next step on. See docs/adr/0024."""
        if version == self._instance.version:
            return
        # If anything here raises, nobody finds what the next steps store.
        self._instance.version = versions.unknown()
        self._rename()
        self._outdate()
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


class Leftovers:
    """Marks outdated requests. Runs in the scheduler's thread; used only for sharing through a
    pool.

    A reset means that the weights change. If vLLM has not cleared its own cache, running requests
    keep old KV, and later requests hit it. `LeftoverState.outdated` marks both, until the request
    is preempted and recomputed. This costs nothing unless vLLM kept blocks."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """sizes: tokens of a block, by block table."""
        self._sizes = sizes
        self._kept = False
        self._resets = 0
        self._right: set[int] = set()
        """Blocks assigned since the last reset that hold no KV from before it."""

    def reset(self, blocks: KVBlocks | None, requests: Iterable[Tracked]) -> None:
        """Note a reset, or a change of the weights' version. blocks: vLLM's pool, which vLLM may
        just have cleared; None if vLLM has not shown it.
        """
        self._kept = blocks is None or not blocks.empty
        self._resets += 1
        self._right.clear()
        for tracked in requests:
            tracked.leftover.outdated = self._kept

    def loads(self, tracked: Tracked) -> None:
        """Note that a load begins: if a reset follows before the load ends, its chunks are old."""
        tracked.leftover.resets = self._resets

    def begin(self, tracked: Tracked, computed: int) -> None:
        """Decide whether the request is outdated as it begins or resumes with `computed` tokens."""
        if not self._kept:
            return
        # Another connector's load, or vLLM's copy of a part of a block, may bring old KV into
        # a new block.
        local = tracked.local
        strange = computed > tracked.supplied or any(local % size for size in self._sizes)
        late = tracked.supplied > local and tracked.leftover.resets != self._resets
        hit = {
            block
            for row, size in zip(tracked.store.rows, self._sizes, strict=False)
            for block in row[: local // size]
        }
        tracked.leftover.outdated = strange or late or not hit - {NULL} <= self._right
        self.more(tracked, tracked.store.rows)

    def more(self, tracked: Tracked, rows: Iterable[Sequence[int]]) -> None:
        """Note more blocks of the request, by block table."""
        if not self._kept:
            return
        for row in rows:
            if tracked.leftover.outdated:
                self._right.difference_update(row)
            else:
                self._right.update(row)
