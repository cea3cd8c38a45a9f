"""What a process maps as a table of generations, and what it refuses: reading a table that its owner
can shrink would end the process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from instance_cases import instance_id, make_table
from processes import make_memfd

from vcache_backend.errors import SegmentError
from vcache_backend.protocol import generation_table
from vcache_backend.protocol.generation_table import mapped

A, B = instance_id(1), instance_id(2)
WRONG: dict[str, Callable[[Path], int]] = {
    "not sealed against shrinking": lambda path: make_memfd(2 * 4096, seals=False),
    "it has 513 generations of": lambda path: make_table(A, 513),
    f"64 generations of {B.hex()}": lambda path: make_table(B, 64),
    "not a memfd but a plain file": lambda path: os.open(path / "x", os.O_RDWR | os.O_CREAT),
}


@pytest.mark.parametrize("why", WRONG)
def test_a_table_that_cannot_be_trusted_is_refused(tmp_path: Path, why: str) -> None:
    fd = WRONG[why](tmp_path)
    with pytest.raises(SegmentError, match=why):
        mapped(fd, A, 64)
    os.close(fd)


def test_a_table_has_whole_pages() -> None:
    assert [generation_table.nbytes(blocks) for blocks in (1, 512, 513)] == [8192, 8192, 12288]
