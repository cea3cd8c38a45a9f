"""Real vLLM on the CPU with our own connector and with LMCache while things fail around it: what
requests are answered all the same.

`a` stores what answers are compared with. A `reader` has never computed what it is asked. Whatever
is lost is computed: same tokens, nobody beside the request notices, and vLLM's own prefix
cache holds nothing wrong. `aside` is vLLM alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest
import vllm_cases
from processes import eventually
from vllm_cases import CHUNK, COMPARE, Answer, Instance, Node, Prompt, meddled, new_tokens
from vllm_cases import quick as here

from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.transfer.sources import PIN_SECONDS

__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm

HITS = 4 * CHUNK
OWN, LMCACHE = "own", "lmcache"


class Fleet:
    """Instances by name. One that a test has broken is started again for the next."""

    def __init__(self, here: Node) -> None:
        self.here, self.aside = here, here.alone("aside")
        self._instances: dict[str, Instance] = {}

    def __call__(self, name: str) -> Instance:
        if name not in self._instances:
            self._instances[name] = self._start(name)
        return self._instances[name]

    def check(self, name: str) -> None:
        """Give up an instance that a test has broken."""
        if not self(name).untouched:
            self._instances.pop(name).close()

    def _start(self, name: str) -> Instance:
        if name.startswith(LMCACHE):
            return self.here.start(name, max_num_batched_tokens=320)
        return self.here.connect(name, max_num_batched_tokens=320)


@pytest.fixture(scope="module")
def fleet(here: Node) -> Fleet:
    made = Fleet(here)
    # All of them are connected before the first server dies.
    names = ["a", OWN] if vllm_cases.missing() else ["a", OWN, LMCACHE, "lmcache-a"]
    started = [made(name) for name in names]
    for instance in started:
        instance.one(new_tokens(CHUNK + 1))
    return made


with_lmcache = pytest.mark.skipif(bool(vllm_cases.missing()), reason="no LMCache")


@pytest.fixture(params=[OWN])
def reader(fleet: Fleet, request: pytest.FixtureRequest) -> Iterator[Instance]:
    # So that nothing is evicted, whatever these tests have stored by now.
    fleet.here.empty()
    yield fleet(request.param)
    fleet.check(request.param)


@pytest.fixture
def case(fleet: Fleet, reader: Instance) -> Case:
    return make_case(fleet, fleet("lmcache-a" if reader.name == LMCACHE else "a"))


class Case(NamedTuple):
    """A prompt whose whole chunks are in the pool, one beside it that has none, and what vLLM
    answers to both.
    """

    prompt: Prompt
    beside: Prompt
    computed: Answer
    undisturbed: Answer
    aside: Instance

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens

    def right(self, answers: list[Answer]) -> None:
        """These are the answers."""
        for answer, expected in zip(answers, (self.computed, self.undisturbed), strict=False):
            assert answer.agrees(expected)

    def unpolluted(self, reader: Instance) -> None:
        """The reader has nothing wrong in vLLM's own prefix cache: its next requests use that."""
        longer = self.tokens + self.computed.tokens
        first, own, further = reader.one(self.tokens), reader.one(self.tokens), reader.one(longer)
        assert first.agrees(self.computed)
        assert own.agrees(self.computed)
        assert own.cached > 0
        assert further.cached >= own.cached
        assert further.agrees(self.aside.again(longer))

    def hits_again(self, reader: Instance) -> None:
        back = eventually(lambda: (answer := reader.again(self.tokens)).cached == HITS and answer)
        assert back.agrees(self.computed)


def make_case(fleet: Fleet, a: Instance) -> Case:
    prompt, beside = Prompt(new_tokens(HITS + 17)), Prompt(new_tokens(40), max_tokens=14)
    computed = fleet.here.keep(a, prompt.tokens)
    return Case(prompt, beside, computed, fleet.aside.run(beside)[0], fleet.aside)


def remove(here: Node, keys: list[ChunkKey]) -> None:
    with here.connection() as other:
        assert other.remove(keys) == len(keys)


def recomputed(reader: Instance) -> int:
    """Tokens that the reader's loads have failed to bring, so far."""
    return reader.counter("vllm:vcache_recomputed_tokens")


# ---- chunks that are gone


def test_chunks_gone_before_a_load_are_computed(here: Node, reader: Instance, case: Case) -> None:
    """The first half is left. The request does not look again, so it cannot go round in circles."""
    left = 2
    asked, acquired, lost = here.asked("Find"), here.asked("Pin"), recomputed(reader)
    with vllm_cases.stopped_at(reader, vllm_cases.PIN) as place:
        prompts = case.prompt, case.beside
        answers = place.while_there(lambda: remove(here, place.seen[0][left:]), *prompts)
    case.right(answers)
    assert recomputed(reader) - lost == HITS - left * CHUNK
    assert here.asked("Find") - asked == 1
    assert 1 <= here.asked("Pin") - acquired <= 2
    case.unpolluted(reader)
    case.hits_again(reader)


# ---- a server that is gone


@pytest.mark.parametrize(
    ("reader", "place"),
    [(OWN, vllm_cases.PIN), (OWN, COMPARE), pytest.param(LMCACHE, COMPARE, marks=with_lmcache)],
    indirect=["reader"],
    ids=["before the copy", "after it", "after it, LMCache"],
)
def test_a_killed_server_is_a_miss(here: Node, reader: Instance, case: Case, place: str) -> None:
    with vllm_cases.stopped_at(reader, place) as moment:
        answers = moment.while_there(here.kill, case.prompt, case.beside)
    case.right(answers)
    case.unpolluted(reader)
    assert reader.again(case.tokens).agrees(case.computed)
    here.serve_again()
    case.hits_again(reader)


@with_lmcache
def test_a_reset_that_reaches_no_server_stops_sharing_until_the_next_one(
    here: Node, fleet: Fleet
) -> None:
    """With LMCache, whose connector has the namespace to itself."""
    a, tokens, later = fleet("lmcache-a"), new_tokens(HITS + 1), new_tokens(HITS + 1)
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


# ---- slots that are used again


def test_a_copy_may_be_slower_than_its_pin(here: Node, reader: Instance, case: Case) -> None:
    with meddled(reader, vllm_cases.PULL, "slow", PIN_SECONDS + 0.5, times=1):
        answers = reader.run(case.prompt, case.beside, together=True)
    case.right(answers)
    assert answers[0].cached == HITS
    case.unpolluted(reader)


@pytest.mark.parametrize(
    "reader", [OWN, pytest.param(LMCACHE, marks=with_lmcache)], indirect=["reader"]
)
def test_chunks_that_changed_under_their_copy_are_computed(
    here: Node, reader: Instance, case: Case
) -> None:
    """By then they are wrong. The copy is not over when LMCache is told that they are there."""
    here.flip()
    with (
        vllm_cases.stopped_at(reader, COMPARE) as place,
        meddled(reader, vllm_cases.PULL, "slow", 0.1),
    ):
        answers = place.while_there(here.empty, case.prompt, case.beside)
    here.flip()
    case.right(answers)
    case.unpolluted(reader)
