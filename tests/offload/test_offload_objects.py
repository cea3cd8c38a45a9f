"""Objects in the store: what was sealed is found whole, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("xxhash")

from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.offload import objects
from vcache_backend.offload.objects import HEADER_BYTES, BadObject, Buffer, Format
from vcache_backend.protocol.messages import KEY_BYTES, ChunkKey

KEY = ChunkKey(bytes(range(KEY_BYTES)))
NAME = objects.name(KEY, 7)
CHUNK_BYTES = 777
FORM = Format(bytes(range(100, 132)), CHUNK_BYTES)
SIZE = HEADER_BYTES + CHUNK_BYTES


def sealed(chunk: bytes = b"") -> Buffer:
    """A buffer with an object in it and 64 bytes of something behind."""
    chunk = chunk or np.random.default_rng(1).bytes(CHUNK_BYTES)
    buffer = np.full(SIZE + 64, 0xA5, np.uint8)
    buffer[HEADER_BYTES:SIZE] = np.frombuffer(chunk, np.uint8)
    FORM.seal(buffer, NAME)
    return buffer


def refused(buffer: Buffer, form: Format = FORM, name: str = NAME) -> None:
    """Fails if it is not, or with another exception."""
    with pytest.raises(BadObject, match="is damaged, or another"):
        form.check(buffer, HEADER_BYTES + form.chunk_bytes, name)


def test_an_object_is_a_chunk_behind_a_header_under_a_name_with_the_epoch() -> None:
    """Other versions read it: a change needs another VERSION."""
    chunk = bytes(range(256)) * 3 + bytes(9)
    made = sealed(chunk)
    assert (HEADER_BYTES, made[:8].tobytes()) == (128, b"VCKV" + (2).to_bytes(4, "little"))
    assert made[HEADER_BYTES:].tobytes() == chunk + b"\xa5" * 64
    text = KEY.hex()
    assert objects.name(KEY) == f"vcache2/{text[:16]}.0/{text[16:]}"
    assert NAME == f"vcache2/{text[:16]}.7/{text[16:]}"


def test_no_flipped_bit_of_the_header_is_accepted() -> None:
    buffer = sealed()
    for bit in range(8 * HEADER_BYTES):
        buffer[bit // 8] ^= 1 << (bit % 8)
        refused(buffer)
        buffer[bit // 8] ^= 1 << (bit % 8)
    FORM.check(buffer, SIZE, NAME)


@given(st.integers(0, 8 * CHUNK_BYTES - 1), st.integers(0, 255))
def test_no_flipped_bit_of_the_chunk_is_accepted(bit: int, also: int) -> None:
    buffer = sealed()
    buffer[HEADER_BYTES + bit // 8] ^= 1 << (bit % 8)
    refused(buffer)
    buffer[HEADER_BYTES + also] ^= 0xFF
    refused(buffer)


def test_a_truncated_longer_or_torn_object_is_refused() -> None:
    """Torn: the first part of one writer, the rest of another: seen with a store that timed out."""
    for got in (-800, 0, HEADER_BYTES, SIZE - 1, SIZE + 1, 10**12):
        with pytest.raises(BadObject, match=f"has {got:,} B, not {SIZE}"):
            FORM.check(sealed(), got, NAME)
    first, second = sealed(b"a" * CHUNK_BYTES), sealed(b"b" * CHUNK_BYTES)
    refused(np.concatenate((first[:400], second[400:])))


def test_a_whole_object_of_something_else_is_refused() -> None:
    buffer = sealed()
    refused(buffer, name=objects.name(ChunkKey(bytes(KEY_BYTES)), 7))
    refused(buffer, name=objects.name(KEY, 8))
    refused(buffer, form=replace(FORM, fingerprint=bytes(32)))
    refused(buffer, form=replace(FORM, chunk_bytes=CHUNK_BYTES - 1))
