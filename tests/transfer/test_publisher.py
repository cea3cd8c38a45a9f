"""What a worker tells the server of its KV cache: behind the step that wrote it, in order, and
again to a server that has lost it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import neighbour_cases
import numpy as np
import pytest
from engine_cases import Node
from engine_cases import fresh as here
from neighbour_cases import EACH, NAMESPACE, TABLES, instance
from processes import QUICK, SECONDS, eventually

from vcache_backend.errors import ServerTimeout, VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import HASH_BYTES, BlockRun, Find, Found, Join, Publish
from vcache_backend.transfer.publisher import Publisher
from vcache_backend.transfer.stats import EngineStats

__all__ = ["here"]
NAME = instance(7)


class Step:
    """A step's work, over when a test says so. failed: on the device."""

    def __init__(self, over: bool = True) -> None:
        self.over, self.failed, self.looks = over, False, 0

    def reached(self) -> bool:
        self.looks += 1
        if self.failed:
            raise VCacheError("the device failed")
        return self.over

    def wait(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while not (over := self.reached()) and time.monotonic() < until:
            time.sleep(0.0001)
        return over


class Owner(neighbour_cases.Owner):
    """A worker with its publisher, and a scheduler that joins when a test wants it to; all in this
    process.
    """

    def __init__(self, here: Node, **more: Any) -> None:
        """more: of the publisher."""
        super().__init__(here.path, QUICK, NAME, scheduler=False)
        self.scheduler, self.stats = Client(here.path, QUICK), EngineStats()
        self.publisher = Publisher(self.client, self.stats, NAME, 0, self.table.blocks, **more)

    def join(self) -> None:
        self.scheduler.join(
            Join(NAME, NAMESPACE, self.table.blocks, 1, EACH, TABLES), self.table.fd
        )

    def publish(self, number: int, step: Step, epoch: int = 0, soon: bool = True) -> BlockRun:
        """The two blocks of run `number`, which are no other's."""
        blocks = [2 * number, 2 * number + 1]
        self.table.filled(blocks)
        packs = np.array(blocks, dtype="<u4").tobytes(), self.table.counters[blocks].tobytes()
        run = BlockRun(0, *packs, 0, b"".join(map(name, blocks)))
        self.publisher.submit([run], epoch, step, soon)
        return run

    def holds(self, run: BlockRun) -> bool:
        return self.publisher.holds(run.blocks, run.generations)

    def knows(self, run: BlockRun) -> list[bool]:
        given = np.frombuffer(run.blocks, "<u4"), np.frombuffer(run.generations, "<u8")
        known: list[bool] = self.publisher.known(*given).tolist()
        return known

    def found(self, *numbers: int) -> list[bool]:
        """Whose two blocks others find, each asked for by itself."""
        return [self.blocks_found(2 * number, 2 * number + 1) == 2 for number in numbers]

    def blocks_found(self, *blocks: int) -> int:
        """How many of a prompt's blocks others find."""
        hashes = b"".join(map(name, blocks))
        answer: Found = self.scheduler.find(Find(NAMESPACE, hashes, EACH, len(blocks)))
        assert sum(run.count for run in answer.residents) == answer.found
        return answer.found

    def close(self) -> None:
        self.publisher.close()
        super().close()
        self.scheduler.close()


def name(block: int) -> bytes:
    """The hash of what the block holds."""
    return bytes([block + 1]) * HASH_BYTES


@pytest.fixture
def owner(here: Node) -> Iterator[Owner]:
    made = Owner(here)
    yield made
    made.close()


def test_nothing_is_told_before_the_step_that_wrote_it_is_over(owner: Owner) -> None:
    owner.join()
    running = Step(over=False)
    owner.publish(1, running)
    owner.publish(2, Step())
    eventually(lambda: running.looks > 100)
    assert owner.found(1, 2) == [False, False], "in their order"
    running.over = True
    assert owner.publisher.outbox.flush(SECONDS)
    assert owner.found(1, 2) == [True, True]


def test_what_ends_a_prompt_is_told_before_what_begins_another(
    here: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both in one step. The server takes as long for the second as for all its blocks."""
    owner, told = Owner(here, few=1), list[list[int]]()
    publish = owner.client.publish

    def noted(publication: Publish) -> int:
        told.append([run.count for run in publication.runs])
        return publish(publication)

    monkeypatch.setattr(owner.client, "publish", noted)
    owner.join()
    begins, ends = owner.publish(1, Step()), owner.publish(2, Step()).cut(0, 1)
    assert owner.publisher.outbox.flush(SECONDS)
    told.clear()
    owner.publisher.submit([begins, ends], 0, Step())
    assert owner.publisher.outbox.flush(SECONDS)
    assert told == [[1], [2]]
    owner.close()


def test_what_nobody_looks_for_is_told_later(here: Node) -> None:
    """What an instance has loaded lies elsewhere, too; and it is on the way to a token."""
    owner, steps = Owner(here, together=10 * SECONDS), [Step() for _ in range(3)]
    owner.join()
    for number, step in enumerate(steps[:2]):
        owner.publish(number, step, soon=False)
    time.sleep(0.05)
    assert [step.looks for step in steps] == [0, 0, 0]
    owner.publish(2, steps[2])
    eventually(lambda: owner.found(0, 1, 2) == [True, True, True])
    owner.publish(3, Step(), soon=False)
    assert owner.publisher.outbox.flush(SECONDS)
    assert owner.found(3) == [True]
    owner.close()


def test_of_too_many_the_last_is_dropped(here: Node) -> None:
    """Not the first one: its step's end would be taken for the next one's."""
    owner = Owner(here, most=2)
    owner.join()
    steps = [Step(over=False) for _ in range(3)]
    for number, step in enumerate(steps[:2], 1):
        owner.publish(number, step)
    eventually(lambda: steps[0].looks)
    owner.publish(3, steps[2])
    steps[0].over = True
    # The first look at it comes before the first publication has left, the next one behind that.
    eventually(lambda: steps[1].looks > 1)
    assert owner.found(1, 2) == [True, False]
    for step in steps:
        step.over = True
    assert owner.publisher.outbox.flush(SECONDS)
    assert owner.found(1, 2, 3) == [True, True, False]
    owner.close()


def test_a_closed_publisher_tells_no_more(owner: Owner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a server that answers late, its queue would take minutes, and vLLM waits for its end."""
    owner.join()
    step = Step(over=False)
    asked = threading.Event()
    answers = threading.Event()
    told = list[bytes]()
    publish = owner.client.publish

    def slowly(publication: Publish) -> int:
        told.extend(run.hashes for run in publication.runs)
        asked.set()
        assert answers.wait(SECONDS)
        return publish(publication)

    monkeypatch.setattr(owner.client, "publish", slowly)
    owner.publish(0, step)
    eventually(lambda: step.looks)
    step.over = True
    assert asked.wait(SECONDS)
    for number in (1, 2):
        owner.publish(number, step)
    owner.publisher.close(timeout=0.05)
    answers.set()
    owner.publisher.close(timeout=SECONDS)
    assert told == [name(0) + name(1)]


def test_a_step_that_failed_publishes_nothing_and_holds_nothing_up(owner: Owner) -> None:
    owner.join()
    broken = Step()
    broken.failed = True
    failed, right = owner.publish(1, broken), owner.publish(2, Step())
    assert owner.publisher.outbox.flush(SECONDS)
    assert owner.found(1, 2) == [False, True]
    assert (owner.knows(failed), owner.knows(right)) == ([False] * 2, [True] * 2)


def test_what_was_told_before_the_scheduler_had_joined_is_told_again(owner: Owner) -> None:
    run = owner.publish(1, Step())
    assert owner.publisher.outbox.flush(SECONDS)
    assert not owner.holds(run), "nobody can say so"
    owner.join()
    eventually(lambda: owner.found(1) == [True])
    eventually(lambda: owner.holds(run))
    owner.table.void([3])
    assert not owner.holds(run)


def test_who_refuses_is_not_told_all_each_time(here: Node) -> None:
    """Of thousands of blocks, each time that it takes one: at most once a second."""
    owner = Owner(here, retry=3600.0)
    owner.join()
    for number in range(12):
        owner.publish(number, Step(), epoch=1 - number % 2)
        assert owner.publisher.outbox.flush(SECONDS)
    assert owner.found(0, 1) == [False, True]
    assert owner.stats.counted("blocks_")["published"] == 12
    owner.close()


@pytest.mark.parametrize("how", ["", "which is late once", "which dies meanwhile"])
def test_the_next_server_is_told_of_what_is_still_there(
    here: Node, owner: Owner, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of what was handed out since, in the middle of a run too."""
    publish, once, over = owner.client.publish, iter([how]), threading.Event()
    told = set[tuple[int, int, int]]()

    def tell(publication: Publish) -> int:
        told.update((run.blocks[0], run.first, run.count) for run in publication.runs)
        now = next(once, "")
        if now == "which is late once":
            over.set()
            raise ServerTimeout("it took too long")
        taken = publish(publication)
        if now:
            another()
        over.set()
        return taken

    def another() -> None:
        before = owner.client.run_id, owner.scheduler.run_id
        here.server.kill()
        here.serve()
        for client, run_id in zip((owner.client, owner.scheduler), before, strict=True):
            eventually(lambda it=client, was=run_id: it.connected and it.run_id != was)

    owner.join()
    for number in (1, 2, 3):
        owner.publish(number, Step())
    four = [8, 9, 10, 11]
    packs = np.array(four, dtype="<u4").tobytes(), owner.table.counters[four].tobytes()
    long = BlockRun(5, *packs, 0, b"".join(map(name, four)))
    owner.publisher.submit([long], 0, Step())
    assert owner.publisher.outbox.flush(SECONDS)
    assert owner.blocks_found(*four) == 4
    assert owner.found(1, 2, 3) == [True] * 3
    owner.scheduler.on_return.append(owner.join)
    owner.table.void([4, 9])
    monkeypatch.setattr(owner.client, "publish", tell)
    another()
    assert over.wait(SECONDS)
    eventually(lambda: owner.found(1, 3) == [True, True])
    assert owner.found(2) == [False]
    eventually(lambda: [owner.blocks_found(*part) for part in (four, [10, 11])] == [1, 2])
    assert told == {(2, 0, 2), (5, 1, 1), (6, 0, 2), (8, 5, 1), (10, 7, 2)}
    assert owner.publisher.outbox.flush(SECONDS), "once"
