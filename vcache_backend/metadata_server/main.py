"""The server process: one thread with an epoll loop over its socket and connections.

Each turn of the loop handles requests, then sends the answers: the tables of the pool hold every
change before the answer leaves."""

from __future__ import annotations

import gc
import logging
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import ExitStack

from vcache_backend import log_format
from vcache_backend.backoff import Backoff
from vcache_backend.config import ServerConfig
from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.connections import Clients
from vcache_backend.metadata_server.endpoint import Endpoint
from vcache_backend.metadata_server.processes import closing
from vcache_backend.metadata_server.requests import Service
from vcache_backend.protocol import messages as m

log = logging.getLogger(__name__)


class MonitorProcess:
    """Restarts a process that has ended, `FIRST` seconds after the last start. These pauses double:
    it may be unable to listen, for example at a port in use."""

    FIRST = 5.0

    def __init__(self, config: ServerConfig) -> None:
        # `-P`: the current folder is nobody's package here.
        self._command = [sys.executable, "-P", "-m", "vcache_backend.monitor"]
        self._command += [str(config.path), config.metrics]
        self._process: subprocess.Popen[bytes] | None = None
        self._pauses, self._again_at = Backoff(self.FIRST, 64 * self.FIRST), 0.0

    def tick(self) -> None:
        """Start the process if it does not run. Called in every tick of the server."""
        now, before = time.monotonic(), self._process
        if now < self._again_at or (before is not None and before.poll() is None):
            return
        pause = self._pauses.next()
        self._again_at = now + pause
        if before is not None:
            again = f"it is started again now, and after {pause:g} s"
            log.error("server.metrics: its process ended with %d; %s", before.returncode, again)
            self.close()
        try:
            # The monitor ends when this pipe closes, and so when this process ends in any way.
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        except OSError as error:
            log.error("server.metrics: the process cannot be started: %s", error)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


class Server:
    """The whole server. `run` returns after SIGTERM, SIGINT or `stop()`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stopping = False
        with ExitStack() as undo:
            self._endpoint = Endpoint(config.path, open_to_others=bool(config.allow_uids))
            undo.callback(self._endpoint.close)
            self._epoll = undo.enter_context(select.epoll())
            self._watch = processes.Watch()
            try:
                closing()  # its thread begins now, where the user sees a refusal
            except RuntimeError as error:
                advice = "raise ulimit -u, or pids.max of the cgroup"
                raise ConfigError(f"{error}: {advice}") from error
            self._make_parts(undo)
            self._undo = undo.pop_all()

    def _make_parts(self, undo: ExitStack) -> None:
        config = self._config
        limit = processes.raise_descriptor_limit()
        # 64 for sockets, tables and /proc, and some for fds of requests. Of the rest connections,
        # their pidfds and segments get a third each.
        share = max(1, (limit - 64 - min(m.MAX_FDS, limit // 4)) // 3)
        self._service = Service(
            1 + secrets.randbits(62),
            write_seconds=config.reservation_seconds,
            max_segments=share,
            resets=self._endpoint.resets.read(),
            keep=self._endpoint.resets.write,
            pidfd=self._watch.pidfd,
        )
        undo.callback(self._service.close)
        sockets = self._endpoint.listener, self._epoll
        self._clients = Clients(config, share, *sockets, self._service, self._watch)
        undo.callback(self._clients.close)
        self._monitor = MonitorProcess(config) if config.metrics else None
        if self._monitor is not None:
            undo.callback(self._monitor.close)

    def run(self) -> None:
        """Serve until stopped. Then close everything and remove the socket.

        ConfigError once the socket's path leads elsewhere; the file at the path then stays."""
        log.info("serving %s", self._config.path)
        with self._undo:
            self._serve()
        log.info("stopped")

    def _serve(self) -> None:
        next_tick = time.monotonic()
        clients = self._clients
        while not self._stopping:
            now = time.monotonic()
            sleeps = now >= clients.spin_until
            # Few at once, one request of each: a request takes a few milliseconds at most, and no
            # answer leaves before the last of the turn. Epoll reports the others first next time.
            events = self._epoll.poll(max(0.0, next_tick - now) if sleeps else 0.0, 16)
            if not (events or now >= next_tick):
                # spinning, or woken for nothing: let other processes have this core first
                os.sched_yield()
                continue
            for fd, mask in events:
                clients.on_ready(fd, mask)
            if now >= next_tick:
                self._tick()
                next_tick = now + (0.05 if self._service.busy else 0.5)
            clients.send()

    def stop(self) -> None:
        """End `run` within a tick. May be called from a signal handler."""
        self._stopping = True

    def _tick(self) -> None:
        if reason := self._endpoint.lost():
            what = f"{self._config.path} does not lead to this server any more ({reason})"
            raise ConfigError(f"server.socket: {what}; it stops, so that all use the same one")
        self._endpoint.keep_fresh()
        self._service.tick()
        self._watch_processes()
        self._clients.tick()
        if self._monitor is not None:
            self._monitor.tick()

    def _watch_processes(self) -> None:
        """Handle the ends of processes that free slots or KV caches."""
        writers = {write.process for write in self._service.directory.quarantined()}
        owners = self._service.instances
        connected = {client.process for client in self._service.layouts.clients.values()}
        for process in self._watch.ended(writers | owners.processes(), connected):
            self._service.process_gone(process)


def serve(config: ServerConfig) -> None:
    """Run the server here until SIGTERM or SIGINT. ConfigError if the socket cannot be used.

    The garbage collector is off: the directory breaks its cycles itself, and a collection over
    millions of chunks would stop the loop for a noticeable time."""
    server = Server(config)
    for handler in logging.getLogger().handlers:
        handler.addFilter(log_format.LineLimit())
    gc.disable()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if not os.isatty(2):  # in a terminal the server ends with the terminal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server.run()
