"""The engine's five calls, against a real server process and host segments: what is stored and found,
and what cannot be meant. Other processes and failures have files of their own.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from engine_cases import ROOMY, Node, Pair, fresh, get, node, pair, put
from kv_cases import CHUNK, SMALL, Cache, layout_of, places, prompt
from memory_cases import mappings, open_fds
from processes import PATIENT, SECONDS, eventually, ran

from vcache_backend.engine import VCacheEngine

__all__ = ["fresh", "pair"]


def test_a_tail_shorter_than_a_chunk_is_not_stored(pair: Pair) -> None:
    tokens = prompt(2 * CHUNK + CHUNK - 1)
    put(pair.writer, pair.mine, tokens)
    assert pair.reader.lookup(tokens) == 2 * CHUNK
    assert get(pair.reader, pair.theirs, tokens) == 2 * CHUNK
    put(pair.writer, pair.mine, prompt(CHUNK - 1, 2))
    assert pair.reader.lookup(prompt(CHUNK - 1, 2)) == pair.reader.lookup([]) == 0
    for kind in (tokens.tolist(), tokens.int(), tokens.numpy()):
        slots = places(SMALL, len(tokens), 1).numpy()
        mask = pair.reader.retrieve(kind, None, pair.theirs.tensors, slots)
        expected = (torch.bool, tokens.shape, "cpu", 2 * CHUNK)
        assert (mask.dtype, mask.shape, mask.device.type, int(mask.sum())) == expected
    assert pair.reader.retrieve([], None, pair.theirs.tensors, []).shape == (0,)


# ---- what the caller has already, and what has no place


def test_a_prefix_the_caller_has_is_never_written(pair: Pair) -> None:
    """Chunk-aligned, block-aligned and in the middle of a block, of which nothing is brought
    then.
    """
    tokens = prompt(3 * CHUNK)
    slots = places(pair.mine.sizes, 3 * CHUNK, 1)
    block = pair.mine.sizes.block_size
    put(pair.writer, pair.mine, tokens)
    for known in (CHUNK, 16, 37, 3 * CHUNK - 1, 3 * CHUNK):
        pair.theirs.poison()
        wanted = torch.arange(len(tokens)) >= known
        mask = pair.reader.retrieve(tokens, wanted, pair.theirs.tensors, slots)
        assert torch.equal(mask, torch.arange(len(tokens)) >= -(-known // block) * block), known
        assert pair.theirs.holds_only(tokens[mask], slots[mask]), known


@pytest.mark.parametrize("offset", [CHUNK, 5])
def test_slot_mapping_may_begin_at_an_offset(pair: Pair, offset: int) -> None:
    """As LMCache calls: the first `offset` tokens are in the pool already, and no slots are given
    for them.
    """
    tokens, slots = prompt(4 * CHUNK), places(pair.mine.sizes, 4 * CHUNK)
    pair.mine.fill(tokens, slots)
    wanted = torch.arange(len(tokens)) >= offset
    pair.writer.store(tokens, wanted, pair.mine.tensors, slots[offset:], offset)
    assert pair.writer.flush(SECONDS)
    first = -(-offset // CHUNK)
    there = [pair.reader.contains(key) for key in pair.reader.keys(tokens)]
    assert there == [-1] * first + [0] * (4 - first)
    put(pair.writer, pair.mine, tokens[: first * CHUNK])
    assert get(pair.reader, pair.theirs, tokens) == 4 * CHUNK


# ---- its end


def _held() -> tuple[int, int, int]:
    """File descriptors, mappings of segments and threads of this process."""
    gc.collect()
    return open_fds(), mappings(), threading.active_count()


def test_close_is_idempotent_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Over many lives of engines, with heartbeats all the time."""
    with node(tmp_path, msgspec.structs.replace(PATIENT, heartbeat_seconds=0.0005)) as here:
        here.serve()
        mine = Cache()
        layout = layout_of(mine)
        keeper = here.engine("host:a", ROOMY, layout)
        put(keeper, mine, prompt(2 * CHUNK))

        def live(life: int) -> VCacheEngine:
            engine = VCacheEngine(here.config("host:b", ROOMY), layout)
            assert get(engine, mine, prompt(2 * CHUNK), seed=life) == 2 * CHUNK
            put(engine, mine, prompt(CHUNK, 2 + life))
            return engine

        with live(0):
            # The keeper maps what the other one lends, for good.
            eventually(lambda: len(keeper._session.pool.mapped()) == 2)
        before = _held()
        inherited = ran("ls", "-l", "/proc/self/fd", close_fds=False).stdout
        assert "memfd:" not in inherited, "a program started meanwhile has none of it either"
        closed = []
        for life in range(1, 4):
            engine = live(life)
            opened = _held()
            engine.close()
            engine.close()
            assert all(now < then for now, then in zip(_held(), opened, strict=True))
            closed.append(engine)
        # What earlier tests left may go at any time: never more, perhaps fewer.
        assert all(now <= was for now, was in zip(_held(), before, strict=True))
        assert {engine.lookup(prompt(CHUNK)) for engine in closed} == {0}
        assert keeper.lookup(prompt(2 * CHUNK)) == 2 * CHUNK


# ---- arguments


def test_arguments_that_cannot_be_meant_are_errors_that_say_which(pair: Pair) -> None:
    tokens, slots, kv = prompt(CHUNK), places(pair.mine.sizes, CHUNK), pair.mine.tensors
    true = torch.ones(CHUNK, dtype=torch.bool)
    hole = true.clone()
    hole[3] = False
    calls = [
        (r"mask .*\(31,\).*expected \(32,\)", lambda e: (tokens, true[1:], kv, slots)),
        (r"mask must be False on a prefix", lambda e: (tokens, hole, kv, slots)),
        (r"slot_mapping .*\(31,\).*32 tokens", lambda e: (tokens, None, kv, slots[1:])),
        (
            rf"slot {slots[4]} to the tokens at \[4, 9\]",
            lambda e: (tokens, None, kv, slots.index_fill(0, torch.tensor([9]), slots[4])),
        ),
        (r"kvcaches .*NoneType", lambda e: (tokens, None, None, slots)),
    ]
    for pattern, arguments in calls:
        for call in (pair.writer.store, pair.writer.retrieve):
            with pytest.raises(ValueError, match=pattern):
                call(*arguments(pair.writer))
    with pytest.raises(ValueError, match=r"slot_mapping .*offset 5"):
        pair.writer.store(tokens, None, kv, slots, 5)
    assert pair.writer.get_stats()["failures"] == {}


def test_whatever_it_is_asked_an_engine_raises_only_value_error(fresh: Node, pair: Pair) -> None:
    tokens, slots, kv, e = prompt(CHUNK), places(SMALL, CHUNK), pair.mine.tensors, pair.writer
    odd: list[object] = [None, -1, 1 << 70, float("nan"), "x", b"x", [], [[1], [1, 2]], {"a": 1}]
    odd += [Cache, [None] * CHUNK, torch.tensor(1), torch.empty(CHUNK, device="meta")]
    odd += [torch.ones(CHUNK).to_sparse(), np.array([object()] * CHUNK)]
    odd += [[torch.empty_like(layer, device="meta") for layer in kv], [kv[0].to_sparse()] * 3]
    for x in odd:
        for call in (
            lambda x: (e.lookup(x), e.lookup(tokens, salt=x)),
            lambda x: e.store(x, None, kv, slots),
            lambda x: e.store(tokens, x, kv, slots),
            lambda x: e.store(tokens, None, x, slots),
            lambda x: e.store(tokens, None, kv, x),
            lambda x: e.store(tokens, None, kv, slots, x),
            lambda x: e.store(tokens, None, kv, slots, salt=x),
            lambda x: e.retrieve(x, None, kv, slots),
            lambda x: e.retrieve(tokens, x, kv, slots),
            lambda x: e.retrieve(tokens, None, x, slots),
            lambda x: e.retrieve(tokens, None, kv, x),
            lambda x: e.retrieve(tokens, None, kv, slots, salt=x),
            e.contains,
            e.keys,
            lambda x: e.keys(tokens, salt=x),
            e.flush,
        ):
            with contextlib.suppress(ValueError):
                call(x)
    assert e.flush(SECONDS)
    assert e.keys(tokens, salt=None) == e.keys(tokens)
    stats = fresh.client().stats()
    assert (stats.reservations, stats.quarantined_slots) == (0, {})
