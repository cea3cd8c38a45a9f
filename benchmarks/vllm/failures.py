"""Loads that fail after they were promised: are the answers to their requests, and to those beside
them, still right?

B's connector promises a prompt's chunks and the step is scheduled. Before it is executed the chunks
are removed from the pool, or the metadata server is killed (`probe`), while other requests of B
decode. B's tokens must equal those of a vLLM without a pool for the same prompts; if nothing was
lost, those after a hit in that vLLM's own prefix cache. On GPUs instances run batch-invariant
kernels, so that it does not matter at which moment a request joins a step, which differs between
runs. Each instance compiles for itself, since vLLM keeps no such code; the control says for how
many prompts they compute the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..processes import ChildFailed
from ..results import Clock, OutOfTime, Row, fraction
from .equality import Pair, agreeing, ended, soil
from .fleet import Fleet
from .prompts import Prompts

SECONDS = 90.0
TIMES = 4
# Under LMCache the look-up's lease holds the chunks through their removal, so that such a load does
# not fail.
WAYS = {"lmcache": ("kill",), "vllm": ("clear", "kill")}
HOW = {"clear": "its chunks removed from the pool", "kill": "the metadata server killed"}
ATTEMPTS = 3
MOST_DEATHS = 2
"""After so many deaths of B there are no more trials of the kind."""
BESIDE_ANSWER = 2
"""How many times as many tokens the other requests get as the one whose load fails, so that they
outlast it.
"""


class _Trials:
    """The outcomes of the trials of one kind."""

    def __init__(self) -> None:
        self.good: list[bool] = []
        self.others: list[bool] = []
        self.unbroken = 0
        self.deaths = 0

    def add(self, expected: dict[str, Any], got: dict[str, Any]) -> None:
        self.good.append(got["one"][0]["tokens"] == expected["one"][0]["tokens"])
        pairs = zip(got["others"], expected["others"], strict=True)
        self.others += [one["tokens"] == other["tokens"] for one, other in pairs]


def failures(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """Rows for each way to fail. A trial in which no load was promised is repeated, and counts as
    wrong after the third.

    For LMCache's connector the rows have no limit: vLLM's V2 model runner with asynchronous
    scheduling does not recompute a failed synchronous load correctly (vLLM issue 49250)."""
    control, pair = agreeing(fleet, prompts, "failing"), Pair(fleet, "failing_")
    soil(pair.b, fleet, prompts)
    trials = {how: _Trials() for how in ("none", *WAYS[fleet.integration])}
    for how, counts in trials.items():
        for length in fleet.scale.few * (1 if how == "none" else TIMES):
            try:
                clock.check(15)
            except OutOfTime:
                break
            if counts.deaths == MOST_DEATHS:
                break
            if not any(_trial(fleet, pair, prompts, length, how, counts) for _ in range(ATTEMPTS)):
                counts.good.append(False)
        print(
            f"  {how}: {sum(counts.good)} of {len(counts.good)}, others {sum(counts.others)} of {len(counts.others)}",
            flush=True,
        )
    return [*control, *_rows(fleet, trials)]


def _trial(
    fleet: Fleet, pair: Pair, prompts: Prompts, length: int, how: str, counts: _Trials
) -> bool:
    """Try one prompt. False if no load was promised, for example since B has not found the
    restarted server yet.

    B may die (with LMCache): then the trial counts as wrong, and B is started again.
    """
    scale, note = fleet.scale, fleet.folder / f"lost.{len(counts.good)}.{how}.json"
    note.unlink(missing_ok=True)
    prompt, others = (
        prompts.new(length),
        [prompts.new(scale.decode_prompt) for _ in range(scale.beside)],
    )
    fleet.compute("failing_a", prompt)
    asked = {
        "others": others,
        "length": BESIDE_ANSWER * scale.answer,
        "tokens": [prompt],
        "count": scale.answer,
    }
    before = fleet.pool.stats()
    lose = {
        "how": how,
        "socket": str(fleet.server.path),
        "pid": fleet.server.pid,
        "note": str(note),
    }
    if how == "none":
        pair.alone.ask("generate", SECONDS, tokens=prompt, count=1)
    pair.b.send("beside", **asked, extra=None if how == "none" else {"lose": lose})
    try:
        expected = pair.alone.ask(
            "beside", SECONDS, **asked, extra=ended(fleet) if how == "none" else None
        )
    finally:
        got = _answer(fleet, pair)
    if how == "kill" and note.exists():
        fleet.revive(before)
    if got is None:
        counts.deaths += 1
        counts.good.append(False)
        return True
    counts.add(expected, got)
    if not counts.good[-1] or not all(counts.others):
        print(
            f"  {how}, {length} tokens: {'right' if counts.good[-1] else 'WRONG'}; others {counts.others[-len(others) :]}",
            flush=True,
        )
    if how != "none" and counts.good[-1] and not _promised(note):
        counts.unbroken += 1
        counts.good.pop()
        return False
    return True


def _answer(fleet: Fleet, pair: Pair) -> dict[str, Any] | None:
    try:
        answer: dict[str, Any] = pair.b.answer(SECONDS)
    except ChildFailed as error:
        print(f"  B has failed: {error}", flush=True)
        fleet.kill("failing_b")
        pair.b = fleet.instance("failing_b")
        return None
    return answer


def _promised(note: Path) -> int:
    """Tokens that were promised before the load was made to fail; 0: none were, so nothing was
    done.
    """
    return int(json.loads(note.read_text())["promised"]) if note.exists() else 0


def _rows(fleet: Fleet, trials: dict[str, _Trials]) -> list[Row]:
    limited = fleet.integration == "vllm"
    calm, held = trials["none"].others, trials["none"].good
    quiet = f"beside loads that held {sum(calm)} of {len(calm)} were"
    broken = {how: counts for how, counts in trials.items() if how in HOW}
    rows = []
    for how, counts in broken.items():
        what = f"requests whose load failed after it was promised, {HOW[how]}: tokens as of a vLLM without a pool"
        what += (
            f"; {counts.unbroken} times no load was promised, and the trial made again"
            if counts.unbroken
            else ""
        )
        what += f"; {counts.deaths} times the instance ended" if counts.deaths else ""
        rows.append(
            fraction(f"{fleet.integration}_failed_load_equal_{how}", counts.good, what, limited)
        )
    good = [each for counts in broken.values() for each in counts.good]
    ways = " or ".join(HOW[how] for how in broken)
    what = f"requests whose load failed after it was promised ({ways}): tokens as of a vLLM without a pool"
    rows.append(fraction(f"{fleet.integration}_failed_load_equal", good, what, limited))
    others = [each for counts in broken.values() for each in counts.others]
    what = (
        f"requests decoding beside a load that failed: tokens as of a vLLM without a pool; {quiet}"
    )
    rows.append(fraction(f"{fleet.integration}_failed_load_others_equal", others, what, limited))
    what = "requests whose load held, beside others that decode: tokens as of a vLLM without a pool after an own hit of the same length"
    return [*rows, fraction(f"{fleet.integration}_load_beside_equal", held, what, limited)]
