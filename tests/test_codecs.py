"""Codecs: lossless ones give back every bit, lossy ones stay within their bounds, and no payload can do harm."""

from __future__ import annotations

import sys
import threading

import numpy as np
import pytest
import torch

pytest.importorskip("zstandard")

from hypothesis import given, settings
from hypothesis import strategies as st

from vcache_backend.offload import codecs
from vcache_backend.offload.codecs import Codec, CodecError, Geometry

BF16 = Geometry("bfloat16", 64)
LOSSLESS = ("raw", "zstd", "planes")
LOSSY = ("int8", "fp8")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# Of the largest number of a vector: half a step, and 0.8 % for a scale that was rounded up. int8: 127 steps. fp8: 3 bits.
LARGEST_ERROR = {"int8": 0.5 / 127 * 1.009, "fp8": 1 / 28 * 1.009}
ROUNDING = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-24}
GUARD = 64


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def kv(dtype: str = "bfloat16", vectors: int = 512, head_dim: int = 64, seed: int = 0) -> torch.Tensor:
    """Numbers like those of KV: channels of different size."""
    generator = torch.Generator().manual_seed(seed)
    channels = torch.exp(torch.randn(head_dim, generator=generator))
    return (torch.randn(vectors, head_dim, generator=generator) * channels).to(DTYPES[dtype])


def encoded(codec: Codec, chunk: torch.Tensor) -> torch.Tensor:
    """The payload; nothing is written behind `bound`, nor into the chunk, which others may be reading."""
    bound, before = codec.bound(chunk.numel()), chunk.clone()
    out = torch.full((bound + GUARD,), 0x5A, dtype=torch.uint8)
    size = codec.encode(chunk, out[:bound])
    assert 0 <= size <= bound
    assert torch.equal(chunk, before)
    assert (out[bound:] == 0x5A).all()
    return out[:size].clone()


def decoded(codec: Codec, payload: torch.Tensor, nbytes: int) -> torch.Tensor:
    """The chunk; nothing is written beside it, whatever the payload, nor if it is refused."""
    around = torch.full((nbytes + 2 * GUARD,), 0x5A, dtype=torch.uint8)
    out = around[GUARD : GUARD + nbytes]
    try:
        codec.decode(payload, out)
    finally:
        assert (around[:GUARD] == 0x5A).all()
        assert (around[GUARD + nbytes :] == 0x5A).all()
    return out


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=st.binary(min_size=2, max_size=3000), times=st.integers(1, 5))
@settings(max_examples=60)
def test_a_lossless_codec_gives_back_any_bytes(name: str, data: bytes, times: int) -> None:
    codec = codecs.make(name, BF16)
    chunk = torch.from_numpy(np.frombuffer(data[: len(data) // 2 * 2] * times, np.uint8).copy())
    assert torch.equal(decoded(codec, encoded(codec, chunk), chunk.numel()), chunk)


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_codec_gives_back_every_16_bit_number(name: str) -> None:
    codec = codecs.make(name, BF16)
    chunk = bytes_of(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).repeat(3))
    assert torch.equal(decoded(codec, encoded(codec, chunk), chunk.numel()), chunk)


@pytest.mark.parametrize("name", ["zstd", "planes"])
def test_what_does_not_compress_takes_no_more_than_its_own_bytes(name: str) -> None:
    codec = codecs.make(name, BF16)
    chunk = torch.from_numpy(np.random.default_rng(0).integers(0, 256, 100_000, dtype=np.uint8))
    payload = encoded(codec, chunk)
    assert payload.numel() == codec.bound(chunk.numel()) == chunk.numel()
    assert torch.equal(decoded(codec, payload, chunk.numel()), chunk)


def test_planes_make_kv_smaller_than_zstd_alone() -> None:
    chunk = bytes_of(kv(vectors=20_000))
    sizes = {name: encoded(codecs.make(name, BF16), chunk).numel() / chunk.numel() for name in LOSSLESS}
    assert sizes["raw"] == 1
    assert sizes["planes"] < 0.72
    assert sizes["planes"] < sizes["zstd"] - 0.05


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 127])
def test_a_lossy_codec_stays_within_its_step(name: str, dtype: str, head_dim: int) -> None:
    codec, there = codecs.make(name, Geometry(dtype, head_dim)), kv(dtype, 300, head_dim)
    chunk = bytes_of(there)
    payload = encoded(codec, chunk)
    assert payload.numel() == codec.bound(chunk.numel()) == 300 * (head_dim + 2)
    back = decoded(codec, payload, chunk.numel()).clone().view(DTYPES[dtype]).view(300, head_dim)
    largest = there.double().abs().amax(1, keepdim=True)
    assert ((back.double() - there.double()).abs() / largest).max() <= LARGEST_ERROR[name] + ROUNDING[dtype]


@pytest.mark.parametrize("name", LOSSY)
def test_a_scale_is_of_one_head_of_one_token(name: str) -> None:
    """A huge number costs those beside it their precision, and no others."""
    codec, there = codecs.make(name, BF16), kv()
    huge = there.clone()
    huge[7, 3] = 1e30
    back = [
        decoded(codec, encoded(codec, bytes_of(x)), 2 * x.numel()).clone().view(torch.bfloat16).view(-1, 64)
        for x in (there, huge)
    ]
    others = torch.arange(len(there)) != 7
    assert torch.equal(back[0][others], back[1][others])
    assert not torch.equal(back[0][7], back[1][7])


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_the_ends_of_the_range_survive(name: str, dtype: str) -> None:
    limits = torch.finfo(DTYPES[dtype])
    there = torch.zeros(6, 64, dtype=DTYPES[dtype])
    there[1], there[2, 5], there[3, 5] = -0.0, limits.max, limits.min
    there[4, 5], there[5, :] = limits.smallest_normal, limits.max
    codec = codecs.make(name, Geometry(dtype, 64))
    back = decoded(codec, encoded(codec, bytes_of(there)), bytes_of(there).numel()).clone().view(DTYPES[dtype]).view(6, 64)
    assert back.isfinite().all()
    assert (back[:2] == 0).all()
    assert torch.allclose(back.double(), there.double(), rtol=0.04, atol=float(limits.smallest_normal))


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_what_is_no_number_is_not_written_lossily(name: str, dtype: str, value: float) -> None:
    codec, there = codecs.make(name, Geometry(dtype, 64)), kv(dtype)
    there[-1, -1] = value
    with pytest.raises(CodecError, match=f"KV holds inf or NaN, which {name} cannot write"):
        encoded(codec, bytes_of(there))


def test_fp8_reads_what_torch_reads() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    payload = torch.cat((torch.tensor([1.0], dtype=torch.bfloat16).view(torch.uint8), codes))
    back = decoded(codecs.make("fp8", Geometry("float32", 256)), payload, 1024).clone().view(torch.float32)
    there = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(back[~there.isnan()], there[~there.isnan()])
    assert back[there.isnan()].tolist() == [480.0, -480.0]


@pytest.mark.parametrize("name", codecs.NAMES)
@given(cut=st.integers(0, 4000), more=st.binary(max_size=40), flips=st.lists(st.integers(0, 32_000), max_size=20))
@settings(max_examples=40)
def test_a_damaged_payload_raises_or_gives_other_numbers_and_writes_nowhere_else(
    name: str, cut: int, more: bytes, flips: list[int]
) -> None:
    codec, chunk = codecs.make(name, BF16), bytes_of(kv(vectors=32))
    payload = encoded(codec, chunk)
    damaged = torch.cat((payload[:cut], torch.tensor(list(more), dtype=torch.uint8)))
    for flip in flips:
        if damaged.numel():
            damaged[flip // 8 % damaged.numel()] ^= 1 << (flip % 8)
    try:
        back = decoded(codec, damaged, chunk.numel())
    except CodecError:
        return
    if name in LOSSY:
        assert back.clone().view(torch.bfloat16).isfinite().all()


@pytest.mark.parametrize("name", ["zstd", "planes"])
@pytest.mark.parametrize("nbytes", [4000, 4096, 40_000])
def test_a_frame_of_another_length_is_refused(name: str, nbytes: int) -> None:
    codec = codecs.make(name, BF16)
    payload = encoded(codec, torch.zeros(8192, dtype=torch.uint8))
    with pytest.raises(CodecError):
        decoded(codec, payload, nbytes)


@pytest.mark.parametrize("name", LOSSY)
def test_a_payload_of_another_length_is_refused(name: str) -> None:
    codec, chunk = codecs.make(name, BF16), bytes_of(kv())
    payload = encoded(codec, chunk)
    with pytest.raises(CodecError, match=f"{name} payload has {payload.numel() - 1:,} B, {payload.numel():,} are due"):
        decoded(codec, payload[:-1], chunk.numel())


@pytest.mark.parametrize("name", ["planes", *LOSSY])
@pytest.mark.parametrize("dtype", ["fp8_e4m3", "float8_e4m3fn", "uint8"])
def test_kv_that_is_bytes_already_is_refused_in_one_line(name: str, dtype: str) -> None:
    with pytest.raises(CodecError, match=f"this KV is {dtype}, use raw or zstd") as refused:
        codecs.make(name, Geometry(dtype, 64))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", LOSSY)
def test_chunks_that_are_no_whole_vectors_are_refused(name: str) -> None:
    codec = codecs.make(name, BF16)
    for nbytes in (0, 64, 129):
        with pytest.raises(CodecError, match=f"{nbytes} B are no whole vectors of 64 x 2 B"):
            codec.bound(nbytes)
    with pytest.raises(CodecError, match="needs a head_dim, got 0"):
        codecs.make(name, Geometry("bfloat16", 0))


def test_planes_refuses_half_a_number() -> None:
    for nbytes in (0, 9):
        with pytest.raises(CodecError, match=f"{nbytes} B are no 16-bit numbers"):
            codecs.make("planes", BF16).bound(nbytes)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(CodecError, match="no codec 'gzip'; there are raw, zstd, planes, int8, fp8"):
        codecs.make("gzip", BF16)


def test_without_zstandard_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(CodecError, match=r"pip install 'vcache-backend\[mooncake\]'"):
        codecs.make("planes", BF16)
    assert codecs.make("int8", BF16).name == "int8"


@pytest.mark.parametrize("name", codecs.NAMES)
def test_tensors_of_another_kind_are_refused(name: str) -> None:
    codec, good = codecs.make(name, BF16), torch.zeros(4096, dtype=torch.uint8)
    room = torch.zeros(8192, dtype=torch.uint8)
    for bad in (good.view(torch.int16), good.view(2, -1), room[::2], room[1:4097]):
        with pytest.raises(CodecError, match="must be contiguous uint8 of one dimension on a 16-byte boundary"):
            codec.encode(bad, room)


def test_ids_and_names_are_one_to_one_and_only_two_lose_something() -> None:
    """Ids are in objects that exist: never change one."""
    made = [codecs.make(name, BF16) for name in codecs.NAMES]
    assert [(codec.name, codec.id, codec.lossless) for codec in made] == [
        ("raw", 1, True),
        ("zstd", 2, True),
        ("planes", 3, True),
        ("int8", 4, False),
        ("fp8", 5, False),
    ]


@pytest.mark.parametrize("name", codecs.NAMES)
def test_threads_share_a_codec(name: str) -> None:
    codec, wrong = codecs.make(name, BF16), []
    chunks = [bytes_of(kv(vectors=2000, seed=seed)) for seed in range(4)]
    alone = [encoded(codec, chunk) for chunk in chunks]

    def work(index: int) -> None:
        for _ in range(5):
            payload = encoded(codec, chunks[index])
            if not torch.equal(payload, alone[index]) or codec.lossless > torch.equal(
                decoded(codec, payload, chunks[index].numel()), chunks[index]
            ):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("scale", [float("inf"), float("nan")])
def test_a_scale_that_is_no_number_is_refused(name: str, scale: float) -> None:
    codec, chunk = codecs.make(name, BF16), bytes_of(kv(vectors=32))
    payload = encoded(codec, chunk)
    payload[14:16] = torch.tensor([scale], dtype=torch.bfloat16).view(torch.uint8)
    with pytest.raises(CodecError, match=f"{name} payload holds a scale that is no number"):
        decoded(codec, payload, chunk.numel())


@pytest.mark.parametrize("name", LOSSY)
def test_a_vector_of_zeros_is_written_as_zeros(name: str) -> None:
    """Not as 0 ÷ 0."""
    codec = codecs.make(name, BF16)
    assert (encoded(codec, torch.zeros(4 * 128, dtype=torch.uint8))[8:] == 0).all()
