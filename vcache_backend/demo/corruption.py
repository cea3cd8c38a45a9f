"""A wrong byte on purpose: the demo's own check must find it."""

from __future__ import annotations

import os
from pathlib import Path

from vcache_backend.config import ClientConfig
from vcache_backend.demo.children import DemoError
from vcache_backend.metadata_server.client import Client
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.layout import Namespace
from vcache_backend.vram_pool.devices import resolve
from vcache_backend.vram_pool.segment import map_segment


def flip_byte(path: Path, config: ClientConfig, namespace: Namespace, tokens: object, chunk_size: int, device: str) -> None:
    """Invert the middle byte of the prompt's first chunk where it lies in the pool, as a process that is no worker.

    Raises DemoError if the chunk is not there: nothing would be proved.
    """
    first = TokenHasher(namespace, chunk_size).keys(tokens)[:1]
    reader = resolve(device)
    with Client(path, config, reader.name, reader.medium, reconnect=False) as client:
        leased = client.acquire(first)
        if not leased.locations:
            raise DemoError("the chunk to corrupt is not in the pool; choose a request whose prefix was asked before")
        location = leased.locations[0]
        info, fd = client.open_segment(location.segment)
        try:
            with map_segment(info, fd, reader) as mapped:
                mapped.tensor(location.offset + location.length // 2, 1).bitwise_not_()
        finally:
            os.close(fd)
        client.release(leased.lease)
