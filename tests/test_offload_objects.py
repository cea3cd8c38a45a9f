"""Objects in the store: what was sealed is found whole, and nothing else passes for it."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest

pytest.importorskip("xxhash")

from hypothesis import given
from hypothesis import strategies as st

from vcache_backend.errors import ConfigError
from vcache_backend.metadata_server.messages import KEY_BYTES, ChunkKey
from vcache_backend.offload import objects
from vcache_backend.offload.objects import HEADER_BYTES, BadObject, Buffer

KEY = ChunkKey(bytes(range(KEY_BYTES)))
FINGERPRINT = bytes(range(100, 132))
CODEC = 3
RAW_BYTES = 4096
PAYLOAD_BYTES = 777


def sealed(payload: bytes = b"", room: int = 64) -> tuple[Buffer, int]:
    """A buffer with an object in it and `room` bytes of something behind, and the object's size."""
    payload = payload or np.random.default_rng(1).bytes(PAYLOAD_BYTES)
    buffer = np.full(HEADER_BYTES + len(payload) + room, 0xA5, np.uint8)
    known = objects.copy_and_hash(buffer[HEADER_BYTES : HEADER_BYTES + len(payload)], np.frombuffer(payload, np.uint8))
    return buffer, objects.seal(buffer, KEY, FINGERPRINT, CODEC, RAW_BYTES, len(payload), known)


def reason(buffer: Buffer, size: int) -> str:
    """Why it is refused. Fails if it is not, or with another exception."""
    with pytest.raises(BadObject) as refused:
        objects.check(buffer, size, KEY, FINGERPRINT, CODEC, RAW_BYTES)
    return refused.value.reason


def test_what_was_sealed_is_found_and_the_rest_of_the_buffer_untouched() -> None:
    payload = np.random.default_rng(2).bytes(1000)
    buffer, size = sealed(payload, room=64)
    assert size == HEADER_BYTES + 1000
    assert objects.check(buffer, size, KEY, FINGERPRINT, CODEC, RAW_BYTES) == 1000
    assert buffer[HEADER_BYTES:size].tobytes() == payload
    assert (buffer[size:] == 0xA5).all()


def test_a_digest_that_is_known_makes_the_same_object_as_one_that_is_not() -> None:
    known, size = sealed()
    unknown = known.copy()
    unknown[:HEADER_BYTES] = 0
    assert objects.seal(unknown, KEY, FINGERPRINT, CODEC, RAW_BYTES, size - HEADER_BYTES) == size
    assert np.array_equal(known, unknown)


def test_the_format_is_what_the_documentation_of_the_module_says() -> None:
    """Other versions and programs read it: a change needs another VERSION."""
    buffer, _ = sealed()
    head = buffer[:HEADER_BYTES].tobytes()
    assert HEADER_BYTES == 128
    assert head[:8] == b"VCKV" + (1).to_bytes(2, "little") + CODEC.to_bytes(2, "little")
    assert [int.from_bytes(head[at : at + 8], "little") for at in (8, 16)] == [RAW_BYTES, PAYLOAD_BYTES]
    assert (head[32:58], head[64:96]) == (KEY, FINGERPRINT)
    text = KEY.hex()
    assert objects.name(KEY) == f"vcache1/{text[:16]}.0/{text[16:]}"
    assert objects.name(KEY, 31) == f"vcache1/{text[:16]}.1f/{text[16:]}"


def test_no_flipped_bit_of_the_header_is_accepted() -> None:
    buffer, size = sealed()
    reasons = set()
    for bit in range(8 * HEADER_BYTES):
        buffer[bit // 8] ^= 1 << (bit % 8)
        reasons.add(reason(buffer, size))
        buffer[bit // 8] ^= 1 << (bit % 8)
    assert reasons == {"magic", "version", "header"}
    objects.check(buffer, size, KEY, FINGERPRINT, CODEC, RAW_BYTES)


@given(st.integers(0, 8 * PAYLOAD_BYTES - 1), st.integers(0, 255))
def test_no_flipped_bit_of_the_payload_is_accepted(bit: int, also: int) -> None:
    buffer, size = sealed()
    buffer[HEADER_BYTES + bit // 8] ^= 1 << (bit % 8)
    assert reason(buffer, size) == "checksum"
    buffer[HEADER_BYTES + also] ^= 0xFF
    assert reason(buffer, size) == "checksum"


@pytest.mark.parametrize(
    "got",
    [-800, 0, 1, HEADER_BYTES - 1, HEADER_BYTES, HEADER_BYTES + PAYLOAD_BYTES - 1, HEADER_BYTES + PAYLOAD_BYTES + 1, 10**12],
)
def test_a_truncated_or_longer_object_is_refused(got: int) -> None:
    buffer, _ = sealed()
    assert reason(buffer, got) == "length"


def test_a_torn_object_is_refused() -> None:
    """The first part of one writer, the rest of another: seen with a store that timed out (model_spec/mooncake.md, section 5)."""
    first, size = sealed(b"a" * 5000)
    second, _ = sealed(b"b" * 5000)
    torn = np.concatenate((first[:2000], second[2000:]))
    assert reason(torn, size) == "checksum"


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        ({"key": ChunkKey(bytes(KEY_BYTES))}, "key"),
        ({"fingerprint": bytes(32)}, "fingerprint"),
        ({"codec_id": CODEC + 1}, "codec"),
        ({"raw_bytes": RAW_BYTES + 1}, "length"),
    ],
)
def test_a_whole_object_of_something_else_is_refused(of: dict[str, object], expected: str) -> None:
    buffer, size = sealed()
    there: dict[str, object] = {"key": KEY, "fingerprint": FINGERPRINT, "codec_id": CODEC, "raw_bytes": RAW_BYTES}
    objects.seal(buffer, **(there | of), payload_bytes=PAYLOAD_BYTES)  # type: ignore[arg-type]
    assert reason(buffer, size) == expected


@given(st.binary(max_size=400), st.booleans())
def test_garbage_is_refused(garbage: bytes, like_ours: bool) -> None:
    buffer = np.frombuffer(b"VCKV\x01\x00" * like_ours + garbage, np.uint8)
    assert reason(buffer, buffer.nbytes) in {"length", "magic", "version", "header"}


@pytest.mark.parametrize("payload_bytes", [-1, 100])
def test_a_payload_that_does_not_fit_is_not_sealed(payload_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"no object of {payload_bytes} B"):
        objects.seal(np.zeros(HEADER_BYTES + 99, np.uint8), KEY, FINGERPRINT, CODEC, RAW_BYTES, payload_bytes)


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
