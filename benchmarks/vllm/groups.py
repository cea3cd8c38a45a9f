"""Models whose layers have block tables of their own, full attention and sliding windows: are hits right, and how fast?

Hits end as vLLM's own do, and where it keeps the windows for them: with a chunk, a few tokens before the prompt's end. So the reference
needs no scheduler of ours, which could not cut a window's blocks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..results import Clock, Row, row
from . import equality, latency
from .fleet import Fleet
from .instances import KINDS
from .prompts import Hit, Prompts
from .scale import Scale

LENGTHS = {"1k": 12, "4k": 12, "16k": 8}
"""How many hits of each."""
LONG = "16k"


class Ended(Prompts):
    """Prompts of whole chunks and some tokens more."""

    def whole(self, length: int) -> Hit:
        chunk = self._scale.chunk
        prompt = self.new(max(length // chunk, 1) * chunk + latency.TAIL)
        return Hit(f"{length}", prompt, prompt, len(prompt) - latency.TAIL)


def read_bytes(scale: Scale, tokens: int) -> int:
    """What a hit of so many tokens has to bring: all of full attention, of the others the blocks of their windows."""
    kinds = scale.model["layer_types"]
    full, window = kinds.count("full_attention"), -(-(scale.model["sliding_window"] - 1) // scale.block) * scale.block
    a_layer = scale.token_bytes // len(kinds)
    return int(a_layer * (full * tokens + (len(kinds) - full) * min(window, tokens)))


def measure(fleet: Fleet, clock: Clock, source: Prompts, kind: str, rounds: int) -> list[Row]:
    """`groups_equal_KIND` with its controls, and `groups_ttft_16k_KIND`."""
    scale = KINDS[kind].of(fleet.scale)
    prompts = Ended(scale, seed=source.seed)
    rows = equality.agreeing(fleet, prompts, kind) + equality.sensitive(fleet, prompts, kind, 1)
    counts = {scale.lengths[name]: 1 if scale.cpu else count for name, count in LENGTHS.items()}
    found = equality.equal(fleet, clock, prompts.hits(counts, 0), prompts, kind)
    rows += [msgspec.structs.replace(one, case=f"groups_equal_{kind}") for one in found]
    return [*rows, *_first_token(fleet, clock, prompts, kind, rounds)]


def _first_token(fleet: Fleet, clock: Clock, prompts: Ended, kind: str, rounds: int) -> list[Row]:
    fleet.settle()
    scale, pair, speed = KINDS[kind].of(fleet.scale), equality.Pair(fleet, f"{kind}_"), latency.copy_engine(fleet)
    ours: list[float] = []
    own: list[float] = []
    for turn in range(rounds + 1):
        clock.check(10)
        hit = prompts.whole(scale.lengths[LONG])
        pair.store(hit)
        answers: list[dict[str, Any]] = [
            child.ask("generate", latency.SECONDS, tokens=hit.then, count=1) for child in (pair.b, pair.alone)
        ]
        if turn and all(answer["cached"] == hit.cached for answer in answers):
            for samples, answer in zip((ours, own), answers, strict=True):
                samples.append(answer["ttft"] * latency.MS)
    length = scale.lengths[LONG]
    return [_judged(kind, ours, own, read_bytes(scale, length), speed, f"{length} tokens, {len(ours)} of {rounds} full hits")]


def _judged(kind: str, ours: list[float], own: list[float], nbytes: int, speed: float, hits: str) -> Row:
    floor = sorted(own)[len(own) // 2]
    allowed = floor + nbytes / speed / 1e9 * latency.ALLOWED_COPY * latency.MS + latency.ALLOWED_MS
    what = (
        f"TTFT of a hit on the peer GPU, {kind}, {hits}; reference: own prefix-cache hit {floor:.2f} ms + {nbytes >> 20} MiB / "
        f"{speed:.0f} GB/s x {latency.ALLOWED_COPY} + {latency.ALLOWED_MS:g} ms"
    )
    return row(f"groups_ttft_16k_{kind}", "ms", ours, allowed, what=what, at_most=1.0)
