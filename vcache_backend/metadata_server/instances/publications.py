"""What one instance has published of its KV cache, and which of it others have read lately.
Pure.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from itertools import islice, repeat

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.pool.backlog import Steps
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.refuse import Refuse

RETRACT_LOOKS = 4096
"""How many of the newest publications a retraction looks through for those that stay. Older ones go
in any case, each a miss.
"""
CHUNK_BYTES, BLOCK_BYTES = 320, 136
"""What the server's memory holds of each chunk besides numbers and generations, and for each block
of an instance: its entry among the holders, and room in both tables, which do not shrink with what
is in them."""
MAX_HINTS = 2048
"""The most chunks kept between two heartbeats of an instance; beyond that, those read longest ago
are dropped.
"""
_FIRST_RANK = bytes(m.RANK_BYTES)


class PublishedChunk(msgspec.Struct, gc=False, eq=False):
    """One chunk in one instance's KV cache. `key`: of rank 0. `agreed`: a bit for each rank that
    has published the same.
    """

    key: m.ChunkKey
    blocks: bytes
    generations: bytes
    sequence: int
    agreed: int


Table = dict[m.ChunkKey, PublishedChunk]


class Residence:
    """What one instance has published. Each block is in at most one chunk, so its blocks bound the
    number of chunks.
    """

    def __init__(self, owner: Peer, join: m.Join) -> None:
        """owner: who has joined."""
        self.owner, self.shape = owner, shape(join)
        self.namespace, self.blocks, self.ranks, self.each = (
            join.namespace,
            join.blocks,
            join.ranks,
            join.each,
        )
        self.whole = False
        """Whether every part of the instance is shown; until then nothing of it is found."""
        self.found: Table = {}
        self.awaited: Table = {}
        """Chunks that only some of the ranks have published."""
        self.holders: list[PublishedChunk | None] = [None] * self.blocks
        """The publication that each block is in. One that is in neither table any more counts for
        nothing.
        """
        self.recency = Recency()
        self.chunk_bytes = CHUNK_BYTES + self.each * (m.NUMBER_BYTES + m.GENERATION_BYTES)
        self.closed = False
        self.charged = 0
        """The bytes that its owner was charged for."""
        self._kept = 0
        """The chunks in memory: those in the tables, and void ones that `forget` has not reached
        yet.
        """
        self._all_ranks = (1 << self.ranks) - 1
        self._floor = 0

    def __len__(self) -> int:
        return len(self.found) + len(self.awaited)

    @property
    def nbytes(self) -> int:
        """About how many bytes of the server's memory it takes."""
        kept = self._kept * self.chunk_bytes
        return kept if self.closed and not kept else kept + self.blocks * BLOCK_BYTES

    def publish(self, rank: int, request: m.Publish, most: int) -> int:
        """Take chunks that a rank publishes. Returns how many were taken. Its chunks become `most`
        more at most; then only those are taken that replace others."""
        each, sequence = self.each, request.sequence
        numbers = self._numbers(rank, request)
        if sequence < self._floor:
            return 0
        taken, limit = 0, len(self) + most
        for at, key in enumerate(request.keys):
            part = slice(at * each, (at + 1) * each)
            blocks = request.blocks[part.start * m.NUMBER_BYTES : part.stop * m.NUMBER_BYTES]
            generations = request.generations[
                part.start * m.GENERATION_BYTES : part.stop * m.GENERATION_BYTES
            ]
            first = m.ChunkKey(key[: -m.RANK_BYTES] + _FIRST_RANK) if rank else key
            full = len(self) >= limit
            taken += self._take(
                PublishedChunk(first, blocks, generations, sequence, 1 << rank), numbers[part], full
            )
        return taken

    def retract(self, sequence: int) -> tuple[Table, Table]:
        """Void publications with a lower sequence. Returns them, for `forget`."""
        self._floor = max(self._floor, sequence)
        self.found, found = _split(self.found, sequence)
        self.awaited, awaited = _split(self.awaited, sequence)
        return found, awaited

    def clear(self) -> tuple[Table, Table]:
        """Void everything. Returns it, for `forget`: what was found, and the rest."""
        tables = self.found, self.awaited
        self.found, self.awaited = {}, {}
        return tables

    def forget(self, tables: tuple[Table, ...]) -> Steps:
        """Remove void publications from memory. A publication takes more steps the more blocks it
        has.
        """
        for table in tables:
            while table:
                self._vacate(table.popitem()[1])
                self._kept -= 1
                yield from repeat(None, 1 + self.each // 8)

    # ---- inside

    def _numbers(self, rank: int, request: m.Publish) -> tuple[int, ...]:
        """The numbers of a publication's blocks. Refuse: lengths, keys or numbers that cannot be
        those of this instance.
        """
        due, namespace = len(request.keys) * self.each, self.namespace
        if (len(request.blocks), len(request.generations)) != (
            due * m.NUMBER_BYTES,
            due * m.GENERATION_BYTES,
        ):
            what = f"{len(request.keys)} keys of {self.each} blocks, but {len(request.blocks):,} B of numbers"
            size = f"{m.NUMBER_BYTES} and {m.GENERATION_BYTES} B a block"
            raise Refuse(
                f"publish: {what} and {len(request.generations):,} B of generations; {size} are due"
            )
        suffix = rank.to_bytes(m.RANK_BYTES, "big")
        if not all(key.startswith(namespace) and key.endswith(suffix) for key in request.keys):
            raise Refuse(
                f"publish: keys of other namespaces or ranks than {namespace.hex()} and {rank}"
            )
        if rank >= self.ranks:
            raise Refuse(f"publish: rank {rank} of an instance that joined with {self.ranks}")
        numbers = struct.unpack(f"<{due}I", request.blocks)
        if numbers and max(numbers) >= self.blocks:
            raise Refuse(f"publish: block {max(numbers):,} of an instance that has {self.blocks:,}")
        return numbers

    def _take(self, new: PublishedChunk, numbers: tuple[int, ...], full: bool) -> bool:
        """Take one chunk, unless a newer publication has its key or one of its blocks, or it has a
        block twice itself. full: unless it replaces none, too."""
        found, awaited, holders = self.found, self.awaited, self.holders
        key = new.key
        old = found.get(key) or awaited.get(key)
        if old is not None and old.blocks == new.blocks and old.generations == new.generations:
            return self._agree(old, new)
        rivals = {
            holder
            for block in numbers
            if (holder := holders[block]) is not None and self._has(holder)
        }
        if old is not None:
            rivals.add(old)
        if (
            any(rival.sequence > new.sequence for rival in rivals)
            or len(set(numbers)) < len(numbers)
            or (full and not rivals)
        ):
            return False
        self._kept += 1 - len(rivals)
        for rival in rivals:
            (found if found.get(rival.key) is rival else awaited).pop(rival.key)
            self._vacate(rival)
        for block in numbers:
            holders[block] = new
        (found if self.ranks == 1 else awaited)[key] = new
        return True

    def _agree(self, old: PublishedChunk, new: PublishedChunk) -> bool:
        """A rank publishes what the instance has published already, by this rank or by another
        one.
        """
        if self.found.get(old.key) is old:
            old.sequence = max(old.sequence, new.sequence)
            return True
        if new.sequence < old.sequence:
            return False
        old.agreed = new.agreed | (old.agreed if new.sequence == old.sequence else 0)
        old.sequence = new.sequence
        if old.agreed == self._all_ranks:
            self.found[old.key] = self.awaited.pop(old.key)
        return True

    def _has(self, one: PublishedChunk) -> bool:
        return self.found.get(one.key) is one or self.awaited.get(one.key) is one

    def _vacate(self, one: PublishedChunk) -> None:
        """Release all blocks of this publication."""
        holders = self.holders
        for block in struct.unpack(f"<{self.each}I", one.blocks):
            if holders[block] is one:
                holders[block] = None


def shape(join: m.Join) -> m.Join:
    """What must be the same for publications to stay: all but the instance's name."""
    return msgspec.structs.replace(join, instance=m.InstanceId(b""))


def _split(table: Table, sequence: int) -> tuple[Table, Table]:
    """Those chunks of a table whose sequence is no lower, and the others. The table becomes one of
    the two.
    """
    newest = list(islice(reversed(table.values()), RETRACT_LOOKS))
    kept = {one.key: one for one in reversed(newest) if one.sequence >= sequence}
    if len(table) > 2 * RETRACT_LOOKS:
        for key in kept:
            del table[key]
        return kept, table
    void = {key: one for key, one in table.items() if key not in kept}
    for key in void:
        del table[key]
    return table, void


class Recency:
    """Which chunks of an instance others have read lately, for its scheduler to hear, since vLLM
    does not see those reads.

    Each chunk is there once. The one that should stay longest comes last: of a prefix, its first
    chunk."""

    def __init__(self) -> None:
        self._keys: dict[m.ChunkKey, None] = {}

    def note(self, keys: list[m.ChunkKey], there: Container[m.ChunkKey]) -> int:
        """Note reads of these chunks, in prefix order. Returns how many of them are `there`, and
        noted.
        """
        before, noted = self._keys, [key for key in reversed(keys) if key in there]
        for key in noted:
            before.pop(key, None)
            before[key] = None
        for key in list(islice(before, max(0, len(before) - MAX_HINTS))):
            del before[key]
        return len(noted)

    def take(self, most: int) -> list[m.ChunkKey]:
        """Take out the first `most`."""
        taken = list(islice(self._keys, most))
        for key in taken:
            del self._keys[key]
        return taken
