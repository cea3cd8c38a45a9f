"""Compares answers of vLLM instances: tokens and logprobs, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from vcache_backend.children import Child

LOGPROBS = 5
SECONDS = 60.0
MASK, EXPONENT, STEP = 0x01, 3, 64
"""What `Serving.flip` changes in each block: of a page every 64th byte, from the fourth on; in
bfloat16 and in float32 it is an exponent's."""


def ask(child: Child, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
    """An instance's answer of `count` tokens. more: see `Serving.generate`. ChildFailed."""
    asked = {"tokens": tokens, "count": count, "logprobs": LOGPROBS, **more}
    answer: dict[str, Any] = child.ask("generate", SECONDS, **asked)
    return answer


def alike(children: Iterable[Child], tokens: list[int], count: int) -> bool:
    """Whether all instances compute the same bits from the same prompt, without any cache. Without
    this control a comparison proves nothing. ChildFailed."""
    # A salt of each one's own keeps them from each other's KV, wherever it lies.
    answers = [ask(child, tokens, count, salt=child.name) for child in children]
    cached = any(answer["cached"] for answer in answers)
    return len(set(map(said, answers))) == 1 and not cached


def said(answer: dict[str, Any]) -> str:
    """The part of an answer that is compared, as text, so that NaN equals NaN."""
    return json.dumps([answer["tokens"], answer["logprobs"]])


def difference(expected: dict[str, Any], got: dict[str, Any]) -> str:
    """In words how an answer differs from that of a right hit; empty: not at all."""
    if got["cached"] != expected["cached"]:
        return f"{got['cached']} tokens cached where {expected['cached']} were due"
    if said(expected) == said(got):
        return ""
    pairs = zip(expected["logprobs"], got["logprobs"], strict=True)
    first = next((step for step, (one, other) in enumerate(pairs) if one != other), -1)
    tokens = "equal" if expected["tokens"] == got["tokens"] else "differ"
    return f"differs from step {first} on; tokens {tokens}"
