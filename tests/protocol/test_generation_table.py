"""What a process maps as a table of generations, and what it refuses: reading a table that its owner
can shrink would end the process."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from instance_cases import instance_id, make_table
from processes import make_memfd

from vcache_backend.errors import SegmentError
from vcache_backend.protocol import generation_table
from vcache_backend.protocol.generation_table import HEADER, MAGIC, SEALS, VERSION, ForeignTable
from vcache_backend.seals import RESIZING

A, B = instance_id(1), instance_id(2)


def forged(seals: int = SEALS, version: int = VERSION, pages: int = 2) -> int:
    fd = os.memfd_create("forged", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, pages * mmap.PAGESIZE)
    os.pwrite(fd, HEADER.pack(MAGIC, version, 0, A, 64), 0)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


WRONG: dict[str, Callable[[Path], int]] = {
    "not sealed against shrinking": lambda path: make_memfd(2 * 4096, seals=False),
    "others' writing .it has 0x7, needs 0x17": lambda path: forged(RESIZING),
    "has 4,096 B, and 64 generations need 8,192": lambda path: forged(pages=1),
    "b'vcache-g' 2; expected are .* b'vcache-g' 3": lambda path: forged(version=2),
    "it has 513 generations of .* expected are 64": lambda path: make_table(A, 513),
    f"64 generations of {B.hex()}, .* are 64 of {A.hex()}": lambda path: make_table(B, 64),
    "not a memfd but a plain file": lambda path: os.open(path / "x", os.O_RDWR | os.O_CREAT),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_table_that_cannot_be_trusted_is_refused_and_leaves_nothing(
    tmp_path: Path, why: str
) -> None:
    """An instance does not answer for its predecessor."""
    fd = WRONG[why](tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SegmentError, match=f"generation table: .*{why}"):
        ForeignTable(fd, A, 64)
    assert len(os.listdir("/proc/self/fd")) <= before
    os.close(fd)


def test_a_table_has_whole_pages() -> None:
    assert [generation_table.nbytes(blocks) for blocks in (1, 512, 513)] == [8192, 8192, 12288]
