"""Sleep mode: does an instance that slept hit what it had stored before, rightly; and nothing once its weights are others?"""

from __future__ import annotations

import re

from ..results import Clock, Row, fraction, row
from .equality import LOGPROBS, SECONDS, reference, said, soil
from .fleet import Fleet
from .instances import KINDS
from .prompts import Prompts

KIND = "sleep"
FIRST = (0, 33)
"""The release of vLLM that tells its connector of it."""
WAYS: tuple[list[list[str] | None], ...] = ([None], [["weights"], ["kv_cache"]])
"""How it wakes up: at once, or one kind of memory after the other."""
UNSTORED = {"kv_transfer_params": {"vcache": {"store": False}}}
FREED = 0.95
"""Share of the KV cache that must be free while it sleeps: the driver rounds."""


def measure(fleet: Fleet, clock: Clock, source: Prompts) -> list[Row]:
    """One instance and the reference, on one GPU."""
    one = fleet.instance(f"{KIND}_a")
    version = one.ask("about")["vllm"]
    if not fleet.scale.cpu and tuple(map(int, re.findall(r"\d+", version)[:2])) < FIRST:
        print(f"sleep: skipped, vLLM {version} tells its connector nothing of it", flush=True)
        return []
    prompts = Prompts(KINDS[KIND].of(fleet.scale), seed=source.seed)
    fleet.pool.clear()
    rows = _same_weights(fleet, clock, prompts)
    missed = []
    for level in (1, 2):
        clock.check(10)
        hit = prompts.whole(fleet.scale.few[1])
        fleet.compute(f"{KIND}_a", hit.first)
        one.ask("sleep", SECONDS, level=level)
        one.ask("wake", SECONDS, tags=None)
        one.ask("reweigh", SECONDS)
        cached = one.ask("generate", SECONDS, tokens=hit.then, count=1)["cached"]
        missed.append(not cached)
        print(f"  new weights after sleep of level {level}: {cached} tokens cached of {hit.cached}", flush=True)
    what = "prompts stored before a sleep, of level 1 and 2, that an instance with new weights since does not hit"
    return [*rows, fraction(f"{fleet.rows}_sleep_new_weights_miss", missed, what)]


def _same_weights(fleet: Fleet, clock: Clock, prompts: Prompts) -> list[Row]:
    one, alone = fleet.instance(f"{KIND}_a"), fleet.instance(f"{KIND}_alone")
    full, good, freed = list[bool](), list[bool](), list[float]()
    for way in WAYS:
        hits = [prompts.whole(length) for length in fleet.scale.few]
        expected = []
        for hit in hits:
            clock.check(10)
            fleet.compute(f"{KIND}_a", hit.first)
            alone.ask("generate", SECONDS, tokens=hit.first, count=1)
            expected.append(reference(alone, fleet, hit))
        before = _free(fleet)
        one.ask("sleep", SECONDS, level=1)
        freed.append(_free(fleet) - before)
        for tags in way:
            one.ask("wake", SECONDS, tags=tags)
        # Stored it might push out of the pool what is to be hit.
        soil(one, fleet, prompts, UNSTORED)
        one.ask("reset")
        for hit, due in zip(hits, expected, strict=True):
            got = one.ask("generate", SECONDS, tokens=hit.then, count=fleet.scale.answer, logprobs=LOGPROBS)
            full.append(got["cached"] == hit.cached)
            good.append(full[-1] and said(got) == said(due))
            if not good[-1]:
                print(f"  {hit.kind}, woken by {way}: {got['cached']} tokens cached of {hit.cached}", flush=True)
    held = (
        "prompts of one instance, stored before a sleep of level 1; its blocks were overwritten after waking, at once or by tags"
    )
    memory = "what a sleep of level 1 frees on the GPU, beside the KV cache's size"
    rows = [
        fraction(f"{fleet.rows}_sleep_hits", full, f"full hits out of the pool: {held}"),
        fraction(f"{fleet.rows}_sleep_equal", good, f"tokens and logprobs as after vLLM's own prefix-cache hit: {held}"),
    ]
    if fleet.scale.cpu:
        return rows
    return [
        *rows,
        row(f"{fleet.rows}_sleep_freed", "B", freed, fleet.scale.kv_bytes, what=memory, at_least=FREED),
    ]


def _free(fleet: Fleet) -> int:
    return 0 if fleet.scale.cpu else int(fleet.helper().ask("free", ordinal=0))
