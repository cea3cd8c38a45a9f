"""Memory that several processes map: nobody can shrink it under a reader, and who sealed it so may
still write.
"""

from __future__ import annotations

import mmap
import os
from contextlib import closing
from pathlib import Path

import pytest

from vcache_backend.seals import FUTURE_WRITE, RESIZING, lacking, sealed


def test_only_earlier_mappings_write_and_nobody_resizes() -> None:
    fd, memory = sealed("test", 8192, RESIZING | FUTURE_WRITE)
    with closing(memory):
        memory[5] = 7
        for change in (os.ftruncate, os.posix_fallocate):
            arguments = (fd, 4096) if change is os.ftruncate else (fd, 0, 16384)
            with pytest.raises(PermissionError):
                change(*arguments)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 8192)
        with mmap.mmap(fd, 8192, prot=mmap.PROT_READ) as seen:
            assert (seen[5], len(seen)) == (7, 8192)
        assert not os.get_inheritable(fd)
        assert lacking(fd, RESIZING | FUTURE_WRITE) == ""
    os.close(fd)


def test_what_is_lacking_is_named(tmp_path: Path) -> None:
    fd, memory = sealed("test", 4096, 0)
    (tmp_path / "plain").write_bytes(bytes(4096))
    ends = os.pipe()
    with memory, open(tmp_path / "plain", "rb") as plain:
        assert "is not sealed against shrinking" in lacking(fd)
        assert "a plain file of 4,096 B" in lacking(plain.fileno())
        assert "is not a memfd but p" in lacking(ends[0])
    for one in (fd, *ends):
        os.close(one)
    with pytest.raises(OSError, match="Bad file descriptor"):
        lacking(fd)
