"""The throughput benchmark: its requests, their ceilings, its client, its rows; and, where an
OpenAI server runs, all of it.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm_cases import forking, missing

from benchmarks.results import Row, percentile
from benchmarks.serving.client import Answer, Job, Run
from benchmarks.serving.servers import counter
from benchmarks.serving.summary import compared, figures, of_runs, raw_rows
from benchmarks.serving.systems import FULL, SYSTEMS, TINY, Sizes, memory, serve_arguments
from benchmarks.serving.workloads import (
    Ceilings,
    Plan,
    Request,
    ceilings,
    conversations,
    prefix_repetition,
    simulated,
    unfiltered,
    warm_up,
)
from benchmarks.vllm.scale import GIB
from benchmarks.vllm_serving import main

TRACE = [
    (0, 1200, [0, 1, 2]),
    (0, 700, [0, 3]),
    (3000, 1500, [0, 1, 4]),
    (6000, 300, [5]),
    (9000, 2000, [0, 1, 4, 6]),
    (12000, 100000, [0, 7, *range(100, 293)]),
]
"""Requests 0, 2 and 4 are one conversation, the others stand alone."""


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """A quarter of the trace's lengths, in its own time divided by 6000, all of it."""
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": length, "output_length": 9, "hash_ids": ids}
        for at, length, ids in TRACE
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return change(
        TINY.plan,
        trace=str(path),
        trace_block=128,
        trace_tokens=10**9,
        trace_seconds=2.0,
        longest=1000,
    )


def change(plan: Plan, **over: Any) -> Plan:
    return msgspec.structs.replace(plan, **over)


def shared(one: Request, other: Request) -> int:
    size = min(len(one.tokens), len(other.tokens))
    different = np.flatnonzero(one.tokens[:size] != other.tokens[:size])
    return int(different[0]) if different.size else size


# ---- requests


def test_prefix_repetition_asks_every_prefix_with_as_many_suffixes_of_two_servers_in_turn() -> None:
    requests = prefix_repetition(TINY.plan)
    plan = TINY.plan
    prefixes = Counter(each.tokens[: plan.prefix].tobytes() for each in requests)
    assert set(prefixes.values()) == {plan.repeats}
    assert len(prefixes) == plan.prefixes
    assert {len(each.tokens) for each in requests} == {plan.prefix + plan.suffix}
    assert len({each.tokens.tobytes() for each in requests}) == plan.prefixes * plan.repeats
    assert [each.server for each in requests[:4]] == [0, 1, 0, 1]
    assert prefixes.keys() != {
        each.tokens[: plan.prefix].tobytes() for each in requests[: plan.prefixes]
    }, "not shuffled"


def test_a_replay_shares_what_the_trace_shares_at_a_quarter_of_its_lengths_and_at_its_times(
    plan: Plan,
) -> None:
    requests = conversations(plan)
    assert [len(each.tokens) for each in requests] == [300, 175, 375, 75, 500, 1000]
    assert [each.at for each in requests] == [0.0, 0.0, 0.5, 1.0, 1.5, 2.0]
    assert shared(requests[0], requests[1]) == 128
    assert shared(requests[0], requests[2]) == 256
    assert shared(requests[2], requests[4]) == 375
    assert shared(requests[0], requests[3]) == 0
    assert [each.server for each in requests] == [0, 1, 0, 1, 0, 1]


def test_conversations_are_drawn_whole(plan: Plan) -> None:
    assert [len(each.tokens) for each in conversations(change(plan, trace_turns=2))] == [
        300,
        375,
        500,
    ]
    drawn = {
        tuple(len(each.tokens) for each in conversations(change(plan, trace_tokens=1, seed=seed)))
        for seed in range(20)
    }
    assert drawn == {(300, 375, 500), (175,), (75,), (1000,)}


def test_a_trace_that_is_missing_or_too_short_is_told_of(plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--trace FILE"):
        conversations(change(plan, trace=str(tmp_path / "none")))
    with pytest.raises(ValueError, match="--trace-turns"):
        conversations(change(plan, trace_turns=4))


def test_the_unfiltered_trace_is_a_part_of_it_as_it_is(plan: Plan) -> None:
    requests = unfiltered(change(plan, window=3, window_start=1, window_block=128, servers=3))
    assert [len(each.tokens) for each in requests] == [175, 375, 75]
    assert [(each.server, each.at) for each in requests] == [(0, None), (1, None), (2, None)]
    assert shared(requests[0], requests[1]) == 128


@pytest.mark.parametrize("workload", [prefix_repetition, conversations])
def test_two_runs_ask_the_same_and_another_seed_something_else(plan: Plan, workload: Any) -> None:
    one, again, other = (
        [
            (each.tokens.tobytes(), each.at, each.server)
            for each in workload(change(plan, seed=seed))
        ]
        for seed in (1, 1, 2)
    )
    assert one == again
    assert {tokens for tokens, _, _ in one}.isdisjoint(tokens for tokens, _, _ in other)


def test_the_warm_up_shares_nothing_with_the_workloads(plan: Plan) -> None:
    block = plan.block
    starts = [tokens[:block].tobytes() for tokens in warm_up(plan)]
    asked = {
        each.tokens[:block].tobytes() for each in [*prefix_repetition(plan), *conversations(plan)]
    }
    assert len(set(starts)) == len(starts)
    assert asked.isdisjoint(starts)


# ---- ceilings


def request(server: int, *parts: range) -> Request:
    return Request(np.array([token for part in parts for token in part], np.uint32), server)


def test_ceilings_count_whole_blocks_that_came_before_in_one_cache_and_in_one_a_server() -> None:
    same = range(100, 140)
    asked = [
        request(0, same),
        request(1, same, range(8)),
        request(0, same, range(50, 58)),
        request(1, range(40)),
    ]
    found = ceilings(asked, 16)
    assert found.shared == pytest.approx((32 + 32) / 176)
    assert found.single == pytest.approx(32 / 176)
    assert found.unique == 16 * (2 + 1 + 1 + 2)
    # The last token is never known, and a block after another prefix is another block.
    assert ceilings([request(0, range(32)), request(0, range(32))], 16).shared == pytest.approx(
        16 / 64
    )
    assert ceilings([request(0, range(32)), request(0, range(16, 32), range(16))], 16).shared == 0


def test_a_simulation_of_caches_that_all_read_keeps_what_was_used_last() -> None:
    a, b, c = range(100, 133), range(200, 233), range(300, 333)
    asked = [
        request(0, a),
        request(1, a),
        request(0, b),
        request(0, c),
        request(1, a),
        request(1, b),
    ]
    in_turn = [(index, index + 0.5) for index in range(6)]
    assert simulated(asked, 16, 100, in_turn) == pytest.approx(3 * 32 / (6 * 33))
    # Two blocks a cache: server 0 has lost b to c, server 1 keeps a.
    assert simulated(asked, 16, 2, in_turn) == pytest.approx(2 * 32 / (6 * 33))
    # The second request comes before the first one's first token, and the third was never answered.
    as_answered = [(0, 1.5), (1, 2.5), (2, 0), *in_turn[3:]]
    assert simulated(asked, 16, 100, as_answered) == pytest.approx(32 / (6 * 33))


def test_the_last_token_is_never_known_and_a_block_after_another_prefix_is_another_block() -> None:
    whole = [request(0, range(32)), request(0, range(32))]
    assert ceilings(whole, 16).shared == pytest.approx(16 / 64)
    shifted = [request(0, range(32)), request(0, range(16, 32), range(16))]
    assert ceilings(shifted, 16).shared == 0


def test_round_robin_over_two_caches_halves_what_repetition_can_bring() -> None:
    plan = TINY.plan
    found = ceilings(prefix_repetition(plan), plan.block)
    assert found.shared == pytest.approx(
        (plan.repeats - 1) * plan.prefix / plan.repeats / (plan.prefix + plan.suffix)
    )
    assert found.single < found.shared


@pytest.mark.parametrize("sizes", [FULL, TINY], ids=["full", "tiny"])
def test_the_prefixes_are_more_than_one_instance_holds_and_fit_into_the_pool_with_all_that_is_asked_besides(
    sizes: Sizes,
) -> None:
    plan, token = sizes.plan, sizes.scale.token_bytes
    besides = plan.prefixes * plan.repeats * plan.suffix + plan.warm * (plan.prefix + plan.suffix)
    assert (sizes.kv_bytes + sizes.pool_bytes) // token < plan.prefixes * plan.prefix
    assert plan.prefixes * plan.prefix + besides <= 2 * sizes.pool_bytes // token


# ---- the client


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
USAGE = b'"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,"prompt_tokens_details":{"cached_tokens":8}}'
EVENTS = [
    b'data: {"choices":[{"text":""}]}\n\n',
    b'data: {"choices":[{"text":""}]}\n\n',
    b'data: {"choices":[],%s}\n\n' % USAGE,
]
DONE = b"data: [DONE]\n\n"


def chunked(pieces: list[bytes]) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


def answers(
    reply: bytes,
    jobs: int = 1,
    concurrency: int = 1,
    seconds: float = 20.0,
    at: float | None = None,
) -> list[Answer]:
    """What the client makes of a server that says this to everyone, with a pause before its last 30
    bytes.
    """

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply[:-30])
        await writer.drain()
        writer.write(reply[-30:])
        await writer.drain()
        writer.close()

    async def both() -> list[Answer]:
        async with await asyncio.start_server(talk, "127.0.0.1", 0) as server:
            run = Run([Job(server.sockets[0].getsockname()[1], b"{}", at)] * jobs)
            await run.go(concurrency, seconds)
            return run.answers

    return asyncio.run(both())


@pytest.mark.parametrize("at", [None, 0.0], ids=["closed loop", "at its time"])
@pytest.mark.parametrize(
    "pieces",
    [
        [*EVENTS, DONE],
        [b"".join([*EVENTS, DONE])],
        [EVENTS[0] + EVENTS[1][:9], EVENTS[1][9:], EVENTS[2], DONE],
    ],
)
def test_an_answer_has_its_times_and_what_was_cached_however_it_is_cut(
    pieces: list[bytes], at: float | None
) -> None:
    found = answers(chunked(pieces), 3, 2, at=at)
    assert [(each.prompt, each.cached, each.tokens, each.error) for each in found] == [
        (9, 8, 2, "")
    ] * 3
    assert all(0 < each.sent <= each.first <= each.last for each in found)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (
            b"HTTP/1.1 400 Bad Request\r\ncontent-length: 40\r\n\r\n"
            + b"too long a prompt".ljust(40),
            "400 Bad Request: too long",
        ),
        (chunked(EVENTS), "before [DONE]"),
        (
            chunked([EVENTS[0], b'data: {"error":{"message":"engine died"}}\n\n', DONE]),
            "engine died",
        ),
        (HEAD + b"40\r\ncut off in the middle of it       ", "IncompleteReadError"),
    ],
)
def test_what_is_no_whole_answer_says_why(reply: bytes, error: str) -> None:
    (found,) = answers(reply)
    assert error in found.error


def test_what_is_not_answered_when_the_time_is_up_is_an_error() -> None:
    (found,) = answers(chunked([*EVENTS, DONE]), seconds=0.05, at=60.0)
    assert found.error
    assert not found.sent


# ---- figures and rows


def answer(sent: float, first: float, last: float, error: str = "") -> Answer:
    return Answer(sent=sent, first=first, last=last, prompt=100, cached=60, tokens=11, error=error)


def test_figures_are_of_whole_answers_and_the_others_are_counted() -> None:
    before = {"queries": 100.0, "own": 0.0, "external": 10.0, "preemptions": 0.0}
    after = {"queries": 300.0, "own": 50.0, "external": 90.0, "preemptions": 0.0}
    found = figures([answer(0, 1, 2), answer(1, 1.5, 4), answer(0, 0, 0, "no")], before, after)
    assert (found.requests, found.errors, found.duration) == (3, 1, 4.0)
    assert found.throughput == pytest.approx(0.5)
    assert found.ttft == pytest.approx([1000, 500])
    assert found.tpot == pytest.approx([100, 250])
    assert found.hit_rate == pytest.approx(0.6)
    assert found.shares == pytest.approx({"own": 0.25, "external": 0.4})
    assert figures([answer(0, 0, 0, "no")], before, before).throughput == 0


def rows_of(what: dict[str, str], workload: str = "prefix") -> dict[str, Row]:
    """Rows of systems that answer in so many seconds, by system: alone 4, vcache 1, mp 2."""
    seconds = {"alone": 4.0, "vcache": 1.0, "mp": 2.0}
    rows: list[Row] = []
    for system, said in what.items():
        found = figures([answer(0, seconds[system] / 2, seconds[system])] * 4, {}, {})
        rows += raw_rows(
            system, workload, found, Ceilings(0.8, 0.6, 1000), said, memory(system, FULL)
        )
    return {row.case: row for row in rows}


def test_ahead_is_above_one_in_throughput_and_in_time_to_first_token() -> None:
    found = {
        row.case: row
        for row in compared(rows_of(dict.fromkeys(("alone", "mp", "vcache"), "w")), "prefix")
    }
    assert set(found) == {
        f"vllm_{figure}_vs_{other}_prefix"
        for figure in ("throughput", "ttft_p50")
        for other in ("alone", "mp")
    }
    ours = found["vllm_throughput_vs_alone_prefix"]
    assert ours.ratio == pytest.approx(4)
    assert found["vllm_ttft_p50_vs_mp_prefix"].ratio == pytest.approx(2)
    assert all(row.ok for row in found.values())
    assert (ours.value, ours.reference) == (4.0, 1.0)
    trace = compared(rows_of(dict.fromkeys(("alone", "vcache"), "w"), "trace"), "trace")
    assert {row.case for row in trace} == {
        "vllm_throughput_vs_alone_trace",
        "vllm_ttft_p50_vs_alone_trace",
    }


def test_runs_are_summed_up_by_their_medians_and_compared_where_their_seeds_are_the_same() -> None:
    rows: dict[str, Row] = {}
    for system, runs in {"alone": (4.0, 5.0, 6.0), "inplace": (1.0, 2.0, 4.0)}.items():
        for run, seconds in enumerate(runs):
            assert not any(
                row.case.startswith("inplace_") for row in compared(rows, "prefix_x4")
            ), run
            found = figures([answer(0, seconds / 2, seconds)] * 4, {}, {})
            raw = raw_rows(
                system, "prefix_x4", found, Ceilings(0.8, 0.6, 1), f"w, seed {run}", "so much"
            )
            rows |= {row.case: row for row in of_runs(rows, run, raw)}
    median = rows["vllm_serving_alone_prefix_x4_requests_per_second"]
    assert (median.value, median.runs, median.what[-13:]) == (0.8, 3, "seeds 0, 1, 2")
    assert median.spread > 0
    ahead = {row.case: row for row in compared(rows, "prefix_x4")}
    assert ahead["inplace_x4_throughput_vs_alone"].ratio == pytest.approx(2 / 0.8)
    assert ahead["inplace_x4_throughput_vs_alone"].limit == ">= 1.5"


def test_the_median_of_runs_is_judged_not_the_last_run() -> None:
    rows: dict[str, Row] = {}
    for run, value in enumerate((0.99, 1.0, 0.5)):
        raw = [
            Row(
                "inplace_hit_rate_unfiltered",
                value,
                "fraction",
                1.0,
                value,
                1,
                0.0,
                f"w, seed {run}",
                "",
                None,
            )
        ]
        rows |= {row.case: row for row in of_runs(rows, run, raw, at_least=0.98)}
    median = rows["inplace_hit_rate_unfiltered"]
    assert (median.ratio, median.ok, median.limit) == (0.99, True, ">= 0.98")


def test_only_the_same_workload_is_compared_and_a_hit_rate_stands_beside_its_ceiling() -> None:
    rows = rows_of({"alone": "80 prefixes", "vcache": "90 prefixes"})
    assert compared(rows, "prefix") == []
    assert rows["vllm_serving_alone_prefix_hit_rate"].ratio == pytest.approx(0.6 / 0.8)
    assert rows["vllm_serving_alone_prefix_errors"].ok


def test_percentiles_of_few_samples_are_defined() -> None:
    assert (percentile([], 50), percentile([3.0], 99), percentile([1.0, 2.0, 3.0], 50)) == (
        0.0,
        3.0,
        2.0,
    )


def test_counters_are_added_up_over_their_labels() -> None:
    text = '# TYPE a_total counter\na_total{engine="0"} 3.0\na_total{engine="1"} 4.5\na_total_created 9.0\nb_total 1.0\n'
    assert (counter(text, "a_total"), counter(text, "b_total"), counter(text, "c")) == (
        7.5,
        1.0,
        0.0,
    )


# ---- systems


def test_every_system_has_the_same_vram_and_only_ours_lends_some_of_it() -> None:
    for name in SYSTEMS:
        given = serve_arguments(
            name,
            FULL,
            Path("/m"),
            1,
            {"port": 5, "socket": "/s", "index": 1, "more": {"pool.max_ctas": "32"}},
        )
        kv_bytes = int(given[given.index("--kv-cache-memory-bytes") + 1])
        transfer = (
            json.loads(given[given.index("--kv-transfer-config") + 1])
            if "--kv-transfer-config" in given
            else {}
        )
        lent = transfer.get("kv_connector_extra_config", {}).get("pool", {}).get("segment_bytes", 0)
        on_gpu = (
            not transfer.get("kv_connector_extra_config", {})
            .get("pool", {})
            .get("device", "auto")
            .startswith("host")
        )
        assert kv_bytes + on_gpu * lent == FULL.kv_bytes + FULL.pool_bytes
        assert bool(lent) == (name in ("vcache", "inplace_host"))
        assert on_gpu or 2 * lent == FULL.host_gib * GIB
        shares = (
            transfer.get("kv_connector_extra_config", {}).get("connector", {}).get("share", "pool")
        )
        assert (shares == "in_place") == name.startswith("inplace")
        assert ("--kv-offloading-size" in given) == (name == "offload")
    assert transfer["kv_connector_extra_config"]["pool"]["max_ctas"] == 32
    assert transfer["kv_load_failure_policy"] == "recompute"


# ---- the command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--systems", "alone,faster"], "no faster"),
        (["--gpus", "0", "--workloads", "prefix"], "two servers"),
        (["--workloads", "trace"], "--trace FILE"),
    ],
)
def test_what_cannot_be_run_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert said in capsys.readouterr().err


NEEDED = (
    "uvloop",
    "watchfiles",
    "prometheus-fastapi-instrumentator",
    "model-hosting-container-standards",
)


@pytest.mark.skipif(bool(missing(NEEDED)), reason=missing(NEEDED) or "vLLM is here")
@pytest.mark.timeout(900)
def test_two_servers_answer_on_the_cpu(tmp_path: Path) -> None:
    """vLLM alone, whole answers only, and hits at most as the ceiling has it; how fast is nobody's
    concern.
    """
    arguments = [
        "--scale",
        "tiny",
        "--systems",
        "alone",
        "--workloads",
        "prefix",
        "--prefixes",
        "4",
        "--repeats",
        "4",
    ]
    arguments += ["--seconds", "840", "--commit", "x"]
    arguments += [
        "--out",
        str(tmp_path / "r.json"),
        "--logs",
        str(tmp_path / "logs"),
        "--cache",
        str(tmp_path / "cache"),
    ]
    apart: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": None}
    with forking("benchmarks.vllm_serving", arguments, tmp_path / "log", apart) as script:
        assert script.answer(880) == 0, script.log
    found = {row["case"]: row for row in json.loads((tmp_path / "r.json").read_text())["rows"]}
    assert found["vllm_serving_alone_prefix_errors"]["value"] == 0
    hit = found["vllm_serving_alone_prefix_hit_rate"]
    assert 0 < hit["value"] <= hit["reference"]
    assert hit["value"] == pytest.approx(found["vllm_serving_alone_prefix_hit_rate_own"]["value"])
