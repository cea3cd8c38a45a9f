"""Codecs of the offload tier: one byte a number stays within its bounds, and what cannot be written
is refused.
"""

from __future__ import annotations

import pytest
import torch

from vcache_backend.offload import codecs
from vcache_backend.offload.codecs import Codec, CodecError

NAMES = ("int8", "fp8")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of the largest number of a vector: half a step, and 0.8 % for a scale that was rounded up. int8:
# 127 steps. fp8: 3 bits.
LARGEST_ERROR = {"int8": 0.5 / 127 * 1.009, "fp8": 1 / 28 * 1.009}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def codec(name: str, dtype: str = "bfloat16", head_dim: int = 64) -> Codec:
    return codecs.make(name, dtype, head_dim)


def kv(dtype: str = "bfloat16", vectors: int = 512, head_dim: int = 64) -> torch.Tensor:
    """Numbers like those of KV: channels of different size."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.exp(torch.randn(head_dim, generator=generator))
    return (torch.randn(vectors, head_dim, generator=generator) * channels).to(DTYPES[dtype])


def through(made: Codec, there: torch.Tensor) -> torch.Tensor:
    """The numbers, encoded and decoded; nothing is written beside the chunk or the payload, nor
    into what is read.
    """
    chunk = there.contiguous().view(-1).view(torch.uint8)
    before, size = chunk.clone(), made.payload_bytes(chunk.numel())
    around = torch.full((size + 128,), 0x5A, dtype=torch.uint8, device=there.device)
    back = torch.full((chunk.numel() + 128,), 0x5A, dtype=torch.uint8, device=there.device)
    made.encode(chunk, around[64 : 64 + size])
    made.decode(around[64 : 64 + size].clone(), back[64 : 64 + chunk.numel()])
    assert torch.equal(chunk, before)
    for guarded in (around, back):
        assert (guarded[:64] == 0x5A).all()
        assert (guarded[-64:] == 0x5A).all()
    return back[64:-64].clone().view(there.dtype).view(there.shape)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 127])
def test_every_number_stays_within_its_step(
    name: str, dtype: str, head_dim: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also over several pieces, of which the last is smaller."""
    monkeypatch.setattr(codecs, "PIECE_NUMBERS", 100 * head_dim)
    there = kv(dtype, 250, head_dim).to(device)
    back = through(codec(name, dtype, head_dim), there)
    largest = there.double().abs().amax(1, keepdim=True)
    error = (back.double() - there.double()).abs() / largest
    assert error.max() <= LARGEST_ERROR[name] + ROUNDING[dtype]


@pytest.mark.parametrize("name", NAMES)
def test_a_scale_is_of_one_head_of_one_token(name: str) -> None:
    """A huge number costs those beside it their precision, and no others."""
    there = kv()
    huge = there.clone()
    huge[7, 3] = 1e30
    back = [through(codec(name), numbers) for numbers in (there, huge)]
    others = torch.arange(len(there)) != 7
    assert torch.equal(back[0][others], back[1][others])
    assert not torch.equal(back[0][7], back[1][7])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_ends_of_the_range_survive(name: str, dtype: str) -> None:
    limits = torch.finfo(DTYPES[dtype])
    there = torch.zeros(6, 64, dtype=DTYPES[dtype])
    there[1], there[2, 5], there[3, 5] = -0.0, limits.max, limits.min
    there[4, 5], there[5, :] = limits.smallest_normal, limits.max
    back = through(codec(name, dtype), there)
    assert back.isfinite().all()
    assert (back[:2] == 0).all()
    smallest = float(limits.smallest_normal)
    assert torch.allclose(back.double(), there.double(), rtol=0.04, atol=smallest)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_is_not_written(name: str, value: float, device: str) -> None:
    for dtype in DTYPES:
        there = kv(dtype).to(device)
        there[-1, -1] = value
        with pytest.raises(CodecError, match=f"KV holds inf or NaN, which {name} cannot write"):
            through(codec(name, dtype), there)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_writes_and_reads_what_a_cpu_does(name: str) -> None:
    """A GPU's quotients may differ in their last bit, and with them an fp8 code by one step. What
    is read is the same to the bit.
    """
    there, made = kv(), codec(name)
    payloads, read = [], []
    for device in ("cpu", "cuda:0"):
        chunk = there.to(device).view(-1).view(torch.uint8)
        payload = torch.empty(made.payload_bytes(chunk.numel()), dtype=torch.uint8, device=device)
        made.encode(chunk, payload)
        payloads.append(payload.cpu())
        back = torch.empty_like(chunk)
        made.decode(payloads[0].to(device), back)
        read.append(back.cpu())
    split = len(payloads[0]) - there.numel()
    assert torch.equal(payloads[0][:split], payloads[1][:split])
    steps = (payloads[0][split:].to(torch.int16) - payloads[1][split:].to(torch.int16)).abs()
    assert steps.max() <= (name == "fp8")
    assert steps.count_nonzero() <= 0.01 * len(steps)
    assert torch.equal(*read)


def test_the_format_is_what_objects_have_that_exist() -> None:
    """Scales, then bytes: another program reads them. Never change an id."""
    assert codecs.make("raw", "uint8", 0) is None
    assert (codecs.RAW_ID, codec("int8").id, codec("fp8").id) == (1, 4, 5)
    there = torch.tensor([[127.0, -64.0, 1.0, 0.0], [0.5, 0.25, 0.0, -0.5]], dtype=torch.bfloat16)
    payload = torch.empty(12, dtype=torch.uint8)
    codec("int8", head_dim=4).encode(there.view(-1).view(torch.uint8), payload)
    scale = torch.tensor([1.0, 0.00396728515625], dtype=torch.bfloat16)
    assert torch.equal(payload[:4].view(torch.bfloat16), scale)
    assert payload[4:].view(torch.int8).tolist() == [127, -64, 1, 0, 126, 63, 0, -126]


@pytest.mark.parametrize("name", NAMES)
def test_kv_that_is_no_whole_vectors_of_numbers_is_refused_in_one_line(name: str) -> None:
    for dtype in ("fp8_e4m3", "float8_e4m3fn", "uint8"):
        with pytest.raises(CodecError, match=f"KV is {dtype}, use raw"):
            codecs.make(name, dtype, 64)
    for nbytes in (0, 64, 129):
        with pytest.raises(CodecError, match=f"{nbytes} B are not whole vectors of 64 x 2 B"):
            codec(name).payload_bytes(nbytes)
    with pytest.raises(CodecError, match="needs a head_dim, got 0"):
        codec(name, head_dim=0)
