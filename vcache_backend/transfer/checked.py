"""Copies out of the pool that verify checksums, if the namespace has them."""

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
"""How long to wait for a copy whose checksums cannot be verified."""


def looked_at(
    session: Session,
    kv: PagedKV,
    views: Sequence[SlotView],
    keys: Sequence[ChunkKey],
    copy: Completion,
) -> Completion:
    """Add the verification of checksums to a running copy that reads `views` (and perhaps more), if
    there are checksums.

    keys: of the chunks in `views`. `done` and `wait` of the result raise ChecksumError if a slot
    does not match; its chunk is then counted and removed from the pool."""
    if session.sealer is None or not views:
        return copy
    try:
        look = session.sealer.verify(views, keys, kv.chunk_bytes(session.chunk_size), copy)
    except BaseException as error:
        # To the caller a VCacheError means that nothing writes into its blocks: first wait for the
        # copy.
        if not copy.wait(STUCK_SECONDS):
            raise RuntimeError(
                f"a copy goes on whose slots cannot be looked at: {error}"
            ) from error
        raise

    def drop(bad: list[int]) -> None:
        session.committer.remove([keys[i] for i in bad])
        for i in bad:
            if session.stats.failed("checksum") == 1:
                log.error(
                    "chunk %s changed after its commit: it does not fit its checksum, and leaves the pool",
                    keys[i].hex(),
                )

    return CheckedScatter(copy, look, drop)


def of_copier(copy: Completion) -> Completion:
    """The copy without the verification, as `Copier.fence` takes it."""
    return copy.copy if isinstance(copy, CheckedScatter) else copy


def slot_bytes(session: Session, nbytes: int) -> int:
    """Bytes of a slot for a chunk of `nbytes`, checksum included if there is one. LayoutError if
    such chunks cannot have one.
    """
    if session.sealer is None:
        return nbytes
    from vcache_backend.vram_pool.checksum import sealed_bytes

    return sealed_bytes(nbytes)


class CheckedScatter:
    """A Completion of a copy out of slots and the verification of their checksums. tell: called
    once with the numbers of bad slots, if any.

    If a slot is bad, `done` and `wait` raise ChecksumError once both are over.
    """

    def __init__(self, copy: Completion, look: Look, tell: Callable[[list[int]], None]) -> None:
        self.copy, self._look, self._tell = copy, look, tell
        self._lock = threading.Lock()
        self._bad: list[int] | None = None

    def done(self) -> bool:
        return self.copy.done() and self._look.over.done() and self._right()

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        return (
            self.copy.wait(timeout_s)
            and self._look.over.wait(max(until - time.monotonic(), 0.0))
            and self._right()
        )

    @property
    def seconds(self) -> float | None:
        """Seconds of the copy alone."""
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
