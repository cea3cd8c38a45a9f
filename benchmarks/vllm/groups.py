"""Models whose layers have block tables of their own, full attention and sliding windows: are hits right, and how fast?

Hits end as vLLM's own do, and where it keeps the windows for them: with a chunk, a few tokens before the prompt's end. So the reference
needs no scheduler of ours, which could not cut a window's blocks.
"""

from __future__ import annotations

import msgspec

from ..processes import ChildFailed
from ..results import Clock, Row
from . import equality, latency
from .fleet import Fleet
from .instances import KINDS
from .prompts import Hit, Prompts

LENGTHS = {"1k": 12, "4k": 12, "16k": 8}
"""How many hits of each."""
LONG = "16k"
MEETINGS = 5


class Ended(Prompts):
    """Prompts of whole chunks and some tokens more."""

    def whole(self, length: int) -> Hit:
        chunk = self._scale.chunk
        prompt = self.new(max(length // chunk, 1) * chunk + latency.TAIL)
        return Hit(f"{length}", prompt, prompt, len(prompt) - latency.TAIL)


def measure(fleet: Fleet, clock: Clock, source: Prompts, kind: str, rounds: int) -> list[Row]:
    """`groups_equal_KIND` with its controls, and `groups_ttft_16k_KIND`; in place each behind `inplace_`."""
    scale = KINDS[kind].of(fleet.scale)
    prompts, prefix = Ended(scale, seed=source.seed), "inplace_" if fleet.in_place else ""
    if fleet.in_place:
        _meet(fleet, prompts, kind)
    rows = equality.agreeing(fleet, prompts, kind) + equality.sensitive(fleet, prompts, kind, 1)
    counts = {scale.lengths[name]: 1 if scale.cpu else count for name, count in LENGTHS.items()}
    found = equality.equal(fleet, clock, prompts.hits(counts, 0), prompts, kind)
    rows += [msgspec.structs.replace(one, case=f"{prefix}groups_equal_{kind}") for one in found]
    return [*rows, *_first_token(fleet, clock, prompts, kind, rounds, prefix)]


def _meet(fleet: Fleet, prompts: Ended, kind: str) -> None:
    """Have the reader map its owner's KV cache, which releases before 0.30 do beside a request that is computed."""
    pair = equality.Pair(fleet, f"{kind}_")
    for _ in range(MEETINGS):
        hit = prompts.whole(fleet.scale.chunk)
        pair.store(hit)
        if pair.b.ask("generate", latency.SECONDS, tokens=hit.then, count=1)["cached"]:
            return
    raise ChildFailed(f"{kind}_b finds nothing in the KV cache of {kind}_a")


def _first_token(fleet: Fleet, clock: Clock, prompts: Ended, kind: str, rounds: int, prefix: str) -> list[Row]:
    found = latency.first_token(fleet, clock, prompts, rounds, kind=kind, only=LONG)
    judged = f"_ttft_{LONG}"
    return [
        msgspec.structs.replace(one, case=f"{prefix}groups{judged}_{kind}") if one.case.endswith(judged) else one for one in found
    ]
