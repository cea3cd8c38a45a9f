"""Starts the metadata server from LMCache's YAML, where nobody serves yet: `python -m vcache_backend.integration.lmcache.start_server`.

The YAML says `runtime_plugin_locations: [FILE]`; `--where` prints that file. LMCache then runs it beside its worker, with its
configuration as JSON in LMCACHE_RUNTIME_PLUGIN_CONFIG, shows what it prints as log lines, and sends it SIGTERM at shutdown. The
server outlives all of that, since the pool does: it has a session of its own, and a log of its own beside the socket. Instances
that start at the same time agree by a lock on who starts it.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from vcache_backend import config as configuration
from vcache_backend.config import ClientConfig, Config
from vcache_backend.errors import ConfigError, ServerUnavailable, VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.metadata_server.endpoint import beside, folder_fault

from .settings import read

VARIABLE = "LMCACHE_RUNTIME_PLUGIN_CONFIG"
LAUNCHED = Path(__file__).with_name("worker_0_start_server.py")
SECONDS = 30.0
"""Until a server must answer: its interpreter and a long journal take their time on a busy machine."""
PAUSE_SECONDS = 0.05
EXITED_SECONDS = 1.0
"""After our server ended: how long another one, started by hand at the same moment, may take to answer."""
_ASKING = ClientConfig(connect_seconds=1.0, spin_seconds=0)


def main() -> int:
    """What LMCache runs: 0 once a server answers, else 1; one line about it either way."""
    if sys.argv[1:] == ["--where"]:
        sys.stdout.write(f"{LAUNCHED}\n")
        return 0
    try:
        if sys.argv[1:] or VARIABLE not in os.environ:
            raise ConfigError(
                f"LMCache runs this, with its configuration in {VARIABLE}: write `runtime_plugin_locations: [{LAUNCHED}]` into its "
                "YAML. By hand it is `vcache serve`"
            )
        sys.stdout.write(f"vcache: {ensure(_configuration(os.environ[VARIABLE]))}\n")
    except (VCacheError, OSError) as error:
        sys.stdout.write(f"vcache: no metadata server was started: {error}\n")
        return 1
    return 0


def ensure(config: Config, seconds: float = SECONDS) -> str:
    """A server answers at `config.server.path` when this returns: the one that was there, or a new one that outlives this process.

    The answer says which. ServerUnavailable, with the end of the new server's log, if there is none within `seconds`.
    """
    path, deadline = config.server.path.absolute(), time.monotonic() + seconds
    if not _silence(path):
        return f"the metadata server at {path} is there already"
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if fault := folder_fault(path, {os.getuid(), 0}):
        raise ConfigError(f"server.socket: {fault}")
    log = beside(path, ".log")
    with _alone(beside(path, ".start"), deadline):
        if not _silence(path):
            return f"the metadata server at {path} is there already"
        server = _spawn(config, path, log)
        while reason := _silence(path):
            if server.poll() is not None:
                deadline = min(deadline, time.monotonic() + EXITED_SECONDS)
            if time.monotonic() > deadline:
                raise ServerUnavailable(f"{reason}; the new one's log, {log}, ends with: {_end(log)}")
            time.sleep(PAUSE_SECONDS)
    if server.poll() is not None:
        return f"the metadata server at {path} was started by somebody else"
    return f"metadata server started at {path}, pid {server.pid}, log {log}; it stays when this instance ends"


def is_named_in(locations: Iterable[str] | None) -> bool:
    """Do LMCache's `runtime_plugin_locations` have a server started? It may not answer yet when the plugin is made."""
    return any(Path(location).name == LAUNCHED.name for location in locations or ())


def wait_for(config: Config, seconds: float = SECONDS) -> bool:
    """Wait until a server answers; False if none does within `seconds`."""
    path, deadline = config.server.path, time.monotonic() + seconds
    while _silence(path):
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_SECONDS)
    return True


def _configuration(text: str) -> Config:
    """Our configuration within LMCache's, which is JSON."""
    try:
        values = json.loads(text)
        extra, chunk_size = values.get("extra_config") or {}, int(values["chunk_size"])
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{VARIABLE} is not LMCache's configuration ({error!r})") from error
    return read(extra, chunk_size).config


def _silence(path: Path) -> str:
    """Why nobody answers at `path`; empty if a server does."""
    with Client(path, _ASKING, reconnect=False) as client:
        try:
            client.require()
        except ServerUnavailable as error:
            return str(error)
    return ""


@contextmanager
def _alone(path: Path, deadline: float) -> Iterator[None]:
    """One process at a time; ServerUnavailable if it is not our turn by the deadline. The lock goes with its process."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ServerUnavailable(f"another process holds {path} and has not started one yet") from error
                time.sleep(PAUSE_SECONDS)
        yield
    finally:
        os.close(lock)


def _spawn(config: Config, path: Path, log: Path) -> subprocess.Popen[bytes]:
    """The server, detached: a session of its own, nothing open that is LMCache's. It reads its configuration from its stdin."""
    command = [sys.executable, "-P", "-m", "vcache_backend.metadata_server", "--config", "/dev/stdin", "--socket", str(path)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(log, flags, 0o600), "ab") as out:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("LMCACHE_")},
        )
    assert server.stdin is not None
    try:
        server.stdin.write(json.dumps(configuration.dump(config)).encode())
        server.stdin.close()
    except BrokenPipeError:
        pass  # it ended at once; its log says why
    return server


def _end(log: Path, lines: int = 3) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-lines:]) or "(empty)"


if __name__ == "__main__":
    sys.exit(main())
