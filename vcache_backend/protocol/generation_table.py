"""A table of generations, as its owner lays it out and all others map it: a page with the header,
then a counter for each block of a KV cache, or for each slot of a segment. See
`vram_pool.generations`, and `metadata_server.slots` for what follows in a segment's table."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.protocol.messages import INSTANCE_BYTES
from vcache_backend.seals import FUTURE_WRITE, RESIZING, lacking

HEADER = struct.Struct(f"<8sII{INSTANCE_BYTES}sQ")
"""Magic, version, 1 once the owner has given the table up, whose table it is, number of
generations."""
DEAD_AT = 12
MAGIC, VERSION = b"vcache-g", 3
SLOTS = 1 << 20
"""The slots of a segment's table. Pages that nobody has written take no memory."""
SEALS = RESIZING | FUTURE_WRITE
"""The seals of a KV cache's table: one with other writers proves nothing."""


def nbytes(blocks: int) -> int:
    """Bytes of a table, in whole pages: the header and the counters."""
    return mmap.PAGESIZE * (1 + -(-blocks * 8 // mmap.PAGESIZE))


def owner_of(segment: str) -> bytes:
    """What the header of a segment's table says of whose it is."""
    return hashlib.sha256(segment.encode()).digest()[:INSTANCE_BYTES]


def header(owner: bytes, count: int) -> bytes:
    """The header of a new table."""
    return HEADER.pack(MAGIC, VERSION, 0, owner, count)


class ForeignTable:
    """Another process's table, mapped for reading as long as this object lives. Any thread.

    words: the counters."""

    def __init__(self, fd: int, owner: bytes, count: int, seals: int = SEALS) -> None:
        """Map the table behind the caller's `fd`. Raises SegmentError unless it is sealed, belongs
        to `owner`, an instance or a segment (see `owner_of`), and has `count` generations.

        Checks size and seals first: a mapping that shrinks would kill this process."""
        with raising_as(SegmentError, "generation table", OSError):
            size, held = nbytes(count), os.fstat(fd).st_size
            if reason := lacking(fd, seals):
                raise SegmentError(f"generation table: {reason}")
            if held < size:
                lacks = f"fd {fd} has {held:,} B, and {count:,} generations need {size:,}"
                raise SegmentError(f"generation table: {lacks}")
            # Map all pages of a KV cache's table now: the first readers would wait for each.
            flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if seals == SEALS else 0)
            memory = memoryview(mmap.mmap(fd, size, flags=flags, prot=mmap.PROT_READ))
        magic, version, _, theirs, here = HEADER.unpack_from(memory)
        if (magic, version, theirs, here) != (MAGIC, VERSION, owner, count):
            found = f"{here:,} generations of {theirs.hex()}, {magic!r} {version}"
            wanted = f"{count:,} of {owner.hex()}, {MAGIC!r} {VERSION}"
            raise SegmentError(f"generation table: it has {found}; expected are {wanted}")
        self.words = memory[mmap.PAGESIZE :][: 8 * count].cast("Q")
        self._dead = memory[DEAD_AT:][:4].cast("I")

    @property
    def dead(self) -> bool:
        """Whether the owner gave the table up. A killed owner leaves its table alive."""
        return bool(self._dead[0])
