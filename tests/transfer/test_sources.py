"""Blocks out of other instances' live KV caches and the pool: what is read where it lies, and every way
in which it may not be what it was.
"""

from __future__ import annotations

import struct
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from engine_cases import Node, node
from engine_cases import fresh as here
from kv_cases import CHUNK, prompt
from msgspec.structs import replace
from neighbour_cases import EACH, held_up, instance
from processes import QUICK, SECONDS, asked, eventually
from resident_cases import Reader, beside, owner, owner_apart

from vcache_backend.protocol.messages import ResidentRun
from vcache_backend.transfer import load as loads

__all__ = ["here"]
ROOM = 1 << 20


def only(there: ResidentRun, *chunks: int) -> list[ResidentRun]:
    """The blocks of these chunks, each a run of its own."""
    return [there.cut(EACH * chunk, EACH * (chunk + 1)) for chunk in chunks]


# ---- what is read


def test_blocks_are_read_where_another_instance_computed_them_in_one_launch(here: Node) -> None:
    one, reader, tokens = owner(here), Reader(here), prompt(5 * CHUNK)
    there = one.compute(tokens, [9, 3, 4, 22, 0, 1, 17, 8, 12, 11])
    assert reader.loaded(tokens, [there]) == (10, "")
    assert reader.cache.holds_only(tokens, reader.slots(len(tokens)))
    assert reader.copier.pulls == [10]
    assert asked(reader.session.client, "Pin", "Present") == 0
    nbytes = 5 * reader.cache.chunk_bytes
    counted = {"blocks": 10, "bytes": nbytes, "stale": 0, "refused": 0}
    assert reader.stats == counted | {"owners": {one.name.hex(): nbytes}}


@pytest.mark.parametrize(("theirs", "ours"), [(2, 2), (2, 1)])
def test_vllms_blocks_may_be_several_of_the_tensors(here: Node, theirs: int, ours: int) -> None:
    one, reader, tokens = owner(here, split=theirs), Reader(here, split=ours), prompt(4 * CHUNK)
    there = one.compute(tokens, [9, 3, 4, 11, 0, 1, 7, 8][: 4 * one.each])
    if theirs != ours:
        assert reader.loaded(tokens, [there]) == (0, loads.ABSENT), "they hash other tokens"
        return
    assert reader.loaded(tokens, [there]) == (8 // ours, "")
    assert reader.cache.holds_only(tokens, reader.slots(len(tokens)))


def test_new_owners_are_mapped_while_a_load_waits_or_reads_from_elsewhere(here: Node) -> None:
    one = owner(here, 1)
    two = owner(here, 2)
    reader = Reader(here, segment_bytes=ROOM)
    tokens = prompt(5 * CHUNK)
    first, second = one.compute(tokens, list(range(10))), two.compute(tokens, list(range(10)))
    reader.put(tokens, [2])
    (elsewhere,) = (replace(run, instance=instance(9)) for run in only(second, 2))
    there = [*only(first, 0), *only(second, 1), elsewhere, *only(first, 3)]
    assert reader.loaded(tokens, there, known=False) == (8, loads.ABSENT)


@pytest.mark.parametrize("last", range(1, 5))
def test_a_kv_cache_whose_mapping_ends_between_two_looks_at_it_is_read(
    here: Node, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """last: the look behind which it is mapped."""
    one, reader, tokens = owner(here), Reader(here), prompt(CHUNK)
    there, neighbours, looks = one.compute(tokens, [0, 1]), reader.neighbours, count(1)
    expects, opens = neighbours.expects, held_up(monkeypatch)

    def look(name: bytes) -> bool:
        coming = expects(name)
        if next(looks) == last:
            opens.set()
            eventually(lambda: not expects(name))
        return coming

    monkeypatch.setattr(neighbours, "expects", look)
    load = reader.load(tokens, [there], known=False)
    assert (load.run(SECONDS), load.cause) == (1, "")


def test_blocks_without_keys_are_read_and_nobody_is_asked(here: Node) -> None:
    """What no run has is absent."""
    _, reader, tokens, there = beside(here, 3, segment_bytes=ROOM)
    reader.put(tokens, [2])
    before = asked(reader.session.client, "Pin", "Present")
    load = reader.load(tokens, [there.cut(0, 3), there.cut(3, 4)], keys=False)
    assert (load.run(10), load.cause) == (0, loads.ABSENT)
    assert reader.check(load, tokens) == 4
    assert reader.copier.pulls == [4]
    assert asked(reader.session.client, "Pin", "Present") == before


def test_only_the_blocks_that_are_wanted_are_read(here: Node) -> None:
    """The first ones may lie in vLLM's own cache, the last chunk may be wanted in part."""
    from vcache_backend.transfer.places import BlockPlaces

    one, reader, tokens = owner(here), Reader(here), prompt(4 * CHUNK)
    there = one.compute(tokens, [9, 3, 4, 22, 0, 1, 17, 8])
    reader.cache.poison()
    where = BlockPlaces(reader.kv, CHUNK, reader.blocks(len(tokens))[:7], reader.size, 1)
    resident = {"runs": [there], "neighbours": reader.neighbours}
    load = loads.Load(reader.session, where, reader.keys(tokens), **resident)
    assert load.run(10) == 4
    wanted = slice(reader.size, 7 * reader.size)
    assert reader.cache.holds_only(tokens[wanted], reader.slots(len(tokens))[wanted])
    assert load.stats.tokens == {"resident": 6 * reader.size}


# ---- pooled and resident chunks


def test_a_run_may_end_within_a_chunk_that_the_pool_has_and_begin_within_another(
    here: Node,
) -> None:
    """No block is copied twice: the pool's are those that the runs lack."""
    _, reader, tokens, there = beside(here, 5, segment_bytes=ROOM)
    reader.put(tokens, [0, 1, 3])
    runs = [there.cut(0, 1), there.cut(4, 7), there.cut(8, 9)]
    load = reader.load(tokens[:-16], runs)
    assert (load.run(10), load.cause, reader.check(load, tokens[:-16])) == (4, "", 9)
    assert reader.cache.holds_only(tokens[:-16], reader.slots(len(tokens))[:-16])
    assert reader.copier.pulls == [1, 8]
    assert reader.stats["blocks"] == 5
    assert load.stats.tokens == {"resident": 5 * reader.size, "host": 4 * reader.size}
    assert load.stats.nbytes.total() == 9 * reader.cache.chunk_bytes // 2


def test_a_pool_s_chunk_that_changed_ends_a_load_there(here: Node) -> None:
    """Resident chunks around it are right."""
    _, reader, tokens, there = beside(here, 4, segment_bytes=ROOM)
    reader.put(tokens, [1])
    remove = partial(reader.session.client.remove, reader.keys(tokens)[1:2])
    reader.copier.half_way = lambda: remove() if len(reader.copier.pulls) == 2 else None
    load = reader.load(tokens, only(there, 0, 2, 3))
    assert (load.run(10), load.cause) == (1, "changed")
    assert load.filled == 2
    reader.check(load, tokens)


def test_without_a_server_resident_chunks_are_read_all_the_same(tmp_path: Path) -> None:
    with node(tmp_path, QUICK) as here:
        here.serve()
        one, reader, tokens = owner(here), Reader(here), prompt(3 * CHUNK)
        there = one.compute(tokens, list(range(6)))
        reader.knows(1)
        here.server.kill()
        eventually(lambda: not reader.session.client.connected)
        assert reader.loaded(tokens, only(there, 0, 1)) == (4, "server")


# ---- a block that is used again; by another process, all the time: test_soak


def test_a_block_that_changed_before_the_launch_is_not_read_at_all(here: Node) -> None:
    one, reader, tokens, there = beside(here, 4)
    one.reuse(5)
    assert reader.loaded(tokens, [there]) == (5, loads.ABSENT)
    assert reader.copier.pulls == [5]
    right = 5 * reader.size
    assert reader.cache.holds_only(tokens[:right], reader.slots(len(tokens))[:right])
    assert (reader.stats["stale"], reader.stats["refused"]) == (1, 0)


@pytest.mark.parametrize("given_up", [False, True])
def test_a_reset_or_a_table_given_up_under_a_load_ends_it(here: Node, given_up: bool) -> None:
    one, reader, tokens, there = beside(here, 2)
    reader.copier.half_way = one.table.give_up if given_up else one.table.void_all
    assert reader.loaded(tokens, [there]) == (0, "changed")
    assert reader.stats["refused"] == 4
    assert reader.session.stats.snapshot()["failures"] == {}


@pytest.mark.parametrize("wrong", ["blocks", "bytes", "none", "generations", "outside", "nobody"])
def test_what_a_publication_cannot_mean_is_no_block(here: Node, wrong: str) -> None:
    """They come from others."""
    _, reader, tokens, there = beside(here, 3)
    first, second, third = only(there, 0, 1, 2)
    second = {
        "blocks": replace(second, blocks=second.blocks[:4]),
        "bytes": replace(second, blocks=second.blocks + b"\0"),
        "none": replace(second, blocks=b"", generations=b""),
        "generations": replace(second, generations=second.generations[:8]),
        "outside": replace(second, blocks=struct.pack("<2I", 1002, 1003)),
        "nobody": replace(second, instance=bytes(16)),
    }[wrong]
    assert reader.loaded(tokens, [first, second, third]) == (2, loads.ABSENT)
    assert reader.forgotten(there.instance)() is None


# ---- on GPUs

GPUS = [pytest.param("cuda:0", "cuda:0", marks=pytest.mark.gpu)]
GPUS += [pytest.param("cuda:0", "cuda:1", marks=pytest.mark.gpu(count=2))]


@pytest.mark.parametrize(("theirs", "ours"), GPUS)
def test_a_gpu_reads_owners_and_the_pool_in_one_launch(here: Node, theirs: str, ours: str) -> None:
    tokens = prompt(6 * CHUNK)
    with owner_apart(here, 1, theirs) as one, owner_apart(here, 2, theirs) as two:
        first, second = (made.ask("compute", tokens, list(range(12))) for made in (one, two))
        reader = Reader(here, segment_bytes=ROOM, device=ours)
        reader.put(tokens, [0, 4])
        there = [*only(first, 1), *only(second, 2), *only(first, 3), *only(second, 5)]
        assert reader.loaded(tokens, there) == (12, "")
        assert reader.cache.holds_only(tokens, reader.slots(len(tokens)))
        assert len(reader.stats["owners"]) == 2
