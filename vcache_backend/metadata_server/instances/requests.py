"""Answers requests about instances that share in place (the client's side is `InstanceCalls`)."""

from __future__ import annotations

from typing import assert_never

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.instances.reads import ReadReports
from vcache_backend.metadata_server.instances.registry import InstanceRegistry
from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.refuse import Refuse
from vcache_backend.metadata_server.serving.connection import Answer


class InstanceService:
    """The part of `Service` that answers requests about instances; its contract holds here."""

    def __init__(self, directory: Directory, instances: InstanceRegistry) -> None:
        self.directory, self.instances = directory, instances
        self.reads = ReadReports()

    def shown(self, client: Peer, request: m.OfInstances, fds: list[int]) -> Answer:
        """Register or open a part of an instance. A refusal names the request and the part."""
        try:
            return self._shown(client, request, fds)
        except Refuse as refusal:
            rank = getattr(request, "rank", None)
            part = request.instance.hex() + ("" if rank is None else f", rank {rank}")
            raise Refuse(f"{request.__struct_config__.tag} {part}: {refusal}") from refusal

    def _shown(self, client: Peer, request: m.OfInstances, fds: list[int]) -> Answer:
        instances = self.instances
        match request:
            case m.Join():
                return instances.join(client, request, fds), ()
            case m.ShowCache():
                return instances.show_cache(client, request, fds), ()
            case m.OpenInstance(instance):
                return instances.open(instance)
            case m.OpenCache(instance, rank):
                return instances.open_cache(client, instance, rank)
            case m.CloseInstance(instance):
                return instances.close_instance(client, instance), ()
            case _:
                assert_never(request)

    def resident(self, client: Peer, request: m.OfResidents) -> m.Reply:
        """Answer requests about resident chunks and their readers."""
        epochs, residents = self.directory.epochs, self.directory.residents
        match request:
            case m.Find() | m.Promise() if len(request.keys) * request.ranks > m.MAX_LOOKED_UP:
                raise Refuse(
                    f"{request.__struct_config__.tag}: {len(request.keys):,} keys of "
                    f"{request.ranks:,} ranks; at most {m.MAX_LOOKED_UP:,} keys times ranks at once"
                )
            case m.Find():
                return self._find(client, request)
            case m.Promise():
                return self.directory.promise(client, request)
            case m.Publish():
                right = request.epoch == epochs.of(request.keys)
                return self.instances.publish(client, request) if right else m.Count(0)
            case m.Retract():
                self.directory.promises.drop_client(client)
                return self.instances.retract(client, request)
            case m.Listen(instance):
                namespace = self.instances.listens(client, instance)
                return residents.heard(instance, epochs.of([m.ChunkKey(namespace)]))
            case m.Hint(instance, keys):
                return m.Count(residents.hint(instance, keys))
            case m.ShowReads(reads, instance):
                return self.reads.note(client, instance, reads)
            case _:
                assert_never(request)

    def disconnect(self, client: Peer) -> None:
        """Forget a closed connection."""
        self.reads.disconnect(client)
        self.instances.disconnect(client)

    def _find(self, client: Peer, request: m.Find) -> m.Reply:
        keys, directory = request.keys, self.directory
        answer, epoch = directory.find(request), directory.epochs.of(keys)
        missing = [] if answer.cut else keys[len(answer.pooled) :]
        coming = directory.promises.coming(client, missing)
        if request.promise and coming is not None:
            # Who waits computes nothing yet.
            directory.promises.begin(client, m.Promise(request.promise), {})
        elif request.promise and missing:
            lacking = directory.lacking(request, missing)
            directory.promises.intend(client, request.promise, lacking, request.ranks)
        if coming is None and not epoch:
            return answer
        return msgspec.structs.replace(answer, epoch=epoch, coming=coming)
