"""The plugin inside real vLLM with LMCache: what of LMCache's own features it keeps to, and what it
keeps. What requests are answered: test_real_hits; what fails: test_real_failures and
test_injector_lmcache."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm_cases
from processes import eventually
from test_start import end_servers, servers
from vllm_cases import CHUNK, Instance, Node, here, missing, new_tokens

from vcache_backend.integration.lmcache.scheduler import PLAIN, TAG

__all__ = ["here"]
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "LMCache is here")
TIERS = {"local_cpu": True, "max_local_cpu_size": 0.01, "save_unfull_chunk": True}
"""LMCache's host tier beside ours, and parts of chunks, which LMCache would store."""


@pytest.fixture(scope="module")
def a(here: Node) -> Instance:
    return here.start("a", TIERS)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where instances start servers, which end with the test."""
    yield tmp_path
    end_servers(tmp_path / "vcache.sock")


# ---- in an instance


def engine(_: object = None) -> Any:
    """LMCache's."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    return get_kv_transfer_group()._lmcache_engine.lmcache_engine


def worker() -> Any:
    """The plugin's."""
    return engine().storage_manager.storage_backends["vcache"].worker


def freeze(_: object, on: bool) -> None:
    engine().freeze(on)


def bypass(_: object, on: bool) -> None:
    engine().storage_manager.set_backend_bypass("vcache", on)


def void(_: object, on: bool) -> None:
    """Another rank has begun a reset of which the scheduler has not heard yet."""
    worker()._voided = math.inf if on else 0.0


def fill_host_tier(_: object, prompt: list[int]) -> tuple[int, int]:
    """Put chunks there under the prompt's keys, as a disk or a server behind it would that others
    fill, too. How many it had before, and now."""
    tier, metadata = engine().storage_manager.local_cpu_backend, engine().metadata
    had, (shapes, dtypes) = len(tier.hot_cache), (metadata.get_shapes(CHUNK), metadata.get_dtypes())
    found = engine().token_database.process_tokens(prompt, request_configs={TAG: PLAIN})
    for _start, _end, key in found:
        tier.submit_put_task(key, tier.allocate(shapes, dtypes))
    return had, len(tier.hot_cache)


def look_ups(_: object, prompt: list[int], most: int) -> int:
    """Of requests that never run, more than are kept; how many are."""
    from vcache_backend.integration.lmcache import worker as module

    module.MOST_HITS, database = most, engine().token_database
    hashes = [value for _, _, value in database.process_tokens(prompt, make_key=False)]
    asked = {"hashes": hashes, "offsets": [CHUNK] * len(hashes), "pin": True}
    for number in range(most + 2):
        found = engine().lookup(lookup_id=f"{number}", request_configs={TAG: PLAIN}, **asked)
        assert found == len(prompt)
    return len(worker()._hits)


def clear(_: object) -> int:
    return int(engine().clear())


# ---- what it does


def test_a_chunk_counts_once_every_rank_has_its_part(here: Node) -> None:
    """The first test: a count of an earlier load could still come."""
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with here.start("ranks", **ranks) as both:
        tokens, known = new_tokens(3 * CHUNK + 1), set(here.chunk_keys())
        computed = both.one(tokens)
        here.stored(len(known) + 2 * 3)
        loaded = here.stats().counters.get("loaded_tokens", 0)
        own, again = both.one(tokens), both.again(tokens)
        eventually(lambda: here.stats().counters["loaded_tokens"] == loaded + 3 * CHUNK)
        assert (again.cached, again.said) == (own.cached, own.said) == (3 * CHUNK, own.said)
        assert again.agrees(computed)
        second = [key for key in here.chunk_keys() if key not in known and key.endswith(b"\0\1")]
        with here.connection() as client:
            assert client.remove(second[:1]) == 1
            less = both.again(tokens)
            assert less.cached < 3 * CHUNK
            assert less.agrees(computed)
            client.clear(b"")


def test_another_tier_and_parts_of_chunks_are_left_alone(here: Node, a: Instance) -> None:
    """The other tier's keys say nothing of the layout of the bytes."""
    tokens, others = new_tokens(2 * CHUNK + 9), new_tokens(3 * CHUNK + 1)
    here.keep(a, tokens)
    a.one(new_tokens(CHUNK - 1))
    assert a.ask(fill_host_tier, others[:-1]) == (0, 3)
    assert (here.chunks(), a.again(tokens).cached, a.again(others).cached) == (2, 2 * CHUNK, 0)


@pytest.mark.parametrize("stop", [freeze, bypass, void])
def test_while_nothing_may_be_stored_nothing_is(
    here: Node, a: Instance, stop: Callable[[object, bool], None]
) -> None:
    """LMCache is frozen or goes round the plugin, or the step was planned before a reset."""
    a.ask(stop, True)
    tokens, before = new_tokens(2 * CHUNK + 1), here.chunks()
    for prompt in (tokens, new_tokens(5)):
        a.one(prompt)
    assert here.chunks() == before
    a.ask(stop, False)
    a.forget()
    here.keep(a, tokens)
    assert a.again(tokens).cached == 2 * CHUNK


def test_few_look_ups_are_kept_and_one_that_is_forgotten_is_made_again(
    here: Node, a: Instance
) -> None:
    tokens = new_tokens(3 * CHUNK + 1)
    here.keep(a, tokens)
    assert a.ask(look_ups, tokens[:-1], 0) == 0
    assert a.again(tokens).cached == 3 * CHUNK
    assert "failed to load" not in a.log
    assert a.ask(look_ups, tokens[:-1], 2) == 2


def test_clear_forgets_the_namespace(here: Node, a: Instance) -> None:
    tokens = new_tokens(3 * CHUNK + 1)
    here.keep(a, tokens)
    chunks = here.chunks()
    assert a.ask(clear) == chunks * CHUNK
    assert (here.chunks(), a.again(tokens).cached) == (0, 0)


def test_a_server_that_an_instance_has_started_outlives_it(folder: Path) -> None:
    """And one that came before there was a server finds it later."""
    made = Node(folder, vllm_cases.QUICK)
    with made.undo:
        tokens, early = new_tokens(2 * CHUNK + 1), made.start("early")
        assert early.one(tokens).cached == 0
        assert f"start one with `vcache serve --socket {made.socket}`" in early.log
        with made.start("starts", {"vcache": {"connector": {"start_server": True}}}) as starts:
            computed = starts.one(tokens)
            made.stored(2)
        assert servers(made.socket)
        found = eventually(lambda: (hit := early.again(tokens)).cached == 2 * CHUNK and hit)
        assert found.agrees(computed)
