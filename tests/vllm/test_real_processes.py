"""Real vLLM on the CPU in several processes, as in production: tensor parallel ranks, `vllm serve`,
another connector beside ours.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket
from typing import Any

import pytest
import vllm_cases
from page_commands import COMMANDS, commands
from processes import ROOT, containers, eventually
from test_start import end_servers
from vllm_cases import BLOCK, CHUNK, IN_PLACE, Answer, Instance, Node, complete, here, new_tokens
from vllm_models import write_states

from benchmarks.processes import free_ports
from benchmarks.serving.servers import healthy
from vcache_backend.children import Program
from vcache_backend.transfer.keys import state_keys

NEEDED = "watchfiles", "prometheus-fastapi-instrumentator", "model-hosting-container-standards"
NO_SERVER = vllm_cases.missing(NEEDED)
NO_ROUTER = NO_SERVER or vllm_cases.missing(("vllm-router", "setproctitle", "orjson"))
__all__ = ["here"]
pytestmark = vllm_cases.needs_vllm
OPEN: dict[str, str | None] = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
"""Workers run what a test gives them."""
APART = OPEN | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""The engine in a process of its own, too."""
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES |= {"worker_cls": "vllm_variants.Stage"}
LENGTH = 4 * CHUNK
PAGES = [ROOT / "README.md", ROOT / "docs" / "vllm" / "start.md"]


# ---- tensor parallel ranks


def lost_by_one(reader: Instance, tokens: list[int]) -> tuple[Answer, Answer]:
    """What is answered where only one rank's copy fails, and what is right."""
    right = reader.one(tokens, fresh=True, params={"vcache": {"load": False, "store": False}})
    reader.forget()
    reader.ask("meddle_at", 1, vllm_cases.PULL, "raise", 1)
    lost = reader.one(tokens)
    copies = reader.ask("leave_ranks_alone")
    assert copies == [1, 1], "each rank launched one copy, and one of them failed"
    eventually(lambda: reader.counter("vllm:vcache_failures", cause="copy") == 1)
    return lost, right


def _ends(serving: Any) -> list[int]:
    """The newest load whose end each worker has written for the scheduler."""
    scheduler = serving.llm.llm_engine.engine_core.engine_core.scheduler
    return [max(ring) for ring in scheduler.connector._ends._rings]


def resident(here: Node) -> int:
    """The blocks that all instances share in place."""
    return sum(one.resident for one in here.stats().instances)


def promises_kept(here: Node) -> int:
    """How many promised chunks all ranks have stored."""
    return int(here.stats().counters.get("promised_chunks_arrived", 0))


@pytest.mark.parametrize("which", ["ranks", "stages"])
def test_each_rank_stores_and_loads_its_part(here: Node, which: str) -> None:
    """And one look-up answers for all."""
    with here.connect(which, environment=OPEN, **(STAGES if which == "stages" else RANKS)) as ranks:
        tokens, known, kept = new_tokens(LENGTH + 17), set(here.chunk_keys()), promises_kept(here)
        computed = ranks.one(tokens)
        here.stored(len(known) + 2 * 4)
        eventually(lambda: promises_kept(here) == kept + 4)
        own, from_pool = ranks.one(tokens), ranks.again(tokens)
        assert (computed.cached, own.cached, from_pool.cached) == (0, LENGTH, LENGTH)
        assert ranks.ask(_ends) == [1, 1], "each has written the number of its first load"
        assert own.said == from_pool.said
        assert own.agrees(computed)
        # Both have all tokens, and each its part of their bytes.
        tokens_of = dict.fromkeys(("lookup_hit_tokens", "loaded_tokens"), LENGTH)
        bytes_of = dict.fromkeys(("loaded_bytes", "stored_bytes"), LENGTH * vllm_cases.TOKEN_BYTES)
        counts = tokens_of | bytes_of | {"failures": 0}

        def counted() -> bool:
            """What is visible is counted a little later, and told with a later step."""
            ranks.one(tokens[:5])
            return {name: ranks.counter(f"vllm:vcache_{name}") for name in counts} == counts

        eventually(counted)
        with here.corrupted():
            assert ranks.again(tokens).differs(computed)
        eventually(lambda: len(set(here.chunk_keys()) - set(known)) == 2 * 4)
        keys = [key for key in here.chunk_keys() if key not in known]
        with here.connection() as client:
            assert client.remove([key for key in keys if key.endswith(b"\0\1")][2:3]) == 1
        without = ranks.again(tokens, params={"vcache": {"store": False}})
        assert without.agrees(computed)
        # Which of the four it was, the journal does not say.
        assert without.cached in (0, CHUNK, 2 * CHUNK, 3 * CHUNK)
        if which == "ranks":
            longer = tokens + new_tokens(3 * CHUNK)
            before = ranks.one(new_tokens(BLOCK)) and here.chunks()
            lost, right = lost_by_one(ranks, longer)
            assert lost.agrees(right)
            # Also what was lacking before.
            here.stored(before + 2 * 3 + 1)
            after = ranks.again(longer)
            assert after.cached == LENGTH + 3 * CHUNK
            said = "what a rank computed from what the other one lacked is in the pool"
            assert after.agrees(right), said
            # As a prefill server is asked: there is no later step to store it.
            before = here.chunks()
            asked = ranks.again(longer + new_tokens(2 * CHUNK), max_tokens=1)
            assert asked.cached == LENGTH + 3 * CHUNK
            here.stored(before + 2 * 2)


def test_a_hit_ends_where_every_rank_has_a_state(here: Node) -> None:
    few = {"block_size": CHUNK, "max_num_batched_tokens": 2 * CHUNK}
    few |= {"prefix_cache_retention_interval": CHUNK}
    model = str(write_states(here.folder / "states"))
    with here.connect("states", environment=OPEN, model=model, **few, **RANKS) as ranks:
        tokens, known = new_tokens(LENGTH + 5), set(here.chunk_keys())
        ranks.one(tokens)
        # Each step leaves a state.
        here.stored(len(known) + 2 * (4 + 2))
        own, again = ranks.one(tokens), ranks.again(tokens)
        assert (again.cached, again.said) == (own.cached, own.said) == (LENGTH, own.said)
        with here.corrupted():
            assert ranks.again(tokens).differs(own)
        new = [key for key in here.chunk_keys() if key not in known]
        states = [key for key in state_keys(new, 1) if key in new and key.endswith(b"\0\1")]
        with here.connection() as client:
            assert client.remove(states) == 2
        assert ranks.again(tokens, params={"vcache": {"store": False}}).cached == 0
        assert ranks.counter("vllm:vcache_failures") == 0


@pytest.mark.parametrize("isolated", [not containers()], ids=[containers() or "in containers"])
def test_each_rank_reads_from_the_same_rank_of_another(tmp_path: Path, isolated: bool) -> None:
    """In place: a block is found once both ranks have published it. From its container
    the server sees nobody's pid.
    """
    with vllm_cases.node(tmp_path, isolated=isolated) as here:
        given: dict[str, Any] = {"environment": APART, "max_num_batched_tokens": 2 * CHUNK, **RANKS}
        owner = here.connect("owner", IN_PLACE, **given)
        traced = given | {"otlp_traces_endpoint": "http://127.0.0.1:4317"}
        reader = here.connect("reader", IN_PLACE, **traced)
        tokens, hits = new_tokens(LENGTH + 17), LENGTH
        computed = owner.one(tokens)
        assert owner.ask("ranks_told")
        assert {one.pid == 0 for one in here.stats().instances} == {isolated}
        hit, own = reader.one(tokens), owner.one(tokens)
        assert (hit.cached, own.cached) == (hits, hits)
        assert hit.said == own.said
        assert hit.agrees(computed)
        again = reader.again(tokens)
        assert again.cached == hits
        assert again.said == own.said
        spans = eventually(lambda: len(ended := reader.ask("spans")) == 6 and ended)
        for found, *loads in (spans[:3], spans[3:]):
            names = [found[0], *(name for name, *_ in loads)]
            assert names == ["vcache.lookup", "vcache.load", "vcache.load"]
            assert found[3]["vcache.found_tokens"] == hits
            assert all(found[2] <= begin < end for _, begin, end, _ in loads)
            assert sorted(said["vcache.worker"] for *_, said in loads) == [0, 1]
            assert all(said["vcache.bytes.resident"] > 0 for *_, said in loads)
        longer = tokens + new_tokens(3 * CHUNK)
        lost, right = lost_by_one(reader, longer)
        assert lost.agrees(right)
        hits += 3 * CHUNK
        assert reader.ask("ranks_told")
        after = owner.again(longer)
        assert after.cached == hits
        assert after.agrees(right)
        # What is announced is waited for, until the other's ranks have computed it.
        coming, asked = new_tokens(12 * CHUNK + 5), here.asked("Find")
        reader.add("waits", coming, params={"vcache": {"announced": True, "wait_seconds": 60}})
        eventually(lambda: here.asked("Find") > asked)
        computed, waited = owner.one(coming), reader.finish("waits")["waits"]
        assert waited.cached == 12 * CHUNK
        assert waited.agrees(computed)
        assert promises_kept(here) >= 12
        assert reader.counter("vllm:vcache_waits", end="kept") == 1


# ---- another connector


def test_what_another_connector_failed_to_load_reaches_nobody_through_the_pool(here: Node) -> None:
    """vLLM computes it again, behind a step that has computed with it. That request stores nothing,
    and a later one stores what it computes."""
    runner = APART | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    other = {"kv_connector": "FailingConnector", "kv_connector_module_path": "vllm_variants"}
    other |= {"kv_role": "kv_both"}
    other |= {"kv_connector_extra_config": {"shared_storage_path": str(here.folder / "failing")}}
    given = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
    given |= {"kv_connector_extra_config": {"connectors": [other, here.transfer()]}}
    given |= {"kv_load_failure_policy": "recompute"}
    more = {"async_scheduling": False, "disable_hybrid_kv_cache_manager": True}
    failing = here.alone("failing", runner, kv_transfer_config=given, **more)
    # A late word of the other's promise must not have it wait for what was cleared.
    at_once = {"connector": {"wait_factor": 0}}
    reader, tokens = here.connect("reader", at_once, runner), new_tokens(LENGTH + 17)
    computed = here.keep(failing, tokens)
    failing.forget()
    with here.connection() as client:
        client.clear()
    assert failing.one(tokens).said == computed.said
    failing.one(new_tokens(LENGTH))
    here.stored(4)
    assert here.chunks() == 4
    again = reader.one(tokens)
    assert again.cached == 0
    assert again.agrees(computed)
    for one in (failing, reader):
        one.close()


@pytest.mark.skipif(bool(vllm_cases.missing()), reason="no LMCache")
def test_what_is_computed_behind_a_failed_load_of_lmcaches_reaches_nobody(here: Node) -> None:
    """It loads and stores in one step. In one of two pipeline stages the load fails; when vLLM
    hears of that, another request has found the blocks. What later requests compute is stored, also
    behind a hit."""
    stages = STAGES | {"environment": OPEN, "max_num_batched_tokens": 160}
    aside = here.alone("aside")
    first = new_tokens(6 * CHUNK + 7)
    second = first[: 6 * CHUNK] + new_tokens(5 * CHUNK + 3)
    # Of some forty instances one had a rank in which LMCache did not start ("unhealthy" in the log).
    for turn in "123":
        keeper, failing = (here.start(f"{name}-{turn}", **stages) for name in ("keep", "fail"))
        keeper.one(first[: 4 * CHUNK])
        here.chunks()
        if failing.again(first[: 4 * CHUNK]).cached:
            break
        keeper.close()
        failing.close()
    failing.forget()
    failing.ask("meddle_at", 0, vllm_cases.PULL, "raise", 1)
    failing.add("first", first)
    answers = failing.step(1)
    failing.add("second", second)
    answers |= failing.finish("first", "second")
    assert failing.ask("leave_ranks_alone") == [1, 1]
    assert answers["second"].cached == 6 * CHUNK
    before = here.chunks()
    failing.one(new_tokens(10 * CHUNK + 1))
    here.stored(before + 20)
    for tokens in (first, second):
        right = aside.one(tokens)
        assert failing.one(tokens).agrees(right)
        assert keeper.again(tokens).agrees(right)
    before = here.chunks()
    keeper.one(first[: 4 * CHUNK] + new_tokens(2 * CHUNK + 1))
    here.stored(before + 4)
    for one in (keeper, failing, aside):
        one.close()


# ---- `vllm serve`


@contextmanager
def serving(
    here: Node,
    *transfers: dict[str, Any],
    more: Sequence[str] = (),
    events: Sequence[int] = (),
    **environment: str,
) -> Iterator[dict[str, Instance]]:
    """Servers by their addresses, one for each `kv_transfer_config`. Front ends and engines are
    processes of their own. more: arguments. events: the port of each for its KV events, if any.
    """
    ports = free_ports(len(transfers))
    common = shlex.split(
        f"--model {here.model} --served-model-name tiny --host 127.0.0.1 --dtype bfloat16 "
        f"--block-size {BLOCK} --kv-cache-memory-bytes {4096 * vllm_cases.TOKEN_BYTES} "
        "--max-model-len 1024 --max-num-seqs 4 --skip-tokenizer-init --enforce-eager "
        "--enable-prompt-tokens-details"
    )
    # The mode of developers has the address that resets the cache.
    given = APART | {"VLLM_SERVER_DEV_MODE": "1"} | environment
    with ExitStack() as undo:
        servers = {}
        for number, (port, transfer) in enumerate(zip(ports, transfers, strict=True)):
            told = {"enable_kv_cache_events": True, "publisher": "zmq"}
            arguments = [*common, *more, "--port", f"{port}"]
            arguments += ["--kv-transfer-config", json.dumps(transfer)]
            if events:
                told |= {"endpoint": f"tcp://*:{events[number]}"}
                arguments += ["--kv-events-config", json.dumps(told)]
            made = Instance(here.folder, f"server-{port}", given, arguments, vllm_cases.serve)
            servers[port] = undo.enter_context(made)
        for port, server in servers.items():
            eventually(
                lambda port=port, server=server: listens(port) or server.ended(),
                vllm_cases.START_SECONDS,
            )
            assert server.alive, server.log[-4000:]
        yield {f"http://127.0.0.1:{port}": server for port, server in servers.items()}


def listens(port: int) -> bool:
    with socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


SETTING = "kv_connector_extra_config: Object contains unknown field `segment_bites` - at `$.pool`; "
SETTING += "did you mean `segment_bytes`?"


@pytest.mark.skipif(bool(NO_SERVER), reason=NO_SERVER or "its parts are here")
def test_a_mistake_in_the_settings_is_the_last_line_of_vllms_log(here: Node) -> None:
    """Nothing of vLLM has started by then: there is nobody else who would go on, or say more."""
    wrong = here.transfer({"pool": {"segment_bites": "1 GiB"}})
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(here.model), "--skip-tokenizer-init"]
    command += ["--kv-transfer-config", json.dumps(wrong)]
    given = {name: value for name, value in vllm_cases.QUIET.items() if value is not None}
    given |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    with vllm_cases.beside_vllm() as worker:
        status, log = worker.ask(_ended, command, given, here.folder / "mistake.log")
    assert log.endswith(f"vcache: {SETTING}\n"), log
    assert (status, "Traceback" in log, "EngineCore" in log) == (1, False, False), log


def _ended(_: object, command: list[str], more: dict[str, str], log: Path) -> tuple[int, str]:
    """Run a program of vLLM's, forked from a process that has imported it, to its end."""
    from forked_programs import Popen

    with log.open("wb") as out, Popen(command, env=os.environ | more, stdout=out, stderr=out) as it:
        status = it.wait(vllm_cases.START_SECONDS)
    return status, log.read_text()


def _models(_: object, commands: list[list[str]]) -> list[str]:
    """What vLLM's own parser finds to be served by these arguments."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    found = [parser.parse_args(arguments) for arguments in commands]
    return [each.model_tag or each.model for each in found]


def test_vllm_understands_its_commands_as_the_pages_have_them() -> None:
    programs = r"vllm serve |-m vllm\.entrypoints\.openai\.api_server "
    shown = [command for page in COMMANDS for command in commands(page)]
    found = {"".join(re.split(programs, command)[1:]) for command in shown}
    asked = [[word for word in shlex.split(one) if word != "…"] for one in found if one]
    with vllm_cases.beside_vllm() as worker:
        assert set(worker.ask(_models, asked)) == {"MODEL", "/tmp/tiny"}
    assert len(asked) > 4


@pytest.mark.skipif(bool(NO_ROUTER), reason=NO_ROUTER or "the router is here")
def test_the_router_of_the_page_sends_requests_to_servers_that_share(here: Node) -> None:
    """By its command, and with the policy that needs KV events, of which it understands all."""
    page = (ROOT / "docs" / "choose.md").read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^\$ (vllm-router .*)$", page, re.M)
    events = free_ports(2)
    with serving(here, *[here.transfer(IN_PLACE)] * 2, events=events) as servers:
        urls = list(servers)
        written = [f"http://127.0.0.1:{port}" for port in (8000, 8001)]
        assert re.findall(r"http://\S+", command) == written
        arguments = shlex.split(command.replace("http://127.0.0.1:8000", urls[0]))[1:]
        arguments[arguments.index("http://127.0.0.1:8001")] = urls[1]
        knows = ["--policy", "kv_aware", "--kv-event-block-size", str(BLOCK)]
        knows += ["--kv-event-model", "tiny", "--worker-urls", *urls]
        for url, port in zip(urls, events, strict=True):
            knows += ["--kv-event-source", f"{url}=tcp://127.0.0.1:{port}"]
        both = ("page", arguments), ("kv_aware", knows)
        for turn, (name, given) in enumerate(both):
            tokens = new_tokens(LENGTH + 1)
            with routed(here.folder / f"{name}.log", given) as address:
                computed, cached = complete(address, tokens)
                assert cached == 0
                # A server waits no longer than some steps for what the other has computed.
                there = (2 * turn + 1) * LENGTH // BLOCK
                eventually(lambda there=there: resident(here) >= there)
                assert complete(address, tokens) == (computed, LENGTH)
                # The other server reads what the first has.
                answers = [complete(url, tokens) for url in urls]
                assert answers == [(computed, LENGTH)] * 2
            log = (here.folder / f"{name}.log").read_text()
            assert not re.search("kv_index decode|(invalid|unsupported) KV event", log, re.I)


@contextmanager
def routed(log: Path, arguments: Sequence[str]) -> Iterator[str]:
    """The real vllm-router with these arguments, on ports of its own; its address."""
    port, metrics = free_ports(2)
    own = ["--port", str(port), "--prometheus-port", str(metrics), "--host", "127.0.0.1"]
    command = [str(Path(sys.executable).with_name("vllm-router")), *arguments, *own]
    with Program("router", command, log) as router:
        router.until(lambda: healthy(port), vllm_cases.START_SECONDS)
        yield f"http://127.0.0.1:{port}"


# ---- data parallel ranks


@pytest.mark.skipif(bool(NO_SERVER), reason=NO_SERVER or "its parts are here")
def test_the_documents_one_command_shares_among_its_ranks(tmp_path: Path) -> None:
    """In place, since they have a block table each. Nobody has started a metadata server, nobody has
    named a socket or a way to share, and nothing is lent.
    """
    flag = re.compile(r"vllm serve MODEL .*--kv-transfer-config '(.*)'")
    (written,) = {shown for page in PAGES for shown in flag.findall(page.read_text())}
    here, config = Node(tmp_path), tmp_path / "vcache.yaml"
    here.socket = tmp_path / "vcache" / "vcache.sock"
    sections = here.transfer(IN_PLACE)["kv_connector_extra_config"]
    del sections["connector"]["share"], sections["server"]
    config.write_text(json.dumps(sections))
    given = {"VCACHE_CONFIG": str(config), "XDG_RUNTIME_DIR": str(tmp_path)}
    more, tokens = ["--data-parallel-size", "2"], new_tokens(LENGTH + 1)
    try:
        with serving(here, json.loads(written), more=more, **given) as servers:
            (address,) = servers
            for rank in range(2):
                complete(address, new_tokens(5), rank=rank)
            assert complete(address, tokens)[1] == 0
            own = complete(address, tokens)
            eventually(lambda: resident(here) >= LENGTH // BLOCK)
            hit = complete(address, tokens, rank=1)
            assert (hit[1], own[1]) == (LENGTH, LENGTH)
            assert hit == own
            assert here.chunks() == 0, "the server is still there"
            log = servers[address].log
            assert "metadata server started at" in log
            assert "it outlives this process" in log
    finally:
        end_servers(here.socket)
