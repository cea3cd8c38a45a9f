"""`vcache demo`: a real metadata server and two real workers. Each worker retrieves prompts that
the other worker has stored, and checks every byte.

The workers (`worker`) import torch, which takes seconds; this process does only with two linked
GPUs."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from itertools import combinations
from multiprocessing import Pipe
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

from vcache_backend.config import ServerConfig
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.metadata_server.main import Server
from vcache_backend.tables import print_json
from vcache_backend.vram_pool.devices import current_gpu, gpus

PROMPTS, CHUNKS = 8, 8
"""The number of prompts, and of a prompt's chunks."""
DAMAGED = PROMPTS
"""The number of a further prompt with a byte changed on purpose."""
SECONDS = 300.0
"""The deadline of a worker's answer: importing torch can take a minute."""
FOLDER = None if len(gettempdir()) < 70 else "/tmp"
"""The parent of the socket's folder. A socket's path has at most 107 bytes."""
SOCKET = "vcache.sock"


def run(as_json: bool = False) -> int:
    """Run the demo and print the result. Returns the exit code: 0 if every byte was right and the
    changed byte was found, otherwise 1.

    Leaves no process and no file behind, even if killed. Raises VCacheError if the demo cannot
    run."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    if find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")  # before the server starts
    devices = choose_devices()
    print(f"starting a metadata server, and workers on {' and '.join(devices)}", file=sys.stderr)
    result = play(devices)
    if as_json:
        print_json(result)
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):18}  {value}")
        print("Every byte is right, and a wrong one is found." if result["ok"] else "FAILED")
        print("Next: `vcache doctor`, then connect vLLM: docs/vllm/start.md in vcache's repository")
    return 0 if result["ok"] else 1


def choose_devices() -> list[str]:
    """Two GPUs that can read each other's memory, or host memory twice."""
    with suppress(SegmentError):
        for gpu, peer in combinations(gpus(), 2):
            linked = "none" not in (gpu.links[peer.uuid], peer.links[gpu.uuid])
            if linked and gpu.shares_memory and peer.shares_memory and current_gpu() is not None:
                return [f"cuda:{gpu.ordinal}", f"cuda:{peer.ordinal}"]
    return ["host:0", "host:1"]


def play(devices: list[str]) -> dict[str, Any]:
    """Let each worker store half of the prompts, and the other worker retrieve them. The check must
    find the changed byte of another prompt. Returns the fields of `--json`.

    Raises VCacheError if a worker fails."""
    total: Counter[str] = Counter()
    with ExitStack() as undo:
        folder = undo.enter_context(TemporaryDirectory(prefix="vcache-demo-", dir=FOLDER))
        server = Server(ServerConfig(socket=f"{folder}/{SOCKET}"))
        undo.enter_context(ThreadPoolExecutor()).submit(server.run)
        undo.callback(server.stop)
        workers = []
        for number, device in enumerate(devices):
            workers.append(undo.enter_context(WorkerProcess(folder, device, str(number))))
            undo.callback(workers[-1].kill)
        for prompt in range(PROMPTS):
            workers[prompt % 2].ask("store", prompt)
            total.update(workers[1 - prompt % 2].ask("retrieve", prompt))
        workers[0].ask("store", DAMAGED)
        control = workers[1].ask("retrieve", DAMAGED)["wrong"]
    return {
        "ok": total["chunks"] == PROMPTS * CHUNKS and total["wrong"] == 0 and control == 1,
        "devices": devices,
        "chunks_stored": PROMPTS * CHUNKS,
        "chunks_retrieved": total["chunks"],
        "bytes_checked": total["bytes"],
        "wrong_bytes": total["wrong"],
        "changed_byte_found": control == 1,
    }


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker's process, out of reach of Ctrl-C. The process ends with the demo."""

    def __init__(self, *arguments: str) -> None:
        self.pipe, theirs = Pipe()
        command = [sys.executable, "-P", "-m", "vcache_backend.demo.worker", *arguments]
        with theirs:
            super().__init__(command, stdin=theirs.fileno(), start_new_session=True)

    def ask(self, verb: str, prompt: int) -> Any:
        """Let the worker call `verb`, a method of `Worker`. Returns the answer. VCacheError."""
        try:
            self.pipe.send((verb, prompt))
            if self.pipe.poll(SECONDS):
                return self.pipe.recv()
        except (EOFError, OSError) as error:
            raise VCacheError(f"a worker ended with {self.wait()}, see above") from error
        raise VCacheError(f"a worker did not answer in {SECONDS:g} s")
