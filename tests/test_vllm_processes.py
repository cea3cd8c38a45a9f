"""Real vLLM on the CPU in several processes, as in production: tensor parallel ranks, `vllm serve`, another connector beside ours."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket
from typing import Any
from urllib.request import Request, urlopen

import pytest
from mooncake_cases import free_ports
from processes import PATIENT, ROOT, containers, eventually
from test_start_server import end_servers
from vllm_cases import ANSWER_SECONDS, BLOCK, CHUNK, START_SECONDS, TOKEN_BYTES, Instance, Node, missing, new_tokens, node, serve

from vcache_backend.metadata_server.client import Client

WHY_NOT = missing(())
NO_SERVER = missing(("watchfiles", "prometheus-fastapi-instrumentator", "model-hosting-container-standards"))
pytestmark = [pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "vLLM is here"), pytest.mark.timeout(300)]
APART: dict[str, str | None] = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine in a process of its own."""
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
LENGTH = 4 * CHUNK
PAGES = [ROOT / "README.md", ROOT / "docs" / "vllm.md"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with node(tmp_path_factory.mktemp("vllm")) as made:
        yield made


# ---- tensor parallel ranks


@pytest.mark.parametrize(
    "integration", ["vllm", pytest.param("lmcache", marks=pytest.mark.skipif(bool(missing()), reason="no LMCache"))]
)
def test_each_rank_stores_and_loads_its_part(here: Node, integration: str) -> None:
    """And one look-up answers for all."""
    with (here.connect if integration == "vllm" else here.start)(f"{integration}-ranks", environment=APART, **RANKS) as ranks:
        tokens, known = new_tokens(LENGTH + 17), set(here.chunk_keys())
        computed = ranks.one(tokens)
        here.stored(len(known) + 2 * 4)
        own, from_pool = ranks.one(tokens), ranks.again(tokens)
        assert (computed.cached, own.cached, from_pool.cached) == (0, LENGTH, LENGTH)
        assert own.said == from_pool.said
        assert own.agrees(computed)
        with here.corrupted():
            assert ranks.again(tokens).differs(computed)
        here.unleased()
        keys = eventually(lambda: len(new := [key for key in here.chunk_keys() if key not in known]) == 2 * 4 and new)
        with Client(here.socket, PATIENT, reconnect=False) as client:
            assert client.remove([key for key in keys if key.endswith(b"\0\1")][2:3]) == 1
        without = ranks.again(tokens, params={"vcache": {"store": False}})
        assert without.agrees(computed)
        # Which of the four it was, the journal does not say.
        assert without.cached in (0, CHUNK, 2 * CHUNK, 3 * CHUNK)


@pytest.mark.parametrize(
    "isolated",
    [
        pytest.param(
            True, id="in containers", marks=pytest.mark.skipif(bool(containers()), reason=f"no namespaces: {containers()}")
        ),
        pytest.param(False, id="side by side", marks=pytest.mark.skipif(not containers(), reason="is tested in containers")),
    ],
)
def test_each_rank_reads_from_the_same_rank_of_another_instance(tmp_path: Path, isolated: bool) -> None:
    """In place: a chunk is found once both ranks have published the same of it. From its container the server sees nobody's pid."""
    settings = {"connector": {"share": "in_place", "min_hit_tokens": CHUNK}, "pool": {"segment_bytes": 0}}
    with node(tmp_path, isolated=isolated) as here:
        owner, reader = (here.connect(name, settings, environment=APART, **RANKS) for name in ("owner", "reader"))
        tokens = new_tokens(LENGTH + 17)
        computed = owner.one(tokens)
        eventually(lambda: [one.resident for one in here.stats().instances] == [4])
        assert [one.pid == 0 for one in here.stats().instances] == [isolated]
        hit, own = reader.one(tokens), owner.one(tokens)
        assert (hit.cached, own.cached) == (LENGTH, LENGTH)
        assert hit.said == own.said
        assert hit.agrees(computed)


# ---- another connector


def test_whichever_comes_first_both_connectors_work(here: Node) -> None:
    tokens, warning = new_tokens(LENGTH + 1), 'put "kv_load_failure_policy":"recompute" beside "kv_connector":"MultiConnector"'
    first = here.alone("second-of-two", APART, kv_transfer_config=both(here, "one", ours_first=False), **WITHOUT_HYBRID)
    policy = {"kv_load_failure_policy": "recompute"}
    second = here.alone("first-of-two", APART, kv_transfer_config=both(here, "two", ours_first=True, **policy), **WITHOUT_HYBRID)
    computed = here.keep(first, tokens)
    eventually(lambda: first.counter("vllm:vcache_stored_tokens") == LENGTH)
    assert warning in first.log
    assert any((here.folder / "one").iterdir())
    found = second.one(tokens)
    assert found.cached == LENGTH
    assert found.agrees(computed)
    eventually(lambda: second.counter("vllm:prompt_tokens_cached_by_source", source="host") == LENGTH)
    assert warning not in second.log
    first.close()
    second.close()


def test_vllms_own_offloading_connector_brings_what_it_has_and_ours_what_others_have(here: Node) -> None:
    tokens = new_tokens(LENGTH + 1)
    writer, offloads = (
        here.connect("writer"),
        here.alone("offloads", APART, kv_transfer_config=beside(here, OFFLOADING, ours_first=False)),
    )
    computed = here.keep(writer, tokens)
    from_pool = offloads.one(tokens)
    eventually(lambda: offloads.counter("vllm:vcache_loaded_tokens") == LENGTH)
    own, offloaded = offloads.one(tokens), offloads.again(tokens)
    assert (from_pool.cached, own.cached, offloaded.cached) == (LENGTH, LENGTH, LENGTH)
    assert from_pool.said == own.said == offloaded.said
    assert from_pool.agrees(computed)
    offloads.one(new_tokens(BLOCK))  # what the steps before have counted is here by now
    assert offloads.counter("vllm:vcache_loaded_tokens") == LENGTH, "the second time it was not ours"
    for one in (writer, offloads):
        one.close()


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "cpu_bytes_to_use": 16 << 20,
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "vllm_variants",
    },
}
WITHOUT_HYBRID = {"disable_hybrid_kv_cache_manager": True}


def both(here: Node, storage: str, *, ours_first: bool, **more: Any) -> dict[str, Any]:
    """storage: a name; the other connector has nothing under a new one."""
    other = {"kv_connector": "BesideConnector", "kv_connector_module_path": "vllm_variants", "kv_role": "kv_both"}
    return beside(
        here, other | {"kv_connector_extra_config": {"shared_storage_path": str(here.folder / storage)}}, ours_first, **more
    )


def beside(here: Node, other: dict[str, Any], ours_first: bool, **more: Any) -> dict[str, Any]:
    connectors = [here.transfer(), other] if ours_first else [other, here.transfer()]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": connectors},
        **more,
    }


# ---- `vllm serve`


@contextmanager
def serving(
    here: Node, *transfers: dict[str, Any], more: Sequence[str] = (), **environment: str
) -> Iterator[dict[str, Instance]]:
    """Servers by their addresses, one for each `kv_transfer_config`. Front ends and engines are processes of their own. more: arguments."""
    ports = free_ports(len(transfers))
    common = [
        *("--model", str(here.model), "--served-model-name", "tiny", "--host", "127.0.0.1", "--dtype", "bfloat16"),
        *("--block-size", str(BLOCK), "--kv-cache-memory-bytes", str(4096 * TOKEN_BYTES), "--max-model-len", "1024"),
        *("--max-num-seqs", "4", "--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"),
    ]
    # The mode of developers has the address that resets the cache.
    given = APART | {"VLLM_SERVER_DEV_MODE": "1"} | environment
    with ExitStack() as undo:
        servers = {}
        for port, transfer in zip(ports, transfers, strict=True):
            arguments = [*common, *more, "--port", str(port), "--kv-transfer-config", json.dumps(transfer)]
            servers[port] = undo.enter_context(Instance(here.folder, f"server-{port}", given, arguments, serve))
        for port, server in servers.items():
            eventually(lambda port=port, server=server: listens(port) or server.ended(), START_SECONDS)
            assert server.alive, server.log[-4000:]
        yield {f"http://127.0.0.1:{port}": server for port, server in servers.items()}


def listens(port: int) -> bool:
    with socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def complete(address: str, tokens: list[int], rank: int = 0, **wishes: Any) -> tuple[list[int], int]:
    """The tokens of the answer, and how many of the prompt were not computed. rank: who is to answer, with data parallelism."""
    asked = {"model": "tiny", "prompt": tokens, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    body = json.dumps(asked | {"detokenize": False, "kv_transfer_params": {"vcache": wishes}}).encode()
    headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
    request = Request(f"{address}/v1/completions", body, headers)
    with urlopen(request, timeout=ANSWER_SECONDS) as answer:
        said = json.load(answer)
    details = said["usage"]["prompt_tokens_details"] or {}
    return said["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def counted(address: str, series: str) -> float:
    """A series of the server's metrics: its name, with some of its labels, such as `name{label="value"`."""
    name, _, label = series.partition("{")
    with urlopen(f"{address}/metrics", timeout=ANSWER_SECONDS) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith(f"{name}{{") and label in line]
    assert found, f"no {series}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


@pytest.mark.skipif(bool(NO_SERVER), reason=NO_SERVER or "its parts are here")
def test_wishes_come_with_the_body_and_metrics_say_what_was_loaded(here: Node) -> None:
    tokens = new_tokens(LENGTH + 1)
    here.empty()
    with serving(here, here.transfer()) as (address,):
        reset = Request(f"{address}/reset_prefix_cache", method="POST")
        computed, cached = complete(address, tokens, store=False)
        assert cached == 0
        urlopen(reset, timeout=ANSWER_SECONDS).close()
        assert complete(address, tokens) == (computed, 0)
        eventually(lambda: here.stats().chunks == 4)
        assert counted(address, 'vllm:vcache_loaded_tokens_total{tier="host"') == 0
        urlopen(reset, timeout=ANSWER_SECONDS).close()
        assert complete(address, tokens, load=False) == (computed, 0)
        urlopen(reset, timeout=ANSWER_SECONDS).close()
        assert complete(address, tokens, consume_once=True) == (computed, LENGTH)
        assert here.stats().chunks == 0
        eventually(lambda: counted(address, 'vllm:vcache_loaded_tokens_total{tier="host"') == LENGTH)
        assert counted(address, 'vllm:vcache_loaded_bytes_total{tier="host"') == LENGTH * TOKEN_BYTES
        assert counted(address, "vllm:vcache_lookup_hit_tokens_total") == LENGTH
        assert counted(address, "vllm:vcache_load_seconds_count") == 1
        assert counted(address, "vllm:vcache_failures_total") == 0


@pytest.mark.skipif(bool(NO_SERVER), reason=NO_SERVER or "its parts are here")
@pytest.mark.parametrize("share", ["pool", "in_place"])
def test_the_documents_one_command_shares_what_its_data_parallel_ranks_compute(tmp_path: Path, share: str) -> None:
    """Each is an instance of its own. Nobody has started a server."""
    (written,) = {shown for page in PAGES for shown in re.findall(r"export VCACHE='(.*)'", page.read_text())}
    here, config = Node(tmp_path), tmp_path / "vcache.yaml"
    sections = here.transfer({"connector": {"share": share}})["kv_connector_extra_config"]
    config.write_text(json.dumps(sections))
    tokens, in_place = new_tokens(LENGTH + 1), share == "in_place"
    try:
        with serving(here, json.loads(written), more=("--data-parallel-size", "2"), VCACHE_CONFIG=str(config)) as (address,):
            assert complete(address, tokens)[1] == 0
            own = complete(address, tokens)
            complete(address, new_tokens(BLOCK), rank=1)
            eventually(lambda: sorted(one.resident for one in here.stats().instances) == [0, 4] * in_place)
            eventually(lambda: here.stats().chunks == 4 * (not in_place))
            hit = complete(address, tokens, rank=1)
            assert (hit[1], own[1]) == (LENGTH, LENGTH)
            assert hit == own
            assert len({one.id for one in here.stats().instances}) == 2 * in_place
        assert here.stats().chunks == 4 * (not in_place), "the server is still there"
    finally:
        end_servers(here.socket)
