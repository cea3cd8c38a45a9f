"""`vcache demo`: a real metadata server and two real workers. Each worker retrieves what the other
has stored, and every byte is checked.

Only the workers (`demo_worker`) import torch, which takes seconds: not the server, and this process
only if there are two GPUs that are linked."""

from __future__ import annotations

import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from itertools import combinations
from typing import Any

from vcache_backend.config import ByteSize, ServerConfig
from vcache_backend.errors import SegmentError, VCacheError
from vcache_backend.metadata_server.server import Server
from vcache_backend.vram_pool.devices import current_gpu, gpus

PROMPTS, CHUNKS, CHUNK_SIZE, BLOCK_SIZE = 8, 8, 256, 16
DAMAGED = PROMPTS
"""The number of one more prompt, of which a byte is changed on purpose."""
TOKENS = CHUNKS * CHUNK_SIZE + BLOCK_SIZE // 2
"""Of a prompt: whole chunks and half a block, which is not stored."""
BLOCKS = -(-TOKENS // BLOCK_SIZE)
SHAPES = {"host": (4, 2, 64), "cuda": (16, 8, 64)}
"""Layers, KV heads, size of a head. On GPUs those of Llama-3.2-1B."""
START_SECONDS = 300.0
"""The most that the start of a child may take: importing torch can take a minute."""
SECONDS = 60.0
"""The most that an answer of a child that has started may take."""
END_SECONDS = 5.0
"""The most that the end of a child may take."""
FOLDER = None if len(tempfile.gettempdir()) < 70 else "/tmp"
"""Where the socket's folder is made. A socket's path has at most 107 bytes."""
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
    ok, nbytes, checked = result["ok"], result["chunk_bytes"], ByteSize(result["bytes_checked"])
    if as_json:
        print(json.dumps(result, indent=2))
        return 0 if ok else 1
    speed = f"{result['chunks_retrieved']} chunks, {checked.about}, {result['gb_per_s']:.2f} GB/s"
    rows = {
        "workers": " and ".join(devices),
        "stored": f"{result['chunks_stored']} chunks of {ByteSize(nbytes).about}",
        "retrieved by the other worker": speed,
        "wrong bytes": f"{result['wrong_bytes']:,} of {checked:,}",
        "one byte changed on purpose": "found" if result["control"] else "NOT FOUND",
    }
    for name, value in rows.items():
        print(f"{name:29}  {value}")
    print("Every byte is right, and a wrong one is found." if ok else "FAILED", NEXT, sep="\n")
    return 0 if ok else 1


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

    Raises VCacheError if a process fails."""
    answers = []
    with ExitStack() as undo:
        socket = undo.enter_context(Child("demo")).answer(START_SECONDS)
        workers = [
            undo.enter_context(Child("demo_worker", socket, device, str(number)))
            for number, device in enumerate(devices)
        ]
        for worker in workers:
            worker.answer(START_SECONDS)
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
        "chunk_bytes": chunk_bytes(devices[0]),
        "bytes_checked": chunks * chunk_bytes(devices[0]),
        "wrong_bytes": wrong,
        "control": control == 1,
        "gb_per_s": chunks * chunk_bytes(devices[0]) / seconds / 1e9,
    }


def chunk_bytes(device: str) -> int:
    """Bytes of a chunk's KV: K and V, bf16, all layers."""
    return CHUNK_SIZE * 2 * 2 * math.prod(SHAPES[device[:4]])


class Child(subprocess.Popen[bytes]):
    """A process of the demo, ended with the block, out of reach of Ctrl-C."""

    def __init__(self, module: str, *arguments: str) -> None:
        self.words, pipe = " ".join([module, *arguments]), subprocess.PIPE
        command = [sys.executable, "-m", f"vcache_backend.{module}", *arguments]
        super().__init__(
            command,
            stdin=pipe,
            stdout=pipe,
            bufsize=0,
            start_new_session=True,
            preexec_fn=_end_with_the_demo,
        )

    def ask(self, verb: str, prompt: int) -> Any:
        """Have a worker do `verb`, a method of `Worker`. Returns its answer. Raises VCacheError."""
        assert self.stdin is not None
        with suppress(BrokenPipeError):  # it has ended; `answer` says so
            self.stdin.write(json.dumps([verb, prompt]).encode() + b"\n")
        return self.answer()

    def answer(self, seconds: float = SECONDS) -> Any:
        """Wait for the next line that the process prints. Raises VCacheError."""
        assert self.stdout is not None
        if not select.select([self.stdout], [], [], seconds)[0]:
            raise VCacheError(f"no answer in {seconds:g} s: {self.words}")
        if not (line := self.stdout.readline()):
            raise VCacheError(f"ended with {self.wait()}, for the reason above: {self.words}")
        return json.loads(line)

    def __exit__(self, *_: object) -> None:
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.wait(END_SECONDS)
        self.kill()
        super().__exit__(None, None, None)


# ---- in the children


def _end_with_the_demo() -> None:
    """Have this process end if the demo is killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def say(answer: object) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


def main() -> None:
    """Run the server's process until SIGTERM, in a folder of its own, which it removes. It says
    where it serves."""
    signal.signal(signal.SIGTERM, _end_once)
    with tempfile.TemporaryDirectory(prefix="vcache-demo-", dir=FOLDER) as folder:
        socket = f"{folder}/vcache.sock"
        server = Server(ServerConfig(socket=socket))
        say(socket)
        server.run()


def _end_once(*_: object) -> None:
    """Leave all blocks. A second signal would keep the folder from being removed."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit()


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the demo has ended meanwhile
        main()
