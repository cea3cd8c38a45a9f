"""Makes the `LoadSpec` of a load: which chunks go into which blocks, and where they may come
from.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

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

    def of(self, tracked: Tracked, rows: Sequence[list[int]], number: int) -> LoadSpec:
        """The load of the tokens from `tracked.local` up to `tracked.supplied`, as the look-up
        found them. number: the load's.

        ValueError if the chunks, or the lease on them, do not fit the blocks that vLLM wants
        filled."""
        size, asked, answer, end = self._size, tracked.params, tracked.answer, tracked.supplied
        first, stop = tracked.local // size, -(-end // size)
        if self._several is None:
            begin = first * (size // self._block)
            chosen, skip = rows[0][begin : end // self._block], tracked.local // self._block - begin
        else:
            chosen, skip = self._several.wanted(rows, tracked.local, end), 0
        keys = tracked.keys[first:stop] + state_keys(tracked.keys[stop - 1 : stop], self._parts)
        lease, below = (
            answer.lease_from(first) if answer is not None else None,
            self._instance.offload,
        )
        # Also if the pool had all chunks: it may lose some before they are read.
        offload = lease is None and not asked.announced and below is not None and below.usable
        offload = offload and not tracked.pinned and not self._parts
        if self._several is not None and self._parts and lease is not None:
            if len(lease.locations) != len(keys) * lease.ranks:
                raise ValueError(f"the lease is not on the state at token {end}")
            # vLLM copies the state to the block that the step goes on in before we load, so we fill
            # that block as well.
            keys, chosen = keys + keys[-self._parts :], chosen + self._several.running(rows, end)
            lease = msgspec.structs.replace(
                lease, locations=lease.locations + lease.locations[-self._parts * lease.ranks :]
            )
        waits = self._wait_seconds if asked.wait_seconds is None else asked.wait_seconds
        return LoadSpec(
            request_id=tracked.request.request_id,
            keys=keys,
            blocks=chosen,
            skip=skip,
            stop=len(chosen),
            wait_seconds=waits if asked.announced else 0.0,
            lease=lease,
            pinned=tracked.pinned,
            offload=offload,
            promote=offload and self._stores and asked.store and self._instance.shared is None,
            prefix=tracked.keys[:first] if offload else [],
            residents=answer.residents_of(first, stop) if answer is not None else {},
            number=number,
        )

    def lost(
        self,
        request_id: str,
        tracked: Tracked | None,
        rows: Sequence[list[int]],
        external: int,
        number: int,
    ) -> LoadSpec:
        """A load of `external` tokens that could not be described: workers load nothing and report
        it as failed.

        tracked: the request's, if it is known.
        """
        local = tracked.local // self._block if tracked is not None else 0
        chosen, first, stop = rows[0], local, min(local - (-external // self._block), len(rows[0]))
        if self._several is not None:
            chosen = [block for row in rows for block in row if block != groups.NULL]
            first, stop = 0, len(chosen)
        return LoadSpec(
            request_id=request_id,
            keys=[],
            blocks=chosen,
            skip=first,
            stop=stop,
            lease=tracked.answer.lease
            if tracked is not None and tracked.answer is not None
            else None,
            pinned=tracked is not None and tracked.pinned,
            lost=True,
            number=number,
        )
