"""Loads of chunks that lie in two other KV caches, in the pool, or nowhere, in any order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, groupby
from typing import NamedTuple

import pytest
from engine_cases import Node, node
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_cases import CHUNK, prompt
from processes import eventually
from resident_cases import Reader, owner

from vcache_backend.metadata_server.messages import ResidentRun

CHUNKS = 6
FAMILIES = count(1)


class Where(NamedTuple):
    """Of one chunk. owner: 0 or 1, None: in no KV cache. stale: its owner used it again before the
    load. during: while it was read.
    """

    owner: int | None
    pooled: bool
    stale: bool
    during: bool

    @property
    def at_first(self) -> bool:
        """Whether it is there as long as nobody uses it again."""
        return self.pooled or (self.owner is not None and not self.stale)

    @property
    def at_last(self) -> bool:
        """Whether it is there whatever happens, and to whichever part of the load."""
        return self.at_first and not (self.owner is not None and self.during)


CHUNK_PLACES = st.builds(
    Where,
    st.sampled_from([0, 1, None]),
    st.booleans(),
    st.sampled_from([False] * 5 + [True]),
    st.just(False),
)


class Scene:
    """Two owners and a reader that lends a segment, on one server."""

    def __init__(self, here: Node) -> None:
        self.owners = [owner(here, 1), owner(here, 2)]
        self.reader = Reader(here, segment_bytes=2 << 20)

    def play(self, where: list[Where]) -> int:
        """Put the chunks there, and load them: how many came."""
        reader, tokens = self.reader, prompt(CHUNKS * CHUNK, next(FAMILIES))
        reader.copier.half_way = lambda: None
        if pooled := [number for number, at in enumerate(where) if at.pooled]:
            reader.put(tokens, pooled)
        blocks = list(range(2 * CHUNKS))
        there = [made.compute(tokens, blocks) for made in self.owners]
        residents = list[ResidentRun]()
        for which, numbers in groupby(range(CHUNKS), lambda number: where[number].owner):
            if which is not None:
                first, *rest = numbers
                residents.append(there[which].cut(first, first + 1 + len(rest)))
        self._reuse([number for number, at in enumerate(where) if at.stale], where)
        reader.copier.half_way = lambda: self._reuse(
            [number for number, at in enumerate(where) if at.during], where
        )
        loaded, _ = reader.loaded(tokens, residents)
        return loaded

    def _reuse(self, chunks: list[int], where: list[Where]) -> None:
        for number in chunks:
            at = where[number].owner
            if at is not None:
                self.owners[at].reuse(2 * number + 1)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with node(tmp_path_factory.mktemp("node")) as here:
        here.serve()
        yield Scene(here)


def leading(flags: list[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)


@settings(max_examples=60, derandomize=True)
@given(
    st.lists(CHUNK_PLACES, min_size=CHUNKS, max_size=CHUNKS),
    st.sampled_from([None, *range(CHUNKS)]),
)
def test_loads_from_mixed_places_that_change_at_any_time_are_right_and_leave_nothing_over(
    scene: Scene, where: list[Where], during: int | None
) -> None:
    if during is not None:
        where[during] = where[during]._replace(during=True)
    least, most = leading([at.at_last for at in where]), leading([at.at_first for at in where])
    assert least <= scene.play(where) <= most
    assert not any(neighbour._launches for neighbour in scene.reader.neighbours._here.values())
    eventually(lambda: not scene.reader.session.client.stats().leases)
