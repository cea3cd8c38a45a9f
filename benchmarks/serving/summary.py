"""Makes figures from answers, and rows from figures."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import msgspec

from ..results import Row, none, percentile, row
from .client import Answer
from .workloads import Plan

MS = 1e3
RATIOS = {"throughput": "requests_per_second", "ttft_p50": "ttft_p50", "ttft_p99": "ttft_p99"}
"""The figures that are compared, by the name that rows of comparisons give them."""
BESIDE = "lmcache", "inplace"
"""The systems against which both beside each other count."""
RANKS = {"throughput": (1.3, 1.5), "ttft_p50": (2.0, 2.0)}
"""The least ratios of `dp_*` rows of two ranks, and of four."""
WINDOWS = {"throughput": (1.2, 1.4), "ttft_p50": (1.5, 2.0)}
"""Of models with windows."""


class Figures:
    """The figures of one arm under one run of a workload, from its phases that count. Only complete
    answers count.

    duration: seconds of all phases, each from its first request to its last answer. ttft, tpot: of
    the answers, in ms. handover: ms from the prefill server's answer to the decode server's first
    token. gaps: of each answer, ms between two tokens. hit_rate: cached tokens ÷ prompt tokens, as
    the servers report them for each request."""

    def __init__(self, ceiling: float) -> None:
        """ceiling: the hit rate of one shared cache without bounds."""
        self.ceiling = ceiling
        self.requests, self.errors, self.duration = 0, 0, 0.0
        self.ttft = list[float]()
        self.handover, self.tpot = list[float](), list[float]()
        self.gaps = list[list[float]]()
        self._prompt = self._cached = 0

    def add(self, answers: Sequence[Answer]) -> None:
        """A phase."""
        whole = [answer for answer in answers if not answer.error]
        self.requests += len(answers)
        self.errors += len(answers) - len(whole)
        if whole:
            self.duration += max(a.last for a in whole) - min(a.sent for a in whole)
        for answer in whole:
            self.ttft.append(MS * (answer.first - answer.sent))
            self.handover += [MS * (answer.first - answer.handed)] if answer.handed else []
            self.gaps += [[MS * gap for gap in answer.gaps]] if answer.gaps else []
            if answer.tokens > 1:
                self.tpot.append(MS * (answer.last - answer.first) / (answer.tokens - 1))
            self._prompt += answer.prompt
            self._cached += answer.cached

    @property
    def throughput(self) -> float:
        """Complete answers per second."""
        return (self.requests - self.errors) / self.duration if self.duration else 0.0

    @property
    def steps(self) -> str:
        """How evenly answers come: whether one gap of an answer is longer, or all are, and of which
        answers."""
        medians = [percentile(gaps, 50) for gaps in self.gaps]
        low, high = (percentile(medians, which) for which in (10, 90))
        longest, each = [max(gaps) for gaps in self.gaps], [f"{ms:.2f}" for ms in self.tpot[:48]]
        where = Counter(gaps.index(max(gaps)) for gaps in self.gaps).most_common(3)
        return (
            f"an answer's median gap {low:.2f} to {high:.2f} ms, its longest "
            f"{percentile(longest, 50):.1f} ms (answers by gap: {dict(where)}), "
            f"TPOT {' '.join(each)}"
        )

    @property
    def hit_rate(self) -> float:
        return self._cached / self._prompt if self._prompt else 0.0


def rows_of(arm: str, workload: str, runs: Sequence[Figures], label: str, what: str) -> list[Row]:
    """A row for every figure of an arm under a workload, of the medians of its runs. The reference
    is the value itself; for hit rates a shared cache's ceiling.

    label: the system and the policy in words; what: the workload. `compared` only
    compares rows with the same workload."""
    said = f"{label}; {what}"

    def made(
        figure: str, unit: str, values: list[float], reference: Any = None, more: str = ""
    ) -> Row:
        against = values if reference is None else reference
        return row(case(arm, workload, figure), unit, values, against, what=said + more)

    errors, requests = sum(run.errors for run in runs), sum(run.requests for run in runs)
    shared, about = [run.ceiling for run in runs], "; reference: one shared cache without bounds"
    return [
        made("requests_per_second", "requests/s", [run.throughput for run in runs]),
        made("ttft_p50", "ms", [percentile(run.ttft, 50) for run in runs]),
        made("ttft_p99", "ms", [percentile(run.ttft, 99) for run in runs]),
        made("tpot_p50", "ms", [percentile(run.tpot, 50) for run in runs]),
        *(
            made(f"gap_p{which}", "ms", [percentile([*chain(*run.gaps)], which) for run in runs])
            for which in (50, 99)
        ),
        made("gap_longest_p50", "ms", [percentile([*map(max, run.gaps)], 50) for run in runs]),
        *(
            made(f"handover_p{which}", "ms", [percentile(run.handover, which) for run in runs])
            for which in (50, 99)
            if any(run.handover for run in runs)
        ),
        none(case(arm, workload, "errors"), "requests", errors, said, requests),
        made("hit_rate", "fraction", [run.hit_rate for run in runs], shared, about),
    ]


def case(arm: str, workload: str, figure: str) -> str:
    return f"vllm_serving_{arm}_{workload}_{figure}"


def compared(rows: Mapping[str, Row], workload: str, four: bool) -> list[Row]:
    """In place with requests in turn, and behind each router, against the best plain vLLM of any
    policy, figure by figure; both beside each other against the better of LMCache's server and
    vcache; and data parallel ranks with and without vcache, and in place beside a pool. Above 1:
    vcache is ahead.

    rows: of arms; those of another workload than ours are left out. four: of four GPUs, whose rows
    begin with x4_."""
    made, begin, all_ = list[Row](), "x4_" if four else "", dict.fromkeys(RATIOS, 1.0)
    ranks = WINDOWS if "gpt_oss" in workload else RANKS
    least = {figure: limits[four] for figure, limits in ranks.items()}
    for system, others, name, limits in (
        ("inplace", ["alone"], f"{begin}{workload}_{{}}", all_),
        (r"both(?:_pool)?", BESIDE, f"mp_{{}}_{workload}", all_),
        ("inplace_dp", ["alone_dp"], f"{begin}dp_{workload}", least),
        ("inplace_dp", ["pool_dp"], f"{begin}dp_{workload}_pool", {"throughput": 1.0}),
    ):
        for ours in _arms(rows, workload, system):
            said = _said(rows, workload, ours)
            plain = [arm for other in others for arm in _arms(rows, workload, other, said)]
            named = name.format(ours.removeprefix("inplace_").removesuffix("_turn"))
            for figure, limit in limits.items() if plain else ():
                made.append(_ratio(rows, workload, named, figure, ours, plain, limit))
    return made


def apart(
    rows: Mapping[str, Row], workload: str, plan: Plan, prefills: int, servers: int
) -> list[Row]:
    """vcache with prefill apart, against the best other arm in each figure. Of prompts with
    common prefixes only the time to first token is of interest. prefills: of the servers."""
    made, begin = list[Row](), f"vllm_serving_pd_vcache_turn_{workload}_"
    shared = plan.repeats > 1
    shape = f"{plan.prefix // 1024}k_{plan.concurrency}_{plan.output}"
    shape += f"_{prefills}+{servers - prefills}" if 2 * prefills != servers else ""
    limits = {"handover_p50": 0.8 if plan.concurrency == 1 else 0.65, "ttft_p50": 1 / 1.5}
    limits |= {"tpot_p50": 1.01, "gap_p99": 1.0, "requests_per_second": 1.0}
    for figure, limit in limits.items():
        theirs = re.compile(rf"vllm_serving_pd_(?!vcache)\w+_turn_{workload}_{figure}")
        others = [one for name, one in rows.items() if theirs.fullmatch(name)]
        ours = rows.get(begin + figure)
        if ours is None or not others or shared != (figure == "ttft_p50"):
            continue
        rate = figure == "requests_per_second"
        best = sorted(others, key=lambda one: one.value, reverse=rate)[0]
        name = "throughput" if rate else figure
        least, most = (limit, None) if rate else (None, limit)
        what = f"{ours.what}; reference: {best.what.partition(';')[0]}"
        case = f"pd_shared_{name}_{shape}" if shared else f"pd_{name}_{shape}"
        case = f"x4_{case}" if servers == 4 else case
        values = ours.unit, ours.value, best.value
        made.append(row(case, *values, what=what, at_least=least, at_most=most, runs=ours.runs))
    return made


def _ratio(
    rows: Mapping[str, Row],
    workload: str,
    name: str,
    figure: str,
    ours: str,
    plain: list[str],
    least: float,
) -> Row:
    """Our arm against the best of the plain ones in one figure of RATIOS."""
    rate = figure == "throughput"
    found = {arm: rows[case(arm, workload, RATIOS[figure])] for arm in (ours, *plain)}
    best = sorted(plain, key=lambda arm: found[arm].value, reverse=rate)[0]
    value, reference = (found[ours], found[best]) if rate else (found[best], found[ours])
    unit = "requests a second" if rate else "ms of theirs; reference: ours"
    what = f"{_said(rows, workload, ours)}; {ours} against {best} of {', '.join(plain)}; {unit}"
    figures = value.unit, value.value, reference.value
    made = row(f"{name}_{figure}", *figures, what=what, at_least=least, runs=value.runs)
    return msgspec.structs.replace(made, spread=value.spread)


def _arms(
    rows: Mapping[str, Row], workload: str, system: str = r"\w+", what: str = ""
) -> list[str]:
    """The arms of a system that have rows of a workload. what: only those with the same one."""
    pattern = re.compile(
        case(rf"({system}_(turn|power_of_two|cache_aware\d+))", workload, "requests_per_second")
    )
    arms = [match[1] for name in rows if (match := pattern.fullmatch(name))]
    return [arm for arm in arms if what in ("", _said(rows, workload, arm))]


def _said(rows: Mapping[str, Row], workload: str, arm: str) -> str:
    """The workload in words."""
    return rows[case(arm, workload, "requests_per_second")].what.partition("; ")[2]
