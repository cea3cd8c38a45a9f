"""Instances that share in place, over real connections: what is shown, opened, published and found, and what goes with whom."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Child, Stage, eventually, stage
from resident_cases import EACH, chunk_blocks, chunk_generations, instance_id, join, keys, publish, shape, show

from vcache_backend.errors import Refused
from vcache_backend.metadata_server import messages as m

A, B = instance_id(1), instance_id(2)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[Stage]:
    with stage(tmp_path) as made:
        yield made


@pytest.fixture
def server(alone: Stage) -> Child:
    return alone.server()


def test_what_an_instance_shows_and_publishes_others_find_and_open(alone: Stage, server: Child) -> None:
    owner, reader = alone.client(), alone.client()
    join(owner, A)
    show(owner, A, regions=2)
    assert publish(owner, A, keys(3)) == 3

    found = reader.find(keys(5), 1, B)
    assert (found.pooled, found.instances) == (b"\0\0\0", [A])
    here = [m.Resident(0, chunk_blocks(4 * at), chunk_generations(2)) for at in range(3)]
    assert found.residents == [[one] for one in here]
    assert owner.find(keys(5), 1, A) == m.Found(b"", [], [])

    joined, table = reader.open_instance(A)
    assert joined == m.Joined(64, 1, EACH)
    assert reader.open_cache(A, 0) == shape(64, 2)
    regions = [reader.open_region(A, 0, number) for number in (0, 1)]
    pidfds = [reader.open_process(A, rank) for rank in (-1, 0)]
    assert [os.fstat(fd).st_size for fd in (table, *regions)] == [4096 + 64 * 8, 4 * 64 * 64, 4 * 64 * 64]
    for fd in (table, *regions, *pidfds):
        os.close(fd)

    owner.close()
    eventually(lambda: reader.find(keys(5)) == m.Found(b"", [], []))
    with pytest.raises(Refused, match="it is not here, or not any more"):
        reader.open_instance(A)
