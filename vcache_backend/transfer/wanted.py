"""What a request wants: its first chunks at once, and all of them while the first are on their way."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.places import SlotPlaces


class Wanted(NamedTuple):
    """Chunks, and where they go."""

    keys: list[ChunkKey]
    places: SlotPlaces


class Rest:
    """All chunks of a request whose first ones are known. Looked at once; a ValueError is kept until `check`, since copies are under way
    by then."""

    def __init__(self, head: Wanted, look: Callable[[], Wanted]) -> None:
        self.known, self._look = head, look
        self._looked, self._wrong = False, list[ValueError]()

    def look(self) -> Wanted:
        """All of them, or the first ones if there is something wrong with the others."""
        if not self._looked:
            self._looked = True
            try:
                self.known = self._look()
            except ValueError as error:
                self._wrong.append(error)
        return self.known

    def check(self) -> None:
        """Look, if nobody did; ValueError if something is wrong. Not while something is under way."""
        self.look()
        for error in self._wrong:
            raise error
