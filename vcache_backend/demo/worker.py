"""One worker of the demo: a process with a paged KV cache and an engine, as a vLLM worker has them, without the model.

`python -m vcache_backend.demo.worker FD`, where FD is its end of a `multiprocessing` pipe. It ends when the pipe does.
"""

from __future__ import annotations

import sys
import traceback
from multiprocessing.connection import Connection

import msgspec
import numpy as np
import torch

from vcache_backend.config import ByteSize, load
from vcache_backend.demo.cache import PagedCache
from vcache_backend.demo.content import Shape, block_digests
from vcache_backend.demo.jobs import Done, Failed, Finish, FromWorker, Job, Ready, Report, Setup, ToWorker
from vcache_backend.demo.trace import tokens
from vcache_backend.engine import VCacheEngine
from vcache_backend.transfer.layout import Layout
from vcache_backend.vram_pool.paged import PagedKV

FLUSH_SECONDS = 20.0


class Worker:
    """The worker's cache and engine. One thread."""

    def __init__(self, setup: Setup) -> None:
        self.chunk_size = setup.chunk_size
        self.device = torch.device(setup.device if setup.device.startswith("cuda") else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.cache = PagedCache(setup.shape, setup.cache_blocks, self.device, setup.worker)
        config = load()
        pool = msgspec.structs.replace(config.pool, device=setup.device, segment_bytes=ByteSize(setup.segment_bytes))
        self.layout = layout(setup.shape, setup.chunk_size, self.cache)
        self.engine = VCacheEngine(msgspec.structs.replace(config, pool=pool), self.layout)

    def serve(self, job: Job) -> Done:
        """Look up, retrieve into poisoned blocks at random places, check every byte of the cache, prefill the rest, store."""
        prompt = torch.from_numpy(tokens(job.request))
        digests = torch.from_numpy(block_digests(prompt.numpy(), self.cache.shape.block_size)).to(self.device)
        shuffled = np.random.default_rng(job.index).permutation(self.cache.blocks)[: len(digests)]
        places = torch.from_numpy(shuffled).to(self.device)
        slots = self.cache.slots(places, len(prompt))

        found = self.engine.lookup(prompt)
        retrieved, problems = self._retrieve(prompt[:found], slots[:found]) if found else (0, [])
        self._synchronize()
        blocks = retrieved // self.cache.shape.block_size
        faults = self.cache.faults(places, digests, blocks)

        self.cache.prefill(places[blocks:], digests[blocks:])
        self.engine.store(prompt, torch.arange(len(prompt)) >= retrieved, self.cache.kvcaches, slots)
        if not self.engine.flush(FLUSH_SECONDS):
            problems.append(f"the store was not committed within {FLUSH_SECONDS:g} s")
        self._synchronize()
        self.cache.forget(places)
        return Done(job.index, found, retrieved, faults, problems)

    def _retrieve(self, prompt: torch.Tensor, slots: torch.Tensor) -> tuple[int, list[str]]:
        """How many leading tokens came, and what is odd about the answer."""
        mask = self.engine.retrieve(prompt, None, self.cache.kvcaches, slots)
        if mask.dtype != torch.bool or mask.shape != prompt.shape or mask.device.type != "cpu":
            return 0, [f"retrieve answered {mask.dtype} {tuple(mask.shape)} on {mask.device}, not one bool a token on the CPU"]
        count = int(mask.sum())
        if not mask[:count].all() or count % self.chunk_size:
            return 0, [f"retrieve's mask has {count} tokens that are no leading run of whole chunks"]
        if count < len(prompt):
            return count, [f"lookup promised {len(prompt)} tokens, retrieve brought {count}"]
        return count, []

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def layout(shape: Shape, chunk_size: int, cache: PagedCache) -> Layout:
    """What the demo's workers agree on."""
    return Layout(
        model="vcache-demo",
        dtype="bfloat16",
        layers=shape.layers,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        kv_layout=PagedKV.describe(cache.kvcaches, shape.block_size).name,
        chunk_size=chunk_size,
    )


def serve(pipe: Connection) -> None:
    """Answer messages until `Finish`, the end of the pipe, or an exception, which is the last answer."""
    decoder = msgspec.msgpack.Decoder(ToWorker)

    def send(message: FromWorker) -> None:
        pipe.send_bytes(msgspec.msgpack.encode(message))

    worker: Worker | None = None
    try:
        while True:
            message = decoder.decode(pipe.recv_bytes())
            if isinstance(message, Setup):
                worker = Worker(message)
                send(Ready(worker.layout.namespace().fingerprint))
                continue
            assert worker is not None
            if isinstance(message, Finish):
                send(Report(worker.engine.get_stats()))
                return
            send(worker.serve(message))
    except EOFError:
        return
    except Exception:  # noqa: BLE001 (the process's outermost loop)
        send(Failed(traceback.format_exc()))
    finally:
        if worker is not None:
            worker.engine.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Connection(int(sys.argv[1])))
