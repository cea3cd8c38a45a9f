"""The server process: one thread, one epoll loop over the socket, its connections, and the processes it waits for.

Order within a turn of the loop: read and answer whatever is there, write the journal, then send the answers. So no
answer ever leaves before what it promises would survive the server.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import select
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from vcache_backend.config import ServerConfig
from vcache_backend.errors import ConfigError, ProtocolError
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import processes, succession, wire
from vcache_backend.metadata_server.admission import Admission
from vcache_backend.metadata_server.backlog import Waiting
from vcache_backend.metadata_server.connection import Connection, Turns
from vcache_backend.metadata_server.directory import Directory, Limits
from vcache_backend.metadata_server.endpoint import Endpoint, beside
from vcache_backend.metadata_server.service import Service
from vcache_backend.metadata_server.succession import Legacy, Predecessor

log = logging.getLogger(__name__)

BUSY_TICK_SECONDS = 0.05
IDLE_TICK_SECONDS = 0.5
PATH_SECONDS = 0.01
"""Whether the socket's path still leads here is looked at so often, as long as there is anything to do."""
HELLO_SECONDS = 5.0
"""A connection that says no hello within this time is closed."""
EVENTS_A_TURN = 64
"""Most connections read from in one turn of the loop: one request each."""
TURN_WORK = 2048
"""When requests have touched so many entries, those that are left wait for the next turn: some milliseconds."""
REQUEST_WORK = 16
"""What every request counts for, besides the entries it touches."""
FOLLOWED = (m.Lookup, m.Acquire, m.Reserve)
"""After these another request comes soon, which is worth spinning for."""
BACKLOG_WORK = 512
"""So much of what earlier turns left is done in each turn."""


class Server:
    """Everything of one server process. `run` returns after SIGTERM, SIGINT or `stop()`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._connections: dict[int, Connection] = {}
        self._receiver = wire.Receiver()
        self._turns = Turns()
        self._concerned: dict[Connection, None] = {}
        """Connections of which something changed in this turn, and those whose request waits for a task."""
        self._stopping = False
        self._spin_until = 0.0
        few, many = (0.005, 1.0) if config.spin_seconds is None else 2 * (config.spin_seconds,)
        self._spin_seconds = processes.spin(few, many)
        self._looked = time.monotonic()
        with ExitStack() as undo:
            self._endpoint = undo.enter_context(Endpoint(config.path, open_to_others=bool(config.allow_uids)))
            self._epoll = undo.enter_context(select.epoll())
            self._admission = Admission(config, self._endpoint, self._epoll)
            self._watch = processes.Watch(self._epoll)
            undo.callback(self._watch.close)
            self._take_over(undo)
            self._undo = undo.pop_all()
        self._watch_quarantined()

    def _take_over(self, undo: ExitStack) -> None:
        """Start from what the server before left, and begin what this one leaves."""
        config, epoch, path = self._config, 1 + secrets.randbits(62), beside(self._config.path, ".journal")
        state = succession.inherit(path, config.journal)
        limits = Limits(config.lease_seconds, config.reservation_seconds, config.max_chunks)
        self._directory = Directory(limits, time.monotonic, succession.first_id(state.held))
        self._directory.restore(state)
        self._legacy = Legacy(path, config.journal, epoch, self._directory)
        undo.callback(self._legacy.close)
        predecessor = Predecessor(self._directory, state, epoch)
        self._service = Service(self._directory, epoch, predecessor, self._admission.max_segments)
        undo.callback(self._service.close)
        if state.segments:
            log.info("journal: %d chunks in %d segments wait to be offered again", len(state.chunks), len(state.segments))
        if not self._endpoint.same_pids:
            self._watch.cannot_see(self._directory.reservations.processes())
        self._recover_until = time.monotonic() + config.recover_seconds

    def run(self) -> None:
        """Serve until stopped. Everything is closed and the socket removed on return.

        ConfigError as soon as the socket's path leads elsewhere: what it leads to then stays.
        """
        log.info("serving %s", self._config.path)
        with self._undo:
            try:
                self._serve()
            finally:
                for connection in list(self._connections.values()):
                    connection.close()
        log.info("stopped")

    def _serve(self) -> None:
        next_tick = time.monotonic()
        directory, longest = self._directory, self._service.longest
        while not self._stopping:
            now = time.monotonic()
            more = len(self._turns) or directory.unfinished
            events = self._epoll.poll(0.0 if more or now < self._spin_until else max(0.0, next_tick - now), EVENTS_A_TURN)
            if not (events or more or now >= next_tick):
                os.sched_yield()  # spinning, or woken for nothing: whoever else wants this core goes first
                continue
            longest.begin()
            for fd, mask in events:
                self._on_ready(fd, mask)
            if directory.unfinished:
                directory.go_on(BACKLOG_WORK)
            self._answer_some()
            if now >= next_tick:
                self._tick()
                next_tick = now + (BUSY_TICK_SECONDS if self._busy() else IDLE_TICK_SECONDS)
            self._check_path()
            self._legacy.write()
            self._send()
            longest.end()

    def stop(self) -> None:
        """End `run` within a tick. May be called from a signal handler."""
        self._stopping = True

    # ---- events

    def _on_ready(self, fd: int, mask: int) -> None:
        connection = self._connections.get(fd)
        if connection is not None:
            self._concerned[connection] = None
            if mask & select.EPOLLIN:
                self._guarded(connection, self._read)
            elif mask & (select.EPOLLHUP | select.EPOLLERR):
                self._disconnect(connection)
        elif fd == self._admission.fd:
            self._accept()
        elif fd in self._watch:
            self._directory.process_gone(self._watch.ended(fd))

    def _accept(self) -> None:
        accepted = self._admission.accept(len(self._connections))
        if accepted is None:
            return
        connection, refusal = accepted
        self._connections[connection.sock.fileno()] = connection
        self._concerned[connection] = None
        self._directory.counters["clients_total"] += 1
        if refusal:
            self._refuse(connection, refusal)

    def _guarded(self, connection: Connection, what: Callable[[Connection], None]) -> None:
        """Whatever goes wrong with one connection ends that one only."""
        try:
            what(connection)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._directory.counters["protocol_errors"] += 1
            self._refuse(connection, str(error))
        except OSError:
            self._disconnect(connection)
        except Exception:
            log.exception("a request of pid %d could not be answered; its connection is closed", connection.pid)
            self._disconnect(connection)

    def _read(self, connection: Connection) -> None:
        data, connection.fds = self._receiver.receive(connection.sock)
        if not data:
            self._disconnect(connection)
            return
        connection.request = bytes(data)
        self._turns.enter(connection)

    def _answer_some(self) -> None:
        """Answer requests, one after the other, until they have made enough work for one turn."""
        for connection in [waits for waits in self._concerned if waits.waiting is not None and waits.waiting.task.done]:
            waiting, connection.waiting = connection.waiting, None
            assert waiting is not None
            connection.queue(waiting.reply(waiting.task.count))
        left = TURN_WORK
        while left > 0 and (served := self._turns.next()) is not None:
            before = self._directory.work
            self._guarded(served, self._answer)
            cost = REQUEST_WORK + self._directory.work - before
            served.charged += cost
            left -= cost
            self._concerned[served] = None

    def _answer(self, connection: Connection) -> None:
        data, connection.request = connection.request, None
        assert data is not None
        try:
            request = wire.request_decoder.decode(data)
        except msgspec.ValidationError as error:
            self._directory.counters["protocol_errors"] += 1
            if connection.client is None:
                raise ProtocolError(f"the first message is no hello of protocol {m.PROTOCOL_VERSION}: {error}") from error
            connection.queue(m.Error(str(error)))
            return
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a packet is no MessagePack message: {error}") from error
        if connection.client is None:
            self._admission.greet(connection, request, self._service, self._watch, self._legacy.witness)
            return
        if isinstance(request, FOLLOWED):
            self._spin_until = time.monotonic() + self._spin_seconds
        reply, held = self._service.answer(connection.client, request, connection.fds)
        if isinstance(reply, m.ServerStats):
            reply = msgspec.structs.replace(reply, clients=len(self._connections))
        wire.close_fds(connection.fds)
        connection.fds.clear()
        if isinstance(reply, Waiting):
            connection.waiting = reply
        else:
            connection.queue(reply, held)

    # ---- turns

    def _check_path(self) -> None:
        """Whoever serves the path now may have this server's segments: not one more answer. Also after having been stopped."""
        now = time.monotonic()
        if now < self._looked + PATH_SECONDS:
            return
        self._looked = now
        if reason := self._endpoint.lost():
            what = f"{self._config.path} does not lead to this server any more ({reason})"
            raise ConfigError(f"server.socket: {what}; it stops, since two servers must not use the same segments")

    def _tick(self) -> None:
        self._endpoint.keep_fresh()
        self._admission.listen_again()
        self._directory.tick()
        self._service.collect_dropped()
        self._watch_quarantined()
        now = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.client is None and now > connection.accepted + HELLO_SECONDS:
                self._disconnect(connection)
        absent = self._directory.absent_segments()
        if absent and now > self._recover_until and (lost := self._directory.forget_absent(absent)):
            seconds = self._config.recover_seconds
            log.warning("%d segments were not offered again within %g s; %d chunks are lost", len(absent), seconds, lost)

    def _busy(self) -> bool:
        directory = self._directory
        draining = directory.contents.placement.in_state("draining")
        return bool(len(directory.leases) or sum(directory.reservations.counts()) or draining)

    def _send(self) -> None:
        """What can leave now does; then listen to those whose requests are all answered, and whose answers are read."""
        concerned, self._concerned = self._concerned, {}
        for connection in concerned:
            if connection.closed:
                continue
            try:
                connection.flush()
            except OSError:
                self._disconnect(connection)
                continue
            if connection.closing:
                self._disconnect(connection)
                continue
            if connection.waiting is not None:
                self._concerned[connection] = None
            if connection.mask != connection.wanted:
                connection.mask = connection.wanted
                self._epoll.modify(connection.sock, connection.mask)

    def _refuse(self, connection: Connection, message: str) -> None:
        """Say why, then close, read or not."""
        connection.queue(m.Error(message, fatal=True))
        connection.closing = True

    def _disconnect(self, connection: Connection) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is None:
            return
        connection.close()
        self._admission.listen_again()
        if connection.client is not None:
            self._watch.left(connection.client.process)
            for reservation in connection.untold():
                self._directory.abort(connection.client, reservation)
            self._directory.disconnect(connection.client)
            self._service.layouts.drop(connection.number)
            self._watch_quarantined()

    # ---- processes

    def _watch_quarantined(self) -> None:
        """Watch every process whose death would free slots; act at once for those that are gone already."""
        for process in self._watch.wait_for(self._directory.reservations.processes()):
            self._directory.process_gone(process)


def serve(config: ServerConfig) -> None:
    """Run the server in this process until SIGTERM or SIGINT. ConfigError if the socket cannot be used.

    The garbage collector is switched off: the directory makes no cycles, and a collection over millions of chunks would
    stop the loop for a noticeable time.
    """
    server = Server(config)
    gc.disable()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    server.run()
