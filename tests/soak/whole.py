"""An instance of a soak that is a whole vLLM, whose answers are compared with those of a vLLM
that shares nothing.

It has a tiny model, on the CPU or on a GPU, with so few KV blocks that these are constantly used
again. Prompts are prefixes of one another and end alike, so the answers depend on the KV that was
loaded. Some copies are slow, and the process stops itself at their steps. On GPUs vLLM schedules
asynchronously."""

from __future__ import annotations

import json
import os
import random
import time
import traceback
from collections import defaultdict
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import vllm
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from benchmarks.vllm.instances import TINY, Scale
from benchmarks.vllm.settings import llm, our_connector
from vcache_backend.children import die_with_parent

from .answers import RANKED, Answer
from .forked import Forked
from .living import Living, Settings, Slowly, live_as

TAIL, ANSWER = 8, 6


class Size(NamedTuple):
    """families: how many families of prompts, each of up to `chunks` chunks. at_once: requests in
    flight. tokens: the KV cache's size.
    """

    scale: Scale
    families: int
    chunks: int
    at_once: int
    tokens: int

    def prompt(self, family: int, chunks: int) -> list[int]:
        """Families differ from their first token on, and end alike."""
        words, size = range(3, self.scale.vocabulary), self.scale.chunk
        tokens = random.Random(f"family {family}").choices(words, k=self.chunks * size)
        return tokens[: chunks * size] + random.Random("tail").choices(words, k=TAIL)


WHOLE = Size(TINY, families=12, chunks=6, at_once=3, tokens=36 * TINY.block)
"""Fewer tokens than the longest prompts need: some requests are preempted."""
UNANSWERED_SECONDS = 60.0
"""A request that has no answer after so long counts as the end of its engine."""
SLOW, SLOW_SECONDS = 0.3, 0.3
"""Share of the loads that go block by block, and the most seconds that one pauses in all."""
LONG_STEP, LONG_CYCLES = 0.3, 20_000_000
"""Share of the steps before which a GPU idles, and how long: some 10 ms. Loads that do not wait for
such a step come before its writes."""


class Whole(Living):
    """A vLLM that always has requests."""

    def __init__(self, settings: Settings, dice: random.Random) -> None:
        super().__init__(settings, dice)
        self._count = 0
        answers = Path(settings.shared, "answers.json").read_bytes()
        self._right = msgspec.json.decode(answers, type=dict[str, Answer])
        self._loaded: dict[str, int] = defaultdict(int)
        self.engine = make(settings.shared, _transfer(settings)).llm_engine
        asynchronous = self.engine.vllm_config.scheduler_config.async_scheduling
        # vLLM never schedules so on CPUs.
        assert asynchronous or current_platform.is_cpu()
        self.asked: dict[str, tuple[int, int]] = {}
        self._asked_at: dict[str, float] = {}
        connector: Any = import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()
        shares = connector._worker.in_place is not None
        assert shares or settings.config.pool.segment_bytes, "this vLLM shares nothing in place"
        self.watch(connector._worker)

    def round(self) -> None:
        """Run one step of the engine, with as many requests as it takes. Ends the process if vLLM
        fails.
        """
        while len(self.asked) < WHOLE.at_once:
            self._count += 1
            asked = self.asked[str(self._count)] = self.ask()
            self._asked_at[str(self._count)] = time.monotonic()
            self.engine.add_request(
                str(self._count), {"prompt_token_ids": WHOLE.prompt(*asked)}, _sampling()
            )
        if not current_platform.is_cpu() and self.dice.random() < LONG_STEP:
            torch.cuda._sleep(LONG_CYCLES)  # type: ignore[no-untyped-call]
        try:
            outputs = self.engine.step()
            oldest = min(self._asked_at.values())
            if time.monotonic() > oldest + UNANSWERED_SECONDS:
                raise TimeoutError(f"a request has no answer: {self._asked_at}")
        except Exception:  # noqa: BLE001 - it answers nothing any more
            traceback.print_exc()
            os._exit(1)
        for output in outputs:
            if output.finished:
                del self._asked_at[output.request_id]
                self.answered(output, *self.asked.pop(output.request_id))

    def ask(self) -> tuple[int, int]:
        """The family and the chunks of the next prompt."""
        families = WHOLE.families
        family = min(self.dice.randrange(families), self.dice.randrange(families))
        return family, self.dice.randint(1, WHOLE.chunks)

    def stops_behind(self, owner: Any, name: str, step: str) -> None:
        """Have the process stop itself now and then after this method of `owner` has returned."""
        method = getattr(owner, name)

        def called(*args: Any, **more: Any) -> Any:
            result = method(*args, **more)
            self.step(step)
            return result

        setattr(owner, name, called)

    def answered(self, output: Any, family: int, chunks: int) -> None:
        """A request for that prompt has ended."""
        answer, right = Answer.of(output), self._right[f"{family} {chunks}"]
        outcomes, loaded = self.told.outcomes, self._loaded.pop(output.request_id, 0)
        outcomes.answers += 1
        outcomes.loads += bool(loaded)
        if answer.differs(right):
            what = (
                f"request {output.request_id}: prompt {family}, {chunks} chunks, {answer.cached} "
                f"tokens cached, {loaded} of them loaded for it: {answer}, where vLLM alone "
                f"says {right}"
            )
            self.loaded_wrong(what)

    def watch(self, worker: Any) -> None:
        """See each load, and slow some down. worker: our connector's half in the worker."""
        session, count = worker._worker.session, worker.loads._count
        scheduler = self.engine.engine_core.engine_core.scheduler
        session.copier = Slowly(session.copier, self, SLOW, SLOW_SECONDS)

        def counted(spec: Any, loading: Any, ended: int) -> None:
            count(spec, loading, ended)
            if loading is None:
                return
            # vLLM appends a suffix to the request's name.
            name, outcomes = loading.spec.request_id, self.told.outcomes
            self._loaded[name.rpartition("-")[0] or name] += loading.stats.tokens.total()
            outcomes.causes[loading.cause] += 1
            outcomes.reuse_hits += loading.cause == "changed"

        worker.loads._count = counted
        self.stops_behind(scheduler.connector, "get_num_new_matched_tokens", "looked up")
        self.stops_behind(scheduler.kv_cache_manager.block_pool, "get_new_blocks", "handed out")
        self.stops_behind(worker, "begin", "step begun")
        self.stops_behind(worker, "store", "step launched")


def make(folder: str, transfer: dict[str, Any] | None) -> Any:
    """A vLLM of the model in the folder. transfer: `kv_transfer_config`."""
    own = {
        "kv_cache_memory_bytes": WHOLE.tokens * WHOLE.scale.token_bytes,
        "max_model_len": (WHOLE.chunks + 1) * WHOLE.scale.chunk,
        "max_num_batched_tokens": 256,
        "async_scheduling": True,
        "disable_log_stats": True,
        "kv_transfer_config": transfer,
    }
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        # vLLM would inspect the model in a new process, which has to import vLLM first.
        registry._run_in_subprocess = lambda look: look()
        # With our connector, the connector does this.
        torch.cpu._init_amx()
    else:
        # Engines start often, so nothing is compiled.
        own["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    scale = msgspec.structs.replace(WHOLE.scale, cpu=on_cpu)
    return vllm.LLM(**llm(scale, Path(folder, "model"), WHOLE.at_once) | own)


def _sampling() -> Any:
    return vllm.SamplingParams(
        temperature=0, ignore_eos=True, detokenize=False, max_tokens=ANSWER, logprobs=RANKED
    )


def _transfer(settings: Settings) -> dict[str, Any]:
    client = {
        f"client.{name}": json.dumps(value)
        for name, value in msgspec.to_builtins(settings.config.client).items()
    }
    client["connector.share"] = "pool" if settings.config.pool.segment_bytes else "in_place"
    # Two lend, so that the pool holds fewer chunks than are asked for.
    lends = settings.config.pool.segment_bytes or 0 if settings.number < 2 else 0
    return our_connector(settings.config.server.path, lends, WHOLE.scale.chunk, client)


def answer_all(folder: str, pipe: Connection) -> None:
    """The main function of the reference's process: vLLM alone answers each prompt, one at a time,
    into the folder's `answers.json`.
    """
    die_with_parent()
    TINY.write_model(Path(folder, "model"))
    llm, found = make(folder, None), {}
    for family in range(WHOLE.families):
        for chunks in range(1, WHOLE.chunks + 1):
            llm.reset_prefix_cache()
            (output,) = llm.generate(
                [{"prompt_token_ids": WHOLE.prompt(family, chunks)}], [_sampling()], use_tqdm=False
            )
            found[f"{family} {chunks}"] = Answer.of(output)
    Path(folder, "answers.json").write_bytes(msgspec.json.encode(found))
    pipe.send(len(found))


def prepare(folder: Path) -> None:
    """The model and its answers."""
    made = Forked(answer_all, str(folder), folder / "alone.log")
    try:
        made.pipe.recv()
    finally:
        made.kill()


def live(settings: Settings, pipe: Connection) -> None:
    """The main function of an instance's process, on one of the GPUs in turn."""
    if not current_platform.is_cpu():
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[settings.number % len(gpus)]
    live_as(Whole, settings, pipe)


if current_platform.is_cpu() and hasattr(current_platform, "register_triton_kernel_overrides"):
    # Replace Triton's kernels once, in the process that imports this and forks the others: it looks
    # at every name of every module.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
