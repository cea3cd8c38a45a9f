"""`vcache doctor --model`: whether vLLM's connector caches a model, and how many tokens a pool of
memory holds.

Asks the installed vLLM, in a child process: see `integration.vllm.model.report`. Needs no weights,
downloads nothing, and runs no code of the model."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec

from vcache_backend import config as configuration
from vcache_backend.config import ByteSize, Config
from vcache_backend.doctor import Finding, fail, ok
from vcache_backend.errors import MAX_LINE_CHARS, printable

_KINDS = {
    "full": "of full attention",
    "window": "with a window of {:,} tokens",
    "state": "with a state",
    "local": "of chunked local attention",
    "again": "whose blocks no hit needs",
}


class Layers(msgspec.Struct, frozen=True):
    """`count` layers of a kind: `full`, `window` of `window` tokens, `state`, `local`, `again` (see
    `groups.computed_again`), or vLLM's name. block: tokens of a block."""

    kind: str
    window: int
    count: int
    block: int = 0


class ModelReport(msgspec.Struct, frozen=True):
    """The answer of vLLM and our connector about a model, with one worker.

    vllm: the version. dtype: of the KV cache. in_place: whether instances share in place with these
    settings. hits: end at multiples of this many tokens, in vLLM's own prefix cache and in place.
    refused: why nothing is cached, and what to change, or empty. chunk_size: in tokens.
    chunk_bytes, state_bytes: of a pool's chunk, and of a state beside it; 0 if refused, or if no
    pool can hold them. trouble: why vLLM does not know the model or cannot be asked; then other
    fields are missing."""

    vllm: str = ""
    architecture: str = ""
    dtype: str = ""
    layers: list[Layers] = []
    hits: int = 0
    refused: str = ""
    in_place: bool = False
    chunk_size: int = 0
    chunk_bytes: int = 0
    state_bytes: int = 0
    trouble: str = ""

    def __str__(self) -> str:
        layers = ", ".join(
            f"{alike.count} layers {_KINDS.get(alike.kind, alike.kind).format(alike.window)}"
            for alike in self.layers
        )
        return f"{printable(self.architecture)}: {layers or 'no KV cache'}"


def ask(name: str, config: Config) -> ModelReport:
    """Ask vLLM about a model (name: as `vllm serve` takes it), in some 20 s."""
    program = [sys.executable, "-P", "-m", "vcache_backend.integration.vllm.model.report"]
    # A missing `PYTHONHASHSEED` is a separate finding.
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    quiet |= {"PYTHONHASHSEED": "0"}
    try:
        asked = subprocess.run(
            [*program, name],
            input=msgspec.json.encode(configuration.dump(config)),
            capture_output=True,
            timeout=300,
            env={**os.environ, **quiet},  # noqa: TID251 - handed on, not read
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return ModelReport(trouble=f"vLLM could not be asked: {error}")
    try:
        return msgspec.json.decode(asked.stdout, type=ModelReport)
    except msgspec.DecodeError:
        lines = asked.stderr.decode(errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        return ModelReport(trouble=f"vLLM ended with code {asked.returncode}: {last}")


def check_model(name: str, config: Config) -> Iterator[Finding]:
    """Say whether a model is cached, the size of its chunks, and how many tokens a pool holds."""
    shown = printable(name)
    if find_spec("vllm") is None:
        lacks = "vLLM is not installed here, and only vLLM knows its models"
        yield fail("model", f"{shown}: {lacks}", "run this in vLLM's environment")
        return
    model = ask(name, config)
    if model.trouble:
        why = printable(" ".join(model.trouble.split()), MAX_LINE_CHARS)
        yield fail("model", f"{shown}: {why}", "start vLLM with it and see its log")
        return
    what = f"{shown}, vLLM {model.vllm}, {model}"
    if model.refused:
        yield fail("model", f"{what}: nothing of it is cached: {model.refused}")
        return
    way = f"in place, hits of {model.hits} tokens' grain" if model.in_place else "through a pool"
    yield ok("model", f"{what}: shared {way}")
    if model.chunk_bytes:
        yield from _sizes(model, config)


def _sizes(model: ModelReport, config: Config) -> Iterator[Finding]:
    """Say how large the chunks are, and what a pool holds."""
    size, lent, whole = model.chunk_size, config.pool.lent, ByteSize(model.chunk_bytes)
    said = f"{whole // size:,} B a token in {model.dtype}, {whole.about} a chunk of {size} tokens"
    said += ", all ranks together"
    if model.state_bytes:
        said += f"; a state beside it takes {ByteSize(model.state_bytes).about}"
    yield ok("chunks", said)
    said = f"1 GiB of pool holds {(1 << 30) // whole * size:,} tokens; pool.segment_bytes: {lent}"
    yield ok("pool", f"{said} holds {lent // whole * size:,} a worker and rank")
