"""Which stores under way a step of vLLM waits for: those whose blocks it gives to somebody else, and no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

from vcache_backend.integration.vllm.metadata import StepMetadata
from vcache_backend.integration.vllm.worker import WorkerSide, _Gather


class Copy:
    """A gather that ends when the test says so."""

    seconds = 0.001

    def __init__(self) -> None:
        self.over = False

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float) -> bool:
        return self.over


class Worker:
    """A worker with stores of these blocks under way, each a gather."""

    def __init__(self, *blocks: list[int]) -> None:
        self.copies = [Copy() for _ in blocks]
        self.fenced: list[int] = []
        self.side = WorkerSide.__new__(WorkerSide)
        self.side._gathers = [_Gather(copy, each, 64, 4096, 0.0) for copy, each in zip(self.copies, blocks, strict=True)]
        self.side._meter = SimpleNamespace(stored=lambda *measured: None)  # type: ignore[assignment]

    def step(self, *fresh: list[int], **more: Any) -> list[int]:
        """The stores that a step waits for which gives away these blocks."""
        fenced: list[int] = []
        session = SimpleNamespace(fence=lambda copy: fenced.append(self.copies.index(copy)))
        context: Any = SimpleNamespace(session=session)
        self.side._fence(context, StepMetadata(fresh=list(fresh), **more))
        return fenced


def test_the_next_owner_of_a_block_waits_for_the_store_that_reads_it() -> None:
    """As after a preemption: the blocks of the request that had to go are somebody else's in the same step."""
    worker = Worker([3, 4], [7, 8])
    assert worker.step([1, 2], [8]) == [1]


def test_a_step_that_gives_away_other_blocks_waits_for_nothing() -> None:
    worker = Worker([3, 4], [7, 8])
    assert worker.step([1, 2], [9]) == []
    assert worker.step() == []


def test_a_store_is_waited_for_in_later_steps_too_until_it_is_over() -> None:
    worker = Worker([3, 4])
    assert worker.step([9]) == []
    assert worker.step([4]) == [0]
    assert worker.step([3]) == [0]
    worker.copies[0].over = True
    assert worker.step([3]) == []


def test_a_step_of_which_nobody_knows_whom_it_gives_blocks_waits_for_all_stores() -> None:
    worker = Worker([3, 4], [7, 8])
    assert worker.step(opaque=True) == [0, 1]
