"""Makes the `LoadSpec` of a load: which chunks go into which blocks, and where they may come
from.
"""

from __future__ import annotations

from collections.abc import Sequence

from vcache_backend.config import Config
from vcache_backend.transfer.keys import state_keys

from . import groups
from .introduction import Introduction
from .metadata import LoadSpec
from .tracked import Tracked


class LoadSpecs:
    """In the scheduler's thread. rows: vLLM's numbers of a request's blocks, a list for each block
    table.
    """

    def __init__(
        self,
        config: Config,
        stores: bool,
        several: groups.Groups | None,
        block: int,
        parts: int,
        instance: Introduction,
    ) -> None:
        """stores: whether the instance's role allows stores. several: None if all layers share one
        block table. block: tokens of a block. parts: chunks that one state takes; 0 if the model
        keeps no states."""
        self._size, self._wait_seconds = config.engine.chunk_size, config.connector.wait_seconds
        self._stores, self._several, self._block, self._parts, self._instance = (
            stores,
            several,
            block,
            parts,
            instance,
        )

    def of(self, tracked: Tracked, rows: Sequence[list[int]]) -> LoadSpec:
        """The load of the tokens from `tracked.local` up to `tracked.supplied`, as the look-up
        found them. ValueError if the chunks do not fit the blocks that vLLM wants filled.
        """
        size, asked, answer, end = (
            self._size,
            tracked.params,
            tracked.lookup.answer,
            tracked.supplied,
        )
        first, stop = tracked.local // size, -(-end // size)
        if self._several is None:
            begin = first * (size // self._block)
            chosen, skip = rows[0][begin : end // self._block], tracked.local // self._block - begin
        else:
            chosen, skip = self._several.wanted(rows, tracked.local, end), 0
        keys = tracked.lookup.keys[first:stop] + state_keys(
            tracked.lookup.keys[stop - 1 : stop], self._parts
        )
        below = self._instance.offload
        # Also if the pool had all chunks: it may lose some before they are read.
        offload = not (asked.announced or self._parts) and below is not None and below.usable
        waits = self._wait_seconds if asked.wait_seconds is None else asked.wait_seconds
        return LoadSpec(
            request_id=tracked.request.request_id,
            keys=keys,
            blocks=chosen,
            skip=skip,
            stop=len(chosen),
            wait_seconds=waits if asked.announced else 0.0,
            offload=offload,
            promote=offload and self._stores and asked.store and self._instance.shared is None,
            prefix=tracked.lookup.keys[:first] if offload else [],
            residents=answer.residents_of(first, stop) if answer is not None else [],
        )
