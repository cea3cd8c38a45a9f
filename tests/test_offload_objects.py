"""Objects in the store: what was sealed is found whole, and nothing else passes for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("xxhash")

from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.metadata_server.messages import KEY_BYTES, ChunkKey
from vcache_backend.offload import objects
from vcache_backend.offload.objects import HEADER_BYTES, BadObject, Buffer, Format

KEY = ChunkKey(bytes(range(KEY_BYTES)))
FINGERPRINT = bytes(range(100, 132))
CODEC, CHUNK_BYTES, PAYLOAD_BYTES = 4, 4096, 777
FORM = Format(FINGERPRINT, CODEC, CHUNK_BYTES, PAYLOAD_BYTES)
SIZE = HEADER_BYTES + PAYLOAD_BYTES


def sealed(payload: bytes = b"", epoch: int = 0) -> Buffer:
    """A buffer with an object in it and 64 bytes of something behind."""
    payload = payload or np.random.default_rng(1).bytes(PAYLOAD_BYTES)
    buffer = np.full(SIZE + 64, 0xA5, np.uint8)
    buffer[HEADER_BYTES:SIZE] = np.frombuffer(payload, np.uint8)
    FORM.seal(buffer, KEY, epoch)
    return buffer


def refused(buffer: Buffer, form: Format = FORM, key: ChunkKey = KEY, epoch: int = 0) -> str:
    """Why. Fails if it is not, or with another exception."""
    with pytest.raises(BadObject) as why:
        form.check(buffer, SIZE, key, epoch)
    return str(why.value).partition(": ")[2]


def test_the_format_is_what_the_documentation_of_the_module_says() -> None:
    """Other versions and programs read it: a change needs another VERSION."""
    head = sealed()[:HEADER_BYTES].tobytes()
    assert HEADER_BYTES == 128
    assert head[:8] == b"VCKV" + (1).to_bytes(2, "little") + CODEC.to_bytes(2, "little")
    sizes = [int.from_bytes(head[at : at + 8], "little") for at in (8, 16)]
    assert sizes == [CHUNK_BYTES, PAYLOAD_BYTES]
    assert (head[32:58], head[64:96]) == (KEY, FINGERPRINT)
    payload = bytes(range(256)) * 3 + bytes(9)
    assert sealed(payload)[HEADER_BYTES:].tobytes() == payload + b"\xa5" * 64
    text = KEY.hex()
    assert objects.name(KEY) == f"vcache1/{text[:16]}.0/{text[16:]}"
    assert objects.name(KEY, 31) == f"vcache1/{text[:16]}.1f/{text[16:]}"


def test_no_flipped_bit_of_the_header_is_accepted() -> None:
    buffer = sealed()
    for bit in range(8 * HEADER_BYTES):
        buffer[bit // 8] ^= 1 << (bit % 8)
        assert "damaged, or another" in refused(buffer)
        buffer[bit // 8] ^= 1 << (bit % 8)
    FORM.check(buffer, SIZE, KEY, 0)


@given(st.integers(0, 8 * PAYLOAD_BYTES - 1), st.integers(0, 255))
def test_no_flipped_bit_of_the_payload_is_accepted(bit: int, also: int) -> None:
    buffer = sealed()
    buffer[HEADER_BYTES + bit // 8] ^= 1 << (bit % 8)
    assert "checksum" in refused(buffer)
    buffer[HEADER_BYTES + also] ^= 0xFF
    assert "checksum" in refused(buffer)


def test_a_truncated_longer_or_torn_object_is_refused() -> None:
    """Torn: the first part of one writer, the rest of another: seen with a store that timed out."""
    for got in (-800, 0, HEADER_BYTES, SIZE - 1, SIZE + 1, 10**12):
        with pytest.raises(BadObject, match=f"has {got:,} B, not {SIZE}"):
            FORM.check(sealed(), got, KEY, 0)
    first, second = sealed(b"a" * PAYLOAD_BYTES), sealed(b"b" * PAYLOAD_BYTES)
    assert "checksum" in refused(np.concatenate((first[:400], second[400:])))


def test_a_whole_object_of_something_else_is_refused() -> None:
    buffer = sealed()
    refused(buffer, key=ChunkKey(bytes(KEY_BYTES)))
    for other in (
        {"fingerprint": bytes(32)},
        {"codec_id": CODEC + 1},
        {"chunk_bytes": CHUNK_BYTES + 1},
        {"payload_bytes": 776},
    ):
        refused(buffer, form=replace(FORM, **other))
    refused(buffer, epoch=7)
    refused(sealed(epoch=7))
    FORM.check(sealed(epoch=7), SIZE, KEY, 7)
