"""Makes figures from answers, rows from figures, and tables from rows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..results import Row, none, percentile, row
from .client import Answer

MS = 1e3
PLAIN, OURS = "alone", "inplace"
"""The systems that `routed_*` rows compare."""
RATIOS = {"throughput": "requests_per_second", "ttft_p50": "ttft_p50", "ttft_p99": "ttft_p99"}
"""The figures that are compared, by the name that rows of comparisons give them."""
RANKS = {"throughput": (1.3, 1.5), "ttft_p50": (2.0, 2.0)}
"""The least ratios of `dp_*` rows of two ranks, and of four."""


class Figures:
    """The figures of one arm under one run of a workload, from its phases that count. Only complete
    answers count.

    duration: seconds of all phases, each from its first request to its last answer. ttft, tpot: of
    the answers, in ms. hit_rate: cached tokens ÷ prompt tokens, as the servers report them for each
    request."""

    def __init__(self, ceiling: float) -> None:
        """ceiling: the hit rate of one shared cache without bounds."""
        self.ceiling = ceiling
        self.requests, self.errors, self.duration = 0, 0, 0.0
        self.ttft, self.tpot = list[float](), list[float]()
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
            if answer.tokens > 1:
                self.tpot.append(MS * (answer.last - answer.first) / (answer.tokens - 1))
            self._prompt += answer.prompt
            self._cached += answer.cached

    @property
    def throughput(self) -> float:
        """Complete answers per second."""
        return (self.requests - self.errors) / self.duration if self.duration else 0.0

    @property
    def hit_rate(self) -> float:
        return self._cached / self._prompt if self._prompt else 0.0


def rows_of(
    arm: str, workload: str, runs: Sequence[Figures], label: str, has: str, what: str
) -> list[Row]:
    """A row for every figure of an arm under a workload, of the medians of its runs. The reference
    is the value itself; for hit rates a shared cache's ceiling.

    label: the system and the policy in words; has: its memory; what: the workload. `compared` only
    compares rows with the same workload."""
    said = f"{label}, {has}; {what}"

    def made(
        figure: str, unit: str, values: list[float], reference: Any = None, more: str = ""
    ) -> Row:
        against = values if reference is None else reference
        return row(case(arm, workload, figure), unit, values, against, what=said + more)

    errors, requests = sum(run.errors for run in runs), sum(run.requests for run in runs)
    shared, about = [run.ceiling for run in runs], "; reference: one shared cache without bounds"
    times = {"ttft": [run.ttft for run in runs], "tpot": [run.tpot for run in runs]}
    return [
        made("requests_per_second", "requests/s", [run.throughput for run in runs]),
        *(
            made(f"{figure}_p{share}", "ms", [percentile(each, share) for each in values])
            for figure, values in times.items()
            for share in (50, 99)
        ),
        none(case(arm, workload, "errors"), "requests", errors, said, requests),
        made("hit_rate", "fraction", [run.hit_rate for run in runs], shared, about),
    ]


def case(arm: str, workload: str, figure: str) -> str:
    return f"vllm_serving_{arm}_{workload}_{figure}"


class Arms:
    """The arms that have rows of a workload. rows: all, of any workload."""

    def __init__(self, rows: Mapping[str, Row], workload: str) -> None:
        self._rows, self._workload = rows, workload
        pattern = re.compile(case(r"(\w+)", workload, "requests_per_second"))
        self.names = [match[1] for name in rows if (match := pattern.fullmatch(name))]

    def row(self, arm: str, figure: str) -> Row:
        return self._rows[case(arm, self._workload, figure)]

    def what(self, arm: str) -> str:
        """The workload in words."""
        return self.row(arm, "requests_per_second").what.partition("; ")[2]

    def of(self, system: str, what: str) -> list[str]:
        """The arms of a system whose workload is the same."""
        pattern = rf"{system}_(turn|least|cache_aware\d+)"
        return [a for a in self.names if re.fullmatch(pattern, a) and self.what(a) == what]

    def ratio(self, name: str, figure: str, mine: str, plain: list[str], least: float) -> Row:
        """Our arm against the best of the plain ones in one figure of RATIOS; above 1: ours is
        ahead."""
        rate = figure == "throughput"
        rows = {arm: self.row(arm, RATIOS[figure]) for arm in (mine, *plain)}
        best = sorted(plain, key=lambda arm: rows[arm].value, reverse=rate)[0]
        value, reference = (rows[mine], rows[best]) if rate else (rows[best], rows[mine])
        unit = "requests a second" if rate else "ms of theirs; reference: ours"
        what = f"{self.what(mine)}; {mine} against {best}, the best of {', '.join(plain)}; {unit}"
        case_ = f"{name}_{figure}"
        made = row(case_, value.unit, value.value, reference.value, what=what, at_least=least)
        return msgspec.structs.replace(made, spread=value.spread, runs=value.runs)


def compared(rows: Mapping[str, Row], workload: str, four: bool) -> list[Row]:
    """In place with requests in turn, and behind each router, against the best plain vLLM of any
    policy, figure by figure; and data parallel ranks with and without vcache.

    rows: of arms; those of another workload than ours are left out. four: of four GPUs, whose rows
    begin with x4_."""
    made, arms, begin = list[Row](), Arms(rows, workload), "x4_" if four else ""
    for mine in [arm for arm in arms.names if arm.startswith(f"{OURS}_") and "_dp_" not in arm]:
        if plain := arms.of(PLAIN, arms.what(mine)):
            name = f"{begin}{workload}_{mine.removeprefix(f'{OURS}_')}"
            made += [arms.ratio(name, figure, mine, plain, 1.0) for figure in RATIOS]
    ranks = f"{OURS}_dp_turn", f"{PLAIN}_dp_turn"
    if set(ranks) <= set(arms.names):
        for figure, least in RANKS.items():
            name = f"{begin}dp_{workload}"
            made.append(arms.ratio(name, figure, ranks[0], [ranks[1]], least[four]))
    return made


def tables(rows: Mapping[str, Row], workload: str) -> str:
    """The figures of all arms under a workload, in 80 columns."""
    arms = Arms(rows, workload)
    if not arms.names:
        return ""
    first, wide = arms.names[0], max(25, *map(len, arms.names))
    ceiling = arms.row(first, "hit_rate").reference
    lines = textwrap.wrap(f"{arms.what(first)}. Ceiling of the hit rate {ceiling:.3f}.", 80)
    lines += [f"{'':{wide}}  req/s TTFT p50      p99 TPOT p50    hit errors"]
    for arm in arms.names:

        def value(figure: str, arm: str = arm) -> float:
            return arms.row(arm, figure).value

        lines.append(
            f"{arm:{wide}}{value('requests_per_second'):7.2f} {value('ttft_p50'):8.0f} "
            f"{value('ttft_p99'):8.0f} {value('tpot_p50'):8.1f} {value('hit_rate'):6.3f} "
            f"{value('errors'):6.0f}"
        )
    return "\n".join(["", *lines])
