"""Answers requests from the directory, the fds and the namespaces in use. No sockets, no loop."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable
from typing import assert_never

import msgspec

from vcache_backend.errors import Refused
from vcache_backend.histogram import Histogram
from vcache_backend.metadata_server.descriptors import Answer, Descriptor
from vcache_backend.metadata_server.instances.registry import InstanceRegistry
from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.metadata_server.serving.layouts import Layouts, Reports
from vcache_backend.metadata_server.serving.server_stats import server_stats
from vcache_backend.metadata_server.succession import Predecessors
from vcache_backend.protocol import messages as m

log = logging.getLogger(__name__)


class Service:
    """Answers requests in the server's thread. Owns the fds of registered segments."""

    def __init__(
        self,
        directory: Directory,
        epoch: int,
        predecessors: Predecessors,
        max_segments: int = 1024,
        pidfd: Callable[[ProcessId], Descriptor | None] = lambda process: None,
    ) -> None:
        """predecessors: the earlier servers whose pools the directory takes over. max_segments: the
        most fds to keep for segments and instances. pidfd: see `Watch.pidfd`."""
        self.max_segments = max_segments
        self.instances = InstanceRegistry(directory.residents, self._spare, pidfd)
        self.directory = directory
        self.predecessors = predecessors
        self.epoch = epoch
        self.layouts = Layouts()
        self.latency = defaultdict[str, Histogram](Histogram)
        self.fds: dict[m.SegmentId, Descriptor] = {}
        self.reports = Reports(time.time)
        self.started = time.monotonic()

    def answer(self, client: Peer, request: m.AnyRequest, fds: list[int]) -> Answer:
        """Answer a request. Returns the reply and the reply's fds; the caller keeps the fds until
        the reply is sent.

        fds: the request's fds. The service removes the fds that it keeps."""
        started = time.perf_counter()
        try:
            if isinstance(request, m.OfResidents):
                answer: Answer = self._of_residents(client, request), ()
            elif isinstance(request, m.OfChunks):
                answer = self._of_chunks(client, request), ()
            else:
                answer = self._of_others(client, request, fds)
        except Refused as refusal:
            instance = getattr(request, "instance", b"")
            which = f" {instance.hex()}" if instance else ""
            answer = m.Error(f"{request.__struct_config__.tag}{which}: {refusal}"), ()
        self.latency[type(request).__name__].add((time.perf_counter() - started) * 1e6)
        return answer

    def _of_chunks(self, client: Peer, request: m.OfChunks) -> m.Reply:
        directory = self.directory
        match request:
            case m.Acquire(keys):
                return directory.acquire(client, keys)
            case m.Release(lease):
                return m.Verdict(directory.leases.release(lease))
            case m.Reserve(keys, nbytes):
                return directory.reserve(client, keys, nbytes)
            case m.Commit(reservation, prefix):
                return m.Count(directory.commit(client, reservation, prefix))
            case m.Abort(reservation):
                return m.Count(directory.abort(client, reservation))
            case m.Renew(lease):
                return m.Verdict(directory.leases.renew(lease))
            case m.Contains(keys):
                return m.Present(directory.contains(keys), directory.epochs.of(keys))
            case m.Touch(keys):
                return m.Count(directory.touch(keys))
            case m.Remove(keys):
                return m.Count(directory.remove(keys))
            case m.Clear(namespace, reset):
                return m.Count(directory.clear(namespace, reset))
            case _:
                assert_never(request)

    def _of_residents(self, client: Peer, request: m.OfResidents) -> m.Reply:
        """Answer requests about chunks in instances' KV caches."""
        directory, instances = self.directory, self.instances
        match request:
            case m.Find():
                _check_ranks(request.keys, request.ranks)
                return self._find(client, request)
            case m.Promise():
                _check_ranks(request.keys, request.ranks)
                return directory.promise(client, request)
            case m.Publish():
                right = request.epoch == directory.epochs.of(request.keys)
                return instances.publish(client, request) if right else m.Count(0)
            case m.Retract():
                directory.promises.drop_client(client)
                return instances.retract(client, request)
            case m.Listen(instance):
                epoch = directory.epochs.of([m.ChunkKey(instances.listens(client, instance))])
                return m.Heard(epoch, directory.residents.copies(instance))
            case _:
                assert_never(request)

    def _of_others(self, client: Peer, request: m.OfOthers, fds: list[int]) -> Answer:
        """Answer rare requests, and requests that bring or fetch fds."""
        match request:
            case m.AddSegment():
                return self._add_segment(client, request, fds), ()
            case m.Lend(nbytes):
                return m.Count(self.directory.lend(client, nbytes)), ()
            case m.OpenSegment(id_):
                return self._open_segment(id_)
            case m.DropSegment(id_):
                return self._drop_segment(id_), ()
            case m.ListSegments():
                self._note(client, request)
                return m.Segments(self.directory.segment_infos()), ()
            case m.Join():
                return self.instances.join(client, request, fds), ()
            case m.ShowCache():
                return self.instances.show_cache(client, request, fds), ()
            case m.OpenInstance(instance):
                return self.instances.open(instance)
            case m.OpenCache(instance, rank):
                return self.instances.open_cache(instance, rank)
            case m.Stats():
                return server_stats(self), ()
            case m.Report(level, text):
                return self._report(client, level, text), ()
            case m.Hello():
                raise Refused("it was said already on this connection")
            case _:
                assert_never(request)

    def collect_dropped(self) -> None:
        """Close the memory of removed segments."""
        for id_ in [id_ for id_ in self.fds if id_ not in self.directory.segments]:
            del self.fds[id_]

    def close(self) -> None:
        """Close all fds, which frees memory that no other process holds."""
        self.fds.clear()
        self.instances.close()

    def disconnect(self, client: Peer) -> None:
        self.directory.disconnect(client)
        self.layouts.drop(client.id)
        self.instances.disconnect(client)

    def process_gone(self, process: ProcessId) -> None:
        self.directory.process_gone(process)
        self.instances.process_gone(process)

    def _spare(self) -> int:
        """How many more fds the server may keep."""
        return self.max_segments - len(self.fds) - self.instances.descriptors

    def _add_segment(self, client: Peer, request: m.AddSegment, fds: list[int]) -> m.Count:
        if len(fds) != 1:
            raise Refused(f"{len(fds)} fds came along; exactly 1 is needed")
        id_, device, medium, nbytes = request.id, request.device, request.medium, request.nbytes
        segment = self.directory.segments.get(id_)
        if segment and (segment.device, segment.medium, segment.nbytes) != (device, medium, nbytes):
            was = f"{segment.nbytes:,} B of {segment.medium} on {segment.device}"
            raise Refused(f"segment {id_} is {was}, not {nbytes:,} B of {medium} on {device}")
        if segment and segment.state != "absent":
            return m.Count(0)
        if request.again and not segment:
            raise Refused(
                f"segment {id_} is in no ledger. A worker lends fresh memory; what `vcache "
                "segment add` lent, add again"
            )
        if segment and not request.again:
            raise Refused(
                f"segment {id_} is known from before a restart: offer it again, or make a new one"
            )
        if segment is None and len(self.directory.segments) >= m.MAX_SEGMENTS:
            raise Refused(f"{m.MAX_SEGMENTS} segments are there, the most there can be")
        if self._spare() <= 0:
            kept = f"{len(self.fds)} segments and {self.instances.descriptors} fds of instances"
            raise Refused(f"{kept} are kept; raise ulimit -n")
        self.fds[id_] = Descriptor(fds.pop())
        self.directory.claims.end(client.id)
        return m.Count(self.directory.add_segment(m.SegmentInfo(id_, device, medium, nbytes)))

    def _open_segment(self, id_: m.SegmentId) -> Answer:
        segment = self.directory.segments.get(id_)
        if segment is None or id_ not in self.fds:
            raise Refused(f"segment {id_} was dropped, or not offered since a restart")
        return m.Opened(segment.info()), [self.fds[id_]]

    def _find(self, client: Peer, request: m.Find) -> m.Reply:
        """Answer a look-up, and note the chunks that its request will compute."""
        keys, directory = request.keys, self.directory
        answer, epoch = directory.find(request), directory.epochs.of(keys)
        missing = [] if answer.cut else keys[len(answer.pooled) :]
        # A look-up without a promise takes no promise over.
        begins = request.begins and bool(request.promise)
        coming = directory.promises.coming(client, missing, begins)
        if request.promise and coming is not None:
            # A request that waits computes nothing yet.
            directory.promises.begin(client, m.Promise(request.promise), [])
        elif request.promise and missing:
            lacking = directory.lacking(request, missing)
            directory.promises.intend(client, request.promise, lacking, request.ranks, begins)
        copies = list[m.Copies]()
        if request.instance and self.instances.owns(client, request.instance, m.SCHEDULER):
            copies = directory.residents.copies(request.instance)
        if coming is None and not epoch and not copies:
            return answer
        return msgspec.structs.replace(answer, epoch=epoch, coming=coming, copies=copies)

    def _drop_segment(self, id_: m.SegmentId) -> m.Dropped:
        if id_ not in self.directory.segments:
            raise Refused(f"segment {id_} is not here; `vcache segment list` shows those that are")
        chunks = self.directory.drop_segment(id_)
        self.collect_dropped()
        return m.Dropped(chunks, id_ not in self.directory.segments)

    def _note(self, client: Peer, request: m.ListSegments) -> None:
        """Note the news of a client's heartbeat."""
        client.avoids, client.reads = set(request.unmappable), request.reads
        client.asked |= request.asked > 0
        self.layouts.looked_up(client, request.asked, request.found)
        counters = self.directory.counters
        counters["awaited_tokens"] += request.awaited
        counters["waited_milliseconds"] += request.waited_ms

    def _report(self, client: Peer, level: m.Level, text: str) -> m.Count:
        reported = self.reports.add(client, level, text)
        if reported is not None:
            said = reported.pid, reported.device, reported.text
            log.log(getattr(logging, level.upper()), "pid %d on %s reports: %s", *said)
        return m.Count(int(reported is not None))


def _check_ranks(keys: list[m.ChunkKey], ranks: int) -> None:
    """Refuse a look-up that would take too long."""
    if len(keys) * ranks > m.MAX_LOOKED_UP:
        raise Refused(f"{len(keys):,} keys x {ranks:,} ranks; {m.MAX_LOOKED_UP:,} is the limit")
