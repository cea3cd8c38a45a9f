"""The chunks of a `retrieve`: the first ones at once, all of them while the copy of the first
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.places import SlotPlaces


class Wanted(NamedTuple):
    """Chunks and the places they are copied to."""

    keys: list[ChunkKey]
    places: SlotPlaces


class Rest:
    """All chunks of a request, of which the first ones are known. They are worked out once. A
    ValueError is kept until `check`, since copies are under way by then."""

    def __init__(self, head: Wanted, look: Callable[[], Wanted]) -> None:
        self.known, self._look = head, look
        self._looked, self._wrong = False, list[ValueError]()

    def look(self) -> Wanted:
        """All chunks; only the first ones if the arguments for the others are wrong."""
        if not self._looked:
            self._looked = True
            try:
                self.known = self._look()
            except ValueError as error:
                self._wrong.append(error)
        return self.known

    def check(self) -> None:
        """Raise the ValueError, if there was one. Not while a copy is under way."""
        self.look()
        for error in self._wrong:
            raise error
