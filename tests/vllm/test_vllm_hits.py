"""What an instance finds in another one, and what it has loaded then, for models of all kinds of
block tables: vLLM's own schedulers with the connector's half, a real server, no model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from processes import start_server
from vllm_cases import needs_vllm

pytest.importorskip("vllm.v1.core.sched.scheduler", reason="vLLM is not installed")

from soak.planned import MODELS, TURNS, Planned, caught

from benchmarks.hits import KINDS, measured
from benchmarks.vllm.planning import Place, place

pytestmark = needs_vllm
PAIRS = 60


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
    assert result.row.ok, result.row.what


# ---- whatever happens


@pytest.mark.parametrize("model", MODELS)
def test_what_is_published_and_loaded_is_right_whatever_happens(where: Place, model: str) -> None:
    with ExitStack() as undo:
        seen = Planned(where, MODELS[model], undo, f"7 {model}").run(TURNS)
    assert min(seen[what] for what in ("loaded", "aborted", "preempted")) > 0, seen
    assert seen["held"] > TURNS, seen


@pytest.mark.parametrize("model", ["gpt-oss", "mixed"])
def test_it_is_seen_where_loads_of_changed_blocks_count(where: Place, model: str) -> None:
    assert caught(where, model, "7")
