"""A reader of the in-place campaign that loads from live vLLMs' KV caches, whose blocks are
constantly used again.

What a vLLM's blocks must hold is not known beforehand. So an owner makes checksums of what its
steps have written (`witness`), and the reader compares those of what it loaded, by owner,
blocks and generations. On GPUs, owners and readers are spread over two of them."""

from __future__ import annotations

import os
import random
import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from integration.vllm.in_place.replicas import Replica
from vcache_backend.config import ByteSize, EngineConfig, PoolConfig
from vcache_backend.metadata_server.messages import INSTANCE_BYTES, ChunkKey, Found, InstanceId
from vcache_backend.resident.generations import UInt64s
from vcache_backend.resident.neighbours import Neighbours
from vcache_backend.resident.tables import Tables
from vcache_backend.transfer.layout import Layout
from vcache_backend.transfer.session import Session
from vcache_backend.vram_pool.copies.copier import Mark
from vcache_backend.vram_pool.paged import PagedKV

from ..processes import until
from .blocks import BlockPool
from .instance import Outcomes, Settings, Told
from .reader import Reader, Slowly, believe_copies

SHAPE = "shape.json"
MOST_CHUNKS = 16
REMEMBERED, DRAWN = 1024, 32
"""How many publications are remembered; and of how many drawn ones the oldest that is still there
is loaded: it is likely to go next.
"""
SLOW, SLOW_SECONDS = 0.4, 0.4
START_SECONDS = 240.0


class Shape(msgspec.Struct, frozen=True):
    """The shape of each layer's tensor in an owner's KV cache, blocks first."""

    shape: list[int]
    strides: list[int]
    dtype: str
    layers: int
    block_size: int
    chunk: int

    def tensors(self, blocks: int, device: str) -> list[torch.Tensor]:
        """Tensors like an owner's, with the same order of bytes in a block, but so many blocks."""
        shape, strides, step = [blocks, *self.shape[1:]], [0] * len(self.shape), 1
        for axis in sorted(range(len(shape)), key=lambda axis: (self.strides[axis], -axis)):
            strides[axis], step = step, step * shape[axis]
        dtype = getattr(torch, self.dtype)
        return [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for _ in range(self.layers)
        ]


class Record(msgspec.Struct, frozen=True, array_like=True):
    """An owner's record of one publication: its fields as hexadecimal text, and the checksums, 8
    bytes for each block.
    """

    keys: list[str]
    blocks: str
    generations: str
    sums: str


class Published(NamedTuple):
    """A remembered publication. first: where its first chunk lies."""

    keys: list[ChunkKey]
    first: Replica


def sums(kv: PagedKV, blocks: Sequence[int]) -> torch.Tensor:
    """A checksum for each block: the sum of its words, each with a weight of its own. On the
    current stream.
    """
    ids = torch.tensor(blocks, dtype=torch.int64, device=kv.device)
    total = torch.zeros(len(blocks), dtype=torch.int64, device=kv.device)
    for page in kv.pages:
        total = total * 31 + (
            page.view(torch.int64)[ids] * _weights(kv.page_bytes // 8, kv.device)
        ).sum(dim=1)
    return total


@cache
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """The words' weights. Odd, so that a change of one word always shows."""
    dice = torch.Generator().manual_seed(1)
    return (torch.randint(-(1 << 62), 1 << 62, (count,), generator=dice) * 2 + 1).to(device)


class Follower(Reader):
    """Loads what owners have published recently."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        self.dice, self.over, self.told, self.settings = dice, False, Told(Outcomes(), []), settings
        self._folder = Path(settings.shared)
        assert until((self._folder / SHAPE).exists, START_SECONDS, 0.1), "no owner has started"
        shape = msgspec.json.decode((self._folder / SHAPE).read_bytes(), type=Shape)
        if settings.control == "no verdict":
            believe_copies()
        cuda = torch.cuda.is_available()
        self.each = shape.chunk // shape.block_size
        blocks = 2 * MOST_CHUNKS * self.each
        tensors = shape.tensors(blocks, "cuda" if cuda else "cpu")
        axes = "block head token dim" if len(shape.shape) == 4 else ""
        config = msgspec.structs.replace(
            settings.config,
            engine=EngineConfig(chunk_size=shape.chunk, kv_axes=axes),
            pool=PoolConfig(device="cuda:0" if cuda else "host", segment_bytes=ByteSize(0)),
        )
        layout = Layout.of(
            tensors, shape.block_size, model="live", axes=axes or None, chunk_size=shape.chunk
        )
        self.session = Session(config, layout, anonymous=True)
        self.kv, self.client = self.session.bind(tensors), self.session.client
        self.session.copier = Slowly(self.session.copier, self, SLOW, SLOW_SECONDS)
        self.instance, self.pool = (
            InstanceId(secrets.token_bytes(INSTANCE_BYTES)),
            BlockPool(blocks),
        )
        self.neighbours = Neighbours(self.client, self.session.device, self.kv, 0)
        self.tables = Tables(self.client)
        self._found: dict[tuple[ChunkKey, ChunkKey], Found] = {}
        self._read: dict[Path, int] = {}
        self._sums: dict[Replica, bytes] = {}
        self._last: deque[Published] = deque(maxlen=REMEMBERED)

    def round(self) -> None:
        self._refresh()
        if not self._last:
            time.sleep(0.02)
            return
        misses = self.told.outcomes.misses
        super().round()
        if self.told.outcomes.misses > misses:
            # The owner needs the core.
            time.sleep(0.005)

    def some_prompt(self) -> list[ChunkKey]:
        for number in sorted(self.dice.randrange(len(self._last)) for _ in range(DRAWN)):
            keys, (instance, blocks, generations) = self._last[number]
            view = self.tables.view(instance)
            ids, then = np.frombuffer(blocks, dtype="<u4"), np.frombuffer(generations, dtype="<u8")
            if view is not None and view.leading(ids, then, self.each):
                return keys
        return self._last[-1][0]

    def allocate(self, chunks: int) -> tuple[list[int], UInt64s]:
        """Blocks for so many chunks. Nobody reads them."""
        blocks = [block.block_id for block in self.pool.get_new_blocks(chunks * self.each)]
        return blocks, np.zeros(len(blocks), dtype=np.uint64)

    def publish(
        self, keys: list[ChunkKey], blocks: list[int], generations: UInt64s, written: Mark
    ) -> None:
        """Nothing."""

    def checkable(self, count: int, chosen: Mapping[int, Replica]) -> int:
        """How many of these leading chunks have checksums from their owner."""
        return next(
            (number for number in range(count) if chosen.get(number) not in self._sums), count
        )

    def poison(self, blocks: Sequence[int]) -> None:
        for page in self.kv.pages:
            page[blocks] = 0x5A

    def wrong(
        self, keys: Sequence[ChunkKey], blocks: Sequence[int], replicas: Sequence[Replica | None]
    ) -> int:
        if not keys:
            return 0
        found = sums(self.kv, blocks[: len(keys) * self.each]).cpu().numpy()
        want: npt.NDArray[np.int64] = np.frombuffer(
            b"".join(self._sums[each] for each in replicas if each), dtype="<i8"
        )
        return int((found != want).sum()) * self.kv.layers * self.kv.parts * self.kv.page_bytes

    def describe(
        self, keys: Sequence[ChunkKey], blocks: Sequence[int], chosen: Mapping[int, Replica]
    ) -> str:
        said = [
            f"chunk {number}, {bytes(key).hex()}, out of {chosen[number][0].hex()}"
            for number, key in enumerate(keys)
        ]
        return f"process {os.getpid()}: one of {'; '.join(said)}"

    def close(self) -> None:
        """Never called: a signal ends the process."""

    def _refresh(self) -> None:
        """Read the records that owners have added."""
        for path in self._folder.glob("*.sums"):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole = file.read().rpartition(b"\n")[0]
            if not whole:
                continue
            self._read[path] = self._read.get(path, 0) + len(whole) + 1
            for line in whole.split(b"\n"):
                self._take(bytes.fromhex(path.stem), msgspec.json.decode(line, type=Record))

    def _take(self, instance: bytes, record: Record) -> None:
        blocks, generations, told = (
            bytes.fromhex(each) for each in (record.blocks, record.generations, record.sums)
        )
        number, long = 4 * self.each, 8 * self.each
        for at in range(len(record.keys)):
            its = blocks[at * number : (at + 1) * number], generations[at * long : (at + 1) * long]
            self._sums[instance, *its] = told[at * long : (at + 1) * long]
        if record.keys:
            first = instance, blocks[:number], generations[:long]
            self._last.append(
                Published(
                    [ChunkKey(bytes.fromhex(key)) for key in record.keys[:MOST_CHUNKS]], first
                )
            )
