"""Makes figures from answers, and rows from figures."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from ..results import Row, none, percentile, row, spread
from .client import Answer
from .systems import SYSTEMS
from .workloads import Ceilings

MS = 1e3
OURS = {"vcache": "vllm", "inplace": "inplace", "inplace_host": "inplace_host"}
"""Our systems, and the prefix of the rows that compare each with others."""
FOUR = "prefix_x4"
"""The workload of four servers."""
AHEAD = {("inplace", "mp", "prefix"): 1.1, ("inplace", "alone", FOUR): 1.5}
"""By (ours, theirs, workload): the least ratio of throughputs that is asked for; 1 for all
others.
"""
OF_RUNS = ("requests_per_second", "ttft_p50", "hit_rate")
"""Figures for which every run's row is kept, besides the median of all runs."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one system under one workload. Only complete answers count.

    Samples are in ms; the duration is in seconds, from the first request to the last answer.
    hit_rate: cached tokens ÷ prompt tokens, as the servers report them for each request. shares:
    the parts of all prompt tokens that were found in vLLM's own prefix cache, and outside of it, by
    the servers' counters."""

    requests: int
    errors: int
    duration: float
    ttft: list[float]
    tpot: list[float]
    hit_rate: float
    shares: dict[str, float] = {}

    @property
    def throughput(self) -> float:
        """Complete answers per second."""
        return (self.requests - self.errors) / self.duration if self.duration else 0.0


def figures(
    answers: Sequence[Answer], before: Mapping[str, float], after: Mapping[str, float]
) -> Figures:
    """The figures of these answers. before, after: the servers' counters before and after the
    workload.
    """
    whole = [answer for answer in answers if not answer.error]
    prompt = sum(answer.prompt for answer in whole)
    duration = max(a.last for a in whole) - min(a.sent for a in whole) if whole else 0.0
    asked = after.get("queries", 0.0) - before.get("queries", 0.0)
    shares = {
        key: (after[key] - before[key]) / asked
        for key in ("own", "external")
        if asked and key in after
    }
    return Figures(
        requests=len(answers),
        errors=len(answers) - len(whole),
        duration=duration,
        ttft=[MS * (answer.first - answer.sent) for answer in whole],
        tpot=[
            MS * (answer.last - answer.first) / (answer.tokens - 1)
            for answer in whole
            if answer.tokens > 1
        ],
        hit_rate=sum(answer.cached for answer in whole) / prompt if prompt else 0.0,
        shares=shares,
    )


def raw_rows(
    system: str, workload: str, found: Figures, ceilings: Ceilings, what: str, has: str
) -> list[Row]:
    """A row for every figure of one system under one workload. The reference is the value itself;
    for hit rates a shared cache's ceiling.

    what: the workload in words; `compared` only compares rows with the same. has: the system's
    memory, in words."""
    said = f"{SYSTEMS[system].label}, {has}; {what}"

    def name(figure: str) -> str:
        return case(system, workload, figure)

    def timed(which: str, samples: Sequence[float]) -> list[Row]:
        made = []
        for share in (50, 99):
            value = percentile(samples, share)
            one = row(name(f"{which}_p{share}"), "ms", value, value, what=said, runs=len(samples))
            made.append(msgspec.structs.replace(one, spread=spread(samples)))
        return made

    def share(figure: str, value: float, text: str) -> Row:
        about = (
            f"{text}; reference: the ceiling of one shared cache without bounds "
            f"({ceilings.single:.3f} for one a server)"
        )
        return row(
            name(figure),
            "fraction",
            value,
            ceilings.shared,
            what=f"{said}; {about}",
            runs=found.requests,
        )

    texts = {"own": "found in vLLM's own prefix cache", "external": "found through the connector"}
    return [
        row(
            name("requests_per_second"),
            "requests/s",
            found.throughput,
            found.throughput,
            what=said,
            runs=found.requests,
        ),
        *timed("ttft", found.ttft),
        *timed("tpot", found.tpot),
        none(name("errors"), "requests", float(found.errors), said, found.requests),
        share("hit_rate", found.hit_rate, "cached tokens of all prompt tokens"),
        *(share(f"hit_rate_{key}", value, texts[key]) for key, value in found.shares.items()),
    ]


def case(system: str, workload: str, figure: str) -> str:
    return f"vllm_serving_{system}_{workload}_{figure}"


def of_runs(rows: Mapping[str, Row], run: int, raw: Sequence[Row]) -> list[Row]:
    """The raw rows of run number `run`, with the figures in OF_RUNS replaced by medians of all runs
    so far, with their spread.

    rows: those of the earlier runs. The workload's text names all seeds, since comparisons need the
    same ones."""
    made = []
    for one in raw:
        if not one.case.endswith(OF_RUNS):
            made.append(one)
            continue
        made.append(mine := msgspec.structs.replace(one, case=f"{one.case}_run{run}"))
        others = [
            row
            for case, row in rows.items()
            if re.fullmatch(rf"{one.case}_run\d+", case) and case != mine.case
        ]
        runs = [*others, mine]
        seeds = sorted(
            int(seed) for each in runs for seed in re.findall(r", seed (\d+)", each.what)
        )
        what = re.sub(r", seed \d+", f", seeds {', '.join(map(str, seeds))}", one.what)
        values, references = [each.value for each in runs], [each.reference for each in runs]
        made.append(row(one.case, one.unit, values, references, what=what))
    return made


def compared(rows: Mapping[str, Row], workload: str) -> list[Row]:
    """Rows that compare each of our systems with each other one measured on the same workload. A
    ratio above 1: ours is ahead.
    """
    found: list[Row] = []
    rate, first = "requests_per_second", "ttft_p50"
    for our, prefix in OURS.items():
        for other in [
            other
            for other, system in SYSTEMS.items()
            if not system.ours or (other == "vcache" and our != other)
        ]:
            ours, theirs = (_named(rows, system, workload) for system in (our, other))
            if (
                not ours
                or not theirs
                or len({_workload(row) for row in (*ours.values(), *theirs.values())}) > 1
            ):
                continue
            about, least = (
                f"{_workload(ours[rate])}; reference:",
                AHEAD.get((our, other, workload), 1.0),
            )
            their = "pool" if other == "vcache" else other
            name = f"{prefix}_x4" if workload == FOUR else prefix
            of = "" if workload == FOUR else f"_{workload}"
            case_, what = f"{name}_throughput_vs_{their}{of}", f"requests a second; {about} {other}"
            found.append(_ahead(case_, ours[rate], theirs[rate], what, least))
            case_, what = (
                f"{name}_ttft_p50_vs_{their}{of}",
                f"median TTFT of {other}; {about} {our}",
            )
            found.append(_ahead(case_, theirs[first], ours[first], what, 1.0))
    return found


def _named(rows: Mapping[str, Row], system: str, workload: str) -> dict[str, Row]:
    """The rows of a system that comparisons need; empty unless all are there."""
    named = {
        figure: rows.get(case(system, workload, figure))
        for figure in ("requests_per_second", "ttft_p50")
    }
    return (
        {figure: row for figure, row in named.items() if row is not None}
        if all(named.values())
        else {}
    )


def _workload(row: Row) -> str:
    return row.what.partition("; ")[2]


def _ahead(name: str, value: Row, reference: Row, what: str, least: float) -> Row:
    made = row(
        name, value.unit, value.value, reference.value, what=what, at_least=least, runs=value.runs
    )
    return msgspec.structs.replace(made, spread=value.spread)
