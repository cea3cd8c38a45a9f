"""Models with several block tables, of full attention and sliding windows or states: are hits
right, and how fast are they?

Hits end with a chunk, a few tokens before the prompt's end, where vLLM's own hits end and where it
keeps the windows, and the state, for them. So the reference needs no scheduler of ours, which could
not cut a window's blocks."""

from __future__ import annotations

import msgspec

from ...processes import ChildFailed
from ...results import Clock, Row
from ..fleet import Fleet
from ..instances import KINDS
from ..prompts import Hit, Prompts
from . import equality, latency

LENGTHS = {"1k": 12, "4k": 12, "16k": 8}
"""How many hits of each length."""
LONG = "16k"
STATES_TAIL = 2
"""Tokens after the last whole chunk. Convolutions look back at two or three; a single token would
be a decode step.
"""
STATES = ("state_mamba2", "state_conv", "state_gdn")
"""Kinds of models with states, which have one row together."""


class Ended(Prompts):
    """Prompts of whole chunks and a few tokens more, so few with states that the last token itself
    depends on the loaded state: further tokens between them would hardly show."""

    def whole(self, length: int) -> Hit:
        chunk, tail = self._scale.chunk, STATES_TAIL if self._scale.state_bytes else latency.TAIL
        prompt = self.new(max(length // chunk, 1) * chunk + tail)
        return Hit(f"{length}", prompt, prompt, len(prompt) - tail)


def measure(fleet: Fleet, clock: Clock, source: Prompts, kind: str, rounds: int) -> list[Row]:
    """The rows `groups_equal_KIND` with its controls, and `groups_ttft_16k_KIND`."""
    scale = fleet.of(kind)
    prompts = Ended(scale, seed=source.seed)
    size = fleet.instance(f"{kind}_alone").ask("about")["block_size"]
    if KINDS[kind].states and size != scale.chunk:
        due = f"vLLM has blocks of {size} tokens where {scale.chunk} were due"
        raise ChildFailed(f"{due}: nothing would be cached")
    rows = equality.agreeing(fleet, prompts, kind) + equality.sensitive(fleet, prompts, kind, 1)
    counts = {scale.lengths[name]: 1 if scale.cpu else count for name, count in LENGTHS.items()}
    found = equality.equal(fleet, clock, prompts.hits(counts, 0), prompts, kind)
    rows += [msgspec.structs.replace(one, case=f"groups_equal_{kind}") for one in found]
    return rows + _first_token(fleet, clock, prompts, kind, rounds)


def _first_token(fleet: Fleet, clock: Clock, prompts: Ended, kind: str, rounds: int) -> list[Row]:
    found = latency.first_token(fleet, clock, prompts, rounds, kind=kind, only=LONG)
    judged = f"_ttft_{LONG}"
    for at, one in enumerate(found):
        if one.case.endswith(judged):
            found[at] = msgspec.structs.replace(one, case=f"groups{judged}_{kind}")
    return found
