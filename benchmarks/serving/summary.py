"""Makes figures from answers, rows from figures, and tables from rows."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..results import Row, none, percentile, row
from .client import LATE, Answer
from .workloads import Ceilings

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
RANKS = {"throughput": 1.3, "ttft_p50": 2.0}
"""The least ratios of `dp_*` rows."""
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

    def __init__(self, ceilings: Ceilings) -> None:
        self.ceilings = ceilings
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
            "held": max(0.0, self.ceilings.shared - own - external),
            "new": 1 - max(self.ceilings.shared, own + external),
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
    shared, single = (
        [getattr(run.ceilings, which) for run in runs] for which in ("shared", "single")
    )
    about = (
        f"; reference: one shared cache without bounds ({sum(single) / len(runs):.3f}: one a "
        "server, in turn)"
    )
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


def compared(rows: Mapping[str, Row], workload: str) -> list[Row]:
    """Ours with requests in turn, and the better of ours, against the best plain vLLM of any
    policy, figure by figure; and data parallel ranks with and without ours. Above 1: ours is ahead.

    rows: of arms; those of another workload than ours in turn are left out."""
    made: list[Row] = []
    arms, turn = arms_of(rows, workload), f"{OURS[0]}_turn"
    if turn in arms:
        what = _workload(rows[case(turn, workload, "requests_per_second")])
        plain = _of(rows, arms, workload, (PLAIN,), what)
        for which, ours in {"turn": [turn], "best": _of(rows, arms, workload, OURS, what)}.items():
            prefix = f"routed_{workload}_{which}"
            for figure in RATIOS if plain else ():
                made.append(_ratio(rows, workload, prefix, figure, ours, plain, 1.0))
        if plain and workload in ENDS:
            made.append(_ahead(f"routed_{workload}_best", made))
        if workload in SHARED:
            hit = rows[case(turn, workload, "hit_rate")]
            name = f"routed_{workload}_turn_hit_rate"
            value, ceiling = hit.value, hit.reference
            made.append(row(name, hit.unit, value, ceiling, what=hit.what, at_least=0.99))
    if {"single_turn", "vcache_turn"} <= set(arms):
        made.append(_shared(rows, workload))
    if {"alone_dp_turn", "inplace_dp_turn"} <= set(arms):
        ours, plain = ["inplace_dp_turn"], ["alone_dp_turn"]
        made += [
            _ratio(rows, workload, f"dp_{workload}", figure, ours, plain, least)
            for figure, least in RANKS.items()
        ]
    return made


def _shared(rows: Mapping[str, Row], workload: str) -> Row:
    """The hit rate of our servers in turn against that of one vLLM that gets all requests, of a
    model with states.
    """
    ours, single = (rows[case(arm, workload, "hit_rate")] for arm in ("vcache_turn", "single_turn"))
    name, _, shape = workload.partition("_state_")
    what = f"{ours.what}; reference: {single.what}"
    of = f"states_{name}_hit_rate" + (f"_{shape}" if shape else "")
    return row(of, ours.unit, ours.value, single.value, what=what, at_least=STATES)


def _ahead(prefix: str, made: Sequence[Row]) -> Row:
    """The row that says whether the better of ours is ahead by enough. made: its comparisons."""
    ratios = {each.case: each.ratio for each in made}
    gains = {figure: ratios[f"{prefix}_{figure}"] / least for figure, least in AHEAD.items()}
    best = max(gains, key=lambda figure: gains[figure])
    what = f"{best} ratio ÷ {AHEAD[best]:g}, the better of {', '.join(AHEAD)}"
    return row(f"{prefix}_ahead", "ratio", gains[best], 1.0, what=what, at_least=1.0)


def _ratio(
    rows: Mapping[str, Row],
    workload: str,
    prefix: str,
    figure: str,
    ours: list[str],
    plain: list[str],
    least: float,
) -> Row:
    """The best of our arms against the best of the plain ones in one figure of RATIOS."""
    rate = figure == "throughput"

    def best(arms: list[str]) -> tuple[str, Row]:
        values = {arm: rows[case(arm, workload, RATIOS[figure])] for arm in arms}
        pick = (max if rate else min)(values, key=lambda arm: values[arm].value)
        return pick, values[pick]

    (our, mine), (their, theirs) = best(ours), best(plain)
    value, reference = (mine, theirs) if rate else (theirs, mine)
    unit = "requests a second" if rate else "ms of theirs; reference: ours"
    against = f"{our} against {their}, the best of {', '.join(plain)}"
    what = f"{_workload(mine)}; {against}; {unit}"
    name = f"{prefix}_{figure}"
    made = row(name, value.unit, value.value, reference.value, what=what, at_least=least)
    return msgspec.structs.replace(made, spread=value.spread, runs=value.runs)


def arms_of(rows: Mapping[str, Row], workload: str) -> list[str]:
    """The arms that have rows of a workload."""
    pattern = re.compile(case(r"(\w+)", workload, "requests_per_second"))
    return [match[1] for name in rows if (match := pattern.fullmatch(name))]


def _of(
    rows: Mapping[str, Row], arms: Sequence[str], workload: str, systems: Sequence[str], what: str
) -> list[str]:
    """The arms of some systems whose workload is the same."""
    policies = r"_(turn|least|cache_aware\d+|kv_aware)"
    return [
        arm
        for arm in arms
        if any(re.fullmatch(system + policies, arm) for system in systems)
        and _workload(rows[case(arm, workload, "requests_per_second")]) == what
    ]


def _workload(row: Row) -> str:
    return row.what.partition("; ")[2]


def tables(rows: Mapping[str, Row], workload: str) -> str:
    """The figures and the fates of all arms under a workload, in 80 columns."""
    arms = arms_of(rows, workload)
    if not arms:
        return ""
    wide = max(25, *map(len, arms))

    def value(arm: str, figure: str) -> float:
        found = rows.get(case(arm, workload, figure))
        return found.value if found is not None else 0.0

    first = rows[case(arms[0], workload, "requests_per_second")]
    ceiling = rows[case(arms[0], workload, "hit_rate")].reference
    lines = ["", *textwrap.wrap(f"{_workload(first)}. Ceiling of the hit rate {ceiling:.3f}.", 80)]
    heads = "  req/s TTFT p50      p99 TPOT p50    hit errors"
    lines += [f"{'':{wide}}{heads}"]
    for arm in arms:
        figures = (
            f"{value(arm, 'requests_per_second'):7.2f} {value(arm, 'ttft_p50'):8.0f} "
            f"{value(arm, 'ttft_p99'):8.0f} {value(arm, 'tpot_p50'):8.1f} "
            f"{value(arm, 'hit_rate'):6.3f} {value(arm, 'errors'):6.0f}"
        )
        lines.append(f"{arm:{wide}}{figures}")
    lines.append(f"{'% of prompt tokens':{wide}}" + "".join(f"{fate:>9}" for fate in FATES))
    for arm in arms:
        shares = (100 * value(arm, f"fate_{fate}") for fate in FATES)
        lines.append(f"{arm:{wide}}" + "".join(f"{share:9.1f}" for share in shares))
    return "\n".join(lines)
