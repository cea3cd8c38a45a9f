"""The instances that share their KV caches in place: the parts that their processes show, with fds,
and the blocks that they have published there.

An instance has a part for its scheduler (the generation table) and a part for each rank (a worker's
KV cache). A part ends at once with its connection. Look-ups skip an instance until all of its parts
are shown again. An instance is removed when its last process disconnects."""

from __future__ import annotations

import logging
import os
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from heapq import nlargest
from itertools import groupby
from operator import itemgetter
from typing import Any

import msgspec

from vcache_backend.errors import Refused, SegmentError, printable
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.hits import MAX_TOLD
from vcache_backend.metadata_server.processes import Answer, Descriptor, Peer, ProcessId
from vcache_backend.metadata_server.publications import (
    BLOCK_BYTES,
    ONE_FULL,
    Chunk,
    InstancePublications,
)
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.generation_table import ForeignTable

log = logging.getLogger(__name__)

News = tuple[m.InstanceId, bytes, bytes]
"""An instance, the last hash of a chunk that this instance holds, too, and the chunk's `COPY`."""


class ShownPart(msgspec.Struct):
    """The part of an instance that a connection shows: a scheduler's generation table, or a
    worker's KV cache."""

    peer: Peer
    fd: Descriptor


class SharedInstance:
    """One instance: its parts, by rank and `SCHEDULER`, and its publications. Descriptions and
    publications stay after a connection is closed, since the same process may connect again."""

    MAX_COPIES = 2048
    """The most copies of which an instance has yet to be told. Older copies are dropped."""

    def __init__(self) -> None:
        self.parts: dict[int, ShownPart] = {}
        self.shapes: dict[int, m.CacheShape] = {}
        self.shown: dict[int, object] = {}
        """For each part the process and the memory to which the publications refer."""
        self.published: InstancePublications | None = None
        """None until the scheduler has joined."""
        self.news = deque[News](maxlen=self.MAX_COPIES)
        self.whole = False
        """Whether no part is missing."""

    def missing(self) -> str:
        """Name the first part that is not shown; empty if all parts are shown."""
        if self.published is None or m.SCHEDULER not in self.parts:
            return "its scheduler"
        ranks = range(self.published.ranks)
        return next((f"rank {rank}" for rank in ranks if rank not in self.parts), "")

    def stats(
        self, instance: m.InstanceId, stopped: Callable[[ProcessId], bool]
    ) -> m.InstanceStats:
        own, scheduler = self.published, self.parts.get(m.SCHEDULER)
        return described(
            scheduler.peer if scheduler is not None else None,
            [part.peer for part in self.parts.values()],
            stopped,
            id=instance.hex(),
            device=self.shapes[min(self.shapes)].device if self.shapes else "",
            blocks=own.blocks if own is not None else 0,
            resident=own.live if own is not None else 0,
            ranks=own.ranks if own is not None else len(self.shapes),
            missing=self.missing(),
            namespace=own.namespace.hex() if own is not None else "",
            early=scheduler is not None and not scheduler.peer.asked,
        )


def described(
    first: Peer | None, peers: Iterable[Peer], stopped: Callable[[ProcessId], bool], **more: Any
) -> m.InstanceStats:
    """An instance with these connections, the first of which, if any, names it."""
    silent = max(0.0, time.monotonic() - min(peer.heard for peer in peers))
    own = dict.fromkeys(peer.process for peer in peers)
    pid = next((process.pid for process in own if stopped(process)), 0)
    made: dict[str, Any] = {"id": "", "device": "", "pid": 0, "blocks": 0, "resident": 0}
    if first is not None:
        made |= {"pid": first.process.pid, "name": first.name, "namespace": first.namespace}
        made["vllm"] = printable(first.layout.get("vllm", ""))
        if processes.parent(first.process) not in (0, first.spawner):
            made["orphan"] = first.spawner  # an ended parent's children get another one
    return m.InstanceStats(**made | more, silent=round(silent, 1), stopped=pid)


class InstanceRegistry:
    """All instances. Called from the server's loop. Raises Refused for an impossible request."""

    MAX_BYTES = 1 << 30
    """About the most server memory for the publications of all instances."""
    MAX_NOTED = 512
    """The most copies of which one publication tells other instances. Further instances, chosen at
    random, hear of a later copy."""

    def __init__(
        self,
        counters: Counter[str],
        arrived: Callable[[Iterable[m.ChunkKey]], None],
        spare: Callable[[], int],
        pidfd: Callable[[ProcessId], Descriptor | None],
    ) -> None:
        """arrived: called with chunks (keys of rank 0) that all ranks have published. spare: how
        many more fds the server may keep. pidfd: see `Watch.pidfd`."""
        self._counters, self._arrived = counters, arrived
        self._spare, self._pidfd = spare, pidfd
        self.of: dict[m.InstanceId, SharedInstance] = {}

    @property
    def descriptors(self) -> int:
        """How many fds are kept, one more for each mapped table."""
        return sum(1 for _ in self._published()) + sum(1 for _ in self._parts())

    def processes(self) -> set[ProcessId]:
        """Processes whose end removes their parts, even if a child keeps the connection open."""
        return {part.peer.process for _, part in self._parts()}

    # ---- shown

    def join(self, client: Peer, request: m.Join, fds: list[int]) -> m.Count:
        """Publications of before stay, unless the process, the request or the table is new."""
        id_ = request.instance
        self._check(client, id_, m.SCHEDULER, fds, 2)
        status = os.fstat(fds[0])
        table = request, status.st_dev, status.st_ino
        known = self.published(id_)
        if known is not None and not self._is_new(client, id_, m.SCHEDULER, table):
            self._enter(client, id_, m.SCHEDULER, fds, table)
            return m.Count(1)
        others = sum(one.blocks for one in self._published() if one is not known)
        if (others + request.blocks) * BLOCK_BYTES > self.MAX_BYTES:
            raise Refused(f"the server has no memory for {request.blocks:,} more blocks")
        try:
            made = InstancePublications(request, ForeignTable(fds[0], id_, request.blocks))
        except SegmentError as error:
            raise Refused(str(error)) from error
        instance = self.of.setdefault(id_, SharedInstance())
        instance.published = made
        instance.news.clear()
        self._enter(client, id_, m.SCHEDULER, fds, table)
        return m.Count(1)

    def show_cache(self, client: Peer, request: m.ShowCache, fds: list[int]) -> m.Count:
        id_, rank, cache = request.instance, request.rank, request.shape
        self._check(client, id_, rank, fds, 1)
        known = self.published(id_)
        if known is not None and self._is_new(client, id_, rank, cache):
            known.clear()
        self.of.setdefault(id_, SharedInstance()).shapes[rank] = cache
        self._enter(client, id_, rank, fds, cache)
        return m.Count(1)

    def scheduled_by(self, client: Peer) -> m.InstanceId | None:
        """The instance whose scheduler this connection is."""
        return next((id_ for id_ in self.of if self._owns(client, id_, m.SCHEDULER)), None)

    # ---- published

    def published(self, id_: m.InstanceId) -> InstancePublications | None:
        instance = self.of.get(id_)
        return instance.published if instance is not None else None

    def publish(self, client: Peer, request: m.Publish) -> m.Count:
        """Publish blocks of the rank that this connection shows. 0 if the instance has not joined.
        Refuse impossible runs."""
        if request.instance in self.of and not self._owns(client, request.instance, request.rank):
            raise Refused(f"this connection has shown no cache of its rank {request.rank}")
        own = self.published(request.instance)
        if own is None:
            return m.Count(0)
        ends = own.publish(request.rank, request.runs)
        taken = sum(run.count for run in request.runs)
        self._counters["published"] += taken
        self._arrived([m.ChunkKey(own.namespace + end + bytes(m.RANK_BYTES)) for end in ends])
        if own.tables == ONE_FULL:
            self._note_copies(own, ends)
        return m.Count(taken)

    def has(self, id_: m.InstanceId, key: m.ChunkKey) -> bool:
        """Whether an instance has published the last block of a chunk."""
        own = self.published(id_)
        return own is not None and own.has(key[m.NAMESPACE_BYTES : -m.RANK_BYTES])

    def clear(self, namespace: bytes) -> int:
        """Forget the publications of a namespace, or all with b"". Returns how many blocks."""
        return sum(one.clear() for one in self._published() if namespace in (b"", one.namespace))

    def others(
        self, request: m.Find, own: InstancePublications | None
    ) -> list[InstancePublications]:
        """The instances that the asker may read. All have the same tables: the asker's, or those of
        one of them."""
        if request.pool_only or not request.hashes:
            return []
        for one in (own,) if own is not None else list(self._published()):
            alike = (request.namespace, request.ranks) == (one.namespace, one.ranks)
            if alike and (there := [other for other in self._alike(one) if other is not own]):
                return there
        return []

    # ---- chunks that two instances hold

    def copies(self, id_: m.InstanceId) -> list[m.Copies]:
        """Take the oldest news for an instance's scheduler: chunks that another instance holds as
        well. At most `MAX_TOLD`."""
        news, told = self.of[id_].news, list[m.Copies]()
        taken = [news.popleft() for _ in range(min(MAX_TOLD, len(news)))]
        for other, noted in groupby(taken, itemgetter(0)):
            there = self.published(other)
            packed = b"".join(
                [packed for _, end, packed in noted if there is not None and there.has(end)]
            )
            if packed:
                told.append(m.Copies(other, packed))
        return told

    def _note_copies(self, own: InstancePublications, ends: list[bytes]) -> None:
        """Note which of an instance's newly published chunks other instances hold, too, for both
        sides: for the publisher one holder of each chunk, for the others `MAX_NOTED` notes in all.
        The end of a prefix comes first, and so leaves first. ends: the last hash of each chunk."""
        others = [it for it in self._alike(own) if it is not own and it.each == own.each]
        instance = own.join.instance
        mine = {end: chunk for end in ends[::-1] if (chunk := own.chunk(end)) is not None}
        left, alone = self.MAX_NOTED, dict.fromkeys(mine)
        for there in others:
            other = there.join.instance
            shared = [end for end in list(mine if left else alone) if there.has(end)]
            for end in shared:
                # Packed here, and not when they are told: a scheduler waits for that.
                if (theirs := there.chunk(end)) is None:
                    continue
                if left:
                    self.of[other].news.append((instance, end, _copy(theirs, mine[end])))
                    left -= 1
                if end in alone:
                    self.of[instance].news.append((other, end, _copy(mine[end], theirs)))
                    del alone[end]

    def _alike(self, own: InstancePublications) -> list[InstancePublications]:
        """The instances that hold blocks which instances like this one may read, in random
        order."""
        alike = [
            there
            for instance in self.of.values()
            if instance.whole and (there := instance.published) is not None and there.named
            if there.namespace == own.namespace and there.ranks == own.ranks
            if there.tables == own.tables and not there.table.dead
        ]
        random.shuffle(alike)
        return alike

    # ---- opened

    def open(self, id_: m.InstanceId) -> Answer:
        """Return an instance's generation table and pidfds of its processes. Refuse while a part is
        missing."""
        instance = self._whole(id_)
        own, parts = instance.published, instance.parts
        assert own is not None
        ranks = range(m.SCHEDULER, own.ranks)
        pidfds = [self._pidfd_of(parts[rank].peer.process) for rank in ranks]
        return m.Joined(own.blocks, own.ranks), [parts[m.SCHEDULER].fd, *pidfds]

    def open_cache(self, id_: m.InstanceId, rank: int) -> Answer:
        """Return a KV cache and its fd. Refuse while a part is missing."""
        instance = self._whole(id_)
        if rank not in instance.parts:
            raise Refused(f"it has no rank {rank}")
        return m.Cache(instance.shapes[rank]), [instance.parts[rank].fd]

    # ---- gone

    def leave(self, is_gone: Callable[[Peer], bool]) -> None:
        """Remove the parts of connections that are closed, or of processes that have ended, even if
        a child holds the connection."""
        for id_, instance in list(self.of.items()):
            gone = {rank: part for rank, part in instance.parts.items() if is_gone(part.peer)}
            for rank, part in gone.items():
                del instance.parts[rank]
                _say(part.peer, id_, rank, "leaves")
                instance.whole = not instance.missing()
            if not instance.parts:
                del self.of[id_]

    # ---- statistics

    def reads(self, clients: Iterable[Peer]) -> list[m.ReadStats]:
        """The 256 reads with the most bytes that these clients reported."""
        rows = ((read, client) for client in clients for read in client.reads)
        most = nlargest(256, rows, key=lambda row: (row[0].nbytes, row[0].refused))
        names = {part.peer.id: id_ for id_, part in self._parts()}
        return [
            m.ReadStats(
                client.process.pid,
                client.device,
                "pool" if read.instance == m.POOL else read.instance.hex(),
                read.nbytes,
                read.refused,
                read.tokens,
                names.get(client.id, b"").hex(),
            )
            for read, client in most
        ]

    # ---- inside

    def _parts(self) -> Iterator[tuple[m.InstanceId, ShownPart]]:
        for id_, instance in self.of.items():
            for part in instance.parts.values():
                yield id_, part

    def _published(self) -> Iterator[InstancePublications]:
        every = (instance.published for instance in self.of.values())
        return (published for published in every if published is not None)

    def _part(self, instance: m.InstanceId, rank: int) -> ShownPart | None:
        return self.of[instance].parts.get(rank) if instance in self.of else None

    def _owns(self, client: Peer, instance: m.InstanceId, rank: int) -> bool:
        """Whether this connection shows this part."""
        part = self._part(instance, rank)
        return part is not None and part.peer.id == client.id

    def _check(
        self, client: Peer, instance: m.InstanceId, rank: int, fds: list[int], kept: int
    ) -> None:
        """Refuse a part without its fd, that another process shows, or that exceeds a limit. kept:
        how many fds the part takes from those that the server may keep."""
        if len(fds) != 1:
            raise Refused(f"{len(fds)} fds came along; exactly 1 is needed")
        part = self._part(instance, rank)
        if part is not None and part.peer.process != client.process:
            pid = part.peer.process.pid
            raise Refused(f"pid {pid} is this part already; an id names one start of one instance")
        if instance not in self.of and len(self.of) >= 64:
            raise Refused("64 instances share in place already: that is the limit")
        if self._spare() < kept:
            raise Refused(f"{self.descriptors} fds of instances are kept; raise ulimit -n")

    def _is_new(self, client: Peer, instance: m.InstanceId, rank: int, memory: object) -> bool:
        """Whether the part's process or memory differs from that of the publications."""
        shown = self.of[instance].shown.get(rank)
        return shown is not None and shown != (client.process, memory)

    def _enter(
        self, client: Peer, id_: m.InstanceId, rank: int, fds: list[int], memory: object
    ) -> None:
        """Make this connection a part of the instance, in place of an earlier connection of the
        same process. Takes over the fd."""
        instance = self.of[id_]
        if not self._owns(client, id_, rank):
            replaces = rank in instance.parts
            _say(client, id_, rank, "replaces its earlier connection" if replaces else "joins")
        instance.parts[rank] = ShownPart(client, Descriptor(fds.pop()))
        instance.shown[rank] = client.process, memory
        instance.whole = not instance.missing()

    def _pidfd_of(self, process: ProcessId) -> Descriptor:
        try:
            pidfd = self._pidfd(process)
        except OSError as error:
            raise Refused(f"no pidfd of pid {process.pid}: {error}") from error
        if pidfd is None:
            raise Refused(f"pid {process.pid} is gone, or sent no pidfd with its hello")
        return pidfd

    def _whole(self, id_: m.InstanceId) -> SharedInstance:
        instance = self.of.get(id_)
        if instance is None:
            raise Refused("it is not here, or not any more")
        if missing := instance.missing():
            raise Refused(f"{missing} is not here yet, or not any more")
        return instance


def _copy(own: Chunk, theirs: Chunk) -> bytes:
    return m.COPY.pack(*own, *theirs[:2])


def _say(client: Peer, instance: m.InstanceId, rank: int, what: str) -> None:
    """Log a change of one part of an instance."""
    part = "scheduler" if rank == m.SCHEDULER else f"rank {rank}"
    who = f"{part} (pid {client.process.pid} on {client.device})"
    log.info("instance %s: %s %s", instance.hex()[:8], who, what)
