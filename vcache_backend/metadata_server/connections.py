"""All connections of a server, from received bytes to sent bytes. No call waits for a client."""

from __future__ import annotations

import errno
import logging
import os
import select
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count

import msgspec

from vcache_backend.config import ServerConfig
from vcache_backend.errors import ProtocolError, printable
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.processes import Descriptor, Peer, Watch, closing
from vcache_backend.metadata_server.requests import Service
from vcache_backend.protocol import messages as m
from vcache_backend.protocol import sockets
from vcache_backend.protocol.sockets import peer

log = logging.getLogger(__name__)


class Connection:
    """A client's socket. pid: of the client in this pid namespace, or 0. uid: the client's user."""

    def __init__(self, sock: socket.socket, number: int, pid: int, uid: int) -> None:
        self.sock = sock
        self.number = number
        self.pid, self.uid = pid, uid
        self.client: Peer | None = None
        self.fds: list[int] = []
        """The present request's fds."""
        self.unsent = b""
        """The present request's answer, until it has left."""
        self.held: Sequence[Descriptor] = ()
        """The owners of the answer's fds."""
        self.granted = 0
        """The reservation that the last answer grants."""
        self.reset = False
        """Whether the client has hung up without reading the last sent answer."""
        self.mask = select.EPOLLIN
        self.closing = self.closed = False

    @property
    def wanted(self) -> int:
        """The events that epoll should report. The next request is read after the last answer has
        left, so a client that reads nothing has one answer here."""
        return select.EPOLLOUT if self.unsent else select.EPOLLIN

    def queue(self, reply: m.Reply, held: Sequence[Descriptor] = ()) -> None:
        """Queue the answer. Keeps `held`, the owners of its fds, until it has left."""
        self.unsent, self.held = sockets.encode(reply), held
        self.granted = reply.reservation if isinstance(reply, m.Reserved) else 0

    @property
    def untold(self) -> int:
        """A reservation of which the client has not read: it does not write to these slots."""
        return self.granted if self.reset or self.unsent else 0

    def flush(self) -> None:
        """Send the answer, if the socket takes it now. OSError if the client is gone."""
        try:
            if self.held:
                socket.send_fds(self.sock, [self.unsent], [each.fd for each in self.held])
            elif self.unsent:
                self.sock.send(self.unsent)
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno != errno.ETOOMANYREFS:  # Linux counts the unread fds of a user
                raise
            self.queue(m.Error("too many fds are on their way to clients; ask again later"))
            return
        self.unsent, self.held = b"", ()

    def close_fds(self) -> None:
        """Close a request's unused fds in the background: an fd may be the last of much memory."""
        while self.fds:
            closing().put(self.fds.pop())

    def close(self) -> None:
        """Hang up now, and close in the background, which also closes fds that nobody received."""
        self.close_fds()
        self.closed = True
        with suppress(OSError):  # the client has hung up
            self.sock.shutdown(socket.SHUT_RDWR)
        closing().put(self.sock.detach())


class Clients:
    """The listening socket and all connections. Called from the server's loop, which should not
    sleep before `spin_until` (monotonic clock)."""

    def __init__(
        self,
        config: ServerConfig,
        most: int,
        listener: socket.socket,
        epoll: select.epoll,
        service: Service,
        watch: Watch,
    ) -> None:
        """most: for how many clients there are descriptors; 4,096 are the most."""
        self.spin_until = 0.0
        few, many = (0.005, 1.0) if config.spin_seconds is None else 2 * (config.spin_seconds,)
        self._spin_seconds = sockets.spin(few, many)
        self._most, self._uids = min(most, 4096), {os.getuid(), 0, *config.allow_uids}
        self._listener, self._epoll, self._service, self._watch = listener, epoll, service, watch
        self._numbers, self._full = count(1), False
        self._connections: dict[int, Connection] = {}
        self._receiver = sockets.Receiver()
        self._concerned: dict[Connection, None] = {}
        """Connections that have changed in this turn."""
        epoll.register(listener, select.EPOLLIN)

    def on_ready(self, fd: int, mask: int) -> None:
        """Handle the event of one socket: accept a connection, answer a request, or hang up."""
        connection = self._connections.get(fd)
        if connection is not None:
            self._concerned[connection] = None
            if mask & select.EPOLLIN:
                self._serve(connection)
            elif mask & (select.EPOLLHUP | select.EPOLLERR):
                self._disconnect(connection)
        elif fd == self._listener.fileno():
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
            except OSError as error:
                connection.reset |= isinstance(error, ConnectionResetError)
                self._disconnect(connection)
                continue
            if connection.closing:  # even if the client has not read the reason
                self._disconnect(connection)
                continue
            if connection.mask != connection.wanted:
                connection.mask = connection.wanted
                self._epoll.modify(connection.sock, connection.mask)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def tick(self) -> None:
        """Accept again, since descriptors or memory may be free again."""
        if self._full:
            self._epoll.modify(self._listener, select.EPOLLIN)

    # ---- in

    def _accept(self) -> None:
        """Accept a connection. If descriptors or memory are exhausted, new connections wait, at no
        cost."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return  # the client left
        except OSError as error:
            if not self._full:
                log.warning("no new client can connect for now: %s", error)
            self._full = True
            self._epoll.modify(self._listener, 0)
            return
        self._full = False
        sock.setblocking(False)
        self._epoll.register(sock, select.EPOLLIN)
        connection = Connection(sock, next(self._numbers), *peer(sock))
        refusal = self._refusal(connection.uid)
        self._connections[sock.fileno()] = connection
        self._concerned[connection] = None
        if refusal:
            self._refuse(connection, refusal)

    def _refusal(self, uid: int) -> str:
        """Why to turn a new connection of a user away; empty if there is no reason."""
        if uid not in self._uids:
            allowed = "its own user and root; add the uid to server.allow_uids to let it in"
            return f"uid {uid} may not use the server of uid {os.getuid()}, which serves {allowed}"
        if len(self._connections) >= self._most:
            return f"{self._most} clients are connected; raise the limit of descriptors (ulimit -n)"
        return ""

    def _serve(self, connection: Connection) -> None:
        """Read a request and answer it. An error ends this connection only."""
        try:
            self._answer(connection, self._read(connection))
        except BlockingIOError:
            return
        except ProtocolError as error:
            self._refuse(connection, str(error))
        except OSError as error:
            if processes.is_exhausted(error):
                self._refuse(connection, f"the server has no descriptors left (ulimit -n): {error}")
            else:
                self._disconnect(connection)
        except Exception:
            log.exception("a request of pid %d failed; it is disconnected", connection.pid)
            self._disconnect(connection)

    def _read(self, connection: Connection) -> memoryview:
        """The next message; its fds are in `connection.fds`."""
        data, connection.fds = self._receiver.receive(connection.sock)
        connection.reset |= self._receiver.reset
        if not data:
            raise ConnectionResetError
        if self._receiver.too_long:
            raise ProtocolError(f"a message is longer than the limit of {m.MAX_MESSAGE_BYTES:,} B")
        if self._receiver.lacks_fds:
            said = "the server has no descriptors left (ulimit -n) for what pid %d sends"
            log.warning(said, connection.pid)
        if connection.client is not None:
            connection.client.heard = time.monotonic()
        return data

    def _answer(self, connection: Connection, data: memoryview) -> None:
        try:
            request = sockets.request_decoder.decode(data)
        except msgspec.ValidationError as error:
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
            self._greet(connection, request)
            return
        if isinstance(request, (m.Find, m.Pin, m.Reserve)):  # others follow soon
            self.spin_until = time.monotonic() + self._spin_seconds
        reply, held = self._service.answer(connection.client, request, connection.fds)
        connection.close_fds()
        connection.queue(reply, held)

    def _greet(self, connection: Connection, request: m.AnyRequest) -> None:
        """Answer a connection's first request: a hello, with the client's pidfd. ProtocolError if
        the request is not a hello."""
        if not isinstance(request, m.Hello):
            raise ProtocolError(f"the first message is {type(request).__name__}, not hello")
        if request.version != m.PROTOCOL_VERSION:
            theirs, ours = request.version, m.PROTOCOL_VERSION
            raise ProtocolError(
                f"client: protocol {theirs}, server: {ours}; install the same vcache-backend"
            )
        if len(connection.fds) > 1:
            raise ProtocolError(f"{len(connection.fds)} fds came along; a hello has 1 at most")
        pid = connection.pid
        process = processes.identity(pid, request.token)
        if connection.fds:  # whoever sends another fd misleads others about itself alone
            self._watch.keep(process, Descriptor(connection.fds.pop()))
        connection.close_fds()
        device, medium = request.device, request.medium
        client = Peer(connection.number, process, device, medium, name=request.name)
        connection.client = client
        mismatches = self._service.layouts.add(client, request.layout)
        _say(client, "connects")
        if mismatches:
            log.warning("pid %d: %s; such instances: %d", pid, mismatches[0], len(mismatches))
        connection.queue(m.Welcome(self._service.run_id, mismatches))

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
        self.tick()
        if connection.client is not None:
            if reservation := connection.untold:
                self._service.directory.abort(connection.client, reservation)
            self._service.disconnect(connection.client)
            _say(connection.client, "disconnects")


def _say(client: Peer, what: str) -> None:
    """Log the connection of an instance. Tools, and vLLM's workers, have no layout."""
    if client.layout:
        at = f" at {printable(client.name)}" if client.name else ""
        who = f"pid {client.process.pid} on {client.device}"
        model, namespace = printable(client.layout["model"]), printable(client.namespace)
        log.info("an instance of %s, namespace %s%s (%s) %s", model, namespace, at, who, what)
