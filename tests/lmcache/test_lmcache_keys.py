"""LMCache's keys to ours: equal exactly where the chunk is the same one."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

from vcache_backend.transfer.keys import TaggedHashKeys
from vcache_backend.transfer.layout import Namespace

HERE = Namespace(bytes(range(32)))
Tags = tuple[tuple[str, Any], ...] | None
HASHES = [0, 1, -1, 127, 128, -129, 255, 256, 2**63, -(2**63), 2**64 - 1, 2**255]
ODD = ["", "b", 1, "1", True, 1.0, None, "None", "int 1", "oint 1", "\ud800"]
TAGGED: list[Tags] = [None, *((("a", value),) for value in ODD), (("", "a"),), (("ab", ""),)]
TAGGED += [(("a", "b"), ("c", "d")), (("a", "d"), ("c", "b")), (("a", "bsc"), ("d", ""))]


def make(*hashes: int, tags: Tags = None, rank: int = 0) -> list[bytes]:
    return list(TaggedHashKeys(HERE, rank).of_request(list(hashes), tags))


def test_the_bytes_that_are_hashed_stay_what_they_are() -> None:
    """A pool outlives its workers: another text for the same chunk would lose it."""
    tags = bytes.fromhex("0000000200000006") + b"vcache" + bytes.fromhex("00000002") + b"s-"
    text = tags + (-5).to_bytes(1, "big", signed=True)
    hashed = blake2b(text, key=HERE.fingerprint, digest_size=16, person=b"vcache-lmcache-1")
    expected = HERE.prefix + hashed.digest() + b"\0\1"
    assert make(-5, tags=(("vcache", "-"),), rank=1) == [expected]


def test_different_hashes_and_different_tags_are_different_chunks() -> None:
    """Whatever was made before. The order of tags makes no difference, nor does having none."""
    assert len(set(make(*HASHES))) == len(HASHES)
    keys = TaggedHashKeys(HERE, 0)
    together = [keys.of_request([7], tags)[0] for tags in TAGGED]
    assert len(set(together)) == len(TAGGED)
    assert together == [make(7, tags=tags)[0] for tags in TAGGED]
    assert make(7, tags=(("a", "b"), ("c", "d"))) == make(7, tags=(("c", "d"), ("a", "b")))
    assert make(7, tags=()) == make(7)
