"""Are hits out of the offload tier right?

A computes a prompt, which goes into the pool and the offload tier; then the pool is emptied, as
after an eviction, or as on another node. So B's KV can only come from the store, a real Mooncake
master and provider on this machine, over loopback TCP."""

from __future__ import annotations

from ..results import Clock, Row
from . import equality
from .equality import Pair
from .fleet import Fleet
from .prompts import Hit, Prompts

EAGER = "below_eager"


def equal(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    """The row `INTEGRATION_equal_below_eager`, made by `equality.equal`, and its control. Eager
    instances.
    """
    hits = prompts.hits(dict.fromkeys(fleet.scale.few, 3), 5)
    rows = equality.agreeing(fleet, prompts, EAGER)
    return [
        *rows,
        *equality.equal(
            fleet, clock, hits, prompts, EAGER, _only_below, "that only the offload tier has"
        ),
    ]


def _only_below(pair: Pair, hit: Hit) -> None:
    """Have A and the reference compute `first`, and leave it in the offload tier only."""
    fleet = pair.fleet
    due = fleet.depot.objects() + len(hit.first) // fleet.scale.chunk
    pair.store(hit)
    if not fleet.below(due):
        print(
            f"  {hit.kind}: the store holds {fleet.depot.objects()} objects where {due} were due",
            flush=True,
        )
    fleet.pool.clear()
