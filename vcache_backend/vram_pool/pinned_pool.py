"""The pool in host memory, for a worker whose KV cache lies on a GPU."""

from __future__ import annotations

import logging
import threading

from vcache_backend import threads
from vcache_backend.config import ByteSize
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.protocol.messages import SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_driver, host_memory
from vcache_backend.vram_pool.pool import Pool
from vcache_backend.vram_pool.regions import MappedSegment

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 30
"""The size of the segments in which memory is lent: some seconds until the first is ready."""

CLOSE_SECONDS = 5.0
"""How long `close` waits for the driver's work."""


class PinnedPool(Pool):
    """A `Pool` for a `device` of host memory that a GPU reads.

    A thread allocates and locks the pages of each segment, in some 0.5 s a GiB, and maps the
    segment; until then this process does not use the segment. This worker lends memory in pieces of
    `PIECE_BYTES`. If memory or the driver fails, the pieces lent so far stay, and the log and
    `vcache status` say why no more follow."""

    _busy = False
    """Whether the thread runs."""
    _thread: threading.Thread | None = None

    def close(self) -> None:
        """See `Pool`. Also waits some seconds for the driver's work: the process must not end in
        the middle of a driver call."""
        super().close()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # ---- inside

    def _agree(self, infos: list[SegmentInfo]) -> None:
        known = self._contributed == self._client.epoch and not any(map(self._is_new, infos))
        if self._busy or known:
            return
        self._thread = threading.Thread(
            target=self._prepare, name="vcache-pinned-pool", daemon=True
        )
        self._busy = True
        try:
            self._thread.start()
        except RuntimeError:  # there are too many threads
            self._busy, self._thread = False, None
            raise

    def _prepare(self) -> None:
        """The thread, which ends when no work is left. A later heartbeat starts another thread."""
        with threads.survives("the pool in host memory"):
            try:
                self._prepare_all()
            except VCacheError as error:
                log.debug("the pool in host memory: %s", error)
        self._busy = False

    def _prepare_all(self) -> None:
        cuda_driver.load().beside_captures()
        host_memory.move_near(self.device.ordinal or 0)
        progress = True
        while progress and not self._closed:
            before = len(self._mapped)
            super()._agree(self._client.list_segments())
            progress = len(self._mapped) > before

    def _lend(self, nbytes: int) -> bool:
        piece = min(nbytes, PIECE_BYTES)
        self._exhausted = False
        return super()._lend(piece) and (self._exhausted or piece == nbytes)

    def _no_more(self, error: SegmentError) -> None:
        lent = sum(info.nbytes for info in self.mapped() if info.device == self.device.name)
        part = f"{ByteSize(lent).about} of {ByteSize(self._segment_bytes).about}"
        self._tell(f"{self.device} lends {part}: {error}")

    def _level(self) -> int:
        """WARNING for the first failure only: all segments fail for the same reason."""
        return logging.DEBUG if self._unreadable else logging.WARNING

    def _map_unseen(self, id_: SegmentId) -> MappedSegment | None:
        """None if the segment is not mapped yet: a thread maps it later."""
        return self._mapped.get(id_)
