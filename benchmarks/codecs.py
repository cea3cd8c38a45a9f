"""What each codec of the offload tier does: size, speed, error; and the links on which it pays.

    python3 -m benchmarks.codecs [--kv FILE.npy --head-dim N] [--device cuda] [--logprobs] [--json] [--out FILE]

One thread on the CPU, GB of KV a second. FILE.npy holds real KV: uint16 (the bits of bfloat16) or float16, the innermost dimension a
head's vector. Without one KV is made up, and the table says so: normal numbers, channels of different size and a few large ones;
ratios of lossless codecs on it are not those of a model.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from vcache_backend.offload.codecs import NAMES, Codec, CodecError, Geometry, make

from .break_even import LLAMA_8B, Line, Model, Speed, needed_bandwidth, table
from .codec_logprobs import Difference, differences
from .results import Row, document, row, write

HEAD_DIM = 128
NBYTES = 32 << 20
RUNS = 7
CORES = (1, 8)


class Sample(NamedTuple):
    """Bytes of KV, what they are, and where they are from."""

    chunk: torch.Tensor
    geometry: Geometry
    origin: str


class Measured(NamedTuple):
    """Speeds in bytes of KV a second, one a run. Errors relative to the root mean square of the KV; 0 where it is lossless."""

    name: str
    ratio: float
    encode: list[float]
    decode: list[float]
    largest_error: float
    mean_error: float


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.codecs", description=__doc__)
    parser.add_argument("--kv", type=Path, help="real KV, .npy")
    parser.add_argument("--head-dim", type=int, default=HEAD_DIM)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: int8 and fp8 there as well")
    parser.add_argument("--logprobs", action="store_true", help="the effect on a model's log-probabilities; needs transformers")
    parser.add_argument("--model", default="", help="for --logprobs: path of a model, instead of random weights")
    parser.add_argument("--token-bytes", type=int, help="KV of one token, for the break-even table")
    parser.add_argument("--prefill", metavar="TOKENS=MS,...", help="time to compute prompts, such as 1024=26,4096=96")
    parser.add_argument("--json", action="store_true", help="print the result file instead of tables")
    parser.add_argument("--out", type=Path, help="result file")
    parser.add_argument("--commit", default="", help="the commit measured, where git cannot tell")
    options = parser.parse_args(arguments)
    sample = from_file(options.kv, options.head_dim) if options.kv else made_up(options.head_dim)
    measured = measure(sample, "cpu")
    on_gpu = measure(sample, "cuda") if options.device == "cuda" else []
    effect = differences(NAMES, options.model) if options.logprobs else {}
    rows = [*rows_of(measured, sample, effect), *rows_of(on_gpu, sample, {}, "_gpu")]
    model = _model(options.token_bytes, options.prefill)
    lines = table([speed(one) for one in measured], model, CORES)
    result = document(rows, options.commit) | {"kv": sample.origin, "break_even": _plain(lines, model)}
    if options.out:
        write(options.out, result)
    if options.json:
        print(json.dumps(result, indent=2))
    else:
        _show(sample, measured, on_gpu, effect, lines, model)
    return 0


def run() -> list[Row]:
    """For `vcache bench`: made-up KV, without logprobs."""
    sample = made_up()
    return rows_of(measure(sample, "cpu"), sample, {})


def made_up(head_dim: int = HEAD_DIM, nbytes: int = NBYTES) -> Sample:
    """Normal numbers, a scale for each channel of 8 heads, and one channel in 64 ten times as large, as K has them."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.exp(0.5 * torch.randn(8 * head_dim, generator=generator))
    channels[torch.randperm(len(channels), generator=generator)[: len(channels) // 64]] *= 10
    tokens = nbytes // (2 * len(channels))
    numbers = (torch.randn(tokens, len(channels), generator=generator) * channels).bfloat16()
    return Sample(numbers.view(-1).view(torch.uint8), Geometry("bfloat16", head_dim), "made up (normal numbers, scaled channels)")


def from_file(path: Path, head_dim: int, nbytes: int = NBYTES) -> Sample:
    """The first `nbytes` of it. ValueError for another kind of file."""
    there = np.load(path, mmap_mode="r")
    kinds = {"uint16": "bfloat16", "float16": "float16"}
    if there.dtype.name not in kinds:
        raise ValueError(f"{path} holds {there.dtype}; uint16 (bits of bfloat16) or float16 is needed")
    count = min(there.size, nbytes // 2) // head_dim * head_dim
    numbers = there.reshape(-1)[:count].copy()
    return Sample(torch.from_numpy(numbers.view(np.uint8)), Geometry(kinds[there.dtype.name], head_dim), str(path))


def measure(sample: Sample, device: str) -> list[Measured]:
    """Every codec that runs there, one after the other, on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        chunk = sample.chunk.to(device)
        codecs = [make(name, sample.geometry) for name in NAMES]
        return [
            _measured(codec, chunk, sample.geometry)
            for codec in codecs
            if device == "cpu" or codec.name not in ("zstd", "planes")
        ]
    finally:
        torch.set_num_threads(threads)


def speed(measured: Measured) -> Speed:
    """What reading it costs: raw is read into its place."""
    return Speed(measured.name, measured.ratio, float("inf") if measured.name == "raw" else float(np.median(measured.decode)))


def rows_of(measured: Sequence[Measured], sample: Sample, effect: dict[str, Difference], suffix: str = "") -> list[Row]:
    """`codec_NAME` (ratio), `..._encode`, `..._decode` (against a copy of the bytes), `..._error`, `..._logprob`."""
    rows: list[Row] = []
    raw = next((one for one in measured if one.name == "raw"), None)
    for one in measured:
        case = f"codec_{one.name}{suffix}"
        rows.append(row(case, "x", [one.ratio], 1.0, what=f"bytes of KV for each byte of payload; KV: {sample.origin}"))
        for verb, figures, copies in (("encode", one.encode, raw and raw.encode), ("decode", one.decode, raw and raw.decode)):
            samples = [figure / 1e9 for figure in figures]
            against = [figure / 1e9 for figure in copies or figures]
            rows.append(row(f"{case}_{verb}", "GB/s", samples, against, what=f"{verb} on one core or GPU; reference: a copy"))
        what = f"largest error ÷ root mean square of the KV; the error's root mean square is {one.mean_error:.2%}"
        rows.append(row(f"{case}_error", "x", [one.largest_error], 1.0, what=what))
        if one.name in effect:
            there = effect[one.name]
            what = f"largest difference of logprobs; mean {there.mean:.4f}, greedy tokens that stay {there.same_tokens:.1%}"
            rows.append(row(f"{case}_logprob", "nat", [there.largest], 1.0, what=what))
    return rows


def _measured(codec: Codec, chunk: torch.Tensor, geometry: Geometry) -> Measured:
    payload = torch.zeros(codec.bound(chunk.numel()), dtype=torch.uint8, device=chunk.device)
    back = torch.zeros_like(chunk)
    size = codec.encode(chunk, payload)
    encode = _speeds(lambda: codec.encode(chunk, payload), chunk)
    decode = _speeds(lambda: codec.decode(payload[:size], back), chunk)
    if codec.lossless and not torch.equal(back, chunk):
        raise CodecError(f"{codec.name} did not give back the bytes")
    there, got = (part.view(getattr(torch, geometry.dtype)).float() for part in (chunk, back))
    size_of = there.square().mean().sqrt()
    apart = (there - got).abs()
    largest, mean = float(apart.max() / size_of), float(apart.square().mean().sqrt() / size_of)
    return Measured(codec.name, chunk.numel() / size, encode, decode, largest, mean)


def _speeds(call: Callable[[], object], chunk: torch.Tensor) -> list[float]:
    seconds = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        call()
        if chunk.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return [chunk.numel() / second for second in seconds[1:]]


def _model(token_bytes: int | None, prefill: str | None) -> Model:
    if token_bytes is None and prefill is None:
        return LLAMA_8B
    if token_bytes is None or prefill is None:
        raise SystemExit("--token-bytes and --prefill go together")
    times = dict(pair.split("=", 1) for pair in prefill.split(","))
    return Model("as given", token_bytes, {int(tokens): float(ms) / 1e3 for tokens, ms in times.items()})


def _plain(lines: Sequence[Line], model: Model) -> dict[str, Any]:
    """Infinity has no JSON: None."""
    finite = [
        one._asdict() | {"recompute_below": {str(k): v if v < float("inf") else None for k, v in one.recompute_below.items()}}
        for one in lines
    ]
    min_bandwidth = {str(tokens): figure for tokens, figure in needed_bandwidth(model).items()}
    return {"model": model.name, "token_bytes": model.token_bytes, "min_bandwidth": min_bandwidth, "codecs": finite}


def _show(
    sample: Sample,
    measured: Sequence[Measured],
    on_gpu: Sequence[Measured],
    effect: dict[str, Difference],
    lines: Sequence[Line],
    model: Model,
) -> None:
    console = Console()
    console.width = max(console.width, 120)
    console.print(
        f"KV: {sample.origin}, {sample.geometry.dtype}, head_dim {sample.geometry.head_dim}, {sample.chunk.numel() >> 20} MiB"
    )
    columns = ("codec", "ratio", "encode GB/s", "decode GB/s", "largest error", "rms error", "logprob max", "mean", "same tokens")
    shown = _table(columns)
    for where, codecs in (("", measured), (" (GPU)", on_gpu)):
        for one in codecs:
            figures = [f"{one.ratio:.3f}", *(f"{np.median(speeds) / 1e9:.2f}" for speeds in (one.encode, one.decode))]
            figures += [f"{one.largest_error:.4f}", f"{one.mean_error:.2%}"]
            there = effect.get(one.name) if not where else None
            figures += [f"{there.largest:.4f}", f"{there.mean:.4f}", f"{there.same_tokens:.1%}"] if there else ["", "", ""]
            shown.add_row(one.name + where, *figures)
    console.print(shown)
    console.print(f"\nLinks in GB/s, {model.name}: below which it beats raw; below which computing so many tokens is faster")
    even = _table(("codec", "cores", "beats raw below", *(f"{tokens:,}" for tokens in model.prefill_seconds)))
    for entry in lines:
        below = [f"{figure / 1e9:.2f}" if figure < float("inf") else "any" for figure in entry.recompute_below.values()]
        even.add_row(entry.codec, str(entry.cores), f"{entry.pays_below / 1e9:.2f}" if entry.pays_below else "", *below)
    console.print(even)
    needed = ", ".join(f"{figure / 1e9:.1f} GB/s for {tokens:,} tokens" for tokens, figure in needed_bandwidth(model).items())
    console.print(f"\noffload.min_bandwidth, whatever the codec: {needed}")


def _table(columns: Sequence[str]) -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        shown.add_column(column, justify="left" if column == "codec" else "right", no_wrap=True)
    return shown


if __name__ == "__main__":
    raise SystemExit(main())
