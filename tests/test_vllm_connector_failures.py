"""Our connector in real vLLM on the CPU while things fail around it: what requests are answered all the same.

`a` stores, and computes what answers are compared with. A `reader` has never computed what it is asked; there is one that loads
between steps, as by default, and one whose steps load what they need. Whatever is lost is computed: same tokens, nobody beside the
request notices, and vLLM's own prefix cache holds nothing wrong.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from processes import PATIENT, eventually, info, make_memfd
from vllm_cases import ANSWER_SECONDS, CHUNK, LEASE_SECONDS, Answer, Instance, Prompt, missing, new_tokens
from vllm_failures import (
    COMMIT,
    FOREVER,
    LATE,
    LEASE,
    LOOK_UP,
    OURS,
    RELEASE,
    SCATTER,
    VIEWS,
    FailureNode,
    healthy,
    meddled,
    stopped_at,
)

from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.messages import GRACE_SECONDS, ChunkKey, Location

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "vLLM is here"),
    pytest.mark.timeout(300),
]

HITS = 4 * CHUNK
BOUND_SECONDS = 3.0
"""What a hung server may cost one request, everything included."""
UNCACHED = {"vcache": {"load": False, "store": False}}
BETWEEN, IN_STEP = "between", "in_step"


class Engines:
    """Instances by name. One that a test has broken is started again for the next."""

    def __init__(self, here: FailureNode) -> None:
        self.here = here
        self._instances: dict[str, Instance] = {}

    def get(self, name: str) -> Instance:
        if name not in self._instances:
            self._instances[name] = self._start(name)
        return self._instances[name]

    def check(self, name: str) -> None:
        """Give up an instance that a test has broken."""
        if not healthy(self.get(name)):
            self._instances.pop(name).close()

    def _start(self, name: str) -> Instance:
        below = {"a": 0, BETWEEN: 0, IN_STEP: 1 << 20}.get(name, 0)
        settings: dict[str, Any] = {"connector": {"min_hit_tokens": CHUNK, "sync_below_tokens": below}}
        if name == "checked":
            settings["engine"] = {"chunk_size": CHUNK, "checksum": True}
        return self.here.connect(name, settings, max_num_batched_tokens=320)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailureNode]:
    made = FailureNode(tmp_path_factory.mktemp("vllm"))
    with made.undo:
        made.serve()
        yield made


@pytest.fixture(scope="module")
def engines(here: FailureNode) -> Engines:
    made = Engines(here)
    started = [made.get(name) for name in ("a", BETWEEN, IN_STEP)]
    # All of them are connected before the first server dies.
    for instance in started:
        instance.one(new_tokens(CHUNK + 1))
    return made


@pytest.fixture
def a(engines: Engines) -> Instance:
    return engines.get("a")


@pytest.fixture(params=[BETWEEN, IN_STEP])
def reader(engines: Engines, request: pytest.FixtureRequest) -> Iterator[Instance]:
    yield engines.get(request.param)
    engines.check(request.param)


@pytest.fixture
def case(here: FailureNode, a: Instance) -> Case:
    return make_case(here, a)


class Case(NamedTuple):
    """A prompt whose whole chunks are in the pool, one beside it that has none, and what vLLM answers to both."""

    prompt: Prompt
    beside: Prompt
    computed: Answer
    undisturbed: Answer

    @property
    def tokens(self) -> list[int]:
        return self.prompt.tokens

    def right(self, answers: list[Answer]) -> None:
        """Are these the answers?"""
        for answer, expected in zip(answers, (self.computed, self.undisturbed), strict=False):
            assert answer.agrees(expected)

    def unpolluted(self, reader: Instance) -> None:
        """Has the reader nothing wrong in vLLM's own prefix cache? Its next request uses that."""
        longer = Prompt(self.tokens + self.computed.tokens)
        own, further = reader.one(self.tokens), reader.run(longer)[0]
        assert own.agrees(self.computed)
        assert own.cached > 0
        assert further.cached >= own.cached
        assert further.agrees(reader.run(longer._replace(params=UNCACHED, salt="nobody has this"))[0])

    def hits_again(self, reader: Instance, cached: int = HITS) -> None:
        back = eventually(lambda: (answer := reader.again(self.tokens)).cached == cached and answer)
        assert back.agrees(self.computed)


def make_case(here: FailureNode, a: Instance) -> Case:
    prompt, beside = Prompt(new_tokens(HITS + 17)), Prompt(new_tokens(40), max_tokens=14)
    before = here.stats().chunks
    computed = a.run(prompt)[0]
    assert computed.cached == 0
    undisturbed = a.run(beside._replace(params=UNCACHED))[0]
    eventually(lambda: here.stats().chunks >= before + 4)
    return Case(prompt, beside, computed, undisturbed)


@contextmanager
def client(here: FailureNode, device: str = "host") -> Iterator[Client]:
    with Client(here.socket, PATIENT, device, "host", reconnect=False) as made:
        yield made


def remove(here: FailureNode, keys: list[str]) -> None:
    with client(here) as other:
        assert other.remove([ChunkKey(bytes.fromhex(key)) for key in keys]) == len(keys)


def computed_instead(reader: Instance) -> int:
    """Tokens that the reader's loads have failed to bring, so far."""
    lines = [line for line in reader.log.splitlines() if "are computed, not loaded" in line]
    return sum(int(line.split("vcache: ")[-1].split("] ")[-1].split()[0]) for line in lines)


# ---- chunks that are gone


@pytest.mark.parametrize("left", [0, 2], ids=["none is left", "the first half is left"])
def test_chunks_that_leave_between_look_up_and_lease_are_computed(
    here: FailureNode, reader: Instance, case: Case, left: int
) -> None:
    """And the request does not look again, so it cannot go round in circles. A load in the step has its lease from the look-up."""
    between = reader.name == BETWEEN
    asked, acquired, lost = here.counted("Lookup"), here.counted("Acquire"), computed_instead(reader)
    with stopped_at(reader, here.folder, LEASE) as place:
        answers = place.while_there(lambda: remove(here, place.seen[0][left:]), case.prompt, case.beside)
    case.right(answers)
    assert computed_instead(reader) - lost == (HITS - left * CHUNK if between else 0)
    assert here.counted("Lookup") - asked == int(between)
    assert 1 <= here.counted("Acquire") - acquired <= 1 + int(between)
    case.unpolluted(reader)
    case.hits_again(reader)


def test_what_was_computed_from_anothers_failed_load_is_not_stored(
    here: FailureNode, engines: Engines, a: Instance, case: Case
) -> None:
    """The second request of the step has the first one's blocks from vLLM's own prefix cache, before they are filled."""
    reader = engines.get(IN_STEP)
    longer = Prompt(case.tokens[:HITS] + new_tokens(2 * CHUNK + 9))
    expected = a.run(longer._replace(params=UNCACHED, salt="nobody has this"))[0]
    with meddled(reader, VIEWS, "raise", times=1):
        answers = reader.run(case.prompt, longer, together=True)
    case.right(answers[:1])
    assert answers[1].agrees(expected)
    # Not what the step that failed had made of it.
    found = eventually(lambda: (answer := a.again(longer.tokens)).cached == HITS + 2 * CHUNK and answer)
    assert found.agrees(expected)


# ---- a server that is gone


@pytest.mark.parametrize(
    "place", [LOOK_UP, LEASE, VIEWS, RELEASE], ids=["before look-up", "before lease", "before copy", "before release"]
)
def test_a_server_killed_at_any_moment_costs_a_computation(here: FailureNode, reader: Instance, case: Case, place: str) -> None:
    if place == LOOK_UP and reader.name == IN_STEP:
        pytest.skip("a look-up for a load in the step is its lease")
    with stopped_at(reader, here.folder, place) as moment:
        answers = moment.while_there(here.kill, case.prompt, case.beside)
    case.right(answers)
    case.unpolluted(reader)
    assert reader.again(case.tokens).agrees(case.computed)
    here.serve_again()
    case.hits_again(reader)


def test_a_lease_of_a_server_before_does_not_count(here: FailureNode, reader: Instance, case: Case) -> None:
    """The next server is there, and so are the chunks, when the reader asks whether its lease held."""
    lost = computed_instead(reader)

    def restart() -> None:
        # Until then a lease holds, whatever happens to the server.
        time.sleep(GRACE_SECONDS)
        here.kill()
        here.serve_again()
        with client(here) as other:
            for _ in range(5):
                other.acquire([ChunkKey(bytes.fromhex(key)) for key in keys])

    keys: list[str] = []
    with stopped_at(reader, here.folder, LEASE) as place:
        place.while_there(lambda: keys.extend(place.seen[0]), case.prompt)
    reader.forget()
    with stopped_at(reader, here.folder, RELEASE) as place:
        answers = place.while_there(restart, case.prompt, case.beside)
    case.right(answers)
    assert computed_instead(reader) - lost == HITS
    case.unpolluted(reader)
    case.hits_again(reader)


def test_a_hung_server_holds_a_request_up_once_and_not_for_long(here: FailureNode, reader: Instance, case: Case) -> None:
    with here.server.stopped():
        started = time.monotonic()
        answers = reader.run(case.prompt, case.beside, together=True)
        assert time.monotonic() - started < BOUND_SECONDS
        case.right(answers)
        with meddled(reader, LATE, "count"):
            other = reader.one(new_tokens(HITS + 17))
            assert reader.ask("calls")[LATE] == 0
        assert other.cached == 0
        case.unpolluted(reader)
    case.hits_again(reader)


@pytest.mark.parametrize("place", [LEASE, RELEASE], ids=["before lease", "before release"])
def test_a_server_that_hangs_under_a_request_holds_it_up_as_briefly(
    here: FailureNode, reader: Instance, case: Case, place: str
) -> None:
    with ExitStack() as hung:
        with stopped_at(reader, here.folder, place) as moment:
            answers = moment.while_there(lambda: hung.enter_context(here.server.stopped()), case.prompt, case.beside)
            assert time.monotonic() - moment.went < BOUND_SECONDS
        case.right(answers)
    case.hits_again(reader)


# ---- segments


@pytest.mark.parametrize("place", [LEASE, VIEWS, RELEASE], ids=["before lease", "before copy", "before release"])
def test_a_segment_dropped_while_it_is_mapped_is_no_worse_than_a_miss(
    here: FailureNode, reader: Instance, case: Case, place: str
) -> None:
    def drop() -> None:
        with client(here) as other:
            for segment in other.list_segments():
                other.drop_segment(segment.id)

    with stopped_at(reader, here.folder, place) as moment:
        answers = moment.while_there(drop, case.prompt, case.beside)
    case.right(answers)
    case.unpolluted(reader)
    # A segment that was dropped stays dropped in this server's life.
    here.kill()
    here.serve_again()
    case.hits_again(reader, 0)
    case.hits_again(reader)


def test_chunks_in_a_segment_that_cannot_be_mapped_are_computed(here: FailureNode, reader: Instance, case: Case) -> None:
    """The last two are moved there, to a device that the reader has no access to."""
    fd = make_memfd(8 << 20)
    with client(here, "far") as other:
        try:
            other.add_segment(info("broken", 8 << 20, "far"), fd)
        finally:
            os.close(fd)

        def move() -> None:
            keys = [ChunkKey(bytes.fromhex(key)) for key in place.seen[0][2:]]
            remove(here, place.seen[0][2:])
            reserved = other.reserve(keys, 128 << 10)
            assert [slot.segment for slot in reserved.slots if isinstance(slot, Location)] == ["broken"] * 2
            assert other.commit(reserved.reservation) == 2

        lost = computed_instead(reader)
        with stopped_at(reader, here.folder, LEASE) as place:
            answers = place.while_there(move, case.prompt, case.beside)
        case.right(answers)
        assert computed_instead(reader) - lost == 2 * CHUNK
        case.unpolluted(reader)
        other.drop_segment(other.list_segments()[-1].id)
    case.hits_again(reader)


# ---- leases


def test_the_lease_of_a_slow_copy_is_renewed(here: FailureNode, reader: Instance, case: Case) -> None:
    renewed = here.counted("Renew")
    with meddled(reader, SCATTER, "slow", LEASE_SECONDS + 0.5, times=1):
        answers = reader.run(case.prompt, case.beside, together=True)
    case.right(answers)
    assert answers[0].cached == HITS
    assert here.counted("Renew") > renewed
    case.unpolluted(reader)


def test_what_is_read_after_the_lease_has_ended_is_computed(here: FailureNode, reader: Instance, case: Case) -> None:
    """Its slots are somebody else's by then, and hold what they wrote."""

    def overwritten() -> None:
        time.sleep(LEASE_SECONDS + 0.2)
        here.flip()

    lost = computed_instead(reader)
    with stopped_at(reader, here.folder, VIEWS) as place:
        try:
            answers = place.while_there(overwritten, case.prompt, case.beside)
        finally:
            here.flip()
    case.right(answers)
    assert computed_instead(reader) - lost == HITS
    case.unpolluted(reader)
    case.hits_again(reader)


# ---- promises that are not kept


@pytest.mark.parametrize("there", [0, 2], ids=["nothing comes", "half of it comes"])
def test_an_announced_prefix_that_does_not_come_is_computed(here: FailureNode, a: Instance, reader: Instance, there: int) -> None:
    tokens, beside = new_tokens(HITS + 17), Prompt(new_tokens(40), max_tokens=14)
    if there:
        before = here.stats().chunks
        a.one(tokens[: there * CHUNK + 1])
        eventually(lambda: here.stats().chunks >= before + there)
    computed, undisturbed = a.run(*(Prompt(each.tokens, each.max_tokens, params=UNCACHED) for each in (Prompt(tokens), beside)))
    lost = computed_instead(reader)
    announced = Prompt(tokens, params={"vcache": {"announced": True, "wait_seconds": 0.5}})
    case = Case(announced, beside, computed, undisturbed)
    case.right(reader.run(announced, beside, together=True))
    assert computed_instead(reader) - lost == HITS - there * CHUNK
    case.unpolluted(reader)
    case.hits_again(reader)


def test_requests_go_on_while_another_waits_for_what_was_announced(reader: Instance, a: Instance) -> None:
    prompt, beside = Prompt(new_tokens(HITS + 17)), Prompt(new_tokens(40), max_tokens=14)
    computed, undisturbed = a.run(*(each._replace(params=UNCACHED) for each in (prompt, beside)))
    reader.ask("add", "waits", prompt._replace(params={"vcache": {"announced": True, "wait_seconds": 600}})._asdict())
    reader.ask("step", 2)
    reader.ask("add", "beside", beside._asdict())
    done = reader.ask("step", 20)
    assert list(done) == ["beside"]
    assert Answer(*done["beside"]).agrees(undisturbed)
    reader.ask("abort", "waits")
    reader.ask("step", 5)
    assert reader.one(prompt.tokens).agrees(computed)


# ---- an instance that dies


def test_an_instance_killed_in_the_middle_of_loads_and_stores_leaves_the_pool_as_it_was(
    here: FailureNode, engines: Engines, a: Instance, case: Case
) -> None:
    """One of its requests holds a lease, another one's store waits for its commit."""
    victim = engines.get("victim")
    assert victim.one(case.tokens).agrees(case.computed)
    victim.forget()
    fresh, chunks = new_tokens(HITS + 17), here.stats().chunks
    with closing(victim), stopped_and_killed(victim, here.folder) as moment:
        moment(case.prompt, Prompt(fresh))
        eventually(lambda: here.stats().reservations >= 1)
        eventually(lambda: here.stats().leases >= 1)
    eventually(lambda: (stats := here.stats()).reservations == stats.leases == 0, LEASE_SECONDS + 20)
    assert here.stats().chunks == chunks
    for name in (BETWEEN, IN_STEP):
        case.hits_again(engines.get(name))
        assert engines.get(name).again(fresh).agrees(a.one(fresh, params=UNCACHED))


@contextmanager
def stopped_and_killed(victim: Instance, folder: Path) -> Iterator[Callable[..., None]]:
    """Give it prompts; it then commits nothing, and stops for good before it releases its first lease."""
    victim.ask("meddle", COMMIT, "stop", str(folder / "commit"), FOREVER, False)
    victim.ask("meddle", RELEASE, "stop", str(folder / "release"), FOREVER, False)

    def run(*prompts: Prompt) -> None:
        for at, prompt in reversed(list(enumerate(prompts))):
            victim.ask("add", str(at), prompt._asdict())
            if at:
                victim.ask("step", 2)
        victim.tell("step", 4)
        eventually((folder / "release").exists, ANSWER_SECONDS)

    yield run


# ---- exceptions of our own

PLACES = [
    *(f"{OURS}.scheduler:SchedulerSide.{name}" for name in ("matched", "allocated", "add_stores", "update", "finished")),
    *(f"{OURS}.worker:WorkerSide.{name}" for name in ("store", "measured", "_fence", "_note")),
    f"{OURS}.worker:Loading.__init__",
    *(f"vcache_backend.transfer.load:Load.{name}" for name in ("_launch", "_settle")),
    *(f"{OURS}.stats:Meter.{name}" for name in ("loaded", "failed", "take")),
    *(f"vcache_backend.transfer.session:Session.{name}" for name in ("scatter", "verdict")),
    "vcache_backend.transfer.places:BlockPlaces.store_plan",
    *(f"vcache_backend.vram_pool.pool:Pool.{name}" for name in ("slots", "mapped")),
]
"""Methods that run with every request, down to those of the pool. Not those whose few lines are what keeps a load from getting lost
(`begin`, `invalid`)."""
IN_STEP_PLACES = [
    f"{OURS}.scheduler:SchedulerSide.allocated",
    f"{OURS}.worker:WorkerSide.load_in_step",
    f"{OURS}.worker:WorkerSide._note",
    f"{OURS}.worker:Loading.__init__",
    "vcache_backend.transfer.load:Load._launch",
    "vcache_backend.transfer.session:Session.scatter",
    "vcache_backend.transfer.session:Session.verdict",
]
ALWAYS = [f"{OURS}.scheduler:SchedulerSide.update", f"{OURS}.scheduler:SchedulerSide.add_stores", f"{OURS}.stats:Meter.failed"]
RAISED = [
    *((BETWEEN, place, 1) for place in PLACES),
    *((IN_STEP, place, 1) for place in IN_STEP_PLACES),
    *((BETWEEN, place, FOREVER) for place in ALWAYS),
]


@pytest.mark.parametrize(
    ("reader", "place", "times"), RAISED, indirect=["reader"], ids=lambda value: str(value).rpartition(":")[2]
)
def test_an_exception_of_ours_is_a_miss(
    here: FailureNode, engines: Engines, reader: Instance, a: Instance, case: Case, place: str, times: int
) -> None:
    """A hit, a prompt that is computed in two steps and stored, and one whose chunks leave the pool before they are loaded."""
    stored, gone = Prompt(new_tokens(6 * CHUNK + 9)), make_case(here, a)
    expected = a.run(stored._replace(params=UNCACHED))[0]
    reader.forget()
    with meddled(reader, place, "raise", times=times):
        case.right(reader.run(case.prompt, case.beside, together=True))
        assert reader.run(stored)[0].agrees(expected)
        reader.ask("meddle", LEASE, "raise", None, 1, False)
        assert reader.run(gone.prompt)[0].agrees(gone.computed)
    case.unpolluted(reader)
    gone.unpolluted(reader)
    assert reader.run(stored)[0].agrees(expected)
    other = engines.get(IN_STEP if reader.name == BETWEEN else BETWEEN)
    assert other.again(stored.tokens).agrees(expected)
    case.hits_again(reader)


# ---- bytes that change in the pool


def test_wrong_bytes_are_wrong_tokens_without_checksums(here: FailureNode, reader: Instance, case: Case) -> None:
    """So the tests above would see them."""
    with here.corrupted():
        wrong = reader.again(case.tokens)
    assert wrong.cached == HITS
    assert wrong.differs(case.computed)
    case.hits_again(reader)


def test_wrong_bytes_are_computed_with_checksums(here: FailureNode, engines: Engines, a: Instance) -> None:
    checked = engines.get("checked")
    case = make_case(here, checked)
    with here.corrupted():
        checked.forget()
        answers = checked.run(case.prompt, case.beside, together=True)
        case.right(answers)
        case.unpolluted(checked)
    assert computed_instead(checked) == HITS
    case.hits_again(checked)
