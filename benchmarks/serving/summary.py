"""From answers to figures, and from figures to rows."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from ..results import Row, spread
from .client import Answer
from .systems import SYSTEMS
from .workloads import Ceilings

MS = 1e3
OURS = "vcache"
HEADLINE = "prefix"
"""The workload whose comparisons also stand without its name."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Of one system under one workload. Samples in ms, of whole answers; duration from the first request to the last answer.

    hit_rate: cached tokens ÷ prompt tokens, of whole answers, as the servers report them for each request. shares: of prompt
    tokens, found in vLLM's own prefix cache and outside of it, by the servers' counters.
    """

    requests: int
    errors: int
    duration: float
    output_tokens: int
    ttft: list[float]
    tpot: list[float]
    hit_rate: float
    shares: dict[str, float] = {}

    @property
    def throughput(self) -> float:
        """Whole answers a second."""
        return (self.requests - self.errors) / self.duration if self.duration else 0.0


def figures(answers: Sequence[Answer], before: Mapping[str, float], after: Mapping[str, float]) -> Figures:
    """before, after: the servers' counters around the workload."""
    whole = [answer for answer in answers if not answer.error]
    prompt = sum(answer.prompt for answer in whole)
    duration = max(a.last for a in whole) - min(a.sent for a in whole) if whole else 0.0
    asked = after.get("queries", 0.0) - before.get("queries", 0.0)
    shares = {key: (after[key] - before[key]) / asked for key in ("own", "external") if asked and key in after}
    return Figures(
        requests=len(answers),
        errors=len(answers) - len(whole),
        duration=duration,
        output_tokens=sum(answer.tokens for answer in whole),
        ttft=[MS * (answer.first - answer.sent) for answer in whole],
        tpot=[MS * (answer.last - answer.first) / (answer.tokens - 1) for answer in whole if answer.tokens > 1],
        hit_rate=sum(answer.cached for answer in whole) / prompt if prompt else 0.0,
        shares=shares,
    )


def raw_rows(system: str, workload: str, found: Figures, ceilings: Ceilings, what: str, has: str) -> list[Row]:
    """Every figure of one system under one workload. Reference: itself, but for hit rates: the ceiling of a shared cache.

    what: the workload; `compared` needs it to be the same. has: the system's memory.
    """
    said = f"{SYSTEMS[system].label}, {has}; {what}"

    def plain(figure: str, value: float, unit: str, samples: Sequence[float] = (), text: str = said, limit: str = "") -> Row:
        ok = value == 0 if limit else None
        runs = len(samples) or found.requests
        return Row(case(system, workload, figure), value, unit, value, 1.0, runs, spread(samples), text, limit, ok)

    def share(figure: str, value: float, text: str) -> Row:
        ceiling = ceilings.shared
        ratio = value / ceiling if ceiling else 0.0
        about = (
            f"{said}; {text}; reference: the ceiling of one shared cache without bounds ({ceilings.single:.3f} for one a server)"
        )
        return Row(case(system, workload, figure), value, "fraction", ceiling, ratio, found.requests, 0.0, about)

    rows = [
        plain("requests_per_second", found.throughput, "requests/s"),
        plain("output_tokens_per_second", found.output_tokens / found.duration if found.duration else 0.0, "tokens/s"),
        plain("ttft_p50", percentile(found.ttft, 50), "ms", found.ttft),
        plain("ttft_p99", percentile(found.ttft, 99), "ms", found.ttft),
        plain("tpot_p50", percentile(found.tpot, 50), "ms", found.tpot),
        plain("tpot_p99", percentile(found.tpot, 99), "ms", found.tpot),
        plain("seconds", found.duration, "s"),
        plain("errors", float(found.errors), "requests", limit="0"),
        share("hit_rate", found.hit_rate, "cached tokens of all prompt tokens"),
    ]
    names = {"own": "found in vLLM's own prefix cache", "external": "found through the connector"}
    return rows + [share(f"hit_rate_{key}", value, names[key]) for key, value in found.shares.items()]


def case(system: str, workload: str, figure: str) -> str:
    return f"vllm_serving_{system}_{workload}_{figure}"


def compared(rows: Mapping[str, Row], workload: str) -> list[Row]:
    """Ours against each of the others that the same workload was measured on, from the raw rows. Ahead is above 1."""
    found: list[Row] = []
    for other in SYSTEMS:
        pair = [_named(rows, system, workload) for system in (OURS, other)]
        if other == OURS or not all(pair) or len({_workload(row) for each in pair for row in each.values()}) > 1:
            continue
        ours, theirs = pair
        about = f"{_workload(ours['requests_per_second'])}; reference:"
        rate = "requests_per_second"
        suffixes = ("", f"_{workload}") if workload == HEADLINE else (f"_{workload}",)
        for suffix in suffixes:
            found.append(
                _ratio(f"vllm_throughput_vs_{other}{suffix}", ours[rate], theirs[rate], f"requests a second; {about} {other}")
            )
            found.append(
                _ratio(
                    f"vllm_ttft_p50_vs_{other}{suffix}",
                    theirs["ttft_p50"],
                    ours["ttft_p50"],
                    f"median TTFT of {other}; {about} {OURS}",
                )
            )
    return found


def _named(rows: Mapping[str, Row], system: str, workload: str) -> dict[str, Row]:
    """The rows that comparisons need; none unless all are there."""
    named = {figure: rows.get(case(system, workload, figure)) for figure in ("requests_per_second", "ttft_p50")}
    return {figure: row for figure, row in named.items() if row is not None} if all(named.values()) else {}


def _workload(row: Row) -> str:
    return row.what.partition("; ")[2]


def _ratio(name: str, value: Row, reference: Row, what: str) -> Row:
    ratio = value.value / reference.value if reference.value else 0.0
    return Row(name, value.value, value.unit, reference.value, ratio, value.runs, value.spread, what, ">= 1", ratio >= 1)


def percentile(values: Sequence[float], which: int) -> float:
    """0 for none, the value itself for one."""
    if len(values) < 2:
        return values[0] if values else 0.0
    return statistics.quantiles(values, n=100, method="inclusive")[which - 1]
