"""Real vLLM on the CPU, sharing in place, through a pool and with LMCache, while things fail around a load:
what requests are answered all the same.

Of each way one instance keeps what another one loads. Whatever is lost is computed: same tokens, nobody
beside the request notices, and vLLM's own prefix cache holds nothing wrong. `aside` is vLLM alone."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial

import pytest
import vllm_cases
from processes import eventually
from vllm_cases import (
    CHUNK,
    COMPARE,
    IN_PLACE,
    PIN,
    PULL,
    Answer,
    Instance,
    Node,
    Place,
    Prompt,
    keep,
    meddled,
    new_tokens,
    stopped_at,
)
from vllm_cases import quick as here

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm

HITS = 4 * CHUNK


class Fleet:
    """The instances. One that a test has broken is started again for the next."""

    def __init__(self, here: Node) -> None:
        self.here, self.aside = here, here.alone("aside")
        self._started: dict[str, Instance] = {}

    def __call__(self, way: str) -> list[Instance]:
        """Who keeps, and who reads; both are connected."""
        return [self._one(f"{way} {part}", way) for part in ("keeps", "reads")]

    def _one(self, name: str, way: str) -> Instance:
        if name in self._started and not self._started[name].untouched:
            self._started.pop(name).close()
        if name not in self._started:
            start = self.here.start if way == "lmcache" else self.here.connect
            settings = IN_PLACE if way == "in place" else {}
            self._started[name] = start(name, settings, max_num_batched_tokens=320)
            self._started[name].one(new_tokens(5))
        return self._started[name]

    def keep(self, way: str, tokens: list[int]) -> Answer:
        """The answer of who keeps, once others find all whole chunks."""
        keeper, _ = self(way)
        return keep(keeper, tokens) if keeper.in_place else self.here.keep(keeper, tokens)


@pytest.fixture(scope="module")
def fleet(here: Node) -> Fleet:
    return Fleet(here)


def mishaps(here: Node, keeper: Instance, at: Place) -> dict[str, Callable[[], object]]:
    """What may happen while the reader is stopped at a place."""

    def remove() -> None:
        with here.connection() as other:
            assert other.remove(at.seen[0][2:]) == 2

    made: dict[str, Callable[[], object]] = {
        "owner killed": keeper.kill,
        "owner stopped": keeper.stop,
        "server killed": here.kill,
    }
    made |= {f"owner {how}": partial(keeper.ask, how) for how in ("reset", "forget")}
    return made | {"half removed": remove, "slots changed": here.empty}


def counts(here: Node, reader: Instance) -> list[int]:
    """Tokens that the reader's loads have failed to bring; questions for chunks; pins of them."""
    lost = reader.counter("vllm:vcache_recomputed_tokens")
    return [lost, here.asked("Find"), here.asked("Pin")]


def unpolluted(fleet: Fleet, reader: Instance, tokens: list[int], right: Answer) -> None:
    """The reader has nothing wrong in vLLM's own prefix cache: its next requests use that."""
    longer = tokens + right.tokens
    first, own, further = reader.one(tokens), reader.one(tokens), reader.one(longer)
    assert first.agrees(right)
    assert own.agrees(right)
    assert further.cached >= own.cached > 0
    assert further.agrees(fleet.aside.again(longer))


with_lmcache = pytest.mark.skipif(bool(vllm_cases.missing()), reason="no LMCache")
CASES = [
    ("in place", "owner killed", PULL),
    ("in place", "owner stopped", PULL),
    ("in place", "owner reset", PULL),
    ("in place", "owner forget", PULL),
    ("in place", "server killed", COMPARE),
    ("pool", "half removed", PIN),
    ("pool", "server killed", PIN),
    ("pool", "server killed", COMPARE),
    ("pool", "slots changed", COMPARE),
    pytest.param("lmcache", "server killed", COMPARE, marks=with_lmcache),
    pytest.param("lmcache", "slots changed", COMPARE, marks=with_lmcache),
]


@pytest.mark.parametrize(("way", "what", "place"), CASES)
def test_what_fails_around_a_load_costs_a_computation_and_no_more(
    here: Node, fleet: Fleet, way: str, what: str, place: str
) -> None:
    """Before the copy, or between the copy and the comparison: LMCache is told of a load before its
    copy is over. The request does not look again, so it cannot go round in circles."""
    # So that nothing is evicted, whatever these tests have stored by now.
    here.empty()
    keeper, reader = fleet(way)
    tokens, beside = new_tokens(HITS + 17), Prompt(new_tokens(40), max_tokens=14)
    right, undisturbed = fleet.keep(way, tokens), fleet.aside.run(beside)[0]
    before = counts(here, reader) if what == "half removed" else []

    if what == "slots changed":
        here.flip()  # by then they are wrong
    slow = meddled(reader, PULL, "slow", 0.1) if place == COMPARE else nullcontext()
    with stopped_at(reader, place) as at, slow:
        act = mishaps(here, keeper, at)[what]
        answers = at.while_there(act, Prompt(tokens), beside)
    keeper.cont()
    for answer, expected in zip(answers, (right, undisturbed), strict=True):
        assert answer.agrees(expected)
    if what == "slots changed":
        assert here.chunks() >= 0
        here.flip()
        here.empty()
    elif what == "half removed":
        now = counts(here, reader)
        lost, found, pinned = (one - then for one, then in zip(now, before, strict=True))
        assert (lost, found, pinned in (1, 2)) == (HITS // 2, 1, True)
    elif what == "owner stopped":
        assert answers[0].cached == HITS
    unpolluted(fleet, reader, tokens, right)
    if what == "server killed":
        assert reader.again(tokens).agrees(right)
        if way == "in place":
            # Nothing is said of a server that is back before that was noticed.
            eventually(lambda: "until it is back" in reader.log)
        here.serve_again(stores=way != "in place")
    elif what in ("owner killed", "owner reset", "owner forget"):
        fleet.keep(way, tokens)
    back = eventually(lambda: (answer := reader.again(tokens)).cached == HITS and answer)
    assert back.agrees(right)
    if (way, what) == ("in place", "server killed"):
        begins = r"WARNING \d\d-\d\d [\d:]+ \[channel.py:\d+\] vcache: .*"
        said = f"{begins}until it is back\n(.*\n)*.*{begins}again"
        eventually(lambda: re.search(said, reader.log))


@with_lmcache
def test_a_reset_that_reaches_no_server_stops_sharing_until_the_next_one(
    here: Node, fleet: Fleet
) -> None:
    """With LMCache, whose connector has the namespace to itself."""
    (a, _), tokens, later = fleet("lmcache"), new_tokens(HITS + 1), new_tokens(HITS + 1)
    here.keep(a, tokens)
    here.kill()
    assert not a.ask("reset")
    here.serve_again()
    chunks = here.chunks()
    assert a.again(tokens).cached == a.again(later).cached == 0
    assert here.chunks() == chunks
    assert a.ask("reset")
    here.keep(a, tokens)
    assert a.again(tokens).cached == HITS
