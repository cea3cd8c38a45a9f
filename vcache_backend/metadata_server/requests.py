"""Answers requests from the directory, the fds and the namespaces in use. No sockets, no loop."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import assert_never

import msgspec

from vcache_backend.errors import Refused
from vcache_backend.histogram import Histogram
from vcache_backend.metadata_server import hits
from vcache_backend.metadata_server.directory import Directory
from vcache_backend.metadata_server.instances import InstanceRegistry
from vcache_backend.metadata_server.processes import Answer, Descriptor, Peer, ProcessId
from vcache_backend.metadata_server.promises import Promises
from vcache_backend.metadata_server.report import Layouts, Minute, Reports, server_stats
from vcache_backend.metadata_server.resets import Resets
from vcache_backend.metadata_server.slots import SlotRegion
from vcache_backend.protocol import messages as m

log = logging.getLogger(__name__)


class Service:
    """Answers requests in the server's thread. Owns the fds of registered segments."""

    def __init__(
        self,
        run_id: int,
        *,
        now: Callable[[], float] = time.monotonic,
        write_seconds: float = 30.0,
        max_segments: int = 1024,
        resets: Resets | None = None,
        keep: Callable[[Resets], None] = lambda resets: None,
        pidfd: Callable[[ProcessId], Descriptor | None] = lambda process: None,
    ) -> None:
        """run_id: changes with every start. max_segments: the most fds to keep for segments and
        instances. pidfd: see `Watch.pidfd`. Others: see `Directory`."""
        self.max_segments, self.run_id, self._now = max_segments, run_id, now
        self.counters = Counter[str]()
        self.promises = Promises(self.counters, now)
        pool = self.counters, resets, keep, self._was_reset
        self.directory = Directory(now, write_seconds, *pool)
        arrived = self.promises.arrived
        self.instances = InstanceRegistry(self.counters, arrived, self._spare, pidfd)
        self.layouts = Layouts()
        self.latency = defaultdict[str, Histogram](Histogram)
        self.reports = Reports(time.time)
        self.minute = Minute(time.monotonic)
        self.started = time.monotonic()

    def answer(self, client: Peer, request: m.AnyRequest, fds: list[int]) -> Answer:
        """Answer a request. Returns the reply and the reply's fds; the caller keeps the fds until
        the reply is sent.

        fds: the request's fds. The service removes the fds that it keeps."""
        started = time.perf_counter()
        try:
            if isinstance(request, m.OfChunks):
                made: m.Reply | Answer = self._of_chunks(client, request)
            else:
                made = self._of_others(client, request, fds)
            answer = made if isinstance(made, tuple) else (made, ())
        except Refused as refusal:
            instance = getattr(request, "instance", b"")
            which = f" {instance.hex()}" if instance else ""
            answer = m.Error(f"{request.__struct_config__.tag}{which}: {refusal}"), ()
        self.latency[type(request).__name__].add((time.perf_counter() - started) * 1e6)
        return answer

    def _of_chunks(self, client: Peer, request: m.OfChunks) -> m.Reply:
        """Answer frequent requests: about chunks of the pool, and blocks of KV caches."""
        directory = self.directory
        match request:
            case m.Find():
                return self._find(client, request)
            case m.Promise():
                return self._promise(client, request)
            case m.Publish():
                return self._publish(client, request)
            case m.Pin(keys, seconds):
                return m.Pinned(directory.pin(keys, seconds), directory.epoch(keys))
            case m.Reserve(keys, nbytes):
                return self._reserve(client, keys, nbytes)
            case m.Commit(reservation, prefix):
                return m.Count(self._commit(client, reservation, prefix))
            case m.Abort(reservation):
                return m.Count(directory.abort(client, reservation))
            case m.Contains(keys):
                present = [place is not None for place in directory.places(keys)]
                return m.Present(present, directory.epoch(keys))
            case m.Remove(keys):
                return m.Count(directory.remove(keys))
            case m.Clear(namespace, reset):
                published = self.instances.clear(namespace)
                return m.Count(directory.clear(namespace, reset) + published)
            case _:
                assert_never(request)

    def _of_others(self, client: Peer, request: m.OfOthers, fds: list[int]) -> m.Reply | Answer:
        """Answer rare requests, and requests that bring or fetch fds."""
        instances = self.instances
        match request:
            case m.AddSegment():
                return self._add_segment(client, request, fds)
            case m.Lend(nbytes):
                return m.Count(self._lend(client, nbytes))
            case m.OpenSegment(id_):
                return self._open_segment(id_)
            case m.DropSegment(id_):
                return self._drop_segment(id_)
            case m.ListSegments():
                return self._list_segments(client, request)
            case m.Join():
                return instances.join(client, request, fds)
            case m.ShowCache():
                return instances.show_cache(client, request, fds)
            case m.OpenInstance(instance):
                return instances.open(instance)
            case m.OpenCache(instance, rank):
                return instances.open_cache(instance, rank)
            case m.Stats():
                return server_stats(self)
            case m.Report(level, text):
                return self._report(client, level, text)
            case m.Hello():
                raise Refused("it was said already on this connection")
            case _:
                assert_never(request)

    @property
    def busy(self) -> bool:
        """Whether slots are being written or in quarantine."""
        return bool(self.directory.writes)

    def tick(self) -> None:
        """End what is overdue."""
        self.directory.tick()
        self.promises.tick()

    def close(self) -> None:
        """Close all fds, which frees memory that no other process holds."""
        self.directory.regions.clear()
        self.instances.of.clear()

    def disconnect(self, client: Peer) -> None:
        self.directory.disconnect(client.id)
        self.promises.drop_client(client)
        self.layouts.drop(client.id)
        self.instances.leave(lambda peer: peer.id == client.id)

    def process_gone(self, process: ProcessId) -> None:
        self.directory.process_gone(process)
        self.instances.leave(lambda peer: peer.process == process)

    def _spare(self) -> int:
        """How many more fds the server may keep."""
        return self.max_segments - 2 * len(self.directory.regions) - self.instances.descriptors

    def _was_reset(self, namespace: bytes) -> None:
        self.instances.clear(namespace)
        self.promises.clear(namespace)

    # ---- segments

    def _lend(self, client: Peer, nbytes: int, seconds: float = 120.0) -> int:
        """Grant the bytes that the client's device lacks of `nbytes` and no other client claims.
        The client has them, in place of an earlier claim, until it adds a segment, for so many
        seconds at most: whoever takes longer to allocate them may have failed."""
        now, device = self._now(), client.device
        client.claimed = 0
        regions, clients = self.directory.regions.values(), self.layouts.clients.values()
        taken = sum(region.nbytes for region in regions if region.device == device)
        claims = (c.claimed for c in clients if c.device == device and now <= c.claims_until)
        client.claimed = max(0, nbytes - taken - sum(claims))
        client.claims_until = now + seconds
        return client.claimed

    def _add_segment(self, client: Peer, request: m.AddSegment, fds: list[int]) -> Answer:
        if len(fds) != 1 + request.again:
            raise Refused(f"{len(fds)} fds came along; exactly {1 + request.again} are needed")
        id_, nbytes = request.id, request.nbytes
        info = m.SegmentInfo(id_, request.device, request.medium, nbytes)
        region = self.directory.region(id_)
        if region is not None:
            was = region.info
            if was != info:
                known = f"{was.nbytes:,} B of {was.medium} on {was.device}"
                what = f"{nbytes:,} B of {info.medium} on {info.device}"
                raise Refused(f"segment {id_} is {known}, not {what}")
            return m.Count(0), region.fds[1:]
        if len(self.directory.regions) >= m.MAX_SEGMENTS:
            raise Refused(f"{m.MAX_SEGMENTS} segments are there, the most there can be")
        if self._spare() <= 1:
            segments, others = len(self.directory.regions), self.instances.descriptors
            what = f"{segments} segments and {others} fds of instances are kept"
            raise Refused(f"{what}; raise ulimit -n")
        try:
            region = (
                SlotRegion.take_over(info, fds[1]) if request.again else SlotRegion.create(info)
            )
        except OSError as error:
            busy = isinstance(error, BlockingIOError)
            why = "the server that had it has not ended" if busy else error
            raise Refused(f"segment {id_}, its table: {why}") from error
        region.fds.insert(0, Descriptor(fds.pop(0)))
        client.claimed = 0
        return m.Count(self.directory.add(region)), region.fds[1:]

    def _open_segment(self, id_: m.SegmentId) -> Answer:
        region = self.directory.region(id_)
        if region is None:
            raise Refused(f"segment {id_} was dropped, or not offered since a restart")
        return m.Opened(region.described()), region.fds

    def _list_segments(self, client: Peer, request: m.ListSegments) -> m.Segments:
        """Answer a heartbeat, and note its news."""
        client.avoids, client.reads = set(request.unmappable), request.reads
        client.asked |= request.asked > 0
        self.layouts.looked_up(client, request.asked, request.found)
        self.counters["awaited_tokens"] += request.awaited
        self.counters["waited_milliseconds"] += request.waited_ms
        self.counters["loads"] += request.loads
        self.counters["loaded_tokens"] += request.loaded
        if request.loads:
            self.minute.add(request.loads, request.loaded)
        instance = self.instances.scheduled_by(client)
        copies = self.instances.copies(instance) if instance is not None else []
        epoch = self.directory.epoch([m.ChunkKey(client.prefix)])
        return m.Segments(self.directory.segments(), epoch, copies)

    # ---- chunks

    def _reserve(self, client: Peer, keys: list[m.ChunkKey], nbytes: int) -> m.Reserved:
        reserved = self.directory.reserve(client, keys, nbytes)
        self.promises.refused(
            key
            for key, slot in zip(keys, reserved.slots, strict=True)
            if isinstance(slot, int) and slot != m.Refusal.BUSY
        )
        return reserved

    def _commit(self, client: Peer, reservation: int, prefix: list[m.ChunkKey]) -> int:
        stored = self.directory.commit(client, reservation)
        if stored:
            self.promises.stored(stored, self.directory)
            self.directory.touch(prefix)
        return len(stored)

    def _find(self, client: Peer, request: m.Find) -> m.Reply:
        """Answer a look-up, and note the chunks that its request will compute."""
        count, counters = len(request.hashes) // m.HASH_BYTES // request.each, self.counters
        if len(request.hashes) % m.HASH_BYTES:
            raise Refused(f"{len(request.hashes):,} B are not whole hashes")
        namespace, keys = request.namespace, list[m.ChunkKey]()
        if self._needs_keys(request):
            keys = m.chunk_keys(namespace, request.hashes, request.each)
        own = self.instances.published(request.instance)
        others = self.instances.others(request, own)
        answer = hits.find(request, keys, self.directory, own, others)
        if answer.residents:
            counters["resident_hits"] += answer.end // request.each
        found, epoch = len(answer.pooled), self.directory.epoch([m.ChunkKey(namespace)])
        counters["lookup_chunks"] += count
        counters["lookup_hits"] += found
        missing = [] if answer.cut else keys[found:]
        # A look-up without a promise takes no promise over.
        begins = request.begins and bool(request.promise)
        coming = self.promises.coming(client, missing, begins)
        if request.promise and coming is not None:
            # A request that waits computes nothing yet.
            self.promises.begin(client, m.Promise(request.promise), [])
        elif request.promise and missing:
            lacking = self._lacking(request, missing)
            self.promises.intend(client, request.promise, lacking, request.ranks, begins)
        copies = list[m.Copies]()
        if request.instance and self.instances.scheduled_by(client) == request.instance:
            copies = self.instances.copies(request.instance)
        if coming is None and not epoch and not copies:
            return answer
        return msgspec.structs.replace(answer, epoch=epoch, coming=coming, copies=copies)

    def _needs_keys(self, request: m.Find) -> bool:
        """Whether the pool or a promise may have chunks of a look-up, or will."""
        return bool(request.promise) or len(self.directory) + len(self.promises) > 0

    def _publish(self, client: Peer, request: m.Publish) -> m.Count:
        """Take blocks, unless they were computed before a reset."""
        current = request.epoch == self._epoch_of(request.instance)
        return self.instances.publish(client, request) if current else m.Count(0)

    def _epoch_of(self, instance: m.InstanceId) -> int:
        own = self.instances.published(instance)
        return self.directory.epoch([m.ChunkKey(own.namespace)]) if own is not None else 0

    def _promise(self, client: Peer, request: m.Promise) -> m.Promised:
        """Note the chunks that a request computes. Ignores a request that began before a reset."""
        epoch = self.directory.epoch(request.keys)
        lacking = self._lacking(request, request.keys) if request.epoch == epoch else []
        return m.Promised(self.promises.begin(client, request, lacking), epoch)

    def _lacking(self, request: m.Find | m.Promise, keys: list[m.ChunkKey]) -> list[m.ChunkKey]:
        """The keys (of rank 0), each once, whose chunks the request's instance has not published,
        and the pool lacks for a rank."""
        own, has = request.instance, self.instances.has
        keys = list(dict.fromkeys(keys))
        pairs = zip(keys, self.directory.of_all(keys, request.ranks), strict=True)
        return [key for key, stored in pairs if not (stored or has(own, key))]

    def _drop_segment(self, id_: m.SegmentId) -> m.Count:
        if self.directory.region(id_) is None:
            raise Refused(f"segment {id_} is not here; `vcache status` shows those that are")
        return m.Count(self.directory.drop(id_))

    def _report(self, client: Peer, level: m.Level, text: str) -> m.Count:
        reported = self.reports.add(client, level, text)
        if reported is not None:
            said = reported.pid, reported.device, reported.text
            log.log(getattr(logging, level.upper()), "pid %d on %s reports: %s", *said)
        return m.Count(int(reported is not None))
