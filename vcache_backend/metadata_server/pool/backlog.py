"""Tasks too long for one turn of the server's loop, continued in later turns. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

AT_ONCE = 1024
"""Steps of a task in the turn that begins it. Most tasks need no more steps."""
SHARE = 32
"""Steps of a task in a later turn, before the next task runs."""
Steps = Iterator[None]
"""A task in steps. Each step touches one entry."""


class Backlog:
    """Unfinished tasks, which take turns of `SHARE` steps: no task waits for another's end."""

    def __init__(self) -> None:
        self._tasks: deque[Steps] = deque()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, task: Steps) -> None:
        """Begin a task, and do its first steps now."""
        self._go_on(task, AT_ONCE)

    def later(self, task: Steps) -> None:
        """Add a task that begins in a later turn, for example if a turn may add many tasks."""
        self._tasks.append(task)

    def run(self, steps: int) -> None:
        while steps > 0 and self._tasks:
            self._go_on(self._tasks.popleft(), SHARE)
            steps -= SHARE

    def _go_on(self, task: Steps, steps: int) -> None:
        if sum(1 for _ in islice(task, steps)) == steps:
            self._tasks.append(task)
