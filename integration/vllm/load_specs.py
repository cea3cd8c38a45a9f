"""Makes the `LoadSpec` of a load: which chunks go into which blocks, and where they may come
from.
"""

from __future__ import annotations

from collections.abc import Sequence

from vcache_backend.config import Config
from vcache_backend.transfer.keys import state_keys

from .groups import Groups
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
        groups: Groups,
        instance: Introduction,
    ) -> None:
        """stores: whether the instance's role allows stores."""
        self._size, self._wait_seconds = config.engine.chunk_size, config.connector.wait_seconds
        self._stores, self._groups, self._instance = stores, groups, instance

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
        first, stop, parts = tracked.local // size, -(-end // size), self._groups.parts
        known = tracked.lookup.keys
        keys = known[first:stop] + state_keys(known[stop - 1 : stop], parts)
        below = self._instance.offload
        # Also if the pool had all chunks: it may lose some before they are read.
        offload = not (asked.announced or parts) and below is not None and below.usable
        waits = self._wait_seconds if asked.wait_seconds is None else asked.wait_seconds
        return LoadSpec(
            request_id=tracked.request.request_id,
            keys=keys,
            blocks=self._groups.wanted(rows, tracked.local, end),
            wait_seconds=waits if asked.announced else 0.0,
            offload=offload,
            promote=offload
            and self._stores
            and asked.store
            and self._instance.publications is None,
            prefix=tracked.lookup.keys[:first] if offload else [],
            residents=answer.residents_of(first, stop) if answer is not None else {},
        )
