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
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path

import msgspec

from vcache_backend.config import ServerConfig
from vcache_backend.errors import ConfigError, ProtocolError, raising_as
from vcache_backend.metadata_server import journal as journals
from vcache_backend.metadata_server import messages as m
from vcache_backend.metadata_server import processes, wire
from vcache_backend.metadata_server.backlog import Waiting
from vcache_backend.metadata_server.connection import Connection
from vcache_backend.metadata_server.directory import Client, Directory, Limits
from vcache_backend.metadata_server.endpoint import Endpoint, beside
from vcache_backend.metadata_server.eviction import POLICIES
from vcache_backend.metadata_server.journal import Journal
from vcache_backend.metadata_server.service import Service
from vcache_backend.metadata_server.turns import Turns
from vcache_backend.metadata_server.witness import NEVER, Proof, Witness

log = logging.getLogger(__name__)

BUSY_TICK_SECONDS = 0.05
IDLE_TICK_SECONDS = 0.5
PATH_SECONDS = 0.01
"""Whether the socket's path still leads here is looked at so often, as long as there is anything to do."""
HELLO_SECONDS = 5.0
"""A connection that says no hello within this time is closed."""
HALF_FRAME_SECONDS = 5.0
MAX_HELD_BYTES = 64 << 20
"""A frame may be unfinished for so long, and all unfinished frames together may be so large."""
SPARE_DESCRIPTORS = 64
"""Not for clients: sockets, journals, /proc. A third each of the rest for connections, their pidfds and segments."""
READ_BYTES = 1 << 16
EVENTS_A_TURN = 64
"""Most bytes read from a connection in one turn of the loop, and most connections read from."""
TURN_WORK = 2048
"""When requests have touched so many entries, those that are left wait for the next turn: some milliseconds."""
REQUEST_WORK = 16
"""What every request counts for, besides the entries it touches."""
BACKLOG_WORK = 512
"""So much of what earlier turns left is done in each turn."""


class Server:
    """Everything of one server process. `run` returns after SIGTERM, SIGINT or `stop()`."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._uids = {os.getuid(), 0, *config.allow_uids}
        self._connections: dict[int, Connection] = {}
        self._numbers = 0
        self._receiver = wire.Receiver(READ_BYTES)
        self._turns = Turns()
        self._concerned: dict[Connection, None] = {}
        """Connections of which something changed in this turn, and those whose request waits for a job."""
        self._journal: Journal | None = None
        self._stopping = False
        self._held = 0
        self._listens, self._paused = True, ""
        limit = processes.raise_descriptor_limit()
        share = max(1, (limit - SPARE_DESCRIPTORS) // 3)
        self._max_clients, self._max_segments = min(config.max_clients, share), share
        if self._max_clients < config.max_clients:
            log.warning("%d descriptors are enough for %d clients, not for server.max_clients", limit, self._max_clients)
        self._spin_until = 0.0
        self._spin_seconds = processes.spin(config.spin_seconds)
        self._looked = time.monotonic()
        with ExitStack() as undo:
            self._endpoint = undo.enter_context(Endpoint(config.path, open_to_others=bool(config.allow_uids)))
            self._listener = self._endpoint.listener
            self._epoll = undo.enter_context(select.epoll())
            self._epoll.register(self._listener, select.EPOLLIN)
            self._watch = processes.Watch(self._epoll)
            undo.callback(self._watch.close)
            self._service = self._start_service(beside(config.path, ".journal"), undo)
            undo.callback(self._service.close)
            if not self._endpoint.same_pids:
                self._watch.cannot_see(self._service.directory.quarantined_processes())
            self._recover_until = time.monotonic() + config.recover_seconds
            self._undo = undo.pop_all()
        self._watch_quarantined()

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
        directory, longest = self._service.directory, self._service.longest
        while not self._stopping:
            now = time.monotonic()
            more = len(self._turns) or directory.unfinished
            events = self._epoll.poll(0.0 if more or now < self._spin_until else max(0.0, next_tick - now), EVENTS_A_TURN)
            if not (events or more or now >= next_tick):
                os.sched_yield()  # spinning, or woken for nothing: whoever else wants this core goes first
                continue
            longest.begin()
            self._check_path()
            for fd, mask in events:
                self._on_ready(fd, mask)
            directory.go_on(BACKLOG_WORK)
            self._answer_some()
            if now >= next_tick:
                self._tick()
                next_tick = now + (BUSY_TICK_SECONDS if self._busy() else IDLE_TICK_SECONDS)
            self._check_path()
            self._write_journal()
            self._send()
            longest.end()

    def stop(self) -> None:
        """End `run` within a tick. May be called from a signal handler."""
        self._stopping = True

    def _start_service(self, path: Path, undo: ExitStack) -> Service:
        """path: of the journal."""
        config, eviction = self._config, self._config.eviction
        myself, epoch = processes.identity(os.getpid()), 1 + secrets.randbits(62)
        with raising_as({OSError: ConfigError}, f"server.journal: cannot use {path}"):
            writer = journals.writer(path)
            if writer not in (None, myself) and processes.lives(writer):
                raise ConfigError(
                    f"server.socket: pid {writer.pid} still serves, it writes {path}; stop it, or use another socket"
                )
            state = _read(path) if config.journal else journals.State()
        limits = Limits(
            lease_seconds=config.lease_seconds,
            reservation_seconds=config.reservation_seconds,
            max_chunks=config.max_chunks,
            low_water=eviction.low_water,
            high_water=eviction.high_water,
            save_ahead=config.save_ahead,
        )
        directory = Directory(POLICIES[eviction.policy](), limits, time.monotonic, _first_id(state.held))
        directory.restore(state)
        self._witness = Witness(epoch)
        undo.callback(self._witness.close)
        with raising_as({OSError: ConfigError}, f"server.journal: cannot use {path}"):
            if config.journal:
                self._journal = Journal(path, epoch, myself)
                undo.callback(self._journal.close)
                self._journal.start(directory.snapshot())
                self._witness.reached(self._journal.frame)
            else:
                path.unlink(missing_ok=True)
        if state.segments:
            log.info("journal: %d chunks in %d segments wait to be offered again", len(state.chunks), len(state.segments))
        return Service(directory, epoch, Proof(state.epoch, state.frame, epoch), self._max_segments)

    # ---- events

    def _on_ready(self, fd: int, mask: int) -> None:
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._watch:
            self._service.directory.process_gone(self._watch.ended(fd))
        elif fd in self._connections:
            connection = self._connections[fd]
            self._concerned[connection] = None
            if mask & select.EPOLLIN:
                self._guarded(connection, self._read)
            elif mask & (select.EPOLLHUP | select.EPOLLERR):
                self._disconnect(connection)

    def _guarded(self, connection: Connection, what: Callable[[Connection], None]) -> None:
        """Whatever goes wrong with one connection ends that one only."""
        try:
            what(connection)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._service.directory.counters["protocol_errors"] += 1
            self._refuse(connection, str(error))
        except OSError:
            self._disconnect(connection)
        except Exception:
            log.exception("a request of pid %d could not be answered; its connection is closed", connection.pid)
            self._disconnect(connection)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # it went away again
        except OSError as error:
            self._pause(error)
            return
        self._paused = ""
        sock.setblocking(False)
        pid, uid = processes.peer(sock)
        self._numbers += 1
        connection = Connection(sock, self._numbers, pid)
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock, select.EPOLLIN)
        self._concerned[connection] = None
        self._service.directory.counters["clients_total"] += 1
        if uid not in self._uids:
            log.warning("refused a connection of uid %d (pid %d)", uid, pid)
            allowed = "its own user and root; add the uid to server.allow_uids to let it in"
            self._refuse(connection, f"uid {uid} may not use the server of uid {os.getuid()}, which serves {allowed}")
        elif len(self._connections) > self._max_clients:
            what = (
                "server.max_clients" if self._max_clients == self._config.max_clients else "its limit of descriptors (ulimit -n)"
            )
            self._refuse(connection, f"{self._max_clients} clients are connected; raise {what}")

    def _pause(self, error: OSError) -> None:
        """Descriptors or memory are exhausted: whoever waits to connect waits on, and costs nothing meanwhile."""
        if not self._paused:
            log.warning("no new client can connect for now: %s; %d are connected", error, len(self._connections))
        self._paused = str(error)
        self._listens = False
        self._epoll.unregister(self._listener)

    def _listen_again(self) -> None:
        if not self._listens:
            self._listens = True
            self._epoll.register(self._listener, select.EPOLLIN)

    def _read(self, connection: Connection) -> None:
        data, fds = self._receiver.receive(connection.sock)
        connection.fds += fds
        if not data:
            self._disconnect(connection)
            return
        if connection.closing:
            wire.close_fds(connection.fds)
            connection.fds.clear()
            return
        if len(connection.fds) > wire.MAX_FDS:
            raise ProtocolError(f"{len(connection.fds)} fds came with one frame; at most {wire.MAX_FDS} may")
        connection.reader.push(data)
        self._hold(connection, connection.reader.ready)
        self._turns.enter(connection)

    def _hold(self, connection: Connection, completed: bool) -> None:
        """What this connection has sent of a frame may have changed."""
        self._held += connection.hold(completed)
        if self._held > MAX_HELD_BYTES:
            self._drop_oldest_half()

    def _answer_some(self) -> None:
        """Answer requests, one after the other, until they have made enough work for one turn."""
        directory = self._service.directory
        for connection in list(self._concerned):
            waiting = connection.waiting
            if waiting is not None and waiting.job.done:
                connection.waiting = None
                connection.queue(waiting.reply(waiting.job.count))
                self._turns.enter(connection)
        enough = directory.work + TURN_WORK
        while directory.work < enough and (served := self._turns.next()) is not None:
            before = directory.work
            self._guarded(served, self._answer)
            directory.work += REQUEST_WORK
            served.charged += directory.work - before
            self._concerned[served] = None
            self._turns.enter(served)

    def _answer(self, connection: Connection) -> None:
        body = connection.reader.take()
        if body is not None:
            self._hold(connection, True)
            self._on_frame(connection, body)

    def _drop_oldest_half(self) -> None:
        """Of all unfinished frames the one that was begun first: one that is under way takes milliseconds."""
        oldest = min((c for c in self._connections.values() if c.held), key=lambda connection: connection.held_since)
        log.warning("pid %d leaves %d B of a frame unfinished; its connection is closed", oldest.pid, oldest.held)
        self._disconnect(oldest)

    def _on_frame(self, connection: Connection, body: bytes) -> None:
        try:
            request = wire.request_decoder.decode(body)
        except msgspec.ValidationError as error:
            self._service.directory.counters["protocol_errors"] += 1
            if connection.client is None:
                raise ProtocolError(f"the first frame is no hello of protocol {m.PROTOCOL_VERSION}: {error}") from error
            connection.queue(m.Error(str(error)))
            return
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a frame is no MessagePack message: {error}") from error
        if connection.client is None:
            self._hello(connection, request)
            return
        if isinstance(request, m.Lookup | m.Acquire | m.Reserve):
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

    def _hello(self, connection: Connection, request: m.AnyRequest) -> None:
        if not isinstance(request, m.Hello):
            raise ProtocolError(f"the first frame is {type(request).__name__}, not hello")
        if request.version != m.PROTOCOL_VERSION:
            theirs, ours = request.version, m.PROTOCOL_VERSION
            raise ProtocolError(f"the client speaks protocol {theirs}, this server {ours}; install the same vcache-backend")
        process = processes.identity(connection.pid, request.token)
        self._watch.joined(process, self._take_pidfd(connection))
        for fd in connection.fds:
            self._service.hear_witness(fd)
        wire.close_fds(connection.fds)
        connection.fds.clear()
        connection.client = Client(connection.number, process, request.device, request.medium)
        mismatches = self._service.layouts.add(connection.client, request.layout)
        if mismatches:
            log.warning("pid %d: %s; %d such instances", connection.pid, mismatches[0], len(mismatches))
        lease, reservation = self._config.lease_seconds, self._config.reservation_seconds
        welcome = m.Welcome(m.PROTOCOL_VERSION, self._service.epoch, lease, reservation, mismatches)
        connection.queue(welcome, self._witness)

    def _take_pidfd(self, connection: Connection) -> int | None:
        """The pidfd of its process that came with the hello, ours now; None if none did."""
        for fd in connection.fds:
            if processes.is_pidfd(fd, connection.pid):
                connection.fds.remove(fd)
                return fd
        return None

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
        self._listen_again()
        directory = self._service.directory
        directory.tick()
        self._service.collect_dropped()
        self._watch_quarantined()
        now = time.monotonic()
        for connection in list(self._connections.values()):
            unsaid = connection.client is None and now > connection.accepted + HELLO_SECONDS
            if unsaid or (connection.held and now > connection.held_since + HALF_FRAME_SECONDS):
                self._disconnect(connection)
        absent = directory.absent_segments()
        if absent and now > self._recover_until and (lost := directory.forget_absent(absent)):
            seconds = self._config.recover_seconds
            log.warning("%d segments were not offered again within %g s; %d chunks are lost", len(absent), seconds, lost)

    def _busy(self) -> bool:
        directory = self._service.directory
        return bool(len(directory.leases) or sum(directory.reservations.counts()) or directory.placement.draining())

    def _write_journal(self) -> None:
        records = self._service.directory.records
        if self._journal is not None:
            try:
                if records:
                    self._journal.append(records)
                self._journal.compact(self._service.directory.snapshot)
                self._witness.reached(self._journal.frame)
            except OSError as error:
                log.error("journal: %s; going on without one, a restart will be cold", error)
                self._witness.reached(NEVER)
                self._journal.abandon()
                self._journal = None
        records.clear()

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
            self._turns.enter(connection)
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
        self._held -= connection.held
        self._listen_again()
        if connection.client is not None:
            self._watch.left(connection.client.process)
            for reservation in connection.untold():
                self._service.directory.abort(connection.client, reservation)
            self._service.directory.disconnect(connection.client)
            self._service.layouts.drop(connection.number)
            self._watch_quarantined()

    # ---- processes

    def _watch_quarantined(self) -> None:
        """Watch every process whose death would free slots; act at once for those that are gone already."""
        directory = self._service.directory
        for process in self._watch.wait_for(directory.quarantined_processes()):
            directory.process_gone(process)


def _read(path: Path) -> journals.State:
    """The journal's state; an empty one if it is damaged. It is kept aside then, for whoever wants to know what happened."""
    try:
        return journals.read(path)
    except journals.Damaged as damage:
        aside = path.with_name(path.name + ".damaged")
        path.replace(aside)
        log.error("journal %s is damaged: %s; starting empty, the file is kept as %s", path, damage, aside)
        return journals.State()


def _first_id(taken: Iterable[int]) -> int:
    """From where ids can count up without meeting any of `taken`, or of another life of the server."""
    while True:
        first = 1 + secrets.randbits(62)
        if not any(first <= id_ < first + (1 << 48) for id_ in taken):
            return first


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
