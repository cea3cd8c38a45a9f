"""What one instance has published of its KV cache, and which of it others have read lately. Pure."""

from __future__ import annotations

import struct
from collections.abc import Container
from itertools import islice, repeat

import msgspec

from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server.backlog import Steps
from vcache_backend.metadata_server.refuse import Refuse

RETRACT_LOOKS = 4096
"""How many of the newest publications a retraction looks through for those that stay. Older ones go in any case, each a miss."""
MAX_HINTS = 2048
"""The most chunks kept between two heartbeats of an instance; beyond that, those read longest ago are dropped."""
_FIRST_RANK = bytes(m.RANK_BYTES)


class PublishedChunk(msgspec.Struct, gc=False, eq=False):
    """One chunk in one instance's KV cache. `key`: of rank 0. `agreed`: a bit for each rank that has published the same."""

    key: m.ChunkKey
    blocks: bytes
    generations: bytes
    sequence: int
    agreed: int


class Residence:
    """What one instance has published. Each block is in the lead of at most one chunk, so its blocks bound all tables."""

    def __init__(self, namespace: bytes, blocks: int, ranks: int, each: int, lead: int = 0) -> None:
        """lead: see `Join`."""
        self.shape = namespace, blocks, ranks, each, lead
        self.namespace, self.blocks, self.ranks, self.each, _ = self.shape
        self._lead = lead or each
        self.whole = False
        """Whether every part of the instance is shown; until then nothing of it is found."""
        self.found: dict[m.ChunkKey, PublishedChunk] = {}
        self.awaited: dict[m.ChunkKey, PublishedChunk] = {}
        """Chunks that only some of the ranks have published."""
        self.holders: list[PublishedChunk | None] = [None] * blocks
        """The publication whose lead each block is in. One that is in neither table any more counts for nothing."""
        self.recency = Recency()
        self._all_ranks = (1 << ranks) - 1
        self._floor = 0

    def __len__(self) -> int:
        return len(self.found) + len(self.awaited)

    def publish(self, rank: int, request: m.Publish, most: int) -> int:
        """Take chunks that a rank publishes, `most` new ones at most. Returns how many were taken."""
        each, sequence = self.each, request.sequence
        numbers = self._numbers(rank, request)
        if sequence < self._floor:
            return 0
        taken, limit = 0, len(self) + most
        for at, key in enumerate(request.keys):
            if len(self) >= limit:
                break
            part = slice(at * each, (at + 1) * each)
            blocks = request.blocks[part.start * m.NUMBER_BYTES : part.stop * m.NUMBER_BYTES]
            generations = request.generations[part.start * m.GENERATION_BYTES : part.stop * m.GENERATION_BYTES]
            first = m.ChunkKey(key[: -m.RANK_BYTES] + _FIRST_RANK) if rank else key
            taken += self._take(PublishedChunk(first, blocks, generations, sequence, 1 << rank), numbers[part])
        return taken

    def retract(self, sequence: int) -> tuple[int, Steps]:
        """Void publications with a lower sequence. Returns how many there were, and the steps that clear them away."""
        self._floor = max(self._floor, sequence)
        tables = self.found, self.awaited
        self.found, self.awaited = {}, {}
        kept = 0
        for old, new in zip(tables, (self.found, self.awaited), strict=True):
            newest = list(islice(reversed(old.values()), RETRACT_LOOKS))
            new.update((one.key, one) for one in reversed(newest) if one.sequence >= sequence)
            kept += len(new)
        return sum(map(len, tables)) - kept, self._forget(tables)

    def clear(self) -> tuple[int, Steps]:
        """Forget everything. Returns how many chunks were found, and the steps that clear them away."""
        tables = self.found, self.awaited
        self.found, self.awaited = {}, {}
        return len(tables[0]), self._forget(tables)

    # ---- inside

    def _numbers(self, rank: int, request: m.Publish) -> tuple[int, ...]:
        """The numbers of a publication's blocks. Refuse: lengths, keys or numbers that cannot be those of this instance."""
        due, namespace = len(request.keys) * self.each, self.namespace
        if (len(request.blocks), len(request.generations)) != (due * m.NUMBER_BYTES, due * m.GENERATION_BYTES):
            what = f"{len(request.keys)} keys of {self.each} blocks, but {len(request.blocks):,} B of numbers"
            size = f"{m.NUMBER_BYTES} and {m.GENERATION_BYTES} B a block"
            raise Refuse(f"publish: {what} and {len(request.generations):,} B of generations; {size} are due")
        suffix = rank.to_bytes(m.RANK_BYTES, "big")
        if not all(key.startswith(namespace) and key.endswith(suffix) for key in request.keys):
            raise Refuse(f"publish: keys of other namespaces or ranks than {namespace.hex()} and {rank}")
        if rank >= self.ranks:
            raise Refuse(f"publish: rank {rank} of an instance that joined with {self.ranks}")
        numbers = struct.unpack(f"<{due}I", request.blocks)
        if numbers and max(numbers) >= self.blocks:
            raise Refuse(f"publish: block {max(numbers):,} of an instance that has {self.blocks:,}")
        return numbers

    def _take(self, new: PublishedChunk, numbers: tuple[int, ...]) -> bool:
        """Take one chunk, unless a newer publication has its key or, in its lead, one of its blocks, or its own lead has a block twice."""
        found, awaited, holders = self.found, self.awaited, self.holders
        key, lead = new.key, numbers[: self._lead]
        old = found.get(key) or awaited.get(key)
        if old is not None and old.blocks == new.blocks and old.generations == new.generations:
            return self._agree(old, new)
        rivals = {holder for block in numbers if (holder := holders[block]) is not None and self._has(holder)}
        if old is not None:
            rivals.add(old)
        if any(rival.sequence > new.sequence for rival in rivals) or len(set(lead)) < len(lead):
            return False
        for rival in rivals:
            (found if found.get(rival.key) is rival else awaited).pop(rival.key)
            self._vacate(rival)
        for block in lead:
            holders[block] = new
        (found if self.ranks == 1 else awaited)[key] = new
        return True

    def _agree(self, old: PublishedChunk, new: PublishedChunk) -> bool:
        """A rank publishes what the instance has published already, by this rank or by another one."""
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

    def _forget(self, tables: tuple[dict[m.ChunkKey, PublishedChunk], ...]) -> Steps:
        """Remove void publications, but for those that are kept. A publication takes more steps the more blocks it has."""
        for table in tables:
            while table:
                _, one = table.popitem()
                if not self._has(one):
                    self._vacate(one)
                yield from repeat(None, 1 + self.each // 8)


class Recency:
    """Which chunks of an instance others have read lately, for its scheduler to hear, since vLLM does not see those reads.

    Each chunk is there once. The one that should stay longest comes last: of a prefix, its first chunk.
    """

    def __init__(self) -> None:
        self._keys: dict[m.ChunkKey, None] = {}

    def note(self, keys: list[m.ChunkKey], there: Container[m.ChunkKey]) -> int:
        """Note reads of these chunks, in prefix order. Returns how many of them are `there`, and noted."""
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
