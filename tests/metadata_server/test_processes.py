"""What happens to processes that a test forgets."""

from __future__ import annotations

from processes import Child, Worker, nursery, survivors


def test_who_is_left_is_killed_and_named() -> None:
    worker = Worker(nursery("test_processes"), object, name="the first")
    child = Child(["sleep", "600"])
    left = survivors()
    assert [name.partition(" (")[0] for name in left[-2:]] == ["the first", "sleep 600"]
    assert "test_who_is_left" in left[-1]
    assert not worker.alive
    assert not child.alive
    assert survivors() == []
