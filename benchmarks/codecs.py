"""What each codec of the offload tier does to made-up KV: size, speed on one core and on the GPU, error."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from vcache_backend.offload.codecs import make

from .results import Row, row

HEAD_DIM = 128
NBYTES = 32 << 20
CODECS = ("raw", "int8", "fp8")
RUNS = 7


def run(nbytes: int = NBYTES) -> list[Row]:
    """`codec_NAME` (ratio), `..._encode`, `..._decode` (against raw, a copy), `..._error`; on a GPU with `_gpu` after the name."""
    threads, rows = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for device, suffix in (("cpu", ""), ("cuda", "_gpu")):
            if device == "cpu" or torch.cuda.is_available():
                rows += _rows(made_up(nbytes).to(device), suffix)
    finally:
        torch.set_num_threads(threads)
    return rows


def made_up(nbytes: int) -> torch.Tensor:
    """Normal numbers, a scale for each channel of 8 heads, and one channel in 64 ten times as large, as K has them."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.exp(0.5 * torch.randn(8 * HEAD_DIM, generator=generator))
    channels[torch.randperm(len(channels), generator=generator)[: len(channels) // 64]] *= 10
    numbers = torch.randn(nbytes // (2 * len(channels)), len(channels), generator=generator) * channels
    return numbers.bfloat16().view(-1).view(torch.uint8)


def _rows(chunk: torch.Tensor, suffix: str) -> list[Row]:
    rows: list[Row] = []
    raw: list[list[float]] = []
    for name in CODECS:
        case = f"codec_{name}{suffix}"
        size, back, speeds = _through(name, chunk)
        raw = raw or speeds
        rows.append(row(case, "x", [chunk.numel() / size], 1.0, what="bytes of KV for each byte of payload; made-up KV"))
        for verb, mine, copies in zip(("encode", "decode"), speeds, raw, strict=True):
            rows.append(row(f"{case}_{verb}", "GB/s", mine, copies, what=f"{verb} on one core or GPU; reference: a copy"))
        there, got = (part.view(torch.bfloat16).float() for part in (chunk, back))
        level, apart = there.square().mean().sqrt(), (there - got).abs()
        mean = float(apart.square().mean().sqrt() / level)
        what = f"largest error ÷ root mean square of the KV; the error's root mean square is {mean:.2%}"
        rows.append(row(f"{case}_error", "x", [float(apart.max() / level)], 1.0, what=what))
    return rows


def _through(name: str, chunk: torch.Tensor) -> tuple[int, torch.Tensor, list[list[float]]]:
    """The payload's size, what comes back, and GB/s of encoding and decoding."""
    codec, back = make(name, "bfloat16", HEAD_DIM), torch.zeros_like(chunk)
    size = chunk.numel() if codec is None else codec.payload_bytes(chunk.numel())
    payload = torch.zeros(size, dtype=torch.uint8, device=chunk.device)
    encode = payload.copy_ if codec is None else lambda there: codec.encode(there, payload)
    decode = back.copy_ if codec is None else lambda there: codec.decode(there, back)
    speeds = [_speeds(lambda: encode(chunk), chunk), _speeds(lambda: decode(payload), chunk)]
    return size, back, speeds


def _speeds(call: Callable[[], object], chunk: torch.Tensor) -> list[float]:
    seconds = []
    for _ in range(RUNS):
        begun = time.perf_counter()
        call()
        if chunk.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    return [chunk.numel() / second / 1e9 for second in seconds[1:]]
