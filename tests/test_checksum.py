"""Checksums of chunks: the construction, what it sees, the kernel beside its reference, and engines that use it."""

# torch.cuda's streams have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import threading
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from engine_cases import CHUNK, SMALL, Cache, Copied, Node, get, layout_of, node, places, prompt, put
from processes import SECONDS, eventually
from test_kernels import _loops_under_numpy_2_4  # noqa: F401 - a fixture
from torch import Tensor

from vcache_backend.errors import ChecksumError, LayoutError, VCacheError
from vcache_backend.metadata_server.messages import ChunkKey, Refusal
from vcache_backend.transfer import session
from vcache_backend.transfer.checked import CheckedScatter
from vcache_backend.transfer.keys import TokenHasher
from vcache_backend.transfer.layout import checked_layout
from vcache_backend.transfer.load import Load
from vcache_backend.transfer.places import SlotPlaces
from vcache_backend.transfer.store import store
from vcache_backend.vram_pool import checksum, kernels
from vcache_backend.vram_pool.checksum import COLUMNS, TRAILER_BYTES, CudaSealer, HostSealer, sealed_bytes
from vcache_backend.vram_pool.copier import Completion, Finished
from vcache_backend.vram_pool.cuda_copier import CudaCompletion
from vcache_backend.vram_pool.cuda_driver import load
from vcache_backend.vram_pool.slots import SlotView

PIECE = COLUMNS * 4
COMPILED = isinstance(checksum.sum_kernel, triton.JITFunction)
DEVICE = pytest.mark.parametrize(
    "device",
    [
        pytest.param("cpu", marks=pytest.mark.skipif(COMPILED, reason="needs TRITON_INTERPRET=1, which GPU runs do not set")),
        pytest.param("cuda", marks=pytest.mark.gpu(count=1)),
    ],
)
SIZES = [8, 24, PIECE - 8, PIECE, PIECE + 8, 5 * PIECE + 4096, 7 * PIECE]
HOST, DONE = HostSealer(), Finished(0.0)


def key(number: int) -> bytes:
    return b"namespac" + number.to_bytes(16, "big") + b"\0\1"


def noise(nbytes: int, count: int = 1, seed: int = 0) -> list[Tensor]:
    """Slots of chunks of `nbytes`, with room for a trailer."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (sealed_bytes(nbytes),), dtype=torch.uint8, generator=generator) for _ in range(count)]


def views(slots: list[Tensor]) -> list[SlotView]:
    return [SlotView.over(slot, local=True) for slot in slots]


def sealed(nbytes: int) -> Tensor:
    slot = noise(nbytes)[0]
    HOST.seal(views([slot]), [key(0)], nbytes, DONE)
    return slot


def fits(*slots: Tensor, nbytes: int, number: int = 0) -> bool:
    keys = [key(number + i) for i in range(len(slots))]
    return HOST.verify(views(list(slots)), keys, nbytes, DONE).bad() == []


def plain_trailer(chunk: bytes, chunk_key: bytes) -> bytes:
    """The trailer from the module's text, in integers."""

    def output(salt: int, index: int) -> int:
        z = (salt + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        return (z ^ z >> 31) | 1

    seed = blake2b(chunk_key + len(chunk).to_bytes(8, "little"), digest_size=16, person=b"vcache-check-1").digest()
    lanes = []
    for lane, salts in enumerate([(0x243F6A8885A308D3, 0xA4093822299F31D0), (0x13198A2E03707344, 0x082EFA98EC4E6C89)]):
        total = int.from_bytes(seed[8 * lane : 8 * lane + 8], "little")
        for i in range(len(chunk) // 4):
            word = int.from_bytes(chunk[4 * i : 4 * i + 4], "little")
            total += output(salts[0], i // 4096) * output(salts[1], i % 4096) * word
        lanes.append((total % 2**64).to_bytes(8, "little"))
    return b"".join(lanes)


# ---- the construction


@pytest.mark.parametrize("nbytes", SIZES)
def test_the_trailer_is_the_one_of_plain_integers(nbytes: int) -> None:
    slot = noise(nbytes)[0]
    chunk = bytes(slot[:nbytes].numpy())
    HOST.seal(views([slot]), [key(5)], nbytes, DONE)
    assert bytes(slot[:nbytes].numpy()) == chunk
    assert bytes(slot[-TRAILER_BYTES:].numpy()) == plain_trailer(chunk, key(5))


def test_the_construction_stays_what_it_is_called() -> None:
    """Two versions of this package share chunks if NAME is equal: whoever changes these bytes changes the name."""
    slot = torch.arange(sealed_bytes(PIECE + 64) // 8).view(torch.uint8)
    HOST.seal(views([slot]), [key(1)], PIECE + 64, DONE)
    assert (checksum.NAME, bytes(slot[-TRAILER_BYTES:].numpy()).hex()) == ("ml64x2-1", "2ee6c1bc5eb9917294b77076814b40d1")


@pytest.mark.parametrize(("nbytes", "room"), [(8, 32), (16, 32), (24, 48), (4096, 4112)])
def test_a_trailer_is_aligned_behind_its_chunk(nbytes: int, room: int) -> None:
    assert sealed_bytes(nbytes) == room


# ---- what it sees


def test_every_flipped_bit_of_a_slot_is_seen() -> None:
    nbytes = 1024
    slot = sealed(nbytes)
    assert fits(slot, nbytes=nbytes)
    raw = slot.numpy()
    for at in range(len(raw)):
        for bit in range(8):
            raw[at] ^= 1 << bit
            assert not fits(slot, nbytes=nbytes), f"bit {bit} of byte {at}"
            raw[at] ^= 1 << bit
    assert fits(slot, nbytes=nbytes)


def test_two_flipped_bits_are_seen_wherever_they_are() -> None:
    """The highest bits of words are where a sum modulo 2^64 is weakest: over 64-bit words no two of them would be seen."""
    nbytes = 3 * PIECE
    slot = sealed(nbytes)
    words = slot[:nbytes].view(torch.int32).numpy()
    random = np.random.default_rng(1)
    for bit in (0, 15, 31):
        mask = np.array([1 << bit], dtype=np.uint32).view(np.int32)
        for _ in range(200):
            pair = random.choice(len(words), 2, replace=False)
            words[pair] ^= mask
            assert not fits(slot, nbytes=nbytes), f"bit {bit} of words {pair}"
            words[pair] ^= mask
    assert fits(slot, nbytes=nbytes)


@pytest.mark.parametrize("size", [4, 8, 64, 4096, PIECE])
def test_swapped_words_and_pages_are_seen(size: int) -> None:
    nbytes = 4 * PIECE
    slot = sealed(nbytes)
    parts = slot[:nbytes].view(-1, size)
    for first, second in [(0, 1), (0, len(parts) - 1), (1, len(parts) // 2)]:
        for _ in range(2):
            assert fits(slot, nbytes=nbytes)
            parts[[first, second]] = parts[[second, first]]
            assert not fits(slot, nbytes=nbytes)
            parts[[first, second]] = parts[[second, first]]


def test_another_key_is_seen_to_its_rank() -> None:
    slot = sealed(4096)
    assert not fits(slot, nbytes=4096, number=1)
    other_rank = key(0)[:-1] + b"\2"
    assert HOST.verify(views([slot]), [other_rank], 4096, DONE).bad() == [0]


def test_another_length_is_seen() -> None:
    """A chunk that ends in zeros has the sums of the shorter one."""
    slot = torch.zeros(sealed_bytes(64), dtype=torch.uint8)
    HOST.seal(views([slot]), [key(0)], 64, DONE)
    slot[32:48] = slot[64:80]
    assert not fits(slot, nbytes=32)


@pytest.mark.parametrize("value", [0, 0xFF, 0xA5])
def test_a_slot_of_one_value_is_seen(value: int) -> None:
    slot = sealed(4096)
    slot[:4096] = value
    assert not fits(slot, nbytes=4096)
    slot[:] = value
    assert not fits(slot, nbytes=4096)


def test_bad_slots_are_named_among_good_ones() -> None:
    slots, keys = noise(4096, 5), [key(i) for i in range(5)]
    HOST.seal(views(slots), keys, 4096, DONE)
    slots[1][7] ^= 1
    slots[4][4095] ^= 128
    assert HOST.verify(views(slots), keys, 4096, DONE).bad() == [1, 4]
    assert HOST.verify([], [], 4096, DONE).bad() == []


# ---- what it refuses


@pytest.mark.parametrize("nbytes", [0, -8, 4, 12, checksum.MAX_BYTES + 8])
def test_a_chunk_of_odd_size_is_refused(nbytes: int) -> None:
    with pytest.raises(LayoutError, match="expected a multiple of 8 up to"):
        HOST.seal([], [], nbytes, DONE)


def test_a_slot_without_room_for_the_trailer_is_refused_and_nothing_is_written() -> None:
    slots = noise(4096, 2)
    before = [slot.clone() for slot in slots]
    with pytest.raises(LayoutError, match="a chunk with its checksum needs 4,112 B but slot 1 has 4,096 B"):
        HOST.seal(views([slots[0], slots[1][:4096]]), [key(0), key(1)], 4096, DONE)
    with pytest.raises(LayoutError, match="slot 0 at 0x[0-9a-f]+ is not aligned to 16 B"):
        HOST.seal(views([slots[0][8:]]), [key(0)], 4080, DONE)
    with pytest.raises(LayoutError, match="2 slots were given with 1 keys"):
        HOST.verify(views(slots), [key(0)], 4096, DONE)
    assert all(torch.equal(slot, was) for slot, was in zip(slots, before, strict=True))


# ---- the kernel


def run_kernel(slots: list[Tensor], keys: list[bytes], nbytes: int, device: str, ctas: int, *, seal: bool) -> Tensor:
    """(slots, 2) int64: the lanes it leaves in the table."""
    rows = np.empty((len(slots), 3), dtype=np.int64)
    checksum.fill_table(views(slots), keys, nbytes, rows)
    table = torch.from_numpy(rows).to(device)
    checksum.launch(table, len(slots), nbytes, seal=seal, ctas=ctas)
    return table.cpu()[:, 1:]


@pytest.mark.parametrize("nbytes", SIZES)
@pytest.mark.parametrize("ctas", [1, 2, 7, 64])
@DEVICE
def test_the_kernel_equals_the_reference(nbytes: int, ctas: int, device: str) -> None:
    ours, keys = noise(nbytes, 3), [key(i) for i in range(3)]
    theirs = [slot.to(device, copy=True) for slot in ours]
    HOST.seal(views(ours), keys, nbytes, DONE)
    run_kernel(theirs, keys, nbytes, device, ctas, seal=True)
    assert all(torch.equal(mine, right.cpu()) for mine, right in zip(ours, theirs, strict=True))
    assert not run_kernel(theirs, keys, nbytes, device, ctas, seal=False).any()


@DEVICE
def test_the_kernel_names_bad_slots_and_writes_nothing(device: str) -> None:
    nbytes = 2 * PIECE + 4096
    slots, keys = noise(nbytes, 6), [key(i) for i in range(6)]
    HOST.seal(views(slots), keys, nbytes, DONE)
    slots[0][nbytes - 1] ^= 128
    slots[2][PIECE] ^= 1
    slots[3][-1] ^= 4
    slots[5].zero_()
    there = [slot.to(device, copy=True) for slot in slots]
    differ = run_kernel(there, keys, nbytes, device, 4, seal=False).any(1)
    assert differ.tolist() == [True, False, True, True, False, True]
    assert all(torch.equal(mine.cpu(), slot) for mine, slot in zip(there, slots, strict=True))


@pytest.mark.parametrize("count", [1, 128, 129])
@DEVICE
def test_any_number_of_slots_is_sealed(count: int, device: str) -> None:
    ours, keys = noise(24, count), [key(i) for i in range(count)]
    theirs = [slot.to(device, copy=True) for slot in ours]
    HOST.seal(views(ours), keys, 24, DONE)
    run_kernel(theirs, keys, 24, device, 16, seal=True)
    assert all(torch.equal(mine, right.cpu()) for mine, right in zip(ours, theirs, strict=True))


# ---- a GPU's sealer


def behind(stream: torch.cuda.Stream) -> Completion:
    """A copy that is over once `stream` has done what it holds."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return CudaCompletion(torch.device("cuda", 0), event, event, None, kernels.Table(1, torch.device("cuda", 0), load()), [])


def cuda_sealer() -> CudaSealer:
    made = CudaSealer(0)
    made.prepare()
    torch.cuda.synchronize()
    return made


def bad(look: checksum.Look) -> list[int]:
    assert look.over.wait(10)
    return look.bad()


@pytest.mark.gpu(count=1)
def test_a_gpus_sealer_and_the_hosts_agree() -> None:
    nbytes = (4 << 20) + 24
    slots, keys = noise(nbytes, 40), [key(i) for i in range(40)]
    there, sealer = [slot.cuda() for slot in slots], cuda_sealer()
    assert sealer.seal(views(there), keys, nbytes, DONE).wait(10)
    HOST.seal(views(slots), keys, nbytes, DONE)
    assert all(torch.equal(mine.cpu(), slot) for mine, slot in zip(there, slots, strict=True))
    there[3][17] ^= 2
    there[39][-1] ^= 1
    torch.cuda.synchronize()
    assert bad(sealer.verify(views(there), keys, nbytes, DONE)) == [3, 39]


@pytest.mark.gpu(count=1)
def test_a_gpus_sealer_comes_after_the_copy() -> None:
    nbytes = 1 << 20
    slots, keys, side = [slot.cuda() for slot in noise(nbytes, 4)], [key(i) for i in range(4)], torch.cuda.Stream()
    slots[0].fill_(0)  # the first launch of a kernel waits for the device
    sealer = cuda_sealer()
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
        for i, slot in enumerate(slots):
            slot.fill_(i + 1)
    completion = sealer.seal(views(slots), keys, nbytes, behind(side))
    look = sealer.verify(views(slots), keys, nbytes, completion)
    assert not completion.done()
    assert not look.over.done()
    assert bad(look) == []
    assert completion.done()
    assert fits(*(slot.cpu() for slot in slots), nbytes=nbytes)


@pytest.mark.gpu(count=1)
def test_tables_of_seals_that_wait_in_line_are_not_overwritten() -> None:
    slots = [slot.cuda() for slot in noise(4096, 64)]
    side, sealer = torch.cuda.Stream(), cuda_sealer()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
    copy = behind(side)
    seals = [sealer.seal(views([slot]), [key(i)], 4096, copy) for i, slot in enumerate(slots)]
    looks = [sealer.verify(views([slot]), [key(i)], 4096, seals[i]) for i, slot in enumerate(slots)]
    assert [bad(look) for look in looks] == [[]] * 64


# ---- chunks that go through a pool


class Side:
    """A session with engine.checksum on, and its KV cache."""

    def __init__(self, here: Node, device: str, segment_bytes: int = 0) -> None:
        self.cache = Cache()
        self.session = session.Session(here.config(device, segment_bytes, checksum=True), layout_of(self.cache))
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
        """All of it into poisoned blocks, to its end; the bytes that count are those of `tokens`."""
        self.cache.poison()
        slots = places(self.cache.sizes, len(tokens), 1)
        load = Load(self.session, self._at(slots), self.hasher.keys(tokens))
        held = load.run(SECONDS) * CHUNK
        assert load.cause or (held == len(tokens) and self.cache.holds_only(tokens, slots))
        return load

    def _at(self, slots: Tensor) -> SlotPlaces:
        return SlotPlaces(self.kv, CHUNK, slots.numpy(), range(0, len(slots), CHUNK))

    def memory(self, keys: list[ChunkKey]) -> list[Tensor]:
        """The slots of these chunks, to be spoilt."""
        lease = self.session.lease(keys)
        assert lease is not None
        self.session.release(lease)
        return [view.tensor for view in self.session.views(lease.locations)]

    @property
    def failures(self) -> dict[str, int]:
        failures: dict[str, int] = self.session.stats.snapshot()["failures"]
        return failures


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Node]:
    with node(tmp_path) as made:
        made.serve()
        yield made


@pytest.fixture
def writer(here: Node) -> Side:
    return Side(here, "host:a", 1 << 20)


@pytest.fixture
def reader(here: Node, writer: Side) -> Side:
    return Side(here, "host:b")


def test_chunks_with_checksums_are_stored_and_loaded(writer: Side, reader: Side) -> None:
    keys = writer.put(prompt(4 * CHUNK))
    assert reader.load(prompt(4 * CHUNK)).cause == reader.load(prompt(2 * CHUNK)).cause == ""
    assert {len(slot) for slot in reader.memory(keys)} == {sealed_bytes(reader.kv.chunk_bytes(CHUNK))}
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


def test_a_commit_waits_for_the_checksums(here: Node, reader: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()

    class Slow(HostSealer):
        def seal(self, *arguments: Any) -> Any:
            super().seal(*arguments)
            return Copied(written)

    monkeypatch.setattr(session, "make_sealer", lambda device, config: Slow())
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
    class Broken(HostSealer):
        def seal(self, *arguments: Any) -> Any:
            raise VCacheError("the device is gone")

    monkeypatch.setattr(session, "make_sealer", lambda device, config: Broken())
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
    class Broken(HostSealer):
        def verify(self, *arguments: Any) -> Any:
            raise VCacheError("the device is gone")

    finished = threading.Event()
    monkeypatch.setattr(session, "make_sealer", lambda device, config: Broken())
    monkeypatch.setattr(session, "_STUCK_SECONDS", 0.1)
    broken = Side(here, "host:b")
    monkeypatch.setattr(broken.session.copier, "scatter", lambda *arguments: Copied(finished))
    writer.put(prompt(CHUNK))
    if ends:
        finished.set()
    assert broken.load(prompt(CHUNK)).cause == "copy"
    assert broken.failures == {"load: VCacheError" if ends else "load: RuntimeError": 1, "copy": 1}


def test_a_scatter_is_over_once_its_slots_were_looked_at() -> None:
    copied, looked, told = threading.Event(), threading.Event(), list[list[int]]()
    both = CheckedScatter(Copied(copied), checksum.Look(Copied(looked), lambda: [1, 3]), told.append)
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


def test_engines_with_checksums_miss_what_changed_and_store_it_again(here: Node) -> None:
    layout, tokens = layout_of(Cache()), prompt(4 * CHUNK)
    writer = here.engine("host:a", 1 << 20, layout, checksum=True)
    reader = here.engine("host:b", 0, layout, checksum=True)
    put(writer, Cache(), tokens)
    assert get(reader, Cache(), tokens) == len(tokens)
    spoiler = Side(here, "host:b")
    assert spoiler.hasher.keys(tokens) == reader.keys(tokens)
    spoiler.memory(reader.keys(tokens))[1][77] ^= 2
    mask = reader.retrieve(tokens, None, Cache().tensors, places(SMALL, len(tokens)))
    assert not mask.any()
    assert reader.get_stats()["failures"] == {"checksum": 1}
    eventually(lambda: reader.lookup(tokens) == CHUNK)
    put(writer, Cache(), tokens)
    assert get(reader, Cache(), tokens) == len(tokens)
