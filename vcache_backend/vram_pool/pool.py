"""This process's view of the pool: lends its segment, and maps every segment of the node."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import numpy as np
import torch

from vcache_backend import threads
from vcache_backend.config import ByteSize
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.protocol import sockets
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import (
    Location,
    SegmentId,
    SegmentInfo,
    SlotRun,
)
from vcache_backend.vram_pool import cuda_driver, host_memory, regions
from vcache_backend.vram_pool.copies.geometry import Int64s
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.generations import GenerationView
from vcache_backend.vram_pool.memory_budget import Shortfall
from vcache_backend.vram_pool.regions import OwnedSegment

log = logging.getLogger(__name__)

MAX_WAITS = 30
"""For how many heartbeats a worker tries again, after a restart of the server: to offer its
segments, whose old server may still be ending; then to lend, since the memory of segments that were
not taken back is free only once every process has unmapped them."""


class PoolSegment(OwnedSegment):
    """A mapped segment, and the generations of its slots. Any thread.

    It has its own fds, to offer the segment again if the metadata server has lost the segment.
    whole: the bytes, mapped as long as this object or a tensor over them lives. local: the memory
    is on the reader's own device. table: has the fd of the table of slots. view: of this table. A
    reader compares a slot's generation after its copy."""

    def __init__(
        self, info: SegmentInfo, fd: int, whole: torch.Tensor, table: int, local: bool
    ) -> None:
        """table: an fd. The caller keeps both fds. Raises SegmentError, OSError."""
        self.view = GenerationView.of_segment(table, info.id)
        self.whole, self.local = whole, local
        super().__init__(info, os.dup(fd))
        self.table = OwnedSegment(info, os.dup(table))

    def slot_offsets(self, run: SlotRun, nbytes: int) -> Int64s | None:
        """Return the first byte of each of the run's slots; None if the slots cannot be in this
        segment, or have fewer than `nbytes` bytes."""
        slots = np.frombuffer(run.blocks, dtype=np.uint32).astype(np.int64) - run.base
        if nbytes > run.slot_bytes or run.offset < 0 or not len(slots) or slots.min() < 0:
            return None
        offsets: Int64s = run.offset + slots * run.slot_bytes
        return offsets if int(offsets.max()) + run.slot_bytes <= self.nbytes else None

    def close(self) -> None:
        """Close the fds. Idempotent."""
        super().close()
        self.table.close()


class Pool:
    """The segments of the node, mapped for `device`. Any thread.

    The pool follows the server's list of segments: on construction, and in the client's background
    thread after every server start and heartbeat. It lends memory until the own device's share is
    complete (a dead worker's segment counts), maps new segments before the first hit needs them,
    offers all its segments to a restarted server, and unmaps dropped segments.

    Host memory beside a GPU is allocated and locked by a thread of its own, in some 0.5 s a GiB, in
    pieces of 4 GiB, the first of which is ready in some seconds; until a segment is ready, this
    process does not use it."""

    def __init__(
        self,
        client: Client,
        device: Device,
        segment_bytes: int,
        over_budget: Callable[[int, int], Shortfall | None] = lambda whole, new: None,
        least: int | None = None,
    ) -> None:
        """segment_bytes: the size that the pool should have on this device; 0 lends nothing. An
        absent server is no error.

        over_budget: called before memory is lent, with `segment_bytes` and the bytes to allocate
        now. If they do not fit, the pool gets what fits, unless that is less than `least`; None:
        all or nothing. Not called for host memory beside a GPU."""
        self.device = device
        self._pinned = device.medium == "host" and device.ordinal is not None
        self._client = client
        self._segment_bytes, self._over_budget = int(segment_bytes), over_budget
        self._least = self._segment_bytes if least is None else least
        self._mapped: dict[SegmentId, PoolSegment] = {}
        self._unreadable = client.unmappable
        self._followed = self._contributed = 0
        """The `Client.run_id` of the server that has our segments, and of the server to which this
        process has lent."""
        self._waits = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()
        client.on_segments = self._follow
        try:
            self._follow(client.list_segments())
        except VCacheError as error:
            log.debug("segments: %s", error)

    def segment(self, id_: SegmentId) -> PoolSegment | None:
        """Return a segment that this process can read. Maps a segment that appeared after the last
        heartbeat; host memory beside a GPU is mapped later, by a thread."""
        found = self._mapped.get(id_)
        return found if found is not None or self._pinned else self._map_unseen(id_)

    def slots(self, locations: Sequence[Location], nbytes: int) -> list[tuple[PoolSegment, int]]:
        """The segments and addresses of the leading locations to which this process can write so
        many bytes. Maps new segments; hold them until the copy is over."""
        found = list[tuple[PoolSegment, int]]()
        for at in locations:
            segment = self.segment(at.segment)
            if segment is None or nbytes > at.length or at.offset + at.length > segment.nbytes:
                break
            found.append((segment, segment.whole.data_ptr() + at.offset))
        return found

    def mapped(self) -> list[SegmentInfo]:
        return [segment.info for segment in list(self._mapped.values())]

    def close(self, patience: float = 5.0) -> None:
        """Unmap everything. The server keeps the segments. Copies must be over. Idempotent.

        Waits `patience` seconds for the driver's work: the process must not end in such a call."""
        self._client.on_segments = lambda infos: None
        with self._lock:
            self._closed = True
            for segment in self._mapped.values():
                segment.close()
            self._mapped.clear()
        if self._thread is not None:
            self._thread.join(patience)

    # ---- following the server

    def _follow(self, infos: list[SegmentInfo]) -> None:
        listed = {info.id for info in infos}
        self._keep_or_unmap(listed)
        self._unreadable &= listed
        if not self._pinned:
            with self._lock:
                self._map_and_lend(infos)
        elif self._contributed != self._client.run_id or any(map(self._is_new, infos)):
            self._start_thread()

    def _keep_or_unmap(self, listed: set[SegmentId]) -> None:
        """Offer the segments that a new server lacks. Unmap those that it does not take, and those
        that the same server has dropped."""
        run_id = self._client.run_id
        missing = [segment for id_, segment in self._mapped.items() if id_ not in listed]
        restarted = self._followed != run_id
        if restarted and missing and self._waits <= 0:
            self._waits = MAX_WAITS
        self._waits -= restarted and bool(missing)
        kept = 0
        for segment in missing:
            if restarted and not segment.view.dead:
                if self._offer(segment):
                    continue
                if self._waits > 0:
                    kept += 1
                    continue
            self._unmap(segment, restarted)
        if not kept:
            self._followed = run_id

    def _offer(self, segment: PoolSegment) -> bool:
        """Hand a segment to a server that lacks it, with the table of its slots. Runs outside the
        lock, since loads and stores wait for the lock."""
        info = segment.info
        try:
            chunks, table = self._client.add_segment(info, segment.fd, segment.table.fd)
        except VCacheError as error:
            log.info("segment %s could not be offered again: %s", info.id, error)
            return False
        os.close(table)
        log.info("segment %s offered again: %d chunks are back", info.id, chunks)
        return True

    def _unmap(self, segment: PoolSegment, restarted: bool) -> None:
        id_ = segment.id
        with self._lock:
            self._mapped.pop(id_, None)
            segment.close()
        if restarted:
            again = "what `vcache segment add` lent, add again"
            log.warning("segment %s: a restarted server lacks it; unmapped; %s", id_, again)
            self._waits = MAX_WAITS
        else:
            log.info("segment %s is not in the pool any more; unmapped", id_)

    def _map_and_lend(self, infos: list[SegmentInfo]) -> None:
        """Map new segments, and lend memory if the device's share is not complete."""
        for info in infos:
            if self._is_new(info):
                self._open(info)
        if self._followed == self._client.run_id:
            self._contribute(infos)

    def _is_new(self, info: SegmentInfo) -> bool:
        if info.id in self._unreadable or info.id in self._mapped:
            return False
        return info.medium == self.device.medium

    # ---- the thread of host memory beside a GPU

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._prepare, name="vcache-pinned-pool", daemon=True
            )
            self._thread.start()

    def _prepare(self) -> None:
        """The thread, which ends when no work is left. A later heartbeat starts another thread."""
        with threads.survives("the pool in host memory"):
            try:
                cuda_driver.load().beside_captures()
                host_memory.move_near(self.device.ordinal or 0)
                progress = True
                while progress and not self._closed:
                    before = len(self._mapped)
                    self._map_and_lend(self._client.list_segments())
                    progress = len(self._mapped) > before
            except VCacheError as error:
                log.debug("the pool in host memory: %s", error)

    # ---- lending

    def _contribute(self, infos: list[SegmentInfo], most: int = 4 << 30) -> None:
        """Complete the own device's share of the pool, once for each server process.

        most: bytes of a segment of pinned memory. The server allows one of the device's workers to
        lend; the other workers ask again until the share is complete. A segment that is dropped
        later is not replaced."""
        run_id = self._client.run_id
        if self._contributed == run_id:
            return
        own = [info for info in infos if info.device == self.device.name]
        pooled = sum(info.nbytes for info in own)
        if pooled >= self._segment_bytes:
            self._contributed = run_id
            return
        try:
            nbytes = self._client.lend(self._segment_bytes)
        except VCacheError as error:
            log.debug("lend: %s", error)
            return
        piece = min(nbytes, most) if self._pinned else nbytes
        if piece and self._lend(piece) and piece == nbytes:
            self._contributed = run_id

    def _lend(self, nbytes: int) -> bool:
        """Make a segment, and hand it to the server. False if the worker should try again."""
        with ExitStack() as undo:
            try:
                nbytes = self._within_budget(nbytes)
                if not nbytes:
                    return True
                owned = undo.enter_context(regions.create(self.device, nbytes))
                whole = regions.map_segment(owned.info, owned.fd, self.device)
            except SegmentError as error:
                self._waits -= 1
                if self._waits >= 0:
                    return False
                self._contributed = self._client.run_id
                self._no_more(error)
                return True
            try:
                _, table = self._client.add_segment(owned.info, owned.fd)
            except VCacheError as error:
                # Not the error itself: it refers to this frame, and so to the mapping.
                said = str(error)
                log.warning("segment %s on %s was not lent: %s", owned.id, self.device, said)
                return False
            undo.callback(os.close, table)
            size = f"{owned.nbytes:,} B"
            log.info("lent %s of %s to the pool as segment %s", size, self.device, owned.id)
            return self._admit(owned.info, owned.fd, whole, table) is not None

    def _within_budget(self, nbytes: int) -> int:
        """Return how many of the `nbytes` bytes to allocate. SegmentError if that is too little."""
        over = None if self._pinned else self._over_budget(self._segment_bytes, nbytes)
        if over is None:
            return nbytes
        size = self._segment_bytes - nbytes + over.fits
        if size < self._least or self._waits > 0:
            raise SegmentError(over.said)
        if over.fits:
            about = ByteSize(size).about
            log.info("the pool on %s gets %s, which fits: %s", self.device, about, over.said)
        return over.fits

    def _no_more(self, error: SegmentError) -> None:
        """Log that nothing more is lent, and report it for `vcache status` and `vcache doctor`."""
        lent = sum(info.nbytes for info in self.mapped() if info.device == self.device.name)
        part = "nothing"
        if lent:
            part = f"{ByteSize(lent).about} of {ByteSize(self._segment_bytes).about}"
        others = "chunks go to its other devices, if there are any"
        said = f"{self.device} lends {part} to the pool: {error}; {others}"
        log.error("%s", said)
        with suppress(VCacheError):
            self._client.report("error", said)

    # ---- mapping

    def _map_unseen(self, id_: SegmentId) -> PoolSegment | None:
        """Map a segment that appeared after the last heartbeat; None if mapping fails."""
        with self._lock:
            if id_ in self._mapped or id_ in self._unreadable:
                return self._mapped.get(id_)
            return self._open(SegmentInfo(id_, "", self.device.medium, 0))

    def _open(self, info: SegmentInfo) -> PoolSegment | None:
        """Ask the server for a segment, and map it. Returns None and logs a failure; a failure of
        the server is only a debug message."""
        try:
            info, *fds = self._client.open_segment(info.id)
        except VCacheError as error:
            log.debug("segment %s: %s", info.id, error)
            return None
        try:
            fd, table = fds
            return self._admit(info, fd, regions.map_segment(info, fd, self.device), table)
        except SegmentError as error:
            self._refuse(info.id, error)
            return None
        finally:
            sockets.close_fds(fds)

    def _admit(
        self, info: SegmentInfo, fd: int, whole: torch.Tensor, table: int
    ) -> PoolSegment | None:
        """Use a mapped segment from now on, unless the pool is closed or the segment's table cannot
        be read. The caller keeps the fds."""
        local = info.device == self.device.name and not self._pinned
        try:
            segment = PoolSegment(info, fd, whole, table, local)
        except (SegmentError, OSError) as error:
            self._refuse(info.id, error)
            return None
        with self._lock:
            if not self._closed:
                self._mapped[info.id] = segment
                return segment
        segment.close()
        return None

    def _refuse(self, id_: SegmentId, error: Exception) -> None:
        """Note that this process cannot map a segment, and tell the server at once."""
        # Pinned segments all fail for the same reason.
        level = logging.DEBUG if self._pinned and self._unreadable else logging.WARNING
        misses = "its chunks are misses here, and none is stored there"
        log.log(level, "segment %s cannot be mapped: %s; %s", id_, error, misses)
        self._unreadable.add(id_)
        with suppress(VCacheError):
            self._client.list_segments()
