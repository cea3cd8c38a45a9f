"""Checksums of chunks: the construction, what it sees, what it refuses, and the order of a GPU's
work.
"""

# torch.cuda's streams have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

from hashlib import blake2b

import pytest
import torch
from torch import Tensor

from vcache_backend.errors import LayoutError
from vcache_backend.vram_pool import checksum, devices
from vcache_backend.vram_pool.checksum import (
    COLUMNS,
    GPU_PIECE,
    TRAILER_BYTES,
    Sealer,
    digest,
    sealed_bytes,
)
from vcache_backend.vram_pool.copier import Completion, Finished
from vcache_backend.vram_pool.cuda_copier import CudaCompletion
from vcache_backend.vram_pool.segment import create, map_segment
from vcache_backend.vram_pool.slots import SlotView

ROW = COLUMNS * 4
SIZES = [8, 24, ROW - 8, ROW, ROW + 8, 5 * ROW + 4096, 7 * ROW]
HOST, DONE = Sealer(None), Finished(0.0)


def key(number: int) -> bytes:
    return b"namespac" + number.to_bytes(16, "big") + b"\0\1"


def noise(nbytes: int, count: int = 1, seed: int = 0) -> list[Tensor]:
    """Slots of chunks of `nbytes`, with room for a trailer."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (sealed_bytes(nbytes),), dtype=torch.uint8, generator=generator)
        for _ in range(count)
    ]


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

    seed = blake2b(
        chunk_key + len(chunk).to_bytes(8, "little"), digest_size=16, person=b"vcache-check-1"
    ).digest()
    lanes = []
    for lane, salts in enumerate(
        [(0x243F6A8885A308D3, 0xA4093822299F31D0), (0x13198A2E03707344, 0x082EFA98EC4E6C89)]
    ):
        total = int.from_bytes(seed[8 * lane : 8 * lane + 8], "little")
        for i in range(len(chunk) // 4):
            word = int.from_bytes(chunk[4 * i : 4 * i + 4], "little", signed=True)
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
    """Two versions of this package share chunks if NAME is equal: whoever changes these bytes
    changes the name.
    """
    slot = (torch.arange(sealed_bytes(ROW + 64) // 8) * -7046029254386353131).view(torch.uint8)
    HOST.seal(views([slot]), [key(1)], ROW + 64, DONE)
    assert (checksum.NAME, bytes(slot[-TRAILER_BYTES:].numpy()).hex()) == (
        "ml64x2-2",
        "09e2f43abb3ff4673fc5aac1ab33c3cd",
    )


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


def test_bad_slots_are_named_among_good_ones() -> None:
    slots, keys = noise(4096, 5), [key(i) for i in range(5)]
    HOST.seal(views(slots), keys, 4096, DONE)
    slots[1][7] ^= 1
    slots[4][4095] ^= 128
    assert HOST.verify(views(slots), keys, 4096, DONE).bad() == [1, 4]
    assert HOST.verify([], [], 4096, DONE).bad() == []


# ---- what it refuses


@pytest.mark.parametrize("nbytes", [0, -8, 4, 12])
def test_a_chunk_of_odd_size_is_refused(nbytes: int) -> None:
    with pytest.raises(LayoutError, match="expected a multiple of 8"):
        HOST.seal([], [], nbytes, DONE)


def test_a_slot_without_room_for_the_trailer_is_refused_and_nothing_is_written() -> None:
    slots = noise(4096, 2)
    before = [slot.clone() for slot in slots]
    with pytest.raises(
        LayoutError, match="a chunk with its checksum needs 4,112 B but slot 1 has 4,096 B"
    ):
        HOST.seal(views([slots[0], slots[1][:4096]]), [key(0), key(1)], 4096, DONE)
    with pytest.raises(LayoutError, match="slot 0 at 0x[0-9a-f]+ is not aligned to 16 B"):
        HOST.seal(views([slots[0][8:]]), [key(0)], 4080, DONE)
    with pytest.raises(LayoutError, match="2 slots were given with 1 keys"):
        HOST.verify(views(slots), [key(0)], 4096, DONE)
    assert all(torch.equal(slot, was) for slot, was in zip(slots, before, strict=True))


def test_a_digest_is_another_one_for_every_byte_and_every_cut() -> None:
    memory = (
        torch.arange(2 * ROW + 24 + 3, dtype=torch.int32)
        .view(torch.uint8)[: 2 * ROW + 24 + 3]
        .clone()
    )
    found = [digest([memory])]
    assert digest([memory.clone()]) == found[0]
    for at in (0, ROW, 2 * ROW + 23, 2 * ROW + 24, len(memory) - 1):
        memory[at] ^= 1
        found.append(digest([memory]))
        memory[at] ^= 1
    first, second = memory[:ROW], memory[ROW:]
    found += [
        digest([first, second]),
        digest([second, first]),
        digest([first]),
        digest([memory[:5]]),
        digest([]),
    ]
    assert len(set(found)) == len(found)


def test_a_slot_that_was_mapped_in_vllms_inference_mode_is_sealed_outside_of_it() -> None:
    with torch.inference_mode():
        slot = noise(4096)[0]
    HOST.seal(views([slot]), [key(0)], 4096, DONE)
    assert fits(slot, nbytes=4096)


# ---- on a GPU


def behind(stream: torch.cuda.Stream) -> Completion:
    """A copy that is over once `stream` has done what it holds."""
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return CudaCompletion(torch.device("cuda", 0), event, event, None)


def cuda_sealer(nbytes: int) -> Sealer:
    made = Sealer(0)
    made.prepare(nbytes)
    torch.cuda.synchronize()
    return made


def bad(look: checksum.Look) -> list[int]:
    assert look.over.wait(10)
    return look.bad()


@pytest.mark.gpu(count=1)
@pytest.mark.parametrize("nbytes", [*SIZES, 4 * GPU_PIECE + ROW + 24])
def test_a_gpu_and_the_host_agree(nbytes: int) -> None:
    slots, keys = noise(nbytes, 5), [key(i) for i in range(5)]
    there, sealer = [slot.cuda() for slot in slots], cuda_sealer(nbytes)
    assert sealer.seal(views(there), keys, nbytes, DONE).wait(10)
    HOST.seal(views(slots), keys, nbytes, DONE)
    assert digest(there) == digest(slots)
    assert all(torch.equal(mine.cpu(), slot) for mine, slot in zip(there, slots, strict=True))
    there[1][nbytes - 1] ^= 2
    there[4][-1] ^= 1
    torch.cuda.synchronize()
    assert bad(sealer.verify(views(there), keys, nbytes, DONE)) == [1, 4]


@pytest.mark.gpu(count=1)
def test_seals_and_looks_come_after_the_copy() -> None:
    nbytes = 1 << 20
    slots, keys, side = (
        [slot.cuda() for slot in noise(nbytes, 4)],
        [key(i) for i in range(4)],
        torch.cuda.Stream(),
    )
    slots[0].fill_(0)  # the first launch of a kernel waits for the device
    sealer = cuda_sealer(nbytes)
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
def test_a_look_does_not_wait_for_a_seal_whose_copy_does() -> None:
    # Each seal is some 13 entries of a queue that holds 1,024: a full one makes the host wait.
    stored, loaded = ([slot.cuda() for slot in noise(4096, 32, seed)] for seed in (1, 2))
    keys, side, sealer = [key(i) for i in range(32)], torch.cuda.Stream(), cuda_sealer(4096)
    assert sealer.seal(views(loaded), keys, 4096, DONE).wait(10)
    with torch.cuda.stream(side):
        torch.cuda._sleep(1_000_000_000)
    seals = [
        sealer.seal(views([slot]), [keys[i]], 4096, behind(side)) for i, slot in enumerate(stored)
    ]
    assert bad(sealer.verify(views(loaded), keys, 4096, DONE)) == []
    assert not seals[0].done()
    assert all(seal.wait(10) for seal in seals)
    assert bad(sealer.verify(views(stored), keys, 4096, DONE)) == []


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("where", ["", "host"])
def test_slots_on_another_gpu_and_in_host_memory_are_sealed_and_looked_at(where: str) -> None:
    """By a thread on the GPU that owns them, as a host would see them."""
    owner, reader = (devices.resolve(where or "auto", f"cuda:{ordinal}") for ordinal in range(2))
    nbytes = 4 * GPU_PIECE + ROW + 24
    room, keys, slots = sealed_bytes(nbytes), [key(i) for i in range(3)], noise(nbytes, 3)
    with create(owner, 3 * room) as owned, map_segment(owned.info, owned.fd, owner) as own:
        own.tensor(0, 3 * room).copy_(torch.cat(slots))
        with map_segment(owned.info, owned.fd, reader) as peer:
            there = [SlotView.over(peer.tensor(i * room, room), local=False) for i in range(3)]
            sealer = Sealer(1)
            assert sealer.seal(there, keys, nbytes, DONE).wait(10)
            HOST.seal(views(slots), keys, nbytes, DONE)
            assert torch.equal(own.tensor(0, 3 * room).cpu(), torch.cat(slots))
            own.tensor(room + 5, 1).add_(1)
            torch.cuda.synchronize(0)
            assert bad(sealer.verify(there, keys, nbytes, DONE)) == [1]
            assert torch.cuda.current_device() == 0
            del there, sealer
