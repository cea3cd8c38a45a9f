"""Sessions with engine.checksum on: what is stored, what a load does with a chunk that changed, and
failures of the looking itself.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
from engine_cases import Copied, Node
from engine_cases import fresh as here
from kv_cases import CHUNK, Cache, layout_of, places, prompt
from processes import SECONDS, eventually
from torch import Tensor

from vcache_backend.errors import ChecksumError, VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Refusal
from vcache_backend.transfer import checked, session
from vcache_backend.transfer.checked import CheckedScatter
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.layout import checked_layout
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool import checksum
from vcache_backend.vram_pool.checksum import Sealer, sealed_bytes
from vcache_backend.vram_pool.copier import Mark

__all__ = ["here"]


class Side:
    """A session with engine.checksum on, and its KV cache."""

    def __init__(self, here: Node, device: str, segment_bytes: int = 0) -> None:
        self.cache = Cache()
        self.session = session.Session(
            here.config(device, segment_bytes, checksum=True), layout_of(self.cache)
        )
        here.undo.callback(self.session.close)
        self.kv = self.session.bind(self.cache.tensors)
        self.hasher = TokenHasher(self.session.namespace, CHUNK)

    def put(self, tokens: Tensor, new: int | None = None, flush: bool = True) -> list[ChunkKey]:
        """Store all of it, of which `new` chunks (None: all) are not there yet."""
        keys, slots = self.hasher.keys(tokens), places(self.cache.sizes, len(tokens))
        self.cache.fill(tokens, slots)
        pending = store(self.session, self._at(slots), keys, range(len(keys)))
        assert pending is not None
        assert len(pending.keys) == (len(keys) if new is None else new)
        assert not flush or self.session.flush(SECONDS)
        return keys

    def load(self, tokens: Tensor) -> Load:
        """All of it into poisoned blocks, to its end; the bytes that count are those of
        `tokens`.
        """
        self.cache.poison()
        slots = places(self.cache.sizes, len(tokens), 1)
        load = Load(self.session, self._at(slots), self.hasher.keys(tokens))
        held = load.run(SECONDS) * CHUNK
        assert load.cause or (held == len(tokens) and self.cache.holds_only(tokens, slots))
        return load

    def begin(self, tokens: Tensor, mark: Mark) -> Load:
        """One of all of it, behind a mark."""
        return Load(
            self.session,
            self._at(places(self.cache.sizes, len(tokens), 1)),
            self.hasher.keys(tokens),
            mark=mark,
        )

    def _at(self, slots: Tensor) -> SlotPlaces:
        return SlotPlaces(self.kv, CHUNK, slots.numpy(), range(0, len(slots), CHUNK))

    def memory(self, keys: list[ChunkKey]) -> list[Tensor]:
        """The slots of these chunks, to be spoilt."""
        lease = self.session.leases.acquire(keys)
        assert lease is not None
        self.session.leases.release(lease)
        return [view.tensor for view in self.session.views(lease.locations)]

    @property
    def failures(self) -> dict[str, int]:
        failures: dict[str, int] = self.session.stats.snapshot()["failures"]
        return failures


@pytest.fixture
def writer(here: Node) -> Side:
    return Side(here, "host:a", 1 << 20)


@pytest.fixture
def reader(here: Node, writer: Side) -> Side:
    return Side(here, "host:b")


def test_chunks_with_checksums_are_stored_and_loaded(writer: Side, reader: Side) -> None:
    keys = writer.put(prompt(4 * CHUNK))
    assert reader.load(prompt(4 * CHUNK)).cause == reader.load(prompt(2 * CHUNK)).cause == ""
    assert {len(slot) for slot in reader.memory(keys)} == {
        sealed_bytes(reader.kv.chunk_bytes(CHUNK))
    }
    assert reader.failures == {}


@pytest.mark.parametrize("at", [0, 1001, -1], ids=["first byte", "middle", "trailer"])
def test_a_byte_that_changed_in_the_pool_fails_the_load_and_the_chunk_leaves(
    writer: Side, reader: Side, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = prompt(4 * CHUNK)
    keys = writer.put(tokens)
    writer.memory(keys)[2][at] ^= 0x10
    load = reader.load(tokens)
    assert (load.cause, load.loaded) == ("checksum", 0)
    assert reader.failures == {"checksum": 1}
    assert f"chunk {keys[2].hex()} changed after its commit" in caplog.text
    eventually(lambda: reader.session.lookup(keys) == 2)
    assert reader.session.client.contains(keys) == [True, True, False, True]
    assert reader.load(prompt(2 * CHUNK)).cause == ""
    assert writer.put(tokens, new=1) == keys
    assert reader.load(tokens).cause == ""


def test_chunks_that_took_each_others_places_are_seen(writer: Side, reader: Side) -> None:
    first, second = writer.memory(writer.put(prompt(2 * CHUNK)))
    kept = first.clone()
    first.copy_(second)
    second.copy_(kept)
    assert reader.load(prompt(2 * CHUNK)).cause == "checksum"
    assert reader.failures == {"checksum": 2}


def test_a_commit_waits_for_the_checksums(
    here: Node, reader: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()

    class Slow(Sealer):
        def seal(self, *arguments: Any) -> Any:
            super().seal(*arguments)
            return Copied(written)

    monkeypatch.setattr(session, "make_sealer", lambda device: Slow(None))
    slow = Side(here, "host:a", 1 << 20)
    keys = slow.put(prompt(CHUNK), flush=False)
    assert not slow.session.flush(0.2)
    assert reader.session.lookup(keys) == 0
    written.set()
    assert slow.session.flush(SECONDS)
    assert reader.load(prompt(CHUNK)).cause == ""


def test_slots_whose_checksums_failed_while_they_were_written_are_not_given_to_others(
    here: Node, reader: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Sealer):
        def seal(self, *arguments: Any) -> Any:
            raise VCacheError("the device is gone")

    monkeypatch.setattr(session, "make_sealer", lambda device: Broken(None))
    broken = Side(here, "host:a", 1 << 20)
    with pytest.raises(VCacheError, match="the device is gone"):
        broken.put(prompt(CHUNK))
    assert broken.session.flush(SECONDS)
    again = reader.session.client.reserve(broken.hasher.keys(prompt(CHUNK)), 4096)
    assert again.slots == [Refusal.BUSY]


@pytest.mark.parametrize("ends", [False, True], ids=["goes on", "ends"])
def test_a_scatter_whose_slots_cannot_be_looked_at_is_over_when_the_error_comes(
    here: Node, writer: Side, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    class Broken(Sealer):
        def verify(self, *arguments: Any) -> Any:
            raise VCacheError("the device is gone")

    finished = threading.Event()
    monkeypatch.setattr(session, "make_sealer", lambda device: Broken(None))
    monkeypatch.setattr(checked, "STUCK_SECONDS", 0.1)
    broken = Side(here, "host:b")
    monkeypatch.setattr(broken.session.copier, "scatter", lambda *arguments: Copied(finished))
    writer.put(prompt(CHUNK))
    if ends:
        finished.set()
    assert broken.load(prompt(CHUNK)).cause == "copy"
    assert broken.failures == {"load: VCacheError" if ends else "load: RuntimeError": 1, "copy": 1}


def test_a_scatter_is_over_once_its_slots_were_looked_at() -> None:
    copied, looked, told = threading.Event(), threading.Event(), list[list[int]]()
    both = CheckedScatter(
        Copied(copied), checksum.Look(Copied(looked), lambda: [1, 3]), told.append
    )
    for one, other in ((copied, looked), (looked, copied)):
        one.set()
        other.clear()
        assert not both.done()
        assert not both.wait(0)
    assert not told
    copied.set()
    for ask in (both.done, lambda: both.wait(1), both.done):
        with pytest.raises(ChecksumError, match="2 chunks do not fit"):
            ask()
    assert told == [[1, 3]]


def test_those_with_checksums_and_those_without_share_nothing(here: Node) -> None:
    config, layout = here.config("host:a"), layout_of(Cache())
    with_checksum = here.config("host:a", checksum=True)
    assert checked_layout(config, layout).namespace() == layout.namespace()
    assert checked_layout(with_checksum, layout).extra == {"checksum": checksum.NAME}
    assert checked_layout(with_checksum, layout).namespace() != layout.namespace()
    assert checked_layout(config, checked_layout(with_checksum, layout)) == layout
