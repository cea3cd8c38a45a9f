"""Proofs in files: which are read, and how they are written."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from vcache_backend import __version__, proofs
from vcache_backend.errors import VCacheError
from vcache_backend.proofs import Combination, Proof

MADE = Combination(vllm="0.99.0", torch="2.13.0", device="cpu", share="in_place")
PROOF = Proof(combination=MADE, date="2026-11-29", model="")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a proof."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = proofs.write(PROOF)
    assert (proofs.find(MADE), file.stat().st_mode & 0o077) == (PROOF, 0)
    return file


def test_a_proof_is_of_exactly_one_combination_and_the_last_one_counts(kept: Path) -> None:
    for name in ("vllm", "torch", "device", "share", "vcache"):
        other = {**{one: getattr(MADE, one) for one in MADE.__struct_fields__}, name: "other"}
        assert proofs.find(Combination(**other)) is None
    later = Proof(combination=MADE, date="2026-12-01", model="m")
    assert (proofs.write(later), proofs.believed()) == (kept, [later])


def test_another_file_is_another_vcache(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    file = tmp_path / "room" / "module.py"
    seen = [proofs.digest(tmp_path)]
    for text in ("one", "two"):
        file.write_text(text)
        seen.append(proofs.digest(tmp_path))
    file.rename(file.with_name("other.py"))
    seen.append(proofs.digest(tmp_path))
    assert len(set(seen)) == 4
    assert proofs.installed().startswith(f"{__version__}+")


def elsewhere(file: Path) -> Path:
    return file.rename(file.parent.parent / "elsewhere")


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


CHANGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "empty": lambda file: file.write_bytes(b""),
    "deep": lambda file: file.write_bytes(b"[" * 60_000),
    "another key": lambda file: file.write_bytes(b'{"more": 1, ' + file.read_bytes()[1:]),
    "no text": lambda file: file.write_bytes(b'{"combination": 7, "date": "\xff", "model": ""}'),
    "a pipe": pipe,
    "others may write it": lambda file: file.chmod(0o620),
    "others may write beside it": lambda file: file.parent.chmod(0o770),
    "a link instead of its folder": lambda file: file.parent.symlink_to(
        file.parent.rename(file.parent.parent / "elsewhere")
    ),
    "a folder": lambda file: (file.unlink(), file.mkdir()),
    "no folder": lambda file: (elsewhere(file), file.parent.rmdir(), file.parent.write_text("")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_no_proof_is_not_believed(kept: Path, change: str) -> None:
    CHANGES[change](kept)
    assert proofs.believed() == []


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    with pytest.raises(VCacheError, match="the proof cannot be kept: .*Not a directory.*XDG_STATE"):
        proofs.write(PROOF)
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert proofs.write(PROOF).parent == tmp_path / "home/.local/state/vcache"


def test_another_user_is_not_believed(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs, "TRUSTED", frozenset((os.getuid() + 1,)))
    assert proofs.believed() == []
    with pytest.raises(VCacheError, match="belongs to uid"):
        proofs.write(PROOF)


def test_no_proof_is_kept_where_nobody_would_believe_it(kept: Path) -> None:
    """`vcache prove` says so before it starts anything."""
    kept.parent.chmod(0o777)
    assert "others can write to" in proofs.unbelieved()
    for call in (proofs.room, lambda: proofs.write(PROOF)):
        with pytest.raises(VCacheError, match="others can write to .*chmod go-w .*XDG_STATE_HOME"):
            call()
    kept.parent.chmod(0o700)
    assert (proofs.room(), proofs.believed(), proofs.unbelieved()) == (kept.parent, [PROOF], "")


def test_a_full_disk_leaves_the_earlier_proof(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(VCacheError, match="No space left on device"):
        proofs.write(Proof(combination=MADE, date="2026-12-01", model=""))
    assert (proofs.believed(), [*kept.parent.iterdir()]) == ([PROOF], [kept])


def test_a_disk_that_becomes_full_in_the_middle_leaves_it_too(kept: Path) -> None:
    """It takes a part, and refuses the rest only when it is asked again."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        with pytest.raises(VCacheError, match="cannot be kept"):
            proofs.write(Proof(combination=MADE, date="2026-12-01", model=""))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert (proofs.believed(), [*kept.parent.iterdir()]) == ([PROOF], [kept])
