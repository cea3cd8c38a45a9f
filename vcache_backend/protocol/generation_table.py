"""A table of generations, as its owner lays it out and all others map it: a page with the header,
then a counter for each block of a KV cache, or for each slot of a segment. See
`vram_pool.generations`, and `metadata_server.slots` for what follows in a segment's table."""

from __future__ import annotations

import hashlib
import mmap
import os
import struct

from vcache_backend.errors import SegmentError, raising_as
from vcache_backend.protocol.messages import INSTANCE_BYTES, MAX_BLOCKS
from vcache_backend.seals import FUTURE_WRITE, RESIZING, lacking

HEADER = struct.Struct(f"<8sII{INSTANCE_BYTES}sQ")
"""Magic, version, 1 once the owner has given the table up, whose table it is, number of
generations."""
DEAD_AT = 12
MAGIC, VERSION = b"vcache-g", 3
SLOTS = 1 << 20
"""The slots of a segment's table. Pages that nobody has written take no memory."""
SEALS = RESIZING | FUTURE_WRITE
"""The seals that every reader demands: a table with other writers proves nothing."""


def nbytes(blocks: int) -> int:
    """Bytes of a table, in whole pages: the header and the counters."""
    return mmap.PAGESIZE * (1 + -(-blocks * 8 // mmap.PAGESIZE))


def owner(segment: str) -> bytes:
    """What the header of a segment's table says of whose it is."""
    return hashlib.sha256(segment.encode()).digest()[:INSTANCE_BYTES]


def mapped(fd: int, instance: bytes, blocks: int) -> mmap.mmap:
    """Map the table behind the caller's `fd` for reading. Raises SegmentError unless it is the
    sealed table of `instance` with `blocks` blocks.

    Checks size and seals first: a mapping that shrinks would kill this process."""
    with raising_as(SegmentError, "generation table", OSError):
        _check(fd, blocks)
        # Map all pages now: otherwise the first readers would wait for each page.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = mmap.mmap(fd, nbytes(blocks), flags=flags, prot=mmap.PROT_READ)
    magic, version, _, theirs, count = HEADER.unpack_from(memory)
    if magic != MAGIC or version != VERSION:
        raise SegmentError(
            f"generation table: begins with {magic!r}, version {version}, not {MAGIC!r}, "
            f"{VERSION}; install the same vcache-backend"
        )
    if theirs != instance or count != blocks:
        raise SegmentError(
            f"generation table: of instance {theirs.hex()} with {count:,} blocks, not of "
            f"{instance.hex()} with {blocks:,}"
        )
    return memory


def _check(fd: int, blocks: int) -> None:
    """Refuse a table of the wrong size, and a table that other processes could shrink or write to.
    Raises SegmentError, OSError."""
    if reason := lacking(fd, SEALS):
        raise SegmentError(f"generation table: {reason}")
    size = os.fstat(fd).st_size
    if not 0 < blocks <= MAX_BLOCKS or size != nbytes(blocks):
        raise SegmentError(
            f"generation table: fd {fd} holds {size:,} B, but one of {blocks:,} blocks has "
            f"{nbytes(blocks):,}"
        )
