"""The connector's metrics and KV events, with vLLM's own classes and a real Prometheus registry."""

from __future__ import annotations

import functools
import pickle
import re
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from mooncake_cases import needs_mooncake, own_depot
from mooncake_store import Depot
from processes import ROOT, eventually
from vllm_models import CONNECTOR

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_events import BlockStored
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from vcache_backend.errors import ServerTimeout
from vcache_backend.integration import plugin
from vcache_backend.integration.vllm.instance import OffloadLookup
from vcache_backend.integration.vllm.metadata import Link, WorkerReport
from vcache_backend.integration.vllm.telemetry import events, stats
from vcache_backend.integration.vllm.telemetry.events import Announcer
from vcache_backend.integration.vllm.telemetry.stats import Meter, VCacheStats
from vcache_backend.offload.transfers import DROPPED
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey, of_rank
from vcache_backend.transfer.offloaded import CAUSES
from vcache_backend.transfer.session import make_tier
from vcache_backend.transfer.stats import EngineStats

__all__ = ["own_depot"]

BLOCK = 16


def through_vllm(*workers: dict[str, Any]) -> KVConnectorOutput:
    """One step's output of several workers, each pickled, as vLLM's executor puts it together for
    the scheduler.
    """
    told = [pickle.loads(pickle.dumps(KVConnectorOutput(**fields))) for fields in workers]
    outputs = [ModelRunnerOutput([], {}, kv_connector_output=each) for each in told]
    together = KVOutputAggregator(len(outputs)).aggregate(outputs)
    assert together is not None
    assert together.kv_connector_output is not None
    return together.kv_connector_output


def test_two_workers_and_the_scheduler_add_up() -> None:
    """And a worker that did nothing."""
    first, second, scheduler = Meter(), Meter(counts_tokens=False), Meter()
    tokens = {"own": 256, "peer": 512}
    seconds = {"metadata_seconds": 0.001, "data_seconds": 0.004}
    nbytes = {tier: 4000 * count for tier, count in tokens.items()}
    load: Any = SimpleNamespace(tokens=tokens, nbytes=nbytes, **seconds)
    first.loaded(load)
    second.loaded(load)
    scheduler.looked_up(1000, 768, 0.0005)
    workers = [first.take(), None, second.take()]
    output = through_vllm(*({"kv_connector_stats": one} for one in workers))
    # The workers before the scheduler, as in vLLM's `update_from_output`.
    total = output.kv_connector_stats.aggregate(scheduler.take())
    assert total.data == {
        "loaded_tokens": tokens,
        "loaded_bytes": {"own": 2_048_000, "peer": 4_096_000},
        "load_time_seconds": pytest.approx({"metadata": 0.002, "data": 0.008}),
        "lookup_asked_tokens": {"": 1000},
        "lookup_hit_tokens": {"": 768},
        "load_seconds": pytest.approx([0.005, 0.005]),
        "lookup_seconds": [0.0005],
    }


def test_an_unlisted_cause_is_counted_as_other() -> None:
    meter = Meter()
    meter.count("failures", 1, "copy")
    meter.count("failures", 2, "a reason of its own")
    assert taken(meter) == {"failures": {"copy": 1, "other": 2}}
    assert {*CAUSES.values(), "store"} <= set(stats.FAILURES)
    assert set(DROPPED) <= set(stats.NOT_OFFLOADED)


def taken(meter: Meter) -> Any:
    found = meter.take()
    return found and found.data


def test_what_a_session_counts_is_counted_once() -> None:
    """Of a worker that is not the first one, but for the tokens, which the first one counts."""
    counts, first, second = EngineStats(), Meter(), Meter(counts_tokens=False)
    counts.count(tokens_stored=512, bytes_stored=4096, not_stored_full=2, offload_dropped_down=3)
    counts.add_time("commit", 2.0)
    others = {
        "stored_bytes": {"": 4096},
        "not_stored_chunks": {"full": 2},
        "offload_dropped_chunks": {"down": 3},
        "store_time_seconds": {"metadata": 2.0},
    }
    for meter, more in ((first, {"stored_tokens": {"": 512}}), (second, {})):
        meter.add_session(counts)
        assert taken(meter) == others | more
        meter.add_session(counts)
        assert taken(meter) is None
    counts.count(tokens_stored=256, tokens_asked=1)
    first.add_session(counts)
    assert taken(first) == {"stored_tokens": {"": 256}}


def test_what_a_newer_worker_sends_is_passed_over() -> None:
    """By the metrics of two engines, on a registry of the test's own. The dashboard names these."""
    registry = CollectorRegistry()
    kinds = Counter, Gauge, Histogram
    types = {kind: functools.partial(kind, registry=registry) for kind in kinds}
    config = SimpleNamespace(kv_transfer_config=None)
    metrics = stats.VCachePromMetrics(config, types, ["engine"], {0: ["0"], 1: ["1"]})
    before = generate_latest(registry)
    dashboard = (ROOT / "configs" / "grafana" / "vcache.json").read_text()
    shown = set(re.findall(r"vllm:vcache_\w+", dashboard))
    assert shown
    assert shown <= set(re.findall(r"vllm:vcache_\w+", before.decode()))
    newer = {"invented": {"": 1}, "stored_tokens": {"a label": 4}, "failures": {"": 2}}
    newer |= {"invented_seconds": [1.0], "invented_gauge": 3}
    metrics.observe(newer)
    known = VCacheStats()
    known.count("stored_bytes", 4_000_000)
    known.observe("load_seconds", 0.1)
    metrics.observe(known.data, engine_idx=7)
    assert generate_latest(registry) == before
    metrics.observe(known.data, engine_idx=1)
    assert registry.get_sample_value("vllm:vcache_load_seconds_count", {"engine": "1"}) == 1
    reduced = stats.build_stats(newer).aggregate(known).reduce()
    assert (reduced["Stored MB"], reduced["Loads"]) == (4.0, 1)


def test_metrics_that_cannot_be_made_end_no_front_end_under_multi_connector() -> None:
    """It asserts that each connector with statistics has made metrics."""
    registry = CollectorRegistry()
    Counter("vllm:vcache_stored_bytes", "somebody's", registry=registry)
    kinds = Counter, Gauge, Histogram
    types = {kind: functools.partial(kind, registry=registry) for kind in kinds}
    plugin.register_name()  # as in each of vLLM's processes
    inside = {"connectors": [CONNECTOR | {"kv_role": "kv_both"}]}
    transfer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config=inside
    )
    config = SimpleNamespace(kv_transfer_config=transfer)
    metrics = MultiConnector.build_prom_metrics(config, types, ["engine"], {0: ["0"]})
    counted = VCacheStats()
    counted.count("stored_bytes", 1)
    metrics.observe({"VCacheConnector": counted.data})


@pytest.fixture(autouse=True)
def _hashes() -> None:
    """vLLM's hash of nothing, which the engine sets at start."""
    kv_cache_utils.init_none_hash(sha256)


def make_request(tokens: int, **arguments: Any) -> Request:
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    params, prompt = SamplingParams(max_tokens=1), list(range(tokens))
    return Request("r", prompt, params, None, block_hasher=hasher, **arguments)


def vllms_own_event(request: Request, start: int, end: int) -> Any:
    """What vLLM's prefix cache publishes for the tokens, if they are one block of its table."""
    tells = {"enable_caching": True, "enable_kv_cache_events": True}
    pool, size = BlockPool(num_gpu_blocks=64, hash_block_size=BLOCK, **tells), end - start
    blocks = pool.get_new_blocks(end // size)
    for block in range(end // size):
        pool.cache_full_blocks(request, blocks, block, block + 1, size, 0)
    return pool.take_events()[-1]


LORA = {"lora_request": LoRARequest("french", 3, "/nowhere")}
_SEEN = [
    MultiModalFeatureSpec(None, "image", f"{number}", PlaceholderRange(offset, 20))
    for number, offset in enumerate((5, 70))
]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"cache_salt": "pepper"}, LORA, {"mm_features": _SEEN}],
    ids=["plain", "salt", "lora", "images"],
)
@pytest.mark.parametrize("first", [0, 4])
def test_a_chunks_event_is_vllms_own_for_one_block_of_its_size_but_for_the_medium(
    arguments: dict[str, Any], first: int
) -> None:
    request = make_request(8 * BLOCK + 5, **arguments)
    tokens = first * BLOCK, (first + 4) * BLOCK
    ours = events.block_stored(request, *tokens, BLOCK)
    theirs = vllms_own_event(request, *tokens)
    assert (ours.medium, ours.locality) == ("CPU", "LOCAL")
    names = {*theirs.__struct_fields__} - {"medium", "locality"}
    same = {name: getattr(theirs, name) for name in names}
    assert {name: getattr(ours, name) for name in same} == same
    assert (ours.parent_block_hash is None) == (first == 0)


class Ranks:
    """A scheduler's announcer, what ranks do to the pool, and what the server finds there. The
    chunks are those of one request.
    """

    def __init__(self, ranks: int) -> None:
        self.announcer, self._request = Announcer(ranks), make_request(8 * BLOCK)
        self.there, self.asked = set[ChunkKey](), list[int]()

    def last(self, chunk: int) -> bytes | int:
        """The chunk's last block as it is published."""
        return self._event(chunk).block_hashes[-1]

    def _event(self, chunk: int) -> BlockStored:
        return events.block_stored(self._request, 2 * chunk * BLOCK, 2 * (chunk + 1) * BLOCK, BLOCK)

    def order(self, *chunks: int) -> None:
        """A step stores them."""
        for chunk in chunks:
            self.announcer.expect(key_of(chunk), self._event(chunk))

    def step(self, *did: dict[int, list[int]]) -> list[tuple[str, bytes | int]]:
        """What is published after a step in which workers stored these chunks, by rank."""
        stored = [
            {rank: [key_of(chunk) for chunk in chunks] for rank, chunks in of_worker.items()}
            for of_worker in did
        ]
        told = [{"kv_connector_worker_meta": WorkerReport(stored=one)} for one in stored]
        output = through_vllm(*told)
        self.announcer.note(output.kv_connector_worker_meta.stored)
        for rank, keys in output.kv_connector_worker_meta.stored.items():
            self.there |= set(of_rank(keys, rank))
        return self.taken()

    def taken(self) -> list[tuple[str, bytes | int]]:
        return [(type(event).__name__, event.block_hashes[-1]) for event in self.announcer.take()]

    def contains(self, keys: list[ChunkKey]) -> list[bool]:
        """As the server answers."""
        self.asked.append(len(keys))
        return [key in self.there for key in keys]


def key_of(chunk: int, rank: int = 0) -> ChunkKey:
    return ChunkKey(bytes([chunk]) * (KEY_BYTES - 2) + rank.to_bytes(2, "big"))


def test_a_chunk_is_announced_when_every_rank_has_stored_it() -> None:
    """In another step than the first one's, together with chunks of which one is new to both;
    however often a rank says so.
    """
    two = Ranks(2)
    two.order(1, 2, 3)
    assert two.step({0: [1, 1]}, {}) == []
    whole = [("BlockStored", two.last(chunk)) for chunk in (1, 3)]
    assert two.step({0: [3]}, {1: [1, 2, 3]}) == whole
    assert two.step({0: [2]}, {}) == [("BlockStored", two.last(2))]
    assert two.step({0: []}, {}) == []


def test_a_chunk_is_gone_with_its_first_part_and_that_is_said_once() -> None:
    """And of what was stored again since the server was asked, nothing is said."""
    two = Ranks(2)
    two.order(1, 2)
    two.step({0: [1, 2]}, {1: [1, 2]})
    for _ in range(2):
        two.announcer.check(two.contains)
        assert two.taken() == []
    two.there.remove(key_of(1, rank=1))
    two.announcer.check(two.contains)
    two.announcer.check(two.contains)
    assert two.taken() == [("BlockRemoved", two.last(1))]
    two.announcer.check(two.contains)
    assert two.taken() == []
    two.there.remove(key_of(2))
    two.announcer.check(two.contains)
    two.order(2)
    assert two.step({0: [2]}, {1: [2]}) == [("BlockStored", two.last(2))]
    two.there.remove(key_of(2))
    two.announcer.check(two.contains)
    assert two.taken() == [("BlockRemoved", two.last(2))]


def test_a_slow_server_has_its_deadline_for_each_request_and_what_it_did_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All by one deadline would end the scheduler's connection, and with it every hit."""
    monkeypatch.setattr(events, "MAX_KEYS", 2)
    one = Ranks(1)
    one.order(0, 1, 2, 3)
    one.step({0: [0, 1, 2, 3]})
    one.announcer.check(one.contains)
    assert one.asked == [2, 2]
    one.there.clear()

    def late(keys: list[ChunkKey]) -> list[bool]:
        if key_of(2) in keys:
            raise ServerTimeout("late")
        return one.contains(keys)

    with pytest.raises(ServerTimeout):
        one.announcer.check(late)
    assert one.taken() == [("BlockRemoved", one.last(chunk)) for chunk in (0, 1)]
    one.announcer.check(one.contains)
    assert one.taken() == [("BlockRemoved", one.last(chunk)) for chunk in (2, 3)]


def test_chunks_that_never_become_complete_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MOST_WAITING", 2)
    two = Ranks(2)
    for chunk in (1, 2, 3):
        two.order(chunk)
        two.step({0: [chunk]}, {})
    # The first one was dropped for the third.
    whole = [("BlockStored", two.last(chunk)) for chunk in (3, 2)]
    assert two.step({1: [3, 2, 1]}, {}) == whole


# ---- what workers say of the offload tier


@needs_mooncake
def test_one_worker_that_cannot_read_the_store_is_enough_to_leave_it(own_depot: Depot) -> None:
    """Of two workers both said so, in one step; what is slow is as slow as the slower one, which
    has half of each chunk.
    """
    tier = make_tier(own_depot.offload(retry_seconds=0.1), EngineStats(), False)
    with closing(OffloadLookup(tier, 2)) as below:
        eventually(lambda: below.usable)
        one, other = {0: Link(True, 4e9)}, {1: Link(False, 1e9)}
        below.note(WorkerReport(links=one).aggregate(WorkerReport(links=other)).links)
        assert (below.usable, tier.bandwidth) == (False, 2e9)
        below.note({1: Link(True, 3e9)})
        assert (below.usable, tier.bandwidth) == (True, 6e9)
