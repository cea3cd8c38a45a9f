"""Accepts connections, as many as places and descriptors allow."""

from __future__ import annotations

import logging
import os
import select

from vcache_backend.config import ServerConfig
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.endpoint import Endpoint
from vcache_backend.metadata_server.serving.connection import Connection
from vcache_backend.protocol import messages as m
from vcache_backend.protocol.trust import peer

log = logging.getLogger(__name__)

SPARE_DESCRIPTORS = 64
"""Descriptors reserved for sockets, the ledger and /proc. A further `MAX_FDS`, at most a quarter of
all descriptors, are reserved for fds of requests. Connections, their pidfds and segments get a
third each of the rest."""


class Admission:
    """The listening socket. When descriptors run out, nothing is accepted until `listen_again`."""

    def __init__(self, config: ServerConfig, endpoint: Endpoint, epoll: select.epoll) -> None:
        limit = processes.raise_descriptor_limit()
        share = max(1, (limit - SPARE_DESCRIPTORS - min(m.MAX_FDS, limit // 4)) // 3)
        self.max_segments = share
        self._max_clients = min(config.max_clients, share)
        self._uids = {os.getuid(), 0, *config.allow_uids}
        self._listener, self._epoll = endpoint.listener, epoll
        self._numbers = 0
        self._listens, self._complained = True, False
        self.fd = self._listener.fileno()
        epoll.register(self._listener, select.EPOLLIN)

    def accept(self) -> Connection | None:
        """Accept the next connection. If descriptors or memory are exhausted, stop listening: new
        connections wait, at no cost."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return None  # the client left
        except OSError as error:
            if not self._complained:
                log.warning("no new client can connect for now: %s", error)
            self._complained = True
            self._listens = False
            self._epoll.unregister(self._listener)
            return None
        self._complained = False
        sock.setblocking(False)
        self._numbers += 1
        self._epoll.register(sock, select.EPOLLIN)
        return Connection(sock, self._numbers, *peer(sock))

    def listen_again(self) -> None:
        """Listen again, since descriptors or memory may be free again."""
        if not self._listens:
            self._listens = True
            self._epoll.register(self._listener, select.EPOLLIN)

    def refusal(self, uid: int, connected: int) -> str:
        """Why to turn a new connection of a user away; empty if there is no reason. connected: the
        number of other connections."""
        if uid not in self._uids:
            allowed = "its own user and root; add the uid to server.allow_uids to let it in"
            return f"uid {uid} may not use the server of uid {os.getuid()}, which serves {allowed}"
        if connected >= self._max_clients:
            what = "server.max_clients, and the limit of descriptors (ulimit -n)"
            return f"{self._max_clients} clients are connected; raise {what}"
        return ""
