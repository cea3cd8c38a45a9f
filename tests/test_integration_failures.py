"""Real vLLM on the CPU with our own connector and with LMCache while things fail around it: what
requests are answered all the same.

`a` stores what answers are compared with. A `reader` has never computed what it is asked. Whatever
is lost is computed: same tokens, nobody beside the request notices, and vLLM's own prefix
cache holds nothing wrong. `aside` is vLLM alone."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import NamedTuple

import pytest
from processes import PATIENT, eventually
from vllm_cases import (
    ANSWER_SECONDS,
    CHUNK,
    CLIENT,
    COMMIT,
    FOREVER,
    LATE,
    LEASE,
    LEASE_SECONDS,
    OURS,
    RELEASE,
    SCATTER,
    TOKEN_BYTES,
    VIEWS,
    Answer,
    Instance,
    Node,
    Prompt,
    meddled,
    missing,
    needs_vllm,
    new_tokens,
    stopped_at,
)
from vllm_cases import quick as here

from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import (
    GRACE_SECONDS,
    ChunkKey,
    Location,
    Medium,
    SegmentId,
    SegmentInfo,
)

__all__ = ["here"]
pytestmark = needs_vllm

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
    started = [made(name) for name in ("a", OWN, *(() if missing() else (LMCACHE, "lmcache-a")))]
    for instance in started:
        instance.one(new_tokens(CHUNK + 1))
    return made


with_lmcache = pytest.mark.skipif(bool(missing()), reason="no LMCache")


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

    def hits_again(self, reader: Instance, cached: int = HITS) -> None:
        back = eventually(lambda: (answer := reader.again(self.tokens)).cached == cached and answer)
        assert back.agrees(self.computed)


def make_case(fleet: Fleet, a: Instance) -> Case:
    prompt, beside = Prompt(new_tokens(HITS + 17)), Prompt(new_tokens(40), max_tokens=14)
    return Case(
        prompt, beside, fleet.here.keep(a, prompt.tokens), fleet.aside.run(beside)[0], fleet.aside
    )


@contextmanager
def hasty(reader: Instance, request_seconds: float) -> Iterator[None]:
    """Where the server hangs: each of its questions costs a short deadline, which a slow machine
    may miss at any other time.
    """
    reader.ask("hurry", 0.2, request_seconds)
    yield
    reader.ask("hurry", CLIENT["connect_seconds"], CLIENT["request_seconds"])


@contextmanager
def client(here: Node, device: str = "host", medium: Medium = "host") -> Iterator[Client]:
    with Client(here.socket, PATIENT, device, medium, reconnect=False) as made:
        yield made


def remove(here: Node, keys: list[ChunkKey]) -> None:
    with client(here) as other:
        assert other.remove(keys) == len(keys)


def recomputed(reader: Instance) -> int:
    """Tokens that the reader's loads have failed to bring, so far."""
    return reader.counter("vllm:vcache_recomputed_tokens")


# ---- chunks that are gone


def test_chunks_that_leave_between_look_up_and_lease_are_computed(
    here: Node, reader: Instance, case: Case
) -> None:
    """The first half is left. The request does not look again, so it cannot go round in circles."""
    left = 2
    asked, acquired, lost = here.asked("Find"), here.asked("Acquire"), recomputed(reader)
    with stopped_at(reader, LEASE) as place:
        answers = place.while_there(
            lambda: remove(here, place.seen[0][left:]), case.prompt, case.beside
        )
    case.right(answers)
    assert recomputed(reader) - lost == HITS - left * CHUNK
    assert here.asked("Find") - asked == 1
    assert 1 <= here.asked("Acquire") - acquired <= 2
    case.unpolluted(reader)
    case.hits_again(reader)


# ---- a server that is gone


@pytest.mark.parametrize(
    ("reader", "place"),
    [(OWN, LEASE), (OWN, RELEASE), pytest.param(LMCACHE, RELEASE, marks=with_lmcache)],
    indirect=["reader"],
    ids=["before lease", "before release", "before release, LMCache"],
)
def test_a_server_killed_at_any_moment_costs_a_computation(
    here: Node, reader: Instance, case: Case, place: str
) -> None:
    with stopped_at(reader, place) as moment:
        answers = moment.while_there(here.kill, case.prompt, case.beside)
    case.right(answers)
    case.unpolluted(reader)
    assert reader.again(case.tokens).agrees(case.computed)
    here.serve_again()
    case.hits_again(reader)


def test_a_lease_of_a_server_before_does_not_count(
    here: Node, reader: Instance, case: Case
) -> None:
    """The next server is there, and so are the chunks, when the reader asks whether its lease
    held.
    """
    lost = recomputed(reader)

    def restart() -> None:
        # Until then a lease holds, whatever happens to the server.
        time.sleep(GRACE_SECONDS)
        here.kill()
        here.serve_again()
        with client(here) as other:
            for _ in range(5):
                other.acquire(keys)

    keys: list[ChunkKey] = []
    with stopped_at(reader, LEASE) as place:
        place.while_there(lambda: keys.extend(place.seen[0]), case.prompt)
    reader.forget()
    with stopped_at(reader, RELEASE) as place:
        answers = place.while_there(restart, case.prompt, case.beside)
    case.right(answers)
    assert recomputed(reader) - lost == HITS
    case.unpolluted(reader)
    case.hits_again(reader)


def test_a_hung_server_holds_up_one_request_only(here: Node, reader: Instance, case: Case) -> None:
    with hasty(reader, 0.2), here.server.stopped():
        case.right(reader.run(case.prompt, case.beside, together=True))
        with meddled(reader, LATE, "count here"):
            other = reader.one(new_tokens(HITS + 17))
            assert reader.ask("calls")[LATE] == 0
        assert other.cached == 0
        case.unpolluted(reader)
    case.hits_again(reader)


def test_a_server_that_hangs_under_a_request(here: Node, reader: Instance, case: Case) -> None:
    with ExitStack() as undo:
        undo.enter_context(hasty(reader, 1.0))
        with stopped_at(reader, RELEASE) as moment:
            answers = moment.while_there(
                lambda: undo.enter_context(here.server.stopped()), case.prompt, case.beside
            )
        case.right(answers)
    case.hits_again(reader)


# ---- segments


def test_a_segment_dropped_while_it_is_mapped_is_no_worse_than_a_miss(
    here: Node, reader: Instance, case: Case
) -> None:
    def drop() -> None:
        with client(here) as other:
            for segment in other.list_segments():
                other.drop_segment(segment.id)

    with stopped_at(reader, VIEWS) as moment:
        answers = moment.while_there(drop, case.prompt, case.beside)
    case.right(answers)
    case.unpolluted(reader)
    # A segment that was dropped stays dropped in this server's life.
    here.kill()
    here.serve_again()
    case.hits_again(reader, 0)
    case.hits_again(reader)


def test_chunks_in_a_segment_that_cannot_be_mapped_are_computed(
    here: Node, reader: Instance, case: Case
) -> None:
    """The last two are moved there, to a GPU that the reader has no access to."""
    fd, gpu = os.open("/dev/null", os.O_RDWR), "GPU-00000000-0000-0000-0000-000000000000"
    with client(here, gpu, "cuda") as other:
        try:
            other.add_segment(SegmentInfo(SegmentId("broken"), gpu, "cuda", 8 << 20), fd)
        finally:
            os.close(fd)

        def move() -> None:
            keys = place.seen[0][2:]
            remove(here, keys)
            reserved = other.reserve(keys, CHUNK * TOKEN_BYTES)
            assert [slot.segment for slot in reserved.slots if isinstance(slot, Location)] == [
                "broken"
            ] * 2
            assert other.commit(reserved.reservation) == 2

        lost = recomputed(reader)
        with stopped_at(reader, LEASE) as place:
            answers = place.while_there(move, case.prompt, case.beside)
        case.right(answers)
        assert recomputed(reader) - lost == 2 * CHUNK
        case.unpolluted(reader)
        other.drop_segment(other.list_segments()[-1].id)
    case.hits_again(reader)


# ---- leases


def test_the_lease_of_a_slow_copy_is_renewed(here: Node, reader: Instance, case: Case) -> None:
    renewed = here.asked("Renew")
    with meddled(reader, SCATTER, "slow", LEASE_SECONDS + 0.5, times=1):
        answers = reader.run(case.prompt, case.beside, together=True)
    case.right(answers)
    assert answers[0].cached == HITS
    assert here.asked("Renew") > renewed
    case.unpolluted(reader)


# ---- promises that are not kept


@pytest.mark.parametrize("there", [0, 2], ids=["nothing comes", "half of it comes"])
def test_an_announced_prefix_that_does_not_come_is_computed(
    fleet: Fleet, reader: Instance, there: int
) -> None:
    tokens, beside = new_tokens(HITS + 17), Prompt(new_tokens(40), max_tokens=14)
    if there:
        fleet.here.keep(fleet("a"), tokens[: there * CHUNK + 1])
    computed, undisturbed = fleet.aside.run(Prompt(tokens), beside)
    lost = recomputed(reader)
    announced = Prompt(tokens, params={"vcache": {"announced": True, "wait_seconds": 0.5}})
    case = Case(announced, beside, computed, undisturbed, fleet.aside)
    case.right(reader.run(announced, beside, together=True))
    assert recomputed(reader) == lost
    case.unpolluted(reader)
    case.hits_again(reader)


# ---- an instance that dies


def test_an_instance_killed_in_the_middle_of_loads_and_stores_leaves_the_pool_as_it_was(
    here: Node, fleet: Fleet
) -> None:
    """One of its requests holds a lease, another one's store waits for its commit."""
    case, victim = make_case(fleet, fleet("a")), fleet("victim")
    assert victim.one(case.tokens).agrees(case.computed)
    victim.forget()
    fresh, chunks = new_tokens(HITS + 17), here.chunks()
    with closing(victim):
        for place in (COMMIT, RELEASE):
            victim.ask("meddle", place, "stop", here.folder / place.rpartition(".")[2], FOREVER)
        victim.add("1", fresh)
        victim.step(2)
        victim.add("0", case.tokens)
        victim.tell("step", 4)
        eventually((here.folder / RELEASE.rpartition(".")[2]).exists, ANSWER_SECONDS)
        eventually(lambda: here.stats().reservations >= 1)
        eventually(lambda: here.stats().leases >= 1)
    eventually(
        lambda: (stats := here.stats()).reservations == stats.leases == 0, LEASE_SECONDS + 20
    )
    assert here.chunks() == chunks
    case.hits_again(fleet(OWN))
    assert fleet(OWN).again(fresh).agrees(fleet.aside.one(fresh))


# ---- exceptions of our own

PLACES = [
    *(
        f"{OURS}.scheduler.side:SchedulerSide.{name}"
        for name in ("arrived", "matched", "allocated", "plan", "update", "finished")
    ),
    *(f"{OURS}.worker.side:WorkerSide.{name}" for name in ("store", "measured")),
    *(SCATTER, RELEASE),
]
"""Methods that run with every request. Those around a load: test_vllm_sharing."""
RAISED = [*((OWN, place, 1) for place in PLACES), (OWN, PLACES[3], FOREVER)]


@pytest.mark.parametrize(
    ("reader", "place", "times"),
    RAISED,
    indirect=["reader"],
    ids=lambda value: str(value).rpartition(":")[2],
)
def test_an_exception_of_ours_is_a_miss(
    fleet: Fleet, reader: Instance, case: Case, place: str, times: int
) -> None:
    """Of a hit, and of a prompt that is computed in two steps and stored."""
    stored = Prompt(new_tokens(6 * CHUNK + 9))
    expected = fleet.aside.run(stored)[0]
    reader.forget()
    with meddled(reader, place, "raise", times=times):
        *answers, new = reader.run(case.prompt, case.beside, stored, together=True)
    case.right(answers)
    assert new.agrees(expected)
    assert reader.run(stored)[0].agrees(expected)
    case.unpolluted(reader)
    case.hits_again(reader)
