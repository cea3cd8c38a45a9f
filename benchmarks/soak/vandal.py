"""Damages objects of a Mooncake store, through Mooncake's own client, in a process of its own.

Started with the master's address and the bytes of its memory as arguments."""

from __future__ import annotations

import ctypes
import mmap
import secrets
import sys

from vcache_backend.config import MooncakeConfig, mooncake_environment

from ..processes import HOST, answer_commands


class Vandal:
    """The command. Memory is `nbytes`, split into pieces of one object each."""

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

    def damage(self, names: list[str], size: int, how: str) -> int:
        """Replace those of these objects that exist, each of `size` bytes, by damaged ones. Returns
        how many.

        how: `flip` a bit, `cut` the last byte, `zero` the second half, or the bytes of the `next`
        object."""
        places = [self._address + index * size for index in range(len(names))]
        got = self._store.batch_get_into(names, places, [size] * len(names))
        held = [index for index, code in enumerate(got) if code == size]
        done = 0
        for number, index in enumerate(held):
            source = held[(number + 1) % len(held)] if how == "next" else index
            data = bytearray(ctypes.string_at(places[source], size))
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


if __name__ == "__main__":
    answer_commands(lambda: Vandal(sys.argv[1], int(sys.argv[2])))
