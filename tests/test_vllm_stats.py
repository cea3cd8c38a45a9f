"""The connector's metrics and KV events, with vLLM's own classes and a real Prometheus registry."""

from __future__ import annotations

import functools
import pickle
import sys
import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from vcache_backend.integration.vllm import events, stats
from vcache_backend.integration.vllm.events import CommonEvents, Events, VCacheKVEvents
from vcache_backend.integration.vllm.stats import MAX_KEPT, Meter, VCacheStats

BLOCK = 16


def through_vllm(*workers: dict[str, Any]) -> KVConnectorOutput:
    """One step's output of several workers, each pickled, as vLLM's executor puts it together for the scheduler."""
    outputs = [
        ModelRunnerOutput(
            req_ids=[], req_id_to_index={}, kv_connector_output=pickle.loads(pickle.dumps(KVConnectorOutput(**fields)))
        )
        for fields in workers
    ]
    together = KVOutputAggregator(len(outputs)).aggregate(outputs)
    assert together is not None
    assert together.kv_connector_output is not None
    return together.kv_connector_output


def worker_meter(**arguments: Any) -> Meter:
    meter = Meter(**arguments)
    meter.loaded({"own": 256, "peer": 512}, {"own": 1_000_000, "peer": 2_000_000}, 0.001, 0.004)
    meter.stored(1024, 4_000_000, 0.002, 0.003)
    return meter


def scheduler_meter() -> Meter:
    meter = Meter()
    meter.looked_up(1000, 768, 0.0005)
    meter.scheduler_time(0.0007)
    meter.recomputed(256)
    return meter


def taken(meter: Meter) -> VCacheStats:
    got = meter.take()
    assert got is not None
    return got


def test_nothing_that_happened_is_nothing_to_send() -> None:
    meter = Meter()
    assert meter.take() is None
    meter.recomputed(0)
    meter.not_stored("full", 0)
    assert meter.take() is None
    meter.failed("server")
    assert taken(meter).data == {"counters": {"failures": {"server": 1}}}
    assert meter.take() is None


def test_two_workers_and_the_scheduler_add_up() -> None:
    first, second = taken(worker_meter()), taken(worker_meter(counts_tokens=False))
    output = through_vllm({"kv_connector_stats": first}, {"kv_connector_stats": second})
    # The workers before the scheduler, as in vLLM's `update_from_output`.
    total = output.kv_connector_stats.aggregate(taken(scheduler_meter()))
    counters = total.data["counters"]
    assert counters["loaded_tokens"] == {"own": 256, "peer": 512}
    assert counters["loaded_bytes"] == {"own": 2_000_000, "peer": 4_000_000}
    assert counters["stored_tokens"] == {"": 1024}
    assert counters["stored_bytes"] == {"": 8_000_000}
    assert counters["load_time_seconds"] == pytest.approx({"metadata": 0.002, "data": 0.008})
    assert counters["lookup_hit_tokens"] == {"": 768}
    assert total.data["histograms"]["load_seconds"] == {"kept": pytest.approx([0.005, 0.005]), "more": [0, 0.0]}
    assert total.data["histograms"]["scheduler_seconds"]["kept"] == [0.0007]


def test_a_step_in_which_one_worker_did_nothing_keeps_the_others() -> None:
    output = through_vllm({"kv_connector_stats": None}, {"kv_connector_stats": taken(worker_meter())})
    assert output.kv_connector_stats.data["counters"]["stored_bytes"] == {"": 4_000_000}


def test_what_is_added_in_stays_as_it_is() -> None:
    other = taken(worker_meter())
    before = pickle.dumps(other.data)
    total = VCacheStats().aggregate(other)
    total.aggregate(taken(worker_meter()))
    assert pickle.dumps(other.data) == before


def test_the_data_passes_vllms_messages_unchanged() -> None:
    data = taken(worker_meter()).aggregate(taken(scheduler_meter())).data
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(data), type=dict[str, Any]) == data


def test_observations_beyond_the_bound_travel_as_number_and_sum() -> None:
    meter = Meter()
    for _ in range(MAX_KEPT + 44):
        meter.scheduler_time(0.5)
    one = taken(meter)
    assert len(one.data["histograms"]["scheduler_seconds"]["kept"]) == MAX_KEPT
    assert one.data["histograms"]["scheduler_seconds"]["more"] == [44, 22.0]
    both = stats.build_stats(one.data).aggregate(one)
    assert len(both.data["histograms"]["scheduler_seconds"]["kept"]) == MAX_KEPT
    assert both.data["histograms"]["scheduler_seconds"]["more"] == [MAX_KEPT + 88, (MAX_KEPT + 88) / 2]


def test_threads_lose_no_count() -> None:
    meter, seen, interval = Meter(), VCacheStats(), sys.getswitchinterval()

    def work() -> None:
        for _ in range(8000):
            meter.stored(1, 2, 0.0, 0.0)

    threads = [threading.Thread(target=work) for _ in range(4)]
    # As often as it can: without the lock two runs in three lose counts.
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            seen.aggregate(meter.take() or VCacheStats())
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    seen.aggregate(meter.take() or VCacheStats())
    assert seen.data["counters"] == {"stored_tokens": {"": 32000}, "stored_bytes": {"": 64000}}


def test_an_unlisted_cause_is_counted_as_other() -> None:
    meter = Meter()
    meter.failed("lease_lost")
    meter.failed("job 17 went away")
    meter.not_stored("full", 3)
    meter.not_stored("a reason of its own", 2)
    counters = taken(meter).data["counters"]
    assert counters == {"failures": {"lease_lost": 1, "other": 1}, "not_stored_chunks": {"full": 3, "other": 2}}


def test_vllms_log_line() -> None:
    class Connector:
        build_kv_connector_stats = staticmethod(stats.build_stats)

    # Made without a configuration, it only lacks the class that it would have looked up.
    logging = KVConnectorLogging(None)
    logging.connector_cls = Connector
    lines: list[str] = []
    steps = [taken(worker_meter()).data, taken(scheduler_meter()).data, taken(worker_meter()).data]
    before = pickle.dumps(steps)
    for data in steps:
        logging.observe(data)
    logging.log(lambda template, *values: lines.append(template % values))
    assert lines == [
        "KV Transfer metrics: Hit tokens=768, Loads=2, Loaded MB=6.0, Median load ms=5.0, Stored MB=8.0, Recomputed tokens=256, "
        "Failures=0"
    ]
    # vLLM has one `data` for all its loggers.
    assert pickle.dumps(steps) == before


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> stats.VCachePromMetrics:
    """As vLLM's `KVConnectorProm` makes them, for two engines, on a registry of the test's own."""
    types = {kind: functools.partial(kind, registry=registry) for kind in (Counter, Gauge, Histogram)}
    config = SimpleNamespace(kv_transfer_config=None)
    return stats.build_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    lines = generate_latest(registry).decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if not line.startswith("#"))}


def test_prometheus_shows_what_was_observed(metrics: stats.VCachePromMetrics, registry: CollectorRegistry) -> None:
    worker = worker_meter()
    worker.failed("lease_lost")
    worker.not_stored("full", 3)
    for meter in (worker, scheduler_meter(), worker_meter()):
        metrics.observe(msgspec.msgpack.decode(msgspec.msgpack.encode(taken(meter).data)), engine_idx=1)
    shown, engine = exposed(registry), 'engine="1",model_name="m"'
    expected = {
        f"vllm:vcache_lookup_asked_tokens_total{{{engine}}}": 1000,
        f"vllm:vcache_lookup_hit_tokens_total{{{engine}}}": 768,
        f'vllm:vcache_loaded_tokens_total{{{engine},tier="own"}}': 512,
        f'vllm:vcache_loaded_tokens_total{{{engine},tier="peer"}}': 1024,
        f'vllm:vcache_loaded_tokens_total{{{engine},tier="host"}}': 0,
        f'vllm:vcache_loaded_bytes_total{{{engine},tier="peer"}}': 4_000_000,
        f"vllm:vcache_stored_tokens_total{{{engine}}}": 2048,
        f"vllm:vcache_stored_bytes_total{{{engine}}}": 8_000_000,
        f'vllm:vcache_load_time_seconds_total{{{engine},part="data"}}': 0.008,
        f'vllm:vcache_store_time_seconds_total{{{engine},part="metadata"}}': 0.004,
        f'vllm:vcache_failures_total{{cause="lease_lost",{engine}}}': 1,
        f'vllm:vcache_failures_total{{cause="checksum",{engine}}}': 0,
        f"vllm:vcache_recomputed_tokens_total{{{engine}}}": 256,
        f'vllm:vcache_not_stored_chunks_total{{cause="full",{engine}}}': 3,
        f"vllm:vcache_load_seconds_count{{{engine}}}": 2,
        f"vllm:vcache_load_seconds_sum{{{engine}}}": 0.01,
        'vllm:vcache_load_seconds_bucket{engine="1",le="0.0025",model_name="m"}': 0,
        'vllm:vcache_load_seconds_bucket{engine="1",le="0.01",model_name="m"}': 2,
        f"vllm:vcache_lookup_seconds_count{{{engine}}}": 1,
        f"vllm:vcache_scheduler_seconds_sum{{{engine}}}": 0.0007,
    }
    assert {name: shown.get(name) for name in expected} == pytest.approx(expected)
    assert shown['vllm:vcache_failures_total{cause="lease_lost",engine="0",model_name="m"}'] == 0


def test_count_and_sum_of_a_histogram_are_exact_beyond_the_bound(
    metrics: stats.VCachePromMetrics, registry: CollectorRegistry
) -> None:
    meter = Meter()
    for _ in range(MAX_KEPT + 44):
        meter.scheduler_time(0.5)
    metrics.observe(taken(meter).data)
    shown = exposed(registry)
    assert shown['vllm:vcache_scheduler_seconds_count{engine="0",model_name="m"}'] == MAX_KEPT + 44
    assert shown['vllm:vcache_scheduler_seconds_sum{engine="0",model_name="m"}'] == pytest.approx((MAX_KEPT + 44) / 2)


def test_what_a_newer_worker_sends_is_passed_over(metrics: stats.VCachePromMetrics, registry: CollectorRegistry) -> None:
    before = exposed(registry)
    newer = {
        "counters": {"invented": {"": 1}, "stored_tokens": {"a label it had not": 4}, "failures": {"": 2}},
        "histograms": {"invented_seconds": {"kept": [1.0], "more": [0, 0.0]}},
        "gauges": {"invented": 3},
    }
    metrics.observe(newer)
    metrics.observe(taken(worker_meter()).data, engine_idx=7)
    after = exposed(registry)
    assert {name: value for name, value in after.items() if before.get(name) != value} == {}
    assert stats.build_stats(newer).aggregate(taken(worker_meter())).reduce()["Stored MB"] == 4.0


@pytest.fixture(autouse=True)
def _hashes() -> None:
    """vLLM's hash of nothing, which the engine sets at start."""
    kv_cache_utils.init_none_hash(sha256)


def make_request(tokens: int, **arguments: Any) -> Request:
    return Request(
        request_id="r",
        prompt_token_ids=list(range(tokens)),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        block_hasher=kv_cache_utils.get_request_block_hasher(BLOCK, sha256),
        **arguments,
    )


def vllms_own_event(request: Request, first: int, last: int) -> Any:
    """What vLLM's prefix cache publishes for blocks `first` to `last` of the request."""
    pool = BlockPool(num_gpu_blocks=64, enable_caching=True, hash_block_size=BLOCK, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(last)
    for start, end in ((0, first), (first, last)):
        if end > start:
            pool.cache_full_blocks(request, blocks, start, end, BLOCK, 0)
    return pool.take_events()[-1]


LORA = {"lora_request": LoRARequest("french", 3, "/nowhere")}


@pytest.mark.parametrize("arguments", [{}, {"cache_salt": "pepper"}, LORA], ids=["plain", "salt", "lora"])
@pytest.mark.parametrize("first", [0, 4])
def test_an_event_is_vllms_own_but_for_the_medium(arguments: dict[str, Any], first: int) -> None:
    request = make_request(8 * BLOCK + 5, **arguments)
    ours = events.block_stored(events.stored_blocks(request, first * BLOCK, (first + 4) * BLOCK, BLOCK))
    theirs = vllms_own_event(request, first, first + 4)
    assert (ours.medium, ours.locality) == ("VCACHE", "LOCAL")
    same = {name: getattr(theirs, name) for name in theirs.__struct_fields__ if name not in ("medium", "locality")}
    assert {name: getattr(ours, name) for name in same} == same
    assert (ours.parent_block_hash is None) == (first == 0)


@pytest.mark.parametrize(("numbers", "kind"), [("1", int), ("0", bytes)])
def test_hashes_have_the_form_that_vllm_publishes(monkeypatch: pytest.MonkeyPatch, numbers: str, kind: type) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", numbers)
    request = make_request(8 * BLOCK)
    ours, theirs = events.block_stored(events.stored_blocks(request, 4 * BLOCK, 8 * BLOCK, BLOCK)), vllms_own_event(request, 4, 8)
    assert [type(block) for block in [*ours.block_hashes, ours.parent_block_hash]] == [kind] * 5
    assert (ours.block_hashes, ours.parent_block_hash) == (theirs.block_hashes, theirs.parent_block_hash)


@pytest.mark.parametrize(("start", "end"), [(0, 5 * BLOCK), (0, BLOCK + 1), (1, BLOCK)])
def test_tokens_without_hashed_blocks_are_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match=f"tokens {start} to {end} are not whole blocks of 16 tokens; the request has 4 such"):
        events.stored_blocks(make_request(4 * BLOCK + 3), start, end, BLOCK)


def chunks(count: int) -> list[events.StoredBlocks]:
    request = make_request(count * 2 * BLOCK)
    return [events.stored_blocks(request, at, at + 2 * BLOCK, BLOCK) for at in range(0, count * 2 * BLOCK, 2 * BLOCK)]


def last(chunk: events.StoredBlocks) -> bytes | int:
    """The last block of a chunk as it is published."""
    return events.block_stored(chunk).block_hashes[-1]


def said(common: CommonEvents) -> list[tuple[str, bytes | int]]:
    return [(type(event).__name__, event.block_hashes[-1]) for event in common.take()]


def step(common: CommonEvents, *workers: Events) -> None:
    common.collect(through_vllm(*({"kv_cache_events": worker.take()} for worker in workers)).kv_cache_events)


def test_where_events_are_off_nothing_is_kept() -> None:
    worker, (chunk,) = Events(enabled=False), chunks(1)
    worker.stored(chunk)
    worker.removed(chunk.block_hashes)
    assert worker.take() is None


def test_a_chunk_is_announced_when_every_worker_has_stored_it() -> None:
    first, second, common = Events(True), Events(True), CommonEvents(2)
    one, two, three = chunks(3)
    first.stored(one)
    step(common, first, second)
    assert said(common) == []
    # In another step than the first worker's, together with chunks of which one is new to both.
    second.stored(one)
    second.stored(two)
    first.stored(three)
    second.stored(three)
    step(common, first, second)
    assert said(common) == [("BlockStored", last(one)), ("BlockStored", last(three))]
    first.stored(two)
    step(common, first, second)
    assert said(common) == [("BlockStored", last(two))]
    step(common, first, second)
    assert said(common) == []


def test_a_worker_counts_once_however_often_it_says_so() -> None:
    first, second, common = Events(True), Events(True), CommonEvents(2)
    (one,) = chunks(1)
    first.stored(one)
    first.stored(one)
    step(common, first, second)
    assert said(common) == []


def test_a_chunk_is_gone_with_its_first_part_and_that_is_said_once() -> None:
    first, second, common = Events(True), Events(True), CommonEvents(2)
    (one,) = chunks(1)
    name = last(one)
    for round_ in range(2):
        first.stored(one)
        second.stored(one)
        step(common, first, second)
        assert said(common) == [("BlockStored", name)], round_
        first.removed(one.block_hashes)
        step(common, first, second)
        assert said(common) == [("BlockRemoved", name)], round_
        if round_ == 0:
            second.removed(one.block_hashes)
            step(common, first, second)
            assert said(common) == []
    # The second part was never removed: once the chunk is complete again, its removal is said again.
    first.stored(one)
    second.stored(one)
    step(common, first, second)
    second.removed(one.block_hashes)
    step(common, first, second)
    assert said(common) == [("BlockStored", name), ("BlockRemoved", name)]


def test_stored_removed_and_stored_again_ends_as_stored() -> None:
    worker, common, (one,) = Events(True), CommonEvents(), chunks(1)
    worker.stored(one)
    worker.removed(one.block_hashes)
    worker.stored(one)
    step(common, worker)
    assert [kind for kind, _ in said(common)] == ["BlockRemoved", "BlockStored"]


def test_chunks_that_never_become_complete_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENTS", 2)
    first, second, common = Events(True), Events(True), CommonEvents(2)
    one, two, three = chunks(3)
    for chunk in (one, two, three):
        first.stored(chunk)
        step(common, first, second)
    for chunk in (three, two, one):
        second.stored(chunk)
        step(common, first, second)
    # The first worker's `one` was dropped for its `three`.
    assert said(common) == [("BlockStored", last(three)), ("BlockStored", last(two))]


def test_a_worker_that_is_not_asked_keeps_a_bounded_number(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "MAX_EVENTS", 2)
    worker = Events(True)
    for chunk in chunks(4):
        worker.stored(chunk)
    got = worker.take()
    assert got is not None
    assert len(got.get_all_events()) == 2
    assert caplog.messages == ["KV events: more than 2 in one step; those beyond are not published"]


def test_another_connectors_events_are_passed_over() -> None:
    common = CommonEvents()
    common.collect(None)
    common.collect([AllBlocksCleared()])
    assert common.take() == []
    with pytest.raises(ValueError, match="workers is 0"):
        CommonEvents(0)


def test_the_container_keeps_what_all_of_a_steps_workers_said() -> None:
    one, two = map(events.block_stored, chunks(2))
    together = VCacheKVEvents([one, two])
    together.merge(VCacheKVEvents([two]))
    together.increment_workers()
    assert together.get_number_of_workers() == 2
    assert together.aggregate().get_all_events() == [two]
    assert together.get_number_of_workers() == 1
    together.clear_events()
    assert together.get_all_events() == []


def test_events_are_published_in_vllms_encoding() -> None:
    (one,) = chunks(1)
    batch = KVEventBatch(ts=1.0, events=[events.block_stored(one), events.block_removed(one.block_hashes)])
    stored, removed = msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=KVEventBatch).events
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (stored.medium, removed.medium) == ("VCACHE", "VCACHE")
    assert stored.block_hashes == removed.block_hashes
    assert stored.block_hashes[-1] == last(one)
    assert len(stored.token_ids) == stored.block_size * len(stored.block_hashes)


def test_what_the_scheduler_tells_the_workers_can_be_pickled() -> None:
    (one,) = chunks(1)
    assert pickle.loads(pickle.dumps(one)) == one
