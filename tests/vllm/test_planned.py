"""What an instance finds in another one, and what it has loaded then, for models of all kinds of
block tables: vLLM's own schedulers with the connector's half, a real server, no model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from random import choices
from typing import Any

import pytest
from processes import start_server
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from soak.ahead import Ahead
from soak.hits import KINDS, measured
from soak.planned import MODELS, ROLES, Planned, caught
from soak.scheduling import Instance, Place, Tables, full, place, state, window
from vllm.v1.request import RequestStatus

pytestmark = needs_vllm
PAIRS, TURNS = 60, 200
"""Questions about a kind of models, and steps of a run."""


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("hits")
    with start_server(folder / "vcache.sock", {}), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        with place(folder / "vcache.sock", folder) as made:
            yield made


@pytest.mark.parametrize("kind", KINDS)
def test_another_instance_finds_what_the_owners_own_cache_finds(where: Place, kind: str) -> None:
    """To the token, whatever has been evicted, and wherever prompts part."""
    result = measured(where, kind, PAIRS)
    assert result.wrong == []
    assert 4 * result.found_some > PAIRS, "too few find anything"


@pytest.mark.parametrize("resets", [False, True])
def test_who_hits_within_a_block_of_vllms_own_cache_is_found(where: Place, resets: bool) -> None:
    """A state's block is larger than one of attention, and vLLM's own hits end within it. But parts
    of blocks have no generation, so that nothing is published behind one that a reset which vLLM
    refused has left there."""
    with ExitStack() as undo:
        tables = Tables([full(16), state(64)])
        owner, other = (Instance(where, undo, tables) for _ in range(2))
        tokens = choices(range(3, 1000), k=60)
        owner.finish(owner.add(tokens))
        if resets:
            running = owner.add([1, 2], 9)
            owner.step()
            assert not owner.scheduler.reset_prefix_cache(reset_connector=True)
            owner.finish(running)
        first = owner.half.publications.generations.coming
        for turn in (1, 2):
            tokens = tokens + choices(range(3, 1000), k=420)
            assert owner.own(tokens) % 64
            owner.finish(owner.add(tokens))
            assert other.found([*tokens, 1]) == (0 if resets else (60 + 420 * turn) // 64 * 64)
        assert (owner.half.publications.generations.coming == first) == resets


@pytest.mark.parametrize(
    ("behind", "others", "resets"),
    [(100, False, True), (1, False, True), (100, True, True), (100, True, False)],
)
def test_behind_a_window_from_before_a_reset_nothing_is_published(
    where: Place, behind: int, others: bool, resets: bool
) -> None:
    """Its request and one that reads no cache have computed the same blocks, before and after a
    reset that vLLM refused. Of the older blocks those of full attention are evicted first. In its
    first step this must be seen, even if that completes no block, or may publish nothing yet since
    another connector loads: later the window's block may be another request's, and right."""
    with ExitStack() as undo:
        owner = Instance(where, undo, Tables([full(64), window(40, 64)]), blocks=40)
        tokens = choices(range(3, 1000), k=330)
        before = owner.add(tokens, 20)
        owner.step()
        older = set(owner.manager.get_block_ids(before.request_id)[0])
        if resets:
            assert not owner.scheduler.reset_prefix_cache(reset_connector=True)
        again = owner.request(tokens)
        again.skip_reading_prefix_cache = True
        owner.scheduler.add_request(again)
        owner.finish(before, again)
        owner.manager.block_pool.evict_blocks(older)
        steps = []
        if others:
            owner.add(choices(range(3, 1000), k=100))
            with owner.others_bring(64):
                steps.append(owner.scheduler.schedule())
        asked = owner.add([*tokens[:320], *choices(range(3, 1000), k=behind)], 99)
        steps.append(owner.scheduler.schedule())
        for output in steps:
            owner.end(output)
        metas = [steps[-1].kv_connector_metadata]
        assert owner.half._requests[asked.request_id].local == 320
        rows = owner.manager.get_block_ids(asked.request_id)
        metas += [owner.step() for _ in range(40)]
        while asked.num_computed_tokens < 370:
            owner.finish(owner.add(choices(range(3, 1000), k=400)))
        void = owner.half.publications.generations.has_void
        assert [void(rows[0][:5]), void([rows[1][4]])] == [False, resets and behind == 100]
        metas += [owner.step() for _ in range(30)]
        assert any(meta.publications for meta in metas) == (not resets)


def test_what_was_found_of_a_prompt_is_not_taken_for_its_answer(where: Place) -> None:
    """A decode server's request is preempted, and asks again while the look-up of its prompt still
    counts. The last block that was found holds no token of the answer."""
    with ExitStack() as undo:
        prefill, decode = (
            Instance(where, undo, Tables([full()]), role=role)
            for role in ("kv_producer", "kv_consumer")
        )
        tokens = choices(range(3, 1000), k=40)
        prefill.finish(prefill.add(tokens))
        asked = decode.add(tokens, 9)
        for _ in range(2):
            while asked.status != RequestStatus.WAITING_FOR_REMOTE_KVS:
                decode.step()
            assert asked.num_computed_tokens == 39
            decode.step(finished_recving={asked.request_id})
            for _ in range(3):
                decode.step()
            decode.scheduler.running.remove(asked)
            decode.scheduler._preempt_request(asked, 0.0)
        assert asked.num_tokens > 41


# ---- whatever happens


@pytest.mark.parametrize("model", MODELS)
def test_what_is_published_and_loaded_is_right_whatever_happens(where: Place, model: str) -> None:
    """As many runs as it takes to see all of it: how many steps a look-up takes depends on what
    else the machine does.
    """
    seen, due = Counter[str](), ["loaded", "aborted", "preempted"]
    due += ["tails", "to the last token"] if model in ROLES else []
    for run in range(4):
        with ExitStack() as undo:
            seen += Planned(where, model, undo, f"{7 + run} {model}").run(TURNS)
        if all(seen[what] for what in due):
            break
    assert min(seen[what] for what in due) > 0, seen
    assert seen["held"] > TURNS, seen


def test_it_is_seen_where_loads_of_changed_blocks_count(where: Place) -> None:
    assert caught(where, "mixed", "7")


@pytest.mark.parametrize("share", ["pool", "in_place"])
def test_a_load_that_begins_at_once_disturbs_no_step_and_no_store(where: Place, share: str) -> None:
    """vLLM holds back what a step under way uses, and who stores hears of what has a new owner."""
    seen, due = Counter[str](), ["loads behind steps", "loads over stores", "others' loads"]
    due += ["failed", "preempted", "aborted loads"]
    for run in range(8):
        with ExitStack() as undo:
            seen += Ahead(where, share, undo, f"{7 + run}").run(TURNS)
    assert min(seen[what] for what in due) > 0, seen


@pytest.mark.parametrize(
    ("lacks", "seen"), [("holding back", "a step under way uses"), ("fresh", "no step waits")]
)
def test_it_is_seen_where_a_load_disturbs_a_step_or_a_store(
    where: Place, lacks: str, seen: str
) -> None:
    def forgetful(describe: Any) -> Any:
        def call(output: Any) -> Any:
            (meta := describe(output)).fresh = []
            return meta

        return call

    with pytest.raises(AssertionError, match=seen), ExitStack() as undo:
        for run in range(5):
            made = Ahead(where, "pool", undo, f"{7 + run}")
            if lacks == "fresh":
                made.half.describe = forgetful(made.half.describe)
            else:
                made.scheduler.defer_block_free = False
            made.run(TURNS)
