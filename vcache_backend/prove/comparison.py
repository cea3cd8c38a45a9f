"""Prompts that nobody has seen, and what an instance answers after a hit on them: it must be what
vLLM answers after a hit in its own prefix cache, tokens and logprobs, bit for bit.

For `vcache prove` and the benchmarks."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from vcache_backend.children import Child

LOGPROBS, SECONDS = 5, 60.0
OWN = {"kv_transfer_params": {"vcache": {"load": False, "store": False}}}
"""Of a request that vLLM's own prefix cache answers, and of which no other instance hears."""


class Hit(NamedTuple):
    """kind: in words. first: what is computed, one after the other; then: what is asked after
    it."""

    kind: str
    first: list[list[int]]
    then: list[int]


class Prompts:
    """A source of them. Two runs have the same; within one no two begin alike unless they are meant
    to.

    A hit ends with a chunk, in place with a block. What prompts have in common ends less than a
    block behind one. There vLLM's own hits and LMCache's end, too, so that all compute the same
    tokens in steps of the same shapes: other shapes run other kernels, and may differ in the last
    bit."""

    def __init__(
        self, vocabulary: int, chunk: int, block: int, seed: int = 0, tail: int = 8
    ) -> None:
        """vocabulary: the number of tokens. chunk, block: in tokens; in place a chunk is a block.
        tail: tokens of whole prompts behind their last chunk."""
        self._vocabulary, self._chunk, self._block = vocabulary, chunk, block
        self.tail, self._random = tail, random.Random(seed)

    def new(self, length: int) -> list[int]:
        return [self._random.randrange(3, self._vocabulary) for _ in range(length)]

    def whole(self, length: int, past: int | None = None) -> Hit:
        """The same prompt again: so many tokens, in whole chunks, and the tail. past: in its
        place."""
        prompt = self.new(self._chunks(length) + (self.tail if past is None else past))
        return Hit(f"{length} again", [prompt], prompt)

    def parting(self, length: int, begun: int = 2) -> Hit:
        """One that begins like as many others, for about half of its length or more. 0: like one
        that ends there."""
        chunks, past = self._chunks(length) // self._chunk, self._random.randrange(self._block)
        common = self._random.randint((chunks + 1) // 2, max(1, chunks - 1)) * self._chunk + past
        shared, most = self.new(common), max(length - common, self._block)
        *others, then = (shared + self.new(self._random.randint(1, most)) for _ in range(begun + 1))
        return Hit(f"{common} of {len(then)}, {begun} others", others or [shared], then)

    def hits(self, counts: Mapping[int, int]) -> list[Hit]:
        """So many of each length, or up to a block longer, mixed: a run that ends early has some of
        each. Six have all kinds: whole ones that end on, behind and before a block, or anywhere,
        and two that part."""
        # LMCache would compute only the last token of a prompt that ends with a chunk.
        edge = 0 if self._chunk == self._block else self.tail
        lengths = [length for length, count in counts.items() for _ in range(count)]
        hits = list[Hit]()
        for number, length in enumerate(lengths):
            past = edge, 1, self._block - 1, self._random.randrange(1, self._block)
            kind = number % 6
            one = self.whole(length, past[kind]) if kind < 4 else self.parting(length, kind % 2 * 2)
            hits.append(one)
        self._random.shuffle(hits)
        return hits

    def _chunks(self, length: int) -> int:
        """At most so many tokens, but at least a chunk."""
        return max(1, length // self._chunk) * self._chunk


class Comparison:
    """`writer` computes prompts, and `reader`, whose blocks hold other prompts' KV, hits them. It
    must answer as `reference` does from vLLM's own prefix cache. This may be the writer."""

    def __init__(
        self, writer: Child, reader: Child, reference: Child, answer: int, cuts: bool = False
    ) -> None:
        """answer: tokens of each. cuts: ask for a beginning of each hit, too, of any length: for
        models with one block table. All methods raise ChildFailed."""
        self.writer, self.reader, self.reference, self.answer = writer, reader, reference, answer
        self._cuts, self._random = cuts, random.Random(0)

    def compute(self, hit: Hit) -> None:
        """The writer computes what comes first, until others can find it."""
        for prompt in hit.first:
            ask(self.writer, prompt, 1)
        self.writer.ask("told")

    def own(self, hit: Hit) -> dict[str, Any]:
        """The reference's answer, once it has computed what comes first."""
        return ask(self.reference, hit.then, self.answer, extra_args=OWN)

    def both(self, hit: Hit) -> tuple[dict[str, Any], dict[str, Any]]:
        """The reference's answer and the reader's, at the same time, once all is computed."""
        self.compute(hit)
        self.reader.send("generate", tokens=hit.then, count=self.answer, logprobs=LOGPROBS)
        try:
            expected = self.own(hit)
        finally:
            got = self.reader.answer(SECONDS)
        return expected, got

    def differences(self, hits: Iterable[Hit]) -> tuple[list[str | None], int]:
        """How each hit's answer differs, see `difference`; None if it does not, but nothing was
        cached. And how many hit something. If few do, it says nothing."""
        found, some = list[str | None](), 0
        for hit in hits:
            expected, got = self.both(hit)
            how, cached = difference(expected, got), expected["cached"]
            if cached and self._cuts:
                how = how or self.cut(hit, cached)
            found.append(how or ("" if cached else None))
            some += cached > 0
        return found, some

    def cut(self, hit: Hit, cached: int) -> str:
        """How the reader's answer to a beginning of a hit differs, which its own prefix cache has
        now. Of loaded blocks in each other's place the whole prompt's answer says next to nothing:
        their keys have their positions, and attention adds up in any order."""
        prompt = hit.then[: self._random.randint(1, cached)]
        both = self.reference, self.reader
        expected, got = (ask(child, prompt, 1, extra_args=OWN) for child in both)
        how = difference(expected, got) if got["cached"] == expected["cached"] else ""
        return how and f"its first {len(prompt)} tokens: {how}"

    def flips(self, hit: Hit, command: str = "flip", **where: Any) -> Iterator[dict[str, Any]]:
        """The reader's answer once bytes in all of the writer's blocks are changed, and once they
        are changed back. command: see `Serving.flip`."""
        for _ in range(2):
            self.writer.ask(command, **where)
            self.reader.ask("reset")
            yield ask(self.reader, hit.then, self.answer)


def ask(child: Child, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
    """An instance's answer of `count` tokens. more: see `Serving.generate`. ChildFailed."""
    asked = {"tokens": tokens, "count": count, "logprobs": LOGPROBS, **more}
    answer: dict[str, Any] = child.ask("generate", SECONDS, **asked)
    return answer


def soil(child: Child, prompts: Prompts, tokens: int, longest: int) -> None:
    """Fill an instance's blocks with so many tokens of prompts that nobody asks for again, each of
    `longest`. ChildFailed."""
    for _ in range(tokens // longest + 1):
        ask(child, prompts.new(longest), 1, extra_args=OWN)


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
