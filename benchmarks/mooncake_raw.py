"""Mooncake's own client, in a process of its own and without our code: the reference for the
offload tier.

Started with the master's address and the bytes of its memory as arguments. It uses the library with
the tier's settings."""

from __future__ import annotations

import ctypes
import mmap
import secrets
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from vcache_backend.config import MooncakeConfig, mooncake_environment

from .processes import HOST, answer_commands

WAYS = {
    "one call": (1, 0),
    "a call each": (1, 1),
    "2 threads, a call each": (2, 1),
    "2 threads, half each": (2, 2),
}
"""By name: (threads, how a batch is split: 0 not at all, 1 into single objects, 2 into halves)."""


class RawClient:
    """The commands. Memory is `nbytes`, split into pieces of one object each."""

    def __init__(self, master: str, nbytes: int) -> None:
        mooncake_environment(MooncakeConfig(master=master, hostname=HOST))
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        self._store, self._config = MooncakeDistributedStore(), ReplicateConfig()
        code = self._store.setup(
            {
                "local_hostname": HOST,
                "metadata_server": "P2PHANDSHAKE",
                "global_segment_size": "0",
                "local_buffer_size": "0",
                "protocol": "tcp",
                "rdma_devices": "",
                "master_server_addr": master,
            }
        )
        if code:
            raise RuntimeError(f"setup: {code}")
        self._memory = mmap.mmap(-1, nbytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        # Pages are taken now, as those of the tier's buffers are.
        ctypes.memset(self._address, 1, nbytes)
        self._threads = ThreadPoolExecutor(2)
        list(self._threads.map(lambda _: time.sleep(0.01), range(2)))

    def get(self, names: list[str], size: int, way: str) -> float:
        """Seconds to read objects of `size` bytes."""
        return self._timed(names, size, way, self._store.batch_get_into, size)

    def put(self, names: list[str], size: int, way: str) -> float:
        """Seconds to write them."""
        return self._timed(
            names, size, way, lambda *piece: self._store.batch_put_from(*piece, self._config), 0
        )

    def remove(self, names: list[str]) -> None:
        self._store.batch_remove(names, True)

    def damage(self, names: list[str], size: int, how: str) -> int:
        """Replace those of these objects that exist, each of `size` bytes, by damaged ones. Returns
        how many.

        how: `flip` a bit, `cut` the last byte, `zero` the second half, or the bytes of the `next`
        object."""
        places = [self._address + index * size for index in range(len(names))]
        got = self._store.batch_get_into(names, places, [size] * len(names))
        there = [index for index, code in enumerate(got) if code == size]
        done = 0
        for number, index in enumerate(there):
            data = bytearray(
                ctypes.string_at(
                    places[there[(number + 1) % len(there)] if how == "next" else index], size
                )
            )
            if how == "flip":
                data[secrets.randbelow(size)] ^= 1 << secrets.randbelow(8)
            elif how == "cut":
                del data[-1]
            elif how == "zero":
                data[size // 2 :] = bytes(size - size // 2)
            bad = (ctypes.c_char * len(data)).from_buffer(data)
            self._store.batch_remove([names[index]], True)
            (code,) = self._store.batch_put_from(
                [names[index]], [ctypes.addressof(bad)], [len(data)], self._config
            )
            done += code == 0
        return done

    def _timed(
        self, names: list[str], size: int, way: str, call: Callable[..., list[int]], good: int
    ) -> float:
        threads, split = WAYS[way]
        step = {0: len(names), 1: 1, 2: -(-len(names) // 2)}[split]
        places = [self._address + index * size for index in range(len(names))]
        pieces = [
            (names[at : at + step], places[at : at + step], [size] * len(names[at : at + step]))
            for at in range(0, len(names), step)
        ]
        started = time.perf_counter()
        every = map if threads == 1 else self._threads.map
        codes = [code for answer in every(lambda piece: call(*piece), pieces) for code in answer]
        seconds = time.perf_counter() - started
        if any(code != good for code in codes):
            raise RuntimeError(f"{way}: {codes}")
        return seconds


if __name__ == "__main__":
    answer_commands(lambda: RawClient(sys.argv[1], int(sys.argv[2])))
