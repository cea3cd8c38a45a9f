"""Starts a metadata server for workers whose configuration asks for it, unless a server answers.
The server outlives the workers, as the pool does.

Several workers may start servers at once: the first one locks the path, and the others end. A
server has its own session, parent and log, so neither a signal to the worker's group nor the end of
the worker's parent reaches it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from vcache_backend import config as configuration
from vcache_backend.config import ClientConfig, Config
from vcache_backend.errors import ConfigError, ServerUnavailable
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.endpoint import beside, make_folder
from vcache_backend.protocol.client import Client
from vcache_backend.protocol.sockets import advice, listener

log = logging.getLogger(__name__)

ANSWER_SECONDS = 1.0
"""How long a server that is there may take to answer."""
_DETACH = (
    "import subprocess as s, sys; print(s.Popen(sys.argv[1:], stdin=0, stdout=2, "
    "start_new_session=True).pid)"
)
"""The program of a helper process that starts the server and ends, which leaves the server to init.
The server reads the helper's stdin, and writes its log to the helper's stderr."""


def ensure(config: Config, seconds: float = 30.0) -> str:
    """Make sure that a server answers at `config.server.path`: the present server, or a new server
    that outlives this process.

    Returns a line that says which. ConfigError if no server is possible; ServerUnavailable, with
    the end of the new server's log, if no server answers within `seconds`."""
    path, deadline = config.server.path.absolute(), time.monotonic() + seconds
    trusted = config.client.server_uid
    started = ""
    try:
        if _silence(path, trusted):
            make_folder(path)
            started = _start(config, path, deadline)
    except OSError as error:
        said = f"server.socket: no server can be started at {path}: {error}{advice(error)}"
        raise ConfigError(said) from error
    return started or f"the metadata server at {path} is already running"


def try_ensure(config: Config) -> None:
    """Call `ensure` for an integration, and log the outcome. Without a server the integration goes
    on, and every look-up is a miss."""
    try:
        log.info("vcache: %s", ensure(config))
    except Exception as error:  # noqa: BLE001 - nothing of ours raises into who serves
        log.error("vcache: no metadata server was started: %s", error)


def _start(config: Config, path: Path, deadline: float) -> str:
    """Start a server, unless another process does. Returns a line, or empty if it did."""
    log = beside(path, ".log")
    server = processes.identity(_spawn(config, path, log))
    while reason := _silence(path, config.client.server_uid):
        if not processes.lives(server):
            # Another process may have started one, which has the lock and answers soon.
            deadline = min(deadline, time.monotonic() + 3.0)
        if time.monotonic() > deadline:
            end = " | ".join(log.read_text(errors="replace").splitlines()[-3:]) or "(empty)"
            raise ServerUnavailable(f"{reason}; the new one's log, {log}, ends with: {end}")
        time.sleep(0.05)
    if listener(path) != server.pid:
        return ""
    return f"metadata server started at {path}, log {log}; it outlives this process"


def _silence(path: Path, trusted: int | None) -> str:
    """Why no server of this user, root or the trusted user answers at `path`; empty if any does."""
    asking = ClientConfig(connect_seconds=ANSWER_SECONDS, server_uid=trusted)
    with Client(path, asking, reconnect=False) as client:
        return client.trouble


def _spawn(config: Config, path: Path, log: Path) -> int:
    """Start a detached server, which reads its configuration from stdin. Returns its pid."""
    command = [sys.executable, "-P", "-m", "vcache_backend", "serve"]
    command += ["--config", "/dev/stdin", "--socket", str(path), "--log", str(log)]
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    with open(os.open(log, flags, 0o600), "ab") as out:
        detached = subprocess.run(
            [sys.executable, "-P", "-c", _DETACH, *command],
            input=json.dumps(configuration.dump(config)).encode(),
            stdout=subprocess.PIPE,
            stderr=out,
            check=False,
            timeout=30.0,
        )
    if detached.returncode:
        raise ServerUnavailable(f"no process could be started for a metadata server; see {log}")
    return int(detached.stdout)
