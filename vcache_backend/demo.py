"""`vcache demo`: a real metadata server and two real workers. Each worker retrieves what the other
has stored, and every byte is checked.

Only the workers (`demo_worker`) import torch, which takes seconds: this process does only if there
are two GPUs that are linked."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from itertools import combinations
from multiprocessing import Pipe
from threading import Thread
from typing import Any

from vcache_backend.config import ServerConfig
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.metadata_server.server import Server
from vcache_backend.vram_pool.devices import current_gpu, gpus

PROMPTS, CHUNKS = 8, 8
"""How many prompts there are, and a prompt's chunks."""
DAMAGED = PROMPTS
"""The number of one more prompt, of which a byte is changed on purpose."""
START_SECONDS = 300.0
"""The most that the start of a worker may take: importing torch can take a minute."""
SECONDS = 60.0
"""The most that an answer of a worker that has started may take."""
FOLDER = None if len(tempfile.gettempdir()) < 70 else "/tmp"
"""Where the socket's folder is made. A socket's path has at most 107 bytes."""
SOCKET = "vcache.sock"
NEXT = "Next: `vcache doctor`, then connect vLLM: docs/vllm/start.md or docs/lmcache.md"


def run(as_json: bool = False) -> int:
    """Run the demo and print its result. Returns the exit code: 0 if every byte was right and the
    changed byte was found, else 1.

    Leaves no process and no file behind, even if it is killed. Raises VCacheError if it cannot
    run."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if find_spec("torch") is None:
        raise ModuleNotFoundError(name="torch")  # before the server starts
    devices = choose_devices()
    print(f"starting a metadata server, and workers on {' and '.join(devices)}", file=sys.stderr)
    result = play(devices)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        for name, value in result.items():
            print(f"{name.replace('_', ' '):18}  {value}")
        said = "Every byte is right, and a wrong one is found." if result["ok"] else "FAILED"
        print(said, NEXT, sep="\n")
    return 0 if result["ok"] else 1


def choose_devices() -> list[str]:
    """Two GPUs that can read each other's memory, else host memory twice."""
    try:
        sharing = [gpu for gpu in gpus() if gpu.shares_memory]
    except SegmentError:
        sharing = []
    for gpu, peer in combinations(sharing, 2):
        links = gpu.links.get(peer.uuid, "none"), peer.links.get(gpu.uuid, "none")
        if "none" not in links and current_gpu() is not None:
            return [f"cuda:{gpu.ordinal}", f"cuda:{peer.ordinal}"]
    return ["host:0", "host:1"]


def play(devices: list[str]) -> dict[str, Any]:
    """Have each worker store half of the prompts, and the other worker retrieve them. In another
    prompt one byte is changed: the check must find it. Returns the fields of `--json`.

    Raises VCacheError if a worker fails."""
    answers = []
    with ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="vcache-demo-", dir=FOLDER))
        server = Server(ServerConfig(socket=f"{folder}/{SOCKET}"))
        serving = Thread(target=server.run, daemon=True)
        serving.start()
        undo.callback(serving.join)
        undo.callback(server.stop)
        workers = [
            undo.enter_context(WorkerProcess(folder, device, number))
            for number, device in enumerate(devices)
        ]
        chunk_bytes = max(worker.answer(START_SECONDS) for worker in workers)
        for prompt in range(PROMPTS):
            workers[prompt % 2].ask("store", prompt)
            answers.append(workers[1 - prompt % 2].ask("retrieve", prompt))
        workers[0].ask("store", DAMAGED)
        control = workers[1].ask("retrieve", DAMAGED)["wrong"]
    chunks, wrong, seconds = (
        sum(answer[name] for answer in answers) for name in ("chunks", "wrong", "seconds")
    )
    return {
        "ok": chunks == PROMPTS * CHUNKS and wrong == 0 and control == 1,
        "devices": devices,
        "chunks_stored": PROMPTS * CHUNKS,
        "chunks_retrieved": chunks,
        "chunk_bytes": chunk_bytes,
        "bytes_checked": chunks * chunk_bytes,
        "wrong_bytes": wrong,
        "changed_byte_found": control == 1,
        "gb_per_s": round(chunks * chunk_bytes / seconds / 1e9, 2),
    }


class WorkerProcess(subprocess.Popen[bytes]):
    """A worker's process, out of reach of Ctrl-C. It ends with the block or the demo."""

    def __init__(self, folder: str, device: str, number: int) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            module = [sys.executable, "-m", "vcache_backend.demo_worker"]
            arguments = [str(theirs.fileno()), folder, device, str(number)]
            fds = [theirs.fileno()]
            super().__init__([*module, *arguments], pass_fds=fds, start_new_session=True)

    def ask(self, verb: str, prompt: int) -> Any:
        """Have the worker do `verb`, a method of `Worker`. Returns its answer. VCacheError."""
        with suppress(OSError):  # it has ended; `answer` says so
            self.pipe.send((verb, prompt))
        return self.answer()

    def answer(self, seconds: float = SECONDS) -> Any:
        """Wait for the next answer. Raises VCacheError."""
        try:
            if self.pipe.poll(seconds):
                return self.pipe.recv()
        except (EOFError, OSError) as error:
            said = f"a worker ended with {self.wait()}, for the reason above"
            raise VCacheError(said) from error
        raise VCacheError(f"a worker did not answer in {seconds:g} s")

    def __exit__(self, *_: object) -> None:
        self.kill()
        super().__exit__(None, None, None)
