"""The copies in plain numpy, for `HostCopier` and for tests of the kernel: in host memory, over
when the call returns."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from vcache_backend.vram_pool.copies.geometry import Int64s, PagedKV, of_kinds


def copy(kv: PagedKV, rows: Int64s, origins: Int64s, *, to_origin: bool = False) -> None:
    """Copy blocks from raw addresses into the KV cache, or with `to_origin` out of it: see
    `CopyJob`."""
    for kind, its_rows, bases in of_kinds(kv, rows, origins):
        for origin in np.unique(its_rows[:, 0]).tolist():
            of_it = its_rows[its_rows[:, 0] == origin]
            first = int(of_it[:, 1].min())
            step = int(np.gcd.reduce(of_it[:, 1] - first)) or kind.page_bytes
            places, count = (
                (of_it[:, 1] - first) // step,
                int(of_it[:, 1].max() - first) // step + 1,
            )
            at, blocks = _as_slice(places), _as_slice(of_it[:, 2])
            for base, (start, stride) in zip(bases[origin], kind.planes.tolist(), strict=True):
                there = _pages(int(base) + first, count, step, kind.page_bytes)
                here = _pages(start, kind.num_blocks, stride, kind.page_bytes)
                if to_origin:
                    there[at] = here[blocks]
                else:
                    here[blocks] = there[at]


def _pages(address: int, count: int, step: int, nbytes: int) -> npt.NDArray[np.void]:
    """`count` pages of `nbytes` bytes at raw addresses, `step` bytes apart; pages may overlap.
    Memory is only touched when a page is read or written.

    Numpy copies each page with one memcpy, in this thread. torch's own copies start threads that
    wait for each other: beside a busy core a copy takes a hundred times as long."""
    memory = {
        "data": (address, False),
        "shape": (count,),
        "strides": (step,),
        "typestr": f"|V{nbytes}",
        "version": 3,
    }
    return np.asarray(SimpleNamespace(__array_interface__=memory))


def _as_slice(numbers: Int64s) -> Int64s | slice:
    """A slice if the numbers are consecutive: numpy then copies the pages once instead of twice."""
    consecutive = bool((np.diff(numbers) == 1).all())
    return slice(int(numbers[0]), int(numbers[-1]) + 1) if consecutive else numbers
