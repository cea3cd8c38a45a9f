"""Finds the copy kernel's tuning: every candidate against the copy engine moving the same bytes, in the same run.

    PYTHONPATH=. python benchmarks/sweep_copy.py --out sweep.json        # two GPUs: peer and local; one GPU: local only

`peer` scatters slots on cuda:1 into a paged KV cache on cuda:0, `local` gathers into slots on the same GPU. First every shape
of the kernel is tried at one page size, then the best ones at all page sizes and totals. Each shape is compared
with the reference before it is timed. `--segments` puts the slots into VMM segments instead of torch's memory.
"""

# torch.cuda's events have no types.
# mypy: allow-untyped-calls

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from vcache_backend.vram_pool import devices, kernels, reference, segment
from vcache_backend.vram_pool.kernels import Tuning
from vcache_backend.vram_pool.paged import PagedKV
from vcache_backend.vram_pool.planner import CopyPlan, Piece, plan

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
LAYERS, BLOCK_TOKENS, CHUNK_BLOCKS = 32, 16, 16
PAGES = (32 * KIB, 16 * KIB, 64 * KIB)
TOTALS = (4 * MIB, 32 * MIB, 256 * MIB, GIB)
CTAS = {"peer": (8, 16, 24, 32, 48, 64, 132, 264), "local": (32, 64, 132, 264, 528, 1056)}
FEW_CTAS = 32
REGISTERS = ((8, 4), (8, 8), (16, 4), (16, 8), (32, 8), (32, 16), (64, 16), (64, 32))
PIPELINED = (
    (8, 4, 4),
    (8, 8, 8),
    (16, 4, 4),
    (16, 8, 3),
    (16, 8, 4),
    (16, 8, 8),
    (32, 8, 4),
    (32, 16, 3),
    (32, 16, 4),
    (32, 16, 6),
    (64, 16, 3),
)
"""(KiB a piece, warps) with the next piece in registers; (KiB, warps, stages) with the next ones in shared memory."""
AHEAD_CYCLES = 300_000
"""How long the GPU is kept busy before each timed copy, so that the host's part of the launch is over when it begins."""


@dataclass(frozen=True)
class Measured:
    """Seconds are medians; `ratio` is the copy engine's time divided by the kernel's."""

    direction: str
    page: int
    total: int
    tuning: Tuning
    seconds: float
    reference_seconds: float
    spread: float
    runs: int

    @property
    def ratio(self) -> float:
        return self.reference_seconds / self.seconds

    def line(self) -> str:
        t = self.tuning
        shape = f"{t.ctas:5d} ctas {t.block_bytes // KIB:3d} KiB {t.num_warps:2d} warps {t.stages} stages"
        speeds = f"{self.total / self.seconds / 1e9:7.1f} of {self.total / self.reference_seconds / 1e9:7.1f} GB/s"
        case = f"{self.direction:5s} {self.page // KIB:3d} KiB pages {self.total // MIB:5d} MiB"
        return f"{self.ratio:6.3f}  {case}  {speeds}  ±{self.spread:5.1%}  {shape}"


class Case:
    """One page size, total and direction: a paged KV cache on cuda:0, slots, and the copy engine's twin of both."""

    def __init__(self, direction: str, page: int, total: int, slots: torch.Tensor, flat: torch.Tensor) -> None:
        self.direction, self.page, self.total = direction, page, total
        self.slots, self.flat = slots[:total], flat[:total]
        blocks = total // (LAYERS * page)
        each = min(CHUNK_BLOCKS, blocks)
        shape = (2 * blocks, BLOCK_TOKENS, page // BLOCK_TOKENS)
        caches = [torch.zeros(shape, dtype=torch.uint8, device="cuda:0") for _ in range(LAYERS)]
        self.kv = PagedKV.describe(caches, BLOCK_TOKENS)
        ids = np.random.default_rng(0).permutation(2 * blocks)[:blocks]
        mapping = (ids[:, None] * BLOCK_TOKENS + np.arange(BLOCK_TOKENS)).reshape(-1)
        tokens = each * BLOCK_TOKENS
        self.plan: CopyPlan = plan(self.kv, tokens, mapping, [Piece(i, i * tokens, 0, tokens) for i in range(blocks // each)])
        self.chunk = self.kv.chunk_bytes(tokens)
        addresses = slots.data_ptr() + np.arange(blocks // each, dtype=np.int64) * self.chunk
        rows = np.empty((kernels.table_rows(self.kv, self.plan), 3), dtype=np.int64)
        self.aligned = kernels.fill_table(self.kv, self.plan, addresses, rows)
        self.table = torch.from_numpy(rows).to("cuda:0")

    def kernel(self, tuning: Tuning) -> None:
        to_slot = self.direction == "local"
        kernels.launch(self.kv, self.plan, self.table, to_slot=to_slot, tuning=tuning, aligned=self.aligned)

    def engine(self) -> None:
        source, target = (self.slots, self.flat) if self.direction == "peer" else (self.flat, self.slots)
        target.copy_(source, non_blocking=True)

    def check(self, tuning: Tuning) -> None:
        """Raises AssertionError unless the kernel moves exactly what the reference moves. Destinations are poisoned first."""
        chunks = list(self.slots.split(self.chunk))
        if self.direction == "peer":
            self.slots.random_(0, 255)
            found = self._scattered(lambda: self.kernel(tuning))
            assert all(map(torch.equal, found, self._scattered(lambda: reference.scatter(self.kv, self.plan, chunks)))), tuning
            return
        for page in self.kv.pages:
            page.random_(0, 255)
        expected = torch.empty_like(self.slots)
        reference.gather(self.kv, self.plan, list(expected.split(self.chunk)))
        self.slots.fill_(0xA5)
        self.kernel(tuning)
        assert torch.equal(self.slots, expected), tuning

    def _scattered(self, move: Callable[[], None]) -> list[torch.Tensor]:
        for page in self.kv.pages:
            page.fill_(0xA5)
        torch.cuda.synchronize(self.slots.device)
        move()
        return [page.clone() for page in self.kv.pages]


def time_all(case: Case, tunings: Sequence[Tuning], runs: int) -> list[Measured]:
    """Medians over `runs` rounds; in each round every tuning once, the copy engine before every tenth."""
    samples: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {i: [] for i in range(-1, len(tunings))}
    for tuning in tunings:
        case.kernel(tuning)
    case.engine()
    for _ in range(runs):
        for index, tuning in enumerate(tunings):
            if index % 10 == 0:
                samples[-1].append(_timed(case.engine))
            samples[index].append(_timed(partial(case.kernel, tuning)))
        torch.cuda.synchronize()
    seconds = {index: [a.elapsed_time(b) / 1e3 for a, b in pairs] for index, pairs in samples.items()}
    base = statistics.median(seconds.pop(-1))
    found = []
    for index, times in seconds.items():
        deciles = statistics.quantiles(times, n=10, method="inclusive")
        middle = statistics.median(times)
        spread = (deciles[-1] - deciles[0]) / middle
        found.append(Measured(case.direction, case.page, case.total, tunings[index], middle, base, spread, runs))
    return found


def _timed(copy: Callable[[], None]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD_CYCLES)
    start.record()
    copy()
    end.record()
    return start, end


def shapes() -> list[Tuning]:
    """Every shape of the kernel to begin with; the number of CTAs does not need another compilation."""
    registers = [Tuning(0, kib * KIB, warps, 1) for kib, warps in REGISTERS]
    return registers + [Tuning(0, kib * KIB, warps, stages) for kib, warps, stages in PIPELINED]


def with_ctas(tunings: Sequence[Tuning], direction: str) -> list[Tuning]:
    return [replace(tuning, ctas=ctas) for tuning, ctas in itertools.product(tunings, CTAS[direction])]


def shape_of(tuning: Tuning) -> Tuning:
    return replace(tuning, ctas=0)


def finalists(found: Sequence[Measured], count: int) -> list[Tuning]:
    """The `count` best shapes of each total, with any number of CTAs and with few, without repetition."""
    chosen: dict[Tuning, None] = {}
    for total in sorted({m.total for m in found}):
        for most in (max(CTAS["local"]), FEW_CTAS):
            ranked = sorted((m for m in found if m.total == total and m.tuning.ctas <= most), key=lambda m: -m.ratio)
            chosen.update(dict.fromkeys(list(dict.fromkeys(shape_of(m.tuning) for m in ranked))[:count]))
    return list(chosen)


def best_table(found: Sequence[Measured]) -> Iterator[str]:
    """For each direction and total the tuning whose worst page size is best, with any number of CTAs and with few."""
    for direction, total in sorted({(m.direction, m.total) for m in found}):
        by_tuning: dict[Tuning, list[Measured]] = {}
        for m in found:
            if (m.direction, m.total) == (direction, total):
                by_tuning.setdefault(m.tuning, []).append(m)
        # Hints are tried at one page size only, which must not make them look better than what was tried at all.
        pages = max(map(len, by_tuning.values()))
        worst = [min(each, key=lambda m: m.ratio) for each in by_tuning.values() if len(each) == pages]
        for most in (max(CTAS["local"]), FEW_CTAS):
            fitting = [m for m in worst if m.tuning.ctas <= most]
            if fitting:
                yield f"<= {most:4d} ctas  {max(fitting, key=lambda m: m.ratio).line()}"


def sweep(direction: str, slots: torch.Tensor, options: argparse.Namespace, deadline: float) -> list[Measured]:
    flat = torch.empty(max(TOTALS), dtype=torch.uint8, device="cuda:0")
    coarse: list[Measured] = []
    for total in (4 * MIB, 256 * MIB):
        case = Case(direction, 32 * KIB, total, slots, flat)
        for shape in shapes():
            if time.monotonic() < deadline - options.seconds / 4:
                coarse += time_all(case, with_ctas([shape], direction), 4)
    best = finalists(coarse, 2)
    print(f"{direction}: {len(coarse)} coarse measurements; going on with {len(best)} shapes")
    fine: list[Measured] = []
    for page in PAGES:
        for total in TOTALS:
            case = Case(direction, page, total, slots, flat)
            if total == min(TOTALS):
                for shape in best:
                    case.check(replace(shape, ctas=24))
            if time.monotonic() < deadline:
                fine += time_all(case, with_ctas(best, direction), options.runs)
            else:
                print(f"out of time: {direction}, {page // KIB} KiB pages, {total // MIB} MiB left out")
    return fine


def slots_on(ordinal: int, segments: bool, undo: ExitStack) -> torch.Tensor:
    """Room for the largest total on GPU `ordinal`, readable by kernels on cuda:0."""
    if segments:
        here, there = devices.resolve("cuda:0"), devices.resolve(f"cuda:{ordinal}")
        owned = undo.enter_context(segment.create(there, max(TOTALS)))
        return undo.enter_context(segment.map_segment(owned.info, owned.fd, here)).tensor(0, max(TOTALS))
    slots = torch.empty(max(TOTALS), dtype=torch.uint8, device=f"cuda:{ordinal}")
    # A plain copy makes torch open peer access, in one direction; only then may a kernel use the other GPU's addresses.
    near = torch.zeros(1, dtype=torch.uint8, device="cuda:0")
    near.copy_(slots[:1])
    slots[:1].copy_(near)
    return slots


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write all final measurements here, as JSON")
    parser.add_argument("--runs", type=int, default=10, help="rounds behind each median (default 10)")
    parser.add_argument("--seconds", type=float, default=220, help="stop starting new cases after this long (default 220)")
    parser.add_argument("--segments", action="store_true", help="slots in VMM segments instead of torch's memory")
    parser.add_argument("--top", type=int, default=60, help="rows to print (default 60)")
    options = parser.parse_args()
    began = time.monotonic()
    places = {"peer": 1, "local": 0} if torch.cuda.device_count() > 1 else {"local": 0}
    found: list[Measured] = []
    torch.cuda.set_device(0)
    for number, (direction, ordinal) in enumerate(places.items(), start=1):
        with ExitStack() as undo:
            deadline = began + options.seconds * number / len(places)
            found += sweep(direction, slots_on(ordinal, options.segments, undo), options, deadline)
    for m in sorted(found, key=lambda m: -m.ratio)[: options.top]:
        print(m.line())
    print("\nbest for each direction and total, judged by its worst page size")
    for line in best_table(found):
        print(line)
    print(f"{time.monotonic() - began:.0f} s")
    if options.out:
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        rows = [asdict(m) | {"ratio": m.ratio} for m in found]
        options.out.write_text(
            json.dumps({"gpus": names, "torch": torch.__version__, "segments": options.segments, "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
