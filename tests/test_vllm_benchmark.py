"""The benchmark of real vLLM instances: its prompts, its rows, its children; and, where vLLM for
the CPU is, the whole script on it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from processes import Worker
from vllm_cases import forking, missing

from benchmarks import __main__ as bench
from benchmarks.processes import Child, ChildFailed
from benchmarks.results import Report, Row, fraction, read, row
from benchmarks.vllm import groups, latency
from benchmarks.vllm.answers import Answer
from benchmarks.vllm.environment import descends
from benchmarks.vllm.equality import said
from benchmarks.vllm.fleet import Fleet
from benchmarks.vllm.instances import KINDS
from benchmarks.vllm.probe import Probe
from benchmarks.vllm.prompts import Prompts
from benchmarks.vllm.scale import FULL, TINY, Scale
from benchmarks.vllm_ttft import main
from vcache_backend.integration.vllm.resident_pool import ResidentPool
from vcache_backend.resident.generations import Generations

SLOW_SECONDS = 0.5
ECHO = """
import json, sys, time
for line in sys.stdin:
    command, arguments = json.loads(line)
    if command == "sleep":
        time.sleep(30)
    print(json.dumps({"error": "no"} if command == "refuse" else {"answer": arguments}), flush=True)
"""


def leading(one: list[int], other: list[int]) -> int:
    return next(
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]),
        min(len(one), len(other)),
    )


# ---- prompts


def test_the_full_scale_asks_200_prompts_of_every_length_of_the_issue_and_partial_hits() -> None:
    kinds = Counter(
        "partial" if "+" in hit.kind else int(hit.kind)
        for hit in Prompts(FULL).hits(FULL.equal, FULL.partial)
    )
    assert sum(kinds.values()) == 200
    assert set(kinds) == {1023, 1024, 1025, 4096, 16384, 32768, "partial"}


@pytest.mark.parametrize("scale", [FULL, TINY], ids=["full", "tiny"])
def test_a_hit_knows_as_many_tokens_as_whole_chunks_are_shared(scale: Scale) -> None:
    for hit in Prompts(scale).hits(scale.equal, 25):
        shared = leading(hit.first, hit.then)
        whole = shared - shared % scale.chunk
        assert hit.cached == (whole - 1 if whole == len(hit.then) else whole)
        assert hit.cached > 0


def test_through_our_connector_a_hit_ends_with_a_whole_block_of_which_one_token_at_least_is_computed(
    tmp_path: Path,
) -> None:
    with Fleet(FULL, tmp_path, tmp_path, integration="vllm") as fleet:
        assert [fleet.scale.hit(length) for length in (1023, 1024, 1025, 4096)] == [
            768,
            1008,
            1024,
            4080,
        ]
    with Fleet(FULL, tmp_path, tmp_path) as fleet:
        assert [fleet.scale.hit(length) for length in (1023, 1024, 1025, 4096)] == [
            768,
            1023,
            1024,
            4095,
        ]


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_tokens_fit_into_the_kv_cache_of_every_kind_of_instance(kind: str) -> None:
    own = KINDS[kind].of(FULL)
    tokens = own.kv_bytes / (own.token_bytes * KINDS[kind].value_bytes / 2)
    assert tokens == FULL.kv_bytes / FULL.token_bytes


def test_a_hit_of_a_model_with_states_brings_one_state_of_each_such_layer_and_tokens_of_the_others_alone() -> (
    None
):
    """Granite's are 64 heads of 64 x 128, and three tokens of 4,096 + 2 x 128 values; two of its
    twelve layers keep tokens, of 8 x 64.
    """
    own = KINDS["state_mamba2"].of(FULL)
    assert own.token_bytes == 2 * 2 * 2 * 8 * 64
    assert own.read_bytes(768) == 768 * own.token_bytes + 10 * 2 * (
        64 * 64 * 128 + 3 * (4096 + 2 * 128)
    )


def test_a_run_has_the_same_prompts_as_the_one_before_and_none_twice() -> None:
    one, again = (Prompts(TINY).hits(TINY.equal, 10) for _ in range(2))
    assert one == again
    starts = [tuple(hit.first[: TINY.chunk]) for hit in one]
    assert len(set(starts)) == len(starts)


# ---- rows


def times(**of_4k: float) -> latency.Samples:
    return {(variant, name): [of_4k[variant]] * 5 for variant in of_4k for name in FULL.lengths}


def rows_of(tmp_path: Path, integration: str = "lmcache", **seconds: float) -> dict[str, Row]:
    with Fleet(FULL, tmp_path, tmp_path, integration=integration) as fleet:
        return {row.case: row for row in latency._rows(fleet, times(**seconds), 350.0, [])}


def test_a_hit_is_allowed_the_own_hit_the_copy_with_a_reserve_and_2_ms(tmp_path: Path) -> None:
    found = rows_of(tmp_path, recompute=0.1, prefix=0.006, vcache=0.0095)
    allowed = 6.0 + 4096 * 128 * 1024 / 350e6 * 1.15 + 2.0
    assert found["lmcache_ttft_4k"].reference == pytest.approx(allowed)
    assert found["lmcache_ttft_4k"].ratio == pytest.approx(9.5 / allowed)
    assert found["lmcache_ttft_4k"].ok
    assert found["lmcache_vs_recompute_4k"].ratio == pytest.approx(0.1 / 0.0095)
    assert not rows_of(tmp_path, recompute=0.1, prefix=0.006, vcache=0.0098)["lmcache_ttft_4k"].ok


def test_rows_bear_the_integrations_name_and_what_was_not_measured_has_none(tmp_path: Path) -> None:
    found = rows_of(
        tmp_path, integration="vllm", recompute=0.1, prefix=0.006, vcache=0.009, lmcache=0.0095
    )
    assert found["vllm_ttft_vs_lmcache_4k"].ratio == pytest.approx(9.0 / 9.5)
    assert {"vllm_ttft_4k", "vllm_vs_recompute_32k", "vllm_lmcache_ms_1k"} <= set(found)
    assert all(case.startswith("vllm_") and "_mp_" not in case for case in found)
    slower = rows_of(
        tmp_path, integration="vllm", recompute=0.1, prefix=0.006, vcache=0.0096, lmcache=0.0095
    )
    assert not slower["vllm_ttft_vs_lmcache_32k"].ok


@pytest.mark.parametrize(("integration", "most"), [("lmcache", 1.10), ("vllm", 1.05)])
def test_what_loads_may_cost_running_requests_depends_on_the_integration(
    tmp_path: Path, integration: str, most: float
) -> None:
    with Fleet(FULL, tmp_path, tmp_path, integration=integration) as fleet:
        for factor, good in ((most - 0.01, True), (most + 0.01, False)):
            rows = {
                row.case: row
                for row in latency._gaps(fleet, [7.0] * 99, [7.0 * factor] * 99, [7.0], "")
            }
            assert rows[f"{integration}_tpot_p99"].ok is good


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


def test_models_with_states_have_one_row_together_once_each_has_its_own_and_a_wrong_hit_of_one_is_seen_in_it() -> (
    None
):
    good = [fraction(f"groups_equal_{kind}", [True] * 32, "") for kind in groups.STATES]
    assert groups.together(good[1:]) == []
    (whole,) = groups.together(good)
    assert (whole.case, whole.ok, whole.runs) == ("groups_equal_state", True, 96)
    (wrong,) = groups.together([fraction(good[0].case, [True] * 31 + [False], ""), *good[1:]])
    assert (wrong.ok, wrong.value) == (False, 95 / 96)
    (short,) = groups.together([good[0], msgspec.structs.replace(good[1], ok=None), good[2]])
    assert short.ok is None


def test_a_result_file_is_continued_and_a_case_measured_again_replaces_the_old(
    tmp_path: Path,
) -> None:
    path = tmp_path / "result.json"
    Report(path, "one").add(
        [row("a", "ms", [1.0], 1.0, what=""), row("b", "ms", [2.0], 1.0, what="")]
    )
    Report(path, "two").add([row("b", "ms", [3.0], 1.0, what="")])
    Report(path, "two", "_again").add([row("b", "ms", [4.0], 1.0, what="")])
    assert [(row.case, row.value) for row in read(path)] == [
        ("a", 1.0),
        ("b", 3.0),
        ("b_again", 4.0),
    ]
    assert json.loads(path.read_text())["commit"] == "two"


@pytest.mark.parametrize(
    "text", [None, "x", "{}", "[]"], ids=["a-folder", "no-json", "no-rows", "no-object"]
)
def test_a_result_file_that_cannot_be_continued_is_refused_before_anything_is_measured(
    text: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "result.json"
    path.mkdir() if text is None else path.write_text(text)
    monkeypatch.setitem(bench.SUBJECTS, "turns", list)
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--only", "turns", "--out", str(path)])
    assert str(path) in capsys.readouterr().err


# ---- the probe in the engine core


class Connector:
    """As vLLM's scheduler sees one."""

    def get_num_new_matched_tokens(self, request: object, computed: int) -> tuple[int, bool]:
        return 64, True

    def update_state_after_alloc(self, request: object, blocks: object, tokens: int) -> None:
        return None

    def build_connector_meta(self, output: object) -> str:
        return "meta"

    def request_finished(self, request: object, blocks: list[int]) -> tuple[bool, None]:
        return False, None

    def request_finished_all_groups(self, request: object, blocks: object) -> tuple[bool, None]:
        return self.request_finished(request, [])


class Block(NamedTuple):
    block_id: int


class BlockPool:
    """As vLLM's, and slow."""

    def get_new_blocks(self, count: int) -> list[Block]:
        time.sleep(SLOW_SECONDS)
        return [Block(number) for number in range(count)]

    def evict_blocks(self, numbers: set[int]) -> None:
        return None

    def reset_prefix_cache(self) -> bool:
        return True


class Request:
    def __init__(self, name: str) -> None:
        self.request_id = name


def test_a_timed_request_is_told_what_its_calls_and_the_steps_of_its_life_took(
    tmp_path: Path,
) -> None:
    connector, file, request, other = (
        Connector(),
        tmp_path / "timed",
        Request("one"),
        Request("other"),
    )
    probe = Probe(connector)
    connector.build_connector_meta(None)
    probe.take("one", {"timed": str(file)})
    probe.take("other", {})
    assert connector.get_num_new_matched_tokens(request, 0) == (64, True)
    connector.update_state_after_alloc(other, None, 64)
    assert [connector.build_connector_meta(None) for _ in range(3)] == ["meta"] * 3
    assert connector.request_finished_all_groups(request, ()) == (False, None)
    connector.build_connector_meta(None)
    (line,) = file.read_text().splitlines()
    spent = json.loads(line)
    assert spent.pop("steps") == 3
    assert set(spent) == {
        "get_num_new_matched_tokens",
        "build_connector_meta",
        "request_finished_all_groups",
    }
    assert all(seconds > 0 for seconds in spent.values())


def test_what_watching_vllms_blocks_adds_to_handing_them_out_is_told_too(tmp_path: Path) -> None:
    connector, file, pool, table = (
        Connector(),
        tmp_path / "timed",
        BlockPool(),
        Generations(b"i" * 16, 4),
    )
    ResidentPool(pool, table, lambda: None)
    table.filled([0, 1])
    probe = Probe(connector, pool)
    probe.take("one", {"timed": str(file)})
    assert pool.get_new_blocks(2) == [Block(0), Block(1)]
    assert table.counters[:3].tolist() == [1, 1, 3]
    connector.request_finished_all_groups(Request("one"), ())
    (line,) = file.read_text().splitlines()
    assert 0 < json.loads(line)["get_new_blocks"] < SLOW_SECONDS, "without what vLLM itself takes"
    table.close()


def test_a_promise_is_broken_once_after_the_step_is_scheduled(tmp_path: Path) -> None:
    connector, note, request = Connector(), tmp_path / "note", Request("one")
    probe = Probe(connector)
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as victim:
        probe.take(
            "one", {"lose": {"how": "kill", "pid": victim.pid, "socket": "", "note": str(note)}}
        )
        connector.update_state_after_alloc(request, None, 0)
        probe.scheduled()
        assert victim.poll() is None
        connector.update_state_after_alloc(request, None, 64)
        assert victim.poll() is None
        probe.scheduled()
        assert victim.wait(20) == -signal.SIGKILL
    assert json.loads(note.read_text()) == {"promised": 64}
    note.unlink()
    connector.update_state_after_alloc(request, None, 64)
    probe.scheduled()
    assert not note.exists()


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


def test_a_child_that_ended_is_told_of_with_its_log(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('as it happens')"]
    with (
        Child("dead", command, tmp_path / "log") as dead,
        pytest.raises(ChildFailed, match="as it happens"),
    ):
        dead.answer(20)


def test_a_process_descends_from_itself_and_from_who_started_it_or_its_parent(child: Child) -> None:
    with child:
        assert descends(child.pid, child.pid)
        assert descends(child.pid, os.getpid())
        assert not descends(os.getpid(), child.pid)
        assert not descends(0, child.pid)
    assert not descends(child.pid, os.getpid())


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--only", "equal,speed"], "no speed"),
        (["--only", "scheduler"], "not for --integration lmcache"),
        (["--with-lmcache"], "add --integration vllm"),
        (["--share", "in_place"], "add --integration vllm"),
        (
            ["--share", "in_place", "--integration", "vllm", "--only", "equal,restart"],
            "restart: not for",
        ),
    ],
)
def test_what_there_is_not_is_refused(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert why in capsys.readouterr().err


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
        ["ttft", "tpot", "equal", "scheduler", "pd", "failures"],
        {"equal", "failed_load_equal", "failed_load_others_equal"},
        {
            "vllm_ttft_4k",
            "vllm_vs_recompute_32k",
            "vllm_tpot_p99",
            "vllm_scheduler_us",
            "pd_ttft_16k",
        },
    ),
    "inplace": (
        ["equal", "flipped", "ttft", "miss"],
        {"equal", "flipped_byte_caught", "pooled_chunks"},
        {"inplace_ttft_4k", "inplace_miss_16k"},
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
