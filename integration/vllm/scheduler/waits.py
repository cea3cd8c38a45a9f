"""Decides which requests wait for chunks that are being computed or loaded, and for how long.

A request that waits stays in vLLM's queue and holds no blocks. vLLM asks for it again in every
step. See docs/adr/0022."""

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
"""The time between two look-ups of a request that waits."""
LAST_SECONDS = 0.02
"""How long past a wait's bound the server's last answer may take."""
LONGER = 1.1
"""A request waits at most so many times as long as it would take to compute the chunks here, at the
slowest of the recent paces, which counts for at most `ALIKE` times the mean."""
ALIKE = 1.5
"""An owner is no slower than this instance unless it says that a chunk takes so many times as long
there. The paces that equal instances measure differ by that much, in a simulation with vLLM's
scheduler: a prompt is done at the end of one step or, if it begins behind another one, of two."""
WAY_SECONDS = 0.01
"""The time from the end of a step to the end of a wait for its chunks: they are published, and the
reader looks them up."""
MOST_STEPS, SLACK_SECONDS = 3, 0.1
"""An owner is silent if no chunk arrives for so many of its steps, and this time. For an announced
request it is silent only if no chunk arrives for the request's `wait_seconds`, either."""
LONGEST_STEP_SECONDS, UNKNOWN_STEP_SECONDS = 2.0, 1.0
"""Bounds what an owner says of its steps, and stands for what an owner cannot say yet."""
LONGEST_CHUNK_SECONDS, UNKNOWN_CHUNK_SECONDS = 2.0, 0.02
"""Bounds what an owner says of a chunk where this instance has measured none; where nobody has."""
STATE_SECONDS = 0.03
"""How long the state of a model's layers may come after the last chunk. There may be none at this
chunk: states are stored where steps end."""
DISTRUST_SECONDS = 10.0
"""How long this instance does not wait for an owner that was silent, or whose waits brought nothing
for as long as `_silence` says."""

MOST_WAITING = 256
"""How many requests wait at once; the next ones are computed. vLLM looks at each that waits in
every step, which takes some 0.05 ms."""


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
        """By the first chunk that a request of this instance loads or waits for, that request.
        Announced requests are in it while they load."""
        self._waiting: set[str] = set()
        """The ids of the requests that wait."""
        self._silent: dict[int, float] = {}
        """Owners that are not waited for, and until when (time.monotonic)."""
        self._lacking: dict[int, float] = {}
        """Owners of which nothing came, and since when a request has waited for them."""

    def follows(self, tracked: Tracked, first: int) -> bool:
        """Whether another request of this instance brings chunks from the request's chunk `first`
        on, and vLLM's cache will have them then."""
        keys = tracked.lookup.keys
        leader = self._leaders.get(keys[first]) if self._leaders and first < len(keys) else None
        if leader is None or leader is tracked:
            return False
        if leader.wait.loads:
            return True
        if _is_past(leader.wait, monotonic()):
            # By priority vLLM may not come to the leader for long, and so it ends its wait late.
            return False
        # A leader that waits may wait for more chunks than this request needs.
        last = leader.wait.target - 1
        return first <= last < len(keys) and leader.lookup.keys[last] == keys[last]

    def pauses(self, tracked: Tracked, first: int, chunks: int) -> bool:
        """Whether the request waits, and the next answer from the server is not due yet. Asks for
        that answer, which the next step reads."""
        wait, now = tracked.wait, monotonic()
        if not wait.since or wait.over or tracked.lookup.question is not None:
            return False
        if now >= wait.asked + AGAIN_SECONDS:
            wait.asked = now
            self._lookups.forget(tracked)
            self._lookups.send(tracked, first, chunks)
            # Without a server there is no question, and `holds` ends the wait.
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
        coming, came = answer.coming, answer.hits > wait.began
        if came:
            self._lacking.pop(wait.owner, None)
        if coming is not None and coming.owner != wait.owner:
            wait.owner = coming.owner
            wait.owned = now
        why = self._ends(tracked, answer, now)
        if not why:
            wait.promised |= coming is not None
            return True
        if why == "late" and coming is not None and not came:
            self._lacks(coming, wait, now)
        self.over(tracked, why, answer.hits)
        return False

    def expired(self, tracked: Tracked) -> bool:
        """End the request's wait if its bound has passed and the server's last answer is late, too.
        Returns whether it did: then the request computes."""
        wait = tracked.wait
        if not wait.since or wait.over or not _is_past(wait, monotonic()):
            return False
        self.over(tracked, "late")
        return True

    def loads(self, tracked: Tracked) -> None:
        """Note that the request loads the chunks behind those of vLLM's cache."""
        self._lead(tracked)
        # In place of one that only waits.
        self._leaders[tracked.wait.leads] = tracked
        tracked.wait.loads = True

    def over(self, tracked: Tracked, why: str = "aborted", reached: int = 0) -> None:
        """End the request's wait, if it waits, and its lead. reached: how many leading chunks are
        there."""
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
            told = min(coming.chunk_seconds or UNKNOWN_CHUNK_SECONDS, LONGEST_CHUNK_SECONDS)
            own = self._pace.chunk_seconds or told
            pace = coming.chunk_seconds or own
            theirs = (pace if pace > ALIKE * own else min(pace, own)) * coming.chunks
            slowest = min(max(own, self._pace.slowest), ALIKE * own)
            here = LONGER * slowest * missing
            seconds = here + min(here, self._pace.under_way())
            done = coming.quiet if coming.begun else 0.0
            expected = max(0.0, theirs - done) + WAY_SECONDS
            if expected > here:
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
            # Nobody else waits for as long as an announced request wants to.
            self._lead(tracked)
        return True

    def _ends(self, tracked: Tracked, answer: Answer, now: float) -> str:
        """Why the wait ends; empty if it goes on."""
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
        """Whether the owner makes no progress, or made none a moment ago."""
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
        """Note that in a whole wait nothing came from the owner. The wait may be shorter than the
        owner's steps, at whose end chunks come: then the first of several counts."""
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
    """Whether the bound of a wait has passed, and the time for the server's last answer, too."""
    return now > wait.until + AGAIN_SECONDS + LAST_SECONDS


def _step(coming: Coming) -> float:
    """How long the owner's steps take, within bounds."""
    return min(coming.step_seconds or UNKNOWN_STEP_SECONDS, LONGEST_STEP_SECONDS)


def _silence(coming: Coming) -> float:
    """How long nothing may come from the owner."""
    return MOST_STEPS * _step(coming) + SLACK_SECONDS
