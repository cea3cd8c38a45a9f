"""Objects in the store: what was sealed is found whole, and nothing else passes for it."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("xxhash")

from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.errors import ConfigError
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
    known = objects.copy_and_hash(buffer[HEADER_BYTES:SIZE], np.frombuffer(payload, np.uint8))
    FORM.seal(buffer, KEY, epoch, known)
    return buffer


def reason(buffer: Buffer, size: int = SIZE, form: Format = FORM, key: ChunkKey = KEY, epoch: int = 0) -> str:
    """Why it is refused. Fails if it is not, or with another exception."""
    with pytest.raises(BadObject) as refused:
        form.check(buffer, size, key, epoch)
    return refused.value.reason


def test_what_was_sealed_is_found_and_the_rest_of_the_buffer_untouched() -> None:
    payload = np.random.default_rng(2).bytes(PAYLOAD_BYTES)
    buffer = sealed(payload)
    assert FORM.object_bytes == SIZE
    FORM.check(buffer, SIZE, KEY, 0)
    assert buffer[HEADER_BYTES:SIZE].tobytes() == payload
    assert (buffer[SIZE:] == 0xA5).all()


def test_a_digest_that_is_known_makes_the_same_object_as_one_that_is_not() -> None:
    known = sealed()
    unknown = known.copy()
    unknown[:HEADER_BYTES] = 0
    FORM.seal(unknown, KEY, 0)
    assert np.array_equal(known, unknown)


def test_the_format_is_what_the_documentation_of_the_module_says() -> None:
    """Other versions and programs read it: a change needs another VERSION."""
    head = sealed()[:HEADER_BYTES].tobytes()
    assert HEADER_BYTES == 128
    assert head[:8] == b"VCKV" + (1).to_bytes(2, "little") + CODEC.to_bytes(2, "little")
    assert [int.from_bytes(head[at : at + 8], "little") for at in (8, 16)] == [CHUNK_BYTES, PAYLOAD_BYTES]
    assert (head[32:58], head[64:96]) == (KEY, FINGERPRINT)
    text = KEY.hex()
    assert objects.name(KEY) == f"vcache1/{text[:16]}.0/{text[16:]}"
    assert objects.name(KEY, 31) == f"vcache1/{text[:16]}.1f/{text[16:]}"


def test_no_flipped_bit_of_the_header_is_accepted() -> None:
    buffer = sealed()
    reasons = set()
    for bit in range(8 * HEADER_BYTES):
        buffer[bit // 8] ^= 1 << (bit % 8)
        reasons.add(reason(buffer))
        buffer[bit // 8] ^= 1 << (bit % 8)
    assert reasons == {"magic", "version", "header"}
    FORM.check(buffer, SIZE, KEY, 0)


@given(st.integers(0, 8 * PAYLOAD_BYTES - 1), st.integers(0, 255))
def test_no_flipped_bit_of_the_payload_is_accepted(bit: int, also: int) -> None:
    buffer = sealed()
    buffer[HEADER_BYTES + bit // 8] ^= 1 << (bit % 8)
    assert reason(buffer) == "checksum"
    buffer[HEADER_BYTES + also] ^= 0xFF
    assert reason(buffer) == "checksum"


@pytest.mark.parametrize(
    "got",
    [-800, 0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1, HEADER_BYTES + PAYLOAD_BYTES + 1, 10**12],
)
def test_a_truncated_or_longer_object_is_refused(got: int) -> None:
    assert reason(sealed(), got) == "length"


def test_a_torn_object_is_refused() -> None:
    """The first part of one writer, the rest of another: seen with a store that timed out."""
    first, second = sealed(b"a" * PAYLOAD_BYTES), sealed(b"b" * PAYLOAD_BYTES)
    assert reason(np.concatenate((first[:400], second[400:]))) == "checksum"


def test_a_whole_object_of_something_else_is_refused() -> None:
    buffer = sealed()
    assert reason(buffer, key=ChunkKey(bytes(KEY_BYTES))) == "key"
    assert reason(buffer, form=replace(FORM, fingerprint=bytes(32))) == "fingerprint"
    assert reason(buffer, form=replace(FORM, codec_id=CODEC + 1)) == "codec"
    assert reason(buffer, form=replace(FORM, chunk_bytes=CHUNK_BYTES + 1)) == "length"
    assert reason(buffer, form=replace(FORM, payload_bytes=PAYLOAD_BYTES - 1)) == "length"
    assert reason(buffer, epoch=7) == reason(sealed(epoch=7)) == "fingerprint"
    FORM.check(sealed(epoch=7), SIZE, KEY, 7)


@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_refused(garbage: bytes, like_ours: bool) -> None:
    buffer = np.frombuffer(b"VCKV\x01\x00" * like_ours + garbage, np.uint8)
    assert reason(buffer, buffer.nbytes) in {"length", "magic", "version", "header"}


def test_other_threads_run_while_an_object_is_hashed() -> None:
    """Nobody is made to give up the GIL here, so that another thread runs only if the hash lets go of it."""
    data, gate, ran = np.zeros(64 << 20, np.uint8), threading.Lock(), []
    gate.acquire()

    def wait_and_run() -> None:
        gate.acquire()
        ran.append(True)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=wait_and_run)
    thread.start()
    sys.setswitchinterval(30)
    try:
        gate.release()
        for _ in range(200):
            objects.digest(data)
            if ran:
                break
        assert ran
    finally:
        sys.setswitchinterval(interval)
        thread.join(10)


def test_without_xxhash_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match=r"needs xxhash: pip install 'vcache-backend\[mooncake\]'"):
        objects.digest(b"")
