"""The file of resets: what the next server reads, and of which clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from vcache_backend.metadata_server import processes
from vcache_backend.metadata_server.resets import MAX_RESETS, Reset, ResetsFile, of


def test_the_next_server_reads_what_was_written_last_at_the_same_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "lock").open("w+b") as file:
        assert ResetsFile(file.fileno()).read() == {}
        most = {number.to_bytes(8, "big"): Reset(number, 2) for number in range(1, MAX_RESETS + 1)}
        for resets in (most | {b"": Reset(1 << 60, 1 << 60)}, {b"namespac": Reset(4, 2)}):
            ResetsFile(file.fileno()).write(resets)
            assert ResetsFile(file.fileno()).read() == resets
        monkeypatch.setattr(processes, "namespaces", lambda: b"pid:[1] time:[2] of boot 3\n")
        assert ResetsFile(file.fileno()).read() == {}, "its numbers mean nothing after a reboot"
        (tmp_path / "lock").write_text("4711\n")
        assert ResetsFile(file.fileno()).read() == {}, "as in another program's lock"


def test_a_namespace_without_a_reset_of_its_own_has_that_of_all() -> None:
    resets = {b"": Reset(2, 2), b"namespac": Reset(4, 0)}
    assert [of(resets, name) for name in (b"namespac", b"another!")] == [(4, 0), (2, 2)]
    assert of({}, b"namespac") == (0, 0)
