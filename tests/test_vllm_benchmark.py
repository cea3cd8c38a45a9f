"""The benchmark of real vLLM instances: its prompts, its rows, its children; and, where vLLM for
the CPU is, the whole script on it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from processes import Worker
from vllm_cases import forking, missing

from benchmarks.processes import Child, ChildFailed
from benchmarks.results import Report, fraction, read, row
from benchmarks.vllm.answers import Answer
from benchmarks.vllm.parts.equality import said

SLOW_SECONDS = 0.5
ECHO = """
import json, sys, time
for line in sys.stdin:
    command, arguments = json.loads(line)
    if command == "sleep":
        time.sleep(30)
    print(json.dumps({"error": "no"} if command == "refuse" else {"answer": arguments}), flush=True)
"""


# ---- prompts


# ---- rows


def test_one_wrong_prompt_of_many_is_a_miss_and_none_at_all_too() -> None:
    assert fraction("x", [True] * 199 + [False], "").ok is False
    assert fraction("x", [], "").ok is False
    assert fraction("x", [True] * 200, "").ok is True
    assert fraction("x", [False], "", limited=False).ok is None


def test_answers_are_the_same_only_bit_for_bit_and_nan_is_like_nan() -> None:
    one = {"tokens": [1], "logprobs": [[(1, -0.5)]]}
    assert said(one) == said({**one, "cached": 3})
    assert said(one) != said({**one, "logprobs": [[(1, -0.5000000000000001)]]})
    assert said({**one, "logprobs": [[(1, float("nan"))]]}) == said(
        {**one, "logprobs": [[(1, float("nan"))]]}
    )


def test_answers_agree_where_likely_tokens_change_places_be_there_a_third_between_them() -> None:
    """The numbers of the second are of a run in which it was taken for wrong."""
    one = Answer([5, 870, 7], [-1.0, -2.157, -1.0], 128, [(1, -9.0), (605, -2.219), (1, -9.0)])
    other = Answer([5, 62, 9], [-1.0, -2.155, -3.0], 0, [(1, -9.0), (870, -2.155), (1, -9.0)])
    assert one.agrees(other)
    assert other.agrees(one)
    assert one.differs(other._replace(seconds=[(1, -9.0), (870, -2.4), (1, -9.0)]))
    assert one.differs(other._replace(seconds=[(1, -9.0), (871, -2.155), (1, -9.0)]))
    assert one.differs(other._replace(logprobs=[-1.2, -2.155, -3.0]))


def test_a_result_file_is_continued_and_a_case_measured_again_replaces_the_old(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    Report(path, "one").add(
        [row("a", "ms", [1.0], 1.0, what=""), row("b", "ms", [2.0], 1.0, what="")]
    )
    Report(path, "two").add([row("b", "ms", [3.0], 1.0, what="")])
    assert [(row.case, row.value) for row in read(path)] == [("a", 1.0), ("b", 3.0)]
    assert json.loads(path.read_text())["commit"] == "two"


# ---- children


@pytest.fixture
def child(tmp_path: Path) -> Child:
    return Child("echo", [sys.executable, "-c", ECHO], tmp_path / "log")


def test_a_child_answers_refuses_and_is_killed_when_it_is_late(child: Child) -> None:
    with child:
        assert child.ask("echo", number=3) == {"number": 3}
        with pytest.raises(ChildFailed, match="no"):
            child.ask("refuse")
        with pytest.raises(ChildFailed, match="in time"):
            child.ask("sleep", 0.2)
        assert not child.alive
        with pytest.raises(ChildFailed):
            child.ask("echo")


# ---- the command


WHOLE = {
    "lmcache": (
        ["sensitive", "flipped", "ttft", "miss", "tpot", "equal", "restart"],
        {
            "equal",
            "flipped_byte_caught",
            "first_token_matters",
            "reference_repeats",
            "restart_hits",
        },
        {
            "lmcache_ttft_4k",
            "lmcache_vs_recompute_32k",
            "lmcache_miss_overhead",
            "lmcache_tpot_p99",
        },
    ),
    "vllm": (
        ["ttft", "tpot", "equal", "scheduler", "pd", "short"],
        {"equal"},
        {
            "vllm_async_ttft_4k",
            "vllm_short_tax",
            "vllm_vs_recompute_32k",
            "vllm_tpot_p99",
            "vllm_scheduler_us",
            "pd_ttft_16k",
        },
    ),
    "inplace": (
        ["equal", "flipped", "ttft", "miss"],
        {"equal", "flipped_byte_caught", "pooled_chunks"},
        {"inplace_async_ttft_4k", "inplace_miss_16k"},
    ),
}
"""By what rows begin with: parts; rows that must be right, and rows that must be there."""


@pytest.fixture(scope="module")
def started(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], tuple[Worker, Path]]]:
    """The whole benchmark at its tiny scale, and its result file; what is asked for is started,
    unless it has been.
    """
    folder = tmp_path_factory.mktemp("benchmark")
    with ExitStack() as undo:

        @cache
        def start(rows: str) -> tuple[Worker, Path]:
            out = folder / f"{rows}.json"
            given = [
                "--scale",
                "tiny",
                "--rounds",
                "2",
                "--seconds",
                "840",
                "--commit",
                "x",
                "--only",
                ",".join(WHOLE[rows][0]),
            ]
            # A server without a core for a quarter of a second has not died.
            given += ["--set", "vcache.client.request_seconds=5"]
            given += [
                "--out",
                str(out),
                "--logs",
                str(folder / rows),
                "--cache",
                str(folder / "cache"),
                "--integration",
            ]
            given += ["vllm", "--share", "in_place"] if rows == "inplace" else [rows]
            return undo.enter_context(
                forking("benchmarks.vllm_ttft", given, folder / f"{rows}.log", {})
            ), out

        yield start


@pytest.mark.skipif(bool(missing()), reason=missing() or "vLLM is here")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("rows", WHOLE)
def test_the_whole_script_runs_on_the_cpu(
    rows: str, started: Callable[[str], tuple[Worker, Path]]
) -> None:
    """Right answers, and a byte flipped where they come from is seen; what the figures say of the
    CPU is nobody's concern.
    """
    if rows != "inplace":
        # Two beside each other; a third would be too much for a small machine.
        for other in ("lmcache", "vllm"):
            started(other)
    script, out = started(rows)
    script.answer(880)
    said = script.log
    assert "; failed: " not in said, said[-6000:]
    found = {row.case: row for row in read(out)}
    _, right, there = WHOLE[rows]
    assert [case for case in right if not found[f"{rows}_{case}"].ok] == [], said[-6000:]
    assert there <= set(found)
