"""What the examples share: processes that end with the program, vLLM servers on one metadata
server, prompts, and requests."""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shlex
import shutil
import signal
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
from rich.console import Console
from rich.table import Table

from vcache_backend.children import Program, module, until
from vcache_backend.config import ClientConfig
from vcache_backend.errors import VCacheError
from vcache_backend.protocol.client import Client
from vcache_backend.status import summary

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # benchmarks come with the repository, and are not installed

NEW_TOKENS = 16
TAIL = 8
"""Tokens after the last whole chunk: fewer than a block, so that a hit of whole blocks and one of
whole chunks end at the same token, the same tokens are computed in the same shape, and answers can
be compared token by token."""
START_SECONDS = 600.0
TELL_SECONDS = 15.0
ANSWER_SECONDS = 120.0
QUIET = {
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "PYTHONUNBUFFERED": "1",
}
TELLING = re.compile(
    r"(^|\s)[\w.]*(Error|Exception)\b: |(^|\s)error: |ERROR[ :](?!.*](  | Traceback))"
    r"|vcache.*(caches nothing|stepped aside)"
)
"""A line of a log that may say why a program failed; frames of a traceback do not."""
say = Console(stderr=True, highlight=False, soft_wrap=True)


class Failed(Exception):
    """Something that was started did not do what it should. The message says where to look."""


class Machine(NamedTuple):
    """Where it runs. chunk, lengths (of prompts): in tokens. pool: what a server lends to it. vllm:
    options of `vllm serve`. client: of vcache's configuration."""

    chunk: int
    lengths: list[int]
    pool: str
    vllm: list[str]
    environment: dict[str, str]
    client: dict[str, float]


GPU = Machine(
    chunk=256,
    lengths=[1024, 4096, 16384],
    pool="4 GiB",
    vllm=["--gpu-memory-utilization=0.75", "--max-num-seqs=8"],
    environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
    client={},
)
CPU = Machine(
    chunk=64,
    lengths=[128, 512, 960],
    pool="32 MiB",
    vllm=[
        *(
            "--enforce-eager",
            "--block-size=32",
            f"--kv-cache-memory-bytes={32 << 20}",
            "--max-num-seqs=4",
        ),
        "--distributed-executor-backend=uni",
    ],
    environment={
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps `uni` in force, which saves a process
        "TORCH_COMPILE_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    },
    # Where a model computes on all cores the metadata server may answer later than in 0.25 s.
    client={"connect_seconds": 5.0, "request_seconds": 10.0, "control_seconds": 30.0},
)


# ---- processes


def taken(port: int) -> str:
    """Why a server cannot listen at a port of this machine, at which another program may answer;
    empty if it can."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError as error:
            return str(error.strerror)
    return ""


class Process(Program):
    """A program whose progress and failure are reported. url: where it answers HTTP, if it does."""

    def __init__(
        self,
        name: str,
        command: list[str],
        log: Path,
        url: str = "",
        environment: dict[str, str] | None = None,
    ) -> None:
        self.url, self.started = url, time.monotonic()
        if url and (wrong := taken(port := int(url.rpartition(":")[2]))):
            raise Failed(f"{name}: port {port} is in use ({wrong}); --ports names others")
        log.unlink(missing_ok=True)
        # The children have settings of their own.
        inherited = {
            key: value
            for key, value in os.environ.items()
            if key not in ("VCACHE_CONFIG", "VCACHE_SOCKET")
        }
        super().__init__(name, command, log, inherited | (environment or {}))
        say.print(f"{name}: starting, log {log}")

    def kill(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            if self.url and self.alive:
                # A vLLM that is killed leaves semaphores in /dev/shm.
                self.signal(signal.SIGTERM)
                until(lambda: not self.alive, 10.0)
                until(self._is_alone, 2.0)
        finally:  # Ctrl-C once more
            super().kill()

    def _is_alone(self) -> bool:
        """Whether the processes that it has started have ended, too."""
        try:
            os.killpg(self.pid, 0)
        except OSError:
            return True
        return False

    def ready(self) -> bool:
        """Whether it answers HTTP."""
        with suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=2) as reply:
            return bool(reply.status == 200)
        return False

    def wait(
        self, ready: Callable[[], bool], seconds: float, others: Sequence[Process] = ()
    ) -> None:
        """Wait until it is ready, and report its progress. Raises Failed if it or another process
        ends, or after `seconds`."""
        told = TELL_SECONDS
        while not ready():
            if time.monotonic() - self.started > told:
                lines = self.log.read_text(errors="replace").split("\n")
                say.print(
                    (
                        f"{self.name}: {told:g} s, "
                        f"{next((line for line in reversed(lines) if line), '')[:100]}"
                    ),
                    markup=False,
                )
                told += TELL_SECONDS
            if ended := next((process for process in (self, *others) if not process.alive), None):
                raise ended.failure()
            if time.monotonic() - self.started > seconds:
                raise self.failure(f"did not start in {seconds:g} s")
            time.sleep(0.1)
        say.print(f"{self.name}: ready after {time.monotonic() - self.started:.1f} s")

    def failure(self, *what: str) -> Failed:
        """Make a Failed: what went wrong, the exit code and command if it has ended, and the lines
        of its log that may say why."""
        if not self.alive:
            what = (
                *what,
                (
                    f"ended with code {self._process.returncode}; its command was "
                    f"{shlex.join(self._command)}"
                ),
            )
        lines = self.log.read_text(errors="replace").strip().splitlines()
        telling = dict.fromkeys(line for line in lines if TELLING.search(line))
        return Failed(
            "\n  ".join(
                [
                    f"{self.name} {' and '.join(what)}. Its log is {self.log}; from it:",
                    *([*telling] or lines)[-5:],
                ]
            )
        )


@contextmanager
def metadata_server(socket: Path) -> Iterator[Client]:
    """Run `vcache serve`. Yields a client of it once it answers."""
    command = module("vcache_backend", "serve", "--socket", str(socket))
    with Process("metadata server", command, socket.with_suffix(".log")) as server:
        server.wait(lambda: serves(socket), 30)
        with Client(
            socket, ClientConfig(connect_seconds=5, request_seconds=10), reconnect=False
        ) as client:
            client.require()
            yield client


def serves(socket: Path) -> bool:
    """Whether a metadata server answers; the socket of one that was killed is still there."""
    with Client(
        socket, ClientConfig(connect_seconds=5, request_seconds=10), reconnect=False
    ) as client:
        return client.connected


class Site(NamedTuple):
    """What serves: a client of the metadata server, and two vLLM servers. model: its name in
    requests."""

    client: Client
    servers: list[Process]
    model: str


@contextmanager
def two_servers(
    options: argparse.Namespace,
    names: tuple[str, str],
    transfers: list[dict[str, Any]],
    folder: Path,
    environment: dict[str, str] | None = None,
) -> Iterator[Site]:
    """Run a metadata server on `folder`/vcache.sock, and a `vllm serve` on each of two GPUs. Yields
    once all answer; they end with the context.

    transfers: the `--kv-transfer-config` of each."""
    machine, model = options.machine, options.model or write_model(folder / "model", options.cpu)
    common = [
        *module("vllm.entrypoints.openai.api_server"),
        "--model",
        model,
        "--host=127.0.0.1",
        "--dtype=bfloat16",
    ]
    common += [
        "--enable-prompt-tokens-details",
        *([] if options.model else ["--skip-tokenizer-init"]),
        *machine.vllm,
    ]
    common += [f"--max-model-len={max(options.lengths) + TAIL + 2 * NEW_TOKENS}", *options.vllm]
    with ExitStack() as undo:
        client, servers = (
            undo.enter_context(metadata_server(folder / "vcache.sock")),
            list[Process](),
        )
        for name, port, gpu, transfer in zip(
            names, options.ports, options.gpus, transfers, strict=True
        ):
            visible = {} if options.cpu else {"CUDA_VISIBLE_DEVICES": gpu}
            command = [*common, f"--port={port}", "--kv-transfer-config", json.dumps(transfer)]
            more = QUIET | machine.environment | visible | (environment or {})
            log = folder / f"{name.replace(' ', '-')}.log"
            servers.append(
                undo.enter_context(Process(name, command, log, f"http://127.0.0.1:{port}", more))
            )
        for server in servers:
            server.wait(server.ready, START_SECONDS, servers)
        yield Site(client, servers, model)


def write_model(folder: Path, tiny: bool) -> str:
    """A Llama with generated weights: a tiny one, or one of 1.1 billion, which takes seconds and 2
    GiB of disk."""
    from benchmarks.vllm.instances import SCALES, TINY

    sizes = {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "vocab_size": 32768,
    }
    full = SCALES["full"]
    small = msgspec.structs.replace(full, model={**full.model, **sizes}, cpu=True)
    return str((TINY if tiny else small).write_model(folder))


# ---- prompts and answers


def prompts(options: argparse.Namespace, seed: int) -> list[list[int]]:
    """One of each length, of tokens that any tokenizer has."""
    choice = random.Random(seed)
    return [[choice.randrange(3, 1000) for _ in range(length + TAIL)] for length in options.lengths]


class Answer(NamedTuple):
    """cached: prompt tokens that were not computed. seconds: until the first token."""

    tokens: list[int]
    cached: int
    seconds: float


def ask(server: Process, model: str, prompt: list[int], **more: Any) -> Answer:
    """A streaming completions request, greedy. Raises Failed."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": NEW_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        **more,
    }
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    tokens, cached, seconds, started = list[int](), 0, 0.0, time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
            for line in reply:
                if line.startswith(b"data: {"):
                    part = json.loads(line[6:])
                    tokens += [
                        token
                        for choice in part.get("choices", ())
                        for token in choice.get("token_ids") or ()
                    ]
                    seconds = seconds or (time.perf_counter() - started if tokens else 0.0)
                    cached = ((part.get("usage") or {}).get("prompt_tokens_details") or {}).get(
                        "cached_tokens"
                    ) or cached
    except urllib.error.HTTPError as error:
        raise server.failure(
            f"answered HTTP {error.code}: {error.read().decode(errors='replace')[:500]}"
        ) from None
    except OSError as error:
        raise server.failure(f"does not answer ({error})") from None
    if len(tokens) != NEW_TOKENS:
        raise server.failure(f"gave {len(tokens)} tokens where {NEW_TOKENS} were due")
    return Answer(tokens, cached, seconds)


def report(options: argparse.Namespace, site: Site, rows: list[dict[str, Any]], **more: Any) -> int:
    """Show the rows, a column for each key, and whether tokens say anything. 0 if all that came
    from elsewhere did so wholly and right; else 1, after a message that says what did not."""
    first, *rest = prompts(options, seed=1)[0]
    # Of another first token greedy tokens may be the same by chance, as the processor computes.
    answers = [
        ask(site.servers[0], site.model, [first % 900 + 3 * other, *rest], **more).tokens
        for other in range(4)
    ]
    matters = any(answer != answers[0] for answer in answers)
    hits = [row for row in rows if row["source"] in ("pool", "other server")]
    wrong = [line for row in hits for line in mistakes(row)]
    if options.json:
        shown = {
            "rows": rows,
            "context_matters": matters,
            "ok": not wrong,
            "status": summary(site.client.stats()),
        }
        print(json.dumps(shown, indent=2), flush=True)
        return explain(site, wrong)
    table = Table(*(name.replace("_", " ") for name in rows[0]))
    for row in rows:
        table.add_row(
            *(f"{value:,.1f}" if isinstance(value, float) else str(value) for value in row.values())
        )
    Console(highlight=False).print(table)
    print("another first token gives another answer:", matters, flush=True)
    return explain(site, wrong)


def mistakes(row: dict[str, Any]) -> Iterator[str]:
    """What is wrong with the answer that a row is about, which should have come from elsewhere."""
    due = row["prompt"] - TAIL
    if row["cached"] < due:
        yield (
            f"{row['cached']} of {due} tokens came from the {row['source']}, the others were "
            "computed"
        )
    if not row["tokens_equal"]:
        yield (
            f"the answer to the prompt of {row['prompt']} tokens is another one than after "
            "vLLM's own prefix cache"
        )


def explain(site: Site, wrong: list[str]) -> int:
    """The exit code. If something is wrong, raises Failed with that, and with what the servers'
    logs say."""
    if wrong:
        raise Failed(
            "\n".join([*wrong, *(str(server.failure("may say why")) for server in site.servers)])
        )
    return 0


# ---- the command line


def parser(text: str, ports: list[int], fixed: bool = False) -> argparse.ArgumentParser:
    """The options that the examples have in common. fixed: the caller sets `cpu`, `model` and
    `lengths`."""
    made = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    option = made.add_argument
    if not fixed:
        option("--cpu", action="store_true", help="no GPU: a tiny model, the pool in host memory")
        option("--model", help="a model as `vllm serve` takes it; default: generated weights")
        option(
            "--lengths",
            type=numbers,
            metavar="N,N",
            help="prompt lengths; rounded down to chunks, and 8 tokens more",
        )
    option(
        "--ports",
        type=numbers,
        default=ports,
        metavar="N,...",
        help=f"of what serves ({','.join(map(str, ports))})",
    )
    option(
        "--logs",
        type=Path,
        metavar="FOLDER",
        help="logs and settings; default: a new folder in /tmp",
    )
    option("--json", action="store_true", help="print JSON instead of a table")
    option("vllm", nargs="*", metavar="-- OPTION", help="more options of `vllm serve`, behind --")
    return made


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def gpus_here() -> int:
    """How many torch would use. It comes with vLLM, and takes seconds to import."""
    from torch.cuda import device_count

    return device_count()


def main(
    made: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace, Path], int],
    needs: tuple[str, ...],
    cpu: Machine = CPU,
) -> int:
    """Parse, run, tidy up. The exit code: 1 with one message if it fails, 130 after Ctrl-C, 143
    after SIGTERM."""
    options, count = made.parse_args(), len(made.get_default("ports"))
    if absent := [name for name in needs if find_spec(name) is None]:
        get = (
            f"pip install '{ROOT}[{','.join(absent)}]'; without a GPU: scripts/setup.sh "
            "vllm, and .venv/bin/python"
        )
        made.exit(
            1,
            f"{made.prog}: this Python has no {' and no '.join(absent)}: {sys.executable}; {get}\n",
        )
    if len(options.ports) != count:
        made.error(f"--ports: {count} are needed; {len(options.ports)} were given")
    if len(set(options.ports)) != count or not all(0 < port < 65536 for port in options.ports):
        made.error(
            f"--ports: {count} different ones from 1 to 65535 are needed, not "
            f"{','.join(map(str, options.ports))}"
        )
    options.machine = machine = cpu if options.cpu else GPU
    options.lengths = sorted(
        max(machine.chunk, n - n % machine.chunk) for n in options.lengths or machine.lengths
    )
    options.gpus = (
        ["", ""] if options.cpu else os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]
    )
    if len(options.gpus) != 2 or (not options.cpu and gpus_here() < 2):
        made.error("two GPUs are needed: see CUDA_VISIBLE_DEVICES, or --cpu")
    signal.signal(signal.SIGTERM, ended)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-example-"))
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        code = run(options, folder)
        if code == 0 and not options.logs:
            shutil.rmtree(folder, ignore_errors=True)
        return code
    except (Failed, VCacheError, OSError) as error:
        say.print(f"{made.prog}: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def ended(number: int, frame: object) -> NoReturn:
    """SIGTERM becomes an exception, so that the children end first. Again until they do: Python
    drops one in its own callbacks."""
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(128 + number))
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    sys.exit(128 + number)
