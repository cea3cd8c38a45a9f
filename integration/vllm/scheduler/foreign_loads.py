"""Tracks steps in which another connector may load (under MultiConnector). Chunks computed from
such a load are stored only once the load is known to have succeeded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from itertools import product
from typing import Any

from ..model.groups import NULL
from .tracked import Tracked

Beginning = tuple[str, int, Any]
"""A request that begins or resumes: name, computed tokens, blocks by block table."""


class ForeignLoads:
    """Follows the steps with foreign loads by their echoes. Runs in the scheduler's thread."""

    def __init__(self, numbers: Iterator[int]) -> None:
        """numbers: for echoes."""
        self._numbers = numbers
        self._filling: dict[int, set[int]] = {}
        """By a step's echo: the blocks of requests that another connector may load in it, and the
        blocks computed behind them since."""

    @property
    def blocks(self) -> AbstractSet[int]:
        """The blocks of all steps with foreign loads that are not over yet."""
        return frozenset().union(*self._filling.values())

    def begin(self, begun: Iterable[Beginning], requests: Mapping[str, Tracked]) -> set[int]:
        """Return the step's echo if another connector may load in it. begun: see `beginning`.

        Another connector loads if a request begins with more tokens than vLLM's own cache and we
        supply. If that load fails, vLLM recomputes tokens that the step would store."""
        blocks = set[int]()
        for request_id, computed, rows in begun:
            tracked = requests.get(request_id)
            if tracked is not None and computed > tracked.supplied:
                blocks.update(*rows)
        blocks.discard(NULL)
        if not blocks:
            return set()
        echo = next(self._numbers)
        self._filling[echo] = blocks
        return {echo}

    def follow(self, computing: Iterable[Tracked]) -> None:
        """Note what a step computes behind these loads. computing: its requests, in vLLM's order,
        with their blocks."""
        for tracked, blocks in product(computing, self._filling.values()):
            rows = tracked.store.rows
            if not all(map(blocks.isdisjoint, rows)):
                blocks.update(*rows)
                blocks.discard(NULL)

    def over(self, echoes: Iterable[int], invalid: AbstractSet[int]) -> set[int]:
        """End the steps with these echoes, which all workers report. Returns the blocks of steps
        with a failed load, and those behind them.

        invalid: the blocks that vLLM reports as not filled."""
        failed = set[int]()
        for echo in echoes:
            blocks = self._filling.pop(echo, set())
            if not blocks.isdisjoint(invalid):
                failed |= blocks
        return failed


def beginning(output: Any) -> list[Beginning]:
    """List the requests that begin or resume in the step."""
    cached = output.scheduled_cached_reqs
    new = [
        (request.req_id, request.num_computed_tokens, request.block_ids)
        for request in output.scheduled_new_reqs
    ]
    if not cached.resumed_req_ids:
        return new
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    return new + [row for row in rows if row[0] in cached.resumed_req_ids and row[2] is not None]
