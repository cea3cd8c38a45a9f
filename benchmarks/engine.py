"""A whole `retrieve()` (hashing, lease, plan, copy, release) against a mere copy of its bytes by the copy engine.

Two engines and a real metadata server. The chunks lie on the first engine's device; the second one retrieves them into blocks
that were overwritten before. On GPUs: the Llama-3.1-8B shape, 4,096 tokens, 512 MiB, from a peer. On host memory: a small shape,
against a plain copy of the same bytes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from vcache_backend.config import from_dict
from vcache_backend.engine import VCacheEngine
from vcache_backend.metadata_server.messages import ChunkKey
from vcache_backend.transfer.leases import AskedLease
from vcache_backend.vram_pool.copier import Completion

from .copies import event
from .kv import KV, Size, prompt, timed
from .processes import metadata_server
from .results import Row, row

RUNS = 30
T = TypeVar("T")


def run() -> list[Row]:
    """`engine_retrieve_4096` on two GPUs, `engine_retrieve_host` where there are none."""
    if torch.cuda.device_count() > 1:
        return [_measure("engine_retrieve_4096", KV(Size(), 1, "cuda:1"), KV(Size(), 2, "cuda:0"), at_most=1.15)]
    small = Size(layers=4, heads=2, dim=64)
    return [_measure("engine_retrieve_host", KV(small, 1, "host:1"), KV(small, 2, "host:0"), at_most=None)]


def _measure(name: str, stored: KV, into: KV, at_most: float | None) -> Row:
    nbytes, tokens = stored.size.nbytes, prompt(stored.size.tokens)
    with metadata_server() as path, _engine(path, stored, 2 * nbytes) as writer, _engine(path, into, 0) as engine:
        writer.store(tokens, None, stored.tensors, stored.slots)
        if not writer.flush(30) or engine.lookup(tokens) != len(tokens):
            raise RuntimeError(f"the chunks were not stored: {writer.get_stats()}")
        into.poison()
        if not bool(engine.retrieve(tokens, None, into.tensors, into.slots).all()) or not into.holds(stored):
            raise RuntimeError(f"retrieve() did not bring what was stored; nothing is measured: {engine.get_stats()}")
        ours, plain, masks = [], [], list[torch.Tensor]()
        flat = torch.empty(nbytes, dtype=torch.uint8, device=into.tensors[0].device)
        source = torch.empty(nbytes, dtype=torch.uint8, device=stored.tensors[0].device)
        for _ in range(RUNS):
            plain.append(_copy_ms(flat, source))
            engine.lookup(tokens)  # as vLLM's scheduler does, a moment before
            ours.append(1e3 * timed(lambda: masks.append(engine.retrieve(tokens, None, into.tensors, into.slots))))
        stages = _Stages(engine)
        for _ in range(RUNS):
            _copy_ms(flat, source)
            engine.lookup(tokens)
            stages.timed(lambda: masks.append(engine.retrieve(tokens, None, into.tensors, into.slots)))
        if not all(bool(mask.all()) for mask in masks):
            raise RuntimeError(f"a retrieve() missed: {engine.get_stats()}")
    what = f"{nbytes >> 20} MiB, retrieve() after a lookup(), wall time; reference: one contiguous copy; {stages.said()}"
    return row(name, "ms", ours, plain, what=what, at_most=at_most)


class _Stages:
    """Times the stages of a `retrieve` and its copies on the device, in separate runs: medians."""

    def __init__(self, engine: VCacheEngine) -> None:
        self._marks: list[tuple[str, float]] = []
        self._copies: list[Completion] = []
        self._runs: list[tuple[list[tuple[str, float]], list[float]]] = []
        session = engine._session
        ask, scatter, verdict, acquire = (
            session.leases.ask,
            session.copier.scatter,
            session.leases.verdict,
            session.leases.acquire,
        )

        def asked(keys: list[ChunkKey]) -> AskedLease:
            made = ask(keys)
            self._mark("asked")
            fetch = made.fetch
            setattr(made, "fetch", lambda: self._after("answered", fetch))  # noqa: B010 - a method
            return made

        def launched(*arguments: Any) -> Completion:
            copy = scatter(*arguments)
            self._mark("launched")
            self._copies.append(copy)
            return copy

        def judged(*arguments: Any, **named: Any) -> bool:
            self._mark("seen to be over")
            return self._after("verdict", lambda: verdict(*arguments, **named))

        for of, name, call in (
            (session.leases, "ask", asked),
            (session.leases, "acquire", lambda keys: self._after("answered", lambda: acquire(keys))),
            (session.leases, "verdict", judged),
            (session.copier, "scatter", launched),
        ):
            setattr(of, name, call)

    def _mark(self, stage: str) -> None:
        self._marks.append((stage, time.perf_counter()))

    def _after(self, stage: str, call: Callable[[], T]) -> T:
        answer = call()
        self._mark(stage)
        return answer

    def timed(self, call: Callable[[], object]) -> None:
        self._marks.clear()
        self._copies.clear()
        self._mark("called")
        self._after("returned", call)
        began = self._marks[0][1]
        copies = [1e6 * (copy.seconds or 0.0) for copy in self._copies]
        self._runs.append(([(stage, 1e6 * (at - began)) for stage, at in self._marks[1:]], copies))

    def said(self) -> str:
        names = [stage for stage, _ in self._runs[0][0]]
        alike = [run for run in self._runs if [stage for stage, _ in run[0]] == names]
        ends = [f"{name} {statistics.median(run[0][i][1] for run in alike):.0f}" for i, name in enumerate(names)]
        copies = [f"{statistics.median(run[1][i] for run in alike):.0f}" for i in range(len(alike[0][1]))]
        return f"us from the call on: {', '.join(ends)}; us of the copies: {', '.join(copies)}"


def _engine(socket: Path, kv: KV, pool_bytes: int) -> VCacheEngine:
    return VCacheEngine(
        from_dict({"server": {"socket": str(socket)}, "pool": {"device": kv.device, "segment_bytes": pool_bytes}}), kv.layout
    )


def _copy_ms(target: torch.Tensor, source: torch.Tensor) -> float:
    """Milliseconds of one contiguous copy, by CUDA events on a GPU and by the host's clock elsewhere."""
    if not target.is_cuda:
        return 1e3 * timed(lambda: target.copy_(source))
    times = []
    with torch.cuda.device(target.device):
        for _ in range(3):
            start, end = event(), event()
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            times.append(float(start.elapsed_time(end)))
    return statistics.median(times)
