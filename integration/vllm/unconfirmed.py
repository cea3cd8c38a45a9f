"""Steps whose loads the scheduler does not yet know to be right. What was computed from them is
stored only once it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Any

from .groups import NULL
from .lookups import Lookups
from .metadata import LoadSpec
from .tracked import Tracked


class Unconfirmed:
    """Synchronous loads of ours, and steps in which another connector may load, until all workers
    report that they are over.

    In the scheduler's thread.
    """

    def __init__(self, lookups: Lookups) -> None:
        self._lookups, self._numbers = lookups, count(1)
        self._reading: dict[int, tuple[LoadSpec, Tracked | None]] = {}
        """Synchronous loads by number, each with its request, which may end before its load."""
        self._foreign: dict[int, set[int]] = {}
        """By step's number: the blocks of requests for which another connector may load in it."""

    def number(self) -> int:
        """A number for the next load."""
        return next(self._numbers)

    def begin(self, loads: Iterable[LoadSpec], requests: Mapping[str, Tracked]) -> None:
        """The step being planned has these loads."""
        self._reading |= {
            load.number: (load, requests.get(load.request_id)) for load in loads if load.synchronous
        }

    def others(self, output: Any, requests: Mapping[str, Tracked]) -> int:
        """A number for the step that `output` describes, if a request begins in it with more tokens
        than vLLM's own cache and we supply: another connector's load may be part of the step, and
        fail, and vLLM then recomputes what the step would store. Else 0."""
        cached, found = output.scheduled_cached_reqs, set[int]()
        begin = [
            (new.req_id, new.num_computed_tokens, new.block_ids)
            for new in output.scheduled_new_reqs
        ]
        if cached.resumed_req_ids:
            rows = zip(
                cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
            )
            begin += [
                one for one in rows if one[0] in cached.resumed_req_ids and one[2] is not None
            ]
        for request_id, computed, rows in begin:
            tracked = requests.get(request_id)
            if tracked is not None and computed > tracked.supplied:
                found.update(*rows)
        if not found:
            return 0
        self._foreign[number := self.number()] = found
        return number

    def blocks(self, several: bool, workers: int) -> set[int]:
        """Blocks that may not have been filled. With several workers those of our loads too: one
        does not know of a failure at another.

        several: there are several block tables, where the null block stands for no block.
        """
        found = (
            {block for load, _ in self._reading.values() for block in load.blocks}
            if workers > 1
            else set[int]()
        )
        found.update(*self._foreign.values())
        return found - {NULL} if several else found

    def over(
        self, numbers: Iterable[int], invalid: AbstractSet[int]
    ) -> tuple[dict[str, Tracked], set[int]]:
        """All workers report these numbers as over: release what was kept for the loads.

        Returns the requests whose loads they were, by name, and the blocks of steps in which
        another connector's load failed, as `invalid`, vLLM's list of blocks that are not filled,
        says."""
        ended, lost = [], set[int]()
        for number in numbers:
            if not (foreign := self._foreign.pop(number, set())).isdisjoint(invalid):
                lost |= foreign
            if (reading := self._reading.pop(number, None)) is not None:
                ended.append(reading)
        self._lookups.over([load for load, _ in ended])
        return {load.request_id: tracked for load, tracked in ended if tracked is not None}, lost
