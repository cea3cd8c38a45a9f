"""The walk of a new user, by hand: `python3 tests/new_user.py [--vllm PYTHON]`, some minutes and 2
GB of packages on a new machine.

Clone, `make demo`, the server alone in an environment of its own, two vLLM servers on the CPU, a
prompt that one computed and the other reads, the hit in the page and in Prometheus, the server
killed and back, upgraded and back. Prints a line a step with its seconds, and at the end the
figures. What a step asks for and does not get ends the walk with its reason. Needs git and Python
with venv; Prometheus (Debian's) is left out where it is not installed. `--vllm`: a Python that has
this checkout and vLLM already."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CHUNK = 64
CONNECTOR = {
    "kv_connector": "VCacheConnector",
    "kv_connector_module_path": "vcache_backend.integration.vllm_connector",
    "kv_role": "kv_both",
}
CPU = {
    "PYTHONHASHSEED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
SMALL = [
    "--dtype=bfloat16",
    "--enforce-eager",
    "--block-size=32",
    f"--kv-cache-memory-bytes={32 << 20}",
    "--max-num-seqs=4",
]
SMALL += [
    "--distributed-executor-backend=uni",
    "--skip-tokenizer-init",
    "--max-model-len=1024",
    "--enable-prompt-tokens-details",
]
MODEL = (
    "import sys; sys.path.insert(0, 'examples'); from pathlib import Path; from serving "
    "import write_model; "
)
began = time.monotonic()


def say(what: str) -> None:
    print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)


def run(*command: str | Path, cwd: Path | None = None, **environment: str) -> str:
    """What it prints. Ends the walk if it fails."""
    ran = subprocess.run(
        command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    if ran.returncode:
        sys.exit(
            f"{' '.join(map(str, command))} ended with "
            f"{ran.returncode}:\n{ran.stdout[-1000:]}{ran.stderr[-2000:]}"
        )
    return ran.stdout


def until(what: str, answer: Callable[[], Any], seconds: float = 60.0) -> Any:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, LookupError):
            if found := answer():
                return found
        time.sleep(0.1)
    sys.exit(f"not within {seconds:g} s: {what}")


def get(url: str, body: Any = None) -> str:
    request = urllib.request.Request(
        url, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as reply:
        return str(reply.read().decode())


def well(url: str) -> bool:
    return get(f"{url}/health") == ""


def free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as made:
        return int(made.getsockname()[1])


class Walk:
    """What was started ends with `undo`."""

    def __init__(self, folder: Path, undo: ExitStack) -> None:
        self.folder, self.undo, self.clone = folder, undo, folder / "vcache"
        self.base, self.socket, self.page = (
            folder / "server",
            folder / "run" / "vcache.sock",
            f"127.0.0.1:{free_port()}",
        )

    def start(self, name: str, *command: str | Path, **environment: str) -> subprocess.Popen[bytes]:
        log = self.undo.enter_context((self.folder / f"{name}.log").open("ab"))
        child = subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | environment,
            stdout=log,
            stderr=log,
            process_group=0,
        )

        def end() -> None:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(20)

        self.undo.callback(end)
        return child

    def server(self) -> subprocess.Popen[bytes]:
        """`vcache serve` of the base install, answering at its page."""
        child = self.start(
            "server", self.base / "bin" / "vcache", "serve", "--config", self.folder / "vcache.yaml"
        )
        until("the server is ready", lambda: get(f"http://{self.page}/readyz"))
        return child

    def install_server(self) -> int:
        """Bytes that it takes, beside Python and pip."""
        run(sys.executable, "-m", "venv", self.base)
        before = size(self.base)
        run(self.base / "bin" / "pip", "install", "-q", "--disable-pip-version-check", self.clone)
        (self.folder / "vcache.yaml").write_text(
            json.dumps({"server": {"socket": str(self.socket), "metrics": self.page}})
        )
        return size(self.base) - before

    def vllm(self, name: str, python: Path, model: Path) -> str:
        """Its URL; it is yet to be ready."""
        ours = {
            "server": {"socket": str(self.socket)},
            "pool": {"segment_bytes": "32 MiB"},
            "engine": {"chunk_size": CHUNK},
        }
        given, port = json.dumps(CONNECTOR | {"kv_connector_extra_config": ours}), free_port()
        command: list[str | Path] = [
            python,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            model,
            "--host=127.0.0.1",
            f"--port={port}",
        ]
        self.start(name, *command, *SMALL, "--kv-transfer-config", given, **CPU)
        return f"http://127.0.0.1:{port}"

    def stats(self) -> dict[str, Any]:
        return dict(json.loads(get(f"http://{self.page}/stats.json"))["stats"])


def size(folder: Path) -> int:
    return sum(file.lstat().st_size for file in folder.rglob("*") if not file.is_symlink())


def ask(url: str, model: Path, prompt: list[int]) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were not computed."""
    body = {
        "model": str(model),
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
    }
    said = json.loads(get(url + "/v1/completions", body | {"return_token_ids": True}))
    details = said["usage"].get("prompt_tokens_details") or {}
    return said["choices"][0]["token_ids"], int(details.get("cached_tokens") or 0)


def hits(walk: Walk, servers: list[str], model: Path, seed: int) -> None:
    """One computes a new prompt; the other reads it, and answers the same."""
    prompt = [random.Random(seed).randrange(3, 1000) for _ in range(8 * CHUNK + 8)]
    before = walk.stats()["chunks"]
    answer, cached = ask(servers[0], model, prompt)
    if cached:
        sys.exit(f"{cached} tokens of a new prompt were cached")
    until("its chunks are in the pool", lambda: walk.stats()["chunks"] >= before + 8)
    again, cached = ask(servers[1], model, prompt)
    if (again, cached) != (answer, 8 * CHUNK):
        sys.exit(
            f"the other one had {cached} tokens, not {8 * CHUNK}, and answered {again}, not "
            f"{answer}"
        )


def prometheus(walk: Walk) -> str:
    """Where a real one that scrapes the server answers queries; empty where none is installed."""
    if shutil.which("prometheus") is None:
        return ""
    port, file = free_port(), walk.folder / "prometheus.yml"
    job = {
        "job_name": "vcache",
        "scrape_interval": "1s",
        "static_configs": [{"targets": [walk.page]}],
    }
    file.write_text(json.dumps({"scrape_configs": [job]}))
    data = f"--storage.tsdb.path={walk.folder}/prometheus"
    walk.start(
        "prometheus",
        "prometheus",
        f"--config.file={file}",
        data,
        f"--web.listen-address=127.0.0.1:{port}",
    )
    return f"http://127.0.0.1:{port}/api/v1/query?query=vcache_server_acquire_hits_total"


def walked(walk: Walk, python: Path | None) -> None:
    run("git", "clone", "-q", ROOT, walk.clone)
    say("cloned")
    installed = walk.install_server()
    say(f"the server alone is installed: {installed / 1e6:.1f} MB beside Python and pip")
    if python is None:
        run("make", "demo", cwd=walk.clone)
        say("make demo: every byte is right")
        run("scripts/setup.sh", "vllm", cwd=walk.clone)
        python = walk.clone / ".venv" / "bin" / "python"
        say("vLLM for the CPU is installed")
    server = walk.server()
    say(f"the server serves, its page is at http://{walk.page}")
    model = walk.folder / "model"
    run(
        python,
        "-c",
        f"{MODEL} write_model(Path({str(model)!r}), True)",
        cwd=walk.clone if (walk.clone / ".venv").exists() else ROOT,
    )
    model = next(path.parent for path in model.rglob("config.json"))
    servers = [walk.vllm(name, python, model) for name in ("vllm-a", "vllm-b")]
    for url in servers:
        until(f"vLLM answers at {url}", partial(well, url), 300)
    say("two vLLM servers answer")
    hits(walk, servers, model, 1)
    first = time.monotonic() - began
    say("what one computed, the other read: the first hit")
    until("the page has the hit", lambda: walk.stats()["counters"]["acquire_hits"] >= 8)
    if url := prometheus(walk):
        until(
            "Prometheus has the hit",
            lambda: float(json.loads(get(url))["data"]["result"][0]["value"][1]) >= 8,
        )
    say("the hit is in the page" + (" and in Prometheus" if url else "; no Prometheus here"))
    server.kill()
    server.wait()
    say(
        "the server is killed; vLLM answers: "
        + str(len(ask(servers[1], model, [5] * 100)[0]))
        + " tokens"
    )
    for what in ("is back", "is upgraded and back"):
        server = walk.server()
        until("workers have their memory back in the pool", lambda: walk.stats()["chunks"] >= 8)
        time.sleep(1)  # a server that has just started again reserves nothing
        hits(walk, servers, model, len(what))
        say(f"the server {what}, chunks and all, and a new prompt is a hit")
        server.terminate()
        server.wait(20)
        run(
            walk.base / "bin" / "pip",
            "install",
            "-q",
            "--disable-pip-version-check",
            "--force-reinstall",
            "--no-deps",
            walk.clone,
        )
    print(
        f"first hit {first:.1f} s after the clone began; {installed / 1e6:.1f} MB for the "
        "server alone"
    )


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument(
        "--vllm", type=Path, metavar="PYTHON", help="leave `make demo` and the set-up of vLLM out"
    )
    python = options.parse_args().vllm
    with tempfile.TemporaryDirectory(prefix="vcache-walk-") as folder, ExitStack() as undo:
        walk = Walk(Path(folder), undo)
        walked(walk, python.absolute() if python else None)


if __name__ == "__main__":
    main()
