"""Decides what a look-up's answer means for its request: load, compute, or wait for chunks that
another instance computes. Pure. See docs/adr/0022."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from msgspec.structs import replace

from .tracked import Answer, AnswerState, Wait

LAST_SECONDS = 0.025
"""How long after a wait's bound the server's last answer may come."""
UNKNOWN_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS = 0.05, 2.0
"""The time for a chunk if the owner has measured none, and the longest that an owner may report."""
SLACK_SECONDS = 0.1
"""A part of each wait's bound: publication, look-up, and the owner's step under way."""
STATE_SECONDS = 0.03
"""How long the state of a model's layers may come after the last chunk. The chunk may have no
state: states are stored at the ends of steps."""


class LookupResult(Enum):
    """MISS: compute. HIT: load. WAIT: another instance computes more chunks, so ask again in a
    later step. RETRY: the answer is late, so ask again in the next step."""

    MISS = 0
    HIT = 1
    WAIT = 2
    RETRY = 3

    @property
    def again(self) -> bool:
        """Whether vLLM must ask again."""
        return self in (LookupResult.WAIT, LookupResult.RETRY)


class LookupDecision(NamedTuple):
    """tokens: of a HIT, to load after those in vLLM's own cache. wait: of a WAIT by `decide`. end:
    how the request's wait ends with this decision (`Meter.waited`); empty: it does not."""

    result: LookupResult
    tokens: int = 0
    wait: Wait | None = None
    end: str = ""

    @property
    def matched(self) -> tuple[int | None, bool]:
        """vLLM's form (`get_num_new_matched_tokens`); all loads are asynchronous."""
        return None if self.result.again else self.tokens, self.tokens > 0


MISS, RETRY = LookupDecision(LookupResult.MISS), LookupDecision(LookupResult.RETRY)
FOLLOW = LookupDecision(LookupResult.WAIT)
"""Wait for another request of this instance, or for the next answer."""


class Rules(NamedTuple):
    """What all requests have in common. least: the fewest tokens of a load. wait_factor: a wait is
    at most this many times as long as the owner's computation. states: the model keeps states,
    which are stored behind their chunks."""

    chunk_size: int
    least: int
    wait_factor: float
    states: bool


class Asked(NamedTuple):
    """What vLLM asks of a request. local: the tokens in vLLM's own cache. most: the tokens that may
    be loaded, from the prompt's start, in the first `chunks` chunks. wait_seconds: an announced
    request's own bound; None: not announced. may_wait: the request has not waited, and not too many
    others wait. wait: its present wait."""

    local: int
    most: int
    chunks: int
    wait_seconds: float | None
    may_wait: bool
    wait: Wait | None


def decide(rules: Rules, asked: Asked, answer: Answer, now: float) -> LookupDecision:
    """Decide about a request by the answer to its look-up. now: time.monotonic."""
    wait = asked.wait
    if answer.state is AnswerState.LATE:
        over = wait is not None and is_past(wait, now)
        return LookupDecision(LookupResult.MISS, end="late") if over else RETRY
    end = _end(rules, wait, answer, now) if wait is not None else ""
    if wait is None and (begun := _begun(rules, asked, answer, now)) is not None:
        return LookupDecision(LookupResult.WAIT, wait=begun)
    if wait is not None and not end:
        promised = answer.coming is not None
        gone = wait.gone or now if wait.promised and not promised else None
        on = replace(wait, promised=wait.promised or promised, gone=gone)
        return LookupDecision(LookupResult.WAIT, wait=on)
    tokens = min(answer.hits * rules.chunk_size, asked.most) - asked.local
    if tokens < rules.least:
        return LookupDecision(LookupResult.MISS, end=end)
    return LookupDecision(LookupResult.HIT, tokens, end=end)


def is_past(wait: Wait, now: float) -> bool:
    """Whether the wait's bound and the time for the server's last answer have passed."""
    return now > wait.until + LAST_SECONDS


def _begun(rules: Rules, asked: Asked, answer: Answer, now: float) -> Wait | None:
    """The wait that begins; None if the request does not wait."""
    coming, seconds = answer.coming, asked.wait_seconds
    if answer.state is AnswerState.FAILED or not asked.may_wait:
        return None
    if seconds is not None:
        target, bound = asked.chunks, seconds
    elif coming is None or not rules.wait_factor:
        return None
    else:
        target = min(asked.chunks, answer.comes_to)
        chunk = min(coming.chunk_seconds or UNKNOWN_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS)
        bound = rules.wait_factor * chunk * (target - answer.hits) + SLACK_SECONDS
    worth = min(target * rules.chunk_size, asked.most) - asked.local >= rules.least
    silent = coming is not None and coming.quiet > bound
    if answer.hits >= target or not bound or not worth or silent:
        return None
    return Wait(now, bound, answer.hits, target, promised=coming is not None)


def _end(rules: Rules, wait: Wait, answer: Answer, now: float) -> str:
    """How the wait ends; empty if it goes on."""
    coming = answer.coming
    if answer.hits >= wait.target:
        return "kept"
    if answer.state is AnswerState.FAILED:
        return "withdrawn"
    if coming is not None and coming.quiet > wait.bound:
        return "silent"
    if now > wait.until:
        return "late"
    if coming is not None or not wait.promised:
        return ""
    if rules.states and now < (wait.gone or now) + STATE_SECONDS:
        return ""
    return "kept" if rules.states and answer.hits > wait.began else "withdrawn"
