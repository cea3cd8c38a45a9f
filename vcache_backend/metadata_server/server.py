"""The server process: one thread with an epoll loop over its socket and connections.

Each turn of the loop handles requests, writes the ledger, then sends the answers. So the ledger
holds every change before the answer leaves."""

from __future__ import annotations

import gc
import logging
import mmap
import os
import secrets
import select
import signal
import time
from contextlib import ExitStack

import msgspec

from vcache_backend.config import ServerConfig
from vcache_backend.errors import ConfigError, raising_as
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.descriptors import closing
from vcache_backend.metadata_server.endpoint import Endpoint
from vcache_backend.metadata_server.ledger import Ledger
from vcache_backend.metadata_server.line_limit import LineLimit
from vcache_backend.metadata_server.pool.directory import Directory
from vcache_backend.metadata_server.serving.admission import Admission
from vcache_backend.metadata_server.serving.clients import Clients
from vcache_backend.metadata_server.serving.monitoring import MonitorProcess
from vcache_backend.metadata_server.serving.service import Service
from vcache_backend.metadata_server.succession import Predecessors
from vcache_backend.protocol import wire

log = logging.getLogger(__name__)

BUSY_TICK_SECONDS = 0.05
IDLE_TICK_SECONDS = 0.5
PATH_SECONDS = 0.01
"""How often a busy server checks that the socket's path still leads to it."""
EVENTS_A_TURN = 16
"""The most connections to answer in one turn, one request each. Epoll then reports the others
first. A request takes a few milliseconds at most; no answer leaves before the turn's last."""
SPARE_BYTES = 64 << 20
"""The address space that must be free. Without free address space, CPython's handling of a
MemoryError may never end."""
BACKLOG_STEPS = 256
"""About how many steps of the backlog each turn does."""


class Server:
    """The whole server. `run` returns after SIGTERM, SIGINT or `stop()`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._stopping = False
        self._looked = time.monotonic()
        with ExitStack() as undo:
            self._endpoint = Endpoint(config.path, open_to_others=bool(config.allow_uids))
            undo.callback(self._endpoint.close)
            self._endpoint.keep(msgspec.json.encode(config))
            self._epoll = undo.enter_context(select.epoll())
            self._watch = processes.Watch()
            closing()  # its thread begins now, where a refusal is an error that the user sees
            self._make_parts(undo)
            self._undo = undo.pop_all()

    def _make_parts(self, undo: ExitStack) -> None:
        config = self._config
        admission = Admission(config, self._endpoint, self._epoll)
        epoch, first_id = 1 + secrets.randbits(62), 1 + secrets.randbits(62)
        self._directory = Directory(config, time.monotonic, first_id)
        what = "memory for the server's ledger (memfd_create)"
        with raising_as(ConfigError, what, OSError):
            self._ledger = Ledger(epoch)
        undo.callback(self._ledger.close)
        self._predecessors = Predecessors(self._directory, epoch, config.recover_seconds)
        self._service = Service(
            self._directory, epoch, self._predecessors, admission.max_segments, self._watch.pidfd
        )
        undo.callback(self._service.close)
        few, many = (0.005, 1.0) if config.spin_seconds is None else 2 * (config.spin_seconds,)
        spin_seconds = wire.spin(few, many)
        self._clients = Clients(
            admission, self._epoll, self._service, self._watch, self._ledger, spin_seconds
        )
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
        directory, clients = self._directory, self._clients
        while not self._stopping:
            now = time.monotonic()
            sleeps = not directory.backlog and now >= clients.spin_until
            events = self._epoll.poll(max(0.0, next_tick - now) if sleeps else 0.0, EVENTS_A_TURN)
            if not (events or directory.backlog or now >= next_tick):
                # spinning, or woken for nothing: let other processes have this core first
                os.sched_yield()
                continue
            for fd, mask in events:
                clients.on_ready(fd, mask)
            directory.backlog.run(BACKLOG_STEPS)
            if now >= next_tick:
                self._tick()
                next_tick = now + (BUSY_TICK_SECONDS if self._busy() else IDLE_TICK_SECONDS)
            self._check_path()
            self._ledger.write(directory.records, directory.still)
            directory.records.clear()
            clients.send()

    def stop(self) -> None:
        """End `run` within a tick. May be called from a signal handler."""
        self._stopping = True

    def _check_path(self) -> None:
        """Stop, and send no more answers, if another server has the path: that server may have this
        server's segments. Works after a SIGSTOP, too."""
        now = time.monotonic()
        if now < self._looked + PATH_SECONDS:
            return
        self._looked = now
        if reason := self._endpoint.lost():
            what = f"{self._config.path} does not lead to this server any more ({reason})"
            raise ConfigError(f"server.socket: {what}; it stops: two must not use one segment")

    def _tick(self) -> None:
        _check_address_space()
        self._endpoint.keep_fresh()
        self._directory.tick()
        self._service.collect_dropped()
        self._watch_processes()
        self._clients.tick()
        if self._monitor is not None:
            self._monitor.tick()
        if time.monotonic() > self._predecessors.until:
            absent, lost = self._directory.forget_absent()
            if lost:
                said = "%d segments were not offered again within %g s; %d chunks are lost"
                log.warning(said, absent, self._config.recover_seconds, lost)

    def _busy(self) -> bool:
        directory = self._directory
        draining = directory.contents.placement.in_state("draining")
        written = sum(directory.reservations.counts())
        return bool(len(directory.leases) or written or draining or self._clients.early)

    def _watch_processes(self) -> None:
        """Handle the ends of processes that free slots or KV caches."""
        writers, owners = self._directory.reservations.processes(), self._service.instances
        connected = {client.process for client in self._service.layouts.clients.values()}
        for process in self._watch.ended(writers | owners.processes(), connected):
            self._service.process_gone(process)


def _check_address_space() -> None:
    """ConfigError if less than `SPARE_BYTES` is left until RLIMIT_AS. The map takes no memory."""
    what = f"less than {SPARE_BYTES >> 20} MiB of address space left; raise ulimit -v"
    with raising_as(ConfigError, what, OSError):
        mmap.mmap(-1, SPARE_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0).close()


def serve(config: ServerConfig) -> None:
    """Run the server here until SIGTERM or SIGINT. ConfigError if the socket cannot be used.

    The garbage collector is off: the directory breaks its cycles itself, and a collection over
    millions of chunks would stop the loop for a noticeable time."""
    server = Server(config)
    for handler in logging.getLogger().handlers:
        handler.addFilter(LineLimit())
    gc.disable()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    if not os.isatty(2):  # in a terminal the server ends with the terminal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    server.run()
