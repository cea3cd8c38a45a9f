"""The harness itself: functions in other processes, and what happens to processes that a test
forgets.
"""

from __future__ import annotations

import os
import signal

import pytest
from nursery import listen, say
from processes import Child, Nursery, Worker, eventually, nursery, survivors


class Sum:
    """What is added up in another process."""

    def __init__(self, start: int) -> None:
        self.total = start

    def add(self, number: int) -> int:
        self.total += number
        return self.total

    def talk(self) -> int:
        say("half-way")
        return int(listen(10)) + self.total


def fail(served: Sum, text: str) -> None:
    raise ValueError(f"{text} {served.total}")


def child_of(served: Sum) -> int:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    return pid


@pytest.fixture(scope="module")
def home() -> Nursery:
    return nursery("test_processes")


def test_an_object_in_another_process_answers_by_name_and_says_what_went_wrong(
    home: Nursery,
) -> None:
    with Worker(home, Sum, 5) as worker:
        assert worker.ask("add", 2) == 7
        with pytest.raises(AssertionError, match=r"(?s)Traceback.*ValueError: so far 7"):
            worker.ask(fail, "so far")
        worker.tell("talk")
        assert worker.answer() == "half-way"
        worker.say(10)
        assert worker.answer() == 17
        with worker.stopped():
            worker.tell("add", 1)
            with pytest.raises(AssertionError, match="did not answer"):
                worker.answer(0.05)
        assert worker.answer() == 8
        pid = worker.ask(child_of)
    assert not worker.alive
    eventually(lambda: not os.path.exists(f"/proc/{pid}"))
    with Worker(home, Sum) as broken, pytest.raises(AssertionError, match="TypeError"):
        broken.ask("add", 1)


def test_who_is_left_is_killed_and_named(home: Nursery) -> None:
    worker, child = Worker(home, Sum, 1, name="the first"), Child(["sleep", "600"])
    left = survivors()
    assert [name.partition(" (")[0] for name in left[-2:]] == ["the first", "sleep 600"]
    assert "test_who_is_left" in left[-1]
    assert not worker.alive
    assert not child.alive
    assert survivors() == []
