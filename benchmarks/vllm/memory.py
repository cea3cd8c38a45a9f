"""A process that maps the pool's segments, can write into them without the server's knowledge, and
times the copy engine.

Started with the metadata server's socket as its only argument.
"""

from __future__ import annotations

import os
import sys
from contextlib import ExitStack
from pathlib import Path

import torch

from vcache_backend.metadata_server.client import Client
from vcache_backend.vram_pool import segment
from vcache_backend.vram_pool.devices import Device, gpus, resolve
from vcache_backend.vram_pool.segment import MappedSegment

from ..processes import PATIENT, answer_commands

STEP = 32 << 20
RUNS = 21


class Memory:
    """The commands."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._mapped: dict[str, MappedSegment] = {}

    def fill(self, value: int) -> None:
        """Set every byte of every segment to `value`. Only while the pool is empty."""
        with Client(self._socket, PATIENT, reconnect=False) as client:
            client.require()
            for info in client.list_segments():
                if info.id not in self._mapped:
                    opened, fd = client.open_segment(info.id)
                    self._mapped[info.id] = segment.map_segment(
                        opened, fd, _reader(opened.device, opened.medium)
                    )
                    os.close(fd)
        for mapped in self._mapped.values():
            mapped.tensor(0, mapped.nbytes).fill_(value)
        _synchronize()

    def written(self, value: int) -> tuple[str, int]:
        """Where something was written since `fill(value)`: the first such segment, and the first
        such byte in it.
        """
        for id_, mapped in self._mapped.items():
            for start in range(0, mapped.nbytes, STEP):
                where = torch.nonzero(
                    mapped.tensor(start, min(STEP, mapped.nbytes - start)) != value
                )
                if len(where):
                    return id_, start + int(where[0])
        raise RuntimeError("nothing was written into the pool")

    def flip(self, id_: str, offset: int, mask: int) -> None:
        """XOR one byte with `mask`."""
        self._mapped[id_].tensor(offset, 1).bitwise_xor_(mask)
        _synchronize()

    def copy_speed(self, nbytes: int) -> list[float]:
        """GB/s of the copy engine pulling `nbytes` from a segment of GPU 0 to GPU 1, or within a
        single one, `RUNS` times.
        """
        from ..copies import engine_seconds

        owner, reader = resolve("cuda:0"), resolve(f"cuda:{min(1, torch.cuda.device_count() - 1)}")
        torch.cuda.set_device(reader.ordinal)
        with ExitStack() as undo:
            owned = undo.enter_context(segment.create(owner, nbytes))
            mapped = undo.enter_context(segment.map_segment(owned.info, owned.fd, reader))
            target = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{reader.ordinal}")

            def pull() -> None:
                target.copy_(mapped.tensor(0, nbytes), non_blocking=True)

            seconds = [engine_seconds(pull) for _ in range(RUNS + 3)][3:]
        return [nbytes / each / 1e9 for each in seconds]


def _reader(device: str, medium: str) -> Device:
    """The device the memory lies on, as this process sees it."""
    if medium == "host":
        return resolve("host")
    return resolve(next(f"cuda:{gpu.ordinal}" for gpu in gpus() if gpu.uuid == device))


def _synchronize() -> None:
    if torch.cuda.is_available():
        for ordinal in range(torch.cuda.device_count()):
            torch.cuda.synchronize(ordinal)


if __name__ == "__main__":
    answer_commands(lambda: Memory(Path(sys.argv[1])))
