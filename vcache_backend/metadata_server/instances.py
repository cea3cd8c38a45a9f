"""The instances that share their KV caches in place: the parts that their processes show, with fds.

An instance has a part for its scheduler (the generation table) and a part for each rank (a worker's
KV cache). A part ends at once with its connection. Look-ups skip an instance until all of its parts
are shown again. An instance is removed when its last process disconnects."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from heapq import nlargest
from typing import Any

import msgspec

from vcache_backend.errors import Refused, SegmentError, printable
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.processes import Answer, Descriptor, Peer, ProcessId
from vcache_backend.metadata_server.residents import ResidentDirectory
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.generation_table import ForeignTable

log = logging.getLogger(__name__)


class ShownPart(msgspec.Struct):
    """The part of an instance that a connection shows: a scheduler's generation table, or the
    regions of a worker's KV cache."""

    peer: Peer
    fds: list[Descriptor]


class SharedInstance:
    """The parts of one instance by rank and `SCHEDULER`. The descriptions stay after a connection
    is closed, since the same process may connect again."""

    def __init__(self) -> None:
        self.parts: dict[int, ShownPart] = {}
        self.join: m.Join | None = None
        self.shapes: dict[int, m.CacheShape] = {}
        self.shown: dict[int, object] = {}
        """For each part the process and the memory to which its publications refer."""

    def missing(self) -> str:
        """Name the first part that is not shown; empty if all parts are shown."""
        if self.join is None or m.SCHEDULER not in self.parts:
            return "its scheduler"
        ranks = range(self.join.ranks)
        return next((f"rank {rank}" for rank in ranks if rank not in self.parts), "")

    def stats(
        self, instance: m.InstanceId, resident: int, stopped: Callable[[ProcessId], bool]
    ) -> m.InstanceStats:
        join, scheduler = self.join, self.parts.get(m.SCHEDULER)
        return described(
            scheduler.peer if scheduler is not None else None,
            [part.peer for part in self.parts.values()],
            stopped,
            id=instance.hex(),
            device=self.shapes[min(self.shapes)].device if self.shapes else "",
            blocks=join.blocks if join is not None else 0,
            resident=resident,
            ranks=join.ranks if join is not None else len(self.shapes),
            missing=self.missing(),
            namespace=join.namespace.hex() if join is not None else "",
            early=scheduler is not None and not scheduler.peer.asked,
        )


def described(
    first: Peer | None, peers: Iterable[Peer], stopped: Callable[[ProcessId], bool], **more: Any
) -> m.InstanceStats:
    """An instance with these connections, the first of which, if any, names it."""
    silent = max(0.0, time.monotonic() - min(peer.heard for peer in peers))
    own = dict.fromkeys(peer.process for peer in peers)
    pid = next((process.pid for process in own if stopped(process)), 0)
    made = m.InstanceStats("", "", 0, 0, 0, silent=round(silent, 1), stopped=pid)
    if first is not None:
        # An ended parent's children get another one.
        apart = processes.parent(first.process) not in (0, first.spawner)
        made = msgspec.structs.replace(
            made,
            pid=first.process.pid,
            name=first.name,
            namespace=first.namespace,
            orphan=first.spawner if apart else 0,
            vllm=printable(first.layout.get("vllm", "")),
        )
    return msgspec.structs.replace(made, **more)


class InstanceRegistry:
    """All instances. Called from the server's loop. Raises Refused for an impossible request."""

    def __init__(
        self,
        residents: ResidentDirectory,
        spare: Callable[[], int],
        pidfd: Callable[[ProcessId], Descriptor | None],
    ) -> None:
        """spare: how many more fds the server may keep. pidfd: see `Watch.pidfd`."""
        self._residents, self._spare, self._pidfd = residents, spare, pidfd
        self._of: dict[m.InstanceId, SharedInstance] = {}

    @property
    def descriptors(self) -> int:
        """How many fds are kept, one more for each mapped table."""
        mapped = sum(instance.join is not None for instance in self._of.values())
        return mapped + sum(len(part.fds) for _, part in self._parts())

    def processes(self) -> set[ProcessId]:
        """Processes whose end removes their parts, even if a child keeps the connection open."""
        return {part.peer.process for _, part in self._parts()}

    # ---- shown

    def join(self, client: Peer, request: m.Join, fds: list[int]) -> m.Count:
        if len(fds) != 1:
            raise Refused(f"{len(fds)} fds came along; exactly 1 is needed")
        self._check(client, request.instance, m.SCHEDULER, 2)
        status = os.fstat(fds[0])
        table = request, status.st_dev, status.st_ino
        new = self._is_new(client, request.instance, m.SCHEDULER, table)
        self._residents.open(request, partial(_mapped, request, fds[0]), new)
        self._enter(client, request.instance, m.SCHEDULER, fds, table).join = request
        self._changed(request.instance)
        return m.Count(1)

    def show_cache(self, client: Peer, request: m.ShowCache, fds: list[int]) -> m.Count:
        instance, rank, cache = request.instance, request.rank, request.shape
        count = len(cache.regions)
        if len(fds) != count:
            raise Refused(f"{len(fds)} fds came along; its {count} regions need one each")
        self._check(client, instance, rank, count)
        if self._is_new(client, instance, rank, cache) and instance in self._residents.of:
            self._residents.of[instance].clear()
        self._enter(client, instance, rank, fds, cache).shapes[rank] = cache
        self._changed(instance)
        return m.Count(count)

    def scheduled_by(self, client: Peer) -> m.InstanceId | None:
        """The instance whose scheduler this connection is."""
        return next((id_ for id_ in self._of if self._owns(client, id_, m.SCHEDULER)), None)

    # ---- published

    def publish(self, client: Peer, request: m.Publish) -> m.Count:
        """Publish blocks of the rank that this connection shows."""
        if request.instance not in self._of:
            return m.Count(0)
        if not self._owns(client, request.instance, request.rank):
            raise Refused(f"this connection has shown no cache of its rank {request.rank}")
        return m.Count(self._residents.publish(request))

    # ---- opened

    def open(self, id_: m.InstanceId) -> Answer:
        """Return an instance's generation table and pidfds of its processes. Refuse while a part is
        missing."""
        instance = self._whole(id_)
        join, parts = instance.join, instance.parts
        assert join is not None
        ranks = range(m.SCHEDULER, join.ranks)
        pidfds = [self._pidfd_of(parts[rank].peer.process) for rank in ranks]
        joined = m.Joined(join.blocks, join.ranks)
        return joined, [*parts[m.SCHEDULER].fds, *pidfds]

    def open_cache(self, id_: m.InstanceId, rank: int) -> Answer:
        """Return a KV cache and the fds of its regions. Refuse while a part is missing."""
        instance = self._whole(id_)
        if rank not in instance.parts:
            raise Refused(f"it has no rank {rank}")
        return m.Cache(instance.shapes[rank]), instance.parts[rank].fds

    # ---- gone

    def disconnect(self, client: Peer) -> None:
        self._leave(lambda peer: peer.id == client.id)

    def process_gone(self, process: ProcessId) -> None:
        """Remove the parts of a process that has ended, even if a child holds a connection."""
        self._leave(lambda peer: peer.process == process)

    def close(self) -> None:
        self._of.clear()

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

    def stats(self, stopped: Callable[[ProcessId], bool]) -> list[m.InstanceStats]:
        live = {id_: publications.live for id_, publications in self._residents.of.items()}
        return [each.stats(id_, live.get(id_, 0), stopped) for id_, each in self._of.items()]

    # ---- inside

    def _parts(self) -> Iterator[tuple[m.InstanceId, ShownPart]]:
        for id_, instance in self._of.items():
            for part in instance.parts.values():
                yield id_, part

    def _part(self, instance: m.InstanceId, rank: int) -> ShownPart | None:
        return self._of[instance].parts.get(rank) if instance in self._of else None

    def _owns(self, client: Peer, instance: m.InstanceId, rank: int) -> bool:
        """Whether this connection shows this part."""
        part = self._part(instance, rank)
        return part is not None and part.peer.id == client.id

    def _check(self, client: Peer, instance: m.InstanceId, rank: int, fds: int) -> None:
        """Refuse a part that another process shows, or that exceeds a limit."""
        part = self._part(instance, rank)
        if part is not None and part.peer.process != client.process:
            pid = part.peer.process.pid
            raise Refused(f"pid {pid} is this part already; an id names one start of one instance")
        if instance not in self._of and len(self._of) >= 64:
            raise Refused("64 instances share in place already: that is the limit")
        if self._spare() < fds:
            raise Refused(f"{self.descriptors} fds of instances are kept; raise ulimit -n")

    def _is_new(self, client: Peer, instance: m.InstanceId, rank: int, memory: object) -> bool:
        """Whether the part's process or memory differs from that of the publications."""
        shown = self._of[instance].shown.get(rank) if instance in self._of else None
        return shown is not None and shown != (client.process, memory)

    def _enter(
        self, client: Peer, id_: m.InstanceId, rank: int, fds: list[int], memory: object
    ) -> SharedInstance:
        """Make this connection a part of the instance, in place of an earlier connection of the
        same process. Takes over the fds."""
        instance = self._of.setdefault(id_, SharedInstance())
        if not self._owns(client, id_, rank):
            replaces = rank in instance.parts
            _say(client, id_, rank, "replaces its earlier connection" if replaces else "joins")
        instance.parts[rank] = ShownPart(client, [Descriptor(fd) for fd in fds])
        fds.clear()
        instance.shown[rank] = client.process, memory
        return instance

    def _leave(self, is_gone: Callable[[Peer], bool]) -> None:
        """Remove the parts of some connections."""
        for id_, instance in list(self._of.items()):
            gone = {rank: part for rank, part in instance.parts.items() if is_gone(part.peer)}
            for rank, part in gone.items():
                del instance.parts[rank]
                _say(part.peer, id_, rank, "leaves")
            if gone:
                self._changed(id_)

    def _pidfd_of(self, process: ProcessId) -> Descriptor:
        try:
            pidfd = self._pidfd(process)
        except OSError as error:
            raise Refused(f"no pidfd of pid {process.pid}: {error}") from error
        if pidfd is None:
            raise Refused(f"pid {process.pid} is gone, or sent no pidfd with its hello")
        return pidfd

    def _whole(self, id_: m.InstanceId) -> SharedInstance:
        instance = self._of.get(id_)
        if instance is None:
            raise Refused("it is not here, or not any more")
        if missing := instance.missing():
            raise Refused(f"{missing} is not here yet, or not any more")
        return instance

    def _changed(self, id_: m.InstanceId) -> None:
        """Update the instance after a part came or went."""
        instance = self._of[id_]
        if not instance.parts:
            del self._of[id_]
            self._residents.close(id_)
        elif id_ in self._residents.of:
            self._residents.of[id_].whole = not instance.missing()


def _mapped(join: m.Join, fd: int) -> ForeignTable:
    try:
        return ForeignTable(fd, join.instance, join.blocks)
    except SegmentError as error:
        raise Refused(str(error)) from error


def _say(client: Peer, instance: m.InstanceId, rank: int, what: str) -> None:
    """Log a change of one part of an instance."""
    part = "scheduler" if rank == m.SCHEDULER else f"rank {rank}"
    who = f"{part} (pid {client.process.pid} on {client.device})"
    log.info("instance %s: %s %s", instance.hex()[:8], who, what)
