"""Decides which requests wait for chunks being computed or loaded, and for how long.

A waiting request stays in vLLM's queue and holds no blocks. vLLM asks for hits again in every step.
See docs/adr/0022."""

from __future__ import annotations

import logging
from time import monotonic

from vcache_backend.config import Config
from vcache_backend.metadata_server.messages import ChunkKey, Coming

from ..telemetry.stats import Meter
from .introduction import Introduction
from .lookups import Lookups
from .pace import Pace
from .tracked import NO_ANSWER, NOTHING_LED, Answer, Tracked, WaitState

log = logging.getLogger("vllm.vcache")

AGAIN_SECONDS = 0.005
"""The time between two look-ups of a waiting request."""
LAST_SECONDS = 0.02
"""How long after a wait's bound the server's last answer may come."""
LONGER = 1.1
"""A request waits at most `LONGER` times the time to compute the chunks here, at the slowest recent
pace, but at most `ALIKE` times the mean."""
ALIKE = 1.5
"""An owner is slower than this instance if its pace for a chunk is more than `ALIKE` times ours.
Equal instances measure paces that differ by this factor, in a simulation with vLLM's scheduler: a
prompt is done at the end of one step or, if it begins behind another prompt, of two."""
WAY_SECONDS = 0.01
"""The time from the end of a step to the end of a wait for its chunks: publication and look-up."""
MOST_STEPS, SLACK_SECONDS = 3, 0.1
"""An owner is silent if no chunk arrives for `MOST_STEPS` of its steps and `SLACK_SECONDS`; for an
announced request, for `wait_seconds` as well."""
LONGEST_STEP_SECONDS, UNKNOWN_STEP_SECONDS = 2.0, 1.0
"""The longest step that an owner may report, and the step of an owner that reports none."""
LONGEST_CHUNK_SECONDS, UNKNOWN_CHUNK_SECONDS = 2.0, 0.02
"""The longest time for a chunk that an owner may report, if this instance has measured none; and
the time for a chunk if the owner has measured none, either."""
STATE_SECONDS = 0.03
"""How long the state of a model's layers may come after the last chunk. The chunk may have no
state: states are stored at the ends of steps."""
DISTRUST_SECONDS = 10.0
"""How long this instance does not wait for an owner that was silent, or for which requests waited
in vain for `_silence` seconds."""

MOST_WAITING = 256
"""How many requests wait at once; further requests are computed. vLLM looks at every waiting
request in every step, which takes some 0.05 ms."""


class Waits:
    """Runs in the scheduler's thread. Each method waits at most for one server call."""

    def __init__(
        self,
        config: Config,
        instance: Introduction,
        lookups: Lookups,
        pace: Pace,
        meter: Meter,
        states: bool,
    ) -> None:
        """states: the model keeps states, which are stored behind their chunks."""
        self._instance, self._states = instance, states
        self._lookups, self._pace, self._meter = lookups, pace, meter
        self._size = config.engine.chunk_size
        self._leaders: dict[ChunkKey, Tracked] = {}
        """The requests of this instance that load or wait, by the first chunk. Announced requests
        only while they load."""
        self._waiting: set[str] = set()
        """The ids of waiting requests."""
        self._silent: dict[int, float] = {}
        """Owners for which no request waits, and until when (time.monotonic)."""
        self._lacking: dict[int, float] = {}
        """Owners that have delivered nothing, and since when a request has waited."""

    def follows(self, tracked: Tracked, first: int) -> bool:
        """Whether another request of this instance brings the request's chunks from `first` on into
        vLLM's cache."""
        keys = tracked.lookup.keys
        leader = self._leaders.get(keys[first]) if self._leaders and first < len(keys) else None
        if leader is None or leader is tracked:
            return False
        if leader.wait.loads:
            return True
        if _is_past(leader.wait, monotonic()):
            # With priorities vLLM may not come to the leader for long, so the leader ends its wait
            # late.
            return False
        # A leader that waits may wait for more chunks than this request needs.
        last = leader.wait.target - 1
        return first <= last < len(keys) and leader.lookup.keys[last] == keys[last]

    def pauses(self, tracked: Tracked, first: int, chunks: int) -> bool:
        """Whether the request waits, and the next answer from the server is not due yet. Asks for
        the answer, which the next step reads."""
        wait, now = tracked.wait, monotonic()
        if not wait.since or wait.over or tracked.lookup.question is not None:
            return False
        if now >= wait.asked + AGAIN_SECONDS:
            wait.asked = now
            self._lookups.forget(tracked)
            self._lookups.send(tracked, first, chunks)
            # Without a server no question is sent, and `holds` ends the wait.
            return tracked.lookup.question is not None
        return True

    def holds(self, tracked: Tracked, answer: Answer, chunks: int) -> bool:
        """Whether the request should wait for more chunks than the answer found. chunks: how many
        the request may load.

        Begins the wait, or ends it. A request waits once."""
        wait, now = tracked.wait, monotonic()
        if wait.over:
            return False
        if not wait.since:
            return self._begins(tracked, answer, chunks, now)
        coming, progressed = answer.coming, answer.hits > wait.began
        if progressed:
            self._lacking.pop(wait.owner, None)
        if coming is not None and coming.owner != wait.owner:
            wait.owner = coming.owner
            wait.owned = now
        why = self._ends(tracked, answer, now)
        if not why:
            wait.promised |= coming is not None
            return True
        if why == "late" and coming is not None and not progressed:
            self._lacks(coming, wait, now)
        self.over(tracked, why, answer.hits)
        return False

    def expired(self, tracked: Tracked) -> bool:
        """End the request's wait if the wait's bound has passed and the server's last answer is
        late, too. Returns whether the wait ended: then the request computes."""
        wait = tracked.wait
        if not wait.since or wait.over or not _is_past(wait, monotonic()):
            return False
        self.over(tracked, "late")
        return True

    def loads(self, tracked: Tracked) -> None:
        """Note that the request loads the chunks behind vLLM's cached blocks."""
        self._lead(tracked)
        # In place of a leader that only waits.
        self._leaders[tracked.wait.leads] = tracked
        tracked.wait.loads = True

    def over(self, tracked: Tracked, why: str = "aborted", reached: int = 0) -> None:
        """End the request's wait, if any, and its lead. reached: how many leading chunks exist."""
        wait = tracked.wait
        if wait.since and not wait.over:
            wait.over = True
            self._waiting.discard(tracked.request.request_id)
            wait.end = why
            wait.seconds = monotonic() - wait.since
            wait.tokens = max(0, reached - wait.began) * self._size
            self._meter.waited(why, wait.tokens, wait.seconds)
            if self._instance.client is not None:
                self._instance.client.count(awaited=wait.tokens, waited_ms=int(wait.seconds * 1e3))
            log.debug(
                "request %s waited %.3f s for %d chunks: %s",
                *(tracked.request.request_id, wait.seconds, wait.tokens // self._size, why),
            )
        if wait.leads:
            self._leave(tracked)

    # ---- inside

    def _begins(self, tracked: Tracked, answer: Answer, chunks: int, now: float) -> bool:
        wait, coming = tracked.wait, answer.coming
        if tracked.params.announced:
            wait.target = chunks
            seconds = tracked.params.patience
            if answer.hits >= chunks or not seconds:
                return False
        elif coming is None:
            return False
        else:
            wait.target = min(chunks, answer.comes_to)
            missing = wait.target - answer.hits
            owner_says = min(coming.chunk_seconds or UNKNOWN_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS)
            own = self._pace.chunk_seconds or owner_says
            pace = coming.chunk_seconds or own
            theirs = (pace if pace > ALIKE * own else min(pace, own)) * coming.chunks
            slowest = min(max(own, self._pace.slowest), ALIKE * own)
            longest = LONGER * slowest * missing
            seconds = longest + min(longest, self._pace.under_way())
            done = coming.quiet if coming.begun else 0.0
            expected = max(0.0, theirs - done) + WAY_SECONDS
            if expected > longest:
                return False
        if coming is not None and self._is_silent(tracked, coming, now):
            return False
        if len(self._waiting) >= MOST_WAITING:
            return False
        self._waiting.add(tracked.request.request_id)
        wait.since = wait.asked = wait.owned = now
        wait.until = now + seconds
        wait.began = answer.hits
        wait.promised = coming is not None
        wait.owner = coming.owner if coming is not None else 0
        if not tracked.params.announced:
            # No request follows an announced request, which may wait for long.
            self._lead(tracked)
        return True

    def _ends(self, tracked: Tracked, answer: Answer, now: float) -> str:
        """Why the wait ends; empty if the wait goes on."""
        wait, coming = tracked.wait, answer.coming
        if answer.hits >= wait.target:
            return "kept"
        if now > wait.until:
            return "late"
        if answer is NO_ANSWER:
            return "withdrawn"
        if coming is None:
            if not wait.promised:
                return ""
            wait.gone = wait.gone or now
            if now < wait.gone + (STATE_SECONDS if self._states else 0.0):
                return ""
            return "kept" if self._states and answer.hits > wait.began else "withdrawn"
        return "silent" if self._is_silent(tracked, coming, now) else ""

    def _is_silent(self, tracked: Tracked, coming: Coming, now: float) -> bool:
        """Whether the owner makes no progress, or has made none lately."""
        if coming.quiet < tracked.params.patience:
            return False
        if self._silent.get(coming.owner, 0.0) > now:
            return True
        if not coming.begun:
            # The request waits in the owner's queue.
            return coming.quiet > _step(coming) + SLACK_SECONDS
        silent = coming.quiet > _silence(coming)
        if silent:
            self._distrust(coming, now)
        return silent

    def _lacks(self, coming: Coming, wait: WaitState, now: float) -> None:
        """Note that a whole wait brought nothing from the owner. Chunks come at the ends of steps,
        and a wait may be shorter than a step: of several vain waits the first counts."""
        oldest = wait.since - DISTRUST_SECONDS
        recent = {owner: at for owner, at in self._lacking.items() if at > oldest}
        self._lacking = recent
        if now > recent.setdefault(coming.owner, wait.owned) + _silence(coming):
            self._distrust(coming, now)

    def _distrust(self, coming: Coming, now: float) -> None:
        self._silent = {owner: until for owner, until in self._silent.items() if until > now}
        self._silent[coming.owner] = now + DISTRUST_SECONDS

    def _lead(self, tracked: Tracked) -> None:
        self._leave(tracked)
        tracked.wait.leads = tracked.lookup.keys[tracked.local // self._size]
        self._leaders.setdefault(tracked.wait.leads, tracked)

    def _leave(self, tracked: Tracked) -> None:
        wait = tracked.wait
        if self._leaders.get(wait.leads) is tracked:
            del self._leaders[wait.leads]
        wait.leads = NOTHING_LED
        wait.loads = False


def _is_past(wait: WaitState, now: float) -> bool:
    """Whether the wait's bound and the time for the server's last answer have passed."""
    return now > wait.until + AGAIN_SECONDS + LAST_SECONDS


def _step(coming: Coming) -> float:
    """How long the owner's steps take, within bounds."""
    return min(coming.step_seconds or UNKNOWN_STEP_SECONDS, LONGEST_STEP_SECONDS)


def _silence(coming: Coming) -> float:
    """How long the owner may deliver nothing."""
    return MOST_STEPS * _step(coming) + SLACK_SECONDS
