"""The inside of an instance: vLLM in a process that `vllm_cases.Instance` forks from one that has
imported this file.

`Serving` has the commands. Methods of ours can be stopped, or made to fail, at an exact place of
their code, `module:Class.method,…`. What happens there is real: a test holds the process at the
place and meanwhile kills the server or takes chunks away."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import pickle
import resource
import sys
import tempfile
import time
from contextlib import suppress
from math import inf
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
import vllm._custom_ops
import vllm.entrypoints.llm
import vllm.logger
import vllm.lora.resolver
import vllm.model_executor.layers.quantization.online.base
import vllm.model_executor.models.llama
import vllm.renderers.hf
import vllm.v1.attention.backends.cpu_attn
import vllm.v1.core.sched.scheduler
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker
from soak.answers import RANKED
from torch._dynamo.trace_rules import get_torch_obj_rule_map
from vllm.config import KVEventsConfig
from vllm.config.logging import LoggingConfig
from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.lora.request import LoRARequest
from vllm.model_executor import layers
from vllm.model_executor.models import registry
from vllm.platforms import current_platform
from vllm_cases import BLOCK, FOREVER, TOKEN_BYTES, Answer, Prompt

from benchmarks.vllm.settings import BOTH
from vcache_backend.prove.model import flush_kv

registry._run_in_subprocess = lambda look: look()
"""What it finds out about a model it would find out in a process that has to import vLLM first, for
ten seconds.
"""
if current_platform.register_triton_kernel_overrides is not None:
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
"""Stand-ins for Triton's kernels are put in once, not by each instance. It looks at every name of
every module, and fails at numba's.
"""
_context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: _context("fork" if method == "spawn" else method)
"""On a CPU vLLM has its engines and workers import everything once more."""
SpinCondition.__init__.__defaults__ = (0.01,)
"""Seconds for which a process that reads others' messages asks for the next one again and again. It
is a whole one, on a core that the others need.
"""
_rotate = vllm._custom_ops.rotary_embedding


def _rotate_flat(positions: Any, query: Any, key: Any, *more: Any, **named: Any) -> None:
    """Of queries by head, which LFM 2 has, the kernel for CPUs (vLLM 0.32) takes tokens for
    batches: it rotates other numbers, and others yet if a prompt's steps are cut otherwise."""
    if positions.dim() == 1 and query.dim() == 3:
        query, key = (one.view(len(one), -1) for one in (query, key))
    _rotate(positions, query, key, *more, **named)


vllm._custom_ops.rotary_embedding = _rotate_flat
for later in (
    "lmcache.integration.vllm.vllm_v1_adapter",
    "numpy.ma",
    "vcache_backend.integration.plugin",
    "vcache_backend.integration.vllm.scheduler",
    "vcache_backend.integration.vllm.worker.worker",
    "vcache_backend.integration.vllm_connector",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.triton_utils.dispatcher",
    "vllm.v1.pool.flash_maxsim",
):
    with suppress(ImportError):
        importlib.import_module(later)
vllm.logger.configure_logging(LoggingConfig())
"""Once: for each of hundreds of loggers it visits all of them."""
get_torch_obj_rule_map()
"""A table of thousands of names that each engine's first request would make."""
PATIENCE_SECONDS = 60.0
POISON = 0x40
"""Twice it is 3.0 in bfloat16: a number that tells, and whose weight of zero is zero."""
HELD_SECONDS = 100.0
"""How long an instance stays at a place for a test that never lets it go."""


class Serving:
    """The commands of an instance."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vcache_backend.integration.vllm import lookups, promises, requests

        # Tests count questions, and a slow machine must not ask again what it has asked.
        lookups.PROMISED_SECONDS = requests.FRESH_SECONDS = PATIENCE_SECONDS
        lookups.LATE_SECONDS = PATIENCE_SECONDS
        # Nobody measures how fast a machine is that others use: `paced` says it.
        promises.LEAST_MEASURED = FOREVER
        self.paced(PATIENCE_SECONDS)
        transfer = {"kv_connector": "LMCacheConnectorV1", **BOTH}
        settings = {"skip_tokenizer_init": True, "dtype": "bfloat16", "enforce_eager": True}
        settings |= {"block_size": BLOCK, "kv_cache_memory_bytes": 4096 * TOKEN_BYTES}
        settings |= {"max_model_len": 1024, "max_num_seqs": 4, "disable_log_stats": False}
        settings |= {"kv_transfer_config": transfer} | arguments
        if settings["kv_transfer_config"] is None:
            # With a connector, it does this.
            torch.cpu._init_amx()
        if "kv_events_config" in settings:
            told = settings["kv_events_config"]
            settings["kv_events_config"] = KVEventsConfig(enable_kv_cache_events=True, **told)
        if "otlp_traces_endpoint" in settings:
            self._trace()
        if nbytes := settings.pop("file_bytes", 0):
            resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
        if settings.pop("refits", False):
            # On CPUs vLLM packs weights into other memory, and then none can take their places.
            layers.utils.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(
                layer, "cpu_linear", torch.nn.functional.linear
            )
        self.llm = vllm.LLM(**settings)
        if "otlp_traces_endpoint" in settings:
            self.llm.llm_engine.output_processor.tracing_enabled = False
        self.touch_nothing()

    def _trace(self) -> None:
        """As if there were an exporter, without which vLLM does not begin, and makes no spans of
        its own; ours go to `spans`.
        """
        import vllm.config.observability
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

        def line(one: Any) -> str:
            return json.dumps([one.name, one.start_time, one.end_time, dict(one.attributes)]) + "\n"

        # Also of the processes that are forked from this one.
        provider, self._spans = TracerProvider(), tempfile.TemporaryFile("a+")  # noqa: SIM115 - till the process ends
        exporter = ConsoleSpanExporter(out=self._spans, formatter=line)
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        vllm.config.observability.is_otel_available = lambda: True
        vllm.v1.engine.llm_engine.init_tracer = lambda *_: None

    def spans(self) -> list[list[Any]]:
        """Those of ours that have ended, by when they did: name, start, end and attributes."""
        ended = map(json.loads, os.pread(self._spans.fileno(), 1 << 20, 0).splitlines())
        return [one for one in ended if one[0].startswith("vcache.")]

    def touch_nothing(self) -> None:
        """Nothing is meddled with."""
        self._undo: list[tuple[type, str, Any]] = []
        self._calls: dict[str, int] = {}
        self._slow: list[Slow] = []

    def run(self, prompts: list[Prompt], together: bool) -> list[Answer]:
        answers = []
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            makers = self._prompt, self._sampling
            given = [[make(request) for request in batch] for make in makers]
            adapters = [self._lora(request) for request in batch]
            outputs = self.llm.generate(*given, lora_request=adapters, use_tqdm=False)
            answers += [Answer.of(output) for output in outputs]
        return answers

    def forget(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def reset(self) -> bool:
        """Empty vLLM's own prefix cache and what the connector has."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def pause(self) -> None:
        """As a trainer has it done before it sends new weights."""
        core = self.llm.llm_engine.engine_core.engine_core
        core.pause_scheduler()
        core.resume_scheduler()

    def run_and_reset(self, prompt: Prompt) -> bool:
        """Both at once: what the request stores is still on its way to the pool."""
        self.run([prompt], together=False)
        return self.reset()

    def poison(self) -> None:
        """Every block but that of nobody holds threes."""
        for page in _pages():
            page[1:] = POISON

    def written(self, everywhere: bool = False) -> int:
        """How many blocks were written since they were poisoned, in some layer or everywhere."""
        written = [(page[1:] != POISON).any(dim=1) for page in _pages()]
        return int((sum(written) >= (len(written) if everywhere else 1)).sum())

    def told(self) -> bool:
        """Wait until what the steps so far have promised, written, stored or saved is known to the
        server."""
        return self.promised() and flush_kv(None, PATIENCE_SECONDS)

    def ranks_told(self) -> bool:
        """The same of what ranks in processes of their own have written and stored."""
        return all(self.llm.collective_rpc(flush_kv, args=(PATIENCE_SECONDS,)))

    def promised(self) -> bool:
        """Wait until the server has heard of what the scheduler has promised, if that is in this
        process: a promise that comes late is believed, though what was kept of it is gone."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        connector = getattr(core and core.scheduler, "connector", None)
        ours = next(iter(getattr(connector, "_connectors", [connector])))
        half = getattr(ours, "_half", None)
        outbox = half and half.context.outbox
        return outbox is None or bool(outbox.flush(PATIENCE_SECONDS))

    def scheduler(self, name: str) -> bool:
        """What vLLM's scheduler has decided by its configuration."""
        return bool(getattr(self.llm.llm_engine.engine_core.engine_core.scheduler, name))

    def add(self, name: str, request: Prompt) -> None:
        """Give the engine a request, and return."""
        given = self._prompt(request), self._sampling(request)
        self.llm.llm_engine.add_request(name, *given, lora_request=self._lora(request))

    def step(self, count: int) -> dict[str, Answer]:
        """So many steps of the engine; the requests that finished."""
        done: dict[str, Answer] = {}
        for _ in range(count):
            ended = [output for output in self.llm.llm_engine.step() if output.finished]
            done |= {output.request_id: Answer.of(output) for output in ended}
        return done

    def finish(self, names: list[str]) -> dict[str, Answer]:
        """Step until these have finished; all that did."""
        done: dict[str, Answer] = {}
        while not done.keys() >= set(names):
            done |= self.step(1)
        return done

    def turn(self, request: Prompt) -> list[int]:
        """The answer to one more turn of a session, whose prompt comes piece by piece."""
        engine = self.llm.llm_engine
        given = "session", self._prompt(request), self._sampling(request)
        more = {"supported_tasks": engine.get_supported_tasks(), "resumable": True}
        made = engine.input_processor.process_inputs(*given, **more)
        made.external_req_id = made.request_id
        engine.engine_core.add_request(made)
        said: list[int] = []
        while len(said) < request.max_tokens:
            for output in engine.engine_core.get_output().outputs:
                said += output.new_token_ids
        return said

    def hang_up(self) -> None:
        """End the session."""
        self.llm.llm_engine.engine_core.abort_requests(["session"])

    def adapt(self, request: Prompt, inplace: bool) -> bool:
        """Have the workers read the request's adapter now, in place of one of its number."""
        adapter = self._lora(request)
        adapter.load_inplace = inplace
        return bool(self.llm.llm_engine.add_lora(adapter))

    def abort(self, name: str) -> None:
        self.llm.llm_engine.abort_request([name])

    def counter(self, name: str, labels: dict[str, str]) -> int:
        """A counter of vLLM's metrics; KeyError if it has none of this name."""
        named = [metric for metric in self.llm.get_metrics() if metric.name == name]
        found = [int(metric.value) for metric in named if labels.items() <= metric.labels.items()]
        if not found:
            raise KeyError(name)
        return sum(found)

    def paced(self, chunk_seconds: float) -> None:
        """How long a chunk takes elsewhere, for waits for what others compute."""
        from vcache_backend.integration.vllm import waits

        waits.UNKNOWN_CHUNK_SECONDS = waits.LONGEST_CHUNK_SECONDS = chunk_seconds
        waits.STATE_SECONDS = 2.0

    def saves_late(self) -> None:
        """Of what runs nothing is saved, however slow this machine is."""
        from vcache_backend.integration.vllm import victims

        victims.PUBLISHED_SECONDS = inf

    def patience(self, seconds: float, step: float = 0.0) -> None:
        """How long a request waits for another connector's look-up, and how long a step does."""
        from vcache_backend.integration.vllm import longest_hit

        longest_hit.PATIENCE_SECONDS, longest_hit.LOOKUP_SECONDS = seconds, step

    def report_within(self, seconds: float) -> None:
        """How long what is under way may take, once a connector beside others is out of use."""
        from vcache_backend.integration.vllm import multi

        multi.TRANSFER_SECONDS = seconds

    def preempts(self) -> dict[str, str]:
        """As a trainer does, who keeps what runs: each request's status, before and after."""
        core = self.llm.llm_engine.engine_core.engine_core
        before = {id(one): one.status.name for one in core.scheduler.requests.values()}
        core.reset_prefix_cache(reset_running_requests=True)
        return {before[id(one)]: one.status.name for one in core.scheduler.requests.values()}

    def finds_lmcache(self, seconds: float) -> list[bool]:
        """Whether LMCache's server answers the scheduler's half of its connector, and the worker's,
        beside ours within so many seconds; they go by it from now on."""
        found = []
        for adapter in self._lmcache():
            adapter._ensure_heartbeat_started()
            beats = getattr(adapter, "_heartbeats", None) or {"": adapter._heartbeat}
            for beat in beats.values():
                beat._interval, kept = seconds, beat._interval
                beat._execute()
                beat._interval = kept
            found.append(adapter.is_healthy)
        return found

    def lmcache_waits(self) -> bool:
        """Whether a load of LMCache's, beside ours, would wait for the steps under way on a GPU."""
        return bool(get_kv_transfer_group()._others[0]._transfers._beside.waits())

    def hush_lmcache(self, hushed: bool) -> None:
        """Its worker beside ours reports nothing; and all of it later."""
        _, adapter = self._lmcache()
        if hushed:
            self._reports, adapter.get_finished = adapter.get_finished, lambda _: (None, None)
        else:
            adapter.get_finished = self._reports

    def hurry_lmcache(self, seconds: float) -> None:
        """Its connector beside ours waits no longer for an answer of its server."""
        for adapter in self._lmcache():
            adapter._mq_timeout = seconds

    def _lmcache(self) -> list[Any]:
        core = self.llm.llm_engine.engine_core.engine_core
        halves = core.scheduler.connector, get_kv_transfer_group()
        names = "scheduler_adapter", "worker_adapter"
        return [
            getattr(half._connectors[1], name) for half, name in zip(halves, names, strict=True)
        ]

    # ---- places

    def meddle(self, place: str, action: str, value: Any, times: int) -> None:
        """See `vllm_cases.meddled`; `stop` waits before the first line of the method, until there
        is a file beside `value`.
        """
        self._calls[place], before = 0, len(self._undo)
        module, _, path = place.partition(":")
        class_, _, names = path.partition(".")
        owner = getattr(importlib.import_module(module), class_)
        for name in owner.__dict__.keys() & set(names.split(",")):
            self._replace(owner, name, place, action, value, times)
        assert len(self._undo) > before, f"there is no {place}"

    def _replace(
        self, owner: type, name: str, place: str, action: str, value: Any, times: int
    ) -> None:
        original = owner.__dict__[name]

        def method(*args: Any, **kwargs: Any) -> Any:
            if any(getattr(one, "to_origin", False) for one in args):
                return original(*args, **kwargs)  # a store, which copies by the same call
            # The client's thread, too, makes calls, which hold no request up.
            self._calls[place] += action != "count here" or current_thread() is main_thread()
            if self._calls[place] > times or action.startswith("count"):
                return original(*args, **kwargs)
            if action == "raise":
                raise RuntimeError(f"raised in {name} on purpose")
            if action == "stop":
                _stop(value, args[1:])
            answer = original(*args, **kwargs)
            if action == "slow":
                answer = Slow(answer, value)
                self._slow.append(answer)
            return answer

        self._undo.append((owner, name, original))
        setattr(owner, name, method)

    def calls(self) -> dict[str, int]:
        """How often each place was called since it was meddled with."""
        return dict(self._calls)

    def leave_alone(self) -> dict[str, int]:
        """Put everything back, and what is slow is over; the calls."""
        while self._slow:
            self._slow.pop().until = 0.0
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
        calls, self._calls = self._calls, {}
        return calls

    def meddle_at(self, rank: int, place: str, action: str, times: int) -> None:
        """`meddle` in the process of one tensor parallel rank; all others count."""
        self.llm.collective_rpc(_meddle, args=(rank, place, action, times))

    def leave_ranks_alone(self) -> list[int]:
        """Put everything back in the ranks' processes; how often each came by."""
        return [sum(calls.values()) for calls in self.llm.collective_rpc(_leave_alone)]

    # ---- requests

    def _prompt(self, request: Prompt) -> Any:
        salt = {"cache_salt": request.salt} if request.salt is not None else {}
        return {"prompt_token_ids": request.tokens} | salt

    def _sampling(self, request: Prompt) -> Any:
        given: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        given |= {"max_tokens": request.max_tokens, "logprobs": RANKED}
        given |= {"skip_reading_prefix_cache": request.fresh or None}
        given |= {"allowed_token_ids": list(range(3, 3 + request.among)) or None}
        if request.rate:
            given["prompt_logprobs"] = 0
        if request.params is not None:
            given["extra_args"] = {"kv_transfer_params": request.params}
        return vllm.SamplingParams(**given)

    def _lora(self, request: Prompt) -> Any:
        if request.lora is None:
            return None
        number = request.lora_id or 1 + sum(request.lora.encode())
        return LoRARequest(Path(request.lora).name, number, request.lora)


def _meddle(worker: Any, rank: int, place: str, action: str, times: int) -> None:
    worker.meddling = meddling = Serving.__new__(Serving)
    meddling.touch_nothing()
    meddling.meddle(place, action if worker.rank == rank else "count", None, times)


def _leave_alone(worker: Any) -> dict[str, int]:
    return worker.meddling.leave_alone()


def serve(arguments: list[str]) -> None:
    """`vllm serve` with these arguments; does not return."""
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.argv = ["vllm", *arguments]
    main()


class Slow:
    """A completion that says later than it could that it is over."""

    def __init__(self, copy: Any, seconds: float) -> None:
        self._copy, self.until = copy, time.monotonic() + seconds
        self.seconds: float | None = seconds

    def done(self) -> bool:
        return time.monotonic() >= self.until and bool(self._copy.done())

    def wait(self, timeout_s: float) -> bool:
        time.sleep(min(timeout_s, max(self.until - time.monotonic(), 0.0)))
        return self.done()


def _worker() -> Any:
    """The connector's half in vLLM's worker."""
    group = get_kv_transfer_group()
    return next(iter(getattr(group, "_connectors", [group])))._worker


def _pages() -> list[Any]:
    kv = _worker()._worker.kv
    return [page for kind in kv.kinds for page in kind.pages]


def _stop(file: Path, arguments: tuple[Any, ...]) -> None:
    whole = file.with_suffix(".writing")
    plain = [value if isinstance(value, list | int) else repr(value) for value in arguments]
    whole.write_bytes(pickle.dumps(plain))
    whole.rename(file)
    deadline = time.monotonic() + HELD_SECONDS
    while not file.with_suffix(".go").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
