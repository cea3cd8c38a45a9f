"""What data parallel ranks of one server read from each other, compared with what they compute."""

from __future__ import annotations

import json
import time
from typing import Any

from vcache_backend.prove.comparison import LOGPROBS, Comparison, Prompts, alike

from ..results import Row, fraction
from ..vllm.parts.equality import depends
from .servers import fetch
from .systems import MODEL

EACH, OTHERS, ANSWER = 6, 4, 32
"""Prompts of each of two lengths whose hits are compared, prompts of the controls, and tokens of an
answer."""


class Rank:
    """One of them, as `prove.comparison` asks an instance."""

    def __init__(self, port: int, number: int) -> None:
        self.name, self._port, self._sent = f"rank {number}", port, ("", dict[str, Any]())
        self._headers = {"Content-Type": "application/json", "X-data-parallel-rank": f"{number}"}

    def send(self, command: str, **asked: Any) -> None:
        self._sent = command, asked

    def answer(self, seconds: float) -> Any:
        """OSError if the server does not answer."""
        command, asked = self._sent
        if command == "told":
            return time.sleep(0.5)
        given = {"model": MODEL, "prompt": asked["tokens"], "max_tokens": asked["count"]}
        given |= {"temperature": 0, "ignore_eos": True, "logprobs": asked["logprobs"]}
        given |= {"return_tokens_as_token_ids": True, **asked.get("extra_args", {})}
        given |= {"cache_salt": asked["salt"]} if "salt" in asked else {}
        body = json.dumps(given).encode()
        answer = json.loads(fetch(self._port, "/v1/completions", body, seconds, **self._headers))
        said = answer["choices"][0]["logprobs"]
        cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        steps = [sorted(step.items()) for step in said["top_logprobs"]]
        return {"tokens": said["tokens"], "logprobs": steps, "cached": cached}

    def ask(self, command: str, seconds: float = 60.0, **asked: Any) -> Any:
        self.send(command, **asked)
        return self.answer(seconds)


def equal(case: str, port: int, count: int, prompts: Prompts, longest: int) -> list[Row]:
    """Have rank 0 compute prompts that the other ranks then read, into blocks that other prompts
    have filled before. case: how the rows' names begin. longest: tokens of a prompt, about. OSError
    if the server does not answer."""
    ranks: list[Any] = [Rank(port, number) for number in range(count)]
    agree, matters, right = list[bool](), list[bool](), list[bool]()
    for part in range(OTHERS):
        asked = prompts.new(longest * (part + 1) // OTHERS)
        agree.append(alike(ranks, asked, ANSWER))
        matters.append(depends(ranks[0], asked, ANSWER)[0])
    for reader in ranks[1:]:
        hits = prompts.hits({longest // 2: EACH, longest: EACH})
        how, some = Comparison(ranks[0], reader, ranks[0], ANSWER).differences(hits)
        right += [each == "" and some == len(hits) for each in how]
    said = f"prompts of {longest // 4} to {longest} tokens"
    return [
        fraction(f"{case}_ranks_agree", agree, f"{said} that all ranks compute alike"),
        fraction(f"{case}_first_token_matters", matters, f"{said}: token 0 changes the logprobs"),
        fraction(
            f"{case}_hit_equal",
            right,
            f"{ANSWER} greedy tokens and {LOGPROBS} logprobs each after a hit of what rank 0 has "
            f"computed, bit for bit and of the same length as its own prefix-cache hit; {said}",
        ),
    ]
