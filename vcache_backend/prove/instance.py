"""Inside an instance's process: one vLLM engine, and commands for it. For `vcache prove` and the
benchmarks.

Started with the arguments of vLLM's `LLM` as JSON in its only argument. Requests go to `LLMEngine`
one step at a time: the time to first token runs from before the request is handed in until `step`
returns its first token, with tokenisation left out and all else in."""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from collections import Counter
from typing import Any

from vcache_backend.children import answer_commands, die_with_parent

from .model import flip_kv, flush_kv

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    # As vLLM sets it for workers in processes of their own; with many threads small host tensors
    # take milliseconds at times.
    "OMP_NUM_THREADS": "1",
    # Kernels chosen by rule, not by trial.
    "TORCHINDUCTOR_DETERMINISTIC": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    # For `flip`.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENVIRONMENT = {
    "TORCH_COMPILE_DISABLE": "1",
    # By itself vLLM binds every instance to the same core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Of processes with vLLM."""


class Serving:
    """The commands. Each takes and returns what JSON can say, and whoever asks has a deadline."""

    def __init__(self, **arguments: Any) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._count = 0
        gc.collect()
        gc.freeze()

    def facts(self) -> dict[str, Any]:
        """The versions, the device's name, and the sizes of the KV cache."""
        import torch
        import vllm
        from vllm.platforms import current_platform

        config = self._engine.vllm_config
        return {
            "vllm": vllm.__version__,
            "torch": str(torch.__version__),
            "device": current_platform.get_device_name(),
            "vocabulary": config.model_config.get_vocab_size(),
            "block": config.cache_config.block_size,
            "blocks": config.cache_config.num_gpu_blocks,
        }

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

    def churn(self, prompts: list[list[int]], count: int, seconds: float, seed: int) -> Any:
        """Run random ones of `prompts` for so many seconds, eight at a time, for `count` tokens
        each. Some are aborted. Resets take the blocks of running requests; some also reset the
        namespace. How often each happened."""
        choice, happened, names = random.Random(seed), Counter[str](), set[str]()
        before, end = self._preemptions(), time.monotonic() + seconds
        while names or time.monotonic() < end:
            if len(names) < 8 and time.monotonic() < end:
                names.add(self._add(choice.choice(prompts), choice.randint(1, count)))
                happened["requests"] += 1
            if choice.random() < 0.02 and names:
                name = choice.choice(sorted(names))
                self._engine.abort_request([name])
                names.discard(name)
                happened["aborts"] += 1
            if choice.random() < 0.01:
                clear = choice.random() < 0.3
                try:
                    self._llm.reset_prefix_cache(reset_running_requests=True, reset_connector=clear)
                    happened["resets"] += 1
                except Exception as error:  # of whatever type: it comes from another process
                    if "waiting for remote KV transfer" not in str(error):
                        raise
            names -= {each.request_id for each in self._engine.step() if each.finished}
        happened["preemptions"] = self._preemptions() - before
        return happened

    def _preemptions(self) -> int:
        found = [one for one in self._llm.get_metrics() if one.name == "vllm:num_preemptions"]
        return int(sum(one.value for one in found))

    def flip(self, offset: int, mask: int, step: int = 0) -> None:
        """See `flip_kv`."""
        self._llm.collective_rpc(flip_kv, args=(offset, mask, step))

    def told(self) -> bool:
        """Wait until others can find what the steps so far have computed."""
        return all(self._llm.collective_rpc(flush_kv, args=(120.0,)))

    def reset(self) -> bool:
        """Empty vLLM's own prefix cache. False if blocks are in use. Another connector may hold
        those of a finished request for some steps."""
        engine = self._llm.llm_engine
        for _ in range(50):
            if self._llm.reset_prefix_cache():
                return True
            if hasattr(engine.engine_core, "engine_core"):
                engine.step()  # otherwise the engine's process steps by itself
            time.sleep(0.01)
        return False

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


def main(kind: type[Serving] = Serving) -> None:
    """The life of an instance's process, whose commands are those of `kind`."""
    # Processes of vLLM that this one forks end with it.
    os.register_at_fork(after_in_child=die_with_parent)
    answer_commands(lambda: kind(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
