"""Makes figures from answers, rows from figures, and tables from rows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence

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


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one arm under one run of a workload. Only complete answers count.

    Samples are in ms; the duration is in seconds, from the first request to the last answer.
    hit_rate: cached tokens ÷ prompt tokens, as the servers report them for each request. fates: of
    prompt tokens, as shares, by the servers' counters; see FATES."""

    requests: int
    errors: int
    duration: float
    ttft: list[float]
    tpot: list[float]
    hit_rate: float
    fates: dict[str, float]
    ceilings: Ceilings

    @property
    def throughput(self) -> float:
        """Complete answers per second."""
        return (self.requests - self.errors) / self.duration if self.duration else 0.0


class Counted(msgspec.Struct):
    """What a workload's phases that count have given so far."""

    answers: list[Answer] = []
    duration: float = 0.0
    counters: dict[str, float] = {}

    def add(
        self,
        answers: Sequence[Answer],
        cut: bool,
        before: Mapping[str, float],
        after: Mapping[str, float],
    ) -> None:
        """cut: the phase was to be cut, so late answers do not count. before, after: the servers'
        counters.
        """
        counts = [answer for answer in answers if not (cut and answer.error == LATE)]
        whole = [answer for answer in counts if not answer.error]
        if whole:
            self.duration += max(a.last for a in whole) - min(a.sent for a in whole)
        self.answers = [*self.answers, *counts]
        self.counters = {
            key: self.counters.get(key, 0.0) + after[key] - before[key] for key in after
        }

    def figures(self, ceilings: Ceilings) -> Figures:
        whole = [answer for answer in self.answers if not answer.error]
        several = [answer for answer in whole if answer.tokens > 1]
        prompt = sum(answer.prompt for answer in whole)
        return Figures(
            requests=len(self.answers),
            errors=len(self.answers) - len(whole),
            duration=self.duration,
            ttft=[MS * (answer.first - answer.sent) for answer in whole],
            tpot=[MS * (each.last - each.first) / (each.tokens - 1) for each in several],
            hit_rate=sum(answer.cached for answer in whole) / prompt if prompt else 0.0,
            fates=_fates(self.counters, ceilings),
            ceilings=ceilings,
        )


def _fates(counters: Mapping[str, float], ceilings: Ceilings) -> dict[str, float]:
    asked = counters.get("queries", 0.0)
    if not asked:
        return {}
    own, external = counters["own"] / asked, counters["external"] / asked
    # Loads of several workers of an instance are not counted by place.
    resident = min(external, counters["resident"] / asked)
    return {
        "own": own,
        "resident": resident,
        "pooled": external - resident,
        "waited": counters["waited"] / asked,
        "held": max(0.0, ceilings.shared - own - external),
        "new": 1 - max(ceilings.shared, own + external),
    }


def rows_of(
    arm: str, workload: str, runs: Sequence[Figures], label: str, has: str, what: str
) -> list[Row]:
    """A row for every figure of an arm under a workload, of the medians of its runs. The reference
    is the value itself; for hit rates a shared cache's ceiling.

    label: the system and the policy in words; has: its memory; what: the workload. `compared` only
    compares rows with the same workload."""
    said = f"{label}, {has}; {what}"

    def plain(figure: str, unit: str, values: Sequence[float]) -> Row:
        return row(case(arm, workload, figure), unit, values, values, what=said)

    def timed(figure: str, samples: Sequence[Sequence[float]]) -> list[Row]:
        return [
            plain(f"{figure}_p{share}", "ms", [percentile(each, share) for each in samples])
            for share in (50, 99)
        ]

    def fated(fate: str) -> Row:
        name, shares = case(arm, workload, f"fate_{fate}"), [run.fates[fate] for run in runs]
        return row(name, "fraction", shares, 1.0, what=f"{said}; prompt tokens {FATES[fate]}")

    errors, requests = sum(run.errors for run in runs), sum(run.requests for run in runs)
    hits, shared = [run.hit_rate for run in runs], [run.ceilings.shared for run in runs]
    single = sum(run.ceilings.single for run in runs) / len(runs)
    about = f"reference: one shared cache without bounds ({single:.3f}: one a server, in turn)"
    return [
        plain("requests_per_second", "requests/s", [run.throughput for run in runs]),
        *timed("ttft", [run.ttft for run in runs]),
        *timed("tpot", [run.tpot for run in runs]),
        none(case(arm, workload, "errors"), "requests", errors, said, requests),
        row(case(arm, workload, "hit_rate"), "fraction", hits, shared, what=f"{said}; {about}"),
        *(fated(fate) for fate in FATES if all(fate in run.fates for run in runs)),
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
