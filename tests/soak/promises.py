"""A whole vLLM whose requests wait for what other vLLMs compute. All of them ask for the same
prompts at the same time. It stops itself, and dies, in every state of a promise, aborts requests,
resets the namespace, and notes how long each request is held back.

Of vcache it knows only what the server is told, and what vLLM's scheduler is answered."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.vllm.scale import TINY
from vcache_backend.protocol.client import Client

from . import whole
from .living import DIED, Settings, stop_self
from .whole import Size, Whole, live_on_gpu

STATES = "looked up", "promised", "step launched", "published"
"""Of an owner's promise: a look-up has made it; the server has heard of it; a step that computes
its chunks is launched; some of them can be read."""
PROMISED = Size(TINY, families=6, chunks=12, at_once=4, tokens=72 * TINY.block, step=2 * TINY.chunk)
"""A prompt takes up to six steps. Four need more tokens than there are, so that some are
preempted."""
STEP_SECONDS = 0.02
"""How much longer each step takes."""
BOUND_SECONDS = 10.0
"""No request is held back for longer, however often the processes are stopped meanwhile."""
TOGETHER, WAVE_SECONDS = 0.8, 2.0
"""The share of the prompts that all instances ask for at the same time, and how long they do so."""
STATE_SECONDS, STOPS = 2.0, 10
"""How long it runs between two such stops, on average, and at which of them it dies."""
ABORTS, RESETS = 0.003, 0.001
"""The share of the steps behind which it does so."""


class Promising(Whole):
    """_held: since when vLLM was told that a request waits. _state: in which it stops itself next,
    after the time `_due`. Which start it is says in which state it dies."""

    SIZE = PROMISED

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        self._held = dict[str, float]()
        self._state, self._due, self._stops = dice.choice(STATES), 0.0, 0
        super().__init__(settings, dice)

    def round(self) -> None:
        super().round()
        if self.asked and self.dice.random() < ABORTS:
            name = self.dice.choice(list(self.asked))
            self.engine.abort_request([name])
            del self.asked[name], self._asked_at[name]
        if self.dice.random() < RESETS:
            self.engine.reset_prefix_cache(reset_connector=True)

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
        self.told.outcomes.steps[name] += 1
        stop_self()

    def watch(self, worker: Any) -> None:
        """See each wait."""
        super().watch(worker)
        connector = self.engine.engine_core.engine_core.scheduler.connector
        matched, endless = connector.get_num_new_matched_tokens, self.settings.control == "no bound"

        def watched(request: Any, local: int) -> Any:
            name, answer = request.request_id, matched(request, local)
            if answer[0] is not None and not (endless and name in self._held):
                self._held.pop(name, None)
                return answer
            since = self._held.get(name) or time.monotonic()
            self.told.outcomes.waits += name not in self._held
            self._held[name] = since
            if time.monotonic() > since + BOUND_SECONDS:
                self.told.outcomes.overdue += 1
                self._held[name] = time.monotonic()
            return None, False

        connector.get_num_new_matched_tokens = watched
        self.stops_behind(Client, "promise", "promised")
        self.stops_behind(Client, "publish", "published")


def prepare(folder: Path) -> None:
    """Write the model and its answers."""
    whole.prepare(folder, PROMISED)


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of an instance's process."""
    live_on_gpu(Promising, settings, pipe)
