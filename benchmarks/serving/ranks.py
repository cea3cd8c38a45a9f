"""What data parallel ranks of one server read from each other, compared with what they compute."""

from __future__ import annotations

import json
import time
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from ..processes import HOST
from ..results import Row, fraction
from .systems import MODEL
from .workloads import FIRST, Plan

HITS, OTHERS, ANSWER = 12, 4, 32
"""Prompts whose hits are compared, prompts of the controls, and tokens of an answer."""


def equal(case: str, port: int, ranks: int, plan: Plan) -> list[Row]:
    """Have rank 0 compute prompts that the other ranks then read, into blocks that other prompts
    have filled before. case: how the rows' names begin. OSError if the server does not answer."""
    dice = np.random.default_rng(plan.seed)

    def ask(rank: int, prompt: list[int], **vcache: bool) -> tuple[Any, int]:
        """The answer's tokens and logprobs, and how many tokens of the prompt were a hit."""
        asked = {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0}
        asked |= {"ignore_eos": True, "logprobs": 5, "return_tokens_as_token_ids": True}
        body = json.dumps(asked | {"kv_transfer_params": {"vcache": vcache}}).encode()
        headers = {"Content-Type": "application/json", "X-data-parallel-rank": str(rank)}
        url = f"http://{HOST}:{port}/v1/completions"
        with urlopen(Request(url, body, headers), timeout=60) as reply:
            said = json.load(reply)
        found = said["choices"][0]["logprobs"]
        cached = (said["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return (found["tokens"], found["token_logprobs"], found["top_logprobs"]), cached

    def prompt() -> list[int]:
        length = int(dice.integers(plan.prefix // 4, plan.prefix))
        return list(map(int, dice.integers(FIRST, plan.vocabulary, length)))

    agree, matters, hits = list[bool](), list[bool](), list[bool]()
    for tokens in [prompt() for _ in range(OTHERS)]:
        computed = [ask(rank, tokens, load=False, store=False) for rank in range(ranks)]
        agree.append(all(one == (computed[0][0], 0) for one in computed))
        other = [tokens[0] ^ 1, *tokens[1:]]
        matters.append(ask(0, other, load=False, store=False)[0] != computed[0][0])
    for tokens in [prompt() for _ in range(HITS)]:
        ask(0, tokens)
        expected = ask(0, tokens, load=False, store=False)
        time.sleep(0.5)  # until the others can know of it
        found = [ask(rank, tokens, store=False) for rank in range(1, ranks)]
        hits += [one == expected and expected[1] > 0 for one in found]
    said = f"prompts of {plan.prefix // 4} to {plan.prefix} tokens"
    return [
        fraction(f"{case}_ranks_agree", agree, f"{said} that all ranks compute alike"),
        fraction(f"{case}_first_token_matters", matters, f"{said}: token 0 changes the logprobs"),
        fraction(
            f"{case}_hit_equal",
            hits,
            f"{ANSWER} greedy tokens and 5 logprobs each after a hit of what rank 0 has computed, "
            f"bit for bit and of the same length as its own prefix-cache hit; {said}",
        ),
    ]
