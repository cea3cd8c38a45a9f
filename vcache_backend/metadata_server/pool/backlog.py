"""Work that is too much for one turn of the server's loop: begun at once, continued in later turns.
Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

AT_ONCE = 1024
"""Steps of a task in the turn that begins it. Most tasks end there."""
SHARE = 32
"""Steps of a task in later turns, before the next task has its share."""
Steps = Iterator[None]
"""Work in steps, each of which touches one entry."""


class Backlog:
    """Unfinished tasks. They run in turn, `SHARE` steps each, so none waits for another to end."""

    def __init__(self) -> None:
        self._tasks: deque[Steps] = deque()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, task: Steps) -> None:
        """Begin a task, and do its first steps now."""
        self._go_on(task, AT_ONCE)

    def later(self, task: Steps) -> None:
        """Add a task of a kind of which there may be many in one turn; it begins later."""
        self._tasks.append(task)

    def run(self, steps: int) -> None:
        """Do about `steps` steps of the unfinished tasks."""
        while steps > 0 and self._tasks:
            self._go_on(self._tasks.popleft(), SHARE)
            steps -= SHARE

    def _go_on(self, task: Steps, steps: int) -> None:
        if sum(1 for _ in islice(task, steps)) == steps:
            self._tasks.append(task)
