"""What benchmarks have beside `vcache_backend.children`: a server, free ports."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from vcache_backend import prove
from vcache_backend.children import MetadataServer

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
PATIENT = prove.PATIENT


@contextmanager
def metadata_server(log: Path | None = None, **environment: str) -> Iterator[Path]:
    """A metadata server on a temporary socket, which it yields; it ends with the context. log: its
    own, by default. environment: beside this process's."""
    # The logs' folder may be another run's, too.
    with TemporaryDirectory(prefix="vcache-bench-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "vcache.sock")
        with MetadataServer(path, log or Path(folder, "log"), {**os.environ, **environment}):
            yield path


def free_ports(count: int) -> list[int]:
    """Ports of this host that nobody listens on, below those that the kernel gives to connections.
    A process gets each port once; processes that run tests side by side each draw from every
    `_SIDE_BY_SIDE`th even port. The next, odd one is `vcache mooncake`'s for its provider."""
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _SIDE_BY_SIDE
    ports: list[int] = []
    while len(ports) < count:
        number = _SIDE_BY_SIDE * secrets.randbelow(6_000 // _SIDE_BY_SIDE) + ours
        port = 20_000 + 2 * number
        with socket.socket() as probe, suppress(OSError):
            probe.bind((HOST, port))
            if port not in _ports:
                ports.append(port)
                _ports.add(port)
    return ports


_SIDE_BY_SIDE = 8
_ports: set[int] = set()
