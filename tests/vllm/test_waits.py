"""What a look-up's answer means for its request, a table of cases; and requests that wait in vLLM's own
scheduler for what another instance computes."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import pytest
from in_place_cases import BLOCK, CHUNK, Engine, Make, find_of, make, new_tokens
from model import FakeClock
from msgspec.structs import replace
from pool_cases import CHUNKS, PROMPT, asked, engine, here, patience
from processes import SECONDS, eventually
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from vllm.v1.request import Request, RequestStatus

from vcache_backend.integration.vllm import lookups, waits
from vcache_backend.integration.vllm.requests import FAILED, LATE, Answer, Wait
from vcache_backend.integration.vllm.waits import Asked, LookupDecision, LookupResult, Rules, decide
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.messages import QUEUED_SECONDS, Coming, Promise

__all__ = ["engine", "here", "make"]
pytestmark = needs_vllm
NOW, SIZE, WHOLE = 1000.0, 10, 8
SLACK, LAST, STATE = waits.SLACK_SECONDS, waits.LAST_SECONDS, waits.STATE_SECONDS
UNKNOWN, LONGEST = waits.UNKNOWN_CHUNK_SECONDS, waits.LONGEST_CHUNK_SECONDS
RULES = Rules(SIZE, least=SIZE, wait_factor=1.5, opens=False, states=False)
ASKED = Asked(
    local=0, most=WHOLE * SIZE - 1, chunks=WHOLE, wait_seconds=None, may_wait=True, wait=None
)
BOUND = 1.5 * 6 * 0.5 + SLACK
"""Of the wait for 6 chunks, of 0.5 s each, behind 2 chunks that are there."""
WAITS = Wait(NOW, BOUND, began=2, target=WHOLE, promised=True)


def answer(hits: int, coming: int = 0, quiet: float = 0.0, chunk_seconds: float = 0.5) -> Answer:
    """So many chunks are there, and so many of the next ones are promised."""
    made = Answer(0, hits, hits, NOW, 0.0, hits * SIZE, by_chunks=False)
    if coming:
        made.coming = Coming(coming, True, quiet, chunk_seconds)
        made.comes_to = hits + coming
    return made


class Case(NamedTuple):
    """decided: at NOW + later. rules, asked: what differs from `RULES` and `ASKED`."""

    answer: Answer
    decided: LookupDecision
    later: float = 0.0
    rules: dict[str, Any] = {}
    asked: dict[str, Any] = {}


def waiting(bound: float, began: int = 2, target: int = WHOLE, promised: bool = True) -> Any:
    return still(Wait(NOW, bound, began, target, promised))


def still(wait: Wait) -> LookupDecision:
    """It goes on to wait."""
    return LookupDecision(LookupResult.AGAIN, wait=wait)


def hit(tokens: int, end: str = "") -> LookupDecision:
    return LookupDecision(LookupResult.HIT, tokens, end=end)


def miss(end: str = "") -> LookupDecision:
    return LookupDecision(LookupResult.MISS, end=end)


ALREADY = {"may_wait": False, "wait": WAITS}
ANNOUNCED = {"wait_seconds": 30.0}
UNPROMISED = {**ANNOUNCED, "may_wait": False, "wait": Wait(NOW, 30.0, 0, WHOLE, promised=False)}
STATES, OPENS = {"states": True}, {"opens": True}
GONE = {"wait": replace(WAITS, gone=NOW)}
NOBODY = UNPROMISED["wait"]
BEGUN = replace(NOBODY, promised=True)

ONCE = {
    "nothing is there": Case(answer(0), miss()),
    "some of it": Case(answer(2), hit(20)),
    "all of it, but vLLM computes the last token": Case(answer(WHOLE), hit(79)),
    "behind what vLLM has": Case(answer(4), hit(25), asked={"local": 15}),
    "and some blocks": Case(replace(answer(2), tokens=27), hit(27)),
    "a hit that ends before what is there": Case(replace(answer(4), tokens=25), hit(25)),
    "too little to load": Case(answer(1), miss(), rules={"least": 11}),
    "no server": Case(FAILED, miss()),
    "a late answer": Case(LATE, waits.AGAIN),
    "another computes the rest": Case(answer(2, coming=6), waiting(BOUND)),
    "and more than that": Case(answer(2, coming=99), waiting(BOUND)),
    "another computes a part of it": Case(answer(2, coming=1), waiting(0.75 + SLACK, target=3)),
    "of which too little can be loaded": Case(answer(0, coming=1), miss(), rules={"least": 11}),
    "it does not say how fast it is": Case(answer(2, 6, 0, 0), waiting(9 * UNKNOWN + SLACK)),
    "a chunk takes it an hour": Case(answer(2, 6, 0, 3600), waiting(9 * LONGEST + SLACK)),
    "it makes no progress": Case(answer(2, coming=6, quiet=BOUND + 0.1), hit(20)),
    "too many wait": Case(answer(2, coming=6), hit(20), asked={"may_wait": False}),
    "nobody is to wait": Case(answer(2, coming=6), hit(20), rules={"wait_factor": 0}),
    "announced, and nobody has begun": Case(answer(0), still(NOBODY), asked=ANNOUNCED),
    "announced, and slow": Case(answer(2, coming=6, quiet=29), waiting(30.0), asked=ANNOUNCED),
    "announced, and stopped": Case(answer(2, coming=6, quiet=31), hit(20), asked=ANNOUNCED),
    "announced, and all is there": Case(answer(WHOLE), hit(79), asked=ANNOUNCED),
    "announced, not to be waited for": Case(answer(2), hit(20), asked={"wait_seconds": 0.0}),
    "announced, without a server": Case(FAILED, miss(), asked=ANNOUNCED),
}
AGAIN = {
    "it has come": Case(answer(WHOLE), hit(79, "kept")),
    "it has come at the last moment": Case(answer(WHOLE), hit(79, "kept"), later=BOUND + 1),
    "it goes on": Case(answer(4, coming=4), still(WAITS), BOUND),
    "it takes too long": Case(answer(4, coming=4), hit(40, "late"), later=BOUND + 0.1),
    "it has stopped": Case(answer(4, coming=4, quiet=BOUND + 0.1), hit(40, "silent")),
    "it was given up": Case(answer(4), hit(40, "withdrawn")),
    "it was given up at once": Case(answer(0), miss("withdrawn")),
    "the server is gone": Case(FAILED, miss("withdrawn")),
    "the server is gone, and nobody had begun": Case(FAILED, miss("withdrawn"), asked=UNPROMISED),
    "the server is slow": Case(LATE, waits.AGAIN, later=BOUND),
    "the server is stopped": Case(LATE, miss("late"), later=BOUND + LAST + 0.1),
    "the state may still come": Case(answer(4), still(GONE["wait"]), rules=STATES),
    "it came behind the chunks": Case(answer(4), hit(40, "kept"), STATE, STATES, GONE),
    "no state came": Case(answer(2), hit(20, "withdrawn"), STATE, STATES, GONE),
    "it is promised again": Case(answer(2, coming=6), still(WAITS), rules=STATES, asked=GONE),
    "nobody has begun yet": Case(answer(0), still(NOBODY), 29, asked=UNPROMISED),
    "somebody has begun": Case(answer(0, coming=1), still(BEGUN), asked=UNPROMISED),
    "nobody has begun at all": Case(answer(0), miss("late"), later=31, asked=UNPROMISED),
}


QUIET = 1.5 * WHOLE * 0.5 + SLACK
"""How long the owner of an open load's chunks may make no progress."""
HALF = 1.5 * 4 * 0.5 + SLACK
"""The bound of the wait for 4 chunks behind 4 that are there."""
SECOND = {**ALREADY, "wait": Wait(NOW, HALF, 4, WHOLE, True, None, 4, QUIET), "loads": True}
LONGER = {**SECOND, "wait": replace(SECOND["wait"], bound=60.0)}
LOCAL = {"local": 20}
QUEUED = replace(answer(4), coming=Coming(4, False, 0.0, 0.5), comes_to=WHOLE)


def opened(came: int, bound: float = HALF, began: int = 4, tokens: int = 79) -> LookupDecision:
    """Load so many chunks, and wait for the rest."""
    wait = Wait(NOW, bound, began, WHOLE, True, None, came, QUIET)
    return LookupDecision(LookupResult.HIT, tokens, wait)


def asking(chunk: int | None, bound: float, began: int, promised: bool = True) -> LookupDecision:
    """Wait, and ask for this chunk alone."""
    return still(Wait(NOW, bound, began, WHOLE, promised, None, chunk))


ALL_OR_NONE = asking(None, 30.0, 4)
OPEN = {
    "half of it is there": Case(answer(4, coming=4), opened(4)),
    "half of what vLLM lacks": Case(answer(5, 3), opened(5, 2.25 + SLACK, 5, 59), asked=LOCAL),
    "less than half": Case(answer(2, coming=6), asking(3, BOUND, 2)),
    "less than half of what vLLM lacks": Case(
        answer(4, 4), asking(5, HALF, 4), asked={"local": 40}
    ),
    "half of it in a pool": Case(replace(answer(4, 4), by_chunks=True), asking(None, HALF, 4)),
    "the rest is queued": Case(QUEUED, asking(None, HALF, 4)),
    "the owner makes no progress": Case(answer(4, 4, QUIET + 0.1), ALL_OR_NONE, asked=ANNOUNCED),
    "another computes a part of the rest": Case(answer(4, 2), ALL_OR_NONE, asked=ANNOUNCED),
    "announced": Case(answer(4, coming=4), opened(4, 30.0), asked=ANNOUNCED),
    "announced, and nobody has begun": Case(answer(0), asking(3, 30, 0, False), asked=ANNOUNCED),
    "while it waits": Case(answer(5, coming=3), opened(5, BOUND, 2), asked=ALREADY),
    "it goes on": Case(answer(6, coming=2), opened(6), asked=SECOND),
    "nothing more has come": Case(answer(4, 4), still(SECOND["wait"]), asked=SECOND),
    "all has come": Case(answer(WHOLE), hit(79, "kept"), asked=SECOND),
    "but after a reset": Case(replace(answer(WHOLE), epoch=1), miss("withdrawn"), asked=SECOND),
    "the owner has stopped": Case(answer(6, 2, QUIET + 0.1), hit(60, "silent"), asked=LONGER),
    "the rest was given up": Case(answer(6), hit(60, "withdrawn"), asked=SECOND),
    "the server is gone": Case(FAILED, miss("withdrawn"), asked=SECOND),
    "it takes too long": Case(answer(6, coming=2), hit(60, "late"), later=HALF + 0.1, asked=SECOND),
}


TABLES = {"first": (ONCE, {}, {}), "waits": (AGAIN, {}, ALREADY), "open": (OPEN, OPENS, {})}
EVERY = [
    (f"{at}: {name}", case, *more)
    for at, (it, *more) in TABLES.items()
    for name, case in it.items()
]


@pytest.mark.parametrize(
    ("case", "rules", "state"), [row[1:] for row in EVERY], ids=[row[0] for row in EVERY]
)
def test_what_an_answer_means(case: Case, rules: dict[str, Any], state: dict[str, Any]) -> None:
    """A first one; one to a request that waits; of an open load."""
    asked = replace(ASKED, **state | case.asked)
    given = RULES._replace(**rules | case.rules)
    assert decide(given, asked, case.answer, NOW + case.later) == case.decided


@pytest.mark.parametrize(
    ("decision", "matched"),
    [
        (miss(), (0, False)),
        (hit(7), (7, True)),
        (opened(4), (79, True)),
        (waits.AGAIN, (None, False)),
    ],
)
def test_what_vllm_is_told(decision: LookupDecision, matched: tuple[int | None, bool]) -> None:
    assert decision.matched == matched


# ---- in vLLM's own scheduler


def test_what_waits_in_the_queue_of_another_instance_is_computed_here(engine: Engine) -> None:
    """By a request that vLLM could schedule now, and stores what it computes. The owner's request
    waits for it in turn."""
    with engine.here.client() as owner, engine.here.client() as asking:
        tokens, keys = asked(engine)
        owner.find(find_of(keys, promise=1))
        request = engine.add(tokens)
        eventually(lambda: engine.step() and request.num_computed_tokens > 0)
        eventually(lambda: asking.find(find_of(keys)).coming.begun)
        coming = owner.find(find_of(keys, promise=1, begins=True)).coming
        assert coming is not None
        assert coming.chunks == CHUNKS
        tokens, keys = asked(engine)
        owner.find(find_of(keys, promise=2))
        time.sleep(2 * QUEUED_SECONDS)
        request = engine.add(tokens)
        assert engine.tracked(request).lookup.question.sent.arrives(SECONDS)
        for stores_nothing in (find_of(keys), find_of(keys, begins=True)):
            coming = asking.find(stores_nothing).coming
            assert coming is not None
            assert coming.quiet > QUEUED_SECONDS, "what has only arrived takes nothing over"
        engine.step()
        assert request.num_computed_tokens > 0


def test_only_so_many_requests_wait(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is computed; when one of them ends, another may wait."""
    monkeypatch.setattr(waits, "MOST_WAITING", 2)

    def waits_too() -> bool:
        request = engine.add(new_tokens(PROMPT), announced=True, wait_seconds=600)
        waiting.append(request)
        engine.step()
        return bool(request.num_computed_tokens == 0)

    waiting: list[Request] = []
    assert [waits_too() for _ in range(3)] == [True, True, False]
    engine.scheduler.finish_requests([waiting[0].request_id], RequestStatus.FINISHED_ABORTED)
    assert [waits_too() for _ in range(2)] == [True, False]


SLOW_CHUNK_SECONDS = 60.0
"""Of an owner: however slow this machine is, nobody takes it for silent meanwhile."""


def begun(owner: Client, engine: Engine) -> list[int]:
    """A new prompt that the owner has begun to compute."""
    tokens, keys = asked(engine)
    epoch = owner.find(find_of(keys)).epoch
    owner.promise(Promise(1, keys, 1, b"", epoch, SLOW_CHUNK_SECONDS))
    return tokens


def test_the_more_wait_the_less_is_asked_for_what_nobody_computes(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever announces much that never comes slows down everybody's steps."""
    clock = FakeClock()
    monkeypatch.setattr(waits, "monotonic", clock)
    patience(engine, 100 * SECONDS)
    with engine.here.client() as owner:
        computed = [engine.add(begun(owner, engine))]
        never = [engine.add(new_tokens(PROMPT), announced=True) for _ in range(15)]
        engine.step()
        all_of = [engine.tracked(one) for one in computed + never]
        assert len(engine.half.waits.waiting) == 16
        asked = [0] * 16
        for _ in range(20):
            clock.advance(0.00101)
            asked = [
                n + engine.half.waits.is_due(one) for n, one in zip(asked, all_of, strict=True)
            ]
        assert asked == [20, *[5] * 15]


def test_a_wait_ends_though_nobody_answers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    monkeypatch.setattr(waits, "monotonic", clock)
    patience(engine, 100 * SECONDS)
    with engine.here.client() as owner:
        request = engine.add(begun(owner, engine))
        engine.step()
        assert request.num_computed_tokens == 0
        monkeypatch.setattr(lookups, "LATE_SECONDS", 0.001)
        with engine.here.server.stopped():
            engine.step()
            assert request.num_computed_tokens == 0
            clock.advance(2 * CHUNKS * SLOW_CHUNK_SECONDS)
            engine.step()
            assert request.num_computed_tokens > 0


def waited_for(owner: Client, engine: Engine) -> list[int]:
    """A prompt that the owner has begun, and that a request of the least priority
    waits for."""
    tokens = begun(owner, engine)
    waiting = engine.add(tokens, priority=2)
    engine.step()
    assert engine.tracked(waiting).wait.wait
    return tokens


def test_nobody_follows_one_that_waits_no_more(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By priority vLLM may not come to it for long: one before it lacks blocks."""
    clock = FakeClock()
    monkeypatch.setattr(waits, "monotonic", clock)
    engine = make(share="pool", arguments={"scheduling_policy": "priority"})
    engine.add(new_tokens(10 * BLOCK), max_tokens=CHUNK)
    engine.step()
    with engine.here.client() as owner:
        tokens = waited_for(owner, engine)
        engine.add(new_tokens(18 * BLOCK), priority=1)
        follower = engine.add(tokens, priority=0)
        engine.step()
        for _ in range(2):  # The second one's own wait is not over yet.
            assert follower.num_computed_tokens == 0
            clock.advance(2 * CHUNKS * SLOW_CHUNK_SECONDS)
            engine.step()
        engine.step()
        assert follower.num_computed_tokens > 0


def test_nobody_follows_a_request_that_waited_while_the_weights_changed(make: Make) -> None:
    """Also not if they are what they were before."""
    engine = make(share="pool", weights="old", arguments={"scheduling_policy": "priority"})
    with engine.here.client() as owner:
        tokens = waited_for(owner, engine)
        engine.scheduler.connector.weights_change()
        engine.scheduler.connector.weights_are("old")
        later = engine.add(tokens, priority=0)
        engine.step()
        assert engine.tracked(later).wait.wait
        assert not engine.scheduler.connector.off
