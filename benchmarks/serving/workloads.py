"""Makes the workloads' requests from a seed: what is asked, when, and in which order."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.uint32]
FIRST = 3
"""The first token id in use; lower ones are special tokens of the model."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of the workloads. Lengths are in tokens.

    longest: longer prompts are cut. output: tokens of every answer. concurrency: requests in
    flight, over all servers. warm: prompts of the warm-up. prefixes, prefix, suffix, repeats: as in
    `vllm bench serve --dataset-name prefix_repetition`; repeats: prompts for each prefix. suffix:
    also what every prompt of fork has of its own.

    fork_*: contexts, their length, and the requests that begin with one of them
    at the same instant. chat_*: conversations, their turns, tokens that all begin with, tokens of
    the first and of later messages, tokens of an answer, the mean thinking time, and the seconds
    within which all conversations begin.

    trace: its file. trace_block: tokens for each block of 512 of the trace. trace_tokens: prompt
    tokens in all. trace_turns: take only conversations of at least so many requests.
    trace_seconds: the time into which all arrivals are scaled."""

    vocabulary: int
    block: int
    seed: int = 1
    longest: int = 32768
    output: int = 32
    concurrency: int = 16
    warm: int = 8
    prefixes: int = 72
    prefix: int = 8192
    suffix: int = 256
    repeats: int = 6
    fork_contexts: int = 6
    fork_tokens: int = 32000
    fork_requests: int = 48
    chat_conversations: int = 200
    chat_turns: int = 8
    chat_system: int = 1024
    chat_first: int = 3072
    chat_message: int = 256
    chat_answer: int = 128
    chat_thinking: float = 3.0
    chat_arrivals: float = 20.0
    trace: str = ""
    trace_block: int = 256
    trace_tokens: int = 2_000_000
    trace_turns: int = 2
    trace_seconds: float = 14.0


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and when to send it.

    at: seconds after the phase's start; None: as soon as another request is done. conversation:
    requests of one conversation follow each other; `at` of a later one: seconds after the answer
    before it. answer: the only token that the answer may consist of, so that the next prompt of
    its conversation is known before it is given; -1: whatever the model says. body, first: of the
    HTTP request, and of one for the first token alone, from `made`."""

    tokens: Tokens
    at: float | None = None
    conversation: int = -1
    answer: int = -1
    output: int
    body: bytes = b""
    first: bytes = b""

    def made(self, model: str) -> Request:
        """The request with its bodies, which take milliseconds to make."""
        asked = {
            "model": model,
            "prompt": self.tokens.tolist(),
            "temperature": 0,
            "ignore_eos": True,
            **({"allowed_token_ids": [self.answer]} if self.answer >= 0 else {}),
        }
        first = msgspec.json.encode(asked | {"max_tokens": 1})
        asked |= {"stream": True, "stream_options": {"include_usage": True}}
        body = msgspec.json.encode(asked | {"max_tokens": self.output})
        return msgspec.structs.replace(self, body=body, first=first)


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that begin once those of the phase before have ended.

    counted: they count in the figures."""

    requests: list[Request]
    concurrency: int
    counted: bool = True


class Workload(NamedTuple):
    """One run of a workload. what: in words; results with the same words may be compared. name,
    ceiling: of the workload's hit rate, once `vllm_serving` has set them."""

    phases: list[Phase]
    what: str
    name: str = ""
    ceiling: float = 0.0


def described(plan: Plan, what: str, own: str) -> str:
    """The workload in words: what it is, and its parameters. own: how their names begin, or their
    names, separated by blanks."""
    begins = tuple(own.split())
    names = [name for name in Plan.__struct_fields__ if name.startswith(begins)]
    values = [f"{name} {getattr(plan, name)}" for name in (*names, "output", "seed")]
    return f"{what}; {', '.join(values)}"


def prefix_repetition(plan: Plan) -> Workload:
    """Random prefixes, each with `repeats` random suffixes, shuffled: what vLLM's
    `prefix_repetition` sends, as token ids.
    """
    dice, requests = np.random.default_rng([plan.seed, 1]), list[Request]()
    for _ in range(plan.prefixes):
        prefix = random_tokens(dice, plan.prefix, plan)
        requests += [_asking(dice, prefix, plan) for _ in range(plan.repeats)]
    random.Random(plan.seed).shuffle(requests)
    what = described(plan, "prefixes, each with several suffixes", "pre suffix repeats concurrency")
    return Workload([Phase(requests=requests, concurrency=plan.concurrency)], what)


def fork(plan: Plan) -> Workload:
    """Contexts that one request computes; then many begin with it at the same instant."""
    dice = np.random.default_rng([plan.seed, 5])
    phases: list[Phase] = []
    for _ in range(plan.fork_contexts):
        context = random_tokens(dice, plan.fork_tokens, plan)
        first = [_asking(dice, context, plan)]
        forks = [_asking(dice, context, plan) for _ in range(plan.fork_requests)]
        phases.append(Phase(requests=first, concurrency=1, counted=False))
        phases.append(Phase(requests=forks, concurrency=len(forks)))
    what = described(plan, "contexts, each computed once, then forked at once", "fork suffix")
    return Workload(phases, what)


def chat(plan: Plan) -> Workload:
    """Conversations with thinking times. What the model answers is fixed, so that all arms get the
    same prompts.
    """
    dice = np.random.default_rng([plan.seed, 7])
    system = random_tokens(dice, plan.chat_system, plan)
    timed: list[tuple[float, Request]] = []
    for conversation in range(plan.chat_conversations):
        history = np.concatenate([system, random_tokens(dice, plan.chat_first, plan)])
        at = now = dice.uniform(0, plan.chat_arrivals)
        for _ in range(plan.chat_turns):
            word = int(dice.integers(FIRST, plan.vocabulary))
            request = Request(
                tokens=history,
                at=at,
                conversation=conversation,
                answer=word,
                output=plan.chat_answer,
            )
            timed.append((now, request))
            answer = np.full(plan.chat_answer, word, np.uint32)
            message = random_tokens(dice, plan.chat_message, plan)
            history = np.concatenate([history, answer, message])
            at = dice.exponential(plan.chat_thinking)
            now += at
    timed.sort(key=lambda each: each[0])
    what = described(plan, "conversations", "chat")
    return Workload([Phase(requests=[request for _, request in timed], concurrency=0)], what)


def warm_up(plan: Plan) -> list[Request]:
    """Prompts that share nothing with the workloads or with each other. The answers of half are
    fixed, since `chat` must not wait for the kernel that does it to compile.
    """
    dice = np.random.default_rng([plan.seed, 2])
    length = min(plan.longest, plan.prefix + plan.suffix)
    return [
        Request(
            tokens=random_tokens(dice, length, plan),
            output=plan.output,
            answer=FIRST if number // 2 % 2 else -1,
        )
        for number in range(plan.warm)
    ]


def _asking(dice: np.random.Generator, document: Tokens, plan: Plan) -> Request:
    suffix = random_tokens(dice, plan.suffix, plan)
    return Request(tokens=np.concatenate([document, suffix]), output=plan.output)


def random_tokens(dice: np.random.Generator, count: int, plan: Plan) -> Tokens:
    return dice.integers(FIRST, plan.vocabulary, count, dtype=np.uint32)


def ceiling(phases: Sequence[Phase], block: int) -> float:
    """The hit rate of one cache without bounds for all servers, as a share of the prompt tokens
    that count, if each request comes after the one before it has ended. Caches have whole blocks,
    and a prompt's last token is always computed, as in vLLM.
    """
    held, hits, total = set[int](), 0, 0
    for phase in phases:
        for request in phase.requests:
            chain = _chain(request.tokens, block)
            if phase.counted:
                total += len(request.tokens)
                hits += block * min((len(request.tokens) - 1) // block, _leading(chain, held))
            held.update(chain)
    return hits / max(1, total)


def _leading(chain: Sequence[int], held: set[int]) -> int:
    return next((index for index, key in enumerate(chain) if key not in held), len(chain))


def _chain(tokens: Tokens, block: int) -> list[int]:
    """A key for each whole block, made from all tokens up to its end."""
    keys: list[int] = []
    for start in range(0, len(tokens) - block + 1, block):
        keys.append(hash((keys[-1] if keys else 0, tokens[start : start + block].tobytes())))
    return keys
