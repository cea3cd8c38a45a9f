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
from typing import Any

from ..processes import answer_commands
from .weights import change_weights, flip_kv, flip_states, order_choices, scale_weights

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
        if "sparse_indexer_topk_backend" in arguments:
            self._llm.apply_model(order_choices)
        gc.collect()
        gc.freeze()

    def about(self) -> dict[str, Any]:
        """What this engine is, as far as it matters to a comparison."""
        import vllm

        config = self._engine.vllm_config
        compilation = config.compilation_config
        return {
            "vllm": vllm.__version__,
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "blocks": config.cache_config.num_gpu_blocks,
            "block_size": config.cache_config.block_size,
            "cudagraph_mode": str(getattr(compilation, "cudagraph_mode", "")),
            "model_len": config.model_config.max_model_len,
        }

    def generate(
        self,
        tokens: list[int],
        count: int,
        logprobs: int | None = None,
        extra: dict[str, Any] | None = None,
        salt: str = "",
    ) -> dict[str, Any]:
        """One request; others may run. tokens: what came out; logprobs: of each step, sorted pairs
        of token and value.

        handed, ttft: when it was handed in, and seconds to the first token. extra: the request's
        `extra_args`, see `scheduler` and `probe`. salt: nobody has the KV of its prompt who did not
        use the same."""
        name, started = self._add(tokens, count, logprobs, extra, salt)
        first = 0.0
        while True:
            outputs = [each for each in self._engine.step() if each.request_id == name]
            now = time.perf_counter()
            for output in outputs:
                first = first or now
                if output.finished:
                    return self._answer(output, started, first)
            if now - started > SECONDS:
                self._engine.abort_request([name])
                raise TimeoutError(
                    f"no answer to a request of {len(tokens)} tokens in {SECONDS:g} s"
                )

    def beside(
        self, others: list[list[int]], tokens: list[list[int]], extra: dict[str, Any]
    ) -> list[int]:
        """`others` decode, and once all of them do, each of `tokens` is handed in for one token,
        the next when the one before is done. Then the others are ended. Cached tokens of each.
        """
        room = self._engine.vllm_config.model_config.max_model_len
        names = {self._add(prompt, room - len(prompt) - 1, None, None)[0] for prompt in others}
        begun: set[str] = set()
        while begun < names:
            begun |= {output.request_id for output in self._engine.step()}
        cached = [self.generate(prompt, 1, extra=extra)["cached"] for prompt in tokens]
        self._abort(names)
        return cached

    def burst(self, prompts: list[list[int]], count: int, at_once: int) -> float:
        """Ask all prompts, so many at once, for so many tokens each. Seconds."""
        started, left, running = time.perf_counter(), iter(prompts), 0
        while True:
            while running < at_once and (prompt := next(left, None)) is not None:
                self._add(prompt, count, None, None)
                running += 1
            if not running:
                return time.perf_counter() - started
            running -= sum(output.finished for output in self._engine.step())

    def flip(self, offset: int, mask: int) -> None:
        """A byte of every block of the KV cache's first layer, exclusive or `mask`."""
        self._llm.collective_rpc(flip_kv, args=(offset, mask))

    def turn_states(self) -> int:
        """A bit of every byte of the states of a layer in vLLM's own prefix cache; a second time
        takes it back. Of so many blocks.
        """
        (blocks,) = self._llm.collective_rpc(flip_states)
        return int(blocks)

    def new_weights(self, seed: int, version: str) -> None:
        """Give the model other weights, as a trainer does between steps: nothing runs. version:
        what they are called; empty: they get no name.
        """
        self._llm.reset_prefix_cache(reset_connector=True)
        self._llm.collective_rpc(change_weights, args=(seed,))
        if version:
            self._llm.update_weight_version(version)

    def reset(self) -> bool:
        """Empty vLLM's own prefix cache."""
        return bool(self._llm.reset_prefix_cache())

    def decode(
        self,
        prompts: list[list[int]],
        count: int,
        windows: list[dict[str, Any]],
        loads: list[list[int]],
    ) -> Any:
        """Keep `prompts` decoding and look at the gaps between their tokens, window by window.

        A window: seconds, and every: how often to hand in the next of `loads`, in turn, for one
        token; 0: none. For each window the gaps between tokens of one request in seconds, all
        requests' together, and of each load its cached tokens."""
        running = {self._add(prompt, count, None, None)[0] for prompt in prompts}
        last: dict[str, float] = {}
        while len(last) < len(running):
            last |= {output.request_id: time.perf_counter() for output in self._engine.step()}
        results = [self._window(running, last, window, loads) for window in windows]
        self._abort(running)
        return results

    def _abort(self, names: set[str]) -> None:
        self._engine.abort_request(list(names))
        while self._engine.has_unfinished_requests():
            self._engine.step()

    def _window(
        self,
        running: set[str],
        last: dict[str, float],
        window: dict[str, Any],
        loads: list[list[int]],
    ) -> dict[str, Any]:
        started = time.perf_counter()
        until = started + window["seconds"]
        due = started + window["every"] if window["every"] else float("inf")
        loading = ""
        gaps: list[float] = []
        done: list[int] = []
        while (now := time.perf_counter()) < until:
            if now >= due and not loading:
                loading, _ = self._add(loads[self._count % len(loads)], 1, None, None)
                due += window["every"]
            outputs = self._engine.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id in running:
                    gaps.append(now - last[output.request_id])
                    last[output.request_id] = now
                elif output.request_id == loading:
                    done.append(output.num_cached_tokens or 0)
                    loading = ""
        return {"gaps": gaps, "loads": done}

    def _add(
        self,
        tokens: list[int],
        count: int,
        logprobs: int | None,
        extra: dict[str, Any] | None,
        salt: str = "",
    ) -> tuple[str, float]:
        from vllm import SamplingParams

        self._count += 1
        name = str(self._count)
        sampling = SamplingParams(
            temperature=0,
            max_tokens=count,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
            extra_args=extra,
        )
        started = time.perf_counter()
        self._engine.add_request(
            name, {"prompt_token_ids": tokens, **({"cache_salt": salt} if salt else {})}, sampling
        )
        return name, started

    def _answer(self, output: Any, started: float, first: float) -> dict[str, Any]:
        (said,) = output.outputs
        steps = [
            sorted((int(token), value.logprob) for token, value in step.items())
            for step in said.logprobs or []
        ]
        seconds = {"handed": started, "ttft": first - started}
        cached = output.num_cached_tokens or 0
        return {"tokens": list(said.token_ids), "logprobs": steps, "cached": cached, **seconds}


if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    answer_commands(lambda: Serving(settings["arguments"], settings["dummy"]))
