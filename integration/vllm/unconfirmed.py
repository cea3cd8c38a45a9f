"""Steps whose loads may have failed, for all that the scheduler knows yet: what was computed with them is not stored before it does."""

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
    """In the scheduler's thread. Synchronous loads of ours, and steps in which another connector may load, until a report of all workers
    says that they are over."""

    def __init__(self, lookups: Lookups) -> None:
        self._lookups, self._numbers = lookups, count(1)
        self._reading: dict[int, tuple[LoadSpec, Tracked | None]] = {}
        """Synchronous loads by their numbers, and whose they are: a request may end before its load."""
        self._foreign: dict[int, set[int]] = {}
        """Blocks that another connector may fill in a step, by its number."""

    def number(self) -> int:
        """Of the next load."""
        return next(self._numbers)

    def begin(self, loads: Iterable[LoadSpec], requests: Mapping[str, Tracked]) -> None:
        """These are in the step that is planned."""
        self._reading |= {load.number: (load, requests.get(load.request_id)) for load in loads if load.synchronous}

    def others(self, output: Any, requests: Mapping[str, Tracked]) -> int:
        """The number of the step that `output` describes, if requests begin in it with more than vLLM's own cache and we have for them;
        else 0. Another connector's load may be part of it, and fail: vLLM then computes again what the step stores."""
        cached, found = output.scheduled_cached_reqs, set[int]()
        begin = [(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs]
        if cached.resumed_req_ids:
            rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
            begin += [one for one in rows if one[0] in cached.resumed_req_ids and one[2] is not None]
        for request_id, computed, rows in begin:
            tracked = requests.get(request_id)
            if tracked is not None and computed > tracked.supplied:
                found.update(*rows)
        if not found:
            return 0
        self._foreign[number := self.number()] = found
        return number

    def blocks(self, several: bool, workers: int) -> set[int]:
        """Those which may not have been filled. What a step has computed from a load that failed at another worker, no worker can know by
        itself. several: block tables, where the null block stands for none."""
        found = {block for load, _ in self._reading.values() for block in load.blocks} if workers > 1 else set[int]()
        found.update(*self._foreign.values())
        return found - {NULL} if several else found

    def over(self, numbers: Iterable[int], invalid: AbstractSet[int]) -> tuple[dict[str, Tracked], set[int]]:
        """All workers say so of these: what was kept for the loads may go. The requests whose they were, and the blocks of steps in which
        another connector's load left `invalid` ones."""
        ended, lost = [], set[int]()
        for number in numbers:
            if not (foreign := self._foreign.pop(number, set())).isdisjoint(invalid):
                lost |= foreign
            if (reading := self._reading.pop(number, None)) is not None:
                ended.append(reading)
        self._lookups.over([load for load, _ in ended])
        return {load.request_id: tracked for load, tracked in ended if tracked is not None}, lost
