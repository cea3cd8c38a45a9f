"""How much of a GPU the pool may take, and what the messages say to set."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm_objects import vllm_config

from integration.around_vllm import beside_vllm
from vcache_backend.config import ByteSize, PoolConfig
from vcache_backend.vram_pool.memory_budget import LEAST, MAX_SHARE, shortfall

GIB = 1 << 30
TOTAL = 80 * GIB


@pytest.mark.parametrize(
    ("segment", "utilization", "free", "fits"),
    [
        (0, 0.99, 0, True),
        (4 * GIB, 0.90, 4 * GIB, True),
        (4 * GIB, 0.901, TOTAL, False),
        (8 * GIB, 0.92, TOTAL, False),
        (8 * GIB, None, 8 * GIB, True),
        (8 * GIB, None, 8 * GIB - 1, False),
        (77 * GIB, None, TOTAL, False),
    ],
)
def test_pool_and_utilization_share_95_percent(
    segment: int, utilization: float | None, free: int, fits: bool
) -> None:
    assert (shortfall(TOTAL, free, segment, segment, utilization) is None) == fits


@given(st.integers(GIB, 300 * GIB), st.floats(0.01, 1.0, exclude_max=True), st.floats(0.01, 1.0))
def test_doing_what_a_message_says_helps(total: int, share: float, utilization: float) -> None:
    segment = int(total * share)
    over = shortfall(total, total, segment, segment, utilization)
    if over is None:
        assert segment / total + utilization <= MAX_SHARE + 1e-6
        return
    said = over.said
    assert over.fits < segment
    assert shortfall(total, total, over.fits, over.fits, utilization) is None
    lower = re.search(r"gpu_memory_utilization to ([\d.]+) or", said)
    if lower:
        assert shortfall(total, total, segment, segment, float(lower[1])) is None
    smaller = re.search(r"pool.segment_bytes to ([\d.]+ \w+) or", said)
    if smaller:
        fitting = ByteSize.parse(smaller[1])
        assert shortfall(total, total, fitting, fitting, utilization) is None
    assert lower or smaller or "leaves nothing" in said


@pytest.mark.parametrize("gib", [39.4, 79.1, 139.8, 178.4], ids="{} GiB".format)
def test_a_pool_of_the_default_size_fits_in_part_beside_vllms_default(gib: float) -> None:
    """An A100, H100, H200 and B200: what is left is the pool's, up to 95 % of the GPU."""
    total, lent = int(gib * GIB), PoolConfig().lent
    found = shortfall(total, int(total * 0.08), lent, lent, 0.92)
    assert found is not None
    assert LEAST <= found.fits <= 0.03 * total
    # The segment of a worker before it counts, and is all there is room for.
    new = shortfall(total, int(total * 0.08) - found.fits, lent, lent - found.fits, 0.92)
    assert new is not None
    assert new.fits == 0


def test_the_workers_gpu_is_asked_in_any_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Pool` lends again from its client's thread, whose current device is the first one: here GPU
    0 is full, the worker's is not.
    """
    own = threading.current_thread()

    def info(device: int | None = None) -> tuple[int, int]:
        return (TOTAL if (torch.cuda.current_device() if device is None else device) else 0), TOTAL

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: int(threading.current_thread() is own)
    )
    monkeypatch.setattr(torch.cuda, "mem_get_info", info)
    over_budget = beside_vllm(vllm_config(cache_config__gpu_memory_utilization=0.5))
    with ThreadPoolExecutor(1) as others:
        assert others.submit(over_budget, GIB, GIB).result() is None
