"""The chunks that an instance has published, and copies of them in other instances. Pure."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable
from itertools import islice, repeat

import msgspec

from vcache_backend.errors import Refused
from vcache_backend.metadata_server.pool.backlog import Steps
from vcache_backend.protocol import messages as m

RETRACT_LOOKS = 4096
"""How many of the newest publications a retraction examines. A retraction drops all older
publications unexamined; a chunk dropped without need is a miss."""
CHUNK_BYTES, BLOCK_BYTES = 320, 136
"""Bytes of server memory for each chunk, besides its block numbers and generations, and for each
block of an instance. The latter pays for `holders` and both tables, which never shrink."""
MAX_COPIES = 2048
"""The most copies of which an instance has yet to be told. Older copies are dropped."""


class PublishedChunk(msgspec.Struct, gc=False, eq=False):
    """A chunk in an instance's KV cache. `key`: of rank 0. `agreed`: a bit for each rank that has
    published the chunk with the same blocks and generations."""

    key: m.ChunkKey
    blocks: bytes
    generations: bytes
    sequence: int
    agreed: int

    def end(self) -> bytes:
        """The number and the generation of the chunk's last block, packed."""
        return self.blocks[-m.NUMBER_BYTES :] + self.generations[-m.GENERATION_BYTES :]


Table = dict[m.ChunkKey, PublishedChunk]
News = tuple[m.InstanceId, m.ChunkKey, bytes]
"""An instance, a chunk that this instance holds, too, and the chunk's `COPY`."""


class InstancePublications:
    """All publications of one instance. A block is in at most one chunk, so the number of blocks
    bounds the number of chunks."""

    def __init__(self, join: m.Join) -> None:
        self.join = join
        self.namespace, self.blocks = join.namespace, join.blocks
        self.ranks, self.each = join.ranks, join.each
        self.whole = False
        """Whether every part of the instance is shown. Look-ups skip the instance until then."""
        self.complete: Table = {}
        self.awaited: Table = {}
        """Chunks that some ranks have published, but not yet all."""
        self.holders: list[PublishedChunk | None] = [None] * self.blocks
        """For each block the last publication that named it, void if in neither table."""
        self._copies = deque[News](maxlen=MAX_COPIES)
        """The oldest first."""
        self.chunk_bytes = CHUNK_BYTES + self.each * (m.NUMBER_BYTES + m.GENERATION_BYTES)
        self.closed = False
        self.counted = 0
        """The bytes of these publications that `ResidentDirectory.nbytes` includes."""
        self._kept = 0
        """The number of chunks in memory: chunks in the tables, and void chunks that `forget` has
        yet to remove."""
        self._all_ranks = (1 << self.ranks) - 1
        self._floor = 0

    def __len__(self) -> int:
        return len(self.complete) + len(self.awaited)

    @property
    def nbytes(self) -> int:
        """About how many bytes of server memory the publications take."""
        kept = self._kept * self.chunk_bytes
        return kept if self.closed and not kept else kept + self.blocks * BLOCK_BYTES

    def publish(self, rank: int, request: m.Publish, most: int) -> int:
        """Take chunks that a rank publishes. Returns how many were taken.

        most: by how many chunks the instance may grow; then a chunk must replace another."""
        each, sequence = self.each, request.sequence
        numbers = self._numbers(rank, request)
        if sequence < self._floor:
            return 0
        taken, limit = 0, len(self) + most
        for at, key in enumerate(m.of_rank(request.keys, 0)):
            part = slice(at * each, (at + 1) * each)
            blocks = request.blocks[part.start * m.NUMBER_BYTES : part.stop * m.NUMBER_BYTES]
            generations = request.generations[
                part.start * m.GENERATION_BYTES : part.stop * m.GENERATION_BYTES
            ]
            chunk = PublishedChunk(key, blocks, generations, sequence, 1 << rank)
            taken += self._take(chunk, numbers[part], full=len(self) >= limit)
        return taken

    def retract(self, sequence: int) -> tuple[Table, Table]:
        """Void publications with a lower sequence. Returns the void chunks, for `forget`."""
        self._floor = max(self._floor, sequence)
        self.complete, complete = _split(self.complete, sequence)
        self.awaited, awaited = _split(self.awaited, sequence)
        return complete, awaited

    def clear(self) -> tuple[Table, Table]:
        """Void all publications. Returns the complete and the awaited chunks, for `forget`."""
        tables = self.complete, self.awaited
        self.complete = {}
        self.awaited = {}
        return tables

    def forget(self, tables: tuple[Table, ...]) -> Steps:
        """Remove void publications from memory. A publication with more blocks takes more steps."""
        for table in tables:
            while table:
                self._vacate(table.popitem()[1])
                self._kept -= 1
                yield from repeat(None, 1 + self.each // 8)

    def note_copies(
        self, instance: m.InstanceId, theirs: Table, keys: Iterable[m.ChunkKey]
    ) -> None:
        """Note that `instance` holds these chunks, too. theirs: its complete chunks."""
        # Packed here, and not when they are told: a scheduler waits for that.
        for key in keys:
            own = self.complete[key]
            packed = own.end() + own.blocks[: m.NUMBER_BYTES] + theirs[key].end()
            self._copies.append((instance, key, packed))

    def take_copies(self, most: int) -> list[News]:
        """Take the oldest notes, at most `most`."""
        return [self._copies.popleft() for _ in range(min(most, len(self._copies)))]

    # ---- inside

    def _numbers(self, rank: int, request: m.Publish) -> tuple[int, ...]:
        """Unpack a request's block numbers. Refuse a request that does not fit this instance."""
        due, namespace = len(request.keys) * self.each, self.namespace
        sizes = len(request.blocks), len(request.generations)
        if sizes != (due * m.NUMBER_BYTES, due * m.GENERATION_BYTES):
            raise Refused(f"publish: {sizes} B of numbers and generations for {due:,} blocks")
        suffix = rank.to_bytes(m.RANK_BYTES, "big")
        if not all(key.startswith(namespace) and key.endswith(suffix) for key in request.keys):
            raise Refused(f"publish: keys not of namespace {namespace.hex()}, rank {rank}")
        if rank >= self.ranks:
            raise Refused(f"publish: rank {rank} of an instance that joined with {self.ranks}")
        numbers = struct.unpack(f"<{due}I", request.blocks)
        if numbers and max(numbers) >= self.blocks:
            raise Refused(f"publish: block {max(numbers):,} of an instance with {self.blocks:,}")
        return numbers

    def _take(self, new: PublishedChunk, numbers: tuple[int, ...], full: bool) -> bool:
        """Take one chunk. Returns False, and takes nothing, if the chunk names a block twice, or if
        a newer publication has its key or one of its blocks.

        full: take the chunk only if it replaces another."""
        complete, awaited, holders = self.complete, self.awaited, self.holders
        key = new.key
        old = complete.get(key) or awaited.get(key)
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
            (complete if complete.get(rival.key) is rival else awaited).pop(rival.key)
            self._vacate(rival)
        for block in numbers:
            holders[block] = new
        (complete if self.ranks == 1 else awaited)[key] = new
        return True

    def _agree(self, old: PublishedChunk, new: PublishedChunk) -> bool:
        """A rank publishes the same chunk as `old`. False if `old` is newer and awaited."""
        if self.complete.get(old.key) is old:
            old.sequence = max(old.sequence, new.sequence)
            return True
        if new.sequence < old.sequence:
            return False
        old.agreed = new.agreed | (old.agreed if new.sequence == old.sequence else 0)
        old.sequence = new.sequence
        if old.agreed == self._all_ranks:
            self.complete[old.key] = self.awaited.pop(old.key)
        return True

    def _has(self, chunk: PublishedChunk) -> bool:
        return self.complete.get(chunk.key) is chunk or self.awaited.get(chunk.key) is chunk

    def _vacate(self, chunk: PublishedChunk) -> None:
        holders = self.holders
        for block in struct.unpack(f"<{self.each}I", chunk.blocks):
            if holders[block] is chunk:
                holders[block] = None


def _split(table: Table, sequence: int) -> tuple[Table, Table]:
    """Split a table into chunks whose sequence is at least `sequence`, and older chunks. The given
    table becomes one of the two results."""
    newest = list(islice(reversed(table.values()), RETRACT_LOOKS))
    kept = {chunk.key: chunk for chunk in reversed(newest) if chunk.sequence >= sequence}
    if len(table) > 2 * RETRACT_LOOKS:
        for key in kept:
            del table[key]
        return kept, table
    void = {key: chunk for key, chunk in table.items() if key not in kept}
    for key in void:
        del table[key]
    return table, void
