"""vLLM's answer to a request, and whether another answer was computed from the same KV."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

TOLERANCE = 0.15
"""By how much a log probability may change with the shape of the batch. Some 0.06 was seen with
AMX, the step of bfloat16 at the logits' size. Another token at the prompt's beginning changes the
worst of 120 by 5 or more."""
RANKED = 5
"""How many log probabilities a token to ask for: three tokens were seen within 0.12."""


class Answer(NamedTuple):
    """logprobs: those of the answer's tokens, after the prompt's if these were asked for. cached:
    prompt tokens that vLLM's own prefix cache or vcache had. ranked: for each token of the answer,
    the log probabilities of the `RANKED` likeliest."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    ranked: list[dict[int, float]]

    @classmethod
    def of(cls, output: Any) -> Answer:
        """From vLLM's `RequestOutput`, `RANKED` log probabilities a token."""
        (said,) = output.outputs
        rated = zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=False)
        logprobs = [step[token].logprob for step, token in rated if step is not None]
        ranked = [
            {token: held.logprob for token, held in step.items()} for step in said.logprobs or []
        ]
        logprobs += [step[token] for step, token in zip(ranked, said.token_ids, strict=True)]
        return cls(list(said.token_ids), logprobs, output.num_cached_tokens, ranked)

    @property
    def said(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs

    def agrees(self, other: Answer) -> bool:
        """Whether it was computed from the same KV, in batches of any shapes. Tokens that are about
        equally likely may change places; what follows is not compared then.
        """
        rated = len(self.logprobs) - len(self.tokens)
        pairs = zip(self.logprobs, other.logprobs, strict=True)
        for place, (own, others) in enumerate(pairs, -rated):
            if abs(own - others) > TOLERANCE:
                return False
            if place >= 0 and self.tokens[place] != other.tokens[place]:
                return self._might_say(place, other.tokens[place]) or other._might_say(
                    place, self.tokens[place]
                )
        return True

    def _might_say(self, place: int, token: int) -> bool:
        """Whether this token is about as likely at this place as the one that was said."""
        logprob = self.ranked[place].get(token, -math.inf)
        return self.ranked[place][self.tokens[place]] - logprob <= TOLERANCE

    def differs(self, other: Answer) -> bool:
        """Whether it was computed from other KV. Probabilities show it even if all tokens happen to
        be the same.
        """
        return not self.agrees(other)
