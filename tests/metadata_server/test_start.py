"""A server that a worker starts where there is none: exactly one, which outlives whoever started
it.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import processes
import pytest
from processes import PATIENT, QUICK, SECONDS, Child, Stage, eventually, make_memfd, script, stage

from vcache_backend.config import Config, from_dict
from vcache_backend.errors import ServerUnavailable
from vcache_backend.metadata_server import start
from vcache_backend.metadata_server.endpoint import beside
from vcache_backend.metadata_server.start import ensure, try_ensure
from vcache_backend.protocol.channel import Channel
from vcache_backend.protocol.client import Client

STARTER = """
import json, sys
from vcache_backend.config import from_dict
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.start import ensure

try:
    print(ensure(from_dict(json.loads(sys.argv[1]))))
except VCacheError as error:
    print(type(error).__name__, error)
"""


AS_NOBODY = """
import logging, os, sys
from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import main
os.setgroups([]); os.setgid(65534); os.setuid(65534)
logging.basicConfig(level="INFO")
main.serve(ServerConfig(socket=sys.argv[1]))
"""


def servers(path: Path) -> list[int]:
    """The processes that serve `path`, or try to."""
    return processes.with_words("-m vcache_backend serve ", f"{path} ")


def end_servers(path: Path) -> None:
    """Those too that nobody's end ends."""
    for pid in servers(path):
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not servers(path))


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A socket's path. Detached servers on it end with the test."""
    made = tmp_path / "pool" / "vcache.sock"
    yield made
    end_servers(made)


def config(path: Path, **server: object) -> Config:
    return from_dict({"server": {"socket": str(path), **server}})


def starter(path: Path, **server: object) -> Child:
    """A process that has a server started, and ends."""
    return script(STARTER, json.dumps({"server": {"socket": str(path), **server}}))


def mourner(path: Path) -> Client:
    """A client that has a server started again, as the integrations make it."""
    made = Client(path, QUICK)
    made.on_killed = partial(try_ensure, config(path))
    return made


def test_only_a_killed_server_is_started_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nobody is given time to look after a server that was killed.
    monkeypatch.setattr(Channel, "KILLED_SECONDS", 0.0)
    ensure(config(path))
    with mourner(path) as one, mourner(path) as other:
        (first,) = servers(path)
        before = one.run_id
        os.kill(first, signal.SIGKILL)
        eventually(lambda: all(each.connected and each.run_id != before for each in (one, other)))
        (second,) = eventually(lambda: len(serving := servers(path)) == 1 and serving)
        assert first != second
        os.kill(second, signal.SIGTERM)
        eventually(lambda: not servers(path) and not one.connected and not other.connected)
        time.sleep(0.5)  # each has tried some twenty times to connect
        assert not servers(path)


def test_a_second_kill_gives_the_same_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Channel, "KILLED_SECONDS", 3600.0)
    ensure(config(path))
    calls: list[float] = []
    with Client(path, QUICK) as client:
        client.on_killed = lambda: calls.append(time.monotonic())
        os.kill(servers(path)[0], signal.SIGKILL)
        eventually(lambda: "no metadata server" in client.trouble)
        ensure(config(path))
        eventually(lambda: client.connected)
        time.sleep(0.5)
        monkeypatch.setattr(Channel, "KILLED_SECONDS", 0.5)
        killed = time.monotonic()
        os.kill(servers(path)[0], signal.SIGKILL)
        eventually(lambda: bool(calls))
    assert calls[0] - killed >= 0.5


def answers(path: Path) -> bool:
    with Client(path, PATIENT, reconnect=False) as client:
        return client.connected


def test_of_many_at_once_one_starts_it_with_its_settings_and_it_outlives_all(path: Path) -> None:
    starters = [starter(path, reservation_seconds=7) for _ in range(3)]
    try:
        ends = [one.wait() for one in starters]
    finally:
        for one in starters:
            one.__exit__(None, None, None)
    log = beside(path, ".log")
    there = f"the metadata server at {path} is already running\n"
    started = f"metadata server started at {path}, log {log}; it outlives this process\n"
    assert sorted(said for _, said in ends) == [started, there, there]
    (pid,) = eventually(lambda: len(serving := servers(path)) == 1 and serving)
    assert answers(path)
    # A signal to the starter's group or session does not reach it, nor whoever ends all descendants
    # of the starter.
    assert os.getsid(pid) == os.getpgid(pid) == pid
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert parent not in {one.pid for one in starters}
    assert [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in (1, 2)] == [str(log)] * 2
    assert "serving" in log.read_text()
    with Stage(path.parent).raw() as raw:
        memory = make_memfd(4096)
        raw.ask("add_segment", "s0", "host", "host", 4096, fds=(memory,))
        os.close(memory)
        assert raw.ask("reserve", [bytes(26)], 1024)[2] == 7.0


def test_one_that_is_there_is_left_alone_also_when_it_hangs(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stage(path.parent) as made:
        path.parent.mkdir()
        server = made.server()
        with monkeypatch.context() as patient:
            patient.setattr(start, "ANSWER_SECONDS", SECONDS)
            assert ensure(config(path)) == f"the metadata server at {path} is already running"
        said = rf"`kill -CONT {server.pid}`, .*another server already serves {path} \(pid {server.pid}\)"
        refusal = pytest.raises(ServerUnavailable, match=said)
        with server.stopped(), refusal:
            ensure(config(path))
        assert servers(path) == [], "this one is a fork of another program"


def test_a_server_that_cannot_start_is_told_with_its_own_words(path: Path) -> None:
    """The socket's place is taken by a folder."""
    (path / "in the way").mkdir(parents=True)
    said = r"log, .*, ends with: .*exists and is not a socket"
    with pytest.raises(ServerUnavailable, match=said):
        ensure(config(path))


def test_what_lies_in_the_working_folder_is_not_imported_on_the_way(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "subprocess.py").write_text("raise RuntimeError('taken from the working folder')")
    monkeypatch.chdir(tmp_path)
    assert ensure(config(path)).startswith("metadata server started")
    assert len(servers(path)) == 1


def test_a_python_that_says_more_than_it_should_does_not_keep_vllm_from_starting(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "usual").mkdir()
    (tmp_path / "usual" / "sitecustomize.py").write_text("print('welcome to this site')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "usual"))
    try_ensure(config(path))
    assert "no metadata server was started" in caplog.text
    eventually(lambda: answers(path))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_a_server_of_the_user_that_is_trusted_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "ANSWER_SECONDS", SECONDS)
    with TemporaryDirectory() as folder:
        os.chown(folder, 65534, 65534)
        socket = Path(folder) / "vcache.sock"
        with script(AS_NOBODY, str(socket)) as server:
            server.expect("serving")
            ours = {"server": {"socket": str(socket)}, "client": {"server_uid": 65534}}
            assert ensure(from_dict(ours)) == f"the metadata server at {socket} is already running"
