"""Checksums of chunks. They show, when a slot is loaded, that its bytes changed after its commit.

A sealed slot is the chunk, padded to a multiple of 16 bytes, and a trailer of two 64-bit lanes,
little-endian:

    lane = seed + sum over rows r and columns c of R[r] * C[c] * word[r, c]    (modulo 2^64)

The chunk is taken as signed 32-bit words, 4,096 columns a row, the last row padded with zeros. The
two seeds are BLAKE2b-128 of chunk key and length, so a slot that holds another chunk does not match
either. R and C are odd and different in both lanes: SplitMix64's outputs for r and c. The sum may
be taken in any order, so torch's integers give the same bits on every device.

This is multilinear hashing (Carter and Wegman 1979) modulo 2^64 over 32-bit words as in Lemire and
Kaser, "Strongly universal string hashing is fast" (2014), keeping all 64 bits, in two levels. A
change within one word is always seen, as odd factors are invertible. A change that does not depend
on the factors, in words whose lowest changed bit is bit t, passes one lane with a probability of at
most (65 - t) * 2^(t - 62) over random odd factors: below 2^-25 in the worst case, in which only the
highest bits of words changed, so below 2^-50 for both lanes. Noise passes both with a probability
of some 2^-127. The factors are public: checksums guard against corruption, not against forged
chunks.

On a GPU a chunk is read once where it lies. The rest is memory traffic of eleven times its size,
and three launches for every 16 MiB. By that count 32 MiB take some 0.2 ms from a peer."""

# torch.cuda's streams and events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from vcache_backend.errors import LayoutError, VCacheError, raising_as
from vcache_backend.vram_pool.copier import Completion, Finished
from vcache_backend.vram_pool.cuda_copier import CudaCompletion
from vcache_backend.vram_pool.pinned_segment import on_gpu
from vcache_backend.vram_pool.slots import SlotView

NAME = "ml64x2-2"
"""The name of this construction: part of the layout of instances that use it."""
TRAILER_BYTES = 16
ALIGNMENT = 16
"""The alignment of slots and trailers, in bytes."""
COLUMNS = 4096
"""Words in a row."""
GPU_PIECE = 1 << 22
"""Words that a GPU multiplies at a time: whole rows. That takes five times their memory, 80 MiB."""
HOST_PIECE = 2 * COLUMNS
"""Words that the host multiplies at a time: so few that torch stays in the calling thread. Its
threads wait for each other, ten times as long beside busy cores."""

_READY_SECONDS = 10.0
_GOLDEN, _MIX1, _MIX2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROW_SALTS = 0x243F6A8885A308D3, 0x13198A2E03707344
_COLUMN_SALTS = 0xA4093822299F31D0, 0x082EFA98EC4E6C89
"""One salt for each lane: the first 256 bits of pi's fraction."""


def sealed_bytes(nbytes: int) -> int:
    """Bytes of a slot for a chunk of `nbytes` and its trailer. Raises LayoutError unless `nbytes`
    is a positive multiple of 8.
    """
    if nbytes <= 0 or nbytes % 8:
        raise LayoutError(
            f"a chunk of {nbytes:,} B has no checksum: expected a multiple of 8; set engine.checksum: false"
        )
    return _trailer_at(nbytes) + TRAILER_BYTES


class Look(NamedTuple):
    """A check of slots, under way until `over`. bad: after that, returns the numbers of the slots
    that do not match, ascending.
    """

    over: Completion
    bad: Callable[[], list[int]]


class Sealer:
    """Writes checksums into slots (`seal`), and compares them (`verify`). `slots[i]` holds the
    chunk of `nbytes` bytes with key `keys[i]`.

    The work follows `copy`, a copier's, on the device, and keeps the slots alive until it is over.
    Both calls raise LayoutError, and do nothing, if a slot is too small for chunk and trailer or
    not aligned to 16 bytes, or `sealed_bytes(nbytes)` does. After any VCacheError nothing of them
    runs.

    Slots may lie in host memory even if a GPU does the work, so only kernels may touch them:
    `torch.add(…, 0)` copies, while torch's own copies would take them for GPU memory."""

    def __init__(self, ordinal: int | None) -> None:
        """ordinal: of the GPU that does the work. None: the CPU does, and the calls return when it
        is over.
        """
        self._device = torch.device("cpu") if ordinal is None else torch.device("cuda", ordinal)
        # Two streams, since seals wait for what the model computes, and no check should wait for
        # seals.
        self._streams = (
            None
            if ordinal is None
            else {"seal": torch.cuda.Stream(ordinal), "look": torch.cuda.Stream(ordinal)}
        )
        self._columns, self._rows = (
            self._factors(COLUMNS, _COLUMN_SALTS)[:, None],
            self._factors(0, _ROW_SALTS),
        )
        self._under_way: list[CudaCompletion] = []

    def prepare(self, nbytes: int) -> None:
        """Make ready for chunks of `nbytes`, so that no request waits for that. Raises LayoutError
        like `sealed_bytes`.
        """
        sealed_bytes(nbytes)
        count = -(-nbytes // (4 * COLUMNS))
        if self._rows.shape[1] >= count:
            return
        rows = self._factors(count, _ROW_SALTS)
        if self._streams is None:
            self._rows = rows
            return
        size = min(nbytes, 4 * GPU_PIECE)
        slot = SlotView.over(
            torch.zeros(sealed_bytes(size), dtype=torch.uint8, device=self._device), local=True
        )
        # The sealer's streams do not wait for the stream that made `rows` and `slot`.
        torch.cuda.synchronize(self._device)
        self._rows = rows
        # With one slot torch runs other kernels than with several, and the first launch of each
        # waits for the device.
        seal = self.seal([slot], [b""], size, Finished(0.0))
        self.verify([slot] * 2, [b""] * 2, size, seal).over.wait(_READY_SECONDS)

    def seal(
        self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion
    ) -> Completion:
        """Write the trailers. Others may read the slots only once the completion is done."""
        slots = self._reached(slots)

        def write(right: Tensor) -> Tensor:
            for slot, trailer in zip(slots, right, strict=True):
                torch.add(trailer, 0, out=_trailer(slot, nbytes))
            return right

        return self._run("seal", slots, keys, nbytes, copy, write)[0]

    def verify(
        self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int, copy: Completion
    ) -> Look:
        """Compare the slots with their trailers."""
        slots = self._reached(slots)

        def compare(right: Tensor) -> Tensor:
            there = torch.stack([_trailer(slot, nbytes) + 0 for slot in slots])
            return (there != right).any(1).to("cpu", non_blocking=True)

        over, differ = self._run("look", slots, keys, nbytes, copy, compare)
        return Look(over, lambda: np.flatnonzero(differ.numpy()).tolist())

    def sums(self, slot: SlotView) -> Tensor:
        """(2,) int64: both lanes of all of a slot's bytes, a multiple of 8, with an empty key. On
        the current stream.
        """
        self.prepare(slot.nbytes)
        return self._right([slot], [b""], slot.nbytes)[0]

    def _reached(self, slots: Sequence[SlotView]) -> Sequence[SlotView]:
        """The slots as tensors that this device's kernels can use."""
        if self._device.index is not None:
            slots = [on_gpu(slot, self._device.index) for slot in slots]
        return slots

    def _run(
        self,
        kind: str,
        slots: Sequence[SlotView],
        keys: Sequence[bytes],
        nbytes: int,
        copy: Completion,
        then: Callable[[Tensor], Tensor],
    ) -> tuple[Completion, Tensor]:
        """Call `then` with the trailers that the slots should have, on the stream `kind`. Its
        result is valid once the completion is.
        """
        check(slots, keys, nbytes)
        if not slots:
            return Finished(0.0), torch.empty(0)
        self.prepare(nbytes)
        if self._streams is None:
            started = time.perf_counter()
            with torch.inference_mode():
                answer = then(self._right(slots, keys, nbytes))
            return Finished(time.perf_counter() - started), answer
        stream = self._streams[kind]
        # Slots must live until the work is over, even if the caller drops the completion.
        self._under_way = [earlier for earlier in self._under_way if not earlier.done()]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        # Temporary memory comes from the stream's own pool, so it is used again only in the
        # stream's order.
        with (
            torch.inference_mode(),
            torch.cuda.stream(stream),
            raising_as({RuntimeError: VCacheError}, "checksums"),
        ):
            try:
                if isinstance(copy, CudaCompletion):
                    stream.wait_event(copy.end)
                start.record(stream)
                answer = then(self._right(slots, keys, nbytes))
                end.record(stream)
            except BaseException:
                # The caller does not know of this work: nothing may be left running.
                stream.synchronize()
                raise
        completion = CudaCompletion(self._device, start, end, tuple(slots))
        self._under_way.append(completion)
        return completion, answer

    def _right(self, slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int) -> Tensor:
        """(slots, 2) int64: the trailers that match the slots' bytes."""
        rows = self._rows[:, : -(-nbytes // (4 * COLUMNS))]
        step = HOST_PIECE if self._streams is None else GPU_PIECE
        sums = torch.empty((len(slots), *rows.shape), dtype=torch.int64, device=self._device)
        for slot, its in zip(slots, sums, strict=True):
            words = slot.tensor[:nbytes].view(torch.int32)
            for at in range(0, len(words), step):
                piece = words[at : at + step]
                # A copy on this device, so that memory elsewhere is read only once.
                padded = torch.empty(
                    -(-len(piece) // COLUMNS) * COLUMNS, dtype=torch.int32, device=self._device
                )
                torch.add(piece, 0, out=padded[: len(piece)])
                padded[len(piece) :] = 0
                here = padded.view(-1, COLUMNS)
                first = at // COLUMNS
                torch.sum(here * self._columns, -1, out=its[:, first : first + len(here)])
                # Freed before the next piece: torch keeps as much memory as was ever in use at
                # once.
                del here, padded
        digests = torch.frombuffer(
            bytearray(b"".join(_seed(key, nbytes) for key in keys)), dtype=torch.int64
        ).view(-1, 2)
        if self._streams is not None:
            digests = digests.pin_memory().to(self._device, non_blocking=True)
        return (sums * rows).sum(-1) + digests

    def _factors(self, count: int, salts: tuple[int, int]) -> Tensor:
        """(2, count) int64: odd factors of both lanes, SplitMix64's outputs (Steele, Lea and Flood
        2014) from the lanes' salts on.
        """
        z = np.array(salts, dtype=np.uint64)[:, None] + np.arange(
            1, count + 1, dtype=np.uint64
        ) * np.uint64(_GOLDEN)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(_MIX1)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(_MIX2)
        return torch.from_numpy(((z ^ (z >> np.uint64(31))) | np.uint64(1)).view(np.int64)).to(
            self._device
        )


def digest(memory: Sequence[Tensor]) -> bytes:
    """16 bytes that identify the contents of these 1-D uint8 tensors, in order. Waits for their
    GPUs, and takes some 160 MiB of each.
    """
    found = blake2b(digest_size=16, person=b"vcache-check-1")
    sealers = {device: Sealer(device.index) for device in {tensor.device for tensor in memory}}
    longest = max((tensor.numel() // ALIGNMENT * ALIGNMENT for tensor in memory), default=0)
    with torch.inference_mode():
        for tensor in memory:
            whole = tensor.numel() // ALIGNMENT * ALIGNMENT
            found.update(
                tensor.numel().to_bytes(8, "little") + tensor[whole:].cpu().numpy().tobytes()
            )
            if whole:
                sealers[tensor.device].prepare(longest)
                sums = sealers[tensor.device].sums(SlotView.over(tensor[:whole], local=True))
                found.update(sums.cpu().numpy().tobytes())
    return found.digest()


def check(slots: Sequence[SlotView], keys: Sequence[bytes], nbytes: int) -> None:
    """Raise LayoutError unless every slot has a key, room for a chunk and its trailer, and the
    alignment.
    """
    need = sealed_bytes(nbytes)
    if len(slots) != len(keys):
        raise LayoutError(f"{len(slots)} slots were given with {len(keys)} keys")
    for i, slot in enumerate(slots):
        if slot.nbytes < need:
            raise LayoutError(
                f"a chunk with its checksum needs {need:,} B but slot {i} has {slot.nbytes:,} B"
            )
        if slot.address % ALIGNMENT:
            raise LayoutError(f"slot {i} at {slot.address:#x} is not aligned to {ALIGNMENT} B")


def _seed(key: bytes, nbytes: int) -> bytes:
    return blake2b(
        key + nbytes.to_bytes(8, "little"), digest_size=TRAILER_BYTES, person=b"vcache-check-1"
    ).digest()


def _trailer_at(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _trailer(slot: SlotView, nbytes: int) -> Tensor:
    """(2,) int64: a view of the slot's trailer."""
    at = _trailer_at(nbytes)
    return slot.tensor[at : at + TRAILER_BYTES].view(torch.int64)
