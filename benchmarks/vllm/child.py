"""Inside an instance's process: the commands of `prove.instance`, and those that measure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain, pairwise, repeat
from typing import Any

from vcache_backend.prove.instance import Serving, main

from .alike import choose_alike, flip_layers, scale_weights

if find_spec("triton"):  # Without a GPU there may be none.
    from triton.runtime.autotuner import Autotuner

    # Take the first of a kernel's configurations: by trial, instances that start beside each other
    # may each choose another one, which takes states' kernels more than a minute. At the module's
    # top, since processes that vLLM spawns import this one's main module.
    _pruned = Autotuner.prune_configs
    Autotuner.prune_configs = lambda self, given: _pruned(self, given)[:1]


class Measured(Serving):
    """The commands that `Fleet.instance` takes."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        if arguments.get("load_format") == "dummy":
            self._llm.apply_model(scale_weights)
        self._llm.apply_model(choose_alike)

    def flip_layers(self, ends: str) -> None:
        """See `alike.flip_layers`."""
        self._llm.collective_rpc(flip_layers, args=(ends,))

    def beside(
        self, others: list[list[int]], tokens: list[list[int]], extra: dict[str, Any]
    ) -> list[int]:
        """`others` decode, and once all of them do, each of `tokens` is handed in for one token,
        the next when the one before is done. Cached tokens of each.
        """
        with self._running(others):
            return [self.generate(prompt, 1, extra_args=extra)["cached"] for prompt in tokens]

    def steps(
        self,
        prompts: list[list[int]],
        waiting: list[list[int]],
        count: int,
        extra: dict[str, Any],
    ) -> list[float]:
        """Seconds of each of `count` steps in which `prompts` decode. waiting: requests whose
        prompts somebody has announced, and nobody computes. extra: of the first request."""
        announced = {"kv_transfer_params": {"vcache": {"announced": True, "wait_seconds": 120.0}}}
        with self._running(prompts, extra):
            names = [self._add(prompt, 1, extra_args=announced) for prompt in waiting]
            ends = list[float]()
            # The first ones begin to wait, too.
            while len(ends) < count + 9:
                ends += [time.perf_counter()] if self._engine.step() else []
            self._engine.abort_request(names)
        return [after - before for before, after in pairwise(ends[8:])]

    def burst(self, prompts: list[list[int]], count: int, at_once: int) -> float:
        """Ask all prompts, so many at once, for so many tokens each. Seconds."""
        started, left, running = time.perf_counter(), iter(prompts), 0
        while True:
            while running < at_once and (prompt := next(left, None)) is not None:
                self._add(prompt, count)
                running += 1
            if not running:
                return time.perf_counter() - started
            running -= sum(output.finished for output in self._engine.step())

    @contextmanager
    def _running(
        self, prompts: list[list[int]], extra: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """These requests decode, all of them, until the context ends. extra: of the first one."""
        room, begun = self._engine.vllm_config.model_config.max_model_len, set[str]()
        names = [
            self._add(prompt, room - len(prompt) - 1, extra_args=its)
            for prompt, its in zip(prompts, chain([extra], repeat(None)), strict=False)
        ]
        while len(begun) < len(names):
            begun |= {output.request_id for output in self._engine.step()}
        yield
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    main(Measured)
