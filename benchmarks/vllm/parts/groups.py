"""Models with several block tables, of full attention and sliding windows or states: are hits
right, and how fast are they?

Hits end with a chunk, a few tokens before the prompt's end, where vLLM's own hits end and where it
keeps the windows, and the state, for them. So the reference needs no scheduler of ours, which could
not cut a window's blocks."""

from __future__ import annotations

import msgspec

from ...processes import ChildFailed
from ...results import Row
from ..fleet import Run
from ..instances import KINDS, joined
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


def measure(run: Run, kind: str) -> list[Row]:
    """The rows `groups_equal_KIND` with its controls, and `groups_ttft_16k_KIND`."""
    fleet = run.fleet
    scale = fleet.of(kind)
    size = fleet.instance(f"{kind}_alone").ask("about")["block_size"]
    if KINDS[kind].states and size != scale.chunk:
        due = f"vLLM has blocks of {size} tokens where {scale.chunk} were due"
        raise ChildFailed(f"{due}: nothing would be cached")
    prompts = Ended(scale, seed=run.prompts.seed)
    run = run._replace(prompts=prompts)
    counts = {scale.lengths[name]: 1 if scale.cpu else count for name, count in LENGTHS.items()}
    rows = equality.agreeing(run, kind) + equality.sensitive(run, kind, 1)
    rows += equality.equal(run, prompts.hits(counts, 0), kind)
    rows += latency.first_token(run, kind, only=LONG) if run.clock.left > 60 else []
    begin = joined(fleet.rows, kind)
    named = {
        joined(fleet.rows, "equal", kind): f"groups_equal_{kind}",
        f"{begin}_async_ttft_{LONG}": f"groups_ttft_{LONG}_{kind}",
    }
    return [msgspec.structs.replace(row, case=named.get(row.case, row.case)) for row in rows]
