"""Makes figures from answers, rows from figures, and tables from rows."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from ..results import Row, none, percentile, row
from ..vllm.instances import joined
from .client import LATE, Answer

MS = 1e3
PLAIN, OURS = "alone", ("inplace", "inplace_host")
"""The systems that `routed_*` rows compare: their reference, and ours."""
RATIOS = {"throughput": "requests_per_second", "ttft_p50": "ttft_p50", "ttft_p99": "ttft_p99"}
"""The figures that are compared, by the name that rows of comparisons give them."""
ENDS = ("fork", "contention", "cold")
"""Workloads where routing ends: there the better of ours has to be ahead in one of `AHEAD`."""
AHEAD = {"throughput": 1.15, "ttft_p99": 2.0}
"""By how much."""
SHARED = ("prefix", "trace", "hot", "chat")
"""Workloads whose hit rate has to be that of one shared cache, or nearly."""
STATES = 0.95
"""The least hit rate in `states_*` rows."""
RANKS = {"throughput": (1.3, 1.5), "ttft_p50": (2.0, 2.0)}
"""The least ratios of `dp_*` rows of two ranks, and of four."""
FATES = {
    "own": "in vLLM's own prefix cache",
    "resident": "read in another instance's KV cache",
    "pooled": "read in a pool or through another connector",
    "waited": "of those read: waited for until another instance had computed them",
    "held": "computed, though one shared cache would have had them",
    "new": "computed, since nobody had them",
}


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
        self._counters = Counter[str]()

    def add(
        self,
        answers: Sequence[Answer],
        cut: bool,
        before: Mapping[str, float],
        after: Mapping[str, float],
    ) -> None:
        """A phase. cut: it was to be cut, so late answers do not count. before, after: the servers'
        counters.
        """
        counts = [answer for answer in answers if not (cut and answer.error == LATE)]
        whole = [answer for answer in counts if not answer.error]
        self.requests += len(counts)
        self.errors += len(counts) - len(whole)
        if whole:
            self.duration += max(a.last for a in whole) - min(a.sent for a in whole)
        for answer in whole:
            self.ttft.append(MS * (answer.first - answer.sent))
            if answer.tokens > 1:
                self.tpot.append(MS * (answer.last - answer.first) / (answer.tokens - 1))
            self._prompt += answer.prompt
            self._cached += answer.cached
        self._counters.update(after)
        self._counters.subtract(before)

    @property
    def throughput(self) -> float:
        """Complete answers per second."""
        return (self.requests - self.errors) / self.duration if self.duration else 0.0

    @property
    def hit_rate(self) -> float:
        return self._cached / self._prompt if self._prompt else 0.0

    @property
    def fates(self) -> dict[str, float]:
        """Of prompt tokens, as shares, by the servers' counters; see FATES. Empty without any."""
        counted = self._counters
        if not (asked := counted["queries"]):
            return {}
        own, external = counted["own"] / asked, counted["external"] / asked
        # Loads of several workers of an instance are not counted by place.
        resident = min(external, counted["resident"] / asked)
        return {
            "own": own,
            "resident": resident,
            "pooled": external - resident,
            "waited": counted["waited"] / asked,
            "held": max(0.0, self.ceiling - own - external),
            "new": 1 - max(self.ceiling, own + external),
        }


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
    fates = [run.fates for run in runs]
    return [
        made("requests_per_second", "requests/s", [run.throughput for run in runs]),
        *(
            made(f"{figure}_p{share}", "ms", [percentile(each, share) for each in values])
            for figure, values in times.items()
            for share in (50, 99)
        ),
        none(case(arm, workload, "errors"), "requests", errors, said, requests),
        made("hit_rate", "fraction", [run.hit_rate for run in runs], shared, about),
        *(
            made(
                f"fate_{fate}",
                "fraction",
                [each[fate] for each in fates],
                1.0,
                f"; prompt tokens {words}",
            )
            for fate, words in FATES.items()
            if all(fates)
        ),
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

    def value(self, arm: str, figure: str) -> float:
        """0 if there is no such row."""
        found = self._rows.get(case(arm, self._workload, figure))
        return found.value if found is not None else 0.0

    def what(self, arm: str) -> str:
        """The workload in words."""
        return self.row(arm, "requests_per_second").what.partition("; ")[2]

    def of(self, systems: Sequence[str], what: str) -> list[str]:
        """The arms of some systems whose workload is the same."""
        pattern = rf"({'|'.join(systems)})_(turn|least|cache_aware\d+|kv_aware)"
        return [a for a in self.names if re.fullmatch(pattern, a) and self.what(a) == what]

    def ratio(self, name: str, figure: str, ours: list[str], plain: list[str], least: float) -> Row:
        """The best of our arms against the best of the plain ones in one figure of RATIOS."""
        rate, best = figure == "throughput", list[str]()
        for arms in (ours, plain):
            order = sorted(arms, key=lambda arm: self.value(arm, RATIOS[figure]), reverse=rate)
            best.append(order[0])
        mine, theirs = (self.row(arm, RATIOS[figure]) for arm in best)
        value, reference = (mine, theirs) if rate else (theirs, mine)
        unit = "requests a second" if rate else "ms of theirs; reference: ours"
        against = f"{best[0]} against {best[1]}, the best of {', '.join(plain)}"
        what = f"{self.what(best[0])}; {against}; {unit}"
        case_ = f"{name}_{figure}"
        made = row(case_, value.unit, value.value, reference.value, what=what, at_least=least)
        return msgspec.structs.replace(made, spread=value.spread, runs=value.runs)


def compared(rows: Mapping[str, Row], workload: str, four: bool) -> list[Row]:
    """Ours with requests in turn, and the better of ours, against the best plain vLLM of any
    policy, figure by figure; and data parallel ranks with and without ours. Above 1: ours is ahead.

    rows: of arms; those of another workload than ours in turn are left out. four: of four GPUs,
    whose rows begin with x4_."""
    made, arms, turn = list[Row](), Arms(rows, workload), f"{OURS[0]}_turn"
    if turn in arms.names:
        what, name = arms.what(turn), f"routed_{workload}"
        plain = arms.of((PLAIN,), what)
        for which, ours in {"turn": [turn], "best": arms.of(OURS, what)}.items():
            for figure in RATIOS if plain else ():
                made.append(arms.ratio(f"{name}_{which}", figure, ours, plain, 1.0))
        if plain and workload in ENDS:
            made.append(_ahead(f"{name}_best", made))
        if workload in SHARED:
            hit = arms.row(turn, "hit_rate")
            values = hit.unit, hit.value, hit.reference
            made.append(row(f"{name}_turn_hit_rate", *values, what=hit.what, at_least=0.99))
    if {"single_turn", "vcache_turn"} <= set(arms.names):
        # Our servers in turn against one vLLM that gets all requests, of a model with states.
        mine, single = (arms.row(arm, "hit_rate") for arm in ("vcache_turn", "single_turn"))
        what = f"{mine.what}; reference: {single.what}"
        name, _, shape = workload.partition("_state_")
        name, rates = joined("states", name, "hit_rate", shape), (mine.value, single.value)
        made.append(row(name, mine.unit, *rates, what=what, at_least=STATES))
    if {"alone_dp_turn", "inplace_dp_turn"} <= set(arms.names):
        for figure, least in RANKS.items():
            ranks = ["inplace_dp_turn"], ["alone_dp_turn"]
            made.append(arms.ratio(f"dp_{workload}", figure, *ranks, least[four]))
    names = [each.case.removeprefix("routed_") for each in made]
    pairs = zip(made, names, strict=True)
    return [msgspec.structs.replace(each, case=f"x4_{n}") for each, n in pairs] if four else made


def _ahead(prefix: str, made: Sequence[Row]) -> Row:
    """The row that says whether the better of ours is ahead by enough. made: its comparisons."""
    ratios = {each.case: each.ratio for each in made}
    gains = {figure: ratios[f"{prefix}_{figure}"] / least for figure, least in AHEAD.items()}
    best = max(gains, key=lambda figure: gains[figure])
    what = f"{best} ratio ÷ {AHEAD[best]:g}, the better of {', '.join(AHEAD)}"
    return row(f"{prefix}_ahead", "ratio", gains[best], 1.0, what=what, at_least=1.0)


def tables(rows: Mapping[str, Row], workload: str) -> str:
    """The figures and the fates of all arms under a workload, in 80 columns."""
    arms = Arms(rows, workload)
    if not arms.names:
        return ""
    first, wide = arms.names[0], max(25, *map(len, arms.names))
    ceiling = arms.row(first, "hit_rate").reference
    lines = textwrap.wrap(f"{arms.what(first)}. Ceiling of the hit rate {ceiling:.3f}.", 80)
    lines += [f"{'':{wide}}  req/s TTFT p50      p99 TPOT p50    hit errors"]
    for arm in arms.names:
        value = partial(arms.value, arm)
        lines.append(
            f"{arm:{wide}}{value('requests_per_second'):7.2f} {value('ttft_p50'):8.0f} "
            f"{value('ttft_p99'):8.0f} {value('tpot_p50'):8.1f} {value('hit_rate'):6.3f} "
            f"{value('errors'):6.0f}"
        )
    lines.append(f"{'% of prompt tokens':{wide}}" + "".join(f"{fate:>9}" for fate in FATES))
    for arm in arms.names:
        shares = (100 * arms.value(arm, f"fate_{fate}") for fate in FATES)
        lines.append(f"{arm:{wide}}" + "".join(f"{share:9.1f}" for share in shares))
    return "\n".join(["", *lines])
