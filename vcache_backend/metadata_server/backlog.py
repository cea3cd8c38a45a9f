"""What is too much for one turn of the server's loop: it is begun at once and goes on in the turns after it. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator

import msgspec

from vcache_backend.metadata_server import messages as m

AT_ONCE = 1024
"""So many entries a task touches in the turn that brings it; most end there."""


Steps = Generator[int, None, int]
"""Each step tells how many entries it touched, the end how much was done in all."""


class Task:
    """Work in steps. `count`: how much it did, once it is `done`."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.count = 0
        self.done = False

    def run(self, work: int) -> int:
        """Steps until `work` entries are touched or all is done; how many were."""
        touched = 0
        while touched < work and not self.done:
            try:
                touched += next(self._steps)
            except StopIteration as end:
                self.count, self.done = end.value, True
        return touched


class Waiting(msgspec.Struct, frozen=True):
    """An answer that comes when a task is done."""

    task: Task
    reply: Callable[[int], m.Reply]
    """Of what the task counted."""


class Backlog:
    """The tasks that go on. Each has its share of every turn, so that none waits for the end of another."""

    def __init__(self) -> None:
        self.tasks: deque[Task] = deque()

    def add(self, task: Task) -> int:
        """Begin a task; how many entries that touched."""
        touched = task.run(AT_ONCE)
        if not task.done:
            self.tasks.append(task)
        return touched

    def run(self, work: int) -> int:
        """Go on with every task, those that waited longest first, until about `work` entries are touched; how many were."""
        touched = 0
        for left in range(len(self.tasks), 0, -1):
            if touched >= work:
                break
            task = self.tasks.popleft()
            touched += task.run(max(1, (work - touched) // left))
            if not task.done:
                self.tasks.append(task)
        return touched
