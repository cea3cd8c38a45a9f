"""What a reader may conclude by itself: a copy that is over within the grace of its lease held;
after it the server is asked.
"""

from __future__ import annotations

import threading
import time

import pytest
import torch
from engine_cases import Copied, Node, here, put
from kv_cases import CHUNK, Cache, layout_of, places, prompt
from processes import HASTY_SECONDS, SECONDS, asked, eventually, hung, hurried

from vcache_backend.errors import VCacheError
from vcache_backend.protocol.messages import GRACE_SECONDS, ChunkKey
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import HostCopier

__all__ = ["here"]


def session_of(here: Node, cache: Cache, copier: HostCopier | None = None) -> Session:
    """A reader's, which lends nothing."""
    session = Session(here.config("host:b"), layout_of(cache), copier=copier)
    here.undo.callback(session.close)
    return session


def keys_of(session: Session, tokens: torch.Tensor) -> list[ChunkKey]:
    return TokenHasher(session.namespace, CHUNK).keys(tokens)


class Reading:
    """A session, and its lease on two chunks."""

    def __init__(self, here: Node, lease_seconds: float = 60.0) -> None:
        self.server, cache = here.serve(lease_seconds=lease_seconds), Cache()
        writer = here.engine("host:a", 2 * cache.chunk_bytes, layout_of(cache))
        put(writer, cache, prompt(2 * CHUNK))
        self.session, self.bystander = session_of(here, cache), here.client()
        self.lease = self.session.leases.acquire(keys_of(self.session, prompt(2 * CHUNK)))
        assert len(self.lease.locations) == 2

    def concluded(self, age: float) -> bool:
        """What is concluded `age` seconds after the lease was given, as far as the reader knows."""
        self.lease.deadline = time.monotonic() - age + self.lease.seconds
        return self.session.leases.verdict(self.lease)

    def answered(self) -> tuple[int, int]:
        """Renewals and releases that the server answered."""
        return asked(self.bystander, "Renew"), asked(self.bystander, "Release")

    def leases(self) -> int:
        return self.bystander.stats().leases


@pytest.fixture
def reading(here: Node) -> Reading:
    return Reading(here)


# ---- within the grace


def test_while_the_server_hangs_the_lease_held_within_the_grace_only(reading: Reading) -> None:
    with hung(reading.server, reading.session.client):
        assert reading.concluded(0.0)
        assert not reading.concluded(GRACE_SECONDS)


def test_the_lease_is_ended_behind_the_reader_s_back(reading: Reading) -> None:
    assert reading.leases() == 1
    assert reading.concluded(0.0)
    reading.session.leases.release(reading.lease)
    assert reading.session.flush(SECONDS)
    assert reading.leases() == 0
    assert reading.answered()[1]


def test_a_lease_for_less_than_the_grace_holds_for_its_time_only(here: Node) -> None:
    seconds = GRACE_SECONDS / 5
    reading = Reading(here, lease_seconds=seconds)
    eventually(lambda: reading.leases() == 0)
    assert not reading.concluded(seconds)


# ---- after it


def test_the_server_s_word_counts_if_it_says_yes(reading: Reading) -> None:
    assert reading.concluded(GRACE_SECONDS)
    assert (reading.leases(), *reading.answered()) == (0, 0, 1)


# ---- a release that waits


def test_a_release_that_another_call_keeps_waiting_too_long_is_not_lost(reading: Reading) -> None:
    client = reading.session.client
    # A call of another thread is under way, for longer than this client's calls wait.
    with client._lock, hurried(client):
        reading.session.leases.release(reading.lease)
        assert not reading.session.flush(2 * HASTY_SECONDS)
    eventually(lambda: reading.leases() == 0)


# ---- leases of loads that come to nothing


class HalfFailing(HostCopier):
    """Its first scatter fails once `failing` is set; another one goes on until `finished` is."""

    def __init__(self) -> None:
        self.failing, self.finished = threading.Event(), threading.Event()
        self.launched = 0

    def scatter(self, *_: object) -> Copied:  # type: ignore[override]
        self.launched += 1
        return Failed(self.failing) if self.launched == 1 else Copied(self.finished)


class Failed(Copied):
    def done(self) -> bool:
        if super().done():
            raise VCacheError("planted")
        return False


def test_a_load_that_failed_is_not_over_while_another_part_may_still_write(here: Node) -> None:
    here.serve(lease_seconds=60.0)
    cache, tokens, copier = Cache(), prompt(4 * CHUNK), HalfFailing()
    put(here.engine("host:a", 4 * cache.chunk_bytes, layout_of(cache)), cache, tokens)
    session, bystander = session_of(here, cache, copier), here.client()
    kv, slots = session.bind(cache.tensors), places(cache.sizes, 4 * CHUNK).numpy()
    where = SlotPlaces(kv, CHUNK, slots, range(0, 4 * CHUNK, CHUNK))
    keys = keys_of(session, tokens)
    load = Load(session, where, keys, lease=session.leases.acquire(keys[:2]))
    assert not load.advance()
    assert copier.launched == 2
    copier.failing.set()
    assert not load.advance()
    copier.finished.set()
    assert load.advance()
    assert (load.loaded, load.cause) == (0, "copy")
    eventually(lambda: bystander.stats().leases == 0)
