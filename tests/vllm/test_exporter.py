"""The context in which vLLM makes its KV cache: what becomes exportable, and that nothing of ours
raises into vLLM. The memory itself: test_exports. In real vLLM: test_real_in_place."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest

pytest.importorskip("vllm.distributed.kv_events", reason="vLLM is not installed")

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from vcache_backend.errors import LayoutError, SegmentError
from vcache_backend.integration.vllm.worker.exporter import Exporter


def kv(device: str = "cpu") -> torch.Tensor:
    """As vLLM makes its KV cache."""
    return torch.zeros((1 << 20) + 100, dtype=torch.int8, device=torch.device(device))


def test_vllm_is_given_a_context_for_its_kv_cache_and_for_nothing_else() -> None:
    exporter = Exporter("cpu")
    before = kv()
    context = exporter.context()
    with context:
        other, whole = kv(), kv()
        layers = {"a": whole[100:], "b": whole}
    region = exporter.region(layers)
    assert region.address == whole.data_ptr()
    for tensor in (before, other, kv()):
        assert not region.address <= tensor.data_ptr() < region.address + region.nbytes


def test_a_kv_cache_that_lies_elsewhere_is_named() -> None:
    message = "1,048,676 B on cpu lie in none of the 0 exportable allocations (another "
    message += "connector or allocator has made it); or set connector.share: pool"
    with pytest.raises(LayoutError, match=re.escape(message)):
        Exporter("cpu").region({"layers.0": kv()})


@pytest.mark.parametrize("place", ["__enter__", "__exit__"])
def test_a_context_that_fails_raises_nothing(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("torch says no")

    monkeypatch.setattr(TorchFunctionMode, place, fail)
    exporter = Exporter("cpu")
    with exporter.context() or nullcontext():
        layer = kv()
    said = "cannot be shared in place: RuntimeError: torch says no"
    with pytest.raises(SegmentError, match=said):
        exporter.region({"layers.0": layer})
    while torch._C._len_torch_function_stack():
        overrides._pop_mode()


def test_what_vllm_raises_within_its_context_is_vllms() -> None:
    context = Exporter("cpu").context()
    with pytest.raises(MemoryError), context:
        raise MemoryError
    assert torch._C._len_torch_function_stack() == 0


@pytest.mark.gpu
def test_a_gpus_kv_cache_is_exported() -> None:
    torch.cuda.set_device(0)
    exporter = Exporter("cuda")
    with exporter.context() or nullcontext():
        cache = kv("cuda:0")
    region = exporter.region({"layers.0": cache})
    assert region.address <= cache.data_ptr() < region.address + region.nbytes
