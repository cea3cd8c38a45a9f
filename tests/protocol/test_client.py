"""Typed calls: what is sent in several requests."""

from __future__ import annotations

import os

import pytest
from model import chunk_key
from processes import Stage, info, make_memfd

from vcache_backend.protocol import client as clients
from vcache_backend.protocol import messages as m

KIB = 1 << 10


def test_more_keys_than_a_request_may_have_are_sent_in_several(alone: Stage) -> None:
    """But the first of them only are pinned, and a reservation has no more slots than it may."""
    alone.server()
    client = alone.client()
    many = [chunk_key(n, rank) for n in range(m.MAX_KEYS // 2 + 1) for rank in (0, 1)]
    fd = make_memfd(KIB * len(many))
    alone.undo.callback(os.close, fd)
    client.add_segment(info("s" * 64, KIB * len(many)), fd)
    for _ in range(-(-len(many) // m.MAX_SLOTS)):
        reserved = client.reserve(many, KIB)
        assert len(reserved.slots) == len(many)
        assert client.commit(reserved.reservation, many) <= m.MAX_SLOTS
    last = client.reserve(many[m.MAX_KEYS :], KIB)
    assert client.commit(last.reservation) == len(many) - m.MAX_KEYS
    assert client.lookup(many[::2]) == client.lookup(many[::2], ranks=2) == len(many) // 2
    assert client.contains([*many, chunk_key(1 << 60)]) == [True] * len(many) + [False]
    assert sum(run.count for run in client.pin(many, 1.0).runs) == m.MAX_KEYS
    assert client.remove(many) == len(many)


@pytest.mark.parametrize("lost", [0, 500, 3000])
def test_a_long_run_is_cut_where_it_is_cut_on_all_ranks(lost: int) -> None:
    """What two ranks say of a run counts from the same block on, though one of them knows less of
    it, or of the runs before."""

    def run(table: int, count: int) -> m.BlockRun:
        return m.BlockRun(7, bytes(4 * count), bytes(8 * count), table, bytes(16 * count))

    most, long = m.MAX_PUBLISHED, 5000 - lost
    runs = [run(1, 700 - lost // 5), run(2, long), run(3, 0), *[run(4, 1)] * 2048]
    told = list(clients._publications(m.Publish(m.InstanceId(bytes(16)), 0, runs)))
    assert all(sum(one.count for one in part.runs) <= most for part in told)
    sent = [one for part in told for one in part.runs]
    assert sum(one.count for one in sent) == sum(one.count for one in runs)
    parts = [(7 + at, min(most, long - at)) for at in range(0, long, most)]
    assert [(one.first, one.count) for one in sent if one.table == 2] == parts
