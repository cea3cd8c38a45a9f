"""What a real Prometheus sees of a server, and the alerts and dashboard that we ship."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from engine_cases import Cache, layout_of, node
from instance_cases import find, instance_id, join, keys, share
from processes import ROOT, SECONDS, Child, Stage, eventually, ran
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.processes import free_ports
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.client import Client

A = instance_id(1)
MARKUP = "<img src=x onerror=alert(1)> & 'more'"


def needs(program: str) -> Any:
    return pytest.mark.skipif(shutil.which(program) is None, reason=f"needs Debian's {program}")


def address_of(shown: Child) -> str:
    return shown.expect("metrics and a page at").split("//")[1].strip()


MONITOR = """
import os, sys
from vcache_backend import monitor
monitor.SILENT_SECONDS, monitor.EVERY_SECONDS = 1.0, 0.1
monitor.ANSWER_SECONDS = float(sys.argv.pop())
os.dup2(os.pipe()[0], 0)
raise SystemExit(monitor.main(*sys.argv[1:]))
"""
HASTY = 0.5
"""For monitors of servers that hang. On a busy machine others may answer later than that."""


def watching(alone: Stage, answer_seconds: float = SECONDS) -> tuple[Child, str]:
    """A server's monitor that asks more often than that of `server.metrics`, and takes an instance
    for silent sooner; and where it listens.
    """
    monitor = alone.script(MONITOR, ":0", str(answer_seconds))
    return monitor, address_of(monitor)


def beside(alone: Stage, answer_seconds: float = SECONDS) -> str:
    """Where such a monitor listens."""
    return watching(alone, answer_seconds)[1]


def get(address: str, path: str = "/metrics", **headers: str) -> tuple[int, str]:
    request = urllib.request.Request(f"http://{address}{path}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def samples(address: str) -> dict[tuple[str, ...], float]:
    """By name and the labels' values, in the order of the labels' names."""
    families = text_string_to_metric_families(get(address)[1])
    told = (sample for family in families for sample in family.samples)
    return {(it.name, *(label for _, label in sorted(it.labels.items()))): it.value for it in told}


def used(alone: Stage) -> Client:
    """An instance with three chunks, which somebody has looked for and read, and a report. Whoever
    has.
    """
    owner = alone.client()
    reader = alone.client(layout={"model": "llama", "namespace": "cafe", "chunk_size": "256"})
    share(owner, A)
    looked_for(reader)
    owner.find(find(5))  # as vLLM's workers, it has told no layout
    reader.reads = lambda: [m.Reads(A, 1010 << 20, 2, 2048)]
    reader.list_segments()  # which tells the reads
    reader.report("error", MARKUP)
    return reader


def looked_for(reader: Client) -> None:
    """Five chunks, of which three are there, and one that is not: an instance counts their
    tokens.
    """
    reader.find(find(5))
    reader.pin(keys(1), 0.0)
    reader.count(asked=6 * 256, found=3 * 256)
    reader.count(awaited=512, waited_ms=250, loads=2, loaded=512)
    reader.list_segments()  # which tells the counts


def test_prometheus_has_what_the_server_knows(alone: Stage) -> None:
    alone.server()
    reader = used(alone)
    pid = str(os.getpid())
    address = beside(alone)
    eventually(lambda: samples(address).get(("vcache_server_clients",)) == 3)
    seen = samples(address)
    assert seen["vcache_server_up",] == 1
    assert seen["vcache_instance_resident_blocks", "host", A.hex(), pid] == 12
    assert seen["vcache_read_bytes_total", "host", A.hex(), pid] == 1010 << 20
    assert seen["vcache_read_refused_chunks_total", "host", A.hex(), pid] == 2
    assert seen["vcache_server_loaded_tokens_total",] == 512
    assert seen["vcache_server_lookup_chunks_total",] == 10
    assert seen["vcache_server_lookup_hits_total",] == 6
    assert seen["vcache_namespace_asked_tokens_total", "llama", "cafe"] == 6 * 256
    assert seen["vcache_namespace_found_tokens_total", "llama", "cafe"] == 3 * 256
    assert seen["vcache_server_request_seconds_count", "Publish"] == 1
    assert seen["vcache_server_request_seconds_sum", "Publish"] > 0
    reports = [seen["vcache_server_reports_10m", level] for level in ("info", "warn", "error")]
    assert reports == [0, 0, 1]
    reader.close()
    eventually(lambda: samples(address).get(("vcache_server_clients",)) == 2)
    assert get(address, "/nothing")[0] == 404
    assert [get(address, path) for path in ("/healthz", "/readyz")] == [(200, "ok\n")] * 2


class Prometheus(NamedTuple):
    """A real one. port: of its API."""

    port: int

    def get(self, path: str) -> Any:
        return json.loads(get(f"127.0.0.1:{self.port}", f"/api/v1/{path}")[1])["data"]

    def values(self, query: str) -> list[float]:
        """What it answers, without numbers that are none: nothing over nothing, for example."""
        rows = self.get(f"query?{urllib.parse.urlencode({'query': query})}")["result"]
        return [value for row in rows if not math.isnan(value := float(row["value"][1]))]

    def alerts(self) -> set[str]:
        """The names of those that fire."""
        return {one["labels"]["alertname"] for one in self.get("alerts")["alerts"]}


@contextmanager
def scraping(address: str, folder: Path, rules: str = "") -> Iterator[Prometheus]:
    """A Prometheus that has scraped this address and does so all the time."""
    (port,) = free_ports(1)
    every = {"scrape_interval": "200ms", "scrape_timeout": "200ms", "evaluation_interval": "100ms"}
    scraped = {"job_name": "vcache", "static_configs": [{"targets": [address]}]}
    config = {"global": every, "scrape_configs": [scraped], "rule_files": ["rules.yml"]}
    (folder / "rules.yml").write_text(rules)
    (folder / "prometheus.yml").write_text(json.dumps(config))
    options = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with Child(["prometheus", *options, f"--web.listen-address=127.0.0.1:{port}"]) as program:
        program.expect("Server is ready to receive web requests")
        made = Prometheus(port)
        eventually(lambda: made.values("vcache_server_up") == made.values("up") == [1], every=0.2)
        yield made


PANELS = json.loads((ROOT / "configs" / "grafana" / "vcache.json").read_text())["panels"]
ALERTS = ROOT / "configs" / "prometheus" / "alerts.yml"


@needs("prometheus")
def test_no_panel_of_the_dashboard_is_empty(tmp_path: Path) -> None:
    """Every query has an answer where there is a pool, an instance and a reader. Where nothing was
    done yet every panel shows that.
    """
    queries = {
        panel["title"]: [one["expr"].replace("$__rate_interval", "10s") for one in panel["targets"]]
        for panel in PANELS
    }
    with node(tmp_path) as here:
        here.serve()
        address = beside(here.stage)
        with scraping(address, tmp_path) as prometheus:
            # nothing over nothing
            rates = {title for title, asked in queries.items() if "Hit rate" in title}

            def empty() -> set[str]:
                asked = queries.items()
                return {title for title, those in asked if not any(map(prometheus.values, those))}

            eventually(lambda: empty() == rates, every=0.5)
            here.engine("host", 1 << 20, layout_of(Cache()))
            reader = used(here.stage)

            def unanswered() -> list[str]:
                looked_for(reader)
                asked = (query for those in queries.values() for query in those)
                # No vLLM is scraped here: tests/vllm/test_stats.py has its names.
                needed = [query for query in asked if not re.search("unless|vllm:", query)]
                return [query for query in needed if not prometheus.values(query)]

            eventually(lambda: not unanswered(), every=1.0)
            blocks = f'vcache_instance_resident_blocks{{instance_id="{A.hex()}"}}'
            # Behind a scrape that took too long there is none.
            eventually(lambda: prometheus.values(blocks) == [12], every=0.2)
        text = get(address)[1]
    done = ran("promtool", "check", "metrics", input=text)
    # It looks at names, types and texts.
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    assert text.count("# HELP ") == text.count("# TYPE ") > 20


WITHOUT = """
rule_files: [{rules}]
tests:
  - interval: 1m
    input_series:
      - {{series: 'vllm:vcache_failures_total{{cause="server",instance="lacks"}}', values: 0x3 1+1x9}}
      - {{series: 'vllm:vcache_failures_total{{cause="late",instance="busy"}}', values: 0+1x12}}
      - {{series: 'vllm:vcache_computed_prompts_total{{instance="lone"}}', values: 0+1x12}}
      - {{series: 'vllm:vcache_loaded_tokens_total{{instance="lone",tier="own"}}', values: 0x12}}
      - {{series: 'vllm:vcache_computed_prompts_total{{instance="busy"}}', values: 0+1x12}}
      - {{series: 'vllm:vcache_loaded_tokens_total{{instance="busy",tier="peer"}}', values: 0+9x12}}
    promql_expr_test:
      - expr: ALERTS{{alertstate="firing"}}
        eval_time: 10m
        exp_samples:
          - {{labels: '{{{alert}, {lacks}}}', value: 1}}
          - {{labels: '{{{alert}, {lone}}}', value: 1}}
"""
"""What vLLM counts, and the alerts that fire."""


@needs("prometheus")
def test_look_ups_without_a_server_and_a_consumer_without_hits_alert(tmp_path: Path) -> None:
    """Late answers do not, nor a consumer that loads, too."""
    labels = '__name__="ALERTS", alertstate="firing", severity="critical"'
    lacks = 'alertname="VCacheLookupsWithoutServer", instance="lacks"'
    lone = 'alertname="VCacheConsumerComputes", instance="lone"'
    file = tmp_path / "test.yml"
    file.write_text(WITHOUT.format(rules=ALERTS, alert=labels, lacks=lacks, lone=lone))
    done = ran("promtool", "test", "rules", str(file))
    assert done.returncode == 0, done.stdout + done.stderr


@needs("prometheus")
def test_alerts_tell_what_is_wrong_and_nothing_else(alone: Stage, tmp_path: Path) -> None:
    """All at once here, without waiting for them to last."""
    server = alone.server()
    monitor, address = watching(alone, HASTY)
    with scraping(address, tmp_path, re.sub(r"\n +for: .*", "", ALERTS.read_text())) as prometheus:
        eventually(lambda: prometheus.alerts() == set(), every=0.2)
        for number in (3, 4):
            share(owner := alone.client(), instance_id(number))
        for _ in range(1001):
            owner.find(find(1, start=100))
        quiet = "VCacheInPlaceWithoutHits"
        eventually(lambda: quiet in prometheus.alerts(), every=0.2)
        reader = used(alone)
        join(lacking := alone.client(), instance_id(2))
        lacking.count(asked=256)  # else it waits for its first request
        lacking.list_segments()  # which tells the counts
        other = alone.client(layout={"model": "llama", "namespace": "beef", "chunk_size": "128"})
        wrong = {"VCacheErrorsReported", "VCacheInstancesDiffer"}
        wrong |= {"VCacheInstanceNotShared", "VCacheInstanceStopped"}
        eventually(lambda: prometheus.alerts() == wrong, every=0.2)  # nobody here sends heartbeats
        other.close()
        reader.close()
        with server.stopped():
            eventually(lambda: prometheus.alerts() == {"VCacheServerDoesNotAnswer"}, every=0.2)
        monitor.kill()
        eventually(lambda: prometheus.alerts() == {"VCacheServerGone"}, every=0.2)
