"""vLLM's answer to a request, and whether another answer was computed from the same KV."""

from __future__ import annotations

from typing import Any, NamedTuple

TOLERANCE = 0.15
"""By how much a log probability may change with the shape of the batch. Some 0.06 was seen with
AMX, the step of bfloat16 at the logits' size. Another token at the prompt's beginning changes the
worst of 120 by 5 or more."""


class Answer(NamedTuple):
    """logprobs: those of the answer's tokens, after the prompt's if these were asked for. cached:
    prompt tokens that vLLM's own prefix cache or vcache had. seconds: for each token, the second
    most likely one and its log probability."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    seconds: list[tuple[int, float]]

    @classmethod
    def of(cls, output: Any) -> Answer:
        """From vLLM's `RequestOutput`, two log probabilities a token."""
        (said,) = output.outputs
        rated = zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=False)
        logprobs = [step[token].logprob for step, token in rated if step is not None]
        logprobs += [
            step[token].logprob
            for step, token in zip(said.logprobs or [], said.token_ids, strict=True)
        ]
        ranked = [
            sorted(step.items(), key=lambda item: -item[1].logprob) for step in said.logprobs or []
        ]
        others = [
            next(item for item in step if item[0] != token)
            for step, token in zip(ranked, said.token_ids, strict=True)
        ]
        seconds = [(token, found.logprob) for token, found in others]
        return cls(list(said.token_ids), logprobs, output.num_cached_tokens, seconds)

    @property
    def said(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs

    def agrees(self, other: Answer) -> bool:
        """Whether it was computed from the same KV, in batches of any shapes. Two tokens that are
        about equally likely may change places, with a third between them in one of the answers;
        what follows is not compared then."""
        rated = len(self.logprobs) - len(self.tokens)
        for place, (own, others) in enumerate(
            zip(self.logprobs, other.logprobs, strict=True), -rated
        ):
            if abs(own - others) > TOLERANCE:
                return False
            if place >= 0 and self.tokens[place] != other.tokens[place]:
                return self._might_say(place, other.tokens[place]) or other._might_say(
                    place, self.tokens[place]
                )
        return True

    def _might_say(self, place: int, token: int) -> bool:
        """Whether this token is the second most likely one at this place, and about as likely as
        the first.
        """
        second, logprob = self.seconds[place]
        return second == token and self.logprobs[place - len(self.tokens)] - logprob <= TOLERANCE

    def differs(self, other: Answer) -> bool:
        """Whether it was computed from other KV. Probabilities show it even if all tokens happen to
        be the same.
        """
        return not self.agrees(other)
