"""Where things lie in the table of a segment's slots: see metadata_server/slots.py, which
writes it. Clients map it for reading."""

from __future__ import annotations

import hashlib
import mmap
import struct

from vcache_backend.protocol.messages import INSTANCE_BYTES, KEY_BYTES

HEADER = struct.Struct(f"<8sII{INSTANCE_BYTES}sQ")
"""Of every table of generations: magic, version, 1 once the owner has given the table up, whose
table it is, number of generations. The generations begin on the next page."""
DEAD_AT = 12
MAGIC = b"vcache-s"
VERSION = 3
SLAB_SLOTS = 1 << 14
SLABS = 64
SLOTS = SLABS * SLAB_SLOTS
"""The generations of a table. Those of slab i begin at `i * SLAB_SLOTS`. Pages that nobody has
written take no memory."""

NBYTES_AT, SCOPE_AT = 40, 64
RECORD = struct.Struct(f"<{KEY_BYTES}s2xIQ16xQ")
"""Key, the writer's pid and start, and the number of the fill."""
RECORD_WORDS = RECORD.size // 8
SLAB = struct.Struct("<3Q")
"""Offset in the segment, bytes of a slot, bytes of the slab (stored last)."""
GENERATIONS_AT = mmap.PAGESIZE
RECORDS_AT = GENERATIONS_AT + 8 * SLOTS
SLABS_AT = RECORDS_AT + RECORD.size * SLOTS
TABLE_BYTES = SLABS_AT + mmap.PAGESIZE
GENERATIONS, NUMBERS = GENERATIONS_AT // 8, RECORDS_AT // 8 + RECORD_WORDS - 1


def owner(segment: str) -> bytes:
    """What a table's header says of whose it is."""
    return hashlib.sha256(segment.encode()).digest()[:INSTANCE_BYTES]
