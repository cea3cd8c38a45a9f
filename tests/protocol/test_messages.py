"""What messages may hold, and how large they become."""

from __future__ import annotations

import msgspec
import pytest
from instance_cases import keys
from model import chunk_key

from vcache_backend.protocol import messages as m
from vcache_backend.protocol import sockets

A = chunk_key(1)


def test_no_name_has_invisible_characters() -> None:
    """They turn the direction of writing, or begin a line, wherever the name is shown."""
    taken = msgspec.msgpack.Decoder(m.Text)
    for letter in "\x00\x1b\x7f\x9b\u202e\u2028\u2029":
        with pytest.raises(msgspec.ValidationError):
            taken.decode(msgspec.msgpack.encode(f"GPU{letter}"))
    assert taken.decode(msgspec.msgpack.encode("GPU-Grüße 東京 é")) == "GPU-Grüße 東京 é"


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, 1e9])
def test_impossible_paces_are_refused(seconds: float) -> None:
    data = msgspec.msgpack.encode(m.Promise(1, keys(1), 1, seconds))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(data, type=m.Promise)


def test_the_largest_requests_and_answers_are_below_the_limit_of_a_message() -> None:
    far = m.Location(m.SegmentId("s" * 64), m.MAX_SEGMENT_BYTES, m.MAX_SEGMENT_BYTES)
    most, each = m.MAX_SEGMENT_BYTES, m.MAX_KEYS // m.MAX_RUNS
    run = m.SlotRun(1 << 16, bytes(4 * each), bytes(8 * each), far.segment, 1 << 20, most, most)
    refused = [int(m.Refusal.FULL)] * (m.MAX_KEYS - m.MAX_SLOTS)
    granted = m.Reserved(1 << 62, 30.0, [far] * m.MAX_SLOTS + refused, "x" * 256, 1 << 62)
    for largest in (m.Reserve([A] * m.MAX_KEYS, 1), granted, m.Pinned([run] * m.MAX_RUNS, 1 << 62)):
        assert sockets.encode(largest)
