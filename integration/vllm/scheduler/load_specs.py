"""Makes the `LoadSpec` of a load: the chunks, their blocks and their possible sources."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from vcache_backend.config import Config
from vcache_backend.transfer.keys import state_keys

from ..metadata import LoadSpec
from ..model.groups import Groups
from .introduction import Introduction
from .tracked import Tracked


class LoadSpecs:
    """Runs in the scheduler's thread. rows: a request's block numbers, by block table."""

    def __init__(
        self, config: Config, stores: bool, groups: Groups, instance: Introduction
    ) -> None:
        """stores: the instance's role allows stores."""
        self._size = config.engine.chunk_size
        self._stores, self._groups, self._instance = stores, groups, instance
        self._numbers = count(1)

    def of(self, tracked: Tracked, rows: Sequence[list[int]]) -> LoadSpec:
        """Make the load of the tokens [tracked.local, tracked.supplied) that the look-up found.
        ValueError if the chunks do not fit vLLM's blocks."""
        size, end = self._size, tracked.supplied
        answer, below = tracked.lookup.answer, self._instance.offload
        first, stop = tracked.local // size, -(-end // size)
        keys = tracked.lookup.keys[first:stop]
        if self._groups.states:
            keys += state_keys(keys[-1:], self._groups.parts)
        # Allow the offload tier even if the pool had all chunks: the pool may lose some before the
        # load reads them.
        offload = not self._groups.states and below is not None and below.usable
        promote = offload and self._stores and tracked.params.store
        return LoadSpec(
            request_id=tracked.request.request_id,
            keys=keys,
            blocks=self._groups.wanted(rows, tracked.local, end),
            offload=offload,
            promote=promote and self._instance.publications is None,
            prefix=tracked.lookup.keys[:first] if offload else [],
            residents=answer.residents_of(first, stop) if answer is not None else [],
            number=next(self._numbers),
        )
