"""Generation tables: what they say of a block, who can write them, and what is refused. Real
memfds, real processes.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from processes import Worker, eventually, nursery

from vcache_backend.errors import SegmentError
from vcache_backend.vram_pool.generations import Generations, GenerationView

ME = bytes(range(16))
OTHER = bytes(16)
BLOCKS = 64


@pytest.fixture
def table() -> Iterator[Generations]:
    made = Generations(ME, BLOCKS)
    yield made
    made.close()


@pytest.fixture
def view(table: Generations) -> GenerationView:
    return GenerationView(table.fd, ME, BLOCKS)


def u32(*values: int) -> bytes:
    return np.array(values, dtype=np.uint32).tobytes()


def u64(*values: int) -> bytes:
    return np.array(values, dtype=np.uint64).tobytes()


# ---- what it says


def test_a_block_equals_nothing_until_filled(table: Generations, view: GenerationView) -> None:
    before = view.counters[3:5].tobytes()
    for _ in range(2):  # it may go to somebody else before anybody has filled it
        table.void([3, 4])
        for published in (before, view.counters[3:5].tobytes()):
            assert view.leading(u32(3, 4), published) == 0
    table.filled([3, 4])
    assert view.leading(u32(3, 4), before) == 0
    assert view.leading(u32(3, 4), view.counters[3:5].tobytes()) == 2


def test_a_block_that_the_cache_does_not_have_equals_nothing(view: GenerationView) -> None:
    for block in (BLOCKS, 1 << 31, (1 << 32) - 1):
        assert view.leading(u32(0, block), u64(2, 2)) == 1


def test_a_change_that_cannot_be_made_is_told(table: Generations) -> None:
    with pytest.raises(IndexError):
        table.void([1, BLOCKS])
    assert table.has_void([1]), "nobody reads more than before"


# ---- who can write it


def test_a_view_cannot_write(view: GenerationView) -> None:
    with pytest.raises(ValueError, match="read-only"):
        view.counters[0] = 4


# ---- what is refused


def test_a_machine_must_order_stores(table: Generations, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    said = "as x86_64 does, not aarch64"
    with pytest.raises(SegmentError, match=said):
        Generations(ME, BLOCKS)
    with pytest.raises(SegmentError, match=said):
        GenerationView(table.fd, ME, BLOCKS)


# ---- two processes


class Owner:
    """A process with a table."""

    def __init__(self) -> None:
        self.table = Generations(ME, BLOCKS)

    def fd(self) -> tuple[int, int]:
        return os.getpid(), self.table.fd

    def carry(self) -> None:
        """Each change is a carry into the upper half."""
        while True:
            self.table.counters[:], self.table.coming = 0xFFFF_FFFF, 0x1_0000_0000
            self.table.filled(range(self.table.blocks))


@contextmanager
def owner() -> Iterator[tuple[Worker, GenerationView]]:
    """The process, and its table as it is seen here. What it does: test_soak."""
    with Worker(nursery("test_generations"), Owner, name="an owner") as made:
        pid, fd = made.ask("fd")
        here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
        view = GenerationView(here, ME, BLOCKS)
        os.close(here)
        yield made, view


def test_a_number_is_never_read_in_halves() -> None:
    with owner() as (process, view):
        process.tell("carry")
        every, seen = np.arange(BLOCKS, dtype=np.uint32), set[int]()
        eventually(lambda: view.counters.min() > 2)

        def read() -> bool:
            for _ in range(5000):
                seen.update(view.counters.take(every).tolist())
            return len(seen) > 1

        eventually(read)
        assert seen == {0xFFFF_FFFF, 0x1_0000_0000}


def test_blocks_are_void_until_they_are_filled_again(table: Generations) -> None:
    table.void_all()
    assert [table.filled(blocks) for blocks in ([3, 4], [5])] == [4, 6]
    assert [table.has_void(blocks) for blocks in ([3, 4, 5], [3, 2], [])] == [False, True, False]
