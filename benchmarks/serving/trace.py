"""Workloads from Mooncake's conversation trace: lengths, arrivals, and what prompts share."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .workloads import Phase, Plan, Request, Tokens, Workload, described, random_tokens

TRACED = 512
"""Tokens that one of the trace's hash ids covers."""


def conversations(plan: Plan) -> Workload:
    """Whole conversations drawn from the trace, in the order of their arrivals, scaled to
    `trace_seconds`.

    A block of the trace becomes random tokens that follow from its id, so prompts share what they
    share in the trace."""
    every = [json.loads(line) for line in Path(plan.trace).read_text().splitlines()]
    lines = _drawn(every, plan)
    first, last = lines[0]["timestamp"], lines[-1]["timestamp"]
    pace = plan.trace_seconds / max(1, last - first)
    times = [(line["timestamp"] - first) * pace for line in lines]
    requests = [
        Request(tokens=_prompt(line, plan), at=at, output=plan.output)
        for line, at in zip(lines, times, strict=True)
    ]
    what = described(plan, f"{len(lines)} requests of conversations", "trace_ longest")
    return Workload([Phase(requests=requests, concurrency=0)], what)


def _drawn(lines: Sequence[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """The requests of randomly drawn conversations, `trace_tokens` in all, in the order of the
    trace.

    All prompts begin with the same block; those that share the second one count as one
    conversation."""
    of: dict[int, list[int]] = {}
    for index, line in enumerate(lines):
        ids = line["hash_ids"]
        of.setdefault(ids[1] if len(ids) > 1 else -1 - index, []).append(index)
    candidates = [indices for indices in of.values() if len(indices) >= plan.trace_turns]
    random.Random(plan.seed).shuffle(candidates)
    chosen, tokens = list[int](), 0
    for indices in candidates:
        if tokens < plan.trace_tokens:
            chosen += indices
            tokens += sum(_length(lines[index], plan) for index in indices)
    return [lines[index] for index in sorted(chosen)]


def _length(line: dict[str, Any], plan: Plan) -> int:
    scaled: int = line["input_length"] * plan.trace_block // TRACED
    return max(1, min(plan.longest, scaled))


def _prompt(line: dict[str, Any], plan: Plan) -> Tokens:
    length, block = _length(line, plan), plan.trace_block
    dice = [np.random.default_rng([plan.seed, 3, each]) for each in line["hash_ids"]]
    return np.concatenate([random_tokens(one, block, plan) for one in dice])[:length]
