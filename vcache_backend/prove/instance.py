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
from collections.abc import Mapping
from typing import Any

from vcache_backend.children import answer_commands, die_with_parent, until
from vcache_backend.proofs import Combination

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
BOTH = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


def arguments(model: str, nbytes: int, longest: int, cpu: bool, **more: Any) -> dict[str, Any]:
    """Of vLLM's `LLM`. nbytes: of the KV cache. longest: tokens of a request. more: others."""
    given = {"model": model, "max_model_len": longest, "kv_cache_memory_bytes": nbytes}
    given |= {"enable_prefix_caching": True, "skip_tokenizer_init": True, **more}
    # vLLM takes the KV cache it is given; of this it only wants to see so much of the GPU free.
    return given if cpu else given | {"gpu_memory_utilization": 0.15}


def transfer(sections: Mapping[str, Any]) -> dict[str, Any]:
    """`kv_transfer_config` of our connector. sections: vcache's configuration."""
    module = "vcache_backend.integration.vllm_connector"
    given = {"kv_connector": "VCacheConnector", "kv_connector_module_path": module}
    return {**given, "kv_connector_extra_config": sections, **BOTH}


class Serving:
    """The commands. Each takes and returns what JSON can say, and whoever asks has a deadline."""

    def __init__(self, **arguments: Any) -> None:
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._count = 0
        gc.collect()
        gc.freeze()

    def facts(self, share: str) -> tuple[Combination, int, int]:
        """What a proof would be about, the size of the vocabulary, and tokens of a block."""
        config = self._engine.vllm_config
        words, block = config.model_config.get_vocab_size(), config.cache_config.block_size
        return Combination.here(share), words, block

    def generate(self, tokens: list[int], count: int, **more: Any) -> dict[str, Any]:
        """One request; others may run. more: see `_add`. tokens: what came out; logprobs: of each
        step, sorted pairs of token and value. ttft: seconds to the first token.
        """
        started, ttft, output = time.perf_counter(), 0.0, None
        name = self._add(tokens, count, **more)
        while output is None or not output.finished:
            output = next((each for each in self._engine.step() if each.request_id == name), None)
            ttft = ttft or (time.perf_counter() - started if output is not None else 0.0)
        (said,) = output.outputs
        steps = [
            sorted((int(token), value.logprob) for token, value in step.items())
            for step in said.logprobs or []
        ]
        answer = {"tokens": list(said.token_ids), "logprobs": steps}
        return answer | {"cached": output.num_cached_tokens or 0, "ttft": ttft}

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
                self._engine.abort_request([names.pop()])
                happened["aborts"] += 1
            if choice.random() < 0.01:
                what = {"reset_running_requests": True, "reset_connector": choice.random() < 0.3}
                try:
                    self._llm.reset_prefix_cache(**what)
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

    def flip(self, **where: int) -> None:
        """See `flip_kv`."""
        self._llm.collective_rpc(flip_kv, kwargs=where)

    def told(self) -> bool:
        """Wait until others can find what the steps so far have computed."""
        return all(self._llm.collective_rpc(flush_kv, args=(120.0,)))

    def reset(self) -> bool:
        """Empty vLLM's own prefix cache. False if blocks are in use. Another connector may hold
        those of a finished request for some steps."""
        inside = hasattr(self._engine.engine_core, "engine_core")

        def empty() -> bool:
            if inside:
                self._engine.step()  # otherwise the engine's process steps by itself
            return bool(self._llm.reset_prefix_cache())

        return until(empty, 10.0)

    def _add(self, tokens: list[int], count: int, salt: str = "", **more: Any) -> str:
        """Hand a request for so many tokens in; its name. salt: nobody has the KV of its prompt who
        did not use the same. more: of vLLM's `SamplingParams`; `extra_args`: see `OWN`."""
        from vllm import SamplingParams

        self._count += 1
        prompt = {"prompt_token_ids": tokens} | ({"cache_salt": salt} if salt else {})
        greedy = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        sampling = SamplingParams(max_tokens=count, **greedy, **more)
        self._engine.add_request(str(self._count), prompt, sampling)
        return str(self._count)


def main(kind: type[Serving] = Serving) -> None:
    """The life of an instance's process, whose commands are those of `kind`."""
    # Processes of vLLM that this one forks end with it.
    os.register_at_fork(after_in_child=die_with_parent)
    answer_commands(lambda: kind(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
