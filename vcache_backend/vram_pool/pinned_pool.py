"""The pool in host memory of a worker whose KV cache lies on a GPU."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from vcache_backend.config import ByteSize
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.metadata_server.messages import Lendable, SegmentId, SegmentInfo
from vcache_backend.vram_pool import cuda_driver, pinned_segment
from vcache_backend.vram_pool import segment as segments
from vcache_backend.vram_pool.pool import Pool
from vcache_backend.vram_pool.segment import MappedSegment
from vcache_backend.vram_pool.slots import SlotView

log = logging.getLogger(__name__)

PIECE_BYTES = 4 << 30
"""Of a segment that is lent: the first is used some seconds after the start."""

CLOSE_SECONDS = 5.0


class PinnedPool(Pool):
    """As `Pool`, for a `device` of host memory that a GPU reads.

    A segment's pages are taken and locked before it is there for this process, some 0.5 s a GiB, in a thread of its own; what this
    worker lends comes piece by piece. Where memory or the driver gives out, what was lent by then stays, and the log and `vcache
    status` say why it is no more.
    """

    _busy = False
    """Whether the thread has something to do."""
    _thread: threading.Thread | None = None

    @contextmanager
    def trial(self, nbytes: int) -> Iterator[SlotView]:
        """Memory as that of the pool, which may not be there yet. Raises SegmentError."""
        with segments.create(self.device, nbytes) as owned, segments.map_segment(owned.info, owned.fd, self.device) as mapped:
            whole = mapped.whole
            yield SlotView(whole.data_ptr(), nbytes, False, whole, 0)

    def close(self) -> None:
        """See `Pool`; and wait for what the driver is doing, which ends within seconds: a process must not end in the middle of it."""
        super().close()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    # ---- inside

    def _agree(self, infos: list[SegmentInfo]) -> None:
        if self._busy or (self._contributed == self._client.epoch and not any(map(self._is_new, infos))):
            return
        self._busy = True
        self._thread = threading.Thread(target=self._prepare, name="vcache-pinned-pool", daemon=True)
        self._thread.start()

    def _prepare(self) -> None:
        """The body of the thread, until nothing more is to be done now; a later heartbeat starts it again."""
        try:
            cuda_driver.load().beside_captures()
            pinned_segment.move_near(self.device.ordinal or 0)
            progress = True
            while progress and not self._closed:
                before = len(self._mapped)
                super()._agree(self._client.list_segments())
                progress = len(self._mapped) > before
        except VCacheError as error:
            log.debug("the pool in host memory: %s", error)
        except Exception:  # the thread's last line of defence: without this pool everything else goes on
            log.exception("the pool in host memory is not complete")
        finally:
            self._busy = False

    def _lend(self, lendable: Lendable) -> bool:
        piece, self._exhausted = min(lendable.nbytes, PIECE_BYTES), False
        if not super()._lend(Lendable(lendable.claim, piece)):
            return False
        return self._exhausted or piece == lendable.nbytes

    def _no_more(self, error: SegmentError) -> None:
        there = sum(info.nbytes for info in self.mapped() if info.device == self.device.name)
        said = f"{self.device} lends {ByteSize(there).about} of {ByteSize(self._segment_bytes).about}: {error}"
        log.error("%s", said)
        with suppress(VCacheError):
            self._client.report("error", said)

    def _level(self) -> int:
        """There are many, and what is wrong with one is wrong with all."""
        return logging.DEBUG if self._unreadable else logging.WARNING

    def _map_unseen(self, id_: SegmentId) -> MappedSegment | None:
        """Nothing is waited for: the thread maps it after the next heartbeat."""
        return self._mapped.get(id_)
