"""What people copy: configurations, the documentation's snippets, the example with two real vLLM
instances, and a Mooncake store.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import which
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from mooncake_cases import needs_mooncake
from processes import ROOT, Child, command_line, eventually, ran, with_words
from vllm_cases import beside_vllm, forking, missing
from vllm_models import write_model

from benchmarks.processes import free_ports
from vcache_backend import config as configuration
from vcache_backend import doctor
from vcache_backend.integration.lmcache.boundary import settings_of

PLAIN = ROOT / "configs" / "lmcache-vcache.yaml"
DOCS = ROOT / "docs" / "lmcache.md"
EXAMPLE = ROOT / "examples" / "two_vllm_instances.py"
REAL_MODEL = EXAMPLE.with_name("real_model.py")
NEEDS_VLLM = pytest.mark.skipif(bool(missing()), reason=missing() or "vLLM is here")
EXAMPLE_SECONDS = 900.0
STORE = [sys.executable, "-m", "vcache_backend", "mooncake", "--segment", "64MiB"]
STORE_DOCS = ROOT / "docs" / "mooncake.md"


# ---- the configurations


def _loaded(_: object, file: str) -> dict[str, Any]:
    """What LMCache reads in a file."""
    from lmcache.v1.config import LMCacheEngineConfig

    config = LMCacheEngineConfig.from_file(file)
    config.validate()
    return json.loads(config.to_json())


@NEEDS_VLLM
def test_lmcache_reads_it_as_it_is_meant(tmp_path: Path) -> None:
    with beside_vllm(tmp_path / "log") as worker:
        read = worker.ask(_loaded, str(PLAIN))
        assert "Unknown configuration key" not in worker.log
    written = yaml.safe_load(PLAIN.read_text())
    assert {key: read[key] for key in written} == written


# ---- the documentation


def known_keys() -> set[str]:
    """All of our configuration."""

    def names(section: dict[str, Any], prefix: str) -> Iterator[str]:
        for key, value in section.items():
            yield prefix + key
            if isinstance(value, dict):
                yield from names(value, f"{prefix}{key}.")

    return {*names(configuration.dump(configuration.Config()), "")}


def snippets(page: Path) -> list[str]:
    found = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    assert found
    return found


def test_every_key_that_the_pages_name_exists_and_their_snippets_are_configurations() -> None:
    known = known_keys()
    sections = "|".join(configuration.Config.__struct_fields__)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_.]+)[`:]", DOCS.read_text()))
    assert len(named) > 8
    assert named - known == set()
    for block in snippets(DOCS):
        extra = yaml.safe_load(block).get("extra_config", {})
        settings_of(SimpleNamespace(extra_config=extra, chunk_size=256))
    named = set(re.findall(r"`(offload\.[a-z_.]+)[`:]", STORE_DOCS.read_text()))
    assert len(named) > 8
    assert named - known == set()
    for block in snippets(STORE_DOCS):
        configuration.from_dict(yaml.safe_load(block))


# ---- the example


def example(folder: Path, *arguments: str) -> Child:
    """The example as a person starts it, its files in `folder`."""
    ports = ",".join(map(str, free_ports(2)))
    command = [sys.executable, "-W", "ignore", str(EXAMPLE), "--cpu", "--logs", str(folder)]
    return Child([*command, "--ports", ports, *arguments])


@NEEDS_VLLM
@pytest.mark.timeout(EXAMPLE_SECONDS + 20)
def test_the_example_shows_the_second_instance_read_what_the_first_computed(tmp_path: Path) -> None:
    ports = ",".join(map(str, free_ports(2)))
    given = f"--cpu --json --lengths 513 --ports {ports} --logs {tmp_path}/run".split()
    with forking(str(EXAMPLE), given, tmp_path / "log", {}) as worker:
        assert worker.answer(EXAMPLE_SECONDS) == 0, worker.log
        said = worker.log
    shown = json.loads(said[said.index("{\n") : said.rindex("\n}") + 2])
    assert (shown["ok"], shown["context_matters"]) == (True, True)
    rows = [(row["instance"], row["cached"], row["tokens_equal"]) for row in shown["rows"]]
    assert rows == [("A", 0, True), ("A", 512, True), ("B", 512, True)]
    assert shown["status"]["chunks"] >= 8
    assert shown["status"]["reports"] == []


@NEEDS_VLLM
@pytest.mark.timeout(EXAMPLE_SECONDS + 20)
def test_a_real_model_answers_in_the_same_words_from_kv_that_another_server_computed(
    tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    """The converted model is kept, as it is for users, until the example changes."""
    ports = ",".join(map(str, free_ports(2)))
    given = f"--json --ports {ports} --logs {tmp_path}/run".split()
    version = hashlib.sha256(REAL_MODEL.read_bytes()).hexdigest()[:8]
    environment = {"XDG_CACHE_HOME": str(pytestconfig.cache.mkdir(f"real-model-{version}"))}
    with forking(str(REAL_MODEL), given, tmp_path / "log", environment) as worker:
        assert worker.answer(EXAMPLE_SECONDS) == 0, worker.log
        said = worker.log
    rows = json.loads(said[said.index("[\n") : said.rindex("\n]") + 2])
    assert [row["same_answer"] for row in rows] == [True] * 3
    assert "Jonas Petersen" in rows[1]["answer"]
    assert [row["not_computed"] // 256 for row in rows] == [0, 6, 6]


@NEEDS_VLLM
def test_another_program_s_port_is_not_taken_for_a_server_of_its_own(tmp_path: Path) -> None:
    """It would be asked in the server's place, however wrong its answers are."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with example(tmp_path / "run", "--ports", f"{port},{free_ports(1)[0]}") as run:
            status, said = run.wait()
    assert (status, f"port {port} is in use" in said, "--ports" in said) == (1, True, True), said


@NEEDS_VLLM
def test_a_killed_example_ends_what_it_started(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    # One that vLLM can serve: else its servers could end before this test counts them.
    serves = ["--model", str(write_model(folder / "model")), "--lengths", "64"]
    with example(folder, *serves, "--", "--skip-tokenizer-init") as child:
        child.expect("instance B: starting")
        assert len(with_words(folder)) >= 4
        child.kill()
        eventually(lambda: not with_words(folder))


@NEEDS_VLLM
def test_each_worker_retrieves_what_the_other_has_stored_and_a_changed_byte_is_found(
    tmp_path: Path,
) -> None:
    with forking(str(EXAMPLE.with_name("engine.py")), [], tmp_path / "log", {}) as worker:
        assert worker.answer(EXAMPLE_SECONDS) == 0, worker.log
        assert "64 of 64 chunks retrieved" in worker.log
        assert worker.log.endswith("Every byte is right, and a wrong one is found.\n")


@NEEDS_VLLM
def test_the_demo_without_options_explains_itself_and_takes_none() -> None:
    done = [ran(sys.executable, EXAMPLE.with_name("engine.py"), word) for word in ("-h", "now")]
    assert [one.returncode for one in done] == [0, 2]
    assert ("usage: engine.py" in done[0].stdout, "now" in done[1].stderr) == (True, True)


@NEEDS_VLLM
def test_ctrl_c_ends_the_demo_without_a_traceback() -> None:
    with Child([sys.executable, str(EXAMPLE.with_name("engine.py"))]) as demo:
        demo.expect("starting a metadata server")
        os.kill(demo.pid, signal.SIGINT)
        status, said = demo.wait()
    assert (status, "Traceback" in said) == (130, False), said


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "benchmarks"],
        *([str(path)] for path in sorted(EXAMPLE.parent.glob("*.py")) if path.stem != "serving"),
    ],
)
def test_a_python_without_any_package_is_told_what_to_install(program: list[str]) -> None:
    done = ran(sys.executable, "-S", "-E", *program)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "pip install '/path/to/vcache[" in done.stderr


# ---- a Mooncake store


def store(port: int, folder: Path, *arguments: str) -> Child:
    return Child([*STORE, "--port", str(port), "--logs", str(folder), *arguments])


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


def with_port(port: int) -> list[str]:
    """Programs of Mooncake's that run and have the port on their command line."""
    lines = [command_line(pid) for pid in with_words(str(port))]
    theirs = [line for line in lines if re.search(rf"mooncake_.*\b{port}\b", line)]
    return [line for line in theirs if "mooncake.sh" not in line]


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a store, which Ctrl-C ends with all its programs."""
    (port,) = free_ports(1)
    with store(port, tmp_path_factory.mktemp("store")) as child:
        child.expect("ready:")
        assert len(with_port(port)) == 2
        yield port
        child.signal(signal.SIGINT)
        assert child.wait()[0] == 130
    assert with_port(port) == []


@needs_mooncake
def test_a_second_script_joins_the_first_or_says_that_the_port_is_taken(serving: int) -> None:
    with Child([*STORE[:-2], "--port", str(serving)]) as second:
        assert second.wait() == (1, f"vcache mooncake: port {serving} of 127.0.0.1 is taken\n")
    with Child([*STORE, "--master", f"127.0.0.1:{serving}"]) as second:
        second.expect("ready:")
        assert len(with_port(serving)) == 3
        second.signal(signal.SIGTERM)
        assert second.wait()[0] == 143
    assert len(with_port(serving)) == 2


@NEEDS_VLLM
@needs_mooncake
def test_two_nodes_share_a_prompt_through_the_store_and_nothing_else(tmp_path: Path) -> None:
    """In a store of its own: a master goes on for seconds to give memory of a provider that ended."""
    (port,) = free_ports(1)
    program = str(EXAMPLE.with_name("mooncake_two_nodes.py"))
    given = ["--master", f"127.0.0.1:{port}", "--tokens", "512"]
    with store(port, tmp_path) as store_:
        store_.expect("ready:")
        with forking(program, given, tmp_path / "log", {}) as worker:
            status, said = worker.answer(200), worker.log
    assert status == 0, said
    assert "node B before: 0 of 512 tokens" in said
    below, promoted = (line for line in said.splitlines() if line.startswith("node B: "))
    came = "node B: 512 tokens found, 512 came, equal; chunks so far: "
    assert below == came + "{'vram': 0, 'offload': 2}"
    assert promoted == came + "{'vram': 2, 'offload': 2}"


@needs_mooncake
def test_when_the_provider_dies_the_script_says_so_and_ends_the_master(tmp_path: Path) -> None:
    """Another store was started at the same time, and looked for ports, too: both serve, and the
    doctor finds nothing wrong."""
    port, another = free_ports(2)
    host, master = ("::1", f"[::1]:{port}") if has_ipv6() else ("127.0.0.1", f"127.0.0.1:{port}")
    with store(port, tmp_path, "--host", host) as child, store(another, tmp_path / "2") as beside:
        beside.expect("ready:")
        assert f"master {master} " in child.expect("ready:")
        settings = {"policy": "write_through", "mooncake": {"master": master, "hostname": host}}
        findings = list(doctor.check_offload(configuration.from_dict({"offload": settings})))
        assert [finding for finding in findings if finding.status != "ok"] == []
        assert findings[-1].check == "mooncake provider"
        (provider,) = with_words(str(port), "mooncake_client")
        os.kill(provider, signal.SIGKILL)
        status, said = child.wait()
        if which("setpriv"):
            beside.kill()
            eventually(lambda: not with_port(another))
    assert (status, f"provider ended; its log is {tmp_path}/provider.log" in said) == (1, True)
    assert with_port(port) == []
