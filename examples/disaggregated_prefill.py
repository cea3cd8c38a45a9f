"""Disaggregated prefill: one vLLM server computes prompts, another writes the answers, and KV goes from GPU to GPU over NVLink.

    python examples/disaggregated_prefill.py [--order together|decode-first|prefill-first] [--model NAME] [--stay] [--json]
    python examples/disaggregated_prefill.py --cpu       # the same on a machine without a GPU: a tiny model, the pool in host memory

Starts a metadata server, a vLLM server for prefill on GPU 0, one for decode on GPU 1, and examples/prefill_proxy.py before them. Then
it sends a few prompts to the proxy and prints, for each, how many tokens the decode server took from the pool, the time to first token,
and whether its tokens are those that the prefill server gives if it answers itself. With --stay the servers then stay up for your own
requests until Ctrl-C. Exit code 0 if every prompt came from the pool, with the right tokens.

By hand (each vLLM needs to see its own GPU only: the pool's memory on the other one is mapped all the same):

    vcache serve
    export PYTHONHASHSEED=0       # the same everywhere, since the names of KV depend on it
    CUDA_VISIBLE_DEVICES=0 vllm serve MODEL --port 8100 --kv-transfer-config '{"kv_role":"kv_producer",
      "kv_connector":"VCacheConnector", "kv_connector_module_path":"vcache_backend.integration.vllm_connector",
      "kv_load_failure_policy":"recompute"}'
    CUDA_VISIBLE_DEVICES=1 vllm serve MODEL --port 8200 --kv-transfer-config '{"kv_role":"kv_consumer",
      "kv_connector":"VCacheConnector", "kv_connector_module_path":"vcache_backend.integration.vllm_connector",
      "kv_load_failure_policy":"recompute", "kv_connector_extra_config":{"pool":{"segment_bytes":0}}}'
    python examples/prefill_proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000
    curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"model":"MODEL", "prompt":"...", "max_tokens":64, "stream":true}'
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from prefill_proxy import ORDERS
from rich.console import Console
from rich.table import Table
from two_vllm_instances import ANSWER_SECONDS, TAIL, Failed, Process, connect, die_with_parent, ended, numbers, say

from benchmarks.vllm.scale import FULL, TINY, Scale
from benchmarks.vllm.weights import write_model
from vcache_backend.config import ByteSize
from vcache_backend.errors import VCacheError
from vcache_backend.metadata_server.client import Client
from vcache_backend.status import summary

NAME = "disaggregated_prefill"
NEW_TOKENS = 16
PROXY = Path(__file__).resolve().with_name("prefill_proxy.py")
# A Llama of 1.1 billion weights, which `write_model` writes out as it does the tiny one's: seconds, and 2 GiB of disk.
SMALL = msgspec.structs.replace(
    FULL,
    model={
        **FULL.model,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "vocab_size": 32768,
    },
    cpu=True,
)


class Shape(NamedTuple):
    """Where it runs. lengths: of the prompts, before they are rounded down to chunks. generated: the model made where none is named.
    vllm: options of `vllm serve`."""

    chunk: int
    lengths: tuple[int, ...]
    pool: str
    generated: Scale
    vllm: tuple[str, ...]
    environment: dict[str, str]


GPU = Shape(
    chunk=256,
    lengths=(1024, 4096, 16384),
    pool="4 GiB",
    generated=SMALL,
    vllm=("--gpu-memory-utilization=0.75", "--max-num-seqs=8"),
    environment={"VLLM_USE_FLASHINFER_SAMPLER": "0"},
)
CPU = Shape(
    chunk=64,
    lengths=(128, 512, 960),
    pool="32 MiB",
    generated=TINY,
    vllm=("--enforce-eager", "--block-size=32", f"--kv-cache-memory-bytes={32 << 20}", "--max-num-seqs=4"),
    environment={"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"},
)
ALWAYS = {"PYTHONHASHSEED": "0", "VLLM_NO_USAGE_STATS": "1", "PYTHONUNBUFFERED": "1"}


# ---- processes


class Server(Process):
    """A child that answers HTTP. All it says goes to its log, or without one to where this program's errors go."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], log: Path | None, url: str) -> None:
        self.name, self.url, self.started = name, url, time.monotonic()
        self.log = log or Path(os.devnull)
        inherited = {key: value for key, value in os.environ.items() if key not in ("VCACHE_CONFIG", "VCACHE_SOCKET")}
        with log.open("wb") if log else os.fdopen(os.dup(2), "wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env={**inherited, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def ready(self) -> bool:
        """Does it serve? Raises Failed if it ended."""
        if self.process.poll() is not None:
            raise self.failure("ended")
        try:
            with urllib.request.urlopen(self.url + "/health", timeout=2) as reply:
                return bool(reply.status == 200)
        except OSError:
            return False


class Site(NamedTuple):
    """What was started. model: its name in requests."""

    client: Client
    prefill: Server
    decode: Server
    proxy: Server
    model: str


@contextmanager
def site(options: argparse.Namespace, shape: Shape, folder: Path) -> Iterator[Site]:
    """Everything, serving; ended with the context."""
    path, model = folder / "vcache.sock", options.model or str(folder / "model")
    if not options.model:
        write_model(folder / "model", shape.generated)
    with ExitStack() as undo:
        server = Process("the server", ["-m", "vcache_backend.metadata_server", "--socket", str(path)], {}, folder / "server.log")
        undo.callback(server.kill)
        client = undo.enter_context(connect(server, path))
        common = ["-m", "vllm.entrypoints.openai.api_server", "--model", model, "--host=127.0.0.1", *shape.vllm]
        common += ["--dtype=bfloat16", "--enable-prompt-tokens-details"]
        common += [] if options.model else ["--skip-tokenizer-init"]
        common += [f"--max-model-len={max(options.lengths) + TAIL + 2 * NEW_TOKENS}"]
        both = []
        for number, (role, port) in enumerate(zip(("prefill", "decode"), options.ports[1:], strict=True)):
            visible = {} if options.cpu else {"CUDA_VISIBLE_DEVICES": options.gpus[number]}
            environment = {**ALWAYS, **shape.environment, **visible, **({} if options.model else {"HF_HUB_OFFLINE": "1"})}
            command = [
                *common,
                f"--port={port}",
                "--kv-transfer-config",
                json.dumps(transfer(role, shape, path, options.pool_bytes)),
            ]
            url = f"http://127.0.0.1:{port}"
            both.append(Server(f"the {role} server", command, environment, folder / f"{role}.log", url))
            undo.callback(both[-1].kill)
        wait_for(both, options.start_seconds)
        command = [str(PROXY), "--prefill", both[0].url, "--decode", both[1].url, "--port", str(options.ports[0])]
        command += ["--order", options.order, "--wait-seconds", str(options.wait_seconds)]
        proxy = Server("the proxy", command, {}, None, f"http://127.0.0.1:{options.ports[0]}")
        undo.callback(proxy.kill)
        wait_for([proxy], 30)
        yield Site(client, *both, proxy, model)


def transfer(role: str, shape: Shape, path: Path, pool_bytes: str) -> dict[str, Any]:
    """`--kv-transfer-config` of the prefill or the decode server. Only the former lends memory: it stores, the other loads."""
    return {
        "kv_connector": "VCacheConnector",
        "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "server": {"socket": str(path)},
            "pool": {"segment_bytes": pool_bytes if role == "prefill" else 0},
            "engine": {"chunk_size": shape.chunk},
            "connector": {"min_hit_tokens": shape.chunk},
        },
    }


def wait_for(servers: list[Server], seconds: float) -> None:
    """Wait until all serve, saying what for."""
    for server in servers:
        say.print(f"{server.name}: starting, {server.url}" + (f", log {server.log}" if server.log.name != "null" else ""))
    with say.status("") as status:
        for server in servers:
            while not server.ready():
                spent = time.monotonic() - server.started
                if spent > seconds:
                    raise server.failure(f"did not start in {seconds:g} s (--start-seconds)")
                status.update(f"{server.name} starts, {spent:.0f} s: {server.last_line()[-100:]}", spinner="dots")
                time.sleep(0.2)
            say.print(f"{server.name}: ready after {time.monotonic() - server.started:.0f} s")


# ---- the prompts


class Answer(NamedTuple):
    """cached: prompt tokens that were not computed. seconds: until the first token."""

    tokens: list[int]
    cached: int
    seconds: float


def ask(server: Server, model: str, prompt: list[int], **more: Any) -> Answer:
    """A streaming completions request, greedy. Raises Failed."""
    body = {"model": model, "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True, **more}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    request = urllib.request.Request(server.url + "/v1/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    tokens, cached, seconds, started = list[int](), 0, 0.0, time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as reply:
            for line in reply:
                if not line.startswith(b"data: {"):
                    continue
                said = json.loads(line[6:])
                for choice in said.get("choices", ()):
                    tokens += choice.get("token_ids") or []
                    seconds = seconds or (time.perf_counter() - started if tokens else 0.0)
                cached = ((said.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or cached
    except urllib.error.HTTPError as error:
        raise Failed(f"{server.name}: HTTP {error.code}: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise server.failure(f"does not answer ({error})") from None
    if len(tokens) != NEW_TOKENS:
        raise server.failure(f"gave {len(tokens)} tokens where {NEW_TOKENS} were due")
    return Answer(tokens, cached, seconds)


def one_round(site: Site, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Each prompt through the proxy. Rows of the table.

    The right tokens are the prefill server's own, asked after it: it has the prompt in vLLM's prefix cache, so that it computes the
    same last tokens in a step of the same shape as the decode server did, and answers can be compared token by token.
    """
    rows = []
    for prompt in prompts:
        answer = ask(site.proxy, site.model, prompt)
        right = ask(site.prefill, site.model, prompt, kv_transfer_params={"vcache": {"store": False}})
        figures = {"prompt_tokens": len(prompt), "cached_tokens": answer.cached, "ttft_ms": answer.seconds * 1e3}
        rows.append({**figures, "tokens_equal": answer.tokens == right.tokens, "left_in_pool": site.client.stats().chunks})
    return rows


def run(options: argparse.Namespace, shape: Shape, folder: Path) -> int:
    """Everything. The exit code."""
    with site(options, shape, folder) as here:
        choice = random.Random(0)
        # Any tokenizer has as many tokens as these.
        warm, prompts = ([[choice.randrange(3, 1000) for _ in range(n + TAIL)] for n in options.lengths] for _ in range(2))
        say.print("warming up with other prompts of the same lengths")
        one_round(here, warm)
        rows = one_round(here, prompts)
        plain = {"kv_transfer_params": {"vcache": {"store": False}}}
        first, other = prompts[0], [prompts[0][0] % 900 + 3, *prompts[0][1:]]
        sensitive = ask(here.prefill, here.model, first, **plain).tokens != ask(here.prefill, here.model, other, **plain).tokens
        good = all(row["tokens_equal"] and row["cached_tokens"] >= row["prompt_tokens"] - TAIL for row in rows)
        if options.json:
            status = summary(here.client.stats())
            print(json.dumps({"rows": rows, "context_matters": sensitive, "ok": good, "status": status}, indent=2), flush=True)
        else:
            show(rows, sensitive, options.order)
        if not good:
            say.print(f"[red]Not every prompt came from the pool, or tokens differ.[/] Lines of the logs in {folder}:")
            for line in [line for log in folder.glob("*e*.log") for line in log.read_text().splitlines() if "vcache" in line]:
                say.print(f"  {line[:300]}", markup=False)
        if options.stay:
            say.print(f'send completions to {here.proxy.url}/v1/completions, model "{here.model}"; Ctrl-C ends', markup=False)
            while here.proxy.process.poll() is None:
                time.sleep(0.2)
            raise here.proxy.failure("ended")
    return 0 if good else 1


def show(rows: list[dict[str, Any]], sensitive: bool, order: str) -> None:
    table = Table("prompt", "from the pool", "TTFT", "same tokens", "chunks left in the pool", title=f"order: {order}")
    for column in table.columns:
        column.justify = "right"
    for row in rows:
        figures = f"{row['prompt_tokens']:,}", f"{row['cached_tokens']:,}", f"{row['ttft_ms']:.1f} ms"
        table.add_row(*figures, "yes" if row["tokens_equal"] else "no", str(row["left_in_pool"]))
    Console(highlight=False).print(table)
    print("same tokens: as the prefill server's own answer. Another first token gives another answer:", end=" ")
    print("yes" if sensitive else "NO, so equal tokens say little with this model", flush=True)


# ---- the command line


def main() -> int:
    options = parsed()
    if find_spec("vllm") is None:
        say.print(f"{NAME}: this Python has no vllm: {sys.executable}", style="red", markup=False)
        return 1
    shape = CPU if options.cpu else GPU
    options.lengths = sorted(max(shape.chunk, length // shape.chunk * shape.chunk) for length in options.lengths or shape.lengths)
    options.pool_bytes = str(options.pool_bytes or shape.pool)
    signal.signal(signal.SIGTERM, ended)
    folder = options.logs or Path(tempfile.mkdtemp(prefix="vcache-example-"))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        code = run(options, shape, folder)
        if code == 0 and not options.logs:
            shutil.rmtree(folder, ignore_errors=True)
        return code
    except (Failed, VCacheError, OSError) as error:
        say.print(f"{NAME}: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        return 130


def parsed() -> argparse.Namespace:
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",") if name]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="no GPU: a tiny model, the pool in host memory")
    parser.add_argument("--order", choices=ORDERS, default="together", help="which server the proxy asks first (together)")
    parser.add_argument("--model", help="a model as `vllm serve` takes it; default: generated weights")
    parser.add_argument(
        "--lengths", type=numbers, metavar="N,N", help="prompt lengths; rounded down to chunks, and 8 tokens more"
    )
    parser.add_argument(
        "--wait-seconds", type=float, default=30.0, metavar="S", help="how long the decode server waits for KV (30)"
    )
    parser.add_argument(
        "--gpus", type=lambda text: text.split(","), default=visible[:2], metavar="I,J", help="prefill's, decode's"
    )
    parser.add_argument("--pool-bytes", type=ByteSize.parse, metavar="SIZE", help=f"what GPU I lends to the pool ({GPU.pool})")
    parser.add_argument("--ports", type=numbers, default=[8000, 8100, 8200], metavar="N,N,N", help="of proxy, prefill and decode")
    parser.add_argument("--stay", action="store_true", help="serve on after the prompts, until Ctrl-C")
    parser.add_argument("--start-seconds", type=float, default=600.0, metavar="S", help="how long a server may take to start")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="logs and sockets; default: a new folder in /tmp")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if len(options.ports) != 3:
        parser.error(f"three ports are needed, of proxy, prefill and decode; {len(options.ports)} were given")
    if not options.cpu and len(set(options.gpus)) != 2:
        parser.error(f"two GPUs are needed, here are {','.join(options.gpus) or 'none'}: see --gpus, or --cpu")
    return options


if __name__ == "__main__":
    sys.exit(main())
