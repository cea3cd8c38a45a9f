"""The demo: its content tells mistakes apart, its simulation is the server's LRU, and a wrong byte is found and named."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vcache_backend import demo
from vcache_backend.config import Config
from vcache_backend.demo import report, simulation, trace
from vcache_backend.demo.cache import Fault, PagedCache
from vcache_backend.demo.children import DemoError
from vcache_backend.demo.content import Shape, block_digests, content, mix, poison
from vcache_backend.demo.jobs import Done
from vcache_backend.demo.lockstep import Outcome
from vcache_backend.demo.plan import Plan, choose_devices, make_plan
from vcache_backend.demo.simulation import Pool
from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server.messages import SegmentId, SegmentInfo

SHAPE = Shape(layers=3, kv_heads=2, head_dim=8, block_size=4)
CPU = torch.device("cpu")
WHOLE_TRACE = Path(__file__).parents[2] / "shared/traces/mooncake-conversation.jsonl"
RUN_SECONDS = 110


# ---- content


def test_the_mix_is_splitmix64() -> None:
    seed, gamma = 1234567, 0x9E3779B97F4A7C15
    counter = torch.tensor([(seed + n * gamma) % 2**64 for n in range(1, 6)], dtype=torch.uint64).view(torch.int64)
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert mix(counter).view(torch.uint64).tolist() == published


def test_all_later_blocks_and_no_earlier_one_change_with_one_token() -> None:
    tokens = np.arange(40)
    before = block_digests(tokens, 4)
    tokens[17] += 1
    assert (block_digests(tokens, 4) != before).tolist() == [False] * 4 + [True] * 6


def test_a_partial_last_block_has_a_digest_of_its_own() -> None:
    assert len(block_digests(np.arange(9), 4)) == 3
    assert block_digests(np.arange(9), 4)[2] != block_digests(np.arange(10), 4)[2]


def bytes_of(digest: int, layer: int) -> torch.Tensor:
    return content(torch.tensor([digest]), layer, SHAPE.row_words).contiguous().view(torch.uint8).flatten()


def test_every_byte_depends_on_the_prefix() -> None:
    variants = torch.stack([bytes_of(digest, 1) for digest in range(64)])
    assert min(len(column.unique()) for column in variants.T) > 40


def test_every_byte_depends_on_the_layer() -> None:
    variants = torch.stack([bytes_of(77, layer) for layer in range(64)])
    assert min(len(column.unique()) for column in variants.T) > 40


def test_no_two_positions_of_a_few_layers_and_blocks_hold_the_same_word() -> None:
    digests = torch.from_numpy(block_digests(np.arange(400), 4))
    words = torch.cat([content(digests, layer, SHAPE.row_words).flatten() for layer in range(8)])
    assert len(words.unique()) == len(words)


def test_workers_have_different_poison() -> None:
    assert len({poison(worker) for worker in range(8)}) == 8


# ---- the paged cache and its check


def prompt_in_cache(retrieved: int = 3) -> tuple[PagedCache, torch.Tensor, torch.Tensor]:
    """Five blocks of prompt at odd places, the first `retrieved` of them filled as a retrieve would."""
    cache = PagedCache(SHAPE, 16, CPU, worker=0)
    digests = torch.from_numpy(block_digests(np.arange(20), SHAPE.block_size))
    places = torch.tensor([11, 2, 7, 0, 15])
    cache.prefill(places[:retrieved], digests[:retrieved])
    return cache, places, digests


def test_right_bytes_are_no_fault() -> None:
    cache, places, digests = prompt_in_cache()
    assert cache.faults(places, digests, 3) == []


@pytest.mark.parametrize("kv", [0, 1])
@pytest.mark.parametrize(("layer", "token"), [(0, 0), (1, 5), (2, 11)])
def test_one_wrong_byte_is_found_with_its_layer_and_token(kv: int, layer: int, token: int) -> None:
    cache, places, digests = prompt_in_cache()
    block = int(places[token // 4])
    cache.kvcaches[layer][kv, block, token % 4].view(torch.uint8)[1, 3] ^= 1
    assert cache.faults(places, digests, 3) == [Fault("wrong", layer, block, token, 1)]


def test_a_byte_written_behind_the_retrieved_tokens_is_stray() -> None:
    cache, places, digests = prompt_in_cache()
    cache.kvcaches[1][0, 0, 2].view(torch.uint8)[0, 0] ^= 1
    assert cache.faults(places, digests, 3) == [Fault("stray", 1, 0, 14, 1)]


def test_a_byte_written_into_a_block_of_nobody_is_stray() -> None:
    cache, places, digests = prompt_in_cache()
    cache.kvcaches[2][1, 5, 3].view(torch.uint8)[1, 15] ^= 1
    fault = Fault("stray", 2, 5, -1, 1)
    assert cache.faults(places, digests, 3) == [fault]
    assert str(fault) == "1 stray byte in layer 2, cache block 5"


def test_two_swapped_blocks_are_found_in_every_layer() -> None:
    cache, places, digests = prompt_in_cache()
    cache.prefill(places[:2].flip(0), digests[:2])
    assert [(fault.kind, fault.layer, fault.token) for fault in cache.faults(places, digests, 3)] == [
        ("wrong", layer, 0) for layer in range(3)
    ]


def test_nothing_but_poison_is_left_after_a_request() -> None:
    cache, places, digests = prompt_in_cache()
    cache.forget(places)
    assert cache.faults(places, digests, 0) == []


def test_the_slot_mapping_is_the_places_of_the_tokens() -> None:
    cache, places, _ = prompt_in_cache()
    assert cache.slots(places, 10).tolist() == [44, 45, 46, 47, 8, 9, 10, 11, 28, 29]


# ---- the simulation


def serve(pool: Pool, keys: Sequence[str]) -> int:
    hits = pool.retrieve(keys)
    pool.store(keys, hits)
    return hits


def contents(pool: Pool) -> str:
    """Coldest first."""
    return "".join(str(key) for key in pool._recent)


def test_the_tail_of_a_prompt_is_colder_than_its_head() -> None:
    pool = Pool(8)
    serve(pool, "abc")
    assert contents(pool) == "cba"


def test_the_prefix_before_new_chunks_ends_up_more_recent_than_they() -> None:
    pool = Pool(8)
    serve(pool, "ab")
    serve(pool, "xy")
    assert serve(pool, "abcd") == 2
    assert contents(pool) == "yxdcba"


def test_a_new_prompt_evicts_the_tail_of_the_coldest_one() -> None:
    pool = Pool(4)
    serve(pool, "abc")
    serve(pool, "xy")
    assert contents(pool) == "bayx"
    assert serve(pool, "abc") == 2
    assert contents(pool) == "xcba"


def test_a_prompt_larger_than_the_pool_keeps_its_head() -> None:
    pool = Pool(3)
    serve(pool, "abcde")
    assert contents(pool) == "cba"
    assert serve(pool, "abcde") == 3


def test_a_prompt_may_evict_its_own_prefix_while_it_is_stored() -> None:
    pool = Pool(3)
    serve(pool, "ab")
    assert serve(pool, "abcde") == 2
    assert contents(pool) == "edc"


def test_a_gap_ends_the_hit() -> None:
    pool = Pool(8)
    serve(pool, "abc")
    assert pool.retrieve("axc") == 1


def test_private_caches_do_not_see_each_others_chunks() -> None:
    prompts = ["ab", "ab", "ab", "ab"]
    assert simulation.private(prompts, 8, 2).hits == [0, 0, 2, 2]
    assert simulation.shared(prompts, 8).hits == [0, 2, 2, 2]


PROMPTS = st.lists(st.lists(st.integers(0, 2), max_size=6).map(lambda path: [tuple(path[: n + 1]) for n in range(len(path))]))
"""Chunks are named by the path of choices that leads to them, so prefixes are shared as in a trace."""


@given(PROMPTS, st.integers(1, 12))
def test_the_pool_is_never_over_capacity_and_stores_as_much_as_it_keeps_and_evicts(
    prompts: simulation.Prompts, capacity: int
) -> None:
    pool, stored = Pool(capacity), 0
    for keys in prompts:
        hits = pool.retrieve(keys)
        stored += pool.store(keys, hits)
        assert len(pool) <= capacity
    assert stored == len(pool) + pool.evictions


@given(PROMPTS, st.integers(1, 12))
def test_no_cache_beats_the_infinite_one_in_any_request(prompts: simulation.Prompts, capacity: int) -> None:
    ceiling = simulation.infinite(prompts).hits
    for outcome in (simulation.shared(prompts, capacity), simulation.private(prompts, capacity, 2)):
        assert all(hits <= most for hits, most in zip(outcome.hits, ceiling, strict=True))


@given(PROMPTS)
def test_a_pool_that_holds_the_working_set_is_infinite(prompts: simulation.Prompts) -> None:
    assert simulation.shared(prompts, max(simulation.unique(prompts), 1)).evictions == 0


@given(PROMPTS)
def test_the_infinite_cache_misses_each_chunk_once(prompts: simulation.Prompts) -> None:
    asked = sum(len(keys) for keys in prompts)
    assert asked - sum(simulation.infinite(prompts).hits) == simulation.unique(prompts)


# ---- the excerpt and the plan


def test_the_excerpt_is_small_valid_and_in_the_order_of_the_trace() -> None:
    requests = trace.excerpt()
    assert len(requests) == trace.REQUESTS
    assert len(trace.dump(requests)) < 100_000
    assert [r.timestamp for r in requests] == sorted(r.timestamp for r in requests)
    for request in requests:
        assert trace.BLOCK_TOKENS < request.input_length <= trace.LONGEST
        assert len(request.hash_ids) == -(-request.input_length // trace.BLOCK_TOKENS)


@pytest.mark.skipif(not WHOLE_TRACE.exists(), reason=f"needs the whole trace, {WHOLE_TRACE}")
def test_the_excerpt_is_cut_from_the_trace_as_the_code_says() -> None:
    assert trace.dump(trace.cut(trace.read(WHOLE_TRACE.read_bytes()))) == trace.dump(trace.excerpt())


def test_equal_ids_are_equal_tokens_and_other_ids_are_others() -> None:
    first, second = trace.Request(0, 700, 1, [5, 6]), trace.Request(9, 1024, 1, [5, 7])
    assert len(trace.tokens(first)) == 700
    assert (trace.tokens(first)[:512] == trace.tokens(second)[:512]).all()
    assert (trace.tokens(first)[512:] != trace.tokens(second)[512:700]).any()


def test_sharing_beats_private_caches_on_the_excerpt_and_evictions_happen() -> None:
    plan = make_plan(trace.excerpt(), 256, ["host:0", "host:1"])
    capacity = 2 * plan.segment_chunks
    shared = simulation.shared(plan.prompts, capacity)
    assert shared.evictions > capacity
    private, ceiling = simulation.private(plan.prompts, capacity, 2), simulation.infinite(plan.prompts)
    assert 1.3 * sum(private.hits) < sum(shared.hits) < sum(ceiling.hits)


def test_the_keys_of_a_plan_are_the_whole_chunks() -> None:
    plan = make_plan([trace.Request(0, 1000, 1, [1, 2])], 256, ["host:0", "host:1"])
    assert [len(prompt) for prompt in plan.prompts] == [3]
    assert plan.chunk_bytes == 512 * 1024


def test_a_chunk_size_that_blocks_do_not_fill_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine\.chunk_size: 250 is not a multiple of .* 16"):
        make_plan(trace.excerpt()[:2], 250, ["host:0"])


# ---- the verdict


def outcome_of(plan: Plan, hits: list[int], evictions: int = 0, **wrong: object) -> Outcome:
    """What a run with these hits by request would have reported."""
    done = [Done(index, hit * plan.chunk_size, hit * plan.chunk_size) for index, hit in enumerate(hits)]
    done[-1] = msgspec.structs.replace(done[-1], **wrong)
    times = {name: {"count": 4, "mean_us": 2.0, "p50_us": 1.0, "p99_us": 3.0} for name in ("lookup", "acquire", "retrieve_copy")}
    stats = [times | {"bytes": {"own": 8000, "peer": 4000}, "failures": {}} for _ in plan.devices]
    segment = SegmentInfo(SegmentId("0" * 12), "host:0", "host", 64 * plan.chunk_bytes, evictions=evictions)
    return Outcome(done, stats, [segment], 1.0)


@pytest.fixture
def plan() -> Plan:
    """The same three chunks asked twice, by one worker after the other."""
    return make_plan([trace.Request(0, 800, 1, [1, 2])] * 2, 256, ["host:0", "host:1"])


def test_a_run_as_simulated_is_right(plan: Plan) -> None:
    summary = report.summarize(plan, outcome_of(plan, [0, 3]))
    assert summary.ok
    assert (summary.hit_rate, summary.hit_rate_lru_simulation, summary.hit_rate_infinite, summary.hit_rate_private) == (
        0.5,
        0.5,
        0.5,
        0,
    )
    assert (summary.bytes_own, summary.bytes_peer, summary.gb_per_s) == (16000, 8000, 1.5)


def test_a_missed_hit_is_an_error_that_names_the_request(plan: Plan) -> None:
    summary = report.summarize(plan, outcome_of(plan, [0, 2]))
    assert summary.problems == [
        "hits differ from the exact LRU simulation in 1 requests, first in request 1 (worker 1): 2 chunks of 3, must be 3"
    ]


def test_an_eviction_too_many_is_an_error(plan: Plan) -> None:
    assert report.summarize(plan, outcome_of(plan, [0, 3], evictions=1)).problems == [
        "1 evictions, the exact LRU simulation has 0"
    ]


def test_a_wrong_byte_is_an_error_that_says_where(plan: Plan) -> None:
    summary = report.summarize(plan, outcome_of(plan, [0, 3], faults=[Fault("wrong", 2, 9, 300, 1)]))
    assert not summary.ok
    assert (summary.wrong_bytes, summary.problems) == (1, ["request 1, worker 1: 1 wrong byte in layer 2, token 300"])


def test_a_failure_that_the_engine_swallowed_is_an_error(plan: Plan) -> None:
    outcome = outcome_of(plan, [0, 3])
    outcome.stats[1]["failures"] = {"lookup: ServerTimeout": 2, "not_stored: no slot": 7}
    assert report.summarize(plan, outcome).problems == ["worker 1 counted 2 failures: lookup: ServerTimeout"]


def test_a_demo_of_no_requests_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        demo.run(Config(), requests=0)


# ---- the whole thing, with real processes


REQUESTS = 24


def start_demo(*arguments: str, folder: Path | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vcache_backend.demo", "--requests", str(REQUESTS), *arguments]
    environment = os.environ | ({"TMPDIR": str(folder)} if folder else {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)"""
    try:
        out, err = process.communicate(timeout=RUN_SECONDS)
    finally:
        process.kill()
    return process.returncode, out, err


def processes_in(folder: Path) -> list[str]:
    """Command lines of living processes that were started for a demo whose files lie in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment, command = (entry / "environ").read_bytes(), (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if f"VCACHE_SOCKET={folder}/".encode() in environment and command:
                found.append(command.replace(b"\0", b" ").decode())
    return found


def wait_for(condition: Callable[[], bool], seconds: float = 40.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A TMPDIR that leaves room for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="vt-", dir="/tmp") as name:
        yield Path(name)


@pytest.mark.timeout(RUN_SECONDS + 10)
def test_the_demo_is_right_in_every_byte_and_every_hit_and_leaves_nothing(short_folder: Path) -> None:
    code, out, err = finish(start_demo("--json", folder=short_folder))
    assert code == 0, out + err
    result = json.loads(out)
    plan = make_plan(trace.excerpt()[:REQUESTS], 256, choose_devices())
    exact = simulation.shared(plan.prompts, result["pool_chunks"])
    assert (result["ok"], result["wrong_bytes"], result["problems"]) == (True, 0, [])
    assert result["chunks_retrieved"] == sum(exact.hits) > 0
    assert result["evictions"] == exact.evictions > 0
    assert result["bytes_own"] + result["bytes_peer"] == result["bytes_checked"] == sum(exact.hits) * plan.chunk_bytes
    assert result["bytes_own"] > 0 < result["bytes_peer"]
    assert result["lookup"]["p99_us"] >= result["lookup"]["p50_us"] > 0
    assert processes_in(short_folder) == []
    assert list(short_folder.iterdir()) == []


@pytest.mark.timeout(RUN_SECONDS + 10)
def test_a_byte_changed_behind_the_engines_back_is_found_and_named() -> None:
    plan = make_plan(trace.excerpt()[:REQUESTS], 256, choose_devices())
    hits = simulation.shared(plan.prompts, plan.segment_chunks * len(plan.devices)).hits
    victim = next(index for index, count in enumerate(hits) if count > 2)
    code, out, err = finish(start_demo("--corrupt", str(victim)))
    assert code == 1, out + err
    where = f"request {victim}, worker {victim % len(plan.devices)}: 1 wrong byte in layer {plan.shape.layers // 2}, token 0"
    assert where in out
    assert "exact LRU simulation in" not in out


def folders(parent: Path) -> list[Path]:
    return list(parent.glob("vcache-demo-*"))


@pytest.mark.timeout(RUN_SECONDS + 10)
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "sigkill"])
def test_a_demo_that_is_ended_leaves_no_process(how: signal.Signals, short_folder: Path) -> None:
    process = start_demo(folder=short_folder)
    assert wait_for(lambda: any(len(processes_in(folder)) == 3 for folder in folders(short_folder)))
    (folder,) = folders(short_folder)
    process.send_signal(how)
    code, out, err = finish(process)
    assert code == (130 if how is signal.SIGINT else -signal.SIGKILL), out + err
    assert wait_for(lambda: not processes_in(folder), 10.0), processes_in(folder)
    assert folder.exists() == (how is signal.SIGKILL)


def test_a_worker_that_fails_is_reported_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "choose_devices", lambda: ["host:0", "nowhere:1"])
    with pytest.raises(DemoError, match=r"(?s)worker 1 failed.*'nowhere:1' is not a device"):
        demo.run(Config(), requests=2)
