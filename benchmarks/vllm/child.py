"""Inside an instance's process: one vLLM engine, and the commands that `Fleet.instance` takes for
it.

Started with the settings as JSON in its only argument.

Requests go to `LLMEngine` one step at a time, the engine core in its own process as under `vllm
serve`: the time to first token runs from before the request is handed in until `step` returns its
first token, with tokenisation left out and all else in."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from ..processes import answer_commands
from .weights import flip_kv, scale_weights

SECONDS = 120.0


class Serving:
    """The commands. Each takes and returns what JSON can say."""

    def __init__(self, arguments: dict[str, Any], dummy: bool) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._count = 0
        if dummy:
            self._llm.apply_model(scale_weights)
        gc.collect()
        gc.freeze()

    def generate(self, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
        """One request; others may run. more: see `_add`. tokens: what came out; logprobs: of each
        step, sorted pairs of token and value. ttft: seconds to the first token.
        """
        started, first = time.perf_counter(), 0.0
        name = self._add(tokens, count, **more)
        while True:
            outputs = [each for each in self._engine.step() if each.request_id == name]
            now = time.perf_counter()
            for output in outputs:
                first = first or now
                if output.finished:
                    (said,) = output.outputs
                    steps = [
                        sorted((int(token), value.logprob) for token, value in step.items())
                        for step in said.logprobs or []
                    ]
                    answer = {"tokens": list(said.token_ids), "logprobs": steps}
                    cached = output.num_cached_tokens or 0
                    return answer | {"cached": cached, "ttft": first - started}
            if now - started > SECONDS:
                self._engine.abort_request([name])
                raise TimeoutError(
                    f"no answer to a request of {len(tokens)} tokens in {SECONDS:g} s"
                )

    def beside(
        self, others: list[list[int]], tokens: list[list[int]], extra: dict[str, Any]
    ) -> list[int]:
        """`others` decode, and once all of them do, each of `tokens` is handed in for one token,
        the next when the one before is done. Cached tokens of each.
        """
        with self._running(others):
            return [self.generate(prompt, 1, extra=extra)["cached"] for prompt in tokens]

    def steps(
        self,
        prompts: list[list[int]],
        waiting: list[list[int]],
        arriving: list[list[int]],
        count: int,
        extra: dict[str, Any],
    ) -> list[float]:
        """Seconds of each of `count` steps in which `prompts` decode. waiting: requests whose
        prompts somebody has announced, and nobody computes. arriving: requests for one token that
        come meanwhile. extra: of the first request."""
        announced = {"kv_transfer_params": {"vcache": {"announced": True, "wait_seconds": SECONDS}}}
        with self._running(prompts, extra):
            names = [self._add(prompt, 1, extra=announced) for prompt in waiting]
            ends, coming, every = list[float](), iter(arriving), count // (len(arriving) + 1)
            # The first ones begin to wait, too.
            while len(ends) < count + 9:
                if len(ends) > 8 and len(ends) % every == 0 and (prompt := next(coming, None)):
                    self._add(prompt, 1)
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

    def flip(self, offset: int, mask: int, step: int = 0) -> None:
        """See `weights.flip_kv`."""
        self._llm.collective_rpc(flip_kv, args=(offset, mask, step))

    def reset(self) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    @contextmanager
    def _running(
        self, prompts: list[list[int]], extra: dict[str, Any] | None = None
    ) -> Iterator[None]:
        """These requests decode, all of them, until the context ends. extra: of the first one."""
        room, begun = self._engine.vllm_config.model_config.max_model_len, set[str]()
        given = [extra, *[None] * len(prompts)]
        names = [
            self._add(prompt, room - len(prompt) - 1, extra=its)
            for prompt, its in zip(prompts, given, strict=False)
        ]
        while len(begun) < len(names):
            begun |= {output.request_id for output in self._engine.step()}
        yield
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _add(
        self,
        tokens: list[int],
        count: int,
        logprobs: int | None = None,
        extra: dict[str, Any] | None = None,
        salt: str = "",
    ) -> str:
        """Hand a request for so many tokens in; its name. extra: its `extra_args`, see `scheduler`
        and `probe`. salt: nobody has the KV of its prompt who did not use the same.
        """
        from vllm import SamplingParams

        self._count += 1
        prompt = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        sampling = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args=extra,
        )
        self._engine.add_request(str(self._count), prompt, sampling)
        return str(self._count)


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    answer_commands(lambda: Serving(settings["arguments"], settings["dummy"]))
