"""What is too much for one turn of the server's loop: it is begun at once and goes on in the turns after it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

AT_ONCE = 1024
"""So many steps a task takes in the turn that begins it; most end there."""
SHARE = 32
"""So many steps it takes later, before the next task's turn comes."""
Steps = Iterator[None]
"""Work in steps, each of which touches one entry."""


class Backlog:
    """The tasks that go on. Each has its share of every turn, so that none waits for the end of another."""

    def __init__(self) -> None:
        self._tasks: deque[Steps] = deque()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, task: Steps) -> None:
        """The first steps of a task."""
        self._go_on(task, AT_ONCE)

    def later(self, task: Steps) -> None:
        """A task of which there may be many in one turn."""
        self._tasks.append(task)

    def run(self, steps: int) -> None:
        """About so many steps of what was begun."""
        while steps > 0 and self._tasks:
            self._go_on(self._tasks.popleft(), SHARE)
            steps -= SHARE

    def _go_on(self, task: Steps, steps: int) -> None:
        if sum(1 for _ in islice(task, steps)) == steps:
            self._tasks.append(task)
