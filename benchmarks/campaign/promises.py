"""A whole vLLM whose requests wait for what other vLLMs compute (`Promising`). All of them ask for
the same prompts at the same time. It stops itself, and dies, in every state of a promise; aborts
requests and resets the namespace; and checks that no request waits longer than its bound."""

from __future__ import annotations

import os
import random
import sys
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

from vcache_backend.metadata_server.client import Client

from ..vllm.scale import TINY
from . import whole
from .levels import DIED
from .living import Settings, stop_self
from .whole import Size, Whole, live_on_gpu

STATES = "looked up", "begun", "promised", "step launched", "published"
"""Of an owner's promise: its look-up has made it; its first step is planned; the server has heard
of that; a step that computes its chunks is launched; some of them can be read."""
PROMISED = Size(TINY, families=6, chunks=12, at_once=4, tokens=72 * TINY.block, step=2 * TINY.chunk)
"""A prompt takes up to six steps. Four need more tokens than there are, so that some are
preempted."""
STEP_SECONDS, CHUNK_SECONDS = 0.02, 0.08
"""How much longer each step takes, and how long every instance says that a chunk takes it: as what
is measured between stops differs, they would seldom wait."""
TOGETHER, WAVE_SECONDS = 0.8, 2.0
"""The share of the prompts that all instances ask for at the same time, and how long they do so."""
STATE_SECONDS, STOPS = 2.0, 10
"""How long it runs between two such stops, on average, and at which of them it dies."""
DISTRUST_SECONDS = 1.0
"""How long nobody waits for an owner that was silent: shorter than usual, as all are often."""
ABORTS, RESETS = 0.03, 0.001
"""The share of the steps behind which it does so."""


class Promising(Whole):
    """_overdue: how often each request was held back past its bound. _state: in which it stops
    itself next, after the time `_due`. Which start it is says in which state it dies."""

    SIZE = PROMISED

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        self._overdue = Counter[str]()
        self._state, self._due, self._stops = dice.choice(STATES), 0.0, 0
        super().__init__(settings, dice)

    def round(self) -> None:
        super().round()
        outcomes = self.told.outcomes
        if self.asked and self.dice.random() < ABORTS:
            name = self.dice.choice(list(self.asked))
            self.engine.abort_request([name])
            del self.asked[name], self._asked_at[name]
            outcomes.by_step["aborted"] += 1
        if self.dice.random() < RESETS:
            self.engine.reset_prefix_cache(reset_connector=True)
            outcomes.by_step["reset"] += 1

    def ask(self) -> tuple[int, int]:
        if self.dice.random() >= TOGETHER:
            return super().ask()
        family = int(time.time() / WAVE_SECONDS) % self.size.families
        return family, self.dice.randint(self.size.chunks // 2, self.size.chunks)

    def step(self, name: str, often: int = 1) -> None:
        """Stops itself, or dies, in one state after the other."""
        if name == "step begun":
            time.sleep(STEP_SECONDS)
        if name != self._state or time.monotonic() < self._due:
            return
        self._state = self.dice.choice(STATES)
        self._due = time.monotonic() + self.dice.uniform(0, 2 * STATE_SECONDS)
        self._stops += 1
        if self._stops == STOPS:
            self._state = STATES[self.settings.start % len(STATES)]
        elif self._stops > STOPS:
            os._exit(DIED + STATES.index(name))
        self.told.outcomes.by_step[name] += 1
        stop_self()

    def watch(self, worker: Any) -> None:
        """See each wait."""
        super().watch(worker)
        connector = self.engine.engine_core.engine_core.scheduler.connector
        half, matched = connector._scheduler, connector._scheduler.matched
        # vLLM has imported the connector by another name than this module would.
        self._waits = cast(Any, sys.modules[type(half._waits).__module__])
        self._waits.DISTRUST_SECONDS = DISTRUST_SECONDS
        if self.settings.control == "no bound":
            wait_for_ever(self._waits.Waits)

        def watched(request: Any, local: int) -> Any:
            began, answer = time.monotonic(), matched(request, local)
            tracked = half._requests.get(request.request_id)
            first = local // self.size.scale.chunk
            # Who follows another request's load is held back by that.
            if answer[0] is None and not half._waits.follows(tracked, first):
                self._holds(request.request_id, tracked.wait, began)
            return answer

        half.matched = watched
        half._pace.chunk_seconds, half._pace.look = CHUNK_SECONDS, lambda: None
        half._pace.recent.append(10 * CHUNK_SECONDS)
        count = half._waits._meter.waited

        def waited(end: str, *given: Any) -> None:
            count(end, *given)
            self.told.outcomes.waits[end] += 1

        half._waits._meter.waited = waited
        self.stops_behind(half._promises, "begun", "begun")
        self.stops_behind(Client, "promise", "promised")
        self.stops_behind(Client, "publish", "published")

    def _holds(self, name: str, wait: Any, began: float) -> None:
        """vLLM asked for the request at the time `began`, and was told that it waits. Past its
        bound one such answer asks the server, and the next one must end the wait. A reset in
        between drops the question."""
        late = self._waits.AGAIN_SECONDS + self._waits.LAST_SECONDS
        if not wait.since or wait.over or began <= wait.until + late:
            return
        self._overdue[name] += 1
        self.told.outcomes.overdue += self._overdue[name] == 3


def wait_for_ever(waits: Any) -> None:
    """For a control: no wait ends because its time is over, or its owner is silent."""
    ends = waits._ends

    def ended(*given: Any) -> str:
        why: str = ends(*given)
        return "" if why in ("late", "silent") else why

    waits._ends = ended


def prepare(folder: Path) -> None:
    """Write the model and its answers."""
    whole.prepare(folder, PROMISED)


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of an instance's process."""
    live_on_gpu(Promising, settings, pipe)
