"""Which requests load, compute, or wait for chunks that another instance computes. `decide` is the
whole rule, and pure. See docs/adr/0022.

A waiting request stays in vLLM's queue and holds no blocks. vLLM asks for hits again in every
step. Once half of what is promised has come, the request may load it while it waits for the rest:
an open load, which holds blocks for all of it."""

from __future__ import annotations

import logging
from enum import Enum
from time import monotonic
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from vcache_backend.protocol.messages import HASH_BYTES, QUEUED_SECONDS, Coming

from .instance import InstanceContext
from .requests import FAILED, LATE, Answer, Tracked, Wait
from .telemetry.stats import Meter

log = logging.getLogger("vllm.vcache")

AGAIN_SECONDS = 0.001
"""The time between two probes for a waiting request, each of some 20 us. While nobody computes what
it waits for, a quarter of it times the number of waiting requests, if that is longer: otherwise
many would slow down every step."""
MOST_WAITING = 256
"""How many requests wait at once; further requests are computed. vLLM looks at every waiting
request in every step, which takes some 0.03 ms."""
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
    """MISS: compute. HIT: load. AGAIN: another instance computes more chunks, or the answer is
    late, so vLLM must ask again in a later step."""

    MISS = 0
    HIT = 1
    AGAIN = 2


class LookupDecision(msgspec.Struct, frozen=True):
    """What a look-up means for its request."""

    result: LookupResult
    tokens: int = 0
    """Of a HIT: to load after those in vLLM's own cache."""
    wait: Wait | None = None
    """Of AGAIN by `decide`, and of a HIT with an open load: the wait goes on."""
    end: str = ""
    """How the request's wait ends with this decision (`Meter.waited`); empty: it does not."""

    @property
    def again(self) -> bool:
        return self.result is LookupResult.AGAIN

    @property
    def matched(self) -> tuple[int | None, bool]:
        """vLLM's form (`get_num_new_matched_tokens`); all loads are asynchronous."""
        return None if self.again else self.tokens, self.tokens > 0


MISS, AGAIN = LookupDecision(LookupResult.MISS), LookupDecision(LookupResult.AGAIN)


class Rules(NamedTuple):
    """What all requests have in common."""

    chunk_size: int
    least: int
    """The fewest tokens of a load."""
    wait_factor: float
    """A wait is at most this many times as long as the owner's computation."""
    opens: bool
    """Loads may be open."""
    states: bool
    """A hit does not end with every chunk: the model keeps states or windows, which come behind
    their chunks."""

    def patience(self, coming: Coming, chunks: int) -> float:
        """How long an owner may take for so many chunks, in seconds."""
        chunk = min(coming.chunk_seconds or UNKNOWN_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS)
        return self.wait_factor * chunk * chunks + SLACK_SECONDS


class Asked(msgspec.Struct, frozen=True):
    """What vLLM asks of a request."""

    local: int
    """Tokens in vLLM's own cache."""
    most: int
    """Tokens that may be loaded, from the prompt's start, in the first `chunks` chunks."""
    chunks: int
    wait_seconds: float | None
    """An announced request's own bound; None: not announced."""
    may_wait: bool
    """The request has not waited, and not too many others wait."""
    wait: Wait | None
    """The present wait."""
    loads: bool = False
    """The wait's open load is under way."""


def decide(rules: Rules, asked: Asked, answer: Answer, now: float) -> LookupDecision:
    """Decide about a request by the answer to its look-up. now: time.monotonic."""
    wait = asked.wait
    if answer is LATE:
        over = wait is not None and _is_past(wait, now)
        return LookupDecision(LookupResult.MISS, end="late") if over else AGAIN
    end = ""
    if wait is None:
        wait = _begun(rules, asked, answer, now)
    elif asked.loads and answer.epoch != wait.epoch:
        # After a reset nothing is added to blocks from before it.
        return LookupDecision(LookupResult.MISS, end="withdrawn")
    else:
        end = _end(rules, wait, answer, now)
        wait = _noted(wait, answer, now) if not end else None
    if wait is not None:
        return _opened(rules, asked, wait, answer) or _waiting(rules, asked, wait, answer)
    tokens = min(answer.tokens, asked.most) - asked.local
    if tokens < rules.least:
        return LookupDecision(LookupResult.MISS, end=end)
    return LookupDecision(LookupResult.HIT, tokens, end=end)


def _opened(rules: Rules, asked: Asked, wait: Wait, answer: Answer) -> LookupDecision | None:
    """Load what has come of a begun promise, at least half, and wait for the rest. None: not yet,
    or nothing more than before."""
    coming = answer.coming
    if not rules.opens or answer.by_chunks or coming is None or not coming.begun:
        return None
    announced, size = asked.wait_seconds is not None, rules.chunk_size
    whole = asked.most if announced else min(wait.target * size, asked.most)
    here = min(answer.tokens, asked.most) - asked.local
    quiet = rules.patience(coming, wait.target)
    if asked.loads:
        comes = answer.hits > wait.probes
    else:
        comes = answer.comes_to >= wait.target and coming.quiet <= quiet
        comes &= 2 * here >= whole - asked.local and here >= rules.least
    if not comes:
        return None
    opened = replace(wait, asks=answer.hits, quiet=quiet, epoch=answer.epoch)
    return LookupDecision(LookupResult.HIT, whole - asked.local, opened)


def _waiting(rules: Rules, asked: Asked, wait: Wait, answer: Answer) -> LookupDecision:
    """Wait, first for the chunk with which half will have come."""
    if not asked.loads:
        half = (asked.local // rules.chunk_size + wait.target - 1) // 2
        wait = replace(wait, asks=half if rules.opens and answer.hits <= half else None)
    return LookupDecision(LookupResult.AGAIN, wait=wait)


def _noted(wait: Wait, answer: Answer, now: float) -> Wait:
    """The wait as it goes on after an answer."""
    promised = answer.coming is not None
    gone = wait.gone or now if wait.promised and not promised else None
    return replace(wait, promised=wait.promised or promised, gone=gone)


def _is_past(wait: Wait, now: float) -> bool:
    """Whether the wait's bound and the time for the server's last answer have passed."""
    return now > wait.until + LAST_SECONDS


def _begun(rules: Rules, asked: Asked, answer: Answer, now: float) -> Wait | None:
    """The wait that begins; None if the request does not wait."""
    coming, seconds = answer.coming, asked.wait_seconds
    if answer is FAILED or not asked.may_wait:
        return None
    if seconds is not None:
        target, bound = asked.chunks, seconds
    elif coming is None or not rules.wait_factor:
        return None
    else:
        target = min(asked.chunks, answer.comes_to)
        bound = rules.patience(coming, target - answer.hits)
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
    if answer is FAILED:
        return "withdrawn"
    if coming is not None and coming.quiet > min(wait.bound, wait.quiet):
        return "silent"
    if now > wait.until:
        return "late"
    if coming is not None or not wait.promised:
        return ""
    if rules.states and now < (wait.gone or now) + STATE_SECONDS:
        return ""
    return "kept" if rules.states and answer.hits > wait.began else "withdrawn"


class Waits:
    """The waits of this instance's requests. Runs in the scheduler's thread, and never waits."""

    def __init__(self, context: InstanceContext, meter: Meter) -> None:
        connector, states = context.config.connector, bool(context.groups.states) or context.by_ends
        least, factor = connector.min_hit_tokens, connector.wait_factor
        opens = context.publications is not None and not context.by_ends and bool(factor)
        opens &= context.offload is None and connector.kv_load_failure_policy == "recompute"
        self._rules = Rules(context.chunk_size, least, factor, opens, states)
        self._context, self._meter = context, meter
        self._leaders: dict[bytes, Tracked] = {}
        """The requests of this instance that load or wait, by the first chunk's name. Announced
        requests only while they load."""
        self.waiting: dict[str, Tracked] = {}
        """The requests that wait, by name."""

    def open_nothing(self) -> None:
        """Wait for all that is promised before a load begins."""
        self._rules = self._rules._replace(opens=False)

    def follows(self, tracked: Tracked, first: int) -> bool:
        """Whether another request of this instance brings the request's chunks from `first` on into
        vLLM's cache."""
        leader = self._leaders.get(self._named(tracked, first)) if self._leaders else None
        if leader is None or leader is tracked:
            return False
        if leader.wait.load_started:
            return True
        wait = leader.wait.wait
        if wait is None or _is_past(wait, monotonic()):
            # With priorities vLLM may not come to the leader for long, so the leader ends its wait
            # late.
            return False
        # A leader that waits may wait for more chunks than this request needs.
        last, own = wait.target - 1, self._named(tracked, wait.target - 1)
        return first <= last and bool(own) and self._named(leader, last) == own

    def is_due(self, tracked: Tracked) -> bool:
        """Whether the server is to be asked again for a waiting request, which then counts as
        asked."""
        now = monotonic()
        many = 1.0 if tracked.wait.begun else max(1.0, len(self.waiting) / 4)
        due = now >= tracked.wait.asked + AGAIN_SECONDS * many
        due |= tracked.wait.wait is not None and now > tracked.wait.wait.until
        if due:
            tracked.wait.asked = now
        return due

    def goes_on(self, tracked: Tracked, probed: Answer) -> bool:
        """Note the answer to a probe. False: the chunk has come, or the wait may be over, so the
        prompt is to be looked up."""
        wait, now = tracked.wait.wait, monotonic()
        if wait is None or probed.hits > wait.probes:
            return False
        if probed is LATE:
            question = tracked.lookup.question
            silent = question is not None and now > question.at + wait.quiet
            return not (silent or _is_past(wait, now))
        coming = probed.coming
        tracked.wait.begun = coming is not None and coming.begun
        queued = coming is not None and not coming.begun and coming.quiet > QUEUED_SECONDS
        # A look-up takes over what is still queued. A probe does not.
        if queued or _end(self._rules, wait, probed, now):
            return False
        tracked.wait.wait = _noted(wait, probed, now)
        return True

    def decide(self, tracked: Tracked, answer: Answer) -> LookupDecision:
        """Apply `decide` to a request: its wait begins, goes on, or ends."""
        state, params, lookup = tracked.wait, tracked.params, tracked.lookup
        bound = params.wait_seconds if params.announced else None
        may_wait = not state.waited and len(self.waiting) < MOST_WAITING
        loads = tracked.load is not None
        sizes = tracked.local, lookup.most, lookup.chunks
        asked = Asked(*sizes, bound, may_wait, state.wait, loads)
        decision = decide(self._rules, asked, answer, monotonic())
        if decision.end:
            self.over(tracked, decision.end, answer.hits)
            if loads:
                self.on_load(tracked)
        elif decision.wait is not None:
            if not state.waited:
                state.waited = True
                self.waiting[tracked.request.request_id] = tracked
                state.asked = monotonic()
                if not params.announced:
                    # No request follows an announced request, which may wait for long.
                    self._lead(tracked)
            state.wait = decision.wait
            state.begun = answer.coming is not None and answer.coming.begun
        return decision

    def on_load(self, tracked: Tracked) -> None:
        """Note that the request loads the chunks behind vLLM's cached blocks."""
        if name := self._lead(tracked):
            # In place of a leader that only waits.
            self._leaders[name] = tracked
        tracked.wait.load_started = True

    def over(self, tracked: Tracked, why: str = "aborted", reached: int = 0) -> None:
        """End the request's wait, if any, and its lead. reached: how many leading chunks exist."""
        state = tracked.wait
        if (wait := state.wait) is not None:
            state.wait = None
            self.waiting.pop(tracked.request.request_id, None)
            state.end = why
            state.seconds = monotonic() - wait.since
            state.tokens = max(0, reached - wait.began) * self._rules.chunk_size
            self._meter.waited(why, state.tokens, state.seconds)
            if self._context.client is not None:
                ms = int(state.seconds * 1e3)
                self._context.client.count(awaited=state.tokens, waited_ms=ms)
            log.debug(
                "request %s waited %.3f s for %d tokens: %s",
                *(tracked.request.request_id, state.seconds, state.tokens, why),
            )
        if state.leads:
            self._leave(tracked)

    # ---- inside

    def _named(self, tracked: Tracked, chunk: int) -> bytes:
        """The name of the request's chunk with this number: its last block's. Empty if the request
        has no such chunk."""
        end = (chunk + 1) * self._context.names * HASH_BYTES
        return tracked.lookup.named[end - HASH_BYTES : end]

    def _lead(self, tracked: Tracked) -> bytes:
        """Empty: the request has no whole chunk behind vLLM's own cache, and nobody follows it."""
        if tracked.wait.leads:
            self._leave(tracked)
        name = self._named(tracked, tracked.local // self._rules.chunk_size)
        if name:
            tracked.wait.leads = name
            self._leaders.setdefault(name, tracked)
        return name

    def _leave(self, tracked: Tracked) -> None:
        state = tracked.wait
        if state.leads and self._leaders.get(state.leads) is tracked:
            del self._leaders[state.leads]
        state.leads, state.load_started = b"", False
