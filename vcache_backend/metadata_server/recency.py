"""Which chunks of one instance others have read lately, for its scheduler to hear: vLLM does not see those reads."""

from __future__ import annotations

from collections.abc import Container
from itertools import islice

from vcache_backend.metadata_server import messages as m

MAX_HINTS = 2048
"""Chunks that are kept between two heartbeats of an instance; of more those read longest ago are dropped."""


class Recency:
    """Each chunk once, the one that should stay longest last: of a prefix its first one. Pure."""

    def __init__(self) -> None:
        self._keys: dict[m.ChunkKey, None] = {}

    def note(self, keys: list[m.ChunkKey], there: Container[m.ChunkKey]) -> int:
        """These were read, in prefix order; how many of them are `there`, and noted."""
        before, noted = self._keys, [key for key in reversed(keys) if key in there]
        for key in noted:
            before.pop(key, None)
            before[key] = None
        for key in list(islice(before, max(0, len(before) - MAX_HINTS))):
            del before[key]
        return len(noted)

    def take(self, most: int) -> list[m.ChunkKey]:
        """The first `most`, which are to be forgotten here."""
        taken = list(islice(self._keys, most))
        for key in taken:
            del self._keys[key]
        return taken
