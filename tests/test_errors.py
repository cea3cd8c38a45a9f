"""What errors say: one printable, bounded line, whatever a client or a system call gave."""

from __future__ import annotations

import pytest

from vcache_backend.errors import MAX_SHOWN_CHARS, SegmentError, printable, raising_as


def test_what_a_terminal_would_act_on_is_escaped_and_cut() -> None:
    assert printable("\x1b[2Jnode\n7\udcff") == "\\x1b[2Jnode\\n7\\udcff"
    assert printable("a" * 100) == "a" * (MAX_SHOWN_CHARS - 3) + "..."


def test_a_cause_without_a_text_is_named_by_its_kind() -> None:
    for cause, said in (
        (OSError(28, "No space left"), "[Errno 28] No space left"),
        (MemoryError(), "MemoryError"),
    ):
        with (
            pytest.raises(SegmentError, match="^segment: ") as caught,
            raising_as(SegmentError, "segment", OSError, MemoryError),
        ):
            raise cause
        assert str(caught.value) == f"segment: {said}"
        assert caught.value.__cause__ is cause
    with pytest.raises(KeyError), raising_as(SegmentError, "segment", OSError):
        raise KeyError("not ours")
