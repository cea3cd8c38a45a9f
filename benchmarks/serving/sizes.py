"""How much of everything: memory of each system, and the two workloads; on two GPUs, and tiny on the CPU."""

from __future__ import annotations

import msgspec

from ..vllm import scale
from ..vllm.scale import GIB, MIB, Scale


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. Lengths in tokens.

    prefixes, prefix, suffix, repeats: as `vllm bench serve --dataset-name prefix_repetition` has them; repeats: prompts a prefix.
    concurrency: requests in flight, over both servers. warm: prompts of the warm-up, which stay in the caches.
    trace_block: tokens that a block of 512 of the trace becomes; trace_tokens: prompt tokens in all; trace_turns: only
    conversations of at least so many requests; trace_seconds: what the arrivals are squeezed into.
    longest: where a prompt is cut. output: tokens of every answer. block: of vLLM's KV cache.
    """

    seed: int
    vocabulary: int
    block: int
    longest: int
    output: int
    prefixes: int
    prefix: int
    suffix: int
    repeats: int
    concurrency: int
    warm: int
    trace: str
    trace_block: int
    trace_tokens: int
    trace_turns: int
    trace_seconds: float


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """scale: the model, and what an instance may take on. kv_bytes: vLLM's KV cache of an instance beside a pool; pool_bytes: what
    it lends to the pool. Without a pool an instance has the sum of both. host_gib: host memory of the two instances together,
    where a system uses any. seqs: requests that an instance runs at a time."""

    scale: Scale
    kv_bytes: int
    pool_bytes: int
    host_gib: float
    seqs: int
    plan: Plan


FULL = Sizes(
    scale=scale.FULL,
    kv_bytes=12 * GIB,
    pool_bytes=48 * GIB,
    host_gib=96,
    seqs=64,
    plan=Plan(
        seed=1,
        vocabulary=scale.FULL.vocabulary,
        block=scale.FULL.block,
        longest=32768,
        output=32,
        prefixes=72,
        prefix=8192,
        suffix=256,
        repeats=6,
        concurrency=16,
        warm=8,
        trace="",
        trace_block=256,
        trace_tokens=2_000_000,
        trace_turns=2,
        trace_seconds=14.0,
    ),
)
TINY = Sizes(
    scale=scale.TINY,
    kv_bytes=4 * MIB,
    pool_bytes=12 * MIB,
    host_gib=0.25,
    seqs=8,
    plan=Plan(
        seed=1,
        vocabulary=scale.TINY.vocabulary,
        block=scale.TINY.block,
        longest=1024,
        output=4,
        prefixes=17,
        prefix=512,
        suffix=32,
        repeats=3,
        concurrency=4,
        warm=2,
        trace="",
        trace_block=32,
        trace_tokens=15_000,
        trace_turns=1,
        trace_seconds=3.0,
    ),
)
SIZES = {"full": FULL, "tiny": TINY}
