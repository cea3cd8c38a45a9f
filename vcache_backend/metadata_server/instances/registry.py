"""The instances that share their KV caches in place: the parts that their processes show, with fds.

A part ends at once with its connection. Look-ups skip an instance until all of its parts are shown
again. An instance is removed when its last process disconnects."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.client_lines import caused_by
from vcache_backend.metadata_server.instances.parts import (
    RegisteredInstance,
    SchedulerPart,
    WorkerPart,
    no_table,
    only,
)
from vcache_backend.metadata_server.instances.resident_chunks import ResidentDirectory
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.records import ProcessId
from vcache_backend.metadata_server.refuse import Refuse
from vcache_backend.metadata_server.serving.connection import Answer, Descriptor, unmappable
from vcache_backend.metadata_server.shares import room

log = logging.getLogger(__name__)

MAX_INSTANCES = 64
MAX_OF_PROCESS = 16
"""The most instances that one process belongs to."""
SHARE_OF_PROCESS, SHARE_OF_USER, LEAST = 4, 1 / 4, 2
"""Fair shares of the table of instances. A process with N instances gets one more only while more
than 4 N places are free; a user with N, while more than N / 4 are. A process may have 2 in any
case."""
MAX_PARTS = 8
"""The most parts (a scheduler or a rank) that one connection shows."""
MAX_READERS = 4096
"""The most readers remembered, a reader being a connection and an instance. Beyond it the oldest
reader is forgotten."""


def liveness(peers: Sequence[Peer]) -> dict[str, Any]:
    """Fill `InstanceStats.silent` and `.stopped` for an instance with these connections."""
    halted = (
        process.pid
        for process in dict.fromkeys(peer.process for peer in peers)
        if processes.stopped(process)
    )
    heard = min((peer.heard for peer in peers), default=0.0)
    return {"silent": round(max(0.0, time.monotonic() - heard), 1), "stopped": next(halted, 0)}


class InstanceRegistry:
    """All instances. Called from the server's loop. Raises Refuse if a request cannot be
    granted."""

    def __init__(
        self,
        residents: ResidentDirectory,
        spare: Callable[[], int],
        pidfd: Callable[[ProcessId], int | None],
    ) -> None:
        """spare: how many more fds the server may keep. pidfd: makes a new pidfd of a process, or
        returns None."""
        self._residents, self._spare, self._pidfd = residents, spare, pidfd
        self._of: dict[m.InstanceId, RegisteredInstance] = {}
        self._parts: dict[int, set[tuple[m.InstanceId, int]]] = {}
        """The parts that each connection shows."""
        self._readers: dict[tuple[m.InstanceId, int], tuple[Peer, str]] = {}
        """Each connection that opened a KV cache of an instance and has not reported it unmapped,
        with the device of the KV cache."""

    @property
    def descriptors(self) -> int:
        """The number of fds kept."""
        kept = 0
        for registered in self._of.values():
            if registered.table is not None:
                kept += registered.table.table is not None
            kept += sum(len(cache.regions) for cache in registered.caches.values())
            kept += sum(part.pidfd is not None for _, part in registered.parts())
        return kept

    def processes(self) -> set[ProcessId]:
        """The processes whose end removes their parts, even if a child holds the connection
        open."""
        return set().union(*(registered.processes() for registered in self._of.values()))

    # ---- shown

    def join(self, client: Peer, request: m.Join, fds: list[int]) -> m.Count:
        """Register a scheduler's generation table."""
        if reason := no_table(only(fds), request.blocks):
            raise Refuse(reason)
        if lacking_bytes := self._residents.lacks(client, request):
            raise Refuse(
                f"{request.blocks:,} blocks need {lacking_bytes:,} B more than this process may "
                "hold in the server now"
            )
        registered = self._enter(client, request.instance, m.SCHEDULER)
        before = registered.table
        registered.table = shown = SchedulerPart(client, request, Descriptor(fds.pop()))
        if before is None or (before.process, before.memory) != (shown.process, shown.memory):
            self._residents.close(request.instance)
        self._residents.open(client, request)
        self._changed(request.instance)
        return m.Count(1)

    def show_cache(self, client: Peer, request: m.ShowCache, fds: list[int]) -> m.Count:
        """Register a worker's KV cache."""
        instance, rank, shape = request.instance, request.rank, request.shape
        if reason := shape.misfit():
            raise Refuse(reason)
        if len(fds) != len(shape.regions):
            raise Refuse(
                f"{len(fds)} fds came along; its {len(shape.regions)} regions need one each"
            )
        for number, (nbytes, fd) in enumerate(zip(shape.regions, fds, strict=True)):
            if reason := unmappable(shape.medium, nbytes, fd, to_write=False):
                raise Refuse(f"region {number}: {reason}")
        shown = WorkerPart(client, shape)
        if shown.nbytes > self._residents.room(client):
            raise Refuse(
                f"its description takes {shown.nbytes:,} B, more than this process may hold in "
                "the server now"
            )
        replaced = (
            self._of[instance].caches[rank].regions if self.owns(client, instance, rank) else ()
        )
        self._make_sure_of_room(len(fds) - len(replaced))
        registered = self._enter(client, instance, rank)
        before = registered.caches.get(rank)
        registered.caches[rank] = shown
        shown.regions = [Descriptor(fd) for fd in fds]
        fds.clear()
        self._residents.charge(client, shown.nbytes)
        if before is not None:
            self._residents.charge(before.owner, -before.nbytes)
        if before is not None and (before.process, before.shape) != (client.process, shape):
            self._residents.empty(instance)
        self._changed(instance)
        return m.Count(len(shape.regions))

    def owns(self, client: Peer, instance: m.InstanceId, rank: int) -> bool:
        """Whether this connection shows this part."""
        return (instance, rank) in self._parts.get(client.id, ())

    # ---- published

    def publish(self, client: Peer, request: m.Publish) -> m.Count:
        """Publish chunks of the rank that this connection shows."""
        instance, keys = request.instance, request.keys
        if instance not in self._of or not keys:
            return m.Count(0)
        rank = int.from_bytes(keys[0][-m.RANK_BYTES :], "big")
        if not self.owns(client, instance, rank):
            raise Refuse(
                f"publish {instance.hex()}: this connection has shown no cache of its rank {rank}"
            )
        return m.Count(self._residents.publish(rank, request))

    def retract(self, client: Peer, request: m.Retract) -> m.Count:
        """Void the instance's publications with a lower sequence. Any part of the instance may
        ask."""
        instance = request.instance
        if instance not in self._of:
            return m.Count(0)
        table = self._of[instance].table
        ranks = table.request.ranks if table is not None else 0
        if not any(
            shown == instance and rank < ranks for shown, rank in self._parts.get(client.id, ())
        ):
            raise Refuse(f"retract {instance.hex()}: this connection is no part of it")
        return m.Count(self._residents.retract(instance, request.sequence))

    def listens(self, client: Peer, instance: m.InstanceId) -> bytes:
        """Return the instance's namespace. Refuse a connection that is not the instance's
        scheduler."""
        registered = self._of.get(instance)
        if (
            registered is None
            or registered.table is None
            or not self.owns(client, instance, m.SCHEDULER)
        ):
            raise Refuse(f"listen {instance.hex()}: this connection has shown no generations of it")
        return registered.table.request.namespace

    # ---- opened

    def open(self, instance: m.InstanceId) -> Answer:
        """Return an instance's generation table and pidfds of its processes. Refuse while a part is
        missing."""
        registered = self._whole(instance)
        shown = registered.table
        assert shown is not None
        assert shown.table is not None
        join = shown.request
        pidfds = [self._pidfd_of(shown)]
        pidfds += [self._pidfd_of(registered.caches[rank]) for rank in range(join.ranks)]
        return m.Joined(join.blocks, join.ranks, join.each), [shown.table, *pidfds]

    def open_cache(self, client: Peer, instance: m.InstanceId, rank: int) -> Answer:
        """Return a worker's KV cache. The connection is a reader until it closes or sends
        `CloseInstance`."""
        cache = self._cache(instance, rank)
        self._readers[instance, client.id] = client, cache.shape.device
        if len(self._readers) > MAX_READERS:
            del self._readers[next(iter(self._readers))]
        return m.Cache(cache.shape), cache.regions

    def close_instance(self, client: Peer, instance: m.InstanceId) -> m.Count:
        """Forget that this connection reads the instance: its process has unmapped the KV cache."""
        return m.Count(int(self._readers.pop((instance, client.id), None) is not None))

    # ---- gone

    def disconnect(self, client: Peer, ended: bool = False) -> None:
        """Remove the parts of a closed connection. ended: whether the client's process has ended,
        too; a process that was only stopped keeps its connections."""
        for reader in [reader for reader in self._readers if reader[1] == client.id]:
            del self._readers[reader]
        for instance, rank in self._parts.pop(client.id, ()):
            registered = self._of[instance]
            part = registered.table if rank == m.SCHEDULER else registered.caches[rank]
            assert part is not None
            part.gone()
            why = (
                "its process has ended"
                if ended or processes.ending(client.process)
                else "its connection is closed"
            )
            _say(client, instance, rank, f"leaves: {why}")
            self._changed(instance)

    def process_gone(self, process: ProcessId) -> None:
        """Remove the parts of a process that has ended, even if a child holds its connection
        open."""
        peers = {
            part.peer.id: part.peer
            for registered in self._of.values()
            for _, part in registered.parts()
            if part.peer is not None
        }
        for peer in peers.values():
            if peer.process == process:
                self.disconnect(peer, ended=True)

    def close(self) -> None:
        """Close all fds."""
        self._of.clear()

    def stats(self) -> list[m.InstanceStats]:
        """The instances as `vcache status` lists them."""
        return [self._stats(instance, registered) for instance, registered in self._of.items()]

    def still_mapped(self) -> list[m.StillMapped]:
        """List readers that still map memory of ended instances, up to a limit."""
        gone = [
            (instance, *reader)
            for (instance, _), reader in self._readers.items()
            if instance not in self._of
        ]
        return [
            m.StillMapped(instance.hex(), device, peer.process.pid, processes.stopped(peer.process))
            for instance, peer, device in gone[:MAX_INSTANCES]
        ]

    # ---- inside

    def _stats(self, instance: m.InstanceId, registered: RegisteredInstance) -> m.InstanceStats:
        table = (
            registered.table
            if registered.table is not None and registered.table.peer is not None
            else None
        )
        return m.InstanceStats(
            id=instance.hex(),
            device=registered.caches[min(registered.caches)].shape.device
            if registered.caches
            else "",
            pid=table.process.pid if table is not None else 0,
            blocks=table.request.blocks if table is not None else 0,
            resident=self._residents.count(instance),
            regions=sum(len(cache.regions) for cache in registered.caches.values()),
            ranks=table.request.ranks if table is not None else len(registered.caches),
            missing=registered.missing(),
            name=table.peer.name if table is not None and table.peer is not None else "",
            namespace=table.request.namespace.hex() if table is not None else "",
            **liveness([part.peer for _, part in registered.parts() if part.peer is not None]),
        )

    def _enter(self, client: Peer, instance: m.InstanceId, rank: int) -> RegisteredInstance:
        """Make this connection a part of the instance, in place of an earlier connection of the
        same process."""
        registered = self._of.get(instance)
        part = (
            None
            if registered is None
            else registered.table
            if rank == m.SCHEDULER
            else registered.caches.get(rank)
        )
        if part is not None and part.peer is not None and part.process != client.process:
            raise Refuse(
                f"pid {part.process.pid} is this part of it already; an id names one start of "
                "one instance"
            )
        if not self.owns(client, instance, rank):
            mine = self._parts.setdefault(client.id, set())
            if len(mine) >= MAX_PARTS:
                raise Refuse(
                    f"this connection shows {len(mine)} parts of instances already; connect "
                    "once more for others"
                )
            joined = [id_ for id_, other in self._of.items() if client.process in other.processes()]
            if instance not in joined and len(joined) >= MAX_OF_PROCESS:
                raise Refuse(
                    f"pid {client.process.pid} is part of {len(joined)} instances already, the "
                    "most for one process"
                )
            if registered is None and len(self._of) >= MAX_INSTANCES:
                raise Refuse(
                    f"{len(self._of)} instances share in place already, the most for one server"
                )
            if registered is None and not self._leaves_room(client, len(joined)):
                kept = f"so that {MAX_INSTANCES - len(self._of)} are left for others"
                raise Refuse(
                    f"pid {client.process.pid} is part of {len(joined)} instances, its user of "
                    f"more, {kept}"
                )
        if rank == m.SCHEDULER and (part is None or part.peer is None):
            self._make_sure_of_room()
        if registered is None:
            registered = self._of[instance] = RegisteredInstance()
        if not self.owns(client, instance, rank):
            again = part is not None and part.peer is not None
            _say(client, instance, rank, "replaces its earlier connection" if again else "joins")
        if part is not None and part.peer is not None:
            self._parts[part.peer.id].discard((instance, rank))
        self._parts.setdefault(client.id, set()).add((instance, rank))
        return registered

    def _leaves_room(self, client: Peer, joined: int) -> bool:
        """Whether enough places for instances stay free for others if this client takes one
        more."""
        of_user = sum(
            any(
                part.peer is not None and part.peer.user == client.user
                for _, part in registered.parts()
            )
            for registered in self._of.values()
        )
        return (
            room(
                MAX_INSTANCES - len(self._of),
                (joined, SHARE_OF_PROCESS),
                (of_user, SHARE_OF_USER),
                LEAST,
            )
            > 0
        )

    def _pidfd_of(self, part: SchedulerPart | WorkerPart) -> Descriptor:
        """Return a pidfd of the process that shows this part. The pidfd is kept for later requests,
        so clients that do not read their answers use up no descriptors."""
        if part.pidfd is None:
            self._make_sure_of_room()
            try:
                pidfd = self._pidfd(part.process)
            except OSError as error:
                raise Refuse(f"no pidfd of pid {part.process.pid}: {error}") from error
            if pidfd is None:
                raise Refuse(f"pid {part.process.pid} is gone, or sent no pidfd with its hello")
            part.pidfd = Descriptor(pidfd)
        return part.pidfd

    def _make_sure_of_room(self, fds: int = 1) -> None:
        if fds > 0 and self._spare() < fds:
            raise Refuse(
                f"{self.descriptors} fds of instances are kept, more would leave none for "
                "clients; raise ulimit -n"
            )

    def _whole(self, instance: m.InstanceId) -> RegisteredInstance:
        registered = self._of.get(instance)
        if registered is None:
            raise Refuse("it is not here, or not any more")
        if missing := registered.missing():
            raise Refuse(f"{missing} is not here yet, or not any more")
        return registered

    def _cache(self, instance: m.InstanceId, rank: int) -> WorkerPart:
        registered = self._whole(instance)
        if rank not in registered.caches or registered.caches[rank].peer is None:
            raise Refuse("it has no such rank")
        return registered.caches[rank]

    def _changed(self, instance: m.InstanceId) -> None:
        """Update the instance after a part came or went."""
        registered = self._of[instance]
        if all(part.peer is None for _, part in registered.parts()):
            del self._of[instance]
            self._residents.close(instance)
            for cache in registered.caches.values():
                self._residents.charge(cache.owner, -cache.nbytes)
        else:
            self._residents.show(instance, not registered.missing())


def _say(client: Peer, instance: m.InstanceId, rank: int, what: str) -> None:
    """Log a change of one part of an instance."""
    part = "scheduler" if rank == m.SCHEDULER else f"rank {rank}"
    with caused_by(client.caller):
        log.info(
            "instance %s: %s (pid %d on %s) %s",
            instance.hex()[:8],
            part,
            client.process.pid,
            client.device,
            what,
        )
