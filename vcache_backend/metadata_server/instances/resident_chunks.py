"""Which chunks lie in which instances' own KV caches, as the instances have published them. A pure
state machine: no socket, no fd.

Nothing here is a promise, since an instance may reuse a block at any time. Its generation table
tells a reader, before and after a read."""

from __future__ import annotations

import random
from collections import Counter

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.instances.publications import (
    BLOCK_BYTES,
    PublishedChunk,
    Residence,
    Table,
    shape,
)
from vcache_backend.metadata_server.messages import of_rank
from vcache_backend.metadata_server.pool.backlog import Backlog, Steps
from vcache_backend.metadata_server.pool.chunks import Chunks
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.shares import Shares

MAX_BYTES = 1 << 30
"""About the most memory of the server that all instances take together. The process of one
scheduler has at most half of it.
"""
MAX_CELLS = 16_384
"""The most keys times instances in one look-up; the keys beyond are left for the next one."""
FOUND_BYTES = m.MAX_MESSAGE_BYTES - 8192
"""Bytes for the residents of one answer; the rest of the message is for what comes with them."""
_RESIDENT_BYTES = 16
"""The most bytes of a resident in a message, besides its blocks and generations."""


Column = list[PublishedChunk | None]
"""What one instance has of each key of a look-up."""


class Residents:
    """What all instances have published. `max_chunks`: the most chunks of all instances
    together.
    """

    def __init__(self, backlog: Backlog, counters: Counter[str], max_chunks: int) -> None:
        self._backlog, self._counters, self._max_chunks = backlog, counters, max_chunks
        self._of: dict[m.InstanceId, Residence] = {}
        self.shares = Shares(MAX_BYTES, process=1, user=1 / 4)
        """The bytes that each scheduler's process holds with its instances, and each worker's with
        what it shows of its cache.
        """

    def count(self, instance: m.InstanceId) -> int:
        """The number of chunks that are found in an instance, once all of it is shown."""
        residence = self._of.get(instance)
        return 0 if residence is None else len(residence.found)

    def room(self, owner: Peer) -> int:
        """How many more bytes the process of this scheduler or worker may hold."""
        return self.shares.room(owner.process, owner.user)

    def charge(self, owner: Peer, nbytes: int) -> None:
        """Note that it holds so many more."""
        self.shares.take(owner.process, owner.user, nbytes)

    def lacks(self, owner: Peer, join: m.Join) -> int:
        """How many bytes there are too few for the tables of an instance that is to be opened."""
        known = self._of.get(join.instance)
        there = known is not None and known.shape == shape(join)
        return 0 if there else max(0, join.blocks * BLOCK_BYTES - self.room(owner))

    def open(self, owner: Peer, join: m.Join) -> None:
        """Begin an instance. What it published before stays, unless its shape has changed."""
        known = self._of.get(join.instance)
        if known is None or known.shape != shape(join):
            self.close(join.instance)
            self._of[join.instance] = Residence(owner, join)
            self._settle(self._of[join.instance])

    def show(self, instance: m.InstanceId, whole: bool) -> None:
        """Set whether an instance's chunks are found."""
        if (residence := self._of.get(instance)) is not None:
            residence.whole = whole

    def empty(self, instance: m.InstanceId) -> None:
        """Forget everything that an instance has published."""
        if (residence := self._of.get(instance)) is not None:
            self._forget(residence, residence.clear())

    def close(self, instance: m.InstanceId) -> None:
        """Remove an instance that is gone."""
        self.empty(instance)
        if (residence := self._of.pop(instance, None)) is not None:
            residence.closed = True
            self._settle(residence)

    def publish(self, rank: int, request: m.Publish) -> int:
        """Publish chunks of an instance. Returns how many were taken; 0 if it has not joined.
        Refuse: impossible lengths or numbers.
        """
        residence = self._of.get(request.instance)
        if residence is None:
            return 0
        room = self._max_chunks - sum(map(len, self._of.values()))
        taken = residence.publish(
            rank, request, max(0, min(room, self.room(residence.owner) // residence.chunk_bytes))
        )
        self._settle(residence)
        self._counters["published"] += taken
        return taken

    def retract(self, instance: m.InstanceId, sequence: int) -> int:
        """Void what an instance publishes with a lower sequence. Returns how many chunks it had
        published so.
        """
        residence = self._of.get(instance)
        if residence is None:
            return 0
        tables = residence.retract(sequence)
        self._forget(residence, tables)
        return sum(map(len, tables))

    def clear(self, namespace: bytes) -> int:
        """Forget what is resident of a namespace, of all with b"". Returns how many chunks."""
        dropped = 0
        for residence in self._of.values():
            if not namespace or residence.namespace == namespace:
                tables = residence.clear()
                dropped += len(tables[0])
                self._forget(residence, tables)
        return dropped

    def _forget(self, residence: Residence, tables: tuple[Table, Table]) -> None:
        """Remove void chunks from memory in later turns. Their owner is charged for them until
        then.
        """
        if any(tables):  # else anybody could add to the backlog faster than it is done
            self._backlog.later(self._forgetting(residence, tables))

    def _forgetting(self, residence: Residence, tables: tuple[Table, Table]) -> Steps:
        for _ in residence.forget(tables):
            self._settle(residence)
            yield
        self._settle(residence)

    def _settle(self, residence: Residence) -> None:
        """Charge its owner for what it holds now."""
        if change := residence.nbytes - residence.charged:
            residence.charged += change
            self.charge(residence.owner, change)

    # ---- what others read

    def hint(self, instance: m.InstanceId, keys: list[m.ChunkKey]) -> int:
        """Note that the prefix of these chunks is read in an instance. Returns how many of them are
        found there.
        """
        residence = self._of.get(instance)
        noted = residence.recency.note(keys, residence.found) if residence is not None else 0
        self._counters["hints"] += noted
        return noted

    def heard(self, instance: m.InstanceId, epoch: int) -> m.Heard:
        """What an instance's scheduler has yet to hear, with as many hints as the message holds."""
        residence = self._of[instance]
        keys = residence.recency.take(
            FOUND_BYTES // (residence.each * (m.NUMBER_BYTES + m.GENERATION_BYTES))
        )
        read = [one for key in keys if (one := residence.found.get(key)) is not None]
        return m.Heard(
            epoch, b"".join(one.blocks for one in read), b"".join(one.generations for one in read)
        )

    # ---- look-up

    def find(self, request: m.Find, pooled: Chunks) -> m.Found:
        """Find which leading chunks are in the pool for all ranks, or resident in an instance other
        than the asker.
        """
        others = self._others(request)
        keys = request.keys[: MAX_CELLS // max(1, len(others))]
        columns = {
            instance: column for instance, found in others if (column := _column(found, keys))
        }
        if columns:
            each = max(self._of[instance].each for instance in columns)
            found = _assemble(_present(keys, request.ranks, pooled), columns, each)
        else:
            chunks = pooled.leading_of_all(keys, request.ranks)
            found = m.Found(b"\1" * chunks, [], [[]] * chunks)
        return (
            msgspec.structs.replace(found, cut=True)
            if len(found.pooled) == len(keys) < len(request.keys)
            else found
        )

    def _others(
        self, request: m.Find
    ) -> list[tuple[m.InstanceId, dict[m.ChunkKey, PublishedChunk]]]:
        """What is found in each instance that may have some of the keys, in random order."""
        if not self._of or not request.keys:
            return []
        namespace, ranks, asker = (
            request.keys[0][: m.NAMESPACE_BYTES],
            request.ranks,
            request.instance,
        )
        others = [
            (instance, residence.found)
            for instance, residence in self._of.items()
            if residence.found and residence.whole and residence.namespace == namespace
            if residence.ranks == ranks and instance != asker
        ]
        random.shuffle(others)
        return others


def _column(found: dict[m.ChunkKey, PublishedChunk], keys: list[m.ChunkKey]) -> Column:
    """What one instance has of each key; empty if it has none of them."""
    column = list(map(found.get, keys))
    return column if column.count(None) < len(column) else []


def _present(keys: list[m.ChunkKey], ranks: int, pooled: Chunks) -> list[bool]:
    """For each chunk whether it is in the pool for all ranks."""
    there = list(map(pooled.among(keys).__contains__, keys))
    for rank in range(1, ranks):
        if not any(there):
            break
        its = of_rank(keys, rank)
        there = [
            a and b for a, b in zip(there, map(pooled.among(its).__contains__, its), strict=True)
        ]
    return there


def _assemble(there: list[bool], columns: dict[m.InstanceId, Column], each: int) -> m.Found:
    """Build the answer, up to the first chunk that is nowhere or that no longer fits the message.
    `each`: the most blocks of a chunk.
    """
    residents: list[list[m.Resident]] = []
    left, last = FOUND_BYTES // (_RESIDENT_BYTES + each * (m.NUMBER_BYTES + m.GENERATION_BYTES)), 0
    for pooled, row in zip(there, zip(*columns.values(), strict=True), strict=True):
        here = _places(row, last)
        if not here and not pooled:
            break
        left -= len(here)
        if left < 0:
            return m.Found(bytes(there[: len(residents)]), list(columns), residents, cut=True)
        if here:
            last = here[0].instance
        residents.append(here)
    return m.Found(bytes(there[: len(residents)]), list(columns), residents)


def _places(row: tuple[PublishedChunk | None, ...], last: int) -> list[m.Resident]:
    """Where one chunk is resident, `MAX_REPLICAS` places at most: `last` first, if it is among
    them.
    """
    one = row[last]
    here = [m.Resident(last, one.blocks, one.generations)] if one is not None else []
    for at, one in enumerate(row) if len(row) > 1 else ():
        if one is not None and at != last:
            here.append(m.Resident(at, one.blocks, one.generations))
            if len(here) == m.MAX_REPLICAS:
                break
    return here
