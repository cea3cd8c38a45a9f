"""Two processes, a GPU each, pull from each other at once, against the copy engine doing the same.

Both sides are queues of bare copies: the kernel's launches (their table uploaded once) and the copy engine's copies. The segments
come from a real metadata server.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch

from vcache_backend.metadata_server.client import Client
from vcache_backend.vram_pool import segment
from vcache_backend.vram_pool.devices import resolve

from .copies import MIB, case_in
from .metadata import PATIENT, server
from .results import Row, row

NBYTES = 256 * MIB
REPEAT = 16
RUNS = 15
SECONDS = 120.0


def run() -> list[Row]:
    """`both_ways_256MiB`; nothing where there are fewer than two GPUs."""
    if torch.cuda.device_count() < 2:
        return []
    context = multiprocessing.get_context("spawn")
    with server() as path:
        barrier = context.Barrier(2)
        results: multiprocessing.Queue[tuple[list[float], list[float]]] = context.Queue()
        workers = [context.Process(target=_worker, args=(path, rank, barrier, results)) for rank in range(2)]
        for worker in workers:
            worker.start()
        try:
            times = [results.get(timeout=SECONDS) for _ in workers]
        finally:
            for worker in workers:
                worker.join(10)
                worker.kill()
    # Both begin at the barrier: the slower one's time is the time of both.
    engine, ours = (
        [2 * NBYTES * REPEAT / max(pair) / 1e9 for pair in zip(*side, strict=True)] for side in zip(*times, strict=True)
    )
    what = "two processes pull 256 MiB from each other's GPU at once, sum of both; reference: the copy engine doing the same"
    return [row("both_ways_256MiB", "GB/s", ours, engine, what=what, at_least=0.90)]


def _worker(path: Path, rank: int, barrier: Barrier, results: multiprocessing.Queue[tuple[list[float], list[float]]]) -> None:
    """Lend a segment of GPU `rank`, then pull from the other one's."""
    torch.cuda.set_device(rank)
    mine = resolve(f"cuda:{rank}")
    with Client(path, PATIENT, mine.name, "cuda") as client, segment.create(mine, NBYTES) as owned:
        client.add_segment(owned.info, owned.fd)
        barrier.wait(SECONDS)
        other = next(info for info in client.list_segments() if info.device != mine.name)
        info, fd = client.open_segment(other.id)
        made = case_in(segment.map_segment(info, fd, mine), NBYTES)
        os.close(fd)
        pull = made.launcher()
        barrier.wait(SECONDS)
        engine, ours = [], []
        for _ in range(RUNS + 1):
            engine.append(_timed(barrier, made.pull))
            ours.append(_timed(barrier, pull))
        results.put((engine[1:], ours[1:]))
        barrier.wait(SECONDS)


def _timed(barrier: Barrier, work: Callable[[], object]) -> float:
    """Seconds until REPEAT of them, queued without a pause, are over, from the moment both processes are ready."""
    torch.cuda.synchronize()
    barrier.wait(SECONDS)
    started = time.perf_counter()
    for _ in range(REPEAT):
        work()
    torch.cuda.synchronize()
    return time.perf_counter() - started
