"""Steps in which another connector may load (under MultiConnector). What was computed from such a
load is stored only once the load is known to be right.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

from ..model.groups import NULL
from .tracked import Tracked


class ForeignLoads:
    """In the scheduler's thread. Each such step has a number, which all workers report once the
    step is over.
    """

    def __init__(self) -> None:
        self._number = 0
        self._filling: dict[int, set[int]] = {}
        """By step's number: the blocks of requests for which another connector may load in it."""

    def begin(self, output: Any, requests: Mapping[str, Tracked]) -> int:
        """A number for the step that `output` describes, if a request begins in it with more tokens
        than vLLM's own cache and we supply: another connector's load may be part of the step, and
        fail, and vLLM then recomputes what the step would store. Else 0."""
        blocks = set[int]()
        for request_id, computed, rows in _beginning(output):
            tracked = requests.get(request_id)
            if tracked is not None and computed > tracked.supplied:
                blocks.update(*rows)
        blocks.discard(NULL)
        if not blocks:
            return 0
        self._number += 1
        self._filling[self._number] = blocks
        return self._number

    def blocks(self) -> set[int]:
        """Blocks that may not have been filled."""
        return set().union(*self._filling.values())

    def over(self, numbers: Iterable[int], invalid: AbstractSet[int]) -> set[int]:
        """All workers report these steps as over. Returns the blocks of those steps in which
        another connector's load failed, as `invalid`, vLLM's list of blocks that are not filled,
        says."""
        failed = set[int]()
        for number in numbers:
            blocks = self._filling.pop(number, set())
            if not blocks.isdisjoint(invalid):
                failed |= blocks
        return failed


def _beginning(output: Any) -> list[tuple[str, int, Any]]:
    """The requests that begin or resume in the step: name, computed tokens, blocks by block
    table.
    """
    cached = output.scheduled_cached_reqs
    new = [
        (one.req_id, one.num_computed_tokens, one.block_ids) for one in output.scheduled_new_reqs
    ]
    if not cached.resumed_req_ids:
        return new
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    return new + [row for row in rows if row[0] in cached.resumed_req_ids and row[2] is not None]
