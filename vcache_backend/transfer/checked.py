"""Copies out of the pool whose bytes are checked, where the namespace has checksums."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vcache_backend.errors import ChecksumError
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.vram_pool.copier import Completion
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.slots import SlotView

if TYPE_CHECKING:
    from vcache_backend.transfer.session import Session
    from vcache_backend.vram_pool.checksum import Look

log = logging.getLogger(__name__)

STUCK_SECONDS = 10.0
"""How long a scatter is waited for whose slots cannot be looked at."""


def looked_at(session: Session, kv: PagedKV, views: Sequence[SlotView], keys: Sequence[ChunkKey], copy: Completion) -> Completion:
    """A copy under way that reads `views`, and perhaps more, with a look at the slots' checksums behind it, if there are any.

    keys: of the chunks in `views`. The answer's `done` and `wait` raise ChecksumError where a slot does not fit; the chunk is then
    counted and on its way out of the pool.
    """
    if session.sealer is None or not views:
        return copy
    try:
        look = session.sealer.verify(views, keys, kv.chunk_bytes(session.chunk_size), copy)
    except BaseException as error:
        # The caller takes a VCacheError to mean that nothing writes into its blocks.
        if not copy.wait(STUCK_SECONDS):
            raise RuntimeError(f"a copy goes on whose slots cannot be looked at: {error}") from error
        raise

    def drop(bad: list[int]) -> None:
        session.committer.remove([keys[i] for i in bad])
        for i in bad:
            if session.stats.failed("checksum") == 1:
                log.error("chunk %s changed after its commit: it does not fit its checksum, and leaves the pool", keys[i].hex())

    return CheckedScatter(copy, look, drop)


def of_copier(copy: Completion) -> Completion:
    """The copy alone, as its copier has given it: see `Copier.fence`."""
    return copy.copy if isinstance(copy, CheckedScatter) else copy


def slot_bytes(session: Session, nbytes: int) -> int:
    """Of a slot for a chunk of `nbytes`, with its checksum if it has one. Raises LayoutError where such chunks can have none."""
    if session.sealer is None:
        return nbytes
    from vcache_backend.vram_pool.checksum import sealed_bytes

    return sealed_bytes(nbytes)


class CheckedScatter:
    """Over once a copy out of slots and the look at those slots' checksums both are. `tell`: is given the numbers of bad slots, once.

    A Completion. `done` and `wait` raise ChecksumError, as soon as nothing of both runs any more, if a slot is bad.
    """

    def __init__(self, copy: Completion, look: Look, tell: Callable[[list[int]], None]) -> None:
        self.copy, self._look, self._tell = copy, look, tell
        self._lock = threading.Lock()
        self._bad: list[int] | None = None

    def done(self) -> bool:
        return self.copy.done() and self._look.over.done() and self._right()

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        return self.copy.wait(timeout_s) and self._look.over.wait(max(until - time.monotonic(), 0.0)) and self._right()

    @property
    def seconds(self) -> float | None:
        """Of the scatter."""
        return self.copy.seconds

    def _right(self) -> bool:
        with self._lock:
            if self._bad is None:
                self._bad = self._look.bad()
                if self._bad:
                    self._tell(self._bad)
        if self._bad:
            raise ChecksumError(
                f"{len(self._bad)} chunks do not fit their checksums; the first is number {self._bad[0]} of the load"
            )
        return True
