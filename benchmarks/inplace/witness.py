"""A vLLM under load whose KV cache others read: what its steps have written is summed up behind
them, and told beside what it publishes.
"""

from __future__ import annotations

import random
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from vcache_backend.vram_pool.copies.copier import Mark
from vcache_backend.vram_pool.paged import PagedKV

from ..vllm.scale import FULL, TINY
from ..vllm.weights import write_model
from .instance import Settings
from .live import SHAPE, Follower, Record, Shape, sums
from .whole import Engine, Size, live_on_gpu

LIVE = Size(FULL, families=64, chunks=16, at_once=16, tokens=72_000, step=FULL.batched_tokens)
LIVE_TINY = Size(TINY, families=12, chunks=6, at_once=3, tokens=36 * TINY.block)


class Owner(Engine):
    """Its answers are nobody's concern."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        self._folder = Path(settings.shared)
        self._untold: deque[tuple[Any, torch.Tensor, Mark]] = deque()
        super().__init__(settings, dice, LIVE if torch.cuda.is_available() else LIVE_TINY)

    def round(self) -> None:
        super().round()
        self._tell()

    def answered(self, output: Any, family: int, chunks: int) -> None:
        self.told.outcomes.written += chunks

    def watch(self, worker: Any) -> None:
        self._worker = worker
        kv: PagedKV = worker._worker.kv
        tensors = worker._worker.session._tensors
        shape = Shape(
            list(tensors[0].shape),
            list(tensors[0].stride()),
            kv.dtype,
            kv.layers,
            kv.block_size,
            self.size.scale.chunk,
        )
        new = self._folder / f"{SHAPE}.new"
        new.write_bytes(msgspec.json.encode(shape))
        new.replace(self._folder / SHAPE)
        publish = worker.in_place.publish

        def published(specs: Any) -> None:
            publish(specs)
            # Behind the step on its own stream, before another one can write these blocks.
            for spec in specs:
                blocks = np.frombuffer(spec.blocks, dtype="<u4").tolist()
                computed = sums(kv, blocks)
                host = torch.empty(len(blocks), dtype=torch.int64, pin_memory=computed.is_cuda)
                host.copy_(computed, non_blocking=True)
                self._untold.append((spec, host, worker._worker.session.copier.mark()))

        worker.in_place.publish = published
        scheduler = self.engine.engine_core.engine_core.scheduler
        self.stops_behind(scheduler.kv_cache_manager.block_pool, "get_new_blocks", "handed out")
        self.stops_behind(worker, "begin", "step begun")
        self.stops_behind(worker, "store", "step launched")

    def _tell(self) -> None:
        """What is summed up by now."""
        lines = b""
        while self._untold and self._untold[0][2].reached():
            spec, host, _ = self._untold.popleft()
            keys = [bytes(key).hex() for key in spec.keys]
            record = Record(
                keys,
                spec.blocks.hex(),
                spec.generations.hex(),
                host.numpy().astype("<i8").tobytes().hex(),
            )
            lines += msgspec.json.encode(record) + b"\n"
        if lines:
            name = bytes(self._worker.in_place.publisher._instance).hex()
            with (self._folder / f"{name}.sums").open("ab") as file:
                file.write(lines)


def prepare(folder: Path) -> None:
    """Write the model."""
    write_model(folder / "model", FULL if torch.cuda.is_available() else TINY)


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of an owner's or a reader's process."""
    live_on_gpu(Owner if settings.role == "owner" else Follower, settings, pipe)
