"""The connector's metrics, with vLLM's own classes and a real Prometheus registry."""

from __future__ import annotations

import functools
import re
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import pytest
from mooncake_cases import needs_mooncake, own_depot
from mooncake_store import Depot
from processes import ROOT, eventually
from vllm_models import CONNECTOR
from vllm_objects import through_vllm

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from vcache_backend.integration import plugin
from vcache_backend.integration.vllm.metadata import WorkerReport
from vcache_backend.integration.vllm.telemetry import stats
from vcache_backend.integration.vllm.telemetry.stats import Meter, VCacheStats
from vcache_backend.transfer.offloaded import CAUSES
from vcache_backend.transfer.session import make_tier
from vcache_backend.transfer.stats import EngineStats

__all__ = ["own_depot"]


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


def test_each_cause_of_failed_loads_is_counted_under_the_name_that_the_page_explains() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    section = page.partition("\n## Loads fail")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert sorted(re.findall("`([a-z_]+)`", "".join(rows))) == sorted(stats.FAILURES)


def taken(meter: Meter) -> Any:
    found = meter.take()
    return found and found.data


def test_what_a_session_counts_the_meter_counts() -> None:
    """Of a worker that is not the first one, but for the tokens, which the first one counts."""
    counts, first, second = EngineStats(), Meter(), Meter(counts_tokens=False)
    counts.listeners += first.follow, second.follow
    counts.count(tokens_stored=512, bytes_stored=4096, not_stored_full=2, offload_dropped_down=3)
    counts.add_time("commit", 2.0)
    counts.add_time("lookup", 1.0)
    others = {
        "stored_bytes": {"": 4096},
        "not_stored_chunks": {"full": 2},
        "offload_dropped_chunks": {"down": 3},
        "store_time_seconds": {"metadata": 2.0},
    }
    assert taken(first) == others | {"stored_tokens": {"": 512}}
    assert taken(second) == others
    counts.count(tokens_stored=256, tokens_asked=1)
    assert (taken(first), taken(second)) == ({"stored_tokens": {"": 256}}, None)


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


@needs_mooncake
def test_one_worker_that_cannot_read_the_store_is_enough_to_leave_it(own_depot: Depot) -> None:
    """Of two workers both said so, in one step; what is slow is as slow as the slower one, which
    has half of each chunk.
    """
    with closing(make_tier(own_depot.offload(retry_seconds=0.1), EngineStats(), False)) as tier:
        eventually(lambda: tier.usable)
        one, other = WorkerReport(links={0: (True, 4e9)}), WorkerReport(links={1: (False, 1e9)})
        tier.note(one.aggregate(other).links, 2)
        assert (tier.usable, tier.bandwidth) == (False, 2e9)
        tier.note({1: (True, 3.04e9)}, 2)
        assert (tier.usable, tier.bandwidth, tier.link) == (True, 6.08e9, (True, 6.1e9))
