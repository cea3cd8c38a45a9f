"""Two vLLM instances on two GPUs, one of which computes a prompt and the other reads its KV over NVLink: one command shows it.

    python examples/two_vllm_instances.py [--model NAME] [--lengths 1024,4096,16384] [--json]
    python examples/two_vllm_instances.py --cpu          # the same on a machine without a GPU: a tiny model, the pool in host memory

Starts a metadata server and the instances, with the settings of configs/lmcache-vcache.yaml. Each prompt goes to A, which computes
it; to A again, which has it in vLLM's own prefix cache; and to B, which has only the pool. Then `vcache status`. Without --model the
weights are generated, in the shape of Llama-3.1-8B; nothing is downloaded. Exit code 0 if every answer of B came from the pool and
had the same tokens as A's from its own cache. Whatever was started is ended with this program.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from rich.console import Console
from rich.table import Table

from vcache_backend.config import ByteSize, ClientConfig
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.status import summary

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # `benchmarks` lies in the checkout and is not installed
from benchmarks.vllm.scale import FULL, TINY, Scale
from benchmarks.vllm.weights import scale_weights, write_model

NEW_TOKENS = 16
TAIL = 8
"""Tokens after the last whole chunk: fewer than a block, so that a hit of whole blocks and one of whole chunks end at the same token,
the same tokens are computed in the same shape, and answers can be compared bit for bit."""
ANSWER_SECONDS = 120.0
STORE_SECONDS = 10.0
say = Console(stderr=True, highlight=False, soft_wrap=True)


class Failed(Exception):
    """Something that was started did not do what it should. The message says where to look."""


class Shape(NamedTuple):
    """Where it runs. lengths: of the prompts, before they are rounded down to chunks. generated: the model made where none is named.
    vllm: arguments of `LLM`."""

    chunk: int
    lengths: tuple[int, ...]
    pool: str
    generated: Scale
    vllm: dict[str, Any]
    environment: dict[str, str]


GPU = Shape(
    chunk=256,
    lengths=(1024, 4096, 16384),
    pool="4 GiB",
    generated=FULL,
    vllm={"gpu_memory_utilization": 0.75, "max_num_seqs": 8},
    environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
)
CPU = Shape(
    chunk=64,
    lengths=(128, 512, 960),
    pool="32 MiB",
    generated=TINY,
    vllm={"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 4},
    environment={
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    },
)
ALWAYS = {"PYTHONHASHSEED": "0", "LMCACHE_TRACK_USAGE": "false", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}
FOR_DUMMIES = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "HF_HUB_OFFLINE": "1"}
"""With generated weights: the first lets `apply_model` take a function."""
TRANSFER = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}


# ---- what runs in an instance's process


def instance(settings: dict[str, Any]) -> None:
    """Become an instance: an engine, then one JSON line of answer for each JSON line of prompt."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints belongs into the log
    from vllm import LLM

    llm = LLM(**settings["vllm"], kv_transfer_config=TRANSFER)
    if settings["scale"]:
        llm.apply_model(scale_weights)
    answers.write(json.dumps({"vocabulary": llm.llm_engine.vllm_config.model_config.get_vocab_size()}) + "\n")
    for number, line in enumerate(sys.stdin):
        answers.write(json.dumps(generate(llm.llm_engine, str(number), json.loads(line))) + "\n")
    os._exit(0)  # LMCache's threads would keep the process


def generate(engine: Any, name: str, tokens: list[int]) -> dict[str, Any]:
    """One request, alone: its greedy tokens, how many prompt tokens were cached, and seconds to the first token."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    started, first = time.perf_counter(), 0.0
    engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
    while True:
        for output in engine.step():
            first = first or time.perf_counter() - started
            if output.finished:
                return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens or 0, "seconds": first}


# ---- processes


def die_with_parent() -> None:
    """Also if this program is killed: PR_SET_PDEATHSIG, SIGKILL."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


class Process:
    """A child in a process group of its own. `answer` reads what it says line by line; the rest is in its log."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.name, self.log, self.started = name, log, time.monotonic()
        self._buffer = b""
        # Settings of whoever runs this are not for the children: they have theirs.
        inherited = {key: value for key, value in os.environ.items() if key not in ("VCACHE_CONFIG", "VCACHE_SOCKET")}
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**inherited, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def kill(self) -> None:
        """The whole group, and reap."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()

    def ask(self, tokens: list[int]) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(tokens).encode() + b"\n")
            self.process.stdin.flush()
        except OSError:
            raise self.failure("takes no more prompts") from None
        deadline = time.monotonic() + ANSWER_SECONDS
        while (answer := self.answer(0.2)) is None:
            if time.monotonic() > deadline:
                raise self.failure(f"did not answer in {ANSWER_SECONDS:g} s")
        return answer

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Its next answer; None if there is none within `seconds`. Raises Failed if it ended."""
        assert self.process.stdout is not None
        if b"\n" not in self._buffer and select.select([self.process.stdout], [], [], seconds)[0]:
            piece = os.read(self.process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self.failure("ended")
            self._buffer += piece
        if b"\n" not in self._buffer:
            return None
        line, self._buffer = self._buffer.split(b"\n", 1)
        said: dict[str, Any] = json.loads(line)
        return said

    def last_line(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""

    def failure(self, what: str) -> Failed:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "Error" in line][-3:]
        return Failed("\n  ".join([f"{self.name} {what}. Its log is {self.log}; from it:", *errors, *lines[-5:]]))


@contextmanager
def processes(options: argparse.Namespace, shape: Shape, folder: Path) -> Iterator[tuple[Client, list[Process], int]]:
    """The server's client, instances A and B once they serve, and the size of the model's vocabulary."""
    path, model, dummy = folder / "vcache.sock", options.model or str(folder / "model"), not options.model
    if dummy:
        write_model(folder / "model", shape.generated)
    lmcache = folder / "lmcache.yaml"
    lmcache.write_text(json.dumps(lmcache_settings(shape, path, options.pool_bytes)))
    vllm = {"model": model, "skip_tokenizer_init": True, "max_model_len": max(options.lengths) + TAIL + 2 * NEW_TOKENS}
    vllm |= shape.vllm | ({"dtype": "bfloat16", "load_format": "auto" if options.cpu else "dummy"} if dummy else {})
    settings = json.dumps({"vllm": vllm, "scale": dummy and not options.cpu})
    environment = {**ALWAYS, **shape.environment, **(FOR_DUMMIES if dummy else {}), "LMCACHE_CONFIG_FILE": str(lmcache)}
    with ExitStack() as undo:
        server = Process("the server", ["-m", "vcache_backend.metadata_server", "--socket", str(path)], {}, folder / "server.log")
        undo.callback(server.kill)
        client = undo.enter_context(connect(server, path))
        both = []
        for number, name in enumerate("AB"):
            visible = {} if options.cpu else {"CUDA_VISIBLE_DEVICES": options.gpus[number]}
            command = [str(Path(__file__).resolve()), "--instance", settings]
            both.append(Process(f"instance {name}", command, {**environment, **visible}, folder / f"{name}.log"))
            undo.callback(both[-1].kill)
        yield client, both, wait_for(both, options.start_seconds)


def lmcache_settings(shape: Shape, path: Path, pool_bytes: str) -> dict[str, Any]:
    """What configs/lmcache-vcache.yaml says, for this run."""
    extra = {
        "storage_plugin.vcache.module_path": "vcache_backend.integration.lmcache",
        "storage_plugin.vcache.class_name": "VCacheBackend",
        "vcache.server.socket": str(path),
        "vcache.pool.segment_bytes": pool_bytes,
        "save_only_first_rank": False,
    }
    tiers = {"local_cpu": False, "max_local_cpu_size": 0, "storage_plugins": ["vcache"], "store_location": "vcache"}
    return {"chunk_size": shape.chunk, "pre_caching_hash_algorithm": "sha256", **tiers, "extra_config": extra}


def connect(server: Process, path: Path) -> Client:
    patient = ClientConfig(connect_seconds=5, request_seconds=10)
    deadline = time.monotonic() + 20
    while server.process.poll() is None and time.monotonic() < deadline:
        client = Client(path, patient, reconnect=False)
        if client.connected:
            say.print(f"metadata server: ready after {time.monotonic() - server.started:.1f} s, {path}")
            return client
        client.close()
        time.sleep(0.05)
    raise server.failure("does not answer")


def wait_for(both: list[Process], seconds: float) -> int:
    """Wait until both serve, saying what for. The size of their vocabulary."""
    waiting, vocabulary = list(both), 0
    for process in both:
        say.print(f"{process.name}: starting, log {process.log}")
    with say.status("") as status:
        while waiting:
            for process in list(waiting):
                spent = time.monotonic() - process.started
                if said := process.answer(0.2):
                    waiting.remove(process)
                    vocabulary = said["vocabulary"]
                    say.print(f"{process.name}: ready after {spent:.0f} s")
                elif spent > seconds:
                    raise process.failure(f"did not start in {seconds:g} s (--start-seconds)")
                else:
                    status.update(f"{process.name} starts, {spent:.0f} s: {process.last_line()[-100:]}", spinner="dots")
    return vocabulary


# ---- the prompts


def one_round(client: Client, both: list[Process], prompts: list[list[int]], chunk: int) -> list[dict[str, Any]]:
    """Each prompt to A, to A again, and to B. Rows of the table."""
    rows = []
    for prompt in prompts:
        wanted = client.stats().chunks + len(prompt) // chunk
        computed = both[0].ask(prompt)
        deadline = time.monotonic() + STORE_SECONDS
        while client.stats().chunks < wanted and time.monotonic() < deadline:
            time.sleep(0.01)  # chunks become visible in the background, once they are copied
        own, pool = both[0].ask(prompt), both[1].ask(prompt)
        for name, source, answer in (("A", "computed", computed), ("A", "its own prefix cache", own), ("B", "pool", pool)):
            rows.append(
                {
                    "prompt_tokens": len(prompt),
                    "instance": name,
                    "source": source,
                    "cached_tokens": answer["cached"],
                    "ttft_ms": answer["seconds"] * 1e3,
                    "tokens_equal": answer["tokens"] == own["tokens"],
                }
            )
    return rows


def run(options: argparse.Namespace, shape: Shape, folder: Path) -> int:
    """Everything. The exit code."""
    with processes(options, shape, folder) as (client, both, vocabulary):
        choice = random.Random(0)
        warm, prompts = ([[choice.randrange(vocabulary) for _ in range(n + TAIL)] for n in options.lengths] for _ in range(2))
        say.print("warming up with other prompts of the same lengths")
        one_round(client, both, warm, shape.chunk)
        rows = one_round(client, both, prompts, shape.chunk)
        other = [(prompts[0][0] + 1) % vocabulary, *prompts[0][1:]]
        sensitive = both[0].ask(prompts[0])["tokens"] != both[0].ask(other)["tokens"]
        stats = client.stats()
        good = all(row["tokens_equal"] and row["cached_tokens"] >= row["prompt_tokens"] - TAIL for row in hits(rows))
        if options.json:
            print(json.dumps({"rows": rows, "context_matters": sensitive, "ok": good, "status": summary(stats)}, indent=2))
        else:
            show(rows, sensitive, folder / "vcache.sock")
    if not good:
        say.print(f"[red]B did not read every prompt from the pool, or its tokens differ.[/] Lines of the logs in {folder}:")
        for line in [line for name in "AB" for line in (folder / f"{name}.log").read_text().splitlines() if "vcache" in line]:
            say.print(f"  {line[:300]}", markup=False)
    return 0 if good else 1


def hits(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row["instance"] == "B"]


def show(rows: list[dict[str, Any]], sensitive: bool, path: Path) -> None:
    table = Table("prompt", "instance", "where its KV came from", "cached", "TTFT", "same tokens")
    for column in (table.columns[0], *table.columns[3:5]):
        column.justify = "right"
    for row in rows:
        figures = f"{row['prompt_tokens']:,}", row["instance"], row["source"], f"{row['cached_tokens']:,}"
        equal = "yes" if row["tokens_equal"] else "no"
        table.add_row(*figures, f"{row['ttft_ms']:.1f} ms", equal, end_section=row["instance"] == "B")
    Console(highlight=False).print(table)
    print("same tokens: as A's answer from vLLM's own prefix cache. Another first token gives another answer:", end=" ")
    print("yes" if sensitive else "NO, so equal tokens say little with this model", end="\n\n", flush=True)
    subprocess.run([sys.executable, "-m", "vcache_backend.cli", "status", "--socket", str(path)], check=False, timeout=30)


# ---- the command line


def main() -> int:
    if sys.argv[1:2] == ["--instance"]:
        instance(json.loads(sys.argv[2]))
        return 0
    options = parsed()
    absent = [name for name in ("vllm", "lmcache") if find_spec(name) is None]
    if absent:
        say.print(
            f"two_vllm_instances: this Python has no {' and no '.join(absent)}: {sys.executable}", style="red", markup=False
        )
        return 1
    shape = CPU if options.cpu else GPU
    options.lengths = sorted(max(shape.chunk, length // shape.chunk * shape.chunk) for length in options.lengths or shape.lengths)
    options.pool_bytes = str(options.pool_bytes or shape.pool)
    if options.gpu_memory_utilization and not options.cpu:
        shape.vllm["gpu_memory_utilization"] = options.gpu_memory_utilization
    signal.signal(signal.SIGTERM, ended)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-example-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        code = run(options, shape, folder)
        if code == 0 and not options.logs:
            shutil.rmtree(folder, ignore_errors=True)
        return code
    except (Failed, VCacheError, OSError) as error:
        say.print(f"two_vllm_instances: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def ended(number: int, frame: object) -> NoReturn:
    """SIGTERM becomes an exception, so that the children end first. Again until they do: Python drops one in its own callbacks."""
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(128 + number))
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    sys.exit(128 + number)


def parsed() -> argparse.Namespace:
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if name]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="no GPU: a tiny model, the pool in host memory")
    parser.add_argument("--model", help="a model as `vllm serve` takes it; default: generated weights")
    parser.add_argument(
        "--lengths", type=numbers, metavar="N,N", help="prompt lengths; rounded down to chunks, and 8 tokens more"
    )
    parser.add_argument("--gpus", type=lambda text: text.split(","), default=visible[:2], metavar="I,J", help="which two GPUs")
    parser.add_argument("--pool-bytes", type=ByteSize.parse, metavar="SIZE", help=f"what each lends to the pool ({GPU.pool})")
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="X", help="vLLM's (0.75); with the pool at most 0.95")
    parser.add_argument("--start-seconds", type=float, default=600.0, metavar="S", help="how long an instance may take to start")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="logs and settings; default: a new folder in /tmp")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args()
    if not options.cpu and len(set(options.gpus)) != 2:
        parser.error(f"two GPUs are needed, here are {','.join(options.gpus) or 'none'}: see --gpus, or --cpu")
    return options


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
