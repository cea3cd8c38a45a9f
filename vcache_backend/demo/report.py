"""What the demo says at the end: the figures, beside what they must be, and whether all is right."""

from __future__ import annotations

from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from vcache_backend.config import ByteSize
from vcache_backend.demo import simulation
from vcache_backend.demo.lockstep import Outcome
from vcache_backend.demo.plan import Plan

LINES = 8
"""Most wrong things that are listed; the rest are counted."""


class Percentiles(msgspec.Struct, frozen=True):
    """Microseconds over all workers: the median of medians is no median, so both are the slowest worker's."""

    p50_us: float
    p99_us: float


class Summary(msgspec.Struct, frozen=True):
    """The demo's result; the fields of `--json`. Hit rates are chunks retrieved ÷ chunks asked, 0 to 1."""

    ok: bool
    devices: list[str]
    requests: int
    tokens: int
    seconds: float
    chunk_bytes: int
    pool_chunks: int
    working_set_chunks: int
    chunks_asked: int
    chunks_retrieved: int
    hit_rate: float
    hit_rate_lru_simulation: float
    hit_rate_infinite: float
    hit_rate_private: float
    evictions: int
    evictions_lru_simulation: int
    bytes_own: int
    bytes_peer: int
    gb_per_s: float
    lookup: Percentiles
    acquire: Percentiles
    bytes_checked: int
    wrong_bytes: int
    problems: list[str]


def summarize(plan: Plan, outcome: Outcome) -> Summary:
    """Compare what happened with the simulation of the pool that was really there. `problems` is empty if and only if all is right."""
    capacity = sum(segment.nbytes // plan.chunk_bytes for segment in outcome.segments)
    exact = simulation.shared(plan.prompts, capacity)
    asked = sum(len(prompt) for prompt in plan.prompts)
    hits = [done.retrieved // plan.chunk_size for done in outcome.done]
    evictions = sum(segment.evictions for segment in outcome.segments)
    problems = _faults(plan, outcome) + _differences(plan, hits, exact.hits) + _failures(outcome)
    if evictions != exact.evictions:
        problems.append(f"{evictions:,} evictions, the exact LRU simulation has {exact.evictions:,}")

    def rate(chunks: list[int]) -> float:
        return sum(chunks) / asked if asked else 0.0

    return Summary(
        ok=not problems,
        devices=plan.devices,
        requests=len(plan.requests),
        tokens=sum(request.input_length for request in plan.requests),
        seconds=outcome.seconds,
        chunk_bytes=plan.chunk_bytes,
        pool_chunks=capacity,
        working_set_chunks=simulation.unique(plan.prompts),
        chunks_asked=asked,
        chunks_retrieved=sum(hits),
        hit_rate=rate(hits),
        hit_rate_lru_simulation=rate(exact.hits),
        hit_rate_infinite=rate(simulation.infinite(plan.prompts).hits),
        hit_rate_private=rate(simulation.private(plan.prompts, capacity, len(plan.devices)).hits),
        evictions=evictions,
        evictions_lru_simulation=exact.evictions,
        wrong_bytes=sum(fault.nbytes for done in outcome.done for fault in done.faults),
        bytes_checked=sum(hits) * plan.chunk_bytes,
        problems=problems,
        **_measured(outcome.stats),
    )


def render(summary: Summary) -> RenderableType:
    """The table for people, and below it every problem in red."""
    table = Table(
        box=box.SIMPLE_HEAD,
        show_header=False,
        title=f"workers on {', '.join(summary.devices)}",
    )
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for row in [*_rates(summary), None, *_data(summary)]:
        if row is None:
            table.add_section()
        else:
            table.add_row(*row)
    return Group(table, *_verdict(summary))


def _rates(s: Summary) -> list[tuple[str, str, str]]:
    equal = "equal, as it must be" if s.hit_rate == s.hit_rate_lru_simulation else "[red]must be equal to it[/red]"
    parts = len(s.devices)
    return [
        ("requests", f"{s.requests:,}", f"Mooncake trace, in {s.seconds:.1f} s"),
        ("tokens", f"{s.tokens:,}", f"chunks of {ByteSize(s.chunk_bytes).about}"),
        ("pool", ByteSize(s.pool_chunks * s.chunk_bytes).about, f"{s.pool_chunks:,} of {s.working_set_chunks:,} chunks fit"),
        ("hit rate", f"{s.hit_rate:.1%}", f"{s.chunks_retrieved:,} of {s.chunks_asked:,} chunks"),
        ("  exact LRU simulation", f"{s.hit_rate_lru_simulation:.1%}", equal),
        ("  infinite cache", f"{s.hit_rate_infinite:.1%}", "the ceiling"),
        (f"  {parts} private caches", f"{s.hit_rate_private:.1%}", f"1/{parts} of the pool each, not shared"),
    ]


def _data(s: Summary) -> list[tuple[str, str, str]]:
    return [
        ("from the own segment", ByteSize(s.bytes_own).about, ""),
        ("from a peer's segment", ByteSize(s.bytes_peer).about, ""),
        ("retrieve", f"{s.gb_per_s:.2f} GB/s", "the copies alone"),
        ("lookup p50 / p99", f"{s.lookup.p50_us:.0f} / {s.lookup.p99_us:.0f} µs", "with hashing; the slowest worker's"),
        ("acquire p50 / p99", f"{s.acquire.p50_us:.0f} / {s.acquire.p99_us:.0f} µs", "the slowest worker's"),
        ("evictions", f"{s.evictions:,}", ""),
        ("wrong bytes", f"{s.wrong_bytes:,}", f"of {s.bytes_checked:,} retrieved"),
    ]


def _verdict(summary: Summary) -> list[Text]:
    if summary.ok:
        return [Text("Every byte is right and the hit rate is exact.", style="green")]
    shown = [Text(problem, style="red") for problem in summary.problems[:LINES]]
    more = len(summary.problems) - LINES
    return shown + ([Text(f"and {more:,} more", style="red")] if more > 0 else [])


def _faults(plan: Plan, outcome: Outcome) -> list[str]:
    """Wrong bytes and odd answers, each with its request and worker."""
    lines = []
    for done in outcome.done:
        where = f"request {done.index}, worker {done.index % len(plan.devices)}"
        lines += [f"{where}: {fault}" for fault in done.faults] + [f"{where}: {problem}" for problem in done.problems]
    return lines


def _differences(plan: Plan, hits: list[int], exact: list[int]) -> list[str]:
    """The first request whose hits are not the simulation's; what follows may only be its consequence."""
    wrong = [index for index, (have, want) in enumerate(zip(hits, exact, strict=True)) if have != want]
    if not wrong:
        return []
    first = wrong[0]
    return [
        f"hits differ from the exact LRU simulation in {len(wrong):,} requests, first in request {first} "
        f"(worker {first % len(plan.devices)}): {hits[first]} chunks of {len(plan.prompts[first])}, must be {exact[first]}"
    ]


def _failures(outcome: Outcome) -> list[str]:
    """What the engines turned into misses. A chunk not stored for want of room is none: the simulation knows that too."""
    return [
        f"worker {worker} counted {count:,} failures: {cause}"
        for worker, stats in enumerate(outcome.stats)
        for cause, count in stats["failures"].items()
        if not cause.startswith("not_stored")
    ]


def _measured(stats: list[dict[str, Any]]) -> dict[str, Any]:
    """What the engines counted, over all workers; bandwidth over the time their copies took."""

    def slowest(name: str) -> Percentiles:
        return Percentiles(max(s[name]["p50_us"] for s in stats), max(s[name]["p99_us"] for s in stats))

    own, peer = (sum(s["bytes"][source] for s in stats) for source in ("own", "peer"))
    copying_us = sum(s["retrieve_copy"]["count"] * s["retrieve_copy"]["mean_us"] for s in stats)
    return {
        "bytes_own": own,
        "bytes_peer": peer,
        "gb_per_s": (own + peer) / copying_us / 1e3 if copying_us else 0.0,
        "lookup": slowest("lookup"),
        "acquire": slowest("acquire"),
    }
