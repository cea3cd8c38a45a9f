"""All connections of a server, from received bytes to sent bytes. No call waits for a client."""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from collections.abc import Callable

import msgspec

from vcache_backend.errors import ProtocolError, printable
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.descriptors import Descriptor
from vcache_backend.metadata_server.ledger import Ledger
from vcache_backend.metadata_server.pool.placement import Peer
from vcache_backend.metadata_server.processes import Watch
from vcache_backend.metadata_server.serving.admission import Admission
from vcache_backend.metadata_server.serving.connection import Connection
from vcache_backend.metadata_server.serving.service import Service
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import wire

log = logging.getLogger(__name__)

FOLLOWED = (m.Find, m.Acquire, m.Reserve)
"""Requests after which the client soon sends another request, so that the loop should spin."""


class Clients:
    """All connections. Called from the server's loop, which should not sleep before `spin_until`
    (monotonic clock)."""

    def __init__(
        self,
        admission: Admission,
        epoll: select.epoll,
        service: Service,
        watch: Watch,
        ledger: Ledger,
        spin_seconds: float,
    ) -> None:
        self.spin_until = 0.0
        self._admission, self._epoll, self._service = admission, epoll, service
        self._watch, self._ledger, self._spin_seconds = watch, ledger, spin_seconds
        self._directory = service.directory
        self._connections: dict[int, Connection] = {}
        self._receiver = wire.Receiver()
        self._concerned: dict[Connection, None] = {}
        """Connections that have changed in this turn."""
        self._early = list[Connection]()
        """Connections whose hello is answered once an earlier server's ledger is known."""

    @property
    def early(self) -> bool:
        """Whether a hello waits for a ledger, which `tick` asks for again."""
        return bool(self._early)

    def on_ready(self, fd: int, mask: int) -> None:
        """Handle the event of one socket: accept a connection, answer a request, or hang up."""
        connection = self._connections.get(fd)
        if connection is not None:
            self._concerned[connection] = None
            if mask & select.EPOLLIN:
                self._guarded(connection, self._serve)
            elif mask & (select.EPOLLHUP | select.EPOLLERR):
                self._disconnect(connection)
        elif fd == self._admission.fd:
            self._accept()

    def send(self) -> None:
        """Send as much as sockets take now. Then read from connections whose answers have left."""
        concerned = self._concerned
        self._concerned = {}
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
            if connection.mask != connection.wanted:
                connection.mask = connection.wanted
                self._epoll.modify(connection.sock, connection.mask)

    def tick(self) -> None:
        self._admission.listen_again()
        early, self._early = self._early, []
        for connection in early:
            if not connection.closed:
                self._concerned[connection] = None
                self._guarded(connection, self._answer)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    # ---- in

    def _accept(self) -> None:
        connection = self._admission.accept()
        if connection is None:
            return
        refusal = self._admission.refusal(connection.uid, len(self._connections))
        self._connections[connection.sock.fileno()] = connection
        self._concerned[connection] = None
        self._directory.counters["clients_total"] += 1
        if refusal:
            self._refuse(connection, refusal)

    def _guarded(self, connection: Connection, what: Callable[[Connection], None]) -> None:
        """Run `what` for one connection. An error ends that connection only."""
        try:
            what(connection)
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._directory.counters["protocol_errors"] += 1
            self._refuse(connection, str(error))
        except OSError as error:
            if processes.is_exhausted(error):
                self._refuse(connection, f"the server has no descriptors left (ulimit -n): {error}")
            else:
                self._disconnect(connection)
        except Exception:
            log.exception("a request of pid %d failed; it is disconnected", connection.pid)
            self._disconnect(connection)

    def _serve(self, connection: Connection) -> None:
        """Read a request and answer it."""
        data, connection.fds = self._receiver.receive(connection.sock)
        if not data:
            self._disconnect(connection)
            return
        if self._receiver.too_long:
            raise ProtocolError(f"a message is longer than the limit of {m.MAX_MESSAGE_BYTES:,} B")
        if self._receiver.lacks_fds:
            if connection.client is None:
                # The client's ledger may be among the missing fds.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            said = "the server has no descriptors left (ulimit -n) for what pid %d sends"
            log.warning(said, connection.pid)
        if connection.client is not None:
            connection.client.heard = time.monotonic()
        connection.request = bytes(data)
        self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        data, connection.request = connection.request, b""
        try:
            request = wire.request_decoder.decode(data)
        except msgspec.ValidationError as error:
            self._directory.counters["protocol_errors"] += 1
            if connection.client is None:
                raise ProtocolError(
                    f"the first message is not a hello of protocol {m.PROTOCOL_VERSION}: {error}"
                ) from error
            connection.close_fds()
            connection.queue(m.Error(str(error)))
            return
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a packet is not a MessagePack message: {error}") from error
        if connection.client is None:
            if not self._greet(connection, request):
                connection.request = data
                self._early.append(connection)
            return
        if isinstance(request, FOLLOWED):
            self.spin_until = time.monotonic() + self._spin_seconds
        reply, held = self._service.answer(connection.client, request, connection.fds)
        connection.close_fds()
        connection.queue(reply, held)

    def _greet(self, connection: Connection, request: m.AnyRequest) -> bool:
        """Answer a connection's first request: a hello, with the client's pidfd and ledger. False
        if it is to be answered later. ProtocolError if the request is not a hello."""
        if not isinstance(request, m.Hello):
            raise ProtocolError(f"the first message is {type(request).__name__}, not hello")
        if request.version != m.PROTOCOL_VERSION:
            theirs, ours = request.version, m.PROTOCOL_VERSION
            raise ProtocolError(
                f"client: protocol {theirs}, server: {ours}; install the same vcache-backend"
            )
        if len(connection.fds) > 2:
            raise ProtocolError(f"{len(connection.fds)} fds came along; a hello has 2 at most")
        pid = connection.pid
        process = processes.identity(pid, request.token)
        pidfd = next((fd for fd in connection.fds if processes.is_pidfd(fd, pid)), None)
        hear = self._service.predecessors.hear
        known = [hear(fd) for fd in connection.fds if fd != pidfd]
        if not all(known):
            return False
        if pidfd is not None:
            connection.fds.remove(pidfd)
            self._watch.keep(process, Descriptor(pidfd))
        connection.close_fds()
        device, medium = request.device, request.medium
        client = Peer(connection.number, process, device, medium, name=request.name)
        connection.client = client
        mismatches = self._service.layouts.add(client, request.layout)
        _say(client, "connects")
        if mismatches:
            log.warning("pid %d: %s; such instances: %d", pid, mismatches[0], len(mismatches))
        connection.queue(m.Welcome(self._service.epoch, mismatches), [self._ledger])
        return True

    # ---- out

    def _refuse(self, connection: Connection, message: str) -> None:
        """Send the reason, then close the connection, even if the client does not read."""
        log.warning("refused pid %d of uid %d: %s", connection.pid, connection.uid, message)
        connection.queue(m.Error(message, fatal=True))
        connection.closing = True

    def _disconnect(self, connection: Connection) -> None:
        if self._connections.pop(connection.sock.fileno(), None) is None:
            return
        self._epoll.unregister(connection.sock)
        connection.close()
        self._admission.listen_again()
        if connection.client is not None:
            for reservation in connection.untold():
                self._directory.abort(connection.client, reservation)
            self._service.disconnect(connection.client)
            _say(connection.client, "disconnects")


def _say(client: Peer, what: str) -> None:
    """Log the connection of an instance. Tools, and vLLM's workers, have no layout."""
    if client.layout:
        at = f" at {printable(client.name)}" if client.name else ""
        who = f"pid {client.process.pid} on {client.device}"
        model, namespace = printable(client.layout["model"]), printable(client.namespace)
        log.info("an instance of %s, namespace %s%s (%s) %s", model, namespace, at, who, what)
