"""Generation tables: what they say of a block, who can write them, and what is refused. Real
memfds, real processes.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from processes import Worker, eventually, nursery

from vcache_backend.errors import SegmentError
from vcache_backend.resident import generations
from vcache_backend.resident.generations import SEALS, Generations, GenerationView
from vcache_backend.seals import FUTURE_WRITE

ME = bytes(range(16))
OTHER = bytes(16)
BLOCKS = 64
READS = 20_000


@pytest.fixture
def table() -> Iterator[Generations]:
    made = Generations(ME, BLOCKS)
    yield made
    made.close()


@pytest.fixture
def view(table: Generations) -> GenerationView:
    return GenerationView.open(table.fd, ME, BLOCKS)


def u32(*values: int) -> bytes:
    return np.array(values, dtype=np.uint32).tobytes()


def u64(*values: int) -> bytes:
    return np.array(values, dtype=np.uint64).tobytes()


# ---- what it says


def test_what_changed_is_not_what_was_published(table: Generations, view: GenerationView) -> None:
    blocks, published = u32(3, 4, 5, 6, 7, 8), table.counters[3:9].tobytes()
    assert view.leading(blocks, published, 2) == 3
    table.void([5])
    assert view.leading(blocks, published, 2) == 1
    assert view.leading(blocks, published, 1) == 2
    table.void([3, 3])
    assert view.leading(blocks, published, 2) == 0
    assert table.counters[3:9].tolist() == [1, 2, 1, 2, 2, 2]


def test_a_block_that_is_handed_out_equals_nothing_until_it_is_filled(
    table: Generations, view: GenerationView
) -> None:
    before = view.counters[3:5].tobytes()
    for _ in range(2):  # it may go to somebody else before anybody has filled it
        table.void([3, 4])
        assert [
            view.leading(u32(3, 4), published, 1)
            for published in (before, view.counters[3:5].tobytes())
        ] == [0, 0]
    table.filled([3, 4])
    assert view.leading(u32(3, 4), before, 1) == 0
    assert view.leading(u32(3, 4), view.counters[3:5].tobytes(), 1) == 2


def test_a_block_that_the_cache_does_not_have_equals_nothing(view: GenerationView) -> None:
    for block in (BLOCKS, 1 << 31, (1 << 32) - 1):
        assert view.leading(u32(0, block), u64(2, 2), 1) == 1


def test_of_a_table_that_was_given_up_nothing_is_believed(
    table: Generations, view: GenerationView
) -> None:
    assert not view.dead
    table.give_up()
    assert view.dead
    assert view.leading(u32(0), u64(2), 1) == 0


def test_a_change_that_cannot_be_made_is_told_and_changes_nothing(table: Generations) -> None:
    with pytest.raises(IndexError):
        table.void([1, BLOCKS])
    assert (table.counters == 2).all()


# ---- who can write it


def test_nobody_but_its_owner_can_write_it_or_change_its_size(table: Generations) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(table.fd, 0)
    with pytest.raises(PermissionError):
        os.pwrite(table.fd, b"\0", mmap.PAGESIZE)
    for nbytes in (0, mmap.PAGESIZE, 3 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(table.fd, nbytes)
    with pytest.raises(PermissionError):
        fcntl.fcntl(table.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_ends_that_are_void_or_outside_of_the_cache_are_not_chosen(
    table: Generations, view: GenerationView
) -> None:
    table.void([1])
    void = int(table.counters[1])
    for block, number in ((1, void), (BLOCKS, 2), ((1 << 32) - 1, 2)):
        assert view.leading_ends(u32(block), u64(number), 1) == 0


def test_a_view_cannot_write(view: GenerationView) -> None:
    with pytest.raises(ValueError, match="read-only"):
        view.counters[0] = 4


# ---- what is refused


@contextmanager
def forged(kind: str) -> Iterator[int]:
    size = 2 * mmap.PAGESIZE
    if kind == "pipe":
        fd, other = os.pipe()
        os.close(other)
    elif kind == "plain":
        fd, path = tempfile.mkstemp(dir="/var/tmp")
        os.unlink(path)
        os.ftruncate(fd, size)
    else:
        fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, mmap.PAGESIZE if kind == "short" else size)
        version, count = 2 if kind == "version" else 3, BLOCKS - (kind == "count")
        os.pwrite(fd, struct.pack("<8sII16sQ", generations.MAGIC, version, 0, ME, count), 0)
        missing = {"shrinking": fcntl.F_SEAL_SHRINK, "writable": FUTURE_WRITE}.get(kind, 0)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS & ~missing)
    try:
        yield fd
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("pipe", "is no memfd but p"),
        ("plain", "plain file|it has 0x1, needs"),
        ("shrinking", "it has 0x15, needs 0x17"),
        ("writable", "others' writing .it has 0x7, needs 0x17"),
        ("short", "holds 4,096 B, but one of 64 blocks has 8,192"),
        ("version", r"begins with b'vcache-g', version 2, not b'vcache-g', 3"),
        ("count", "with 63 blocks, not of .* with 64"),
    ],
)
def test_what_is_no_table_is_refused_with_the_figures_and_leaves_nothing(
    kind: str, message: str
) -> None:
    with forged(kind) as fd:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(SegmentError, match=f"generation table: .*({message})"):
            GenerationView.open(fd, ME, BLOCKS)
        assert len(os.listdir("/proc/self/fd")) <= before


def test_a_table_of_another_instance_is_refused_so_that_nobody_answers_for_its_predecessor(
    table: Generations,
) -> None:
    with pytest.raises(
        SegmentError, match=f"of instance {ME.hex()} with 64 blocks, not of {OTHER.hex()} with 64"
    ):
        GenerationView.open(table.fd, OTHER, BLOCKS)


def test_a_machine_that_does_not_order_stores_is_refused(
    table: Generations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    for make in (
        lambda: Generations(ME, BLOCKS),
        lambda: GenerationView.open(table.fd, ME, BLOCKS),
    ):
        with pytest.raises(
            SegmentError, match=r"as x86_64 does, not aarch64; set connector\.share: pool"
        ):
            make()


# ---- two processes


def tables_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:vcache-generations")


class Owner:
    """A process that hands out blocks of its cache, fills them and publishes them, as fast as it
    can. Page b: the bytes of block b. The last page: the generation of each block as it was
    published."""

    def __init__(self, blocks: int) -> None:
        self.table = Generations(ME, blocks)
        self.fd = os.memfd_create("vcache-test")
        os.ftruncate(self.fd, (blocks + 1) * mmap.PAGESIZE)
        memory = np.frombuffer(mmap.mmap(self.fd, 0), dtype=np.uint64).reshape(blocks + 1, -1)
        self.pages, self.published = memory[:-1], memory[-1]

    def fds(self) -> tuple[int, int, int]:
        return os.getpid(), self.table.fd, self.fd

    def work(self) -> None:
        while True:
            for block in range(self.table.blocks):
                self.table.void([block])
                self.table.filled([block])
                self.pages[block] = self.table.counters[block]
                self.published[block] = self.table.counters[block]

    def carry(self) -> None:
        """Each change is a carry into the upper half."""
        while True:
            self.table.counters[:], self.table.coming = 0xFFFF_FFFF, 0x1_0000_0000
            self.table.filled(range(self.table.blocks))


def taken(owner: Worker) -> tuple[int, int]:
    """The table's fd and the cache's, of this process."""
    pid, *fds = owner.ask("fds")
    return tuple(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR) for fd in fds)  # type: ignore[return-value]


def test_what_equals_its_generation_after_a_copy_is_what_was_published() -> None:
    """The whole protocol, between two processes that do nothing else."""
    blocks = 4
    with Worker(nursery("test_generations"), Owner, blocks, name="an owner") as owner:
        table_fd, cache_fd = taken(owner)
        view = GenerationView.open(table_fd, ME, blocks)
        memory = mmap.mmap(cache_fd, 0, prot=mmap.PROT_READ)
        cache = np.frombuffer(memory, dtype=np.uint64).reshape(blocks + 1, -1)
        os.close(table_fd)
        os.close(cache_fd)
        owner.tell("work")
        eventually(lambda: cache[-1, :blocks].all())
        seen: Counter[tuple[bool, bool]] = Counter()

        def read() -> bool:
            """Many times. Whether both happened: what was read held, and what did not hold was
            different.
            """
            for number in range(READS):
                block = number % blocks
                generation, copy = cache[-1, block : block + 1].copy(), cache[block].copy()
                held = view.leading(u32(block), generation.tobytes(), 1) == 1
                seen[held, bool((copy == generation).all())] += 1
            return seen[True, True] > 0 and seen[False, False] > 0

        eventually(read)
        assert seen[True, False] == 0


def test_a_number_is_never_read_in_halves() -> None:
    with Worker(nursery("test_generations"), Owner, BLOCKS, name="an owner") as owner:
        table_fd, _ = taken(owner)
        view = GenerationView.open(table_fd, ME, BLOCKS)
        owner.tell("carry")
        os.close(table_fd)
        every, seen = np.arange(BLOCKS, dtype=np.uint32), set[int]()
        eventually(lambda: view.counters.min() > 2)

        def read() -> bool:
            for _ in range(READS // 4):
                seen.update(view.counters.take(every).tolist())
            return len(seen) > 1

        eventually(read)
        assert seen == {0xFFFF_FFFF, 0x1_0000_0000}


def test_a_table_outlives_its_owner_as_it_was() -> None:
    with Worker(nursery("test_generations"), Owner, BLOCKS, name="an owner") as owner:
        table_fd, _ = taken(owner)
        view = GenerationView.open(table_fd, ME, BLOCKS)
        os.close(table_fd)
        owner.kill()
        assert view.leading(u32(0, 1), u64(2, 2), 1) == 2
    before = tables_mapped()
    del view
    assert tables_mapped() == before - 1
