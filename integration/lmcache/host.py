"""Host memory for chunks that were read from the offload tier ahead of their load."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from vcache_backend.transfer.held import HeldChunk
from vcache_backend.transfer.session import Session

from .memory import HostMemory

if TYPE_CHECKING:
    from vcache_backend.offload.read import Fetch, Staged

HELD_SHARE = 8
"""Chunks that were read ahead may hold so many times `offload.staging_bytes` of host memory.
`staging_bytes` of it are kept for reuse.
"""
_WAIT_SECONDS = 0.05


class Host:
    """One worker's. Any thread."""

    def __init__(self, session: Session, staging_bytes: int) -> None:
        self.memory = HostMemory(HELD_SHARE * staging_bytes, staging_bytes)
        self._session = session

    def fetched(self, fetch: Fetch) -> list[HeldChunk]:
        """Wait for the whole `fetch` from the offload tier. Its leading chunks, each in memory of
        its own, until memory runs out.
        """
        taken: list[HeldChunk] = []
        try:
            while not fetch.over:
                staged = fetch.ready(1)
                if not staged:
                    fetch.wait(_WAIT_SECONDS)
                elif not self._taken(fetch, staged[0], taken):
                    break
        except Exception as error:  # noqa: BLE001 - what came so far is good
            self._session.miss("fetch", error)
        fetch.cancel()
        return taken

    def _taken(self, fetch: Fetch, staged: Staged, taken: list[HeldChunk]) -> bool:
        """Copy one chunk out of its buffer; False if there is no memory."""
        memory = self.memory.take(self._session.chunk_bytes)
        try:
            if memory is not None:
                staged.write_to(memory)
                taken.append(
                    HeldChunk(memory, functools.partial(self.memory.give, memory), staged.epoch)
                )
        except BaseException:
            if memory is not None:
                self.memory.give(memory)
            raise
        finally:
            fetch.give_back([staged])
        return memory is not None
