"""Tables of slots: which a server takes over, and who can write one. Real memfds."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest
from processes import info

from vcache_backend import seals
from vcache_backend.errors import SegmentError
from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.processes import ProcessId
from vcache_backend.metadata_server.slots import TABLE_BYTES, SlotRegion
from vcache_backend.protocol.messages import ChunkKey
from vcache_backend.vram_pool.generations import GenerationView

NBYTES = 4096
S = info("s", NBYTES)
KEY = ChunkKey(bytes(range(26)))


@pytest.fixture
def shown() -> Iterator[int]:
    """What a client holds of the table of an earlier server."""
    region = SlotRegion.create(S)
    region.cut(1024)
    region.grant(0, KEY, ProcessId(7, 8), 100)
    fd = os.dup(region.fds[0].fd)
    region.close()
    yield fd
    os.close(fd)


def test_one_server_at_a_time_has_a_table(shown: int) -> None:
    region = SlotRegion.take_over(S, shown)
    with pytest.raises(BlockingIOError):
        SlotRegion.take_over(S, shown)
    region.close()
    SlotRegion.take_over(S, shown).close()


def test_what_a_client_holds_cannot_be_written(shown: int) -> None:
    with pytest.raises(PermissionError):
        mmap.mmap(shown, TABLE_BYTES)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(shown, b"x", 0)


def test_only_this_segments_table_is_taken_over(shown: int) -> None:
    for name, nbytes in (("t", NBYTES), ("s", 2 * NBYTES)):
        with pytest.raises(OSError, match="segment"):
            SlotRegion.take_over(info(name, nbytes), shown)
    with pytest.raises(SegmentError, match="expected are"):
        GenerationView.of_segment(shown, "t")


def test_what_others_could_have_made_is_not_taken_over() -> None:
    fd, memory = seals.sealed("slots", TABLE_BYTES)
    with memory, pytest.raises(OSError, match="not a table of slots of uid"):
        SlotRegion.take_over(S, fd)  # every memfd but a server's has another mode
    os.close(fd)


def test_numbers_of_another_clock_are_not_believed(
    shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "namespaces", lambda: b"pid:[1] time:[2] of boot 3\n")
    with pytest.raises(OSError, match="another clock"):
        SlotRegion.take_over(S, shown)


def test_writers_of_another_pid_namespace_are_never_taken_for_gone(
    shown: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = processes.namespaces().split(b" ", 1)[1]
    monkeypatch.setattr(processes, "namespaces", lambda: b"pid:[1] " + rest)
    region = SlotRegion.take_over(S, shown)
    assert [one.writer for one in region.occupied(0, 4)] == [ProcessId(0, 8)]
    region.close()
