"""What instances of vLLM are asked, prompts that nobody has seen, and how their answers compare:
tokens and logprobs, bit for bit."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from vcache_backend.children import Child

ANY = -1
LOGPROBS = 5
SECONDS = 60.0
MASK, EXPONENT, STEP = 0x01, 3, 64
"""What `Serving.flip` changes in each block: of a page every 64th byte, from the fourth on; in
bfloat16 and in float32 it is an exponent's."""


class Hit(NamedTuple):
    """first: what an instance computes and stores; then: what is asked after it, of which `cached`
    tokens are known by then; `ANY`: as many as vLLM's own cache has. before: computed before
    `first`.
    """

    kind: str
    first: list[int]
    then: list[int]
    cached: int
    before: tuple[list[int], ...] = ()


class Prompts:
    """A source of them. Two runs have the same; within one no two share a chunk unless they are
    meant to.

    Hits end with a chunk, fewer tokens than a block before the prompt's end or the first other
    token. There vLLM's own hits and LMCache's end, too, so that all compute the same tokens in
    steps of the same shapes: other shapes run other kernels, and may differ in the last bit."""

    def __init__(
        self, vocabulary: int, chunk: int, block: int, seed: int = 0, tail: int = 8
    ) -> None:
        """vocabulary: the number of tokens. chunk, block: in tokens. tail: tokens of whole prompts
        behind their last chunk."""
        self.seed, self._vocabulary, self._chunk = seed, vocabulary, chunk
        self._block, self.tail, self._random = block, tail, random.Random(seed)

    def new(self, length: int) -> list[int]:
        return [self._random.randrange(3, self._vocabulary) for _ in range(length)]

    def altered(self, prompt: list[int]) -> list[int]:
        """The prompt with another first token."""
        return [prompt[0] % (self._vocabulary - 4) + 3, *prompt[1:]]

    def whole(self, length: int) -> Hit:
        """The same prompt again: so many tokens, in whole chunks, and the tail."""
        prompt = self.new(length + self.tail)
        return Hit(f"{length}", prompt, prompt, length)

    def partial(self, index: int) -> Hit:
        """A shared prefix, at a chunk's edge or some tokens past it, then something else: of odd
        lengths, in a long prompt too.
        """
        chunk, past = self._chunk, (0, 1, self._block - 1)[index % 3]
        shared = (1, 2, 3, 5)[index % 4] * chunk
        tail = (1, chunk // 2 + 7, 2 * chunk, chunk - 1, 3 * chunk + 5)[index // 5 % 5]
        prefix = self.new(shared + past)
        first, then = prefix + self.new(tail), prefix + self.new(tail)
        return Hit(f"{shared + past}+{tail}", first, then, shared)

    def ends(self, lengths: Sequence[int]) -> list[Hit]:
        """For instances that share in place, where hits end as vLLM's own do: a prompt again, one
        that goes on behind it, and a third one that begins like two others. They end on, before and
        after a block, or anywhere."""
        choice, block, hits = self._random, self._block, list[Hit]()
        for length in lengths:
            for past in (0, 1, block - 1, choice.randrange(block)):
                prompt = self.new(length + past)
                hits.append(Hit(f"{length}+{past} again", prompt, prompt, ANY))
            prompt = self.new(length + choice.randrange(block))
            longer = prompt + self.new(choice.randrange(1, length))
            hits.append(Hit(f"behind {len(prompt)}", prompt, longer, ANY))
            shared = self.new(choice.randrange(length // 2, length))
            one, two, three = (shared + self.new(choice.randrange(1, length)) for _ in range(3))
            hits.append(Hit(f"third of {len(shared)}", two, three, ANY, (one,)))
        choice.shuffle(hits)
        return hits

    def hits(self, whole: dict[int, int], partial: int) -> list[Hit]:
        """So many of each length and so many partial ones, mixed: a run that ends early has some of
        each.
        """
        hits = [self.partial(index) for index in range(partial)]
        hits += [self.whole(length) for length, count in whole.items() for _ in range(count)]
        self._random.shuffle(hits)
        return hits


# ---- answers


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
