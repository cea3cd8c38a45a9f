"""The copies in plain torch and numpy, for tests of the kernels and for `HostCopier`.

In host memory a copy is over when the call returns; on a GPU the copy runs in order on the current
stream. `slots`: for each slot index of the plan a contiguous 1-D uint8 tensor of at least a
chunk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, alignment
from vcache_backend.vram_pool.copies.plan import CopyPlan, of_kinds

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def gather(kv: PagedKV, plan: CopyPlan, slots: Sequence[Tensor]) -> None:
    """Copy the plan's blocks from the KV cache into the slots."""
    for page, slot, ids, virtual in _block_pairs(kv, plan, slots):
        if page.device.type == slot.device.type == "cpu":
            _rows(slot)[virtual] = _rows(page)[ids]
        else:
            slot[torch.from_numpy(virtual).to(slot.device)] = page[
                torch.from_numpy(ids).to(page.device)
            ].to(slot.device)


def scatter(kv: PagedKV, plan: CopyPlan, slots: Sequence[Tensor]) -> None:
    """Copy the plan's blocks from the slots into the KV cache."""
    for page, slot, ids, virtual in _block_pairs(kv, plan, slots):
        if page.device.type == slot.device.type == "cpu":
            _rows(page)[ids] = _rows(slot)[_as_slice(virtual)]
        else:
            page[torch.from_numpy(ids).to(page.device)] = slot[
                torch.from_numpy(virtual).to(slot.device)
            ].to(page.device)


def pull(kv: PagedKV, rows: Int64s, origins: Int64s) -> None:
    """Copy blocks from raw addresses of host memory into the KV cache: see `Copier.pull`."""
    for kind, its_rows, its_origins in of_kinds(kv, rows, origins):
        _pull(kind, its_rows, its_origins)


def _pull(kv: PagedKV, rows: Int64s, origins: Int64s) -> None:
    for origin, of_it in _by_slot(rows):
        ids, offsets = of_it[:, 2], of_it[:, 1]
        first = int(offsets.min())
        step = int(np.gcd.reduce(offsets - first)) or kv.page_bytes
        numbers = (offsets - first) // step
        for plane, page in enumerate(kv.pages):
            there = _rows_at(
                int(origins[origin, plane]) + first, int(numbers.max()) + 1, step, kv.page_bytes
            )
            _rows(page)[ids] = there[numbers]


def _rows_at(address: int, count: int, step: int, nbytes: int) -> npt.NDArray[np.void]:
    """`count` rows of `nbytes` bytes at raw addresses, `step` bytes apart; rows may overlap. Memory
    is only touched when a row is read."""
    memory = {
        "data": (address, True),
        "shape": (count,),
        "strides": (step,),
        "typestr": f"|V{nbytes}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=memory))


def _rows(table: Tensor) -> npt.NDArray[np.void]:
    """A (rows, words) tensor in host memory as a numpy array of opaque rows. Numpy copies each row
    with one memcpy, in this thread.

    torch's own copies start threads that wait for each other: beside a busy core a copy takes a
    hundred times as long."""
    array = table.numpy()
    rows: npt.NDArray[np.void] = array.view(np.dtype((np.void, array.shape[1] * array.itemsize)))[
        :, 0
    ]
    return rows


def _as_slice(places: Int64s) -> Int64s | slice:
    return (
        slice(int(places[0]), int(places[-1]) + 1) if bool((np.diff(places) == 1).all()) else places
    )


def _block_pairs(
    kv: PagedKV, plan: CopyPlan, slots: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor, Int64s, Int64s]]:
    """For each slot and plane: the KV cache's pages (num_blocks, words), the slot's pages (blocks,
    words), block ids, and places in the slot."""
    for number, kind in enumerate(kv.kinds):
        part, begin = plan.of(kv, number)
        for index, rows in _by_slot(part.blocks):
            slot = slots[index][begin : begin + kind.chunk_bytes(plan.chunk_size)]
            virtual, ids = rows[:, 1] // (kind.parts * kind.page_bytes), rows[:, 2].copy()
            # torch copies element by element: wide words are ten times faster than bytes.
            word = _word(kind, slot)
            chunk = slot.view(word).view(kind.layers, part.each, kind.parts, -1)
            for plane, page in enumerate(kind.pages):
                pages = chunk[plane // kind.parts, :, plane % kind.parts]
                yield page.view(word), pages, ids, virtual


def _by_slot(rows: Int64s) -> Iterator[tuple[int, Int64s]]:
    for slot in np.unique(rows[:, 0]).tolist():
        yield slot, rows[rows[:, 0] == slot]


def _word(kv: PagedKV, slot: Tensor) -> torch.dtype:
    """The widest integer that pages and slot can be viewed as."""
    offsets = [int(page.storage_offset()) | int(page.stride(0)) for page in kv.pages]
    return _WORDS[min(8, alignment(kv.page_bytes, int(slot.storage_offset()), *offsets))]
