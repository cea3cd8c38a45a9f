"""Makes the workloads' requests from a seed: their tokens, times and servers; and computes how much
of them caches could hit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
TRACED = 512
"""Tokens that one of the trace's hash ids covers."""
FIRST = 3
"""The first token id in use; lower ones are special tokens of the model."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the workloads. Lengths are in tokens.

    prefixes, prefix, suffix, repeats: as in `vllm bench serve --dataset-name prefix_repetition`;
    repeats: prompts for each prefix. concurrency: requests in flight, over all servers. warm:
    prompts of the warm-up, which stay in the caches. trace: its file. trace_block: tokens for each
    block of 512 of the trace. trace_tokens: prompt tokens in all. trace_turns: take only
    conversations of at least so many requests. trace_seconds: the time into which all arrivals are
    scaled. window: consecutive requests of the trace, from number `window_start` on. window_block:
    as trace_block. longest: longer prompts are cut. output: tokens of every answer. block: tokens
    of vLLM's KV blocks. servers: how many, asked in turn."""

    vocabulary: int
    block: int
    seed: int = 1
    longest: int = 32768
    output: int = 32
    prefixes: int = 72
    prefix: int = 8192
    suffix: int = 256
    repeats: int = 6
    concurrency: int = 16
    warm: int = 8
    trace: str = ""
    trace_block: int = 256
    trace_tokens: int = 2_000_000
    trace_turns: int = 2
    trace_seconds: float = 14.0
    window: int = 600
    window_start: int = 1000
    window_block: int = 512
    servers: int = 2


class Request(msgspec.Struct, frozen=True):
    """at: seconds after the workload's start; None: as soon as another request is done."""

    tokens: Tokens
    server: int
    at: float | None = None


class Ceilings(msgspec.Struct, frozen=True):
    """Hit rates of unbounded caches, as shares of all prompt tokens, if each request comes after
    the one before it has ended.

    shared: one cache for all servers. single: one for each server. unique: tokens that the shared
    cache holds in the end."""

    shared: float
    single: float
    unique: int


def prefix_repetition(plan: Plan) -> list[Request]:
    """Random prefixes, each with `repeats` random suffixes, shuffled: what vLLM's
    `prefix_repetition` sends, as token ids.
    """
    dice = np.random.default_rng([plan.seed, 1])
    prompts: list[Tokens] = []
    for _ in range(plan.prefixes):
        prefix = _random(dice, plan.prefix, plan)
        prompts += [
            np.concatenate([prefix, _random(dice, plan.suffix, plan)]) for _ in range(plan.repeats)
        ]
    random.Random(plan.seed).shuffle(prompts)
    return [Request(tokens, index % plan.servers) for index, tokens in enumerate(prompts)]


def conversations(plan: Plan) -> list[Request]:
    """Whole conversations drawn from the trace, in the order of their arrivals, scaled to
    `trace_seconds`.

    A block of the trace becomes random tokens that follow from its id, so prompts share what they
    share in the trace. ValueError if the trace is missing or has another format."""
    lines = _drawn(_trace(plan), plan)
    blocks: dict[int, Tokens] = {}
    first, last = lines[0]["timestamp"], lines[-1]["timestamp"]
    pace = plan.trace_seconds / max(1, last - first)
    return [
        Request(
            _prompt(line, plan, plan.trace_block, blocks),
            index % plan.servers,
            (line["timestamp"] - first) * pace,
        )
        for index, line in enumerate(lines)
    ]


def unfiltered(plan: Plan) -> list[Request]:
    """Consecutive requests of the trace, `concurrency` at a time, without a choice of
    conversations. ValueError if the trace is missing.
    """
    lines = _trace(plan)[plan.window_start : plan.window_start + plan.window]
    blocks: dict[int, Tokens] = {}
    return [
        Request(_prompt(line, plan, plan.window_block, blocks), index % plan.servers)
        for index, line in enumerate(lines)
    ]


WORKLOADS = {"prefix": prefix_repetition, "trace": conversations, "unfiltered": unfiltered}


def warm_up(plan: Plan) -> list[Tokens]:
    """Prompts that share nothing with the workloads or with each other."""
    dice = np.random.default_rng([plan.seed, 2])
    return [
        _random(dice, min(plan.longest, plan.prefix + plan.suffix), plan) for _ in range(plan.warm)
    ]


def describe(name: str, plan: Plan, requests: Sequence[Request]) -> str:
    """The workload in one line. Results with the same line may be compared."""
    if name == "prefix":
        return (
            f"prefix repetition: {plan.prefixes} prefixes of {plan.prefix} tokens x "
            f"{plan.repeats} suffixes of {plan.suffix}, "
            f"answers of {plan.output}, {plan.concurrency} requests at a time, seed {plan.seed}"
        )
    if name == "unfiltered":
        return (
            f"unfiltered trace: {len(requests)} requests from number {plan.window_start} on, "
            f"{plan.window_block} tokens for {TRACED}, "
            f"prompts cut at {plan.longest}, answers of {plan.output}, {plan.concurrency} "
            f"requests at a time, seed {plan.seed}"
        )
    turns = (
        f"conversations of {plan.trace_turns} or more requests"
        if plan.trace_turns > 1
        else "conversations"
    )
    return (
        f"conversation trace: {len(requests)} requests of whole {turns}, {plan.trace_block} "
        f"tokens for {TRACED}, prompts cut at "
        f"{plan.longest}, answers of {plan.output}, arrivals within {plan.trace_seconds:g} s, "
        f"seed {plan.seed}"
    )


def ceilings(requests: Sequence[Request], block: int) -> Ceilings:
    """The ceilings of caches of whole blocks. A prompt's last token is always computed, as in
    vLLM.
    """
    shared: set[int] = set()
    single: list[set[int]] = [
        set() for _ in range(1 + max((request.server for request in requests), default=0))
    ]
    known, own, total = 0, 0, 0
    for request in requests:
        chain = _chain(request.tokens, block)
        most = (len(request.tokens) - 1) // block
        total += len(request.tokens)
        known += block * min(most, _leading(chain, shared))
        own += block * min(most, _leading(chain, single[request.server]))
        shared.update(chain)
        single[request.server].update(chain)
    return Ceilings(known / max(1, total), own / max(1, total), len(shared) * block)


def _leading(chain: Sequence[int], known: set[int]) -> int:
    return next((index for index, key in enumerate(chain) if key not in known), len(chain))


def _chain(tokens: Tokens, block: int) -> list[int]:
    """A key for each whole block, made from all tokens up to its end."""
    keys: list[int] = []
    for start in range(0, len(tokens) - block + 1, block):
        keys.append(hash((keys[-1] if keys else 0, tokens[start : start + block].tobytes())))
    return keys


def _random(dice: np.random.Generator, count: int, plan: Plan) -> Tokens:
    return dice.integers(FIRST, plan.vocabulary, count, dtype=np.uint32)


def _trace(plan: Plan) -> list[dict[str, Any]]:
    path = Path(plan.trace)
    if not path.is_file():
        raise ValueError(
            f"no trace at {plan.trace!r}; name Mooncake's conversation trace with --trace FILE"
        )
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    if not lines or not {"timestamp", "input_length", "hash_ids"} <= lines[0].keys():
        raise ValueError(f"{path} is no trace of timestamp, input_length and hash_ids")
    return lines


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
    chosen: list[int] = []
    tokens = 0
    for indices in candidates:
        if tokens >= plan.trace_tokens:
            break
        chosen += indices
        tokens += sum(_length(lines[index], plan, plan.trace_block) for index in indices)
    if not chosen:
        raise ValueError(
            f"no conversation of {plan.trace_turns} requests in {plan.trace}; lower --trace-turns"
        )
    return [lines[index] for index in sorted(chosen)]


def _length(line: dict[str, Any], plan: Plan, block: int) -> int:
    scaled: int = line["input_length"] * block // TRACED
    return max(1, min(plan.longest, scaled))


def _prompt(line: dict[str, Any], plan: Plan, block: int, blocks: dict[int, Tokens]) -> Tokens:
    """block: tokens that a block of the trace becomes."""
    length = _length(line, plan, block)
    ids = line["hash_ids"][: -(-length // block)]
    for each in ids:
        if each not in blocks:
            blocks[each] = _random(np.random.default_rng([plan.seed, 3, each]), block, plan)
    return np.concatenate([blocks[each] for each in ids])[:length]
