"""This process's view of the pool: lends its segment, and maps every segment of the node."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from vcache_backend.config import ByteSize
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import Location, SegmentId, SegmentInfo
from vcache_backend.vram_pool import regions
from vcache_backend.vram_pool.devices import Device
from vcache_backend.vram_pool.memory_budget import Shortfall
from vcache_backend.vram_pool.regions import MappedSegment, SlotView

log = logging.getLogger(__name__)


MAX_WAITS = 30
"""For how many heartbeats a worker tries again to lend, after a restarted server did not take
segments back: their memory is free only once every process has unmapped the segments."""


class Pool:
    """The segments of the node, mapped for `device`. Any thread.

    The pool follows the server's list of segments: on construction, and in the client's background
    thread after every server start and heartbeat. It lends memory until the own device's share is
    complete (a dead worker's segment counts), maps new segments before the first hit needs them,
    and unmaps dropped segments."""

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
        all or nothing."""
        self.device = device
        self._client = client
        self._segment_bytes, self._over_budget = int(segment_bytes), over_budget
        self._least = self._segment_bytes if least is None else least
        self._mapped: dict[SegmentId, MappedSegment] = {}
        self._unreadable = client.unmappable
        self._contributed = 0
        self._waits = 0
        self._exhausted = self._closed = False
        self._lock = threading.RLock()
        client.on_segments = self._follow
        try:
            self._follow(client.list_segments())
        except VCacheError as error:
            log.debug("segments: %s", error)

    def slots(self, locations: Sequence[Location]) -> list[SlotView]:
        """Views of the leading locations that this process can read. Maps new segments.

        A view keeps the segment mapped: keep all views until the copy is over."""
        views: list[SlotView] = []
        wholes: dict[SegmentId, tuple[torch.Tensor, int, bool, int]] = {}
        for location in locations:
            segment, offset, length = location.segment, location.offset, location.length
            if segment not in wholes:
                mapped = self._mapped.get(segment) or self._map_unseen(segment)
                if mapped is None:
                    break
                whole = mapped.whole
                local = mapped.device == self.device.name and (
                    self.device.medium == "cuda" or self.device.ordinal is None
                )
                wholes[segment] = whole, whole.data_ptr(), local, mapped.nbytes
            whole, address, local, nbytes = wholes[segment]
            if offset + length > nbytes:
                said = "segment %s has no bytes [%d, %d); this location is not used"
                log.error(said, segment, offset, offset + length)
                break
            views.append(SlotView(address + offset, length, local, whole, offset))
        return views

    def mapped(self) -> list[SegmentInfo]:
        return [mapped.info for mapped in list(self._mapped.values())]

    def close(self) -> None:
        """Unmap everything. The server keeps the segments. Copies must be over. Idempotent."""
        self._client.on_segments = lambda infos: None
        with self._lock:
            self._closed = True
            for mapped in self._mapped.values():
                mapped.close()
            self._mapped.clear()

    # ---- following the server

    def _follow(self, infos: list[SegmentInfo]) -> None:
        self._offer_again([info.id for info in infos if info.state == "absent"])
        with self._lock:
            listed = {info.id for info in infos}
            gone = self._mapped.keys() - listed
            restarted = self._contributed != self._client.epoch
            for id_ in gone:
                self._mapped.pop(id_).close()
                if restarted:
                    again = "what `vcache segment add` lent, add again"
                    log.warning("segment %s: a restarted server lacks it; unmapped; %s", id_, again)
                else:
                    log.info("segment %s is not in the pool any more; unmapped", id_)
            if gone and restarted:
                self._waits = MAX_WAITS
            self._unreadable &= listed
            self._agree(infos)

    def _offer_again(self, absent: list[SegmentId]) -> None:
        """Hand segments to a server that knows them from an earlier server's ledger. Runs outside
        the lock, since loads and stores wait for the lock."""
        for id_ in absent:
            with self._lock:
                mapped = self._mapped.get(id_)
                fd = os.dup(mapped.fd) if mapped is not None else -1
            if mapped is None:
                continue
            try:
                chunks = self._client.add_segment(mapped.info, fd, again=True)
                log.info("segment %s offered again: %d chunks are back", id_, chunks)
            except VCacheError as error:
                log.warning("segment %s could not be offered again: %s", id_, error)
            finally:
                os.close(fd)

    def _agree(self, infos: list[SegmentInfo]) -> None:
        """Map new segments, and lend memory if the device's share is not complete."""
        for info in infos:
            if self._is_new(info):
                self._open(info)
        self._contribute(infos)

    def _is_new(self, info: SegmentInfo) -> bool:
        if info.id in self._unreadable or info.id in self._mapped:
            return False
        return info.state == "live" and info.medium == self.device.medium

    def _contribute(self, infos: list[SegmentInfo]) -> None:
        """Complete the own device's share of the pool, once for each server process.

        The server allows one of the device's workers to lend; the other workers ask again until the
        share is complete. A segment that is dropped later is not replaced."""
        epoch = self._client.epoch
        if self._contributed == epoch:
            return
        own = [info for info in infos if info.device == self.device.name]
        pooled = sum(info.nbytes for info in own if info.state == "live")
        if pooled >= self._segment_bytes:
            self._contributed = epoch
            return
        try:
            nbytes = self._client.lend(self._segment_bytes)
        except VCacheError as error:
            log.debug("lend: %s", error)
            return
        if nbytes and self._lend(nbytes):
            self._contributed = epoch

    def _lend(self, nbytes: int) -> bool:
        """Make a segment, and hand it to the server. False if the worker should try again."""
        try:
            over = self._over_budget(self._segment_bytes, nbytes)
            if over is not None:
                held, nbytes = self._segment_bytes - nbytes, over.fits
                if held + nbytes < self._least or self._waits > 0:
                    raise SegmentError(over.said)
                if not nbytes:
                    return True
                size = ByteSize(held + nbytes).about
                log.info("the pool on %s gets %s, which fits: %s", self.device, size, over.said)
            with regions.create(self.device, nbytes) as owned:
                mapped = regions.map_segment(owned.info, owned.fd, self.device)
        except SegmentError as error:
            self._waits -= 1
            if self._waits >= 0:
                return False
            self._exhausted = True
            self._no_more(error)
            return True
        try:
            self._client.add_segment(mapped.info, mapped.fd)
        except VCacheError as error:
            log.warning("segment %s on %s was not lent: %s", mapped.id, self.device, error)
            mapped.close()
            return False
        size = f"{mapped.nbytes:,} B"
        log.info("lent %s of %s to the pool as segment %s", size, self.device, mapped.id)
        return self._admit(mapped)

    def _no_more(self, error: SegmentError) -> None:
        others = "chunks go to its other devices, if there are any"
        self._tell(f"{self.device} lends nothing to the pool: {error}; {others}")

    def _tell(self, said: str) -> None:
        """Log an error, and report it to the server, for `vcache status` and `vcache doctor`."""
        log.error("%s", said)
        with suppress(VCacheError):
            self._client.report("error", said)

    def _admit(self, mapped: MappedSegment) -> bool:
        """Use a mapped segment from now on. If the pool is closed: close it, and return False."""
        with self._lock:
            if not self._closed:
                self._mapped[mapped.id] = mapped
                return True
        mapped.close()
        return False

    def _level(self) -> int:
        return logging.WARNING

    def _map_unseen(self, id_: SegmentId) -> MappedSegment | None:
        """Map a segment that appeared after the last heartbeat; None if mapping fails."""
        with self._lock:
            if id_ in self._mapped or id_ in self._unreadable:
                return self._mapped.get(id_)
            return self._open(SegmentInfo(id_, "", self.device.medium, 0))

    def _open(self, info: SegmentInfo) -> MappedSegment | None:
        """Ask the server for a segment, and map it. Returns None and logs a failure; a failure of
        the server is only a debug message."""
        try:
            info, fd = self._client.open_segment(info.id)
            try:
                mapped = regions.map_segment(info, fd, self.device)
            finally:
                os.close(fd)
        except SegmentError as error:
            misses = "its chunks are misses here, and none is stored there"
            log.log(self._level(), "segment %s cannot be mapped: %s; %s", info.id, error, misses)
            self._unreadable.add(info.id)
            with suppress(VCacheError):
                # Tells the server at once.
                self._client.list_segments()
            return None
        except VCacheError as error:
            log.debug("segment %s: %s", info.id, error)
            return None
        return mapped if self._admit(mapped) else None
