"""Tasks too long for one turn of the server's loop, continued in later turns. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

AT_ONCE = 1024
"""Steps of a task in the turn that begins it. Most tasks need no more steps."""
Steps = Iterator[None]
"""A task in steps. Each step touches one entry."""


class Backlog:
    """Unfinished tasks, in the order in which they came. Each turn does some steps of the first."""

    def __init__(self) -> None:
        self._tasks: deque[Steps] = deque()

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, task: Steps) -> None:
        """Begin a task, and do its first steps now."""
        if _steps(task, AT_ONCE) == AT_ONCE:
            self._tasks.append(task)

    def later(self, task: Steps) -> None:
        """Add a task that begins in a later turn, for example if a turn may add many tasks."""
        self._tasks.append(task)

    def run(self, steps: int) -> None:
        """Do about so many steps, at least one of each finished task."""
        while steps > 0 and self._tasks:
            task = self._tasks.popleft()
            done = _steps(task, steps)
            if done == steps:
                self._tasks.appendleft(task)
            steps -= max(1, done)


def _steps(task: Steps, most: int) -> int:
    """Do up to `most` steps. Returns how many there were."""
    return sum(1 for _ in islice(task, most))
