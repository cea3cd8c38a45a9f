"""The benchmarks of real vLLM, each a whole script, where vLLM for the CPU is. How fast something
is on a CPU is nobody's concern.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from vllm_cases import forking, missing, needs_vllm

from benchmarks.results import Row, read

WANTED = ("uvloop", "watchfiles", "prometheus-fastapi-instrumentator")
NO_SERVER = missing((*WANTED, "model-hosting-container-standards"))
pytestmark = pytest.mark.timeout(600)


def ran(
    folder: Path, module: str, given: str, **environment: str | None
) -> tuple[int, dict[str, Row]]:
    """The script's exit status, and what it finds, by the rows' names."""
    told = f"--scale tiny --seconds 540 --commit x --out {folder}/result.json --logs {folder}/logs"
    arguments = shlex.split(f"{told} --cache {folder}/cache {given}")
    with forking(module, arguments, folder / "log", environment) as script:
        status = script.answer(580)
        assert "; failed: " not in script.log, script.log[-6000:]
    return status, {row.case: row for row in read(folder / "result.json")}


@needs_vllm
def test_a_byte_that_is_flipped_in_the_owners_kv_cache_is_seen(tmp_path: Path) -> None:
    # A server without a core for a quarter of a second has not died.
    given = "--rounds 1 --only flipped,ttft --integration inplace"
    given += " --set vcache.client.request_seconds=5"
    _, found = ran(tmp_path, "benchmarks.vllm_ttft", given)
    right = ("inplace_flipped_byte_caught", "inplace_pooled_chunks")
    assert [found[case].ok for case in right] == [True, True]
    assert "inplace_async_ttft_4k" in found


def test_of_equal_scores_an_indexer_chooses_the_first_ones_in_order() -> None:
    from benchmarks.vllm.alike import choose

    scores = torch.tensor([[9.0, 1, 2, 2, 3, 2, 9], [9.0, -torch.inf, 9, 9, 9, 9, 9]])
    chosen = torch.full((2, 3), 7, dtype=torch.int32)
    choose(scores, torch.tensor([1, 1]), torch.tensor([6, 3]), chosen)
    assert chosen.tolist() == [[1, 2, 3], [0, 1, -1]]


@pytest.mark.skipif(bool(NO_SERVER), reason=NO_SERVER or "vLLM is here")
def test_two_servers_answer_and_hit_at_most_as_the_ceiling_has_it(tmp_path: Path) -> None:
    """vLLM alone in turn: whole answers only."""
    given = "--arms alone:turn --workloads chat"
    apart = {"VLLM_ENABLE_V1_MULTIPROCESSING": None}
    status, found = ran(tmp_path, "benchmarks.vllm_serving", given, **apart)
    names = (f"vllm_serving_alone_turn_chat_{name}" for name in ("errors", "hit_rate"))
    errors, hit_rate = map(found.get, names)
    assert status == errors.value == 0
    assert 0 < hit_rate.value <= hit_rate.reference
