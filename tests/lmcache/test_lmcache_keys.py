"""LMCache's keys to ours: equal exactly where the chunk is the same one."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from vcache_backend.transfer.keys import TaggedHashKeys
from vcache_backend.transfer.layout import Namespace

HERE = Namespace(bytes(range(32)))


@dataclass
class Key:
    """The two fields that are read of LMCache's."""

    chunk_hash: int
    tags: tuple[tuple[str, Any], ...] | None = None


def make(*keys: Key, rank: int = 0) -> list[bytes]:
    made = TaggedHashKeys(HERE, rank)
    return [name for key in keys for name in made.of_request([key.chunk_hash], key.tags)]


def test_the_bytes_that_are_hashed_stay_what_they_are() -> None:
    """A pool outlives its workers: another text for the same chunk would lose it."""
    tags = bytes.fromhex("0000000200000006") + b"vcache" + bytes.fromhex("00000002") + b"s-"
    text = tags + (-5).to_bytes(1, "big", signed=True)
    hashed = blake2b(text, key=HERE.fingerprint, digest_size=16, person=b"vcache-lmcache-1")
    expected = HERE.prefix + hashed.digest() + b"\0\1"
    assert make(Key(-5, (("vcache", "-"),)), rank=1) == [expected]
    assert make(Key(5))[0].hex() == "0001020304050607fec3ebe9ca780f5cd6fcb2ecd1a642a10000"


HASHES = [0, 1, -1, 127, 128, -129, 255, 256, 2**63, -(2**63), 2**64 - 1, 2**255]


def test_hashes_of_either_sign_and_any_size_are_different_chunks() -> None:
    assert len(set(make(*map(Key, HASHES)))) == len(HASHES)


ODD = ["", "b", 1, "1", True, 1.0, None, "None", "int 1", "oint 1", "\ud800"]
TAGGED: list[tuple[tuple[str, Any], ...] | None] = [
    None,
    *((("a", value),) for value in ODD),
    (("", "a"),),
    (("ab", ""),),
    (("a", "b"), ("c", "d")),
    (("a", "d"), ("c", "b")),
    (("a", "bsc"), ("d", "")),
]


def test_different_tags_are_different_chunks_in_one_call_and_in_many() -> None:
    together = make(*(Key(7, tags) for tags in TAGGED))
    assert len(set(together)) == len(TAGGED)
    assert together == [make(Key(7, tags))[0] for tags in TAGGED]
    assert make(*(Key(7, tags) for tags in reversed(TAGGED)))[::-1] == together


def test_the_order_of_tags_and_having_none_make_no_difference() -> None:
    assert make(Key(7, (("a", "b"), ("c", "d")))) == make(Key(7, (("c", "d"), ("a", "b"))))
    assert make(Key(7, ())) == make(Key(7))
