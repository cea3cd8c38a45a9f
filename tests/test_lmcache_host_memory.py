"""Host memory that is used again: never while anything still refers to it."""

from __future__ import annotations

import gc
from importlib.util import find_spec

import pytest
import torch

if find_spec("lmcache") is None:
    pytest.skip("needs lmcache", allow_module_level=True)

from vcache_backend.integration.lmcache.host_memory import HostMemory

SIZE = 4096


def taken(memory: HostMemory) -> torch.Tensor:
    there = memory.take(SIZE)
    assert there is not None
    assert (there.dtype, there.shape) == (torch.uint8, (SIZE,))
    return there


def test_memory_comes_back_and_is_given_out_again() -> None:
    memory = HostMemory(4 * SIZE, 4 * SIZE)
    first = taken(memory)
    address = first.fill_(7).data_ptr()
    assert memory.out == SIZE
    del first
    assert memory.out == 0
    again = taken(memory)
    assert again.data_ptr() == address
    assert int(again[0]) == 7


@pytest.mark.parametrize(
    "refer",
    [
        lambda tensor: tensor[100:200],
        lambda tensor: tensor.view(torch.bfloat16),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: {"of": (tensor,)},
    ],
    ids=["view", "dtype", "numpy", "storage", "container"],
)
def test_whoever_refers_to_it_keeps_it(refer) -> None:
    memory = HostMemory(4 * SIZE, 4 * SIZE)
    first = taken(memory).fill_(1)
    address = first.data_ptr()
    kept = refer(first)
    del first
    gc.collect()
    assert memory.out == SIZE
    other = taken(memory).fill_(2)
    assert other.data_ptr() != address
    del kept
    gc.collect()
    assert memory.out == SIZE
    assert taken(memory).data_ptr() == address


def test_no_more_is_out_than_may_be_and_no_more_is_kept() -> None:
    memory = HostMemory(3 * SIZE, 2 * SIZE)
    out = [taken(memory) for _ in range(3)]
    assert memory.take(SIZE) is None
    assert memory.out == 3 * SIZE
    out.clear()
    assert memory.out == 0
    assert len(memory._kept) == 2


def test_another_size_is_new_memory() -> None:
    memory = HostMemory(4 * SIZE, 4 * SIZE)
    taken(memory)
    assert len(memory._kept) == 1
    large = memory.take(2 * SIZE)
    assert large is not None
    assert large.numel() == memory.out == 2 * SIZE


def test_what_cannot_be_had_is_not_counted() -> None:
    memory = HostMemory(1 << 62, SIZE)
    with pytest.raises(RuntimeError):
        memory.take(1 << 60)
    assert memory.out == 0
