"""Damages a journal between two lives of a server: by a mutation of `journal_mutations`, or by
removing it.
"""

from __future__ import annotations

import random
from pathlib import Path

from .. import journal_mutations

DELETED = "deleted"
KINDS = (*(kind for kind in journal_mutations.KINDS if kind != "untouched"), DELETED)
KEPT = 8


class Kept:
    """A journal and earlier copies of it, which `take` made."""

    def __init__(self, path: Path, dice: random.Random) -> None:
        self.random, self.data, self.frames, self.older = (
            dice,
            b"",
            list[tuple[int, int]](),
            list[bytes](),
        )
        self._path = path

    def take(self) -> None:
        """Make a copy, which `change` may put back later."""
        self.older = [*self.older, self._path.read_bytes()][-KEPT:]

    def change(self, kind: str) -> None:
        """Damage the file. FileNotFoundError if there is none; ValueError, IndexError if there is
        too little of it.
        """
        self.data = self._path.read_bytes()
        self.frames = list(journal_mutations.frames(self.data))
        if kind == DELETED:
            self._path.unlink()
        else:
            self._path.write_bytes(journal_mutations.KINDS[kind](self, self))
