"""When things go wrong around the plugin in a real LMCacheEngine: errors are misses, nothing is
raised, nothing hangs, no byte is wrong.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from engine_cases import Awaited
from kv_cases import CHUNK, SMALL, Arrangement, places
from lmcache_cases import TAGGED, Pool, all_of, chunks, needs_lmcache, pool, served
from processes import QUICK, SECONDS, eventually, hasty
from test_start_server import end_servers, servers

from vcache_backend.config import ClientConfig
from vcache_backend.vram_pool.copies.copier import HostCopier

if TYPE_CHECKING:
    from lmcache_worker import Inside

__all__ = ["pool", "served"]
pytestmark = needs_lmcache
STEPPED_ASIDE = "vcache stepped aside"


NOTHING = all_of(0)
"""No token came, and no byte of the KV cache was touched."""


# ---- the server


def test_an_engine_starts_without_a_server_and_works_once_there_is_one(pool: Pool) -> None:
    engine = pool.engine(client=QUICK)
    assert engine.ask("healthy")
    assert engine.ask("logged", "start one with `vcache serve`")
    engine.store(chunks(2))
    assert engine.lookup(chunks(2), "r") == 0
    assert engine.retrieve(chunks(2)) == NOTHING
    pool.node.serve()

    def stored() -> bool:
        engine.store(chunks(2))
        return engine.lookup(chunks(2)) == 2 * CHUNK

    eventually(stored)
    assert engine.retrieve(chunks(2)) == all_of(2 * CHUNK)


def test_a_server_that_an_engine_has_started_outlives_it_and_so_does_the_pool(pool: Pool) -> None:
    told = {"extra": {"connector": {"start_server": True}}}
    try:
        with pool.engine(**told) as first:
            first.store(chunks(2))
        started = servers(pool.node.path)
        assert pool.engine(**told).retrieve(chunks(2)) == all_of(2 * CHUNK)
        assert servers(pool.node.path) == started != []
    finally:
        end_servers(pool.node.path)


def every_method(inside: Inside, keys: list[Any], objs: list[Any]) -> dict[str, Any]:
    """What methods that LMCache calls answer, if it is not what they answer of nothing. And all
    answer: nothing may be raised.
    """
    there, key = inside.backend, keys[0] if keys else None
    shapes, dtypes = inside.metadata.get_shapes(CHUNK), inside.metadata.get_dtypes()
    names = "contains", "pin", "unpin", "exists_in_put_tasks", "remove"
    answers = {name: (getattr(there, name)(key), False) for name in names}
    answers |= {"contains, pinned": (there.contains(key, pin=True), False)}
    answers |= {"batched_contains": (there.batched_contains(keys), 0)}
    answers |= {"batched_contains, pinned": (there.batched_contains(keys, pin=True), 0)}
    answers |= {"get_blocking": (there.get_blocking(key), None)}
    got = [one for one in there.batched_get_blocking(keys) if one is not None]
    answers |= {"batched_get_blocking": (got, []), "touch_cache": (there.touch_cache(), None)}
    answers |= {"batched_submit_put_task": (there.batched_submit_put_task(keys, objs), None)}
    answers |= {"batched_remove": (there.batched_remove(keys), 0), "clear": (there.clear(), 0)}
    answers |= {"cancel_request": (there.cancel_request("id"), None)}
    answers |= {"memcheck": (there.get_memory_allocator().memcheck(), True)}
    answers |= {"allocate": (there.allocate(shapes, dtypes), None)}
    return {name: answer for name, (answer, nothing) in answers.items() if answer != nothing}


def every_method_for(inside: Inside, prompt: list[int]) -> dict[str, Any]:
    keys = inside.keys(prompt)
    return every_method(inside, keys, [None] * len(keys))


def wait_by(inside: Inside, config: ClientConfig) -> None:
    """Deadlines for the server's answers, from now on."""
    inside.worker.session.client._config = config


@pytest.mark.parametrize("how", ["hangs", "is gone"])
def test_no_method_raises_or_waits_for_ever_if_no_server_answers(pool: Pool, how: str) -> None:
    pool.node.serve()
    engine = pool.engine(client=QUICK)
    engine.store(chunks(2))
    if how == "is gone":
        pool.node.server.kill()
    else:
        engine.ask(wait_by, hasty(QUICK))
        pool.node.server.stop()
    assert engine.lookup(chunks(2), "r") == 0
    assert engine.ask(every_method_for, chunks(2)) == {}
    assert engine.ask("healthy")
    if how == "hangs":
        pool.node.server.cont()
        engine.ask(wait_by, QUICK)
        eventually(lambda: engine.lookup(chunks(2)) == 2 * CHUNK)
        assert engine.retrieve(chunks(2)) == all_of(2 * CHUNK)


def store_garbage(inside: Inside) -> list[Any]:
    tensors, tokens = inside.cache.tensors, chunks(2)
    whole = torch.arange(len(tokens))
    garbage: list[dict[str, Any]] = [{"tokens": tokens}]
    garbage += [{"tokens": tokens, "slot_mapping": whole[:-1]}]
    garbage += [{"tokens": tokens, "slot_mapping": whole + (1 << 40)}]
    garbage += [{"tokens": tokens, "slot_mapping": "no slots"}]
    garbage += [{"tokens": [None], "slot_mapping": whole}]
    return [inside.engine.store(kvcaches=tensors, **given, **TAGGED) for given in garbage]


def test_no_store_raises_whatever_it_is_given_and_then_nothing_is_shared(served: Pool) -> None:
    """What has raised inside may be in any state."""
    engine = served.engine()
    engine.store(chunks(1))
    assert not any(engine.ask(store_garbage))
    (line,) = engine.ask("logged", "shares nothing any more")
    assert "with a traceback" in line
    eventually(lambda: "nothing is shared any more" in str(served.stats().reports))
    engine.store(chunks(2))
    assert served.stats().chunks == 1
    assert engine.lookup(chunks(1), "r") == 0
    assert engine.retrieve(chunks(1)) == NOTHING
    assert served.settled()


# ---- slots that are used again


class LateCopier(HostCopier):
    def pull(self, *given: Any, **more: Any) -> Awaited:  # type: ignore[override]
        super().pull(*given, **more)
        return Awaited(threading.Event())


def copy_late(inside: Inside) -> None:
    inside.worker.session.copier = LateCopier()


def load(inside: Inside, tokens: list[int]) -> int:
    """Without the end of the step. Says how many tokens will be there."""
    slots = places(SMALL, len(tokens))
    return int(inside.load(tokens, None, slots, "r").sum())


def settle(inside: Inside) -> list[int]:
    """What vLLM asks at the end of a step."""
    return sorted(inside.adapter.get_block_ids_with_load_errors())


@pytest.mark.parametrize("changed", [0, 2])
def test_a_load_names_the_blocks_of_chunks_that_changed_under_its_copy(
    served: Pool, changed: int
) -> None:
    """A server that is gone changes nothing."""
    engine, other = served.engine(client=QUICK), served.engine()
    engine.store(chunks(3))
    engine.ask(copy_late)
    assert engine.lookup(chunks(3), "r") == 3 * CHUNK
    # Nobody knows yet: LMCache is told yes, and vLLM asks before it lets a token out.
    assert engine.ask(load, chunks(3)) == 3 * CHUNK
    if changed:
        assert other.ask(remove, chunks(3), 3 - changed) == changed
    served.node.server.kill()
    assert len(engine.ask(settle)) == changed * CHUNK // SMALL.block_size
    assert engine.ask(settle) == []


def test_chunks_removed_after_a_look_up_are_not_there_for_its_request(served: Pool) -> None:
    engine, other = served.engine(), served.engine()
    engine.store(chunks(5))
    assert engine.lookup(chunks(5), "r") == 5 * CHUNK
    assert other.ask(remove, chunks(5), 2) == 3
    assert engine.lookup(chunks(5), "later") == 2 * CHUNK
    assert engine.retrieve(chunks(5), request="r") == all_of(2 * CHUNK)
    assert engine.retrieve(chunks(5), request="later") == all_of(2 * CHUNK)
    assert served.settled()
    assert served.stats().chunks == 2


def remove(inside: Inside, prompt: list[int], first: int) -> int:
    """All chunks from this number on."""
    worker = inside.worker
    names = worker._names(worker._hashes(prompt), TAGGED["request_configs"])
    return worker.session.client.remove(names[first:])


# ---- what the scheduler distrusts


def store_in_step(inside: Inside, tokens: list[int], loaded: list[int], words: list[Any]) -> bool:
    """Load one prompt and store another in a step, and begin further steps with these words.
    Whether all is visible or given up."""
    from vcache_backend.integration.lmcache import worker

    worker.MOST_SECONDS = SECONDS
    inside.begin_step()
    if loaded:
        inside.load(loaded, None, places(SMALL, len(loaded), 1), "r")
        inside.adapter.get_block_ids_with_load_errors()
    slots = inside.prefill(tokens)
    where = {"kvcaches": inside.cache.tensors, "slot_mapping": slots, "req_id": "r"}
    inside.engine.store(tokens, **where, **TAGGED)
    for word in words:
        inside.begin_step(*word)
    return bool(inside.worker.session.flush(0.5))


def depth(inside: Inside) -> int:
    return inside.worker._depth


def test_a_store_beside_a_load_is_found_once_the_scheduler_knows_that_no_load_has_failed(
    served: Pool,
) -> None:
    """In no rank, in the step or those planned before. A failed load is known `depth` steps later at
    the latest. After that stores need not wait."""
    engine, loaded = served.engine(), chunks(1)
    engine.store(loaded)
    before, steps = served.stats().chunks, engine.ask(depth)
    fine, failed = [(0,)] * steps, [(0,)] * (steps - 1) + [(1,)]
    assert not engine.ask(store_in_step, chunks(1, family=2), loaded, fine[1:])
    assert served.stats().chunks == before
    engine.ask(next_step)
    eventually(lambda: served.stats().chunks == before + 1)
    assert engine.ask(store_in_step, chunks(1, family=3), loaded, failed)
    assert served.stats().chunks == before + 1
    assert engine.ask(store_in_step, chunks(1, family=4), [], [])
    assert served.stats().chunks == before + 2


def next_step(inside: Inside) -> None:
    inside.begin_step()


def reset_in_step(inside: Inside, tokens: list[int]) -> tuple[int, bool]:
    """A reset is asked for when a step was planned, before the step stores."""
    from vcache_backend.integration.lmcache.scheduler import RESET

    inside.begin_step()
    asked = {"hashes": [1], "offsets": [CHUNK], "lookup_id": RESET, "request_configs": {RESET: 1}}
    answer = inside.engine.lookup(pin=True, **asked)
    slots = inside.prefill(tokens)
    where = {"kvcaches": inside.cache.tensors, "slot_mapping": slots, "req_id": "r"}
    inside.engine.store(tokens, **where, **TAGGED)
    return answer, inside.flush()


def test_a_step_that_was_planned_before_a_reset_stores_nothing(served: Pool) -> None:
    engine = served.engine()
    engine.store(chunks(2))
    assert engine.ask(reset_in_step, chunks(2, family=2)) == (1, True)
    assert served.stats().chunks == 0
    assert engine.ask(store_in_step, chunks(1), [], []), "planned before it, too"
    assert served.stats().chunks == 0
    engine.ask(planned_after, (1, frozenset("r")))
    assert engine.ask(store_in_step, chunks(1), [], [])
    assert served.stats().chunks == 1


def planned_after(inside: Inside, word: tuple[Any, ...]) -> None:
    inside.begin_step(*word)


@pytest.mark.parametrize("word", [(0, frozenset("r")), (0, None)])
def test_of_a_distrusted_request_nothing_is_stored(served: Pool, word: tuple[Any, ...]) -> None:
    engine = served.engine()
    assert engine.ask(store_distrusted, chunks(1), word)
    assert served.stats().chunks == 0
    engine.store(chunks(1))
    assert served.stats().chunks == 1


def store_distrusted(inside: Inside, tokens: list[int], word: tuple[Any, ...]) -> bool:
    inside.begin_step(*word)
    where = {"kvcaches": inside.cache.tensors, "slot_mapping": inside.prefill(tokens)}
    inside.engine.store(tokens, req_id="r", **where, **TAGGED)
    return inside.flush()


# ---- stepping aside


UNKNOWN = Arrangement("unknown", "block token", dtype=torch.bfloat16)


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "a wrong setting": ({"extra": {"pool": {"segment_byte": 5}}}, "`segment_bytes`"),
    "a setting that cannot work": ({"use_layerwise": True}, "remove use_layerwise"),
    "an unknown layout": ({"arrangement": UNKNOWN}, "axes"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_where_it_must_not_work_it_says_so_once_and_caches_nothing(served: Pool, case: str) -> None:
    options, says = CASES[case]
    engine = served.engine(**options)
    lines = engine.ask("logged", STEPPED_ASIDE)
    assert len(lines) == 1
    assert says in lines[0]
    assert "\n" not in lines[0]
    assert "with a traceback" not in lines[0]
    assert not engine.ask("healthy")
    assert engine.lookup(chunks(2), "r") == 0
    engine.store(chunks(2))
    assert engine.retrieve(chunks(2)) == NOTHING
    assert engine.ask(every_method_for, chunks(2)) == {}
    stats = served.stats()
    assert (stats.chunks, stats.reservations) == (0, 0)
    assert engine.ask("logged", STEPPED_ASIDE) == lines
    # The server is told, where the settings name one.
    assert case == "a wrong setting" or says in str(served.stats().reports)
