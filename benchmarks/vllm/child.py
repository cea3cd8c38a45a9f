"""Inside an instance's process: the commands of `prove.instance`, and those that measure."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vcache_backend.prove.instance import Serving, main


class Measured(Serving):
    """The commands that `Fleet.instance` takes."""

    def beside(
        self, others: list[list[int]], tokens: list[list[int]], extra: dict[str, Any]
    ) -> list[int]:
        """`others` decode, and once all of them do, each of `tokens` is handed in for one token,
        the next when the one before is done. Cached tokens of each.
        """
        with self._running(others):
            return [self.generate(prompt, 1, extra=extra)["cached"] for prompt in tokens]

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
    def _running(self, prompts: list[list[int]]) -> Iterator[None]:
        """These requests decode, all of them, until the context ends."""
        room, begun = self._engine.vllm_config.model_config.max_model_len, set[str]()
        names = [self._add(prompt, room - len(prompt) - 1) for prompt in prompts]
        while len(begun) < len(names):
            begun |= {output.request_id for output in self._engine.step()}
        yield
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    main(Measured)
